"""Train the same recipe in PyTorch, on the same tokens for the same time, to separate engine and recipe.

    python -m experiments.ten_minutes.pytorch_baseline                    the recipe of `train_smol_gpt.py`
    python -m experiments.ten_minutes.pytorch_baseline --recipe gpt2      GPT-2's model and AdamW, as large
    python -m experiments.ten_minutes.pytorch_baseline --compile --precision bfloat16

First weights, batches, schedule and the final measurement are those of a run of `train_smol_gpt.py`. As there, the
minutes are those of the whole program, with the training of the tokeniser and the measurement at the end. Needs torch.
"""

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tqdm import tqdm

from experiments.shared.program import check_minimum
from experiments.shared.results import save
from experiments.shared.texts import held_out
from experiments.ten_minutes.ablations import FIELDS, PLAIN
from experiments.ten_minutes.data import load
from experiments.ten_minutes.study import check_recipe, preset
from experiments.ten_minutes.time_budget import Budget
from tricycle.configs import GPTConfig
from tricycle.evaluation import evaluate
from tricycle.optimiser_rules.muon import is_hidden_matrix
from tricycle.optimisers import decays
from tricycle.tensor import Tensor, no_grad, to_tensor
from tricycle.training_state import TrainingState, new_state
from tricycle_cli.flags import parse, run_main
from tricycle_cli.text_task import OVERLAP, compressor_bits_per_byte

LAST_SECONDS = 10  # kept for what follows the last update, besides the measurement, as in `tricycle_cli.text_task`


@dataclass(frozen=True)
class Settings:
    """The command-line settings of the baseline; the recipe's flags start from its values."""

    recipe: Literal["laptop", "gpt2"] = "laptop"
    """laptop: the preset of train_smol_gpt.py; gpt2: the GPT-2 architecture with AdamW"""
    compile: bool = False  # let torch.compile fuse the model; its time counts
    threads: int = 2  # of PyTorch
    data: Literal["python", "shakespeare", "text"] = "python"
    """the text: python (the standard library), shakespeare, or text with --files"""
    files: tuple[str, ...] = ()  # text files or folders of them, for --data text
    part: Literal["held-out", "validation"] = "held-out"
    """the text to score: held-out, as train_smol_gpt.py does, or validation, for model selection"""
    output: Path = Path("runs/ten_minutes")  # the folder in which the result is left, as pytorch-....json
    config: GPTConfig = field(default_factory=GPTConfig)

    @property
    def file(self) -> Path:
        """Return the path of the result file, pytorch-*.json in `output`, named by the settings and the seed."""
        compiled = "compiled" if self.compile else "eager"
        words = self.recipe, compiled, self.config.precision, self.data, self.part, str(self.config.seed)
        return self.output / f"pytorch-{'-'.join(words)}.json"


def main() -> int:
    """Train and score a PyTorch baseline by sys.argv, save and print the result; return 0; ImportError if missing."""
    started = time.perf_counter()
    config = preset()
    start = Settings(config=config)
    if {"--recipe=gpt2", "gpt2"} & set(sys.argv[1:]):  # the recipe's flags start from the values of --recipe
        start = Settings(recipe="gpt2", config=comparable_fields(config))
    settings = parse(Settings, start, description=__doc__ or "")
    check(settings)
    try:
        import torch
    except ImportError:
        raise ImportError("the baseline needs PyTorch: pip install torch") from None
    torch.set_num_threads(settings.threads)
    result = measure(settings, started)
    save(settings.file, settings, torch=torch.__version__, result=result)
    for name, bits in sorted({**result["compressed"], "PyTorch": result["bits"]}.items(), key=lambda item: -item[1]):
        print(f"  {name:<12}{bits:6.3f}")
    speed = f"{result['steps']} steps, {result['tokens_per_second']:,} tokens per second"
    print(f"{speed}, {result['parameters']:,} parameters, {result['minutes']:.2f} minutes in all")
    print(settings.file)
    return 0


def comparable_fields(config: GPTConfig) -> GPTConfig:
    """Return a copy of the config with GPT-2's architecture and AdamW (the fields of PLAIN), same minutes."""
    return replace(config, **{name: value for name, value in PLAIN.items() if name in FIELDS})


def check(settings: Settings) -> None:
    """Raise ValueError for `threads` < 1, an invalid recipe, or a precision but float32 and bfloat16."""
    check_minimum(settings, threads=1)
    check_recipe(settings)
    if settings.config.precision not in ("float32", "bfloat16"):
        raise ValueError(f"expected --precision float32 or bfloat16, got {settings.config.precision}")


# -------------------------------------------------------------------- training
class Trainer:
    """The training of a PyTorch model, with the initial weights, data and schedule of a Tricycle training.

    Args:
        state: of the Tricycle training, whose model is not trained.
    """

    def __init__(self, state: TrainingState, compiled: bool = False) -> None:
        import torch

        from experiments.ten_minutes.torch_gpt import Muon, TorchGPT

        self.state, self.config, config = state, state.config, state.config
        parameters = dict(state.model.named_parameters())
        self.model = TorchGPT(config)
        self.model.load_state_dict({name: torch.tensor(p.array) for name, p in parameters.items()})
        self.run: Any = torch.compile(self.model) if compiled else self.model
        torch_parameters = dict(self.model.named_parameters())
        matrices = [name for name, p in parameters.items() if config.optimiser == "muon" and is_hidden_matrix(p)]
        groups = [
            {
                "params": [
                    torch_parameters[name]
                    for name in parameters
                    if name not in matrices and decays(parameters[name]) == decayed
                ],
                "weight_decay": decay,
            }
            for decayed, decay in ((True, config.weight_decay), (False, 0.0))
        ]
        betas = (config.beta1, config.beta2)
        self.adamw = torch.optim.AdamW([group for group in groups if group["params"]], 0.0, betas, 1e-8, fused=True)
        low = config.precision == "bfloat16"
        chosen = [torch_parameters[name] for name in matrices]
        self.muon = Muon(chosen, 0.0, config.weight_decay, low=low) if chosen else None

    def autocast(self) -> AbstractContextManager:
        """Return a context manager: bfloat16 autocast on the CPU, or none if `precision` is float32."""
        import torch

        if self.config.precision == "bfloat16":
            return torch.autocast("cpu", torch.bfloat16)
        return nullcontext()

    def loss(self, inputs: np.ndarray, outputs: np.ndarray) -> Any:
        """Return the mean loss in nats per token, a torch scalar, of int64 ids and labels (B, T)."""
        import torch

        with self.autocast():
            logits = self.run(torch.from_numpy(inputs))
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), torch.from_numpy(outputs).flatten())

    def step(self) -> float:
        """Make one update from the next `accumulation_steps` batches; return their mean loss in nats per token."""
        import torch

        config, total = self.config, 0.0
        for _ in range(config.accumulation_steps):
            inputs, outputs = (np.asarray(ids.array, np.int64) for ids in next(self.state.dataset))
            loss = self.loss(inputs, outputs) / config.accumulation_steps
            loss.backward()
            total += loss.item()
        if config.max_gradient_norm:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), config.max_gradient_norm)
        self.state.step += 1
        rate = self.state.learning_rate(self.state.step)
        for group in self.adamw.param_groups:
            group["lr"] = rate
        self.adamw.step()
        if self.muon is not None:
            for group in self.muon.param_groups:
                group["lr"], group["decay_rate"] = rate * config.matrix_rate, rate
            self.muon.step()
        self.model.zero_grad()
        return total


class EvaluationAdapter:
    """A wrapper with which `tricycle.evaluation.evaluate` takes a PyTorch model."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.config = trainer, trainer.config

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Within the block, use evaluation mode, autocast and no gradients; then training mode."""
        import torch

        self.trainer.model.eval()
        with torch.no_grad(), no_grad(), self.trainer.autocast():
            yield
        self.trainer.model.train()

    def place(self, ids: Any) -> Tensor:
        """Return token ids as an integer Tensor."""
        return to_tensor(ids, dtype=int)

    def __call__(self, tokens: Tensor) -> Tensor:
        """Return the float32 logits (B, T, V) of tokens (B, T) as a Tensor."""
        import torch

        logits = self.trainer.model(torch.from_numpy(np.asarray(tokens.array, np.int64)))
        return to_tensor(logits.float().numpy())

    def loss(self, tokens: Tensor, labels: Tensor, loss_fn: Callable[..., Tensor]) -> Tensor:
        """Return loss_fn(labels, logits of tokens)."""
        return loss_fn(labels, self(tokens))


def measure(settings: Settings, started: float) -> dict[str, Any]:
    """Train until `config.minutes` after `started` (perf_counter), scoring included; return the results.

    Returns:
        "bits" (per byte of the scored text), "loss", "steps", "tokens_per_second", "parameters", "minutes" (of
        everything), "training_minutes", and "compressed": bits per byte of standard compressors.
    """
    config = settings.config
    corpus = load(settings.data, settings.part, config.vocab_size, settings.files)
    text = held_out(corpus)
    state = new_state(config, corpus.train)
    state.total_steps = 0
    trainer = Trainer(state, settings.compile)
    n_tokens = config.batch_size * config.context_window * config.accumulation_steps
    # a forward pass takes about a third of an update
    reserve = OVERLAP * len(text.tokens) / n_tokens / 3
    begun = time.perf_counter()
    last = min(LAST_SECONDS, 6 * config.minutes)
    budget = Budget(60 * config.minutes - last, time.perf_counter, begun - started, reserve)
    with tqdm(unit="step", dynamic_ncols=True, mininterval=0.5) as bar:
        while state.step != state.total_steps or not state.step:
            loss = trainer.step()
            bar.total = state.total_steps = budget.total_steps()
            bar.set_postfix_str(f"loss {loss:.3f}", refresh=False)
            bar.update()
    trained = time.perf_counter() - begun
    scored: Any = EvaluationAdapter(trainer)
    loss, _ = evaluate(scored, text.tokens, config.batch_size, stride=max(1, config.context_window // OVERLAP))
    return {
        "bits": text.bits_per_byte(loss),
        "loss": loss,
        "steps": state.step,
        "tokens_per_second": round(n_tokens * state.step / trained),
        "parameters": state.model.n_parameters,
        "minutes": (time.perf_counter() - started) / 60,
        "training_minutes": trained / 60,
        "compressed": compressor_bits_per_byte(corpus.validation_bytes),
    }


if __name__ == "__main__":
    run_main(main)
