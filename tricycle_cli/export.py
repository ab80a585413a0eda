"""Export a model as a folder in Hugging Face format, a GGUF file for llama.cpp, or an HTML file that generates text.

An adapter can be merged into the model, or written as a GGUF file for llama.cpp.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import tyro

from tricycle.configs.validated import OneOf
from tricycle.models import GPT
from tricycle.pretrained import Pretrained
from tricycle.pretrained.adapters import load_adapter, save_gguf_adapter
from tricycle.pretrained.export import export_folder
from tricycle.pretrained.gguf_file_types import FILE_TYPES
from tricycle.pretrained.importance import measure_importance
from tricycle.pretrained.stored_model import error_prefix
from tricycle.sequences.seq2seq import EncoderDecoderTransformer
from tricycle.sequences.text_encoder import TextEncoder
from tricycle.system.files import read_file, read_json_object
from tricycle_cli.flags import parse
from tricycle_cli.models import default_sampling, load_file, load_model
from tricycle_cli.run import read_metrics

GGUFType = OneOf[str, FILE_TYPES]
NOT_CALIBRATED = ("F32", "F16", "BF16", "Q8_0")


@dataclass(frozen=True)
class Arguments:
    """The flags of `tricycle export`."""

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """a model, as in `tricycle generate`, or a text encoder"""
    folder: Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[FOLDER]")] = None
    """a new folder for config.json, model.safetensors, the tokenizer files and a model card"""
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    """data type of the weights in the folder"""
    gguf: Path | None = None
    """a GGUF file to write, of a model with an architecture of llama.cpp (see docs/pretrained.md)"""
    type: GGUFType = "F16"
    """data type of the weights in the GGUF file, by llama.cpp's names of mixtures: Q4_K_M has about 4 to 5 bits"""
    calibrate: Path | None = None
    """a text file, with at least 512 tokens, like the texts that the model will process: the quantization of the GGUF
    file then preserves the weights that matter most for it"""
    html: Path | None = None
    """an HTML file to write that contains the model in 8 bits, and generates text in a browser without a server"""
    tokeniser: Path | None = None
    """a tokenizer file, for a model without a tokenizer"""
    adapter: Path | None = None
    """a LoRA adapter to merge into the weights: a folder that `tricycle finetune` or PEFT wrote, or a GGUF file"""
    gguf_adapter: Path | None = None
    """a GGUF file to write that contains only the LoRA adapter of --adapter, for llama.cpp"""


def main(args: Sequence[str] | None = None) -> None:
    """Run `tricycle export`: write a model (with a merged adapter) as a folder or GGUF file, or only an adapter.

    Raises:
        FileExistsError: a GGUF file to write exists.
        ValueError: no output is requested, or the output does not support the model.
    """
    arguments = parse(Arguments, args=args, description=__doc__ or "")
    check_outputs(arguments)
    text = b"" if arguments.calibrate is None else read_file(arguments.calibrate)
    loaded = load_file(arguments.source)
    if not isinstance(loaded.model, (TextEncoder, EncoderDecoderTransformer)):
        loaded = load_model(arguments.source, arguments.tokeniser, device="cpu", loaded=loaded)
    if arguments.adapter is not None:
        adapter = load_adapter(loaded, arguments.adapter)
        if arguments.gguf_adapter is not None:
            kind = save_gguf_adapter(adapter, loaded, arguments.gguf_adapter)
            print(f"{arguments.gguf_adapter}: architecture {kind}, {adapter.n_parameters:,} parameters in F32")
        adapter.merge()
    check_model(loaded, arguments)  # before the folder is written, and before a long calibration
    card = {} if arguments.adapter is not None else training_results(Path(arguments.source))
    if arguments.folder is not None:
        generation = loaded.generation if loaded.source is not None else None
        kind = export_folder(
            loaded.model, loaded.tokeniser, arguments.folder, card, generation=generation, dtype=arguments.dtype
        )
        print(f"{arguments.folder}: model type {kind}, {loaded.model.n_parameters:,} parameters in {arguments.dtype}")
    if arguments.gguf is not None:
        from tricycle.pretrained.gguf_writer import export_gguf
        from tricycle.pretrained.sentence_encoder import source_pooling

        pooling = "mean"
        if loaded.source is not None and isinstance(loaded.model, TextEncoder):
            pooling = source_pooling(loaded.source).mode
        importance = None if arguments.calibrate is None else calibrate(loaded, arguments.calibrate, text)
        export_gguf(loaded.model, loaded.tokeniser, arguments.gguf, arguments.type, importance, pooling, progress=True)
        size = arguments.gguf.stat().st_size
        print(f"{arguments.gguf}: {loaded.model.n_parameters:,} parameters in {arguments.type}, {size:,} bytes")
    if arguments.html is not None:
        write_html(loaded, arguments.html, arguments.source, card)


def check_model(loaded: Pretrained, arguments: Arguments) -> None:
    """Raise ValueError for a model or tokenizer that the requested GGUF or HTML file does not support."""
    if arguments.gguf is not None:
        from tricycle.pretrained.gguf_writer import describe_gguf

        describe_gguf(loaded.model, loaded.tokeniser, arguments.type)
    if arguments.html is not None:
        from tricycle_lab.look.standalone import check_supported

        check_supported(loaded.model, loaded.tokeniser)


def write_html(loaded: Pretrained, path: Path, source: str, facts: dict[str, Any]) -> None:
    """Write a page that generates text with a decoder, and print its size."""
    from tricycle_lab.look.page import write_page
    from tricycle_lab.look.standalone import render_standalone_page

    title = Path(source).resolve().name
    write_page(path, render_standalone_page(loaded.model, loaded.tokeniser, default_sampling(loaded), title, facts))
    print(f"{path}: {loaded.model.n_parameters:,} parameters in 8 bits, {path.stat().st_size / 1e6:.2f} MB")


def check_outputs(arguments: Arguments) -> None:
    """Raise ValueError for no output or flags that do not fit together, FileExistsError if a file to write exists."""
    files = [arguments.gguf, arguments.gguf_adapter, arguments.html]
    if arguments.folder is None and not any(files):
        raise ValueError("expected an output folder, --gguf, --gguf-adapter or --html, got none")
    if arguments.gguf_adapter is not None and arguments.adapter is None:
        raise ValueError("--gguf-adapter: expected --adapter with it, the adapter to write")
    if arguments.gguf is None and arguments.type != Arguments.type:
        raise ValueError(f"expected --type with --gguf, got --type {arguments.type} without it")
    if arguments.folder is None and arguments.dtype != Arguments.dtype:
        raise ValueError(f"expected --dtype with a folder, got --dtype {arguments.dtype} without one")
    if arguments.calibrate is not None and (arguments.gguf is None or arguments.type in NOT_CALIBRATED):
        raise ValueError("expected --calibrate with --gguf and a --type of at most 6 bits, such as Q4_K_M")
    for path in files:
        if path is not None and path.exists():
            raise FileExistsError(f"{path}: expected a new file, got one that exists")


def calibrate(loaded: Pretrained, path: Path, text: bytes) -> dict[str, np.ndarray]:
    """Return the result of `measure_importance` on a text; ValueError, with the path, if it is not suitable."""
    if not isinstance(loaded.model, GPT):
        raise ValueError(f"--calibrate: expected a decoder, got a {type(loaded.model).__name__}")
    tokens = loaded.tokeniser.encode_plain(text)
    with error_prefix(f"{path}: "):
        return measure_importance(loaded.model, tokens, loaded.tokeniser.start_of_text, progress=True)


def training_results(source: Path) -> dict[str, Any]:
    """Return a run's data by model-card label, and the held-out loss unless `source` is its last checkpoint; else {}.

    The final metrics of a run are those of its best checkpoint. {} if there is no data.json or metrics.jsonl.
    """
    folder = source if source.is_dir() else source.parent
    card: dict[str, Any] = {}
    if source.exists() and (folder / "data.json").is_file() and (folder / "metrics.jsonl").is_file():
        about = read_json_object(folder / "data.json")
        card["trained on"] = str(about.get("data", "text"))
        if about.get("init_from"):
            card["started from"] = Path(str(about["init_from"])).name
        for line in read_metrics(folder / "metrics.jsonl") if source.name != "last.safetensors" else []:
            if {"final_loss", "final_bits_per_byte", "best_step"} <= set(line):
                card["held-out loss, nats per token"] = line["final_loss"]
                card["held-out loss, bits per byte"] = line["final_bits_per_byte"]
                card["updates"] = line["best_step"]
    return card
