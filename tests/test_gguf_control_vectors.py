"""Control vectors as GGUF files: llama.cpp computes the same steered logits, and wrong files are rejected."""

from __future__ import annotations

import ctypes
import sys

import numpy as np
import pytest
from tables import bad_input
from tiny_models import lively_model

from tricycle.pretrained.gguf_control_vectors import read_control_vectors, write_control_vectors
from tricycle.pretrained.gguf_file import read_gguf_header
from tricycle.pretrained.gguf_writer import export_gguf, write_arrays
from tricycle.tensor import no_grad
from tricycle_lab.steering import steer

pytest.importorskip("gguf")
VECTORS = {2: np.arange(4, dtype=np.float32), 1: -np.ones(4, np.float32)}


def test_vectors_come_back(tmp_path) -> None:
    write_control_vectors(tmp_path / "v.gguf", VECTORS, "llama")
    vectors = read_control_vectors(tmp_path / "v.gguf", 3, 4)
    assert list(vectors) == [1, 2]
    for layer, vector in vectors.items():
        np.testing.assert_array_equal(vector, VECTORS[layer])
    metadata = read_gguf_header(tmp_path / "v.gguf").metadata
    assert metadata["general.architecture"] == "controlvector"
    assert metadata["controlvector.model_hint"] == "llama" and metadata["controlvector.layer_count"] == 2


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ModuleNotFoundError, match=r'needs gguf: pip install "tricycle-gpt\[pretrained\]"'):
        write_control_vectors(tmp_path / "v.gguf", VECTORS, "llama")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("architecture", "name", "array", "message"),
    [
        ("llama", "direction.1", np.ones(4), "'controlvector', got 'llama'"),
        ("controlvector", "direction.3", np.ones(4), "direction.1 to direction.2 of 4"),
        ("controlvector", "direction.0", np.ones(4), "direction.0"),
        ("controlvector", "token_embd", np.ones(4), "token_embd"),
        ("controlvector", "direction.1", np.ones(5), r"\(5,\)"),
        ("controlvector", "direction.1", np.full(4, np.nan), "finite values"),
    ],
)
def test_wrong_files_are_rejected(tmp_path, architecture, name, array, message) -> None:
    write_arrays(tmp_path / "a.gguf", architecture, {}, {name: array.astype(np.float32)})
    with pytest.raises(ValueError, match=message):
        read_control_vectors(tmp_path / "a.gguf", 3, 4)


test_invalid_arguments = bad_input(
    {
        "none": (lambda: write_control_vectors("a.gguf", {}, "llama"), "blocks from 1, got none"),
        "first": (lambda: write_control_vectors("a.gguf", {0: np.ones(4)}, "llama"), r"from 1, got \[0\]"),
    }
)


@pytest.mark.slow
def test_llama_cpp_computes_equal_steered_logits(tmp_path) -> None:
    """llama.cpp's command line reads the tensors as here, and passes them on to `llama_set_adapter_cvec`."""
    llama_cpp = pytest.importorskip("llama_cpp")
    from test_gguf_writer import bpe_tokeniser, open_llama_cpp

    tokeniser = bpe_tokeniser()
    model = lively_model(n_layers=3, vocab_size=tokeniser.n_vocab, context_window=128)
    export_gguf(model, tokeniser, tmp_path / "a.gguf")
    generator = np.random.default_rng(0)
    vectors = {layer: generator.normal(0, 2, 32).astype(np.float32) for layer in (1, 2)}
    write_control_vectors(tmp_path / "v.gguf", vectors, "llama")
    file = read_gguf_header(tmp_path / "v.gguf")
    buffer = np.concatenate([file.read(file.tensors[f"direction.{layer}"]) for layer in (1, 2)])
    theirs = open_llama_cpp(tmp_path / "a.gguf", logits_all=True)
    data = buffer.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
    tokens = generator.integers(0, tokeniser.n_vocab, 20)
    with no_grad():
        plain = model(tokens[None]).array[0]
        for last in (1, 2):  # steer after block 1, then after both
            assert llama_cpp.llama_set_adapter_cvec(theirs.ctx, data, buffer.size, 32, 1, last) == 0
            theirs.reset()
            theirs.eval(tokens.tolist())
            with steer(model, {layer: vectors[layer] for layer in range(1, last + 1)}):
                expected = model(tokens[None]).array[0]
            scale = np.abs(expected).max()
            np.testing.assert_allclose(theirs.scores[: len(tokens)], expected, rtol=0, atol=5e-3 * scale)
            assert abs(expected - plain).max() > 0.1 * scale
    theirs.close()
