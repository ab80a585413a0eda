"""Measure the fraction of generated Python functions that `ast.parse` accepts.

    python -m experiments.ten_minutes.syntax_check RUN                  RUN: a run folder of train_smol_gpt.py
    python -m experiments.ten_minutes.syntax_check RUN --samples 20     fewer of them

Plain: the model begins with "def" alone, the same each time. Constrained: it is given the signature and the docstring
of a function in a held-out file, which it has never seen, and the indentation of the body. A function ends before
the first line that is not indented. Nothing that a model wrote is ever run.
"""

import ast
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from tqdm import tqdm

from experiments.shared.program import check_minimum
from experiments.shared.results import save
from experiments.shared.texts import python_files, python_root
from experiments.ten_minutes.report import syntax_table
from tricycle.checkpoint import load_checkpoint
from tricycle.decoding.batch import GenerationBatch
from tricycle.decoding.penalties import PenalizedSamplingParams
from tricycle.models import GPT
from tricycle.sampling import SamplingParams
from tricycle.tokeniser import BPETokeniser
from tricycle_cli.flags import parse, run_main
from tricycle_cli.models import SAMPLING
from tricycle_datasets.corpus import is_held_out

PLAIN, CONSTRAINED = "plain", "constrained"
PLAIN_PROMPT = b"\n\ndef"  # the space after it is the beginning of a token
SHOWN = 2  # functions of each setting that are kept to be looked at
# Where a line begins that is not indented: no blank one, no closing bracket, which may end a signature.
END = re.compile(rb"\n(?=[^ \t\r\n\f)\]}])")


@dataclass(frozen=True)
class Settings:
    """The command-line settings: the model, the prompts and the sampling."""

    run: tyro.conf.Positional[Path]  # a run folder of train_smol_gpt.py on Python code, or a checkpoint
    samples: int = 200
    """functions for each kind of prompt and temperature; constrained ones are limited by the held-out files"""
    temperatures: tuple[float, ...] = (0.5, 0.8, 1.0)  # of sampling; 0 for greedy decoding
    top_p: float = 1.0  # sample among the most probable tokens whose probabilities reach this sum
    min_p: float = SAMPLING.min_p  # sample among tokens with at least this fraction of the highest probability
    no_repeat_ngram_size: int = SAMPLING.no_repeat_ngram_size
    """never generate an n-gram of this many tokens twice; 0 for no limit"""
    tokens: int = 512  # the most tokens of a function with its prompt
    batch: int = 50  # functions that are generated in one batch
    seed: int = 0  # of sampling, and of the choice of signatures
    output: Path | None = None
    """the JSON file for counts and examples; parses.json in the run folder if not given"""


def main() -> int:
    """Generate functions with a checkpoint, print and save how many parse; return 0; ValueError without a tokenizer."""
    settings = parse(Settings, description=__doc__ or "")
    check(settings)
    path = settings.run / "best.safetensors" if settings.run.is_dir() else settings.run
    checkpoint = load_checkpoint(path)
    model, tokeniser = checkpoint.model(), checkpoint.tokeniser()
    if tokeniser is None:
        raise ValueError(f"{path}: expected a checkpoint with its tokeniser, got none")
    rows = measure(model, tokeniser, settings)
    print(f"\n{syntax_table(rows)}")
    output = settings.output or path.parent / "parses.json"
    save(output, settings, rows=rows)
    print(f"\n{output}")
    return 0


def check(settings: Settings) -> None:
    """Raise ValueError for a setting out of range, no temperatures, or a `run` path that does not exist."""
    check_minimum(settings, samples=1, tokens=16, batch=1, seed=0)
    if not settings.temperatures:
        raise ValueError("expected --temperatures of 0 or more, got none")
    for temperature in settings.temperatures:
        sampling_of(settings, temperature)
    if not settings.run.exists():
        raise ValueError(f"expected a run folder or a checkpoint, but there is none at {settings.run}")


def sampling_of(settings: Settings, temperature: float) -> SamplingParams:
    """Return the sampling parameters; raise ValueError for one out of range."""
    n_gram = settings.no_repeat_ngram_size
    return PenalizedSamplingParams(temperature, top_p=settings.top_p, min_p=settings.min_p, no_repeat_ngram_size=n_gram)


def measure(model: GPT, tokeniser: BPETokeniser, settings: Settings) -> list[dict[str, Any]]:
    """Return a dict for each kind of prompt and temperature: counts of generated functions, and examples.

    Returns:
        "prompt", "temperature", "samples", "distinct" (texts), "finished" (ended within --tokens), "parsed"
        (how many of these), and "examples", some texts with whether they were accepted.
    """
    longest_prompt = min(settings.tokens, model.config.context_window) // 2
    prompts: dict[str, list[bytes]] = {
        PLAIN: [PLAIN_PROMPT] * settings.samples,
        CONSTRAINED: signatures(tokeniser, settings.samples, longest_prompt, settings.seed),
    }
    rows: list[dict[str, Any]] = []
    total = len(settings.temperatures) * sum(map(len, prompts.values()))
    with tqdm(total=total, unit="function", dynamic_ncols=True) as bar:
        for kind, starts in prompts.items():
            for temperature in settings.temperatures:
                # the greedy continuation of one prompt is one text
                some = starts[:1] if temperature == 0 and kind == PLAIN else starts
                samples: list[tuple[str, bool]] = []
                seed = settings.seed + settings.samples * len(rows)
                for first in range(0, len(some), settings.batch):
                    batch = some[first : first + settings.batch]
                    samples += write(model, tokeniser, batch, settings, temperature, seed + first)
                    bar.update(len(batch))
                bar.update(len(starts) - len(some))
                rows.append({"prompt": kind, "temperature": temperature, **count_outcomes(samples)})
    return rows


def count_outcomes(samples: Sequence[tuple[str, bool]]) -> dict[str, Any]:
    """Count (text, ended) pairs, distinct, finished, parsed; "examples" are {text, parses} of the first finished."""
    finished = [text for text, ended in samples if ended]
    examples = [{"text": text, "parses": is_python(text)} for text in finished[:SHOWN]]
    return {
        "samples": len(samples),
        "distinct": len({text for text, _ in samples}),
        "finished": len(finished),
        "parsed": sum(map(is_python, finished)),
        "examples": examples,
    }


def is_python(text: str) -> bool:
    """Return whether a text parses as exactly one Python function. It is not run."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of odd escapes in strings
            (statement,) = ast.parse(text).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return isinstance(statement, ast.FunctionDef)


# -------------------------------------------------------------------- prompts
def signatures(tokeniser: BPETokeniser, n: int, longest: int, seed: int) -> list[bytes]:
    """Return up to n signatures with docstrings of held-out files as bytes, in random order; ValueError if none.

    Args:
        n: how many; all in another order if there are fewer.
        longest: the most tokens of one, with the line end before it.

    Raises:
        ValueError: there are none.
    """
    candidates: list[bytes] = []
    for name in filter(is_held_out, python_files()):
        candidates += function_signatures((python_root() / name).read_bytes())
    candidates = [start for start in dict.fromkeys(candidates) if len(tokeniser.encode(start)) <= longest]
    if not candidates:
        what = f"functions whose signature and docstring have at most {longest} tokens"
        raise ValueError(f"{python_root()}: expected {what} in the held-out files, found none")
    return [candidates[i] for i in np.random.default_rng(seed).permutation(len(candidates))[:n]]


def function_signatures(source: bytes) -> Iterator[bytes]:
    """Yield signature, docstring and body indentation of each top-level function with these; none if unparsable."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            module = ast.parse(source)
    except (SyntaxError, ValueError):
        return
    lines = source.split(b"\n")
    for node in module.body:
        if isinstance(node, ast.FunctionDef) and ast.get_docstring(node) and len(node.body) > 1:
            docstring = node.body[0]
            head = lines[node.lineno - 1 : docstring.end_lineno]
            start = b"\n\n" + b"\n".join(head) + b"\n" + b" " * docstring.col_offset
            if head[-1].rstrip().endswith((b'"""', b"'''")) and not is_complete(
                start
            ):  # a docstring may look like the end
                yield start


# -------------------------------------------------------------------- sampling
def write(
    model: GPT, tokeniser: BPETokeniser, prompts: Sequence[bytes], settings: Settings, temperature: float, seed: int
) -> list[tuple[str, bool]]:
    """Generate functions from prompts in one batch; return (text from "def" on, whether it ended) for each.

    Returns:
        for each the text from its "def" on, and whether it came to an end.
    """
    end = tokeniser.end_of_text
    sampling = replace(sampling_of(settings, temperature), seed=seed, n_vocab=tokeniser.n_vocab)
    rows = [[end, *map(int, tokeniser.encode(prompt))] for prompt in prompts]
    batch, ended = GenerationBatch(model), [False] * len(rows)
    with model.evaluating():
        for i, row in enumerate(rows):
            batch.add(row, settings.tokens - len(row), sampling.for_text(i))
        while len(batch):
            for i, token in batch.step():
                rows[i].append(token)
                if token == end or is_complete(tokeniser.decode_bytes(rows[i][1:])):
                    ended[i] = True
                    batch.remove(i)
    return [(function_of(tokeniser, row, end), done) for row, done in zip(rows, ended)]


def is_complete(text: bytes) -> bool:
    """Return whether an unindented line follows the first "def" of a text; ValueError if it has no "def"."""
    return END.search(text, text.index(b"def")) is not None


def function_of(tokeniser: BPETokeniser, row: list[int], end: int) -> str:
    """Return the text of token ids from "def" to the function's end and one line end; skip `end` tokens."""
    text = tokeniser.decode_bytes([token for token in row if token != end])
    start = text.index(b"def")
    over = END.search(text, start)
    return text[start : over.start() if over else None].rstrip(b"\n").decode("utf-8", errors="replace") + "\n"


if __name__ == "__main__":
    run_main(main)
