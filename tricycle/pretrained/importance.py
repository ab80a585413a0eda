"""The importance of the input channels of linear layers, measured on a text, for the quantization of their weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from tricycle.layers import Dense
from tricycle.models import GPT
from tricycle.tensor import Operand, Tensor

MIN_TOKENS = 512  # fewer tokens do not represent the inputs of a layer
MAX_CHUNK = 512


def measure_importance(
    model: GPT, tokens: np.ndarray, start_token: int | None = None, progress: bool = False
) -> dict[str, np.ndarray]:
    """Return the mean square of each input channel over a text's tokens, float64 (in,), by the weights' name.

    These are the weights of all `Dense` layers, and the token embedding if the output layer uses it.

    Args:
        model: a GPT.
        tokens: ids (T,) of a text, at least MIN_TOKENS. The text is divided into chunks of at most 512 tokens and at
            most the context window; a shorter chunk at the end is left out.
        start_token: the first token of each chunk, if the model expects one.
        progress: show a progress bar if it takes more than two seconds.

    Raises:
        ValueError: the text is too short, or an input of a layer is not finite.
    """
    from tqdm import tqdm

    if len(tokens) < MIN_TOKENS:
        raise ValueError(f"measure_importance: expected a text of at least {MIN_TOKENS} tokens, got {len(tokens)}")
    start = [] if start_token is None else [start_token]
    size = max(1, min(MAX_CHUNK, model.config.context_window) - len(start))
    sums: dict[str, np.ndarray] = {}
    n_rows: dict[str, int] = {}

    def add(name: str, x: Tensor) -> None:
        squares = np.square(x.numpy().reshape(-1, x.shape[-1]), dtype=np.float64)
        sums[name] = sums.get(name, 0) + squares.sum(axis=0)
        n_rows[name] = n_rows.get(name, 0) + len(squares)
        if not np.isfinite(sums[name]).all():
            raise ValueError(f"measure_importance: expected finite inputs of {name}, got NaN or infinity")

    def add_output(hidden: Tensor) -> Tensor:
        x = hidden if model.norm is None else model.norm(hidden)
        x = x if model.head_projection is None else model.head_projection(x)
        add("token_embedding.weights" if model.head is None else "head.weights", x)
        return x

    n_chunks = len(tokens) // size
    bar = tqdm(desc="Calibrating", total=n_chunks * size, unit=" tokens", delay=2, disable=not progress)
    with model.evaluating(), _observe_inputs(model, add), bar:
        for chunk in np.asarray(tokens[: n_chunks * size], np.int64).reshape(n_chunks, size):
            model(model.place(np.concatenate([start, chunk]).astype(np.int64)), output_fn=add_output)
            bar.update(size)
    return {name: total / n_rows[name] for name, total in sums.items()}


@contextmanager
def _observe_inputs(model: GPT, observer: Callable[[str, Tensor], None]) -> Iterator[None]:
    """In a block, call observer(weights' name, input) at each call of a `Dense` layer; restore layers at the end."""
    layers = {f"{name}.weights": layer for name, layer in model.named_layers() if isinstance(layer, Dense)}
    own_forwards = {name: vars(layer).get("forward") for name, layer in layers.items()}

    def new_forward(name: str, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def observed(x: Operand, dtype: Any = None) -> Tensor:
            observer(name, x if isinstance(x, Tensor) else Tensor(x))
            return forward(x, dtype)

        return observed

    try:
        for name, layer in layers.items():
            vars(layer)["forward"] = new_forward(name, layer.forward)
        yield
    finally:
        for name, layer in layers.items():
            vars(layer).pop("forward", None)
            if own_forwards[name] is not None:
                vars(layer)["forward"] = own_forwards[name]
