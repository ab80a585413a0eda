"""Fit attention temperatures of a language model: by gradients for each head, or by the losses of single rows.

Shapes: N texts, T tokens, L layers, H heads, S keys.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from experiments.max_retrieval.prompts import Prompt
from experiments.max_retrieval.temperatures import Betas, use_temperature
from tricycle import kernels
from tricycle.attention import KeyValueCache, scores_and_weights
from tricycle.dataset import pad
from tricycle.devices import to_cpu
from tricycle.functions import LogSoftmax
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.optimisers import AdamW
from tricycle.softmaxes import AdaptiveSoftmax
from tricycle.tensor import Tensor, no_grad
from tricycle_lab.hooks import add_hook
from tricycle_lab.temperature import fit_adaptive_temperature

TRIED = (1.0, 1.15, 1.3, 1.5, 1.75, 2.0, 2.5, 3.0, 4.0, 6.0)  # inverse temperatures of the polynomial's fit


# -------------------------------------------------------------------- answers of prompts
def answer_logits(model: GPT, prompts: Sequence[Prompt]) -> tuple[Tensor, np.ndarray]:
    """Return the logits (K, V) that predict the K tokens of all scored answers, and the ids (K,) of these tokens."""
    ids, _ = pad([prompt.ids.tolist() for prompt in prompts])
    pairs = [
        (i, at) for i, prompt in enumerate(prompts) for part in prompt.answers for at in range(part.start, part.stop)
    ]
    rows, places = np.array(pairs, int).reshape(-1, 2).T
    hidden = model.hidden_states(ids[:, :-1])
    return model.logits(hidden[rows, places - 1]), ids[rows, places]


def loss_of_answers(model: GPT, prompts: Sequence[Prompt]) -> Tensor:
    """Return the scalar mean loss per token of the scored answers, in nats, ready for `backward`."""
    logits, labels = answer_logits(model, prompts)
    return CrossEntropy()(labels, logits)


def loss_of_text(model: GPT, ids: np.ndarray) -> Tensor:
    """Return the scalar mean loss per token of a text's ids (N, T + 1), in nats; first tokens have no loss."""
    return model.loss(ids[:, :-1], ids[:, 1:])


def grade_answers(model: GPT, prompts: Sequence[Prompt]) -> tuple[list[bool], list[float]]:
    """Return per scored answer whether each token is the argmax given those before, and its -log probability."""
    with no_grad():
        logits, labels = answer_logits(model, prompts)
        log_shares = to_cpu(LogSoftmax()(logits).array)
    right = log_shares.argmax(axis=-1) == labels
    nats = -log_shares[np.arange(len(labels)), labels].astype(float)
    sizes = [part.stop - part.start for prompt in prompts for part in prompt.answers]
    ends = np.cumsum(sizes)[:-1]
    return [bool(part.all()) for part in np.split(right, ends)], [float(part.sum()) for part in np.split(nats, ends)]


# -------------------------------------------------------------------- by gradient
def fit_betas(
    model: GPT, betas: Betas, batches: Sequence[Any], loss_of: Callable[[GPT, Any], Tensor], rate: float = 0.03
) -> list[float]:
    """Fit `betas` in place by Adam, one update per batch, and return the losses; the model must be frozen."""
    optimiser = AdamW(rate, weight_decay=0)
    losses = []
    with use_temperature(model, betas):
        for batch in batches:
            loss = loss_of(model, batch)
            loss.backward()
            losses.append(float(loss.array))
            optimiser.update((f"betas.{i}", parameter) for i, parameter in enumerate(betas.parameters))
            for parameter in betas.parameters:
                parameter.zero_grad()
    return losses


def beta_gradients(model: GPT, batches: Sequence[Any], loss_of: Callable[[GPT, Any], Tensor]) -> np.ndarray:
    """Return (batches, L, H): the loss gradient by each head's log inverse temperature, where it is 0.

    Below 0 where a head that is a little sharper lowers the loss.
    """
    config = model.config
    rows = []
    for batch in batches:
        betas = Betas(np.zeros((config.n_layers, config.n_heads)))
        with use_temperature(model, betas):
            loss_of(model, batch).backward()
        rows.append([level.grad.array if level.grad is not None else 0 * level.array for level in betas.levels])
    return np.array(rows, float)


# -------------------------------------------------------------------- polynomial temperature
def fit_polynomial(model: GPT, prompts: Sequence[Prompt], tried: Sequence[float] = TRIED) -> AdaptiveSoftmax:
    """Return an AdaptiveSoftmax with the polynomial that minimizes the loss of each prompt's first answer token.

    For each text and layer the rows are those of all heads at the last token before the first answer that counts. They
    are made sharper together, all else staying as it is, and each of them is charged the loss of that answer's first
    token: what one of them alone is worth is lost in the mean of many.
    """
    cases = [case for prompt in prompts for case in _cases_of(model, prompt)]

    def costs(number: int, weights: np.ndarray) -> np.ndarray:
        return np.full(len(weights), cases[number][1](weights))

    scores = [case[0] for case in cases]
    used = sum(int((AdaptiveSoftmax().inverse_temperature(rows)[-1] > 0.5).sum()) for rows in scores)
    n_bins = max(6, min(20, used))
    return AdaptiveSoftmax(fit_adaptive_temperature(scores, costs, tried, n_bins=n_bins))


Case = tuple[np.ndarray, Callable[[np.ndarray], float]]


def _cases_of(model: GPT, prompt: Prompt) -> list[Case]:
    """Return for each layer (scores (H, S) of the last prompt token, function from weights to the answer's loss)."""
    at = prompt.answers[0].start
    answer = int(prompt.ids[at])
    caches = model.new_caches()
    scores: list[np.ndarray] = []
    streams: list[Tensor] = []

    def measure_text(op: Any, out: Tensor, *args: Any) -> None:
        scores.append(scores_and_weights(op, *args)[0][0, :, 0])

    with no_grad():
        model.hidden_states(prompt.ids[None, : at - 1], caches)
        undo = [add_hook(block.attention.attention, "observers", measure_text) for block in model.blocks]
        undo += [add_hook(block, "observers", lambda block, out, x, *rest: streams.append(x)) for block in model.blocks]
        model.hidden_states(prompt.ids[None, at - 1 : at], caches)
        for remove_hook in undo:
            remove_hook()
    _drop_last_token(caches)

    costs = [partial(_loss_with, model, caches, answer, layer, stream) for layer, stream in enumerate(streams)]
    return list(zip(scores, costs))


def _loss_with(
    model: GPT, caches: list[KeyValueCache], answer: int, layer: int, stream: Tensor, weights: np.ndarray
) -> float:
    """Return the loss of a token if a layer's heads have these weights (H, S) in the last row; caches are unchanged."""

    def mixed(out: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Tensor:
        by_head = np.repeat(value.array[0].swapaxes(0, 1), query.shape[2] // value.shape[2], axis=0)  # (H, S, D)
        return Tensor((weights[:, None] @ by_head).swapaxes(0, 1)[None], requires_grad=False)

    with no_grad():
        remove_hook = add_hook(model.blocks[layer].attention.attention, "changes", mixed)
        x = stream
        for block, cache in zip(model.blocks[layer:], caches[layer:]):
            x = block(x, cache, None)
        remove_hook()
        logits = model.logits(x)
    _drop_last_token(caches[layer:])
    return float(-kernels.log_softmax(logits.array[0, -1])[answer])


def _drop_last_token(caches: list[KeyValueCache]) -> None:
    """Remove the last token of each cache in place."""
    for cache in caches:
        cache.truncate(cache.length - 1)
