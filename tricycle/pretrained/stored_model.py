"""Models that are stored in files: the fields and the lazily read tensors that a reader of any format returns.

Fields and tensors have the names that Hugging Face's transformers gives them.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from tricycle.kernels.quantized_blocks import BlockRows


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, whose values are read on demand.

    Attributes:
        shape: as in transformers, where the matrix of a linear layer is (out, in).
        dtype_name: the data type of the values, in capitals: F32, F16, BF16, Q8_0, Q4_K, ....
        read: returns the values: float16 or bfloat16 (ml_dtypes) if they are stored so, else float32. No other copy
            stays in memory; the result may be a view of the file.
        read_blocks: returns the stored blocks of a quantized matrix, if possible as a view of the file. A row is one
            output of a linear layer, or one token of an embedding. None for other data types.
    """

    shape: tuple[int, ...]
    dtype_name: str
    read: Callable[[], np.ndarray]
    read_blocks: Callable[[], BlockRows] | None = None


@dataclass(frozen=True)
class StoredModel:
    """A model in a folder or file.

    Attributes:
        path: the folder or file, for messages.
        fields: the fields of a config.json, with `model_type`.
        tensors: by their names in the transformers model of that type.
        generation: the fields of a generation_config.json.
        family_changes: attributes of the `Family` that these files have otherwise, such as the names of tensors.
    """

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, StoredTensor]
    generation: dict[str, Any] = field(default_factory=dict)
    family_changes: dict[str, Any] = field(default_factory=dict, kw_only=True)


@contextmanager
def error_prefix(prefix: str) -> Iterator[None]:
    """Re-raise ValueErrors of this block with a prefix, such as "PATH: ", unless the message begins with PATH."""
    try:
        yield
    except ValueError as error:
        has_path = str(error).startswith(prefix.removesuffix(": "))
        raise ValueError(f"{prefix * (not has_path)}{error}") from None


def find_mapping(array: np.ndarray) -> mmap.mmap | None:
    """Return the mapped file of which an array is a view, or None."""
    owner: Any = array
    while owner is not None and not isinstance(owner, mmap.mmap):
        owner = getattr(owner, "base", None) if not isinstance(owner, memoryview) else owner.obj
    return owner


def release_pages(array: np.ndarray) -> None:
    """Release the pages of a view of a mapped file, which are read again on access; do nothing for other arrays."""
    mapping = find_mapping(array)
    if mapping is not None and sys.platform != "win32":
        mapping.madvise(mmap.MADV_DONTNEED)


def join_blocks(parts: Iterable[BlockRows]) -> tuple[BlockRows, ...]:
    """Join successive rows of the same format, as a view if they adjoin in a mapped file; other mapped rows stay apart.

    Each part of a `BlockMatrix` takes a call of its kernel.
    """
    joined: list[BlockRows] = []
    for part in parts:
        if joined and joined[-1].format_name == part.format_name:
            first, second = joined[-1].packed, part.packed
            mapping = find_mapping(first)
            if mapping is None:
                joined[-1] = part._replace(packed=np.concatenate([first, second]))
                continue
            if mapping is find_mapping(second) and second.ctypes.data == first.ctypes.data + first.nbytes:
                shape = (len(first) + len(second), first.shape[1])
                joined[-1] = part._replace(packed=np.lib.stride_tricks.as_strided(first, shape, writeable=False))
                continue
        joined.append(part)
    return tuple(joined)
