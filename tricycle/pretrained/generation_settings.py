"""Generation settings that the authors of a model recommend (generation_config.json)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class GenerationSettings:
    """The settings of a generation_config.json; the defaults are those of `transformers`.

    Attributes:
        do_sample: sample tokens with the settings below; False for greedy decoding.
        temperature, top_k, top_p, min_p: see `tricycle.sampling.SamplingParams`.
        repetition_penalty: positive logits of tokens that occurred in the text are divided by it, and negative ones
            multiplied (Keskar et al. 2019); 1 turns it off.
        stop_tokens: ids of tokens that end a text.
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
        """Create settings from generation_config.json; stop tokens else from config.json; ValueError if invalid.

        Null, which newer files contain, means the default.

        Raises:
            ValueError: a setting has another type.
        """
        names = [name for name in cls.__dataclass_fields__ if name != "stop_tokens"]
        values = {name: generation[name] for name in names if generation.get(name) is not None}
        for name, value in values.items():
            dtype: Any = type(getattr(cls, name))
            has_type = isinstance(value, bool) == (dtype is bool) and isinstance(value, (int, float))
            if not has_type or not abs(value) < math.inf or (dtype is int and int(value) != value):
                raise ValueError(f"generation_config.json: expected {name} to be a {dtype.__name__}, got {value!r:.60}")
            values[name] = dtype(value)
        stop = generation.get("eos_token_id")
        stop = config.get("eos_token_id") if stop is None else stop
        stop_tokens = () if stop is None else tuple(stop) if isinstance(stop, list) else (stop,)
        if not all(type(token) is int and token >= 0 for token in stop_tokens):
            raise ValueError(f"expected eos_token_id to be the id of a token, or a list of them, got {stop!r:.60}")
        return cls(**values, stop_tokens=stop_tokens)
