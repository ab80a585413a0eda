"""Softmax variants beside those in `functions.py`, added to its table of names.

A new one is a file with the function and its gradient, its row here, and its sample in tests/samples.py.
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
