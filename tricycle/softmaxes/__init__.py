"""Softmax variants of attention, added to the table `functions.SOFTMAXES`.

A new variant needs a file with the function and its gradient, a row here, and a strategy in tests/op_properties.py.
"""

from tricycle.functions import SOFTMAXES, new_softmax
from tricycle.softmaxes import row_attention  # noqa: F401  (it adds a method)
from tricycle.softmaxes.adaptive import AdaptiveSoftmax
from tricycle.softmaxes.blocks import BlockSoftmax
from tricycle.softmaxes.sink import SinkSoftmax

__all__ = ["SOFTMAXES", "AdaptiveSoftmax", "BlockSoftmax", "SinkSoftmax", "new_softmax"]

SOFTMAXES["adaptive"] = AdaptiveSoftmax
SOFTMAXES["blocks"] = BlockSoftmax
SOFTMAXES["sink"] = SinkSoftmax
