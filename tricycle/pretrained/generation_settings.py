"""How a model's makers would have it write."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GenerationSettings:
    """What a generation_config.json says; the defaults are those of `transformers`.

    Attributes:
        do_sample: draw tokens by the settings below; else the likeliest is taken.
        temperature, top_k, top_p, min_p: as of `generate.sample`.
        repetition_penalty: logits of tokens that the text has already are divided by this, or multiplied where they
            are below 0 (Keskar et al. 2019); 1 leaves them.
        stop_tokens: ids that end a text.
    """

    do_sample: bool = False
    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    stop_tokens: tuple[int, ...] = ()

    @classmethod
    def from_fields(cls, generation: dict[str, Any], config: dict[str, Any]) -> GenerationSettings:
        """From the fields of a generation_config.json; where it names no end, config.json's counts.

        Null, as newer files have it, means the default.

        Raises:
            ValueError: a setting of another type than it must have.
        """
        names = [name for name in cls.__dataclass_fields__ if name != "stop_tokens"]
        values = {name: generation[name] for name in names if generation.get(name) is not None}
        for name, value in values.items():
            kind: Any = type(getattr(cls, name))
            fits = isinstance(value, bool) == (kind is bool) and isinstance(value, (int, float))
            if not fits or not abs(value) < math.inf or (kind is int and int(value) != value):
                raise ValueError(f"generation_config.json: expected {name} to be a {kind.__name__}, got {value!r:.60}")
            values[name] = kind(value)
        stop = generation.get("eos_token_id")
        stop = config.get("eos_token_id") if stop is None else stop
        stop_tokens = () if stop is None else tuple(stop) if isinstance(stop, list) else (stop,)
        if not all(type(token) is int and token >= 0 for token in stop_tokens):
            raise ValueError(f"expected eos_token_id to be the id of a token, or a list of them, got {stop!r:.60}")
        return cls(**values, stop_tokens=stop_tokens)
