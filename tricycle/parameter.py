"""`Parameter`: a trainable Tensor of a layer."""

from __future__ import annotations

from tricycle.tensor import Operand, Tensor, to_tensor

# Hidden matrix, tables of tokens and positions, factor and summand per channel, other factors, output matrix, router
ROLES = ("matrix", "embedding", "position", "gain", "bias", "scale", "head", "router")


class Parameter(Tensor):
    """A trainable Tensor. Optimizers choose its update rule by its role (one of ROLES) or, if None, by its axes."""

    __slots__ = ("role",)
    _copied = (*Tensor._copied, "role")

    def __init__(self, values: Operand, role: str | None = None) -> None:
        if role is not None and role not in ROLES:
            raise ValueError(f"Parameter: expected role to be one of {', '.join(ROLES)}, got {role!r}")
        super().__init__(to_tensor(values).array)
        self.role = role
