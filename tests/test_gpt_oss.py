"""gpt-oss: its experts in MXFP4, as Hugging Face stores them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers_families import FAMILIES, change_config

from tricycle.models import GPT
from tricycle.pretrained import load
from tricycle.pretrained.export import export_folder
from tricycle.pretrained.families.stacks import dequantize_mxfp4
from tricycle.pretrained.hf_folder import WEIGHTS
from tricycle.pretrained.safetensors_weights import read_tensors
from tricycle.system.safetensors_file import write_header

CONFIG = replace(FAMILIES["gpt-oss"].config, embedding_dim=32, hidden_size=32)


def quantize_folder(folder: Path) -> dict[str, np.ndarray]:
    """Replace the matrices of experts in a folder by random MXFP4; return their values (E, out, in) by name."""
    generator = np.random.default_rng(0)
    arrays: dict[str, Any] = {
        name: np.array(tensor.read()) for name, tensor in read_tensors(folder / WEIGHTS)[0].items()
    }
    values = {}
    for name in [name for name in arrays if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        n_experts, n_in, n_out = arrays.pop(name).shape
        blocks = generator.integers(0, 256, (n_experts, n_out, n_in // 32, 16)).astype(np.uint8)
        scales = generator.integers(122, 126, blocks.shape[:3]).astype(np.uint8)
        arrays |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        values[name] = np.stack([dequantize_mxfp4(block, scale) for block, scale in zip(blocks, scales)])
    kinds = {name: ("U8" if array.dtype == np.uint8 else "F32", array.shape) for name, array in arrays.items()}
    with (folder / WEIGHTS).open("wb") as file:
        write_header(file, kinds, {"format": "pt"})
        for array in arrays.values():
            file.write(np.ascontiguousarray(array).tobytes())
    change_config(folder, quantization_config={"quant_method": "mxfp4"})
    return values


def test_experts_in_mxfp4_are_dequantized(tmp_path: Path) -> None:
    export_folder(GPT(CONFIG), None, tmp_path / "model")
    values = quantize_folder(tmp_path / "model")
    model = load(tmp_path / "model").model
    for layer, block in enumerate(model.blocks):
        ups, downs = (values[f"model.layers.{layer}.mlp.experts.{part}"] for part in ("gate_up_proj", "down_proj"))
        for expert, up, down in zip(block.mlp.experts, ups, downs):
            np.testing.assert_array_equal(expert.up.weights.array, np.concatenate([up[1::2], up[0::2]]).T)
            np.testing.assert_array_equal(expert.projection.weights.array, down.T)
    assert np.isfinite(model(np.arange(12)[None]).array).all()


def test_other_quantization_is_refused(tmp_path: Path) -> None:
    export_folder(GPT(CONFIG), None, tmp_path / "model")
    change_config(tmp_path / "model", quantization_config={"quant_method": "gptq"})
    with pytest.raises(ValueError, match=r"16 or 32 bits, got quantization_config"):
        load(tmp_path / "model")
    change_config(tmp_path / "model", quantization_config=None, swiglu_limit=5.0)
    with pytest.raises(ValueError, match=r"expected swiglu_limit to be 7\.0"):
        load(tmp_path / "model")


def test_mxfp4_agrees_with_transformers() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = np.random.default_rng(1)
    blocks = generator.integers(0, 256, (2, 6, 3, 16)).astype(np.uint8)
    scales = generator.integers(110, 140, (2, 6, 3)).astype(np.uint8)
    theirs = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32)
    for i in range(2):
        np.testing.assert_array_equal(dequantize_mxfp4(blocks[i], scales[i]), theirs[i].T.numpy())
