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
from tricycle.configs.encoder_decoder import EncoderDecoderConfig, Sinusoids
from tricycle.devices import Array
from tricycle.extra_ops import concatenate
from tricycle.functions import linear
from tricycle.initialisers import Initialiser, normal, xavier, zeros
from tricycle.layers import Dense, Dropout, Embedding, Generator, Layer, new_generator
from tricycle.loss import CrossEntropy
from tricycle.ops import as_tensor, check_positive, tanh
from tricycle.parameter import Parameter
from tricycle.sequences.attentions import ScaledDotProductAttention
from tricycle.sequences.cross_attention import DecoderBlock
from tricycle.sequences.recurrent import new_recurrent
from tricycle.sequences.relative_positions import RelativePositionSoftmax
from tricycle.tensor import Operand, Tensor

State = dict[str, Any]  # the state of a decoder between two calls; its arrays have the batch on axis 0


class EncoderDecoder(Layer):
    """The base class of encoder-decoders; subclasses define `start_decoding` and `decode`."""

    def start_decoding(self, source: Operand, lengths: Any = None, capacity: int = 0) -> State:
        """Encode the source, and return the initial state of the decoder; NotImplementedError, defined in subclasses.

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
        """Return the logits (B, T, V) after each target token (B, T), given the source (B, S) and its lengths."""
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
        order: "interleaved": sines in even and cosines in odd channels; "halves": sines in the first half.
    """

    order: Sinusoids = "interleaved"  # for models pickled before the option existed

    def __init__(self, context_window: int, size: int, order: Sinusoids = "interleaved") -> None:
        check_positive(type(self).__name__, context_window=context_window, size=size)
        self.context_window, self.size, self.order = context_window, size, order

    def forward(self, x: Tensor, offset: int | np.ndarray = 0) -> Tensor:
        """Return x (B, T, C) plus the encodings of its positions; ValueError beyond the context window.

        Args:
            offset: the first position, or all positions, (T,).
        """
        positions = offset if isinstance(offset, np.ndarray) else np.arange(offset, offset + x.shape[1])
        stop = int(positions.max(initial=-1)) + 1
        if stop > self.context_window:
            title = f"{type(self).__name__}(context_window={self.context_window})"
            raise ValueError(f"{title}: expected at most {self.context_window} tokens, got {stop}")
        return x + self.position_vectors(x, positions)

    def position_vectors(self, x: Tensor, positions: np.ndarray) -> Tensor:
        """Return the encodings (T, C) of positions (T,), on the device of x."""
        # A table of a power of two of rows: a file may state a context window of any size.
        n_places = min(self.context_window, 1 << int(positions.max(initial=0)).bit_length())
        table = sinusoids(n_places, self.size, self.order)[positions]
        return Tensor(x.xp.asarray(table, x.dtype), requires_grad=False)


class LearnedPositions(SinusoidalPositions):
    """Learned positional embeddings, added to the token embeddings.

    Args:
        n_unused: rows of the table before the first position.
    """

    n_unused = 0  # for models pickled before the option existed

    def __init__(
        self,
        context_window: int,
        size: int,
        generator: Generator = None,
        n_unused: int = 0,
        initialiser: Initialiser | None = None,
    ) -> None:
        super().__init__(context_window, size)
        self.n_unused = n_unused
        shape = (context_window + n_unused, size)
        self.weights = Parameter((initialiser or normal(0.02))(shape, new_generator(generator)), "position")

    def position_vectors(self, x: Tensor, positions: np.ndarray) -> Tensor:
        """Return the embeddings (T, C) of positions (T,), rows after the first `n_unused` of the table."""
        return self.weights[positions + self.n_unused]


# Cache: a pure function of two sizes and the order; the result is read-only.
@lru_cache(maxsize=16)
def sinusoids(n_places: int, size: int, order: Sinusoids = "interleaved") -> np.ndarray:
    """Return the read-only table (n_places, size): sin(p / 10000^(2 i / size)) in column 2 i, cos in 2 i + 1.

    With the order "halves", all sines are before all cosines.
    """
    angles = np.arange(n_places)[:, None] / 10_000 ** (np.arange(0, size, 2) / size)
    axis = -1 if order == "interleaved" else 1
    table = np.stack([np.sin(angles), np.cos(angles)], axis=axis).reshape(n_places, -1)[:, :size]
    table.flags.writeable = False
    return table


class TransformerStack(Layer):
    """The embedding, blocks and final norm of an encoder, or with `decoder=True` those of its decoder.

    Args:
        config: the architecture.
        decoder: use causal self-attention, and cross-attention to the encoder's output.
        embedding: the token embedding of the other stack, to share it.
        initialiser: of all matrices; by default embeddings have std 1 / sqrt(C), positions 0.02, others `xavier`.
    """

    def __init__(
        self,
        config: EncoderDecoderConfig,
        *,
        decoder: bool = False,
        embedding: Embedding | None = None,
        initialiser: Initialiser | None = None,
        generator: Generator = None,
    ) -> None:
        width, generator = config.embedding_dim, new_generator(generator)
        draw = initialiser or normal(width**-0.5)
        self.embedding = embedding or Embedding(config.vocab_size, width, draw, generator)
        self.embedding_scale = config.embedding_scale
        self.positions: SinusoidalPositions | None = None
        if config.positions == "learned":
            places = config.context_window, width, generator, config.position_offset, initialiser
            self.positions = LearnedPositions(*places)
        elif config.sinusoids != "none":
            self.positions = SinusoidalPositions(config.context_window, width, config.sinusoids)
        self.embedding_norm = new_norm(config) if config.embedding_norm else None
        self.dropout = Dropout(config.dropout, generator)
        options: dict[str, Any] = {"initialiser": initialiser or xavier, "generator": generator}
        self.blocks = [
            DecoderBlock(config, layer, **options)
            if decoder
            else TransformerBlock(config, layer, causal=False, **options)
            for layer in range((decoder and config.n_decoder_layers) or config.n_layers)
        ]
        if config.relative_buckets:
            softmax = RelativePositionSoftmax(config.relative_buckets, config.relative_distance, not decoder)
            for block in self.blocks:
                block.attention.use_softmax(softmax)
                block.attention.softmax_scales = self.blocks[0].attention.softmax_scales  # one table for all blocks
        self.norm = new_norm(config) if config.norm_placement != "after" else None

    def embed(self, tokens: Operand, offset: int | np.ndarray = 0) -> Tensor:
        """Return embeddings (B, T, C) of tokens plus positions (from `offset` on, or an array), norm and dropout.

        Args:
            offset: the position of the first token, or the positions of all, (T,).
        """
        x = self.embedding(as_tensor(tokens))
        x = x if self.embedding_scale == 1 else x * self.embedding_scale
        x = x if self.positions is None else self.positions(x, offset)
        return self.dropout(x if self.embedding_norm is None else self.embedding_norm(x))

    def forward(self, tokens: Operand, lengths: Any = None) -> Tensor:
        """Embed tokens (B, S) and return the hidden states (B, S, C) after all blocks and the final norm, if any.

        Args:
            lengths: (B,), the number of tokens before the padding; all if not given.
        """
        x = self.embed(tokens)
        mask = None if lengths is None else length_mask(lengths, x.shape[1], len(x))
        for block in self.blocks:
            x = block(x, mask=mask)
        return x if self.norm is None else self.norm(x)


# The settings in which Vaswani et al. 2017 differ from GPT-2, whose settings are the defaults of `ModelConfig`.
PAPER_DEFAULTS: dict[str, Any] = {"activation": "relu", "dropout": 0.1}


class TransformerEncoder(TransformerStack):
    """The encoder of a transformer as in Vaswani et al. 2017, or with `decoder=True` its decoder, see the base class.

    Args:
        vocab_size, embedding_dim, n_heads, n_layers, context_window: see `ModelConfig`.
        norm_first: pre-norm blocks with a final norm; else post-norm blocks, as in the paper.
        learned_positions: use `LearnedPositions` instead of `SinusoidalPositions`.
        decoder: use causal self-attention, and cross-attention to the encoder's output.
        fields: further fields of `EncoderDecoderConfig`; those in `PAPER_DEFAULTS` default to the values there.
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
        self.config = EncoderDecoderConfig(
            vocab_size=vocab_size,
            embedding_dim=embedding_dim,
            n_heads=n_heads,
            n_layers=n_layers,
            context_window=context_window,
            norm_placement="before" if norm_first else "after",
            positions="learned" if learned_positions else "none",
            sinusoids="none" if learned_positions else "interleaved",
            embedding_scale=math.sqrt(embedding_dim),
            **{**PAPER_DEFAULTS, **fields},
        )
        super().__init__(self.config, decoder=decoder, generator=generator)


class EncoderDecoderTransformer(EncoderDecoder):
    """An encoder-decoder transformer with one token embedding for encoder and decoder, such as T5 (Raffel et al. 2020).

    Args:
        config: the architecture; `seed` determines the initial weights.
        draw_weights: False leaves all weights at 0 (gains at 1), for weights that are loaded afterwards.
    """

    encoder: TransformerStack
    decoder: TransformerStack
    head: Dense | None  # None: tied to the decoder's embedding
    logit_bias: Parameter | None = None

    def __init__(self, config: EncoderDecoderConfig, draw_weights: bool = True) -> None:
        self.config = config
        # one generator for weights and dropout masks, saved in checkpoints
        self.generator = generator = np.random.default_rng(config.seed)
        options: dict[str, Any] = {"initialiser": None if draw_weights else zeros, "generator": generator}
        self.encoder = TransformerStack(config, **options)
        self.decoder = TransformerStack(config, decoder=True, embedding=self.encoder.embedding, **options)
        sizes = config.embedding_dim, config.vocab_size
        self.head = None
        if not config.tied:
            self.head = Dense(*sizes, config.head_bias, options["initialiser"] or xavier, generator, "head")
        if config.logit_bias:
            self.logit_bias = Parameter(np.zeros((1, config.vocab_size), np.float32), "bias")
        self.use_precision(config.precision)

    def start_decoding(self, source: Operand, lengths: Any = None, capacity: int = 0) -> State:
        """Encode the source (B, S); return {"kv", "mask", "caches" (None each without `capacity`), "position": 0}."""
        source = as_tensor(source)
        mask = None if lengths is None else length_mask(lengths, source.shape[-1], len(source))
        caches = [KeyValueCache(capacity) if capacity else None for _ in self.decoder.blocks]
        return {"kv": self.project_kv(self.encoder(source, lengths)), "mask": mask, "caches": caches, "position": 0}

    def project_kv(self, encoded: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return the keys and values of the cross-attention of each decoder block to the encoder's output (B, S, C)."""
        return [block.cross.project_kv(encoded) for block in self.decoder.blocks if isinstance(block, DecoderBlock)]

    def decode(self, target: Operand, state: State) -> Tensor:
        """Return the logits (B, T, V) after each target token (B, T), and advance position and caches of the state.

        Raises:
            ValueError: another call after `start_decoding` without a capacity, so that no keys were cached.
        """
        target = as_tensor(target)
        if state["position"] and None in state["caches"]:
            raise ValueError(f"{type(self).__name__}: expected a capacity in start_decoding for a second decode, got 0")
        x = self.hidden_states(target, state["position"], state["caches"], state["kv"], state["mask"])
        state["position"] += target.shape[1]
        return self.logits(x)

    def hidden_states(self, target: Operand, offset: Any, caches: Any, kv: Any, kv_mask: Array | None = None) -> Tensor:
        """Return the last block's output (B, T, C) before the last norm; extend the caches, None for no cache.

        Args:
            offset: the position of the first token, or the positions of all, (T,).
            caches, kv: of each block, see `DecoderBlock`.
        """
        x = self.decoder.embed(target, offset)
        for block, cache, projected in zip(self.decoder.blocks, caches, kv, strict=True):
            args = None, projected, kv_mask
            x = block(x, None, *args) if cache is None else cache.call(block, x, *args)
        return x

    def logits(self, x: Tensor) -> Tensor:
        """Apply the decoder's last norm and the head (or tied embedding) to x (..., C); return logits (..., V)."""
        x = x if self.decoder.norm is None else self.decoder.norm(x)
        x = x if self.config.output_scale == 1 else x * self.config.output_scale
        if self.head is not None:
            return self.head(x)
        logits = linear(x, self.decoder.embedding.weights, precision=self.precision, transposed=True)
        return logits if self.logit_bias is None else logits + self.logit_bias[0]

    def loss(self, tokens: Operand, labels: Operand, loss_fn: Any = None, scale: Any = 1.0) -> Tensor:
        """Return the loss of the continuations of texts: the first `config.source_tokens` of a window are the source.

        Args:
            tokens, labels: windows of text (B, T), and the next token of each, as of `GPT.loss`. Only the tokens after
                the source are predicted, from the source and the target before them.
            loss_fn: by default `CrossEntropy()`.

        Raises:
            ValueError: T is smaller than the source.
        """
        ids, labels, n_source = as_tensor(tokens).array, as_tensor(labels).array, self.config.source_tokens
        if ids.shape[-1] < n_source:
            raise ValueError(f"expected windows of at least {n_source} tokens, the source, got {ids.shape[-1]}")
        source, target = ids[:, :n_source], ids[:, n_source - 1 :].copy()
        target[:, 0] = self.config.start_token
        return (loss_fn or CrossEntropy())(labels[:, n_source - 1 :], self(source, target), scale)


class Transformer(EncoderDecoderTransformer):
    """The encoder-decoder transformer as in Vaswani et al. 2017, with a vocabulary for each side.

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
        self.decoder = decoder = TransformerEncoder(target_vocab, *sizes, decoder=True, **options)
        self.config = decoder.config
        self.head = None if tied else Dense(embedding_dim, target_vocab, False, generator=generator, role="head")
        if tied:
            self.decoder.embedding = self.encoder.embedding
