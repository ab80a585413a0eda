"""Encoder-decoders of about equal size: fixed context, attention before or after the decoder's step, transformer.

Shapes: B batch, S source characters, T target tokens, H hidden size of recurrent layers.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from experiments.dates.data import SOURCE_VOCAB, TARGET_VOCAB
from tricycle.layers import Dense
from tricycle.sequences.attentions import AdditiveAttention, HardAttention, LuongAttention, ScaledDotProductAttention
from tricycle.sequences.seq2seq import EncoderDecoder, Seq2Seq, Seq2SeqAttention, State, Transformer
from tricycle.tensor import Tensor

EMBEDDING = 32  # of characters, in recurrent models
HEADS, BLOCKS = 4, 2  # of the Transformer
WINDOW = 512  # the most characters it could read
NewModel = Callable[[int, np.random.Generator], EncoderDecoder]


class ProjectedDotProduct(ScaledDotProductAttention):
    """Scaled dot-product scores q W_q . k W_k / sqrt(H), for a recurrent decoder's queries (H) and keys (2 H)."""

    def __init__(self, query_size: int, key_size: int, generator: np.random.Generator) -> None:
        super().__init__()
        self.query = Dense(query_size, query_size, False, generator=generator)
        self.key = Dense(key_size, query_size, False, generator=generator)

    def project_keys(self, key: Tensor) -> Tensor:
        """Return the keys (..., 2 H) projected to the size of queries, (..., H)."""
        return self.key(key)

    def scores(self, query: Tensor, key: Tensor) -> Tensor:
        """Return the scaled dot products of `query`, which is projected here, and `key`, from `project_keys`."""
        return super().scores(self.query(query), key)


class Seq2SeqHard(Seq2SeqAttention):
    """As `Seq2SeqAttention` after the step, but each token's context is one vector of the encoder.

    In training the vector is sampled, with state["log_probability"] (B, T); else it is the most probable one.
    """

    attention: Any  # HardAttention

    def start_decoding(self, source: Any, lengths: Any = None, capacity: int = 0) -> State:
        """Encode the source (B, S), and return the initial decoder state; `capacity` is ignored."""
        return {**Seq2Seq.start_decoding(self, source, lengths), "weights": None}

    def _attend(self, query: Tensor, state: State) -> tuple[Tensor, Tensor]:
        """Return the context of hard attention and the soft weights; store the choice's log probability in `state`."""
        keys, mask = state["outputs"], state["mask"]
        context, state["log_probability"] = self.attention(query, keys, mask=mask)
        soft = self.attention.soft
        return context, soft.weights(query, soft.project_keys(keys), mask)


# -------------------------------------------------------------------- one of each size
def with_attention(new_attention: Callable[[int, np.random.Generator], Any], before: bool = False) -> NewModel:
    """Return a function (size, generator) that builds a model with attention, after the decoder's step by default."""

    def new(size: int, generator: np.random.Generator) -> EncoderDecoder:
        attention = new_attention(size, generator)
        kind = Seq2SeqHard if isinstance(attention, HardAttention) else Seq2SeqAttention
        sizes = SOURCE_VOCAB, TARGET_VOCAB, EMBEDDING, size
        return kind(attention, *sizes, attend_before_step=before, generator=generator)

    return new


def luong(size: int, generator: np.random.Generator, score: str = "general") -> LuongAttention:
    """Return Luong's attention of decoder states (size) to encoder outputs (2 size)."""
    return LuongAttention(size, 2 * size, score, generator=generator)


MODELS: dict[str, NewModel] = {  # from hidden size (width of the Transformer, a multiple of HEADS) and generator
    "fixed context": lambda size, rng: Seq2Seq(SOURCE_VOCAB, TARGET_VOCAB, EMBEDDING, size, generator=rng),
    "additive": with_attention(lambda size, rng: AdditiveAttention(size, 2 * size, size, generator=rng), before=True),
    "Luong general": with_attention(luong),
    "Luong concat": with_attention(partial(luong, score="concat")),
    "scaled dot product": with_attention(lambda size, rng: ProjectedDotProduct(size, 2 * size, rng)),
    "hard": with_attention(lambda size, rng: HardAttention(luong(size, rng), rng)),  # draws its choices, too
    "Transformer": lambda size, rng: Transformer(
        SOURCE_VOCAB, TARGET_VOCAB, size, HEADS, BLOCKS, WINDOW, dropout=0.0, norm_first=True, generator=rng
    ),
}


def new_model(name: str, n_parameters: int, generator: np.random.Generator) -> EncoderDecoder:
    """Return a new model of about `n_parameters`, the width a multiple of 4; ValueError if it has over twice as many.

    Raises:
        ValueError: the narrowest has more than twice as many.
    """
    best, size = MODELS[name](8, np.random.default_rng(0)), 12
    while best.n_parameters < n_parameters:
        wider = MODELS[name](size, np.random.default_rng(0))
        if abs(wider.n_parameters - n_parameters) > abs(best.n_parameters - n_parameters):
            break
        best, size = wider, size + 4
    if best.n_parameters > 2 * n_parameters:
        least = -(-best.n_parameters // 2)
        raise ValueError(f"expected --parameters to be at least {least} for {name}, got {n_parameters}")
    return MODELS[name](size - 4, generator)
