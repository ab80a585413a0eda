"""The ablations of the recipe: a table of names and changed config fields."""

import ast
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

from tricycle.configs import GPTConfig

RECIPE = "recipe"
FIELDS = {field.name for field in fields(GPTConfig)}


@dataclass(frozen=True)
class Variant:
    """A variant of the recipe: a label and changed fields."""

    label: str  # what stands in tables and charts
    changes: dict[str, Any]  # values of the config's fields

    def of(self, recipe: GPTConfig) -> GPTConfig:
        """Return the recipe with the changes; fields that the config does not have are ignored.

        Raises:
            ValueError: a config that cannot be.
        """
        return replace(recipe, **{name: value for name, value in self.changes.items() if name in FIELDS})


# The preset before this recipe: GPT-2's model and training, with rates and a size that were chosen for ten minutes.
PLAIN: dict[str, Any] = {
    "vocab_size": 1024,
    "context_window": 256,
    "embedding_dim": 192,
    "n_heads": 3,
    "n_layers": 4,
    "expansion_ratio": 4.0,
    "activation": "gelu",
    "norm": "layer_norm",
    "positions": "learned",
    "qk_norm": False,
    "bias": True,
    "tied": True,
    "softmax": "softmax",
    "zero_projections": False,
    "token_shift": False,
    "key_shift": False,
    "rotary_fraction": 1.0,
    "score_scale": 0.0,
    "precision": "float32",
    "batch_size": 6,
    "accumulation_steps": 1,
    "optimiser": "adamw",
    "schedule": "cosine",
    "max_learning_rate": 4e-3,
    "min_learning_rate": 2e-4,
    "warmup_steps": 100,
    "weight_decay": 0.1,
    "beta1": 0.9,
    "beta2": 0.99,
    "max_gradient_norm": 1.0,
}
LEARNED = {"positions": "learned", "qk_norm": False}  # the norm of queries and keys needs rotary positions
# What was chosen for AdamW by itself, in the plain preset.
ADAMW = {name: PLAIN[name] for name in ("optimiser", "max_learning_rate", "warmup_steps", "max_gradient_norm")}


VARIANTS: dict[str, Variant] = {
    RECIPE: Variant("the recipe", {}),
    "plain": Variant("GPT-2's model and AdamW", PLAIN),
    "adamw": Variant("AdamW instead of Muon, with its own rate, warm-up and clipping", ADAMW),
    "no-qk-norm": Variant("no QK-norm", {"qk_norm": False}),
    "learned-positions": Variant("learned positions, no QK-norm", LEARNED),
    "gelu": Variant("GELU instead of squared ReLU", {"activation": "gelu"}),
    "swiglu": Variant("SwiGLU instead of squared ReLU", {"activation": "swiglu"}),
    "layer-norm": Variant("layer norm and biases", {"norm": "layer_norm", "bias": True}),
    "no-zeros": Variant("projections not at zero", {"zero_projections": False}),
    "no-shift": Variant("no token shift", {"token_shift": False}),
    "no-key-shift": Variant("no shift of keys", {"key_shift": False}),
    "cosine": Variant("cosine instead of linear", {"schedule": "cosine"}),
    "untied": Variant("untied output layer", {"tied": False}),
    "vocabulary-1024": Variant("vocabulary of 1,024", {"vocab_size": 1024}),
    "softmax1": Variant("softmax1 in attention", {"softmax": "softmax1"}),
}


def all_variants(also: Sequence[str] = ()) -> dict[str, Variant]:
    """Return VARIANTS and those of `also`, "name: field=value, ...", by name; ValueError for a known name or bad field.

    Raises:
        ValueError: a text of another form, a name that is taken, or no field of a config.
    """
    known = dict(VARIANTS)
    for text in also:
        name, _, changes = text.partition(":")
        if not name.strip() or not changes.strip() or name.strip() in known:
            raise ValueError(f'expected --also as "a new name: field=value, field=value", got {text!r}')
        known[name.strip()] = Variant(name.strip(), dict(_change(part, text) for part in changes.split(",")))
    return known


def _change(part: str, text: str) -> tuple[str, Any]:
    """Parse `part`, "field=value", to (field, literal or text); ValueError with `text` if the field is unknown."""
    field, equals, value = (piece.strip() for piece in part.partition("="))
    if not equals or field not in FIELDS:
        raise ValueError(f"expected fields of GPTConfig with their values in --also, got {part.strip()!r} in {text!r}")
    try:
        return field, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return field, value  # a name, such as adamw


def configs(recipe: GPTConfig, names: Sequence[str] = (), also: Sequence[str] = ()) -> dict[str, GPTConfig]:
    """Return {name: config}, recipe first, changed ones only, also of `also` ("name: field=value"); else ValueError.

    Args:
        names: of the variants; empty for all that change the recipe.

    Raises:
        ValueError: a name that no variant has, or a config that cannot be.
    """
    known = all_variants(also)
    unknown = [name for name in names if name not in known]
    if unknown:
        raise ValueError(f"expected --variants among {', '.join(known)}; got {', '.join(unknown)}")
    selected = dict.fromkeys([RECIPE, *names]) if names else known
    chosen = {}
    for name in selected:
        try:
            config = known[name].of(recipe)
        except ValueError as error:
            raise ValueError(f"variant {name}: {error}") from None
        if name == RECIPE or config != recipe:  # what the recipe has already, or what only one of them can have
            chosen[name] = config
    return chosen
