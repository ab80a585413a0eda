"""Tokenizer speed compared with other libraries (`python -m benchmarks.tokeniser`).

Training of byte-level BPE is compared with Hugging Face `tokenizers` (pip install tokenizers), with the same
pre-tokenization pattern and vocabulary size, and merges of pairs that occur at least twice. Encoding is compared with
tiktoken, with the merges that Tricycle has learned. The sides are interleaved.
"""

from __future__ import annotations

import argparse
import statistics
import sysconfig
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import tiktoken

from benchmarks.heading import date_and_processor
from tricycle.bpe import END_OF_TEXT, PIECE
from tricycle.tokeniser import BPETokeniser
from tricycle_datasets.download import DownloadError, fetch
from tricycle_datasets.python_code import SKIPPED_FOLDERS
from tricycle_datasets.shakespeare import SHA256, URL


def shakespeare(n_bytes: int) -> list[str]:
    """Return [the first `n_bytes` of Tiny Shakespeare], downloaded at the first call; DownloadError on failure."""
    path = fetch("input.txt", URL, SHA256, folder="tinyshakespeare")
    return [path.read_bytes()[:n_bytes].decode("utf-8", errors="ignore")]


def standard_library_code(n_bytes: int) -> list[str]:
    """Return texts of the standard library's .py files outside SKIPPED_FOLDERS, cut to `n_bytes` together."""
    root, texts, size = Path(sysconfig.get_path("stdlib")), [], 0
    for path in sorted(root.rglob("*.py")):
        if size < n_bytes and not SKIPPED_FOLDERS & {*path.relative_to(root).parts}:
            raw = path.read_bytes()[: n_bytes - size]
            texts.append(raw.decode("utf-8", errors="ignore"))
            size += len(raw)
    return texts


TEXTS = {"shakespeare": shakespeare, "code": standard_library_code}


def train_tricycle(texts: list[str], vocab_size: int) -> BPETokeniser:
    """Train a new byte-level BPE tokenizer of Tricycle with `vocab_size` tokens on the texts, and return it."""
    return BPETokeniser(vocab_size).train(texts, progress=False)


def train_tokenizers(texts: list[str], vocab_size: int) -> Any:
    """Train a new byte-level BPE `tokenizers.Tokenizer` with `vocab_size` tokens on the texts, and return it."""
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


def time_call(function: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    """Return (seconds, result) of the call function(*arguments)."""
    start = time.perf_counter()
    result = function(*arguments)
    return time.perf_counter() - start, result


def compare_training(texts: list[str], vocab_size: int, peer: bool, repeats: int) -> tuple[str, BPETokeniser]:
    """Return (table row of median seconds, with `tokenizers` if `peer`; the tokenizer trained by Tricycle)."""
    times, peer_times = [], []
    for _ in range(repeats):
        elapsed, tokeniser = time_call(train_tricycle, texts, vocab_size)
        times.append(elapsed)
        if peer:
            elapsed, tokenizer = time_call(train_tokenizers, texts, vocab_size)
            peer_times.append(elapsed)
    seconds = statistics.median(times)
    row = f"{seconds:>12.2f}"
    if peer:
        row += f"{statistics.median(peer_times):>14.2f}{seconds / statistics.median(peer_times):>19.2f}"
        row += f"{shared_token_fraction(tokeniser, tokenizer):>15.1%}"
    return row, tokeniser


def shared_token_fraction(tokeniser: BPETokeniser, tokenizer: Any) -> float:
    """Return the fraction of Tricycle's learned tokens that `tokenizers` has learned, too."""
    from tokenizers import decoders

    decoder = decoders.ByteLevel()
    peer_tokens = {decoder.decode([token]) for token in tokenizer.get_vocab()}
    tokens = [tokeniser.token_bytes(i).decode("utf-8", errors="replace") for i in range(256, tokeniser.n_vocab)]
    return sum(token in peer_tokens for token in tokens) / len(tokens)


def encode_all(encode: Callable[[str], Any], texts: list[str]) -> None:
    """Call `encode` with each text, and discard the results."""
    for text in texts:
        encode(text)


def compare_encoding(texts: list[str], tokeniser: BPETokeniser, repeats: int) -> str:
    """Return a table row of MB/s: Tricycle, tiktoken to array and to list; and Tricycle over the faster one."""
    n_ordinary = tokeniser.n_vocab - len(tokeniser.special_tokens)
    ranks = {tokeniser.token_bytes(i): i for i in range(n_ordinary)}
    # Without a special token, `encode_to_numpy` has half the speed.
    bare = tiktoken.Encoding("bare", pat_str=PIECE, mergeable_ranks=ranks, special_tokens={END_OF_TEXT: n_ordinary})
    sides: list[Callable[[str], Any]] = [
        tokeniser.encode,
        lambda text: bare.encode_to_numpy(text, disallowed_special=()),
        bare.encode_ordinary,
    ]
    times: list[list[float]] = [[] for _ in sides]
    order = [*zip(sides, times)]
    for _ in range(repeats):
        for encode, elapsed in order:
            elapsed.append(time_call(encode_all, encode, texts)[0])
        order.reverse()  # the first side starts with the caches that training or another side has left
    megabytes = sum(len(text.encode("utf-8")) for text in texts) / 1e6
    tricycle, array, ids = (megabytes / statistics.median(elapsed) for elapsed in times)
    return f"{tricycle:>12.1f}{array:>17.1f}{ids:>16.1f}{tricycle / max(array, ids):>14.2f}"


def main() -> None:
    """Parse sys.argv, and print the seconds of training and the MB/s of encoding, by text and vocabulary size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--texts", choices=TEXTS, nargs="+", default=[*TEXTS], help="texts to train on and to encode")
    parser.add_argument("--vocab-sizes", type=int, nargs="+", default=[1024, 8192], help="sizes of the vocabulary")
    parser.add_argument("--megabytes", type=float, default=10.0, help="maximum size of each text")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each side")
    parser.add_argument("--peer", choices=["tokenizers", "none"], default="tokenizers", help="library to compare with")
    arguments = parser.parse_args()
    peer = arguments.peer == "tokenizers"
    packages = ["tiktoken", *["tokenizers"] * peer]
    print(f"{date_and_processor()}, " + ", ".join(f"{package} {version(package)}" for package in packages))
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
    titles = f"{'text':<13}{'MB':>6}{'vocab':>8}{'tricycle':>12}"
    print(f"\ntraining, seconds, medians of {arguments.repeats}: pairs that occur at least twice")
    print(titles + f"{'tokenizers':>14}{'time / tokenizers':>19}{'common tokens':>15}" * peer, *training, sep="\n")
    print(f"\nencoding, MB/s, medians of {arguments.repeats}: the same vocabulary, one thread")
    print(titles + f"{'tiktoken, array':>17}{'tiktoken, list':>16}{'speed / best':>14}", *encoding, sep="\n")


if __name__ == "__main__":
    main()
