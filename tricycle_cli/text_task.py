"""The base class of tasks that train on text: held-out loss in bits per byte, samples, and the final report.

The final report compares the model with gzip, bz2 and xz.
"""

from __future__ import annotations

import bz2
import lzma
import shlex
import zlib
from dataclasses import replace
from typing import Any

from tricycle.checkpoint import load_checkpoint
from tricycle.configs import GPTConfig
from tricycle.decoding.encoder_decoder import generate_target
from tricycle.evaluation import HeldOut, evaluate
from tricycle.generate import generate
from tricycle.system.files import append_lines
from tricycle.training_state import TrainingState
from tricycle_cli.distributed import on_rank_zero
from tricycle_cli.models import SAMPLING
from tricycle_cli.run import Run, read_metrics
from tricycle_cli.task import Task, command_name
from tricycle_lab.plot import plot_losses

SAMPLE_TOKENS, FINAL_SAMPLE_TOKENS = 160, 250
COMPRESSION_CHUNK = 2**18  # bytes
CLOSING_SECONDS = 10  # of the final report, besides its evaluation
# The stride of held-out windows is half their length, so that each token has at least half a window of context.
OVERLAP = 2


class TextTask(Task):
    """A task whose held-out data is text.

    Attributes:
        held_out: the tokens of the held-out text; the first token is not predicted.
        held_out_bytes: the held-out text.
        prompts: the prompts of the samples in the final report.
    """

    held_out: HeldOut
    held_out_bytes = b""
    prompts: tuple[str, ...] = ("",)

    def measure(self, state: TrainingState) -> dict[str, float]:
        """Evaluate `eval_batches` fixed batches of held-out text; return "held_out_loss" (nats) and "bits_per_byte"."""
        loss, _ = self._evaluate(state, state.model, state.config.eval_batches)
        return {"held_out_loss": loss, "bits_per_byte": self.held_out.bits_per_byte(loss)}

    def _evaluate(self, state: TrainingState, model: Any, n_batches: int = 0) -> tuple[float, int]:
        """Return (nats per token, number of tokens) of held-out windows, which overlap and are divided among ranks."""
        config = state.config
        stride = max(1, config.context_window // OVERLAP)
        tokens, size, n_context = self.held_out.tokens, config.batch_size, self.held_out.n_context
        return evaluate(model, tokens, size, n_batches, stride, n_context=n_context, processes=state.processes)

    def closing_seconds(self, seconds_per_batch: float, config: GPTConfig) -> float:
        """Estimate the seconds of the final report, from the seconds of a forward pass of one batch."""
        n_batches = OVERLAP * len(self.held_out.tokens) / (config.batch_size * config.context_window)
        return n_batches * seconds_per_batch + CLOSING_SECONDS

    def sample(self, state: TrainingState, run: Run) -> None:
        """Print a sample and append it to samples.txt."""
        write_sample(state, run)

    def title(self, state: TrainingState) -> str:
        """Return the title of the loss curve, "N parameters"."""
        return f"{state.model.n_parameters:,} parameters"

    def report(self, state: TrainingState, run: Run) -> None:
        """Evaluate the best checkpoint, put its model into `state`, plot loss.png, print metrics, samples, command."""
        config = state.config
        checkpoint = on_rank_zero(run.processes, lambda: load_checkpoint(run.best))
        best_step = checkpoint.about["progress"]["step"]
        model = checkpoint.model()
        if next(state.model.parameters()).on_gpu:
            model.to_gpu()
        print("evaluating the best checkpoint on all held-out text ...")
        loss, n_tokens = self._evaluate(state, model)
        if not run.processes.is_rank_zero:
            return
        bits = self.held_out.bits_per_byte(loss)
        run.record(step=state.step, final_loss=loss, final_bits_per_byte=bits, best_step=best_step)
        run.flush()
        others = compressor_bits_per_byte(self.held_out_bytes)
        metrics, bits_per_nat, title = read_metrics(run.metrics), self.held_out.bits_per_byte(1.0), self.title(state)
        path = run.folder / "loss.png"
        picture = run.write(lambda: plot_losses(metrics, path, bits_per_nat, others, title))
        state.model, state.step = model, best_step  # the samples come from the best checkpoint
        for prompt in self.prompts:
            write_sample(state, run, FINAL_SAMPLE_TOKENS, prompt)
        minutes = f"{state.seconds / 60:.1f} minutes of training"
        print(f"\n{state.total_steps} steps, {minutes}; best checkpoint: step {best_step}")
        context = f"context {config.context_window - config.context_window // OVERLAP} to {config.context_window - 1}"
        sizes = f"{n_tokens:,} tokens, {len(self.held_out_bytes):,} bytes, {context}"
        print(f"held-out loss: {loss:.4f} nats/token = {bits:.3f} bits/byte ({sizes})")
        print("bits/byte of the same held-out text, beside compression programs:")
        for name, value in sorted({**others, "this model": bits}.items(), key=lambda item: -item[1]):
            print(f"  {name:<12}{value:6.3f}")
        print(f"loss curve: {picture}")
        command = command_name("generate", self.command)
        print(f"generate text with the model:\n  {command} {shlex.quote(run.folder.as_posix())}")


def write_sample(state: TrainingState, run: Run, n_tokens: int = SAMPLE_TOKENS, prompt: str = "") -> str:
    """Generate text on rank zero after `prompt`, print it, append it to samples.txt, and return it; else return ""."""
    tokeniser: Any = run.tokeniser
    if not run.processes.is_rank_zero:
        return ""
    end = tokeniser.end_of_text
    ids = list(tokeniser.encode(prompt))[-state.config.context_window :] or [end]
    seed = (state.config.seed, state.step)
    sampling = replace(SAMPLING, seed=seed, stop_tokens=end, n_vocab=tokeniser.n_vocab)
    drawn = []
    model: Any = state.model
    if model.config.is_decoder:
        tokens = generate(model, ids, n_tokens, sampling)
    else:  # the text and its continuation have the lengths of training
        n_source = model.config.source_tokens
        tokens = generate_target(model, ids[-n_source:], min(n_tokens, n_source), sampling)
    for token in tokens:
        run.processes.answer_pings()  # the other ranks wait for this rank
        drawn += [token] if token != end else []
    text = prompt + tokeniser.decode(drawn)
    title = f"--- sample at step {state.step}"
    run.write(lambda: append_lines(run.samples, f"{title}\n{text}\n"))
    run.print_line(f"{title}\n{text}\n---")
    return text


def compressor_bits_per_byte(content: bytes) -> dict[str, float]:
    """Return the bits per byte of `content` compressed at the highest level, by "gzip -9", "bz2 -9" and "xz -9"."""
    # A dictionary larger than the text changes no bit, and costs ten times its size in memory.
    dictionary = min(max(len(content), 2**12), 2**26)
    xz = {"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": dictionary}
    compressors: dict[str, Any] = {
        "gzip -9": zlib.compressobj(9, wbits=16 + zlib.MAX_WBITS),
        "bz2 -9": bz2.BZ2Compressor(9),
        "xz -9": lzma.LZMACompressor(filters=[xz]),
    }
    sizes = dict.fromkeys(compressors, 0)
    for name, compressor in compressors.items():
        for start in range(0, len(content), COMPRESSION_CHUNK):  # a signal can interrupt between two chunks
            sizes[name] += len(compressor.compress(content[start : start + COMPRESSION_CHUNK]))
        sizes[name] += len(compressor.flush())
    return {name: 8 * size / max(1, len(content)) for name, size in sizes.items()}
