"""Generate text from a trained model: a run folder, a checkpoint, or a pickled Tricycle GPT."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from tricycle import devices
from tricycle.checkpoint import load_checkpoint
from tricycle.generate import check_sampling, generate
from tricycle.models import GPT
from tricycle.tokeniser import BPETokeniser, StreamDecoder
from tricycle_cli.flags import parse, run_main
from tricycle_cli.pickles import load_pickled_model
from tricycle_cli.run import SAMPLING


@dataclass(frozen=True)
class Arguments:
    """What to generate from, and how."""

    source: tyro.conf.Positional[Path]
    """a run folder, a checkpoint (.safetensors) or a pickled model (.pkl)"""
    prompt: Annotated[str | None, tyro.conf.Positional] = None
    """text to continue; without it the model starts a new text"""
    length: int = 400
    """the most tokens to draw"""
    temperature: float = SAMPLING["temperature"]
    """divides the logits: lower is safer, 0 takes the likeliest of the tokens that are allowed"""
    top_k: int = 0
    """draw among the k likeliest tokens only; 0 for all"""
    top_p: float = 1.0
    """draw among the fewest tokens whose probabilities reach this sum"""
    min_p: float = SAMPLING["min_p"]
    """draw among the tokens at least this many times as probable as the likeliest"""
    no_repeat_ngram_size: int = SAMPLING["no_repeat_ngram_size"]
    """never write so many tokens a second time in the same order, for small models run in circles; 0 lets them be"""
    seed: int | None = None
    """makes the text repeatable"""
    stop: bool = True
    """end at the end-of-text token"""
    tokeniser: Path | None = None
    """a tokeniser file, for a model that carries none"""
    softmax: str | None = None
    """let attention weigh keys in another way than the model was trained with: softmax, softmax1, adaptive, blocks"""
    device: Literal["auto", "cpu", "gpu"] = "auto"
    """where to compute; "auto" takes a GPU if there is one"""


def main() -> None:
    arguments = parse(Arguments, description=__doc__ or "")
    names = ("temperature", "top_k", "top_p", "min_p", "no_repeat_ngram_size")
    sampling = {name: getattr(arguments, name) for name in names}
    check_sampling(**sampling)
    model, tokeniser = load(arguments.source, arguments.tokeniser)
    if tokeniser.n_vocab > model.config.vocab_size:
        known = model.config.vocab_size
        raise ValueError(f"expected a tokeniser of at most {known} tokens, as the model knows, got {tokeniser.n_vocab}")
    if arguments.softmax is not None:
        model.use_softmax(arguments.softmax, model.config.softmax_blocks)
    problem = devices.gpu_problem() if arguments.device != "cpu" else "not asked for"
    if arguments.device == "gpu" and problem:
        raise RuntimeError(f"--device gpu: no GPU can be used: {problem}")
    if problem is None:
        model.to_gpu()
    else:  # to make 16 bits of all weights for each token would cost more than it saves
        model.use_precision("float32")
    if arguments.prompt is None:
        ids = [tokeniser.end_of_text]
    else:
        ids = [int(token) for token in tokeniser.encode(arguments.prompt)]
        if not ids:
            raise ValueError("expected a prompt of at least one character; leave it out to start a new text")
    tokens = generate(
        model,
        ids,
        arguments.length,
        **sampling,
        seed=arguments.seed,
        stop_token=tokeniser.end_of_text if arguments.stop else None,
        n_vocab=tokeniser.n_vocab,
    )
    stream(arguments.prompt or "", tokens, tokeniser)


def load(source: Path, tokeniser_path: Path | None) -> tuple[GPT, Any]:
    """The model and its tokeniser."""
    tokeniser: Any = None
    if source.is_dir():
        found = [path for name in ("best", "last") if (path := source / f"{name}.safetensors").exists()]
        if not found:
            raise FileNotFoundError(f"{source}: expected a run folder with best.safetensors or last.safetensors")
        source = found[0]
    if source.suffix in (".pkl", ".pickle"):
        model = load_pickled_model(source)
    else:
        checkpoint = load_checkpoint(source)
        model, tokeniser = checkpoint.model(), checkpoint.tokeniser()
    if tokeniser_path is not None:
        tokeniser = BPETokeniser.load(tokeniser_path)
    if tokeniser is None:  # a bare pickle, as the toy Shakespeare script leaves one
        from tricycle_datasets.shakespeare import Shakespeare

        tokeniser = Shakespeare(model.config.vocab_size).tokeniser
    return model, tokeniser


def stream(prompt: str, tokens: Any, tokeniser: BPETokeniser) -> None:
    """Print text as it is drawn, whole characters only."""
    sys.stdout.reconfigure(encoding="utf-8", errors="replace")  # type: ignore[union-attr]
    sys.stdout.write(prompt)
    decoder = StreamDecoder(tokeniser)
    try:
        for token in tokens:
            if token != tokeniser.end_of_text:
                sys.stdout.write(decoder.push([token]))
                sys.stdout.flush()
        sys.stdout.write(decoder.flush() + "\n")
        sys.stdout.flush()
    except BrokenPipeError:  # whoever read along, as `head` does, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    run_main(main)
