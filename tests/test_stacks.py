"""Tensors of all experts: their parts, and matrices in MXFP4."""

from __future__ import annotations

import numpy as np
import pytest

from tricycle.pretrained.families.stacks import Stack, dequantize_mxfp4, stacked_arrays, stacked_shapes, unstack
from tricycle.pretrained.stored_model import StoredTensor

STACKS = {
    "layers.N.mlp.experts.M.up.weight": Stack("layers.N.mlp.experts.up", transposed=True),
    "layers.N.mlp.experts.M.up.bias": Stack("layers.N.mlp.experts.up_bias"),
}


def stored(array: np.ndarray, kind: str = "F32") -> StoredTensor:
    return StoredTensor(array.shape, kind, lambda: array)


def test_stacks_are_split_and_joined():
    generator = np.random.default_rng(0)
    arrays = {
        "layers.0.mlp.experts.up": generator.random((3, 4, 5)),
        "layers.0.mlp.experts.up_bias": generator.random((3, 5)),
        "layers.0.norm.weight": generator.random(4),
    }
    parts = unstack(STACKS, {name: stored(array) for name, array in arrays.items()})
    assert parts["layers.0.mlp.experts.2.up.weight"].shape == (5, 4)
    np.testing.assert_array_equal(
        parts["layers.0.mlp.experts.2.up.weight"].read(), arrays["layers.0.mlp.experts.up"][2].T
    )
    np.testing.assert_array_equal(
        parts["layers.0.mlp.experts.1.up.bias"].read(), arrays["layers.0.mlp.experts.up_bias"][1]
    )
    assert len(parts) == 7
    by_expert = [f"layers.0.mlp.experts.{e}.up.{kind}" for e in range(3) for kind in ("weight", "bias")]
    by_expert.append("layers.0.norm.weight")
    shapes = stacked_shapes(STACKS, {name: parts[name].shape for name in by_expert})
    joined = dict(stacked_arrays(STACKS, [(name, parts[name].read()) for name in by_expert], shapes))
    assert list(shapes) == list(joined) and set(joined) == set(arrays)
    for name, array in arrays.items():
        assert shapes[name] == array.shape
        np.testing.assert_array_equal(joined[name], array)


def test_stacks_without_all_experts_raise():
    arrays = [(f"layers.0.mlp.experts.{e}.up.bias", np.zeros(5)) for e in range(2)]
    with pytest.raises(ValueError, match="up_bias: expected 3 experts, got 2"):
        list(stacked_arrays(STACKS, arrays, {"layers.0.mlp.experts.up_bias": (3, 5)}))


def test_matrices_outside_of_blocks_are_stacked():
    stacks = {"projections.N.weight": Stack("projections.N.weight")}
    arrays = {f"projections.{i}.weight": np.full((2, 3), i) for i in range(3)} | {"layers.1.weight": np.ones(4)}
    shapes = stacked_shapes(stacks, {name: array.shape for name, array in arrays.items()})
    assert shapes == {"projections.N.weight": (3, 2, 3), "layers.1.weight": (4,)}
    joined = dict(stacked_arrays(stacks, arrays.items(), shapes))
    np.testing.assert_array_equal(joined["projections.N.weight"][:, 1, 2], [0, 1, 2])


def test_mxfp4_values():
    """Each half of a byte is a sign, two bits of an exponent and one of a mantissa."""
    blocks = np.arange(16, dtype=np.uint8).reshape(1, 1, 16) + np.uint8(16 * 9)
    values = dequantize_mxfp4(np.concatenate([blocks, blocks], axis=1), np.array([[127, 129]], np.uint8))
    low = [0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6]
    np.testing.assert_array_equal(values[0, :32:2], low)
    np.testing.assert_array_equal(values[0, 1:32:2], -0.5)
    np.testing.assert_array_equal(values[0, 32:], 4 * values[0, :32])


def test_invalid_stacks_raise():
    name = "layers.0.mlp.experts.up"
    blocks, scales = np.zeros((2, 3, 1, 16), np.uint8), np.zeros((2, 3, 1), np.uint8)
    quantized = {f"{name}_blocks": stored(blocks, "U8"), f"{name}_scales": stored(scales, "U8")}
    assert unstack(STACKS, quantized)["layers.0.mlp.experts.1.up.weight"].shape == (3, 32)
    with pytest.raises(ValueError, match=r"up_blocks: .*blocks .*\(2, 3, 1, 16\)"):
        unstack(STACKS, {**quantized, f"{name}_scales": stored(scales[..., 0], "U8")})
    with pytest.raises(ValueError, match=r"up_blocks: .*U8.*got F32 and U8"):
        unstack(STACKS, {**quantized, f"{name}_scales": stored(scales, "F32")})
    with pytest.raises(ValueError, match=r"up: .*131072 experts, got .*1073741824"):
        unstack(STACKS, {name: StoredTensor((2**30, 0), "F32", lambda: np.empty(0))})
