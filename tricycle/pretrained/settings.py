"""How a model's makers would have it write."""

from __future__ import annotations

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
        """
        names = [name for name in cls.__dataclass_fields__ if name != "stop_tokens"]
        values = {name: generation[name] for name in names if generation.get(name) is not None}
        stop = generation.get("eos_token_id", config.get("eos_token_id"))
        stop_tokens = () if stop is None else tuple(stop) if isinstance(stop, list) else (stop,)
        return cls(**values, stop_tokens=stop_tokens)
