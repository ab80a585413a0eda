"""Encoder-decoders of about equal size: fixed context, attention before or after the decoder's step, transformer.

Shapes: B batch, S source characters, T target tokens, H hidden size of recurrent layers.
"""

from collections.abc import Callable
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
        """Return the scaled dot products of unprojected queries and of keys from `project_keys`."""
        return super().scores(self.query(query), key)


class Seq2SeqHard(Seq2SeqAttention):
    """As `Seq2SeqAttention` after the step, but each token's context is one vector of the encoder.

    In training the vector is drawn, and state["log_probability"] (B, T) is that of the draws; else it is the likeliest.
    """

    attention: Any  # HardAttention

    def start_decoding(self, source: Any, lengths: Any = None, capacity: int = 0) -> State:
        """Encode the source (B, S), and return the initial decoder state; `capacity` is ignored."""
        return {**Seq2Seq.start_decoding(self, source, lengths), "weights": None}

    def _attend(self, query: Tensor, state: State) -> tuple[Tensor, Tensor]:
        keys, mask = state["outputs"], state["mask"]
        context, state["log_probability"] = self.attention(query, keys, mask=mask)
        soft = self.attention.soft
        return context, soft.weights(query, soft.project_keys(keys), mask)


# -------------------------------------------------------------------- one of each size
def fixed(size: int, generator: np.random.Generator) -> Seq2Seq:
    """Return a new encoder-decoder without attention, with hidden size `size`."""
    return Seq2Seq(SOURCE_VOCAB, TARGET_VOCAB, EMBEDDING, size, generator=generator)


def attention_model(
    attention: Any, size: int, generator: np.random.Generator, before: bool = False, kind: Any = None
) -> Any:
    """Return a new encoder-decoder with this attention, of class `kind` (None: Seq2SeqAttention)."""
    vocabularies = SOURCE_VOCAB, TARGET_VOCAB
    return (kind or Seq2SeqAttention)(
        attention, *vocabularies, EMBEDDING, size, attend_before_step=before, generator=generator
    )


def bahdanau(size: int, generator: np.random.Generator) -> Seq2SeqAttention:
    """Return a new encoder-decoder with Bahdanau's additive attention before the step, with hidden size `size`."""
    return attention_model(AdditiveAttention(size, 2 * size, size, generator=generator), size, generator, before=True)


def luong(score: str) -> Callable[[int, np.random.Generator], Seq2SeqAttention]:
    """Return a function (size, generator) that builds a model with Luong's score, "general" or "concat"."""
    return lambda size, generator: attention_model(
        LuongAttention(size, 2 * size, score, generator=generator), size, generator
    )


def scaled_dot_product(size: int, generator: np.random.Generator) -> Seq2SeqAttention:
    """Return a new encoder-decoder with scaled dot-product attention, with hidden size `size`."""
    return attention_model(ProjectedDotProduct(size, 2 * size, generator), size, generator)


def hard(size: int, generator: np.random.Generator) -> Seq2SeqHard:
    """Return a new encoder-decoder with hard attention, with hidden size `size`; `generator` also draws its choices."""
    attention = HardAttention(LuongAttention(size, 2 * size, generator=generator), generator)
    return attention_model(attention, size, generator, kind=Seq2SeqHard)


def transformer(size: int, generator: np.random.Generator) -> Transformer:
    """Return a new encoder-decoder transformer of width `size`, a multiple of HEADS."""
    return Transformer(
        SOURCE_VOCAB, TARGET_VOCAB, size, HEADS, BLOCKS, WINDOW, dropout=0.0, norm_first=True, generator=generator
    )


MODELS: dict[str, Callable[[int, np.random.Generator], EncoderDecoder]] = {
    "fixed context": fixed,
    "additive": bahdanau,
    "Luong general": luong("general"),
    "Luong concat": luong("concat"),
    "scaled dot product": scaled_dot_product,
    "hard": hard,
    "Transformer": transformer,
}


def new_model(name: str, n_parameters: int, generator: np.random.Generator) -> EncoderDecoder:
    """Return a new model whose number of parameters is closest to `n_parameters`; widths are multiples of 4.

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
