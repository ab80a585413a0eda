"""What a reader of files hands on, whatever their format: fields and tensors as Hugging Face calls them."""

from __future__ import annotations

import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class StoredTensor:
    """A tensor that lies in a file, not read yet.

    Attributes:
        shape: as Hugging Face's models have it: a linear layer's matrix is (out, in).
        kind: the type of its values, in capitals: F32, F16, BF16, Q8_0, Q4_K and so on.
        read: gives its values: float32, or float16 and bfloat16 (ml_dtypes) where they are stored so. Nothing of them
            stays in memory but what is returned, which may be a view of the file.
        blocks: of Q8_0, gives them as they lie in the file, one output of a layer (or one token of a table) a row: the
            int8 (N, K), and the float16 scales (N, K / 32).
    """

    shape: tuple[int, ...]
    kind: str
    read: Callable[[], np.ndarray]
    blocks: Callable[[], tuple[np.ndarray, np.ndarray]] | None = None


@dataclass(frozen=True)
class Source:
    """A model in files.

    Attributes:
        path: the folder or file, for messages.
        fields: as a config.json has them, `model_type` among them.
        tensors: by the names that Hugging Face's model of that type gives them.
        generation: as a generation_config.json has them.
    """

    path: Path
    fields: dict[str, Any]
    tensors: dict[str, StoredTensor]
    generation: dict[str, Any] = field(default_factory=dict)


@contextmanager
def error_prefix(prefix: str) -> Iterator[None]:
    """Put a prefix, such as the path of a file, before the messages of ValueErrors."""
    try:
        yield
    except ValueError as error:
        raise ValueError(f"{prefix}{str(error).removeprefix(prefix)}") from None


def let_go(array: np.ndarray) -> None:
    """Give the memory back that has come from the file for a view of it; it comes again where it is asked for."""
    owner: Any = array
    while owner is not None and not isinstance(owner, mmap.mmap):
        owner = getattr(owner, "base", None) if not isinstance(owner, memoryview) else owner.obj
    if owner is not None and hasattr(mmap, "MADV_DONTNEED"):
        owner.madvise(mmap.MADV_DONTNEED)
