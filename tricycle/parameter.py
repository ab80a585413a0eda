"""`Parameter`: a Tensor that a model learns."""

from __future__ import annotations

from tricycle.tensor import Operand, Tensor, to_tensor

# What a parameter can be: a matrix between hidden layers, a table of vectors for ids, a table of positions, a factor or
# a summand for each channel, any other factors, and the matrix that gives the output.
ROLES = ("matrix", "embedding", "position", "gain", "bias", "scale", "head")


class Parameter(Tensor):
    """A Tensor that a model learns, with one of ROLES, by which optimisers choose their rule; None: by its axes."""

    __slots__ = ("role",)
    _copied = (*Tensor._copied, "role")

    def __init__(self, values: Operand, role: str | None = None) -> None:
        if role is not None and role not in ROLES:
            raise ValueError(f"Parameter: expected role to be one of {', '.join(ROLES)}, got {role!r}")
        super().__init__(to_tensor(values).array)
        self.role = role
