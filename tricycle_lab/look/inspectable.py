"""Models that the model viewer can inspect: encoding of a text, and a forward pass that records a `Trace`.

Shapes: T tokens, S source tokens, H heads, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from tricycle.attention import KeyValueCache, scores_and_weights
from tricycle.devices import to_cpu
from tricycle.kernels.experts import route
from tricycle.models import GPT
from tricycle.sequences.beam_search import beam_search
from tricycle.sequences.seq2seq import EncoderDecoder, EncoderDecoderTransformer, Seq2SeqAttention
from tricycle.sequences.text_encoder import TextEncoder
from tricycle.sequences.translators import load_translator
from tricycle.softmaxes import new_softmax
from tricycle.tensor import Tensor, no_grad
from tricycle_lab.hooks import Substitution, add_hook, attention_of, op_with_heads
from tricycle_lab.lens import TunedLens
from tricycle_lab.look.interventions import Interventions
from tricycle_lab.look.trace import AttentionLayer, Predictions, Trace, summarize_logits
from tricycle_lab.probe import Probe
from tricycle_lab.recorded_run import reuses_keys
from tricycle_lab.sparse_autoencoder import SparseAutoencoder
from tricycle_lab.steering import steer

MAX_TOKENS = 1024  # the attention maps of more tokens are too large for the page
MAX_CACHED_TEXTS = 200_000
Arrays = dict[str, np.ndarray]


class InspectableModel:
    """A model with its tokenizer, as the model viewer uses it.

    Attributes:
        kind: "decoder", "encoder" or "encoder-decoder".
        title: the name on the page.
        attention_layers: the attention layers and layers with a state, without recorded values.
        n_heads: the number of heads of each attention layer, by name.
        block_names: the blocks whose outputs are the residual stream.
        ablatable: names of the layers that may be ablated.
        source_ids: the tokens of the encoder of an encoder-decoder.
        max_tokens: the maximum length of a text.
        first_editable: the first position whose token may be replaced.
        vectors: steering vectors (C,), by the index of the block after which they are added.
    """

    kind = "decoder"
    source_ids: Sequence[int] = ()
    first_editable = 0
    vectors: Mapping[int, np.ndarray] = MappingProxyType({})

    def __init__(self, model: Any, tokeniser: Any, title: str, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.model = model
        self.tokeniser = tokeniser
        self.title = title
        self.attention_layers = find_attention_layers(model)
        if not self.attention_layers:
            got = type(model).__name__
            raise ValueError(f"{title}: expected a model with attention to inspect, got a {got} without attention")
        self.n_heads = {layer.name: layer.n_heads for layer in self.attention_layers}
        names = [name for name, _ in model.named_layers()]
        self.block_names = [name for name in names if name.rpartition(".")[0].endswith("blocks")]
        parts = {
            f"{block}{part}" for block in self.block_names for part in ("", ".attention", ".mixer", ".mlp", ".cross")
        }
        self.ablatable = [name for name in names if name in parts]
        self._token_texts: dict[int, str] = {}

    def describe(self) -> dict[str, Any]:
        """Return JSON data: title, kind, class, nParameters, ablatable, initialLayer (shown first) and isSteerable."""
        cross = [i for i, layer in enumerate(self.attention_layers) if layer.kind == "cross"]
        return {
            "title": self.title,
            "kind": self.kind,
            "class": type(self.model).__name__,
            "nParameters": self.model.n_parameters,
            "ablatable": self.ablatable,
            "initialLayer": cross[-1] if cross else 0,
            "isSteerable": bool(self.vectors),
        }

    def encode(self, text: str) -> list[int]:
        """Convert a text to tokens, without special tokens."""
        return [int(token) for token in self.tokeniser.encode_plain(text)]

    def encode_input(self, text: str) -> list[int]:
        """Convert a text to token ids with special tokens such as start of text; ValueError if empty or too long."""
        plain = self.encode(text)
        if not plain:
            raise ValueError("expected a text of at least one character, got none")
        if self.kind == "encoder":  # its tokenizer adds tokens at both ends, such as BERT's [CLS] and [SEP]
            ids = [int(token) for token in self.tokeniser.encode(text)]
        else:
            start = self.start_token
            ids = plain if start is None else [start, *plain]
        self.check_ids(ids)
        return ids

    def encode_answer(self, text: str) -> int:
        """Return the token of an answer; raise a ValueError unless it is exactly one token."""
        ids = self.encode(text)
        if len(ids) != 1:
            raise ValueError(f"expected answers of one token each, got {len(ids)} tokens for {text!r}")
        return ids[0]

    @property
    def start_token(self) -> int | None:
        """Return the id that begins every text of a decoder; None if the tokenizer has none."""
        with suppress(ValueError):
            start = self.tokeniser.start_of_text
            return None if start is None else int(start)
        return None

    def replace_token(self, ids: Sequence[int], position: int, replacement: str | int) -> list[int]:
        """Return the tokens with one replaced by a token id, or by the tokens of a text; ValueError if invalid."""
        if not self.first_editable <= position < len(ids):
            last = len(ids) - 1
            raise ValueError(f"expected the position of a token, {self.first_editable} to {last}, got {position}")
        new = [replacement] if isinstance(replacement, int) else self.encode(replacement)
        if not new:
            raise ValueError("expected a text as the replacement of the token, got an empty one")
        result = [*ids[:position], *new, *ids[position + 1 :]]
        self.check_ids(result)
        return result

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raise ValueError if there are no tokens or too many, or a token is outside of the vocabulary."""
        if not 0 < len(ids) <= self.max_tokens:
            raise ValueError(f"expected a text of 1 to {self.max_tokens} tokens to inspect, got {len(ids)}")
        n_vocab = self.tokeniser.n_vocab
        if not all(0 <= token < n_vocab for token in ids):
            raise ValueError(f"expected tokens from 0 to {n_vocab - 1}")

    def token_text(self, token: int) -> str:
        """Return a token's text as it is within a text, cached; "⟨id⟩" if it has none."""
        if token not in self._token_texts:
            if len(self._token_texts) > MAX_CACHED_TEXTS:
                self._token_texts.clear()
            text = ""  # of an unused row of the model's embedding
            if token < self.tokeniser.n_vocab:
                # decoded after another token, because some tokenizers omit a space at the start of a text
                stream = self.tokeniser.stream(self.encode("a")[-1:])
                text = str(stream.push([token])) or str(self.tokeniser.decode([token]))
            self._token_texts[token] = text or f"⟨{token}⟩"
        return self._token_texts[token]

    def run(self, ids: Sequence[int], interventions: Interventions, earlier: Trace | None = None) -> Trace:
        """Run the model with interventions and return the trace; NotImplementedError unless a subclass defines it.

        Args:
            ids: the tokens.
            interventions: the interventions during the forward pass.
            earlier: a trace whose values are reused where they are equal.
        """
        raise NotImplementedError

    def reusable_fraction(self, ids: Sequence[int], interventions: Interventions, earlier: Trace) -> float:
        """Return the fraction of a forward pass, 0 to 1, that `run` can take from an earlier trace; by default 0."""
        return 0.0


def find_attention_layers(model: Any) -> list[AttentionLayer]:
    """Return an `AttentionLayer` (name, kind, heads) per layer with attention or a state, in order, without values."""
    layers = []
    for name, layer in model.named_layers():
        if hasattr(layer, "token_weights"):
            layers.append(AttentionLayer(name, "state", layer.n_heads))
        elif attention_of(layer) is not None and hasattr(layer, "n_heads"):
            kind = "cross" if name.endswith("cross") else "encoder" if name.startswith("encoder.") else "self"
            layers.append(AttentionLayer(name, kind, layer.n_heads))
    if isinstance(model, Seq2SeqAttention):
        layers.append(AttentionLayer("attention", "cross", 1))
    return layers


# -------------------------------------------------------------------- recording
@contextmanager
def recording(inspectable: InspectableModel) -> Iterator[tuple[dict[str, AttentionLayer], Arrays, Arrays]]:
    """Record in a context; yield attention layers, residual stream before and after each block, and router weights.

    The forward pass in the context stores the arguments of attention in the layers. See `Trace` for the others.
    """
    layers = {one.name: AttentionLayer(one.name, one.kind, one.n_heads) for one in inspectable.attention_layers}
    stream: Arrays = {}
    routing: Arrays = {}
    layers_by_name = dict(inspectable.model.named_layers())

    def record_stream(name: str, layer: Any, out: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> None:
        if not stream:
            stream["embedding"] = _to_float_array(x)
        stream[name] = _to_float_array(out)

    with ExitStack() as hooks:
        for name, layer in layers.items():
            own: Any = layers_by_name.get(name)
            attention = None if own is None else op_with_heads(own)
            if attention is not None:
                record = partial(record_scan, own) if layer.kind == "state" else record_arguments
                observer = lambda op, out, *args, layer=layer, record=record: record(layer, op, args)
                hooks.callback(add_hook(attention, "observers", observer))
        for name in inspectable.block_names:
            hooks.callback(add_hook(layers_by_name[name], "observers", partial(record_stream, name)))
        for name, mixture in layers_by_name.items():
            if hasattr(mixture, "routing"):
                hooks.callback(add_hook(mixture.router, "observers", partial(record_routing, routing, name, mixture)))
        yield layers, stream, routing


def record_routing(routing: Arrays, name: str, mixture: Any, router: Any, logits: Tensor, x: Tensor) -> None:
    """Store in `routing` the weights (T, E) of the experts that a router selects by its logits (T, E), else 0."""
    correction = None if mixture.correction is None else mixture.correction.array
    weights, _, selected = (to_cpu(array) for array in route(logits.array, mixture.routing, correction))
    routing[name] = np.zeros(logits.shape, np.float32)
    np.put_along_axis(routing[name], selected, weights.astype(np.float32), axis=1)


def record_arguments(layer: AttentionLayer, op: Any, args: tuple[Any, ...]) -> None:
    """Store in `layer` an attention op, its arguments, and a function for (scores, weights) of the first batch item."""

    def compute_maps() -> tuple[Any, Any]:
        scores, weights = scores_and_weights(op, *args)
        return scores[0], weights[0]

    layer.compute_maps, layer.args, layer.op = compute_maps, args, op


def record_scan(mixer: Any, layer: AttentionLayer, op: Any, args: tuple[Any, ...]) -> None:
    """Store in `layer` the scan of a mixer, its arguments, decays, and a function that computes the maps of text 0.

    A mixer is a layer with a state, whose method `token_weights` maps the arguments to factors of each earlier token.

    The scores are the factors of each earlier token, and the weights their magnitudes divided by the sum of the row.
    """
    arrays = [tensor.array for tensor in args]

    def compute_maps() -> tuple[Any, Any]:
        factors = to_cpu(mixer.token_weights(*arrays))[0]
        magnitudes = abs(factors)
        totals = magnitudes.sum(axis=-1, keepdims=True)
        visible = np.tri(factors.shape[-1], dtype=bool)
        return np.where(visible, factors, -np.inf), magnitudes / np.where(totals > 0, totals, 1)

    layer.compute_maps, layer.args, layer.op = compute_maps, args, op
    layer.decays = to_cpu(arrays[1])[0].T


def _to_float_array(x: Tensor) -> np.ndarray:
    """Convert (1, T, C) to an array (T, C) in CPU memory, in float32 or wider."""
    array = to_cpu(x.array)[0]
    return array.astype(np.float32) if array.dtype.itemsize < 4 else array


# -------------------------------------------------------------------- decoders and encoders
class InspectableStack(InspectableModel):
    """A decoder (`GPT`), or an encoder (`TextEncoder`), which has no predictions: one stack of blocks.

    Attributes:
        lens: a tuned lens of the model; None without.
        autoencoder: a sparse autoencoder of the model, and the index of its block; None without.
        labeled: (label, text) of each text that linear probes are fitted to; None without.
    """

    lens: TunedLens | None = None
    autoencoder: tuple[SparseAutoencoder, int] | None = None
    labeled: list[tuple[str, str]] | None = None

    def __init__(self, model: GPT | TextEncoder, tokeniser: Any, title: str) -> None:
        super().__init__(model, tokeniser, title, min(MAX_TOKENS, model.config.context_window))
        self.kind = "decoder" if isinstance(model, GPT) else "encoder"

    def run(self, ids: Sequence[int], interventions: Interventions, earlier: Trace | None = None) -> Trace:
        """Run the model on ids (not checked), return its trace; reuse first blocks or positions of an earlier one."""
        n_blocks, n_tokens = (0, 0) if earlier is None else self._count_reusable(ids, interventions, earlier)
        model = self.model
        with ExitStack() as stack:
            stack.enter_context(model.evaluating())
            layers, stream, routing = stack.enter_context(recording(self))
            interventions.apply(stack.enter_context(Probe(model, "")))
            if interventions.steering:
                stack.enter_context(steer(model, self.vectors, interventions.steering))
            self._forward(ids, earlier, n_blocks, n_tokens)
        if earlier is not None and n_blocks:
            stream = {**stream, **dict(list(earlier.stream.items())[: 1 + n_blocks])}
            stream = {name: stream[name] for name in earlier.stream}
            routing = {**earlier.routing, **routing}
            layers = {
                name: layer if layer.compute_maps else earlier.attention_layer(name) for name, layer in layers.items()
            }
        elif earlier is not None and n_tokens:
            stream = {name: np.concatenate([earlier.stream[name][:n_tokens], x]) for name, x in stream.items()}
            routing = {name: np.concatenate([earlier.routing[name][:n_tokens], x]) for name, x in routing.items()}
            for name, layer in layers.items():
                queries, *others = layer.args  # (1, T, H, D)
                reused = earlier.attention_layer(name).args[0].array[:, :n_tokens]
                joined = queries.xp.concatenate([reused, queries.array], axis=1)
                record_arguments(layer, layer.op, (Tensor(joined, requires_grad=False), *others))
        unembed = self._unembed if isinstance(model, GPT) else None
        texts = [self.token_text(token) for token in ids]
        trace = Trace(list(ids), texts, None, list(layers.values()), stream, unembed, self.token_text)
        trace.interventions, trace.routing = interventions, routing
        streams: Any = getattr(model, "streams", None)
        trace.n_channels = None if streams is None else streams.n_streams * streams.width
        if unembed is not None:
            known = None
            if n_tokens and earlier is not None and earlier.predictions is not None:
                # the last reused position is followed by another token, so its log-probability is computed again
                known = Predictions(*(array[: n_tokens - 1] for array in vars(earlier.predictions).values()))
            trace.compute_predictions(list(stream.values())[-1], known)
        return trace

    def _forward(self, ids: Sequence[int], earlier: Trace | None, n_blocks: int, n_tokens: int) -> None:
        """Compute all blocks but the first `n_blocks`, or all positions but the first `n_tokens`, or everything."""
        model = self.model
        if earlier is not None and n_blocks:
            x = model.place(Tensor(list(earlier.stream.values())[n_blocks][None], requires_grad=False))
            for block in model.blocks[n_blocks:]:
                x = block(x)
            return
        tokens = model.place(np.array([list(ids[n_tokens:])]))
        if not isinstance(model, GPT):
            model(tokens)
        elif earlier is None or not n_tokens:
            model.hidden_states(tokens)
        else:
            caches = []
            for name in self.n_heads:
                # a cache of the whole context, also with sliding-window attention: the maps show all keys
                _, keys, values, *_ = earlier.attention_layer(name).args
                caches.append(KeyValueCache(model.config.context_window))
                caches[-1].append(keys.array[:, :n_tokens], values.array[:, :n_tokens])
            model.hidden_states(tokens, caches)

    def _count_reusable(self, ids: Sequence[int], interventions: Interventions, earlier: Trace) -> tuple[int, int]:
        """Return the number of first blocks that are equal in an earlier trace, and that of first positions.

        One of the two numbers is 0.
        """
        if earlier.ids == list(ids):
            return interventions.first_changed_block(self.block_names, earlier.interventions), 0
        # positions are reusable if attention is causal, and projects each token without its neighbors
        is_cacheable = isinstance(self.model, GPT) and all(map(reuses_keys, self.model.blocks))
        if earlier.interventions != interventions or not is_cacheable:
            return 0, 0
        pairs = zip(earlier.ids, ids)
        n_equal = next((i for i, (old, new) in enumerate(pairs) if old != new), min(len(earlier.ids), len(ids)))
        return 0, min(n_equal, len(ids) - 1)

    def reusable_fraction(self, ids: Sequence[int], interventions: Interventions, earlier: Trace) -> float:
        """Return the larger fraction, of blocks or positions, that `run` can take from an earlier trace, 0 to 1."""
        n_blocks, n_tokens = self._count_reusable(ids, interventions, earlier)
        return max(n_blocks / len(self.block_names), n_tokens / len(ids))

    def _unembed(self, x: Tensor) -> Tensor:
        """Return the logits of rows of the residual stream, without gradients."""
        with self.model.evaluating():
            return self.model.logits(self.model.place(x))


# -------------------------------------------------------------------- encoder-decoders
class InspectableEncoderDecoder(InspectableModel):
    """An encoder-decoder such as a translation model: the trace is of its decoder, with cross-attention to the source.

    Args:
        model: an `EncoderDecoderTransformer` or a `Seq2SeqAttention`.
        encode: a function from a text to tokens, without special tokens.
        token_text: a function from a token to its text.
        begin: the token before each target.
        ends: the tokens that end a target.
        title: the name on the page.
        max_tokens: the maximum length of source and target, each.
        encode_text: a function from a source or target to tokens with special tokens; by default `encode`.
        generate: a function from a source (S,) and a maximum length to a target; by default greedy decoding.
    """

    kind = "encoder-decoder"
    first_editable = 1

    def __init__(
        self,
        model: EncoderDecoder,
        encode: Callable[[str], Any],
        token_text: Callable[[int], str],
        begin: int,
        ends: Sequence[int],
        title: str = "translator",
        max_tokens: int = 128,
        encode_text: Callable[[str], Any] | None = None,
        generate: Callable[[list[int], int], Sequence[int]] | None = None,
    ) -> None:
        super().__init__(model, None, title, max_tokens)
        self._encode, self._token_text, self._encode_text = encode, token_text, encode_text or encode
        self.begin, self.ends = begin, ends
        self._generate = generate or self._generate_greedily
        self.block_names = [name for name in self.block_names if name.startswith("decoder.")]

    def encode(self, text: str) -> list[int]:
        """Convert a text, stripped of outer whitespace, to tokens without special tokens; [] for a blank text."""
        return [int(token) for token in self._encode(text.strip())] if text.strip() else []

    def token_text(self, token: int) -> str:
        """Return the text of one token; "⟨id⟩" if it has none."""
        return self._token_text(token) or f"⟨{token}⟩"

    def encode_input(self, text: str) -> list[int]:
        """Set `source_ids` by "SOURCE => TARGET"; return target tokens, generated without "=>"; or ValueError."""
        source, arrow, target = (part.strip() for part in text.partition("=>"))
        if not source:
            raise ValueError("expected a text of at least one character, got none")
        self.source_ids = [int(token) for token in self._encode_text(source)]
        n_source = len(self.source_ids)
        if n_source > self.max_tokens:
            raise ValueError(f"expected a source of 1 to {self.max_tokens} tokens to inspect, got {n_source}")
        if arrow:
            target_ids = [int(token) for token in self._encode_text(target)] if target else []
        else:
            target_ids = list(self._generate(self.source_ids, max(1, min(self.max_tokens - 1, 2 * n_source + 10))))
        if target_ids and target_ids[-1] in self.ends:
            del target_ids[-1]
        ids = [self.begin, *target_ids][: self.max_tokens]
        self.check_ids(ids)
        return ids

    def _generate_greedily(self, source: list[int], max_length: int) -> list[int]:
        """Return the target of source tokens by greedy decoding, without the token at its end."""
        settings = {"begin": self.begin, "end": self.ends[0], "max_length": max_length}
        return beam_search(self.model, np.array([source]), [len(source)], **settings)[0]

    def check_ids(self, ids: Sequence[int]) -> None:
        """Raise ValueError unless the target has 1 to `max_tokens` tokens; the values of the ids are not checked."""
        if not 0 < len(ids) <= self.max_tokens:
            raise ValueError(f"expected a target of 1 to {self.max_tokens} tokens to inspect, got {len(ids)}")

    def run(self, ids: Sequence[int], interventions: Interventions, earlier: Trace | None = None) -> Trace:
        """Run encoder on `source_ids`, decoder on `ids`; return the trace; ValueError if interventions do not fit."""
        model = self.model
        source, target = (model.place(np.array([list(tokens)])) for tokens in (self.source_ids, ids))
        rows: list[tuple[np.ndarray, np.ndarray]] = []  # scores and weights of each step of a recurrent model

        def record_row(op: Any, out: Tensor, scores: Tensor) -> None:
            rows.append((to_cpu(scores.array)[0], to_cpu(out.array)[0]))

        with ExitStack() as stack:
            stack.enter_context(model.evaluating())
            layers, stream, _ = stack.enter_context(recording(self))
            if isinstance(model, Seq2SeqAttention):
                stack.callback(add_hook(model.attention.softmax, "observers", record_row))
                substitution = substitute_row_softmax(interventions)
                stack.callback(add_hook(model.attention.softmax, "substitutions", substitution))
            else:
                interventions.apply(stack.enter_context(Probe(model, "")))
            logits = model.decode(target, model.start_decoding(source, [len(self.source_ids)])).array[0]
            if isinstance(model, Seq2SeqAttention):
                scores, weights = (np.concatenate([row[i] for row in rows])[None] for i in (0, 1))
                layers["attention"].compute_maps = lambda: (scores, weights)
        texts, source_texts = ([self.token_text(token) for token in tokens] for tokens in (ids, self.source_ids))
        texts[0] = "<begin>"  # the first token may be padding, or the end of a text
        unembed = partial(unembed_decoder_states, model) if isinstance(model, EncoderDecoderTransformer) else None
        trace = Trace(list(ids), texts, source_texts, list(layers.values()), stream, unembed, self.token_text)
        trace.source_ids = tuple(self.source_ids)
        next_tokens = np.array([*trace.ids[1:], -1])
        float_logits = to_cpu(logits).astype(np.float32)
        trace.logits = None if trace.stream else float_logits
        trace.predictions = Predictions(*summarize_logits(float_logits.copy(), next_tokens))
        return trace


def load_inspectable_translator(path: Path) -> InspectableEncoderDecoder:
    """Load a translation model and its vocabulary from a file of `load_translator`, as an inspectable model.

    Raises:
        FileNotFoundError, ValueError: as in `load_translator`.
    """
    model, vocabulary, config = load_translator(path)
    token_text = lambda token: vocabulary.texts([token])[0]
    max_tokens = min(MAX_TOKENS, config.context_window)
    begin, ends = vocabulary.begin, [vocabulary.end]
    return InspectableEncoderDecoder(model, vocabulary.encode, token_text, begin, ends, path.stem, max_tokens)


def substitute_row_softmax(interventions: Interventions) -> Substitution:
    """Return a hook that sets a recurrent model's softmax and temperature; ValueError for ablations, softmax "blocks".

    Raises:
        ValueError: ablations, which need a model with blocks, or a softmax with learned scales.
    """
    if interventions.ablated_layers or interventions.ablated_heads:
        raise ValueError("interventions: expected a model with blocks for ablations, got a recurrent model")
    if interventions.softmax == "blocks":
        raise ValueError("interventions: expected a softmax without learned scales, got blocks")
    softmax = None if interventions.softmax is None else new_softmax(interventions.softmax)

    def substitute(op: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        return (op if softmax is None else softmax), (args[0] * (1 / interventions.temperature), *args[1:])

    return substitute


def unembed_decoder_states(model: EncoderDecoderTransformer, x: Tensor) -> Tensor:
    """Compute logits (..., V) of a Transformer decoder's residual stream (..., C): norm and head, no gradients."""
    with no_grad():
        return model.logits(x)
