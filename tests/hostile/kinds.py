"""The kinds of files: how to write valid ones, and the programs that load them."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import json
import os
import pickle
import shutil
import socket
import threading
from collections.abc import Callable
from contextlib import chdir
from dataclasses import dataclass
from pathlib import Path

import numpy as np

WORDS = "the quick brown fox jumps over lazy dogs while seven small birds sing of rain".split()


@dataclass(frozen=True)
class Kind:
    """A kind of file.

    Attributes:
        name: in tables.
        folder: the folder of the valid files, written by `write_all_files`.
        targets: the files to damage, one at a time.
        load: loads the files in the working directory.
        network: whether `load` may open connections.
        replaceable: whether a case may replace the file by a folder, link, pipe and so on.
    """

    name: str
    folder: str
    targets: tuple[str, ...]
    load: Callable[[], object]
    network: bool = False
    replaceable: bool = True


def program(name: str, *words: str) -> Callable[[], object]:
    """Return a function that runs a program with these arguments."""

    def run() -> object:
        return importlib.import_module(f"tricycle_cli.{name}").main(list(words))

    return run


def read_sentences() -> None:
    from tricycle.pretrained.sentence_encoder import load_sentence_encoder

    load_sentence_encoder(".").encode(["the fox", ""])


def download() -> None:
    """Download from a server in a thread of this process, which responds with the bytes of a file."""
    from tricycle_datasets import download

    download.MOST_BYTES = 2**22
    os.environ.update(NO_PROXY="127.0.0.1", no_proxy="127.0.0.1")
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_serve, args=(listener, Path("response.http").read_bytes()), daemon=True).start()
    port = listener.getsockname()[1]
    download.fetch("input.txt", f"http://127.0.0.1:{port}/input.txt", hashlib.sha256(BODY).hexdigest(), "d")


def _serve(listener: socket.socket, response: bytes) -> None:
    while True:
        connection, _ = listener.accept()
        with contextlib.suppress(OSError), connection:
            while b"\r\n\r\n" not in connection.recv(2**16):
                pass
            connection.sendall(response)
            while response.startswith(ENDLESS):
                connection.sendall(bytes(2**16))


BODY = b"To be, or not to be. " * 500
ENDLESS = b"HTTP/1.1 200 Fine\r\n"


def generate(model: str, *flags: str) -> Callable[[], object]:
    words = "--length 3 --device cpu --temperature 0".split()
    return program("generate", model, "the fox", *words, *flags)


RESUME = program("train", "--resume", ".", "--device", "cpu")
OWN_TOKENISER = ("--tokeniser", "tokeniser.json")
TRAIN = """
--data text --files texts --preset debug --steps 1 --eval-batches 1 --sample-interval 0 --run-folder new --device cpu
--vocab-size 260
""".split()
DOWNLOADS = (*["response.http"] * 3, "cache/d/input.txt", "cache/d/input.txt.part")
TOKENISER = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")
SENTENCES = ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json", "config.json", "vocab.txt")
CACHE = ("tokeniser.json", "train.npy", "validation.npy", "validation.bin", "hashes.json")
SHARDS = ("model.safetensors.index.json", *(f"model-0000{i}-of-00002.safetensors" for i in (1, 2)))
EVALUATE = ("best.safetensors", "texts/a.txt", "--device", "cpu")
KINDS = [
    Kind("checkpoint", "run", ("best.safetensors",), generate("best.safetensors")),
    Kind("checkpoint, resumed", "run", ("last.safetensors",), RESUME),
    Kind("config of a run", "run", ("config.json", "data.json"), RESUME),
    Kind("metrics", "run", ("metrics.jsonl", "metrics.jsonl", "metrics.jsonl", "samples.txt", ".lock"), RESUME),
    Kind("tokeniser", "run", ("tokeniser.json", "tokenizers.json"), generate("best.safetensors", *OWN_TOKENISER)),
    Kind("pickle", "run", ("model.pkl",), generate("model.pkl", *OWN_TOKENISER)),
    Kind("config of others", "others", ("config.json", "generation_config.json"), generate(".")),
    Kind("tokeniser of others", "others", TOKENISER, program("chat", ".")),
    Kind("tokeniser in two files", "two files", ("vocab.json", "merges.txt"), generate(".")),
    Kind("safetensors", "others", ("model.safetensors",), generate(".")),
    Kind("safetensors with an index", "shards", SHARDS, generate(".")),
    Kind("GGUF", "gguf", ("model.gguf",), generate("model.gguf")),
    Kind("GGUF, Q8_0", "gguf", ("small.gguf",), generate("small.gguf", "--weights", "stored")),
    Kind("sentence embeddings", "sentences", SENTENCES, read_sentences),
    Kind("texts to train on", "texts", ("texts/a.txt", "texts/b.txt"), program("train", *TRAIN)),
    Kind("texts to evaluate", "texts", ("texts/a.txt",), program("evaluate", *EVALUATE)),
    Kind("cache of texts", "cached", CACHE, RESUME),
    Kind("downloads", "downloads", DOWNLOADS, download, network=True, replaceable=False),
]


# -------------------------------------------------------------------- valid files
def write_all_files(root: Path) -> None:
    """Write the valid files of all kinds, which includes the training of a tiny model."""
    root.mkdir(parents=True, exist_ok=True)
    write_run_files(root)
    write_model_folders(root)
    write_sentence_encoder(root)
    (root / "downloads" / "cache" / "d").mkdir(parents=True)
    (root / "downloads" / "cache" / "d" / "input.txt").write_bytes(BODY[:-1])
    (root / "downloads" / "cache" / "d" / "input.txt.part").write_bytes(BODY[:5000])
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\nContent-Length: %d\r\n\r\n" % len(BODY)
    (root / "downloads" / "response.http").write_bytes(head + BODY)
    (root / "texts" / "texts").mkdir(parents=True)
    for name in "ab":
        (root / "texts" / "texts" / f"{name}.txt").write_text(random_text(40 if name == "a" else 400), encoding="utf-8")
    shutil.copyfile(root / "run" / "best.safetensors", root / "texts" / "best.safetensors")
    (root / "cached").mkdir()
    for name in ("config.json", "data.json", "last.safetensors", "best.safetensors", "metrics.jsonl", "text.txt"):
        shutil.copyfile(root / "run" / name, root / "cached" / name)
    shutil.copytree(root / "run" / "cache", root / "cached" / "cache")
    for folder in (root / "cached" / "cache" / "corpora").iterdir():  # links, so that damage has a plain name
        for path in folder.iterdir():
            os.replace(path, root / "cached" / path.name)
            path.symlink_to(f"../../../{path.name}")


def random_text(n_lines: int) -> str:
    rng = np.random.default_rng(n_lines)
    return "".join(" ".join(rng.choice(WORDS, 9)) + ".\n" for _ in range(n_lines))


def write_run_files(root: Path) -> None:
    from tricycle.checkpoint import load_checkpoint
    from tricycle_cli.train import main

    folder = root / "run"
    folder.mkdir()
    (folder / "text.txt").write_text(random_text(300), encoding="utf-8")
    words = (
        "--preset debug --steps 2 --eval-interval 2 --eval-batches 1 --sample-interval 2 --vocab-size 260 --n-layers 1"
    )
    with chdir(folder):
        os.environ["TRICYCLE_CACHE"] = "cache"
        main([*words.split(), "--data", "text", "--files", "text.txt", "--run-folder", ".", "--device", "cpu"])
    data = json.loads((folder / "data.json").read_text(encoding="utf-8"))
    (folder / "data.json").write_text(json.dumps({**data, "files": ["text.txt"]}), encoding="utf-8")
    (folder / ".lock").write_text('{"pid": 1, "host": "elsewhere"}', encoding="utf-8")
    checkpoint = load_checkpoint(folder / "best.safetensors")
    (folder / "model.pkl").write_bytes(pickle.dumps(checkpoint.model()))


def write_model_folders(root: Path) -> None:
    from tiny_models import lively_model, split_weights, tiny_tokeniser, write_folder

    from tricycle.pretrained.gguf_writer import export_gguf

    others = root / "others"
    write_folder(others, n_layers=1, context_window=64)
    (others / "special_tokens_map.json").write_text('{"bos_token": {"content": "<|im_start|>"}}', encoding="utf-8")
    (others / "chat_template.jinja").write_text(
        "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\\n' + m.content }}<|im_end|>\n{% endfor %}",
        encoding="utf-8",
    )
    tokeniser = tiny_tokeniser()
    tokeniser.save(root / "run" / "tokenizers.json")
    (root / "gguf").mkdir()
    model = lively_model(n_layers=1, context_window=64)
    export_gguf(model, tokeniser, root / "gguf" / "model.gguf", "F32")
    export_gguf(model, tokeniser, root / "gguf" / "small.gguf", "Q8_0")
    shutil.copytree(others, root / "shards")
    split_weights(root / "shards")
    two = root / "two files"
    shutil.copytree(others, two)
    document = json.loads((two / "tokenizer.json").read_text(encoding="utf-8"))
    (two / "tokenizer.json").unlink()
    (two / "vocab.json").write_text(json.dumps(document["model"]["vocab"]), encoding="utf-8")
    merges = "\n".join(" ".join(pair) for pair in document["model"]["merges"])
    (two / "merges.txt").write_text(f"#version: 0.2\n{merges}\n", encoding="utf-8")


def write_sentence_encoder(root: Path) -> None:
    from tiny_models import write_pooling

    from tricycle.configs.encoder import EncoderConfig
    from tricycle.pretrained.export import export_folder
    from tricycle.sequences.text_encoder import TextEncoder

    folder = root / "sentences"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    config = EncoderConfig(vocab_size=len(words), context_window=16, embedding_dim=8, n_heads=2, n_layers=1)
    export_folder(TextEncoder(config), None, folder)
    (folder / "vocab.txt").write_text("\n".join(words), encoding="utf-8")
    write_pooling(folder, {"word_embedding_dimension": 8, "pooling_mode_mean_tokens": True})
    (folder / "sentence_bert_config.json").write_text('{"max_seq_length": 12, "do_lower_case": true}', encoding="utf-8")


IMPORTED = """
tiktoken tokenizers jinja2.ext gguf matplotlib.figure matplotlib.font_manager tyro urllib.request
tricycle.pretrained.sentence_encoder tricycle_accelerators.cpu tricycle_accelerators.compiled.loops tricycle_cli.chat
tricycle_cli.evaluate tricycle_cli.export tricycle_cli.generate tricycle_cli.train tricycle_datasets.text
""".split()


def import_all() -> None:
    """Import the modules that the programs import lazily, so that forked processes need not."""
    for name in IMPORTED:
        with contextlib.suppress(ModuleNotFoundError):  # some are extras
            importlib.import_module(name)
