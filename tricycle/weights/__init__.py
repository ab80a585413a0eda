"""How the weights of a model are stored: quantized to 8 or 16 bits, and in which memory order."""

from __future__ import annotations

from typing import TypeVar

from tricycle.kernels.quantized import QuantizedMatrix
from tricycle.layers import Dense, Embedding, Layer

__all__ = ["quantize", "use_order"]

AnyLayer = TypeVar("AnyLayer", bound=Layer)


def quantize(model: AnyLayer, dtype_name: str = "int8") -> AnyLayer:
    """Store the matrices and token embeddings of a model in fewer bits, and freeze everything; return the model.

    A product with few rows then takes less time, which is that in which its weights come from memory. Gradients flow
    through these weights, but not to them. Matrices that are quantized already stay as they are.

    Args:
        dtype_name: "int8", "bfloat16" or "float16".

    Raises:
        ValueError: another dtype, weights that are not finite or on a GPU. Nothing has changed then.
        ImportError: bfloat16 without ml_dtypes.
    """
    places = [layer for layer in model.layers() if isinstance(layer, (Dense, Embedding))]
    weights = {id(layer.weights): layer for layer in places if layer.weights.array.dtype.itemsize > 2}
    chosen = [layer for layer in weights.values() if getattr(layer.weights, "role", None) != "position"]
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


def use_order(model: AnyLayer, order: str) -> AnyLayer:
    """Store the matrices of a model in this memory order; return the model. Their values stay.

    Args:
        order: "C", row by row, as training is fastest; or "F", column by column, as a product with one row is, and so
            generation. Matrices stored otherwise are copied, one at a time.

    Raises:
        ValueError: another order.
    """
    if order not in ("C", "F"):
        raise ValueError(f"use_order: expected 'C' or 'F', got {order!r}")
    for layer in model.layers():
        if isinstance(layer, Dense) and not isinstance(layer.weights.array, QuantizedMatrix):
            layer.weights.array = layer.weights.xp.asarray(layer.weights.array, order=order)
    return model
