"""Storage of the weights of a model: quantization to 8 or 16 bits, and memory order."""

from __future__ import annotations

from typing import TypeVar

from tricycle.kernels.quantized import QuantizedMatrix
from tricycle.layers import Dense, Embedding, Layer

__all__ = ["quantize", "set_memory_order"]

UNQUANTIZED = ("position", "router")  # roles of small tables whose rounding would change much
AnyLayer = TypeVar("AnyLayer", bound=Layer)


def quantize(model: AnyLayer, dtype_name: str = "int8") -> AnyLayer:
    """Quantize a model's float32 matrices in place, freeze it, return it; ValueError on a GPU or if not finite.

    Products with few rows then take less time, as they are limited by memory bandwidth. Gradients flow through the
    quantized weights, but not to them. Matrices that are quantized already stay unchanged.

    Args:
        dtype_name: "int8", "bfloat16" or "float16".

    Raises:
        ValueError: an unknown dtype, weights that are not finite or on a GPU; the model is unchanged.
        ImportError: bfloat16 without ml_dtypes.
    """
    places = [layer for layer in model.layers() if isinstance(layer, (Dense, Embedding))]
    weights = {id(layer.weights): layer for layer in places if layer.weights.array.dtype.itemsize > 2}
    chosen = [layer for layer in weights.values() if getattr(layer.weights, "role", None) not in UNQUANTIZED]
    if any(layer.weights.on_gpu for layer in chosen):
        raise ValueError("quantize: expected weights in host memory, got them on a GPU")
    new = [
        QuantizedMatrix.quantize(layer.weights.array, dtype_name, transposed=isinstance(layer, Dense))
        for layer in chosen
    ]
    for layer, matrix in zip(chosen, new):
        layer.weights.array = matrix
    model.freeze()
    return model


def set_memory_order(model: AnyLayer, order: str) -> AnyLayer:
    """Store unquantized Dense weights in "C" or "F" memory order (else ValueError) in place; return the model.

    Args:
        order: "C" (row-major), the fastest for training; or "F" (column-major), the fastest for products with one row,
            as in generation. Matrices in another order are copied, one at a time.
    """
    if order not in ("C", "F"):
        raise ValueError(f"set_memory_order: expected 'C' or 'F', got {order!r}")
    for layer in model.layers():
        if isinstance(layer, Dense) and not isinstance(layer.weights.array, QuantizedMatrix):
            layer.weights.array = layer.weights.xp.asarray(layer.weights.array, order=order)
    return model
