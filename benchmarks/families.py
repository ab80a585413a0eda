"""Forward passes of model families compared with transformers (`python -m benchmarks.families --threads 2`).

Models of transformers with random weights are written to a folder, from which both sides load them in float32. An
encoder processes a batch of texts, a decoder a prompt, whose last logits and KV caches it returns. Each side runs in a
separate process for each family; the sides are interleaved.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.interleave import Schedule, add_comparison_flags
from benchmarks.workers import print_speed_ups, serve, time_cases

WIDTH = {"hidden_size": 768, "num_attention_heads": 12}


class Family(NamedTuple):
    """A model: its classes in transformers, the options of its config, and the shape of its token ids (B, T)."""

    model: str
    config: str
    options: dict[str, Any]
    shape: tuple[int, int]


FAMILIES = {
    "bert": Family("BertModel", "BertConfig", {"num_hidden_layers": 6}, (16, 128)),
    "modernbert": Family(
        "ModernBertModel",
        "ModernBertConfig",
        {**WIDTH, "num_hidden_layers": 6, "intermediate_size": 1152},
        (16, 128),
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM",
        "GPTNeoXConfig",
        {**WIDTH, "num_hidden_layers": 12, "intermediate_size": 3072},
        (1, 256),
    ),
    "gpt_oss": Family(
        "GptOssForCausalLM",
        "GptOssConfig",
        {
            **{"hidden_size": 512, "intermediate_size": 512, "num_hidden_layers": 8, "num_attention_heads": 8},
            **{"num_key_value_heads": 2, "head_dim": 64, "num_local_experts": 8, "num_experts_per_tok": 2},
            **{"vocab_size": 32_000, "sliding_window": 128},
        },
        (1, 256),
    ),
}

Step = Callable[[], np.ndarray]  # returns hidden states (B, T, C) of an encoder, or the last logits (B, 1, V)


def token_ids(shape: tuple[int, int]) -> np.ndarray:
    """Return random ids (B, T) without those of special tokens."""
    return np.random.default_rng(0).integers(1000, 2000, shape)


def write_model(family: Family, folder: Path) -> None:
    """Write a model with random weights, seed 0, to a folder in Hugging Face format."""
    import torch
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, family.config)(**family.options)
    getattr(transformers, family.model)(config).save_pretrained(folder)


def tricycle_step(family: Family, folder: Path) -> Step:
    """Return a function that makes a forward pass with Tricycle."""
    from tricycle.pretrained import load
    from tricycle.tensor import no_grad

    model, ids = load(folder, weights="float32").model.eval(), token_ids(family.shape)
    is_decoder = hasattr(model, "new_caches")

    def step() -> np.ndarray:
        with no_grad():
            result: np.ndarray = model(ids, *([model.new_caches(), True] if is_decoder else [])).numpy()
            return result

    return step


def torch_step(family: Family, folder: Path) -> Step:
    """Return a function that makes a forward pass with transformers."""
    import torch
    import transformers
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    model = getattr(transformers, family.model).from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.from_numpy(token_ids(family.shape))
    is_decoder = family.model.endswith("ForCausalLM")

    def step() -> np.ndarray:
        with torch.no_grad():
            options: dict[str, Any] = {"use_cache": True, "logits_to_keep": 1} if is_decoder else {}
            output = model(input_ids=ids, attention_mask=torch.ones_like(ids), **options)
            result: np.ndarray = (output.logits if is_decoder else output.last_hidden_state).numpy()
            return result

    return step


SIDES: dict[str, Callable[[Family, Path], Step]] = {"tricycle": tricycle_step, "torch": torch_step}


def main() -> None:
    """Parse sys.argv, and print each family's milliseconds by side, and the speed-up; with --serve, run as a worker."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", choices=FAMILIES, nargs="+", default=list(FAMILIES), help="models to measure")
    add_comparison_flags(parser)
    parser.add_argument("--serve", nargs=3, metavar=("SIDE", "FAMILY", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        side, name, place = arguments.serve
        serve(side, SIDES[side](FAMILIES[name], Path(place)))
        return
    names = ["tricycle"] + ["torch"] * (arguments.peer == "torch")
    schedule = Schedule.from_arguments(arguments)
    with tempfile.TemporaryDirectory() as place:
        cases = [(name, str(Path(place) / name)) for name in arguments.families]
        for name, folder in cases:
            write_model(FAMILIES[name], Path(folder))
        results = time_cases("benchmarks.families", names, cases, arguments.threads, schedule)
    print(f"forward pass in float32: medians of {schedule}")
    print_speed_ups(arguments.families, [times for times, _ in results], "transformers")


if __name__ == "__main__":
    main()
