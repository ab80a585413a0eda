"""Speed of generation compared with other libraries (`python -m benchmarks.generation --model smollm2 --threads 2`).

    --model gpt2                             GPT-2's shape, with random weights; also qwen3 (0.6B), gemma3 (270M)
    --prompts 8000 --new 64 --cache float16  a long context, whose KV cache is read for each token, too

Decoding reads every weight once per token, so memory bandwidth bounds its speed. Peak is the measured bandwidth of a
large matrix-vector product divided by the bytes of the weights; "peak with KV" adds the bytes of the KV cache of the
first prompt. All sides have the same weights and prompts and decode greedily. They are interleaved; the table has
medians over the rounds.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.heading import date_and_processor
from benchmarks.interleave import PAUSE_SECONDS, positive_int
from benchmarks.shapes import SHAPES
from benchmarks.workers import Worker
from tricycle.configs.model import ModelConfig
from tricycle.configs.presets import model_fields
from tricycle.generate import common_prefix_length
from tricycle.models import GPT
from tricycle.tokeniser import BPETokeniser

# By the type of a GGUF file, bits per weight without the exceptions of its mixture.
GGUF_BITS = {"Q8_0": 8.5, "Q6_K": 6.6, "Q4_K_M": 4.8, "Q4_0": 4.5}


class Side(NamedTuple):
    """A library with a dtype of its weights.

    Attributes:
        library: a key of `benchmarks.generation_workers.SIDES`.
        weights: dtype or GGUF type.
        bits: per weight.
    """

    name: str
    library: str
    weights: str
    bits: float


SIDES = [
    Side("tricycle float32", "tricycle", "float32", 32),
    Side("tricycle bfloat16", "tricycle", "bfloat16", 16),
    Side("tricycle int8", "tricycle", "int8", 8),
    *(Side(f"tricycle {name}", "tricycle", name, bits) for name, bits in GGUF_BITS.items()),
    Side("transformers float32", "transformers", "float32", 32),
    Side("transformers bfloat16", "transformers", "bfloat16", 16),
    Side("llama.cpp F32", "llama.cpp", "F32", 32),
    Side("llama.cpp F16", "llama.cpp", "F16", 16),
    *(Side(f"llama.cpp {name}", "llama.cpp", name, bits) for name, bits in GGUF_BITS.items()),
]
MODULE = "benchmarks.generation_workers"
QWEN3_AND_GEMMA3: dict[str, Any] = {  # fields of both configs
    "context_window": 4096,
    "norm": "rms_norm",
    "norm_eps": 1e-6,
    "qk_norm": True,
    "qk_norm_gain": True,
    "positions": "rotary",
    "rotary_base": 1_000_000,
    "bias": False,
}
RANDOM_MODELS = {  # by name, the shapes of published models
    "gpt2": ModelConfig(),
    "qwen3": ModelConfig(
        vocab_size=151_936,
        embedding_dim=1024,
        n_heads=16,
        n_layers=28,
        n_key_heads=8,
        head_size=128,
        hidden_size=3072,
        activation="swiglu",
        **QWEN3_AND_GEMMA3,
    ),
    "gemma3": ModelConfig(
        vocab_size=262_144,
        embedding_dim=640,
        n_heads=4,
        n_layers=18,
        n_key_heads=1,
        head_size=256,
        hidden_size=2048,
        gated=True,
        norm_unit_offset=True,
        norm_placement="both",
        window=512,
        full_layers=(5, 11, 17),
        rotary_local_base=10_000,
        embedding_scale=640**0.5,
        **QWEN3_AND_GEMMA3,
    ),
}


def load_model(name: str) -> tuple[GPT, Any]:
    """Return (model, tokenizer or None): random weights for RANDOM_MODELS and SHAPES, else a pretrained model.

    Models with random weights have a byte tokenizer, because llama.cpp requires one, or None if the vocabulary is too
    small.
    """
    config = RANDOM_MODELS.get(name)
    if config is None and name in SHAPES:
        config = ModelConfig(**model_fields(asdict(SHAPES[name])))
    if config is not None:
        byte_tokeniser = BPETokeniser.from_tokens([*(bytes([value]) for value in range(256)), b"th"], split="gpt2")
        return GPT(config), byte_tokeniser if byte_tokeniser.n_vocab <= config.vocab_size else None
    from tricycle.pretrained import load

    pretrained = load(name)
    return pretrained.model, pretrained.tokeniser


def installed_sides(arguments: argparse.Namespace) -> list[Side]:
    """Return the SIDES named in `arguments.sides` (None or empty: all) whose libraries are installed."""
    installed = {"tricycle": True, "transformers": importlib.util.find_spec("transformers") is not None}
    code = "import llama_cpp"
    installed["llama.cpp"] = not subprocess.run([arguments.llama_python, "-c", code], capture_output=True).returncode
    requested = arguments.sides or [side.name for side in SIDES]
    return [side for side in SIDES if side.name in requested and installed[side.library]]


def export_model(model: GPT, tokeniser: Any, folder: Path, sides: list[Side]) -> list[Side]:
    """Write the model to `folder` in each side's format; return the supported sides, print why others are not."""
    from tricycle.pretrained.export import export_folder
    from tricycle.pretrained.gguf_file_types import FILE_TYPES
    from tricycle.pretrained.gguf_writer import export_gguf

    export_folder(model, tokeniser, folder / "hf")
    (folder / "context").write_text(str(model.config.context_window), encoding="utf-8")
    supported = []
    for side in sides:
        path = folder / f"{side.weights}.gguf"
        if side.weights in FILE_TYPES and not path.exists():
            try:
                if tokeniser is None:
                    raise ValueError("expected a model with a tokenizer")
                export_gguf(model, tokeniser, path, side.weights)
            except ValueError as error:
                print(f"{side.name} is omitted: {error}")
                continue
        supported.append(side)
    return supported


def measure_sides(
    workers: dict[str, Worker], bandwidth_worker: Worker, arguments: argparse.Namespace
) -> dict[str, Any]:
    """Return a dict, without a warm-up round: lists of seconds per prefill and new token, bytes/s; and the tokens.

    Returns:
        lists over the rounds: the seconds of each prefill ("NAME N_PROMPT") and of a new token ("NAME token"), and
        "bandwidth" in bytes per second; and the generated tokens ("NAME tokens").
    """
    measured: dict[str, Any] = defaultdict(list)
    for round_index in range(arguments.rounds + 1):  # the first round is a warm-up
        for name, worker in workers.items():
            for n_prompt in arguments.prompts:
                time.sleep(PAUSE_SECONDS)
                n_new = arguments.new if n_prompt == arguments.prompts[0] else 0
                answer = worker.request(f"generate {n_prompt} {n_new}")
                if round_index:
                    measured[f"{name} {n_prompt}"].append(answer["prompt"])
                    if n_new:
                        measured[f"{name} token"].append(answer["token"])
                        measured[f"{name} tokens"] = answer["tokens"]
        time.sleep(PAUSE_SECONDS)
        measured["bandwidth"].append(bandwidth_worker.request("bandwidth"))
    return measured


def cache_bytes_per_token(model: GPT) -> int:
    """Return the bytes of the float32 keys and values of one token in all layers."""
    config = model.config
    return 2 * 4 * config.n_layers * config.key_heads * config.channels_per_head


def print_table(
    measured: dict[str, Any], sides: list[Side], memory: dict[str, Any], sizes: tuple[int, int], options: Any
) -> None:
    """Print the bandwidth and a row per side: tokens/s, speed-ups, fraction of peak, equal tokens and MB.

    Columns: tokens/s of each prefill and of decoding after the first; speed-up of the first side over the row; speed-up
    of Tricycle with weights of the same size; peak tokens/s, fraction of peak, and peak with the KV cache; number of
    tokens equal to the first side's; MB after loading the model, and peak MB.

    Args:
        sizes: the number of weights that a token reads, and the bytes of a token's keys and values in float32.
    """
    n_weights, kv_bytes_per_token = sizes
    bandwidth = statistics.median(measured["bandwidth"])
    spread = f"{min(measured['bandwidth']) / 1e9:.1f} to {max(measured['bandwidth']) / 1e9:.1f}"
    print(f"bandwidth {bandwidth / 1e9:.1f} GB/s ({spread}), {n_weights * 4 / 1e6:,.0f} MB of float32 weights")
    names = ("decode", 8), ("speed-up", 10), ("same size", 11), ("peak", 7), ("of peak", 9), ("peak with KV", 14)
    columns = [*((f"prompt {n}", 13) for n in options.prompts), *names, ("equal", 7), ("MB", 8), ("peak MB", 9)]
    print(f"{'tokens/s':<23}" + "".join(f"{name:>{width}}" for name, width in columns))
    token_seconds = {name: statistics.median(measured[f"{name} token"]) for name, *_ in sides}
    first = sides[0].name
    tricycle_sides = [side for side in sides if side.library == "tricycle"] or sides[:1]
    for name, _, _, bits in sides:
        seconds = token_seconds[name]
        weight_bytes = n_weights * bits / 8
        cache_factor = 0.5 if has_16_bit_cache(name, options.cache) else 1
        kv_bytes = (options.prompts[0] + options.new / 2) * kv_bytes_per_token * cache_factor
        nearest = min(tricycle_sides, key=lambda side: abs(side.bits - bits))
        same_size = seconds / token_seconds[nearest.name]
        n_equal = common_prefix_length(measured[f"{first} tokens"], measured[f"{name} tokens"])
        values = [f"{n / statistics.median(measured[f'{name} {n}']):,.0f}" for n in options.prompts]
        values += [f"{1 / seconds:.1f}", f"{seconds / token_seconds[first]:.2f}", f"{same_size:.2f}"]
        values += [f"{bandwidth / weight_bytes:.0f}", f"{weight_bytes / bandwidth / seconds:.0%}"]
        values += [f"{bandwidth / (weight_bytes + kv_bytes):.0f}", f"{n_equal}"]
        values += [f"{megabytes:,.0f}" for megabytes in memory[name]]
        print(f"{name:<23}" + "".join(f"{value:>{width}}" for value, (_, width) in zip(values, columns)))


def has_16_bit_cache(name: str, cache: str) -> bool:
    """Return whether a side's KV cache has 16 bits per number; `cache` is Tricycle's --cache, else ignored."""
    if name.startswith("tricycle"):
        return cache in ("float16", "bfloat16")
    return name.startswith("llama.cpp") or name.endswith("bfloat16")


def main() -> None:
    """Parse sys.argv, measure all sides, and print a table of tokens/s, fraction of peak, equal tokens and MB."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="name for `pretrained.load`, or of a shape (random)")
    parser.add_argument("--sides", nargs="*", choices=[side.name for side in SIDES], help="default: all installed")
    parser.add_argument("--threads", type=positive_int, default=os.cpu_count() or 1, help="threads of each side")
    parser.add_argument(
        "--prompts", type=int, nargs="+", default=[256, 2048], help="prompt lengths; decoding follows the first"
    )
    parser.add_argument("--new", type=int, default=96, help="number of new tokens")
    parser.add_argument("--cache", default="auto", choices=["auto", "float16", "bfloat16"], help="KV cache of Tricycle")
    parser.add_argument("--rounds", "--turns", type=positive_int, default=3, help="rounds of each side")
    parser.add_argument("--llama-python", default=sys.executable, help="interpreter with llama-cpp-python")
    arguments = parser.parse_args()
    model, tokeniser = load_model(arguments.model)
    window, n_vocab = model.config.context_window, model.config.vocab_size
    arguments.prompts = [n for n in arguments.prompts if n + arguments.new <= window] or [max(1, window // 2)]
    arguments.new = min(arguments.new, window - arguments.prompts[0])
    n_weights = model.n_parameters - (0 if model.position_embedding is None else model.position_embedding.weights.size)
    n_weights -= 0 if model.config.tied else model.token_embedding.weights.size  # a token reads one row of a table
    with tempfile.TemporaryDirectory() as folder:
        sides = export_model(model, tokeniser, Path(folder), installed_sides(arguments))
        sizes = n_weights, cache_bytes_per_token(model)
        del model
        bandwidth_arguments = "bandwidth", "-", folder, str(n_vocab), "auto"
        bandwidth_worker = Worker("bandwidth", arguments.threads, MODULE, *bandwidth_arguments)
        workers, memory = {}, {}
        for name, library, weights, _ in sides:
            python = arguments.llama_python if library == "llama.cpp" else sys.executable
            worker_arguments = library, weights, folder, str(n_vocab), arguments.cache
            workers[name] = Worker(name, arguments.threads, MODULE, *worker_arguments, python=python)
            memory[name] = [workers[name].request("memory")]  # after loading the model
        measured = measure_sides(workers, bandwidth_worker, arguments)
        for name, worker in workers.items():
            memory[name].append(worker.request("memory"))
        for worker in (bandwidth_worker, *workers.values()):
            worker.close()
    print(f"{date_and_processor()}, {arguments.threads} threads")
    print(f"model {arguments.model}, {arguments.new} new tokens, medians of {arguments.rounds} interleaved rounds")
    print("speed-up: the first side's speed relative to the row's; same size: Tricycle's with weights of as many bits")
    print_table(measured, sides, memory, sizes, arguments)


if __name__ == "__main__":
    main()
