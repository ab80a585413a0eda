"""Softmax variants of attention, added to the table `functions.SOFTMAXES`.

A new variant needs a file with the function and its gradient, a row here, and a strategy in tests/op_properties.py.
"""

from dataclasses import replace
from typing import Any

from tricycle.functions import SOFTMAXES, new_softmax
from tricycle.softmaxes import row_attention  # noqa: F401  (it adds a method)
from tricycle.softmaxes.adaptive import AdaptiveSoftmax
from tricycle.softmaxes.blocks import BlockSoftmax
from tricycle.softmaxes.sink import SinkSoftmax

__all__ = ["SOFTMAXES", "AdaptiveSoftmax", "BlockSoftmax", "SinkSoftmax", "config_with_softmax", "new_softmax"]

SOFTMAXES["adaptive"] = AdaptiveSoftmax
SOFTMAXES["blocks"] = BlockSoftmax
SOFTMAXES["sink"] = SinkSoftmax


def config_with_softmax(model: Any) -> Any:
    """Return a model's config with the name of the softmax variant that its blocks use, for a file of the model.

    The config has another name if `use_softmax` got an object, or was called for the blocks.

    Raises:
        ValueError: no name in SOFTMAXES makes this variant, or the blocks have different ones.
    """
    layers = [block.attention for block in getattr(model, "blocks", ()) if hasattr(block, "attention")]
    layers = [layer for layer in layers if hasattr(layer, "use_softmax")]
    if not layers:
        return model.config
    used = {repr(layer.attention.softmax) for layer in layers}
    n_blocks = getattr(layers[0].attention.softmax, "n_blocks", model.config.softmax_blocks)
    for name in (model.config.softmax, *SOFTMAXES):
        config = replace(model.config, softmax=name, softmax_blocks=n_blocks)
        made = {repr(new_softmax(name, config).for_layer(layer.n_heads, layer.context_window)[0]) for layer in layers}
        if made == used:
            return config
    got = ", ".join(sorted(used))
    raise ValueError(f"softmax: expected one variant in all blocks, made by a name in functions.SOFTMAXES, got {got}")
