"""Models that are loaded in 8 or 16 bits, from every kind of file."""

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from test_gguf_writer import LLAMA, TOKENS, each_model, logits, new_model, relative_error

from tricycle.checkpoint import save_checkpoint
from tricycle.configs import ModelConfig
from tricycle.debug import use_reference
from tricycle.generate import generate
from tricycle.kernels.quantized import QuantizedMatrix
from tricycle.kernels.quantized_blocks import BlockMatrix
from tricycle.models import GPT
from tricycle.pretrained import load
from tricycle.pretrained.export import export_folder
from tricycle.pretrained.gguf_file import read_gguf_header
from tricycle.pretrained.gguf_writer import export_gguf
from tricycle.weights import quantize


def few_bits(model: GPT) -> dict[str, QuantizedMatrix]:
    return {name: p.array for name, p in model.named_parameters() if isinstance(p.array, QuantizedMatrix)}


@pytest.mark.nightly_except(5)
@each_model
@pytest.mark.parametrize("weights", ["int8", "stored"])
def test_quantized_blocks_are_used_without_conversion(name: str, weights: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    export_gguf(new_model(name), None, path, "Q8_0")
    wide, narrow = load(path).model, load(path, weights=weights).model
    blocks = few_bits(narrow)
    in_blocks = [matrix for matrix in blocks.values() if isinstance(matrix, BlockMatrix)]
    stored = [info.dtype_name for info in read_gguf_header(path).tensors.values()]
    expected = logits(wide, TOKENS)
    assert bool(in_blocks) == ("Q8_0" in stored)
    assert {str(matrix.dtype) for matrix in blocks.values()} <= {"uint8", "float16" if weights == "stored" else "int8"}
    for parameter_name, array in wide.state_dict().items():
        if parameter_name in blocks and blocks[parameter_name] in in_blocks:
            np.testing.assert_array_equal(np.asarray(blocks[parameter_name]), array)
    if weights == "stored":
        with use_reference():
            assert relative_error(logits(narrow, TOKENS), expected) < 1e-5
    assert relative_error(logits(narrow, TOKENS), expected) < (0.3 if narrow.config.n_experts else 0.1)  # other experts


def test_int8_model_round_trips_through_a_file(tmp_path: Path) -> None:
    model = new_model("llama")
    export_gguf(model, None, tmp_path / "a.gguf", "Q8_0")
    narrow = load(tmp_path / "a.gguf", weights="int8").model
    export_gguf(narrow, None, tmp_path / "b.gguf", "Q8_0")
    again = load(tmp_path / "b.gguf", weights="int8").model
    for (name, one), other in zip(narrow.state_dict().items(), again.state_dict().values()):
        np.testing.assert_allclose(one, other, 1e-3, 1e-6, err_msg=name)
    save_checkpoint(tmp_path / "last.safetensors", narrow)
    np.testing.assert_array_equal(
        logits(load(tmp_path / "last.safetensors").model, TOKENS), logits(load(tmp_path / "a.gguf").model, TOKENS)
    )


def test_loading_in_int8_holds_no_whole_matrix_in_float32(tmp_path: Path) -> None:
    export_folder(GPT(ModelConfig(**{**LLAMA, "vocab_size": 30_000, "embedding_dim": 256})), None, tmp_path)
    tracemalloc.start()
    model = load(tmp_path, weights="int8").model
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    untouched = 4 * model.n_parameters  # zeros, which take memory only when they are written
    assert peak < untouched + sum(matrix.nbytes for matrix in few_bits(model).values()) + 1e7


WRITERS: dict[str, Callable[[GPT, Path], object]] = {
    "folder": lambda model, path: export_folder(model, None, path),
    "model.gguf": lambda model, path: export_gguf(model, None, path, "F32"),
    "last.safetensors": lambda model, path: save_checkpoint(path, model),
}


@pytest.mark.nightly_except(3)
@pytest.mark.parametrize("weights", ["int8", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("name", ["llama, biases", "gpt2", "llama, untied, other base and eps"])
def test_any_model_in_any_kind(weights: str, kind: str, name: str, tmp_path: Path) -> None:
    pytest.importorskip("ml_dtypes")
    model = new_model(name)
    path = tmp_path / kind
    WRITERS[kind](model, path)
    narrow = load(path, weights=weights).model
    expected = quantize(new_model(name), weights).use_precision("bfloat16" if weights == "bfloat16" else "float32")
    assert {p.dtype.itemsize for p in narrow.parameters() if p.requires_grad} <= {4}
    assert few_bits(narrow).keys() == few_bits(expected).keys()
    np.testing.assert_equal(narrow.state_dict(), expected.state_dict())
    assert narrow.precision == expected.precision
    np.testing.assert_array_equal(logits(narrow, TOKENS), logits(expected.eval(), TOKENS))
    assert relative_error(logits(narrow, TOKENS), logits(model, TOKENS)) < 0.05
    assert len(list(generate(narrow, [1, 2, 3], 5, temperature=0))) == 5


def test_nonfinite_weights_raise_with_their_name(tmp_path: Path) -> None:
    export_folder(new_model("llama"), None, tmp_path / "folder")
    path = tmp_path / "folder" / "model.safetensors"
    content = bytearray(path.read_bytes())
    n_bytes = int.from_bytes(content[:8], "little")
    start = json.loads(content[8 : 8 + n_bytes])["model.layers.1.mlp.gate_proj.weight"]["data_offsets"][0]
    content[8 + n_bytes + start : 12 + n_bytes + start] = np.float32(np.inf).tobytes()
    path.write_bytes(content)
    with pytest.raises(
        ValueError, match=r"folder: model\.layers\.1\.mlp\.up_proj\.weight.*gate_proj\.weight.*int8.*finite"
    ):
        load(tmp_path / "folder", weights="int8")


def test_nonfinite_scales_raise(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    export_gguf(new_model("llama"), None, path, "Q8_0")
    entry = read_gguf_header(path).tensors["blk.0.ffn_up.weight"]
    content = bytearray(path.read_bytes())
    content[entry.start : entry.start + 2] = np.float16(np.inf).tobytes()
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"model\.gguf: .*finite scales.*'blk\.0\.ffn_up\.weight'"):
        load(path, weights="int8")
