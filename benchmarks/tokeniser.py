"""Tokeniser speed beside other libraries: python -m benchmarks.tokeniser

Training byte-level BPE beside Hugging Face `tokenizers` (pip install tokenizers), with the same pattern that cuts text
into pieces, the same vocabulary size and merges of pairs that occur at least twice; then encoding beside the bare
tiktoken with the merges that our training found. The sides take turns.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sysconfig
import time
from collections.abc import Callable
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tiktoken

from tricycle.bpe import END_OF_TEXT, PIECE
from tricycle.tokeniser import BPETokeniser
from tricycle_datasets.download import DownloadError, fetch
from tricycle_datasets.python_code import SKIPPED_FOLDERS
from tricycle_datasets.shakespeare import SHA256, URL


def shakespeare(n_bytes: int) -> list[str]:
    """Tiny Shakespeare as one document."""
    path = fetch("input.txt", URL, SHA256, folder="tinyshakespeare")
    return [path.read_bytes()[:n_bytes].decode("utf-8", errors="ignore")]


def standard_library_code(n_bytes: int) -> list[str]:
    """Files of the running Python's standard library, each a document."""
    root, texts, size = Path(sysconfig.get_path("stdlib")), [], 0
    for path in sorted(root.rglob("*.py")):
        if size < n_bytes and not SKIPPED_FOLDERS & {*path.relative_to(root).parts}:
            raw = path.read_bytes()[: n_bytes - size]
            texts.append(raw.decode("utf-8", errors="ignore"))
            size += len(raw)
    return texts


TEXTS = {"shakespeare": shakespeare, "code": standard_library_code}


def train_tricycle(texts: list[str], vocab_size: int) -> BPETokeniser:
    return BPETokeniser(vocab_size).train(texts, progress=False)


def train_tokenizers(texts: list[str], vocab_size: int) -> Any:
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers

    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECE), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        special_tokens=[END_OF_TEXT],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def time_call(work: Callable[..., Any], *what: Any) -> tuple[float, Any]:
    """How long it took, and what came of it."""
    start = time.perf_counter()
    result = work(*what)
    return time.perf_counter() - start, result


def compare_training(texts: list[str], vocab_size: int, peer: bool, repeats: int) -> tuple[str, BPETokeniser]:
    """A row of the table, and the tokeniser."""
    ours, theirs = [], []
    for _ in range(repeats):
        elapsed, tokeniser = time_call(train_tricycle, texts, vocab_size)
        ours.append(elapsed)
        if peer:
            elapsed, tokenizer = time_call(train_tokenizers, texts, vocab_size)
            theirs.append(elapsed)
    row = f"{statistics.median(ours):>12.2f}"
    if peer:
        row += f"{statistics.median(theirs):>14.2f}{statistics.median(ours) / statistics.median(theirs):>12.2f}"
        row += f"{shared_token_fraction(tokeniser, tokenizer):>11.1%}"
    return row, tokeniser


def shared_token_fraction(tokeniser: BPETokeniser, tokenizer: Any) -> float:
    """The share of our tokens that the other side has too: both should have learnt the same."""
    from tokenizers import decoders

    decoder = decoders.ByteLevel()
    theirs = {decoder.decode([token]) for token in tokenizer.get_vocab()}
    ours = [tokeniser.token_bytes(i).decode("utf-8", errors="replace") for i in range(256, tokeniser.n_vocab)]
    return sum(token in theirs for token in ours) / len(ours)


def encode_all(encode: Callable[[str], Any], texts: list[str]) -> None:
    for text in texts:
        encode(text)


def compare_encoding(texts: list[str], tokeniser: BPETokeniser, repeats: int) -> str:
    """A row of the table."""
    n_ordinary = tokeniser.n_vocab - len(tokeniser.special_tokens)
    ranks = {tokeniser.token_bytes(i): i for i in range(n_ordinary)}
    # without any special token its arrays come at half the speed
    bare = tiktoken.Encoding("bare", pat_str=PIECE, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: n_ordinary})
    sides: list[Callable[[str], Any]] = [
        tokeniser.encode,
        lambda text: bare.encode_to_numpy(text, disallowed_special=()),
        bare.encode_ordinary,
    ]
    times: list[list[float]] = [[] for _ in sides]
    turns = [*zip(sides, times)]
    for _ in range(repeats):
        for encode, elapsed in turns:
            elapsed.append(time_call(encode_all, encode, texts)[0])
        turns.reverse()  # who comes first finds the caches as training or another side left them
    megabytes = sum(len(text.encode("utf-8")) for text in texts) / 1e6
    ours, array, ids = (megabytes / statistics.median(elapsed) for elapsed in times)
    return f"{ours:>12.1f}{array:>17.1f}{ids:>16.1f}{ours / max(array, ids):>12.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", choices=TEXTS, nargs="+", default=[*TEXTS], help="what to train on and to encode")
    parser.add_argument("--vocab-sizes", type=int, nargs="+", default=[1024, 8192], help="ids in all")
    parser.add_argument("--megabytes", type=float, default=10.0, help="the most of each text")
    parser.add_argument("--repeats", type=int, default=3, help="of each side; the medians count")
    parser.add_argument("--peer", choices=["tokenizers", "none"], default="tokenizers", help="who trains beside us")
    arguments = parser.parse_args()
    peer = arguments.peer == "tokenizers"
    packages = ["tiktoken", *["tokenizers"] * peer]
    print(
        f"{date.today()}, {platform.processor() or platform.machine()}, {os.cpu_count()} cores, "
        + ", ".join(f"{package} {version(package)}" for package in packages)
    )
    try:
        texts = {name: TEXTS[name](round(arguments.megabytes * 1e6)) for name in arguments.texts}
    except DownloadError as error:
        parser.error(str(error))
    training, encoding = [], []
    for name in arguments.texts:
        size = sum(len(text.encode("utf-8")) for text in texts[name]) / 1e6
        for vocab_size in arguments.vocab_sizes:
            row, tokeniser = compare_training(texts[name], vocab_size, peer, arguments.repeats)
            title = f"{name:<13}{size:>6.1f}{vocab_size:>8,}"
            training.append(title + row)
            encoding.append(title + compare_encoding(texts[name], tokeniser, arguments.repeats))
    titles = f"{'text':<13}{'MB':>6}{'vocab':>8}{'ours':>12}"
    print(f"\ntraining, seconds, medians of {arguments.repeats}: pairs that occur at least twice")
    print(titles + f"{'tokenizers':>14}{'ours / it':>12}{'in common':>11}" * peer, *training, sep="\n")
    print(f"\nencoding, MB/s, medians of {arguments.repeats}: the same vocabulary, one thread")
    print(titles + f"{'tiktoken, array':>17}{'tiktoken, list':>16}{'ours / best':>12}", *encoding, sep="\n")


if __name__ == "__main__":
    main()
