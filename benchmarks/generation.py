"""How fast models write, beside other libraries: python -m benchmarks.generation --model smollm2 --threads 2

    --model gpt2                             GPT-2's shape, with random weights
    --prompts 8000 --new 64 --cache float16  after a long text: its keys and values are read for each token too

A token reads every weight once, so nobody is faster than memory: the limit is the bandwidth that a large product with a
vector reaches in the same run, over the bytes of the weights ("with text": and over those of the keys and values that
are cached after the first prompt). All sides get the same weights, read the same prompt and write the most probable
tokens, in turns; what is printed are medians over the turns.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks.interleave import PAUSE_SECONDS
from benchmarks.shapes import SHAPES
from benchmarks.workers import Worker
from tricycle.configs.model import ModelConfig
from tricycle.configs.presets import model_fields
from tricycle.models import GPT
from tricycle.tokeniser import BPETokeniser

# name, worker, what it is told, bits a weight
SIDES = [
    ("tricycle float32", "tricycle", "float32", 32),
    ("tricycle bfloat16", "tricycle", "bfloat16", 16),
    ("tricycle int8", "tricycle", "int8", 8),
    ("transformers float32", "transformers", "float32", 32),
    ("transformers bfloat16", "transformers", "bfloat16", 16),
    ("llama.cpp F32", "llama.cpp", "F32", 32),
    ("llama.cpp F16", "llama.cpp", "F16", 16),
    ("llama.cpp Q8_0", "llama.cpp", "Q8_0", 8.5),
]
MODULE = "benchmarks.generation_workers"
GPT2 = ModelConfig()


def load_model(name: str) -> tuple[GPT, Any]:
    """A model, and its tokeniser: one of bytes for random weights, for llama.cpp runs no model without one."""
    if name == "gpt2" or name in SHAPES:
        config = GPT2 if name == "gpt2" else ModelConfig(**model_fields(asdict(SHAPES[name])))
        letters = BPETokeniser.from_tokens([*(bytes([value]) for value in range(256)), b"th"], split="gpt2")
        return GPT(config), letters if letters.n_vocab <= config.vocab_size else None
    from tricycle.pretrained import load

    pretrained = load(name)
    return pretrained.model, pretrained.tokeniser


def installed_sides(arguments: argparse.Namespace) -> list[tuple[str, str, str, float]]:
    """The sides that were asked for and that are installed."""
    here = {"tricycle": True, "transformers": importlib.util.find_spec("transformers") is not None}
    code = "import llama_cpp"
    here["llama.cpp"] = not subprocess.run([arguments.llama_python, "-c", code], capture_output=True).returncode
    chosen = arguments.sides or [side[0] for side in SIDES]
    return [side for side in SIDES if side[0] in chosen and here[side[1]]]


def export_model(model: GPT, tokeniser: Any, folder: Path, sides: list[tuple[str, str, str, float]]) -> list[Any]:
    """The model in all forms; gives the sides that can read one."""
    from tricycle.pretrained.export import export_folder
    from tricycle.pretrained.gguf_writer import export_gguf

    export_folder(model, tokeniser, folder / "hf")
    (folder / "context").write_text(str(model.config.context_window), encoding="utf-8")
    able = []
    for side in sides:
        if side[1] == "llama.cpp":
            try:
                if tokeniser is None:
                    raise ValueError("it runs no model without a tokeniser")
                export_gguf(model, tokeniser, folder / f"{side[2]}.gguf", side[2])
            except ValueError as error:
                print(f"{side[0]} is left out: {error}")
                continue
        able.append(side)
    return able


def measure_sides(workers: dict[str, Worker], limit: Worker, arguments: argparse.Namespace) -> dict[str, Any]:
    """What each side took in each turn, and the bandwidth beside it."""
    took: dict[str, Any] = defaultdict(list)
    for turn in range(arguments.rounds + 1):  # the first does not count
        for name, worker in workers.items():
            for n_prompt in arguments.prompts:
                time.sleep(PAUSE_SECONDS)
                n_new = arguments.new if n_prompt == arguments.prompts[0] else 0
                answer = worker.ask(f"write {n_prompt} {n_new}")
                if turn:
                    took[f"{name} {n_prompt}"].append(answer["prompt"])
                    if n_new:
                        took[f"{name} token"].append(answer["token"])
                        took[f"{name} tokens"] = answer["tokens"]
        time.sleep(PAUSE_SECONDS)
        took["bandwidth"].append(limit.ask("bandwidth"))
    return took


def n_common_prefix(left: list[int], right: list[int]) -> int:
    """How many are the same at their beginning."""
    return next((i for i, (a, b) in enumerate(zip(left, right)) if a != b), len(left))


def cache_bytes_per_token(model: GPT) -> int:
    """Of keys and values in float32."""
    config = model.config
    return 2 * 4 * config.n_layers * config.key_heads * config.channels_per_head


def print_table(
    took: dict[str, Any], sides: list[Any], memory: dict[str, Any], sizes: tuple[int, int], words: Any
) -> None:
    """Tokens a second of reading each prompt and of writing after the first; by how much the first side is faster, and
    ours of as many bits a weight; the limit, the share of it that is reached, and the limit with the text; how many
    tokens are the same as the first side's; megabytes when the model is loaded, and at most.

    Args:
        sizes: how many weights are read for each token, and the bytes of a token's keys and values in float32.
    """
    n_weights, cached = sizes
    rate = statistics.median(took["bandwidth"])
    spread = f"{min(took['bandwidth']) / 1e9:.1f} to {max(took['bandwidth']) / 1e9:.1f}"
    print(f"bandwidth {rate / 1e9:.1f} GB/s ({spread}), {n_weights * 4 / 1e6:,.0f} MB of float32 weights")
    names = ("new", 8), ("ours / it", 11), ("alike", 7), ("limit", 7), ("share", 7), ("with text", 11), ("same", 6)
    columns = [*((f"prompt {n}", 13) for n in words.prompts), *names, ("MB", 8), ("most", 8)]
    print(f"{'tokens/s':<23}" + "".join(f"{name:>{width}}" for name, width in columns))
    token = {name: statistics.median(took[f"{name} token"]) for name, *_ in sides}
    first = sides[0][0]
    ours = {round(bits / 8): name for name, worker, _, bits in sides if worker == "tricycle"}
    for name, _, _, bits in sides:
        read = n_weights * bits / 8
        text = (words.prompts[0] + words.new / 2) * cached * (0.5 if has_16_bit_cache(name, words.cache) else 1)
        alike = token[name] / token[ours.get(round(bits / 8), first)]
        same = n_common_prefix(took[f"{first} tokens"], took[f"{name} tokens"])
        values = [f"{n / statistics.median(took[f'{name} {n}']):,.0f}" for n in words.prompts]
        values += [f"{1 / token[name]:.1f}", f"{token[name] / token[first]:.2f}", f"{alike:.2f}", f"{rate / read:.0f}"]
        values += [f"{read / rate / token[name]:.0%}", f"{rate / (read + text):.0f}", f"{same}"]
        values += [f"{megabytes:,.0f}" for megabytes in memory[name]]
        print(f"{name:<23}" + "".join(f"{value:>{width}}" for value, (_, width) in zip(values, columns)))


def has_16_bit_cache(name: str, cache: str) -> bool:
    """Whether a side keeps keys and values in 16 bits."""
    if name.startswith("tricycle"):
        return cache in ("float16", "bfloat16")
    return name.startswith("llama.cpp") or name.endswith("bfloat16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="smollm2", help="as `pretrained.load` takes it, gpt2 or a shape (random)")
    parser.add_argument("--sides", nargs="*", choices=[side[0] for side in SIDES], help="all that are installed")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads of each side")
    parser.add_argument(
        "--prompts", type=int, nargs="+", default=[256, 2048], help="lengths; it writes after the first"
    )
    parser.add_argument("--new", type=int, default=96, help="tokens that are written")
    parser.add_argument("--cache", default="auto", choices=["auto", "float16", "bfloat16"], help="of Tricycle's sides")
    parser.add_argument("--rounds", "--turns", type=int, default=3, help="of each side")
    parser.add_argument("--llama-python", default=sys.executable, help="an interpreter that has llama-cpp-python")
    arguments = parser.parse_args()
    model, tokeniser = load_model(arguments.model)
    window, n_vocab = model.config.context_window, model.config.vocab_size
    arguments.prompts = [n for n in arguments.prompts if n + arguments.new <= window] or [max(1, window // 2)]
    arguments.new = min(arguments.new, window - arguments.prompts[0])
    n_weights = model.n_parameters - (0 if model.position_embedding is None else model.position_embedding.weights.size)
    n_weights -= 0 if model.config.tied else model.token_embedding.weights.size  # of such tables a row is read
    with tempfile.TemporaryDirectory() as place:
        sides = export_model(model, tokeniser, Path(place), installed_sides(arguments))
        sizes = n_weights, cache_bytes_per_token(model)
        del model
        limit = Worker("bandwidth", arguments.threads, MODULE, "bandwidth", "-", place, str(n_vocab), "auto")
        workers, memory = {}, {}
        for name, worker, kind, _ in sides:
            python = arguments.llama_python if worker == "llama.cpp" else sys.executable
            words = worker, kind, place, str(n_vocab), arguments.cache
            workers[name] = Worker(name, arguments.threads, MODULE, *words, python=python)
            memory[name] = [workers[name].ask("memory")]  # when it has loaded its model
        took = measure_sides(workers, limit, arguments)
        for name, worker in workers.items():
            memory[name].append(worker.ask("memory"))
        for each in (limit, *workers.values()):
            each.close()
    print(f"{date.today()}, {platform.processor() or platform.machine()}, {arguments.threads} threads")
    print(f"model {arguments.model}, {arguments.new} new tokens, medians of {arguments.rounds} turns")
    print_table(took, sides, memory, sizes, arguments)


if __name__ == "__main__":
    main()
