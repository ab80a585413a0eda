"""Tensors of checkpoints that contain the matrices of all experts of a layer, as stored or in MXFP4.

They are read as one tensor for each expert, and joined for export. Shapes: E experts.

Source: Open Compute Project 2023, "OCP microscaling formats (MX) specification", for MXFP4.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import NamedTuple

import numpy as np

from tricycle.pretrained.stored_model import StoredTensor

MAX_EXPERT_TENSORS = 2**17  # the largest models have 2**16
MXFP4_BLOCK = 32  # values that share a scale
# The values of the bits sign, exponent (2) and mantissa (1), of a low and of a high half of each byte.
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FP4_PAIRS = np.stack([np.tile(np.append(_FP4, -_FP4), 16), np.repeat(np.append(_FP4, -_FP4), 16)], axis=-1)


class Stack(NamedTuple):
    """A tensor with the matrices of all experts, by its name in checkpoints; `transposed`: they are (in, out)."""

    name: str
    transposed: bool = False


# From the name of a tensor of one expert to that of the stack; N is the number of a block, M that of an expert. In a
# name without M, N is the number of a matrix in a stack that no block has.
Stacks = Mapping[str, Stack]


# -------------------------------------------------------------------- reading
def unstack(stacks: Stacks, tensors: dict[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Return the tensors with one for each expert in place of each stack; ValueError for invalid blocks or too many.

    A stack NAME in MXFP4 is two tensors, NAME_blocks and NAME_scales.
    """
    split: dict[str, StoredTensor] = {}
    patterns = {re.compile(re.escape(stack.name).replace(r"\.N\.", r"\.(\d+)\.")): stack for stack in stacks.values()}
    templates = {stack: template for template, stack in stacks.items()}
    for name, tensor in tensors.items():
        base, scales = name.removesuffix("_blocks"), tensors.get(f"{name.removesuffix('_blocks')}_scales")
        if name.endswith("_scales") and f"{name.removesuffix('_scales')}_blocks" in tensors:
            continue
        match, stack = next(((m, s) for pattern, s in patterns.items() if (m := pattern.fullmatch(base))), (None, None))
        if match is None or stack is None:
            split[name] = tensor
            continue
        template = templates[stack].replace(".N.", f".{match[1]}.")
        if len(tensor.shape) < 2 or len(split) + tensor.shape[0] > MAX_EXPERT_TENSORS:
            rule = f"of at most {MAX_EXPERT_TENSORS} experts"
            raise ValueError(f"{name}: expected matrices or vectors {rule}, got shape {tensor.shape}")
        new = _expert_tensor if name == base or scales is None else partial(_mxfp4_expert, name, scales)
        for e in range(tensor.shape[0]):
            split[template.replace(".M.", f".{e}.")] = new(tensor, stack.transposed, e)
    return split


def _expert_tensor(tensor: StoredTensor, transposed: bool, e: int) -> StoredTensor:
    """Return expert e's matrix or bias of a stack, transposed if the stack is, as a tensor that is read on request."""
    shape = tensor.shape[1:]
    read = lambda: tensor.read()[e].T if transposed else tensor.read()[e]
    return StoredTensor(shape[::-1] if transposed else shape, tensor.dtype_name, read)


def _mxfp4_expert(name: str, scales: StoredTensor, blocks: StoredTensor, transposed: bool, e: int) -> StoredTensor:
    """Return e's lazy matrix (out, in) of blocks (E, out, in / 32, 16), scales (E, out, in / 32); else ValueError."""
    kinds = {blocks.dtype_name, scales.dtype_name}
    if len(blocks.shape) != 4 or blocks.shape[3] != MXFP4_BLOCK // 2 or scales.shape != blocks.shape[:3]:
        expected = "blocks (experts, out, in / 32, 16) and scales (experts, out, in / 32)"
        raise ValueError(f"{name}: expected {expected}, got shapes {blocks.shape} and {scales.shape}")
    if kinds != {"U8"}:
        raise ValueError(f"{name}: expected blocks and scales of bytes (U8), got {' and '.join(sorted(kinds))}")
    shape = (blocks.shape[1], blocks.shape[2] * MXFP4_BLOCK)
    return StoredTensor(shape, "MXFP4", lambda: dequantize_mxfp4(blocks.read()[e], scales.read()[e]))


def dequantize_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return values (rows, 32 n) of bytes (rows, n, 16), low halves first, times 2**(scale - 127), scales (rows, n)."""
    values = _FP4_PAIRS[blocks].reshape(*scales.shape, MXFP4_BLOCK)
    return np.ldexp(values, scales[..., None].astype(np.int32) - 127).reshape(len(blocks), -1)


# -------------------------------------------------------------------- export
def stacked_shapes(stacks: Stacks, shapes: dict[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Return shapes by name with stacks in place of the tensors of experts, in the order of `stacked_arrays`."""
    stacked: dict[str, tuple[int, ...]] = {}
    for name, shape in shapes.items():
        stack = _stack_of(stacks, name)
        if stack is None:
            stacked[name] = shape
            continue
        n_held = stacked.get(stack.name, (0,))[0]
        stacked[stack.name] = (n_held + 1, *(shape[::-1] if stack.transposed else shape))
    return stacked


def stacked_arrays(
    stacks: Stacks, arrays: Iterable[tuple[str, np.ndarray]], shapes: Mapping[str, tuple[int, ...]]
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield (name, array), experts stacked in order of arrival, transposed if the stack is; ValueError if some lack.

    Args:
        shapes: of the result, from `stacked_shapes`.
    """
    parts: dict[str, list[np.ndarray]] = {}
    for name, array in arrays:
        stack = _stack_of(stacks, name)
        if stack is None:
            yield name, array
            continue
        held = parts.setdefault(stack.name, [])
        held.append(array.T if stack.transposed else array)
        if len(held) == shapes[stack.name][0]:
            yield stack.name, np.stack(parts.pop(stack.name))
    for name, held in parts.items():
        raise ValueError(f"{name}: expected {shapes[name][0]} experts, got {len(held)}")


def _stack_of(stacks: Stacks, name: str) -> Stack | None:
    """Return the stack that contains an expert's tensor, with the block's number in its name; None if none does."""
    for template, stack in stacks.items():
        is_in_block = ".M." in template
        pattern = re.escape(template).replace(r"\.N\.", r"\.(\d+)\.").replace(r"\.M\.", r"\.\d+\.")
        if match := re.fullmatch(pattern, name):
            return stack._replace(name=stack.name.replace(".N.", f".{match[1]}.")) if is_in_block else stack
    return None
