"""Change parts of a model at the first token, and measure the attention to that token and the loss.

Shapes: N texts, T tokens, L layers, H heads, C channels.
"""

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.shared.language_models import load_model, text_of, windows
from experiments.shared.program import check_minimum
from experiments.shared.results import rounded
from tricycle.devices import to_cpu
from tricycle.models import GPT
from tricycle_lab.hooks import add_hook
from tricycle_lab.probe import Probe

N_BEFORE = 16  # tokens before a text in which its first token is in the middle
Change = Callable[[GPT, Probe, ExitStack], None]


@dataclass(frozen=True)
class Settings:
    """The command-line settings of the study of attention sinks."""

    model: str = "smollm2"  # as `tricycle.pretrained.load` takes it
    texts: int = 2  # pieces of source code
    tokens: int = 64  # of each piece
    stride: int = 1  # between the layers that are changed
    quick: bool = False  # a smaller study of at most three minutes
    output: Path = Path("runs/attention_sink")  # the output folder


QUICK: dict[str, Any] = {"texts": 1, "tokens": 48, "stride": 3}


def check(settings: Settings) -> None:
    """Raise ValueError if there are fewer than 1 text, 8 tokens or a stride of 1."""
    check_minimum(settings, texts=1, tokens=8, stride=1)


def measure(model: GPT, ids: np.ndarray, change: Change | None = None, mask: Any = None) -> dict[str, Any]:
    """Return a (changed) model's "sink" and "norms" of the first token by layer, and "loss" in nats, on ids (N, T + 1).

    "sink" is the mean attention weight on the first token from later ones, for each layer. "norms" is the norm of the
    first token's residual stream after each block, divided by the median of the others. "loss" is in nats per token,
    from the third token on.
    """
    with model.evaluating(), ExitStack() as undo:
        probe = undo.enter_context(Probe(model, "blocks.*.attention", "blocks.*"))
        if change is not None:
            change(model, probe, undo)
        hidden = model.hidden_states(model.place(ids[:, :-1]), None, mask)
        logits = to_cpu(model.logits(hidden).array)[:, 1:].astype(np.float64)
    logits -= logits.max(axis=-1, keepdims=True)
    chosen = np.take_along_axis(logits, ids[:, 2:, None], axis=-1)[..., 0]
    sink, norms = [], []
    for layer in range(len(model.blocks)):
        sink.append(float(to_cpu(probe.weights[f"blocks.{layer}.attention"])[:, :, 1:, 0].mean()))
        lengths = np.linalg.norm(to_cpu(probe.activations[f"blocks.{layer}"]), axis=-1)
        norms.append(float((lengths[:, 0] / np.median(lengths[:, 1:], axis=1)).mean()))
    return {"sink": sink, "norms": norms, "loss": float((np.log(np.exp(logits).sum(axis=-1)) - chosen).mean())}


# -------------------------------------------------------------------- changes
def ablate(*patterns: str) -> Change:
    """Return a change that sets results of layers at the first token to 0."""

    def change(model: GPT, probe: Probe, undo: ExitStack) -> None:
        for pattern in patterns:
            probe.ablate(pattern, positions=0)

    return change


def patch_first(layer: int, stream: np.ndarray) -> Change:
    """Return a change that replaces the first token's residual stream after a block by `stream`, (N, 1, C)."""
    return lambda model, probe, undo: probe.replace(f"blocks.{layer}", stream, positions=0) and None


def remove_values(model: GPT, probe: Probe, undo: ExitStack) -> None:
    """Set the first token's values to 0 in all heads until `undo` closes, so that its attention weights add nothing."""

    def substitute(op: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        query, key, value, *rest = args
        kept = np.ones((1, value.shape[1], 1, 1), np.float32)
        kept[:, 0] = 0
        return op, (query, key, value * kept, *rest)

    for block in model.blocks:
        undo.callback(add_hook(block.attention.attention, "substitutions", substitute))


def hide_first(n_tokens: int) -> np.ndarray:
    """Return an attention mask (1, T, T) in which only the first token sees the first token."""
    mask = np.ones((1, n_tokens, n_tokens), bool)
    mask[:, 1:, 0] = False
    return mask


def streams_in_the_middle(model: GPT, ids: np.ndarray, before: np.ndarray) -> list[np.ndarray]:
    """Return first tokens' streams (N, 1, C) after each block when they follow the tokens `before` (N, N_BEFORE).

    Args:
        before: tokens in front of each text, (N, N_BEFORE).
    """
    with model.evaluating(), Probe(model, "blocks.*") as probe:
        model.hidden_states(model.place(np.concatenate([before, ids[:, :1]], axis=1)))
    return [to_cpu(probe.activations[f"blocks.{layer}"])[:, -1:] for layer in range(len(model.blocks))]


# -------------------------------------------------------------------- the study
def run(settings: Settings) -> dict[str, Any]:
    """Return the measures: "intact", "mlp", "attention" and "patched" by layer, and other changes by name."""
    loaded = load_model(settings.model)
    model = loaded.model
    rows = windows(loaded.tokeniser, text_of("code", "test"), 2 * settings.texts, settings.tokens).ids
    ids, before = rows[: settings.texts], rows[settings.texts :, :N_BEFORE]
    layers = range(0, len(model.blocks), settings.stride)
    results: dict[str, Any] = {"layers": list(layers), "intact": measure(model, ids)}
    for part in ("mlp", "attention"):
        results[part] = [measure(model, ids, ablate(f"blocks.{layer}.{part}")) for layer in layers]
    streams = streams_in_the_middle(model, ids, before)
    results["patched"] = [measure(model, ids, patch_first(layer, streams[layer])) for layer in layers]
    results["values removed"] = measure(model, ids, remove_values)
    results["first token hidden"] = measure(model, ids, mask=hide_first(settings.tokens))
    return rounded(results, 4)
