"""The flags that all tasks of `tricycle inspect` share: the model, and a picture."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import tyro

from tricycle.devices import array_module
from tricycle.pretrained import Pretrained
from tricycle_cli.models import ModelFlags, load_model
from tricycle_lab.look.inspectable import InspectableStack
from tricycle_lab.plot import require_matplotlib


@dataclass(frozen=True, kw_only=True)
class InspectFlags:
    """The model to inspect, and the file of the picture."""

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """a model, as in `tricycle generate`"""
    out: Path | None = None
    """a PNG file to draw (needs matplotlib)"""
    tokeniser: Path | None = None
    """a tokenizer file, for a model without a tokenizer"""
    model: ModelFlags = field(default_factory=ModelFlags)

    def load(self) -> tuple[Pretrained, InspectableStack]:
        """Load the model, also as an inspectable one.

        Raises:
            ModuleNotFoundError: --out is given without matplotlib.
            ValueError: weights that are not finite, whose measures would be NaN; as of `load_model`.
        """
        if self.out is not None:
            require_matplotlib("--out")
        loaded = load_model(self.source, self.tokeniser, **vars(self.model))
        for name, parameter in loaded.model.named_parameters():
            if not array_module(parameter.array).isfinite(parameter.array).all():
                raise ValueError(f"{self.source}: expected finite weights, {name} has NaN or infinity")
        return loaded, InspectableStack(loaded.model, loaded.tokeniser, Path(self.source).name)
