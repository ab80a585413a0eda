"""Encoder-decoder models: recurrent, recurrent with attention, and transformer.

The encoder computes a vector for each source token. The decoder predicts the target from them, one token at a time. In
training it gets all previous target tokens (teacher forcing), so one call processes the whole target.

Shapes: B batch, S source tokens, T target tokens, C channels, H hidden size, L layers, V target vocabulary.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import numpy as np

from tricycle.attention import KeyValueCache, length_mask
from tricycle.blocks import TransformerBlock, new_norm
from tricycle.configs.model import ModelConfig
from tricycle.extra_ops import concatenate
from tricycle.functions import linear
from tricycle.initialisers import normal
from tricycle.layers import Dense, Dropout, Embedding, Generator, Layer, new_generator
from tricycle.ops import as_tensor, check_positive, tanh
from tricycle.parameter import Parameter
from tricycle.sequences.attentions import ScaledDotProductAttention
from tricycle.sequences.cross_attention import DecoderBlock
from tricycle.sequences.recurrent import new_recurrent
from tricycle.tensor import Operand, Tensor

State = dict[str, Any]  # the state of a decoder between two calls; its arrays have the batch on axis 0


class EncoderDecoder(Layer):
    """The base class of encoder-decoders; subclasses define `start_decoding` and `decode`."""

    def start_decoding(self, source: Operand, lengths: Any = None, capacity: int = 0) -> State:
        """Encode the source, and return the initial state of the decoder; defined in subclasses (NotImplementedError).

        Args:
            source: integers (B, S).
            lengths: (B,), the number of source tokens before the padding; all if not given.
            capacity: the most target tokens of all calls of `decode`; 0 if `decode` is called once.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no start")

    def decode(self, target: Operand, state: State) -> Tensor:
        """Return logits (B, T, V) after each target token (B, T), advance the state; here NotImplementedError."""
        raise NotImplementedError(f"{type(self).__name__} defines no decode")

    def forward(self, source: Operand, target: Operand, lengths: Any = None) -> Tensor:
        """Return the logits (B, T, V) after each target token (B, T), given the source (B, S)."""
        return self.decode(target, self.start_decoding(source, lengths))


# -------------------------------------------------------------------- recurrent
class RecurrentEncoder(Layer):
    """An embedding followed by a bidirectional recurrent network.

    Args:
        vocab_size: the size of the vocabulary.
        hidden_size: H, of each direction.
        cell: "rnn", "gru" or "lstm".
        dropout: probability of dropping an element of the embeddings, and between layers.
    """

    def __init__(
        self,
        vocab_size: int,
        embedding_dim: int,
        hidden_size: int,
        n_layers: int = 1,
        cell: str = "gru",
        dropout: float = 0.0,
        generator: Generator = None,
    ) -> None:
        generator = new_generator(generator)
        self.embedding = Embedding(vocab_size, embedding_dim, normal(0.1), generator)
        self.run = new_recurrent(cell, embedding_dim, hidden_size, n_layers, True, dropout=dropout, generator=generator)
        self.dropout = Dropout(dropout, generator)

    def states(self, tokens: Operand, lengths: Any = None) -> tuple[Tensor, list[Tensor]]:
        """Return outputs (B, S, 2 H) and a list of final states, h or (LSTM) h and c, (L, B, 2 H): both directions."""
        outputs, final = self.run(self.dropout(self.embedding(tokens)), lengths)
        return outputs, [concatenate([state[0::2], state[1::2]], axis=-1) for state in _states(final)]

    def forward(self, tokens: Operand, lengths: Any = None) -> Tensor:
        """Return the outputs (B, S, 2 H) of tokens (B, S), both directions concatenated, 0 in the padding."""
        return self.states(tokens, lengths)[0]


class Seq2Seq(EncoderDecoder):
    """A recurrent encoder-decoder without attention: the decoder gets the encoder's final states (Cho et al. 2014).

    h_t = f(h_{t-1}, [y_{t-1}; c]): the context c is the final state of the encoder's top layer, in both directions.

    Args:
        source_vocab, target_vocab: the sizes of the vocabularies.
        embedding_dim: of both embeddings.
        hidden_size: H, of each direction of the encoder and of the decoder.
        n_layers: of both.
        cell: "rnn", "gru" or "lstm".
        dropout: probability of dropping an element of embeddings, between layers and before the output.
    """

    attend_before_step = True  # each decoder input is the embedding with the context appended

    def __init__(
        self,
        source_vocab: int,
        target_vocab: int,
        embedding_dim: int,
        hidden_size: int,
        n_layers: int = 1,
        cell: str = "gru",
        dropout: float = 0.0,
        generator: Generator = None,
    ) -> None:
        generator = new_generator(generator)
        self.encoder = RecurrentEncoder(source_vocab, embedding_dim, hidden_size, n_layers, cell, dropout, generator)
        self.embedding = Embedding(target_vocab, embedding_dim, normal(0.1), generator)
        self.bridge = Dense(2 * hidden_size, hidden_size, generator=generator)
        inputs = embedding_dim + 2 * hidden_size * self.attend_before_step
        self.decoder = new_recurrent(cell, inputs, hidden_size, n_layers, dropout=dropout, generator=generator)
        self.output = Dense(hidden_size, target_vocab, generator=generator, role="head")
        self.dropout = Dropout(dropout, generator)

    def start_decoding(self, source: Operand, lengths: Any = None, capacity: int = 0) -> State:
        """Encode source (B, S); return a dict: decoder "hidden", encoder "context" (last state), "outputs", "mask"."""
        source = as_tensor(source)
        lengths = np.full(len(source), source.shape[-1]) if lengths is None else lengths
        outputs, both = self.encoder.states(source, lengths)
        hidden = [tanh(self.bridge(state)).transpose(1, 0, 2) for state in both]
        mask = length_mask(lengths, source.shape[-1])
        return {"hidden": hidden, "context": both[0][-1], "outputs": outputs, "mask": mask}

    def decode(self, target: Operand, state: State) -> Tensor:
        """Return the logits (B, T, V) after each target token (B, T), and advance the state in place."""
        y = self.dropout(self.embedding(as_tensor(target)))
        ones = Tensor(y.xp.ones((*y.shape[:2], 1), y.dtype), requires_grad=False)
        context = ones * state["context"][:, None]
        return self.output(self.dropout(self._run(concatenate([y, context], axis=-1), state)))

    def _run(self, inputs: Tensor, state: State) -> Tensor:
        """Return the decoder's outputs (B, T, H), and advance the hidden states in `state`."""
        hidden = [part.transpose(1, 0, 2) for part in state["hidden"]]
        outputs, final = self.decoder(inputs, initial=hidden[0] if len(hidden) == 1 else hidden)
        state["hidden"] = [part.transpose(1, 0, 2) for part in _states(final)]
        return outputs


class Seq2SeqAttention(Seq2Seq):
    """A recurrent encoder-decoder with attention: the decoder attends to all encoder outputs at each step.

    Args:
        attention: a layer for queries of size H and keys of size 2 H, such as `AdditiveAttention(H, 2 * H, H)` or
            `LuongAttention(H, 2 * H)`.
        attend_before_step: the query is h_{t-1}, and the context is an input of the step, h_t = f(h_{t-1}, [y_{t-1};
            c_t]) (Bahdanau et al. 2015); else the query is h_t, for all steps at once (Luong et al. 2015). The output
            is computed from tanh(W [h_t; c_t]) in both cases.
        others: see `Seq2Seq`.
    """

    def __init__(
        self,
        attention: ScaledDotProductAttention,
        source_vocab: int,
        target_vocab: int,
        embedding_dim: int,
        hidden_size: int,
        n_layers: int = 1,
        attend_before_step: bool = True,
        generator: Generator = None,
        **options: Any,
    ) -> None:
        self.attend_before_step, generator = attend_before_step, new_generator(generator)
        sizes = source_vocab, target_vocab, embedding_dim, hidden_size, n_layers
        super().__init__(*sizes, generator=generator, **options)
        self.attention = attention
        self.mix = Dense(3 * hidden_size, hidden_size, generator=generator)

    def start_decoding(self, source: Operand, lengths: Any = None, capacity: int = 0) -> State:
        """Encode the source (B, S); return the state of Seq2Seq with "projected_keys" and "weights" (None) added."""
        state = super().start_decoding(source, lengths)
        return {**state, "projected_keys": self.attention.project_keys(state["outputs"]), "weights": None}

    def decode(self, target: Operand, state: State) -> Tensor:
        """Return logits (B, T, V) after each target token; advance `state`; state["weights"] is attention (B, T, S)."""
        y = self.dropout(self.embedding(as_tensor(target)))
        if self.attend_before_step:
            steps, contexts, weights = [], [], []
            for t in range(y.shape[1]):
                context, weight = self._attend(state["hidden"][0][:, -1:], state)
                steps.append(self._run(concatenate([y[:, t : t + 1], context], axis=-1), state))
                contexts.append(context)
                weights.append(weight)
            hidden, context, weight = (concatenate(parts, axis=1) for parts in (steps, contexts, weights))
        else:
            hidden = self._run(y, state)
            context, weight = self._attend(hidden, state)
        state["weights"] = weight
        return self.output(self.dropout(tanh(self.mix(concatenate([hidden, context], axis=-1)))))

    def _attend(self, query: Tensor, state: State) -> tuple[Tensor, Tensor]:
        """Return the context (B, T, E) of queries (B, T, H) over the encoder's outputs, and the weights (B, T, S)."""
        weights = self.attention.weights(query, state["projected_keys"], state["mask"])
        return weights @ state["outputs"], weights


def _states(final: Any) -> tuple[Tensor, ...]:
    """Return the final states as a tuple: two for an LSTM, else one."""
    return final if isinstance(final, tuple) else (final,)


# -------------------------------------------------------------------- transformers
class SinusoidalPositions(Layer):
    """Sinusoidal positional encodings, added to the embeddings (Vaswani et al. 2017, section 3.5).

    Args:
        context_window: the number of positions.
        size: C.
    """

    def __init__(self, context_window: int, size: int) -> None:
        check_positive(type(self).__name__, context_window=context_window, size=size)
        self.context_window, self.size = context_window, size

    def forward(self, x: Tensor, offset: int = 0) -> Tensor:
        """Return x (B, T, C) plus the encodings of positions from `offset` on; ValueError beyond the context window."""
        stop = offset + x.shape[1]
        if stop > self.context_window:
            title = f"{type(self).__name__}(context_window={self.context_window})"
            raise ValueError(f"{title}: expected at most {self.context_window} tokens, got {stop}")
        return x + self.position_vectors(x, slice(offset, stop))

    def position_vectors(self, x: Tensor, places: slice) -> Tensor:
        """Return the encodings (T, C) of a slice of positions, on the device of x."""
        table = sinusoids(self.context_window, self.size)[places]
        return Tensor(x.xp.asarray(table, x.dtype), requires_grad=False)


class LearnedPositions(SinusoidalPositions):
    """Learned positional embeddings, added to the token embeddings."""

    def __init__(self, context_window: int, size: int, generator: Generator = None) -> None:
        super().__init__(context_window, size)
        self.weights = Parameter(normal(0.02)((context_window, size), new_generator(generator)), "position")

    def position_vectors(self, x: Tensor, places: slice) -> Tensor:
        """Return the embeddings (T, C) of a slice of positions."""
        return self.weights[places]


# Cache: a pure function of two sizes; the result is read-only.
@lru_cache(maxsize=16)
def sinusoids(n_places: int, size: int) -> np.ndarray:
    """Return the read-only table (n_places, size): sin(p / 10000^(2 i / size)) in column 2 i, cos in 2 i + 1."""
    angles = np.arange(n_places)[:, None] / 10_000 ** (np.arange(0, size, 2) / size)
    table = np.stack([np.sin(angles), np.cos(angles)], axis=-1).reshape(n_places, -1)[:, :size]
    table.flags.writeable = False
    return table


# The settings in which Vaswani et al. 2017 differ from GPT-2, whose settings are the defaults of `ModelConfig`.
PAPER_DEFAULTS: dict[str, Any] = {"activation": "relu", "dropout": 0.1}


class TransformerEncoder(Layer):
    """The encoder of a transformer, or with `decoder=True` the decoder's embedding, blocks and norm.

    Args:
        vocab_size, embedding_dim, n_heads, n_layers, context_window: see `ModelConfig`.
        norm_first: pre-norm blocks with a final norm; else post-norm blocks, as in the paper.
        learned_positions: use `LearnedPositions` instead of `SinusoidalPositions`.
        decoder: use causal self-attention, and cross-attention to the encoder's output.
        fields: further fields of `ModelConfig`; those in `PAPER_DEFAULTS` default to the values there.
    """

    def __init__(
        self,
        vocab_size: int,
        embedding_dim: int,
        n_heads: int,
        n_layers: int,
        context_window: int,
        *,
        norm_first: bool = False,
        learned_positions: bool = False,
        decoder: bool = False,
        generator: Generator = None,
        **fields: Any,
    ) -> None:
        config = ModelConfig(
            vocab_size=vocab_size,
            embedding_dim=embedding_dim,
            n_heads=n_heads,
            n_layers=n_layers,
            context_window=context_window,
            norm_placement="before" if norm_first else "after",
            **{**PAPER_DEFAULTS, **fields},
        )
        generator = new_generator(generator)
        self.embedding = Embedding(vocab_size, embedding_dim, normal(embedding_dim**-0.5), generator)
        places = context_window, embedding_dim
        self.positions = LearnedPositions(*places, generator) if learned_positions else SinusoidalPositions(*places)
        self.dropout = Dropout(config.dropout, generator)
        self.blocks = [
            DecoderBlock(config, layer, generator=generator)
            if decoder
            else TransformerBlock(config, layer, causal=False, generator=generator)
            for layer in range(n_layers)
        ]
        self.norm = new_norm(config) if norm_first else None

    def embed(self, tokens: Operand, offset: int = 0) -> Tensor:
        """Return embeddings of tokens (B, T) times sqrt(C) plus positions from `offset` on, with dropout, (B, T, C)."""
        x = self.embedding(as_tensor(tokens))
        return self.dropout(self.positions(x * math.sqrt(x.shape[-1]), offset))

    def forward(self, tokens: Operand, lengths: Any = None) -> Tensor:
        """Embed tokens (B, S) and return the hidden states (B, S, C) after all blocks and the final norm, if any.

        Args:
            lengths: (B,), the number of tokens before the padding; all if not given.
        """
        x = self.embed(tokens)
        mask = None if lengths is None else length_mask(lengths, x.shape[1])
        for block in self.blocks:
            x = block(x, mask=mask)
        return x if self.norm is None else self.norm(x)


class Transformer(EncoderDecoder):
    """The encoder-decoder transformer (Vaswani et al. 2017).

    Args:
        source_vocab, target_vocab: the sizes of the vocabularies.
        tied: source embedding, target embedding and output share one table; source and target share a vocabulary.
        others: see `TransformerEncoder`; encoder and decoder have n_layers blocks each.
    """

    def __init__(
        self,
        source_vocab: int,
        target_vocab: int,
        embedding_dim: int = 256,
        n_heads: int = 4,
        n_layers: int = 3,
        context_window: int = 128,
        *,
        dropout: float = 0.1,
        tied: bool = False,
        generator: Generator = None,
        **options: Any,
    ) -> None:
        if tied and source_vocab != target_vocab:
            got = f"{source_vocab} and {target_vocab}"
            raise ValueError(f"Transformer: expected one vocabulary on both sides with tied=True, got {got}")
        generator = new_generator(generator)
        sizes = embedding_dim, n_heads, n_layers, context_window
        options = {**options, "dropout": dropout, "generator": generator}
        self.encoder = TransformerEncoder(source_vocab, *sizes, **options)
        self.decoder = TransformerEncoder(target_vocab, *sizes, decoder=True, **options)
        self.head = None if tied else Dense(embedding_dim, target_vocab, False, generator=generator, role="head")
        if tied:
            self.decoder.embedding = self.encoder.embedding

    def start_decoding(self, source: Operand, lengths: Any = None, capacity: int = 0) -> State:
        """Encode the source (B, S); return {"kv", "mask", "caches" (None each without `capacity`), "position": 0}."""
        source = as_tensor(source)
        mask = None if lengths is None else length_mask(lengths, source.shape[-1])
        memory, blocks = self.encoder(source, lengths), self.decoder.blocks
        caches = [KeyValueCache(capacity) if capacity else None for _ in blocks]
        kv = [block.cross.project_kv(memory) for block in blocks if isinstance(block, DecoderBlock)]
        return {"kv": kv, "mask": mask, "caches": caches, "position": 0}

    def decode(self, target: Operand, state: State) -> Tensor:
        """Return the logits (B, T, V) after each target token (B, T), and advance position and caches of the state."""
        decoder = self.decoder
        target = as_tensor(target)
        x = decoder.embed(target, state["position"])
        for block, cache, kv in zip(decoder.blocks, state["caches"], state["kv"], strict=True):
            x = block(x, cache, None, kv, state["mask"])
        state["position"] += target.shape[1]
        x = x if decoder.norm is None else decoder.norm(x)
        if self.head is not None:
            return self.head(x)
        return linear(x, decoder.embedding.weights, precision=self.precision, transposed=True)
