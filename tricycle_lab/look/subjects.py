"""Models that can be looked into: how each reads a text, and what of that is kept.

Shapes: T tokens, S source tokens, H heads, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from tricycle.attention import KeyValueCache, scores_and_weights
from tricycle.blocks import MultiHeadSelfAttention
from tricycle.devices import to_cpu
from tricycle.functions import linear
from tricycle.models import GPT
from tricycle.sequences.beam_search import beam_search
from tricycle.sequences.seq2seq import EncoderDecoder, Seq2SeqAttention, Transformer
from tricycle.sequences.text_encoder import TextEncoder
from tricycle.sequences.translators import load_translator
from tricycle.softmaxes import new_softmax
from tricycle.tensor import Tensor, no_grad
from tricycle_lab.hooks import Substitution, add_hook, attention_of
from tricycle_lab.look.changes import Changes
from tricycle_lab.look.reading import Predictions, Reading, Site, summed_up
from tricycle_lab.probe import Probe

MOST_TOKENS = 1024  # of which a page can show the maps


class Subject:
    """A model with what turns texts into tokens and back.

    Attributes:
        title: how a page calls it. kind: "decoder", "encoder" or "translator".
        layer_names: of the blocks whose outputs are the residual stream.
        parts: names of what can be switched off.
        n_heads: of each layer with attention, by its name.
        source: the tokens that an encoder reads, of an encoder-decoder.
        most_tokens: of the longest text that can be looked at.
        first: the place of the first token that can be changed.
    """

    kind = "decoder"
    source: Sequence[int] = ()
    first = 0

    def __init__(self, model: Any, tokeniser: Any, title: str, most_tokens: int) -> None:
        self.most_tokens = most_tokens
        self.model = model
        self.tokeniser = tokeniser
        self.title = title
        self.sites = sites_of(model)
        if not self.sites:
            raise ValueError(
                f"{title}: expected a model with attention to look at, got a {type(model).__name__} without"
            )
        self.n_heads = {site.name: site.n_heads for site in self.sites}
        self.layer_names = [name for name, _ in model.named_layers() if name.rpartition(".")[0].endswith("blocks")]
        self.parts = []
        for name, _ in model.named_layers():
            parent, _, last = name.rpartition(".")
            if name in self.layer_names or (parent in self.layer_names and last in ("attention", "mlp", "cross")):
                self.parts.append(name)
        self.texts_of: dict[int, str] = {}

    def about(self) -> dict[str, Any]:
        """What a page needs to know of it once; `site` is the layer with attention that it shows first."""
        cross = [place for place, site in enumerate(self.sites) if site.kind == "cross"]
        return {
            "title": self.title,
            "kind": self.kind,
            "class": type(self.model).__name__,
            "parameters": self.model.n_parameters,
            "parts": self.parts,
            "site": cross[-1] if cross else 0,
            "mostTokens": self.most_tokens,
        }

    def encode(self, text: str) -> list[int]:
        """The ids of nothing but a text."""
        return [int(token) for token in self.tokeniser.encode_plain(text)]

    def ids_of(self, text: str) -> list[int]:
        """A text as the model reads it, with what stands before every text.

        Raises:
            ValueError: an empty text, or one that is too long.
        """
        plain = self.encode(text)
        if not plain:
            raise ValueError("expected a text of at least one character, got none")
        # an encoder reads what its tokeniser puts around every text, too, such as BERT's [CLS] and [SEP]
        around = self.kind == "encoder"
        start: int | None = None
        with suppress(ValueError):  # it knows no end of a text, which is also the beginning
            start = self.tokeniser.start_of_text
        before = [] if start is None else [int(start)]
        ids = list(map(int, self.tokeniser.encode(text))) if around else [*before, *plain]
        self.check(ids)
        return ids

    def edited(self, ids: Sequence[int], place: int, text: str | int) -> list[int]:
        """A text with another token at one place: a token's id, or a text, which may be of several.

        Raises:
            ValueError: a place or an id that is not there; too long a text.
        """
        if not self.first <= place < len(ids):
            raise ValueError(f"expected a token from {self.first} to {len(ids) - 1} to change, got {place}")
        new = [text] if isinstance(text, int) else self.encode(text)
        if not new:
            raise ValueError("expected a text to put in the place of the token, got none")
        result = [*ids[:place], *new, *ids[place + 1 :]]
        self.check(result)
        return result

    def check(self, ids: Sequence[int]) -> None:
        """Refuse what cannot be looked at.

        Raises:
            ValueError: too many tokens or none, or ids that the model does not know.
        """
        if not 0 < len(ids) <= self.most_tokens:
            raise ValueError(f"expected a text of 1 to {self.most_tokens} tokens to look at, got {len(ids)}")
        known = self.tokeniser.n_vocab
        if not all(0 <= token < known for token in ids):
            raise ValueError(f"expected tokens from 0 to {known - 1}")

    def say(self, token: int) -> str:
        """The text of one token where it does not begin a text."""
        if token not in self.texts_of:
            if len(self.texts_of) > 200_000:
                self.texts_of.clear()
            self.texts_of[token] = _text_of(self.tokeniser, token)
        return self.texts_of[token]

    def read(self, ids: Sequence[int], changes: Changes, before: Reading | None = None) -> Reading:
        """Let the model read a text.

        Args:
            before: an earlier reading, of which what stays need not be computed again.
        """
        raise NotImplementedError

    def spared(self, ids: Sequence[int], changes: Changes, before: Reading) -> float:
        """How much of an earlier reading stays, from 0 to 1."""
        return 0.0


def sites_of(model: Any) -> list[Site]:
    """The layers with attention, in the order in which they stand in the model."""
    sites = []
    for name, layer in model.named_layers():
        if attention_of(layer) is not None and hasattr(layer, "n_heads"):
            kind = "cross" if name.endswith("cross") else "source" if name.startswith("encoder.") else "self"
            sites.append(Site(name, kind, layer.n_heads))
    if isinstance(model, Seq2SeqAttention):
        sites.append(Site("attention", "cross", 1))
    return sites


def _text_of(tokeniser: Any, token: int) -> str:
    """Decoded behind another token, for at the beginning of a text some tokenisers leave the space out."""
    if token >= tokeniser.n_vocab:
        return f"⟨{token}⟩"  # a row of the model's that stands for nothing
    stream = tokeniser.stream([int(one) for one in tokeniser.encode_plain("a")][-1:])
    text = str(stream.push([token]))
    return text or str(tokeniser.decode([token])) or f"⟨{token}⟩"


# -------------------------------------------------------------------- listening
class Watch:
    """Within this block attention leaves what its maps can be computed from, and blocks leave the stream."""

    def __init__(self, model: Any, sites: Sequence[Site], layers: Sequence[str]) -> None:
        self.sites = {site.name: Site(site.name, site.kind, site.n_heads) for site in sites}
        self.stream: dict[str, np.ndarray] = {}
        self._named = dict(model.named_layers())
        self._layers = layers
        self._on = ExitStack()

    def __enter__(self) -> Watch:
        for name, site in self.sites.items():
            attention = attention_of(self._named[name]) if name in self._named else None
            if attention is not None:
                self._on.callback(
                    add_hook(attention, "observers", lambda op, out, *args, site=site: let_look(site, op, args))
                )
        for name in self._layers:
            self._on.callback(add_hook(self._named[name], "observers", partial(self._keep, name)))
        return self

    def __exit__(self, *error: object) -> None:
        self._on.close()

    def _keep(self, name: str, layer: Any, out: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> None:
        if not self.stream:
            self.stream["embedding"] = _numbers(x)
        self.stream[name] = _numbers(out)


def let_look(site: Site, op: Any, args: tuple[Any, ...]) -> None:
    """Let its maps be computed from what attention is called with."""

    def looked() -> tuple[Any, Any]:
        scores, weights = scores_and_weights(op, *args)
        return scores[0], weights[0]

    site.looked, site.args, site.op = looked, args, op


def _joined(earlier: Tensor, count: int, later: Tensor) -> Tensor:
    """Queries (1, T, H, D) of the first so many tokens, and those of the others."""
    return Tensor(later.xp.concatenate([earlier.array[:, :count], later.array], axis=1), requires_grad=False)


def _numbers(x: Tensor) -> np.ndarray:
    """(1, T, C) as (T, C) in host memory, of 32 bits or more."""
    array = to_cpu(x.array)[0]
    return array.astype(np.float32) if array.dtype.itemsize < 4 else array


# -------------------------------------------------------------------- one stack of blocks
class Stack(Subject):
    """A model that is one stack of blocks: a `GPT`, or a `TextEncoder`, which predicts nothing."""

    def __init__(self, model: GPT | TextEncoder, tokeniser: Any, title: str) -> None:
        super().__init__(model, tokeniser, title, min(MOST_TOKENS, model.config.context_window))
        self.kind = "decoder" if isinstance(model, GPT) else "encoder"

    def read(self, ids: Sequence[int], changes: Changes, before: Reading | None = None) -> Reading:
        n_blocks, n_tokens = (0, 0) if before is None else self._kept(ids, changes, before)
        model = self.model
        with model.evaluating(), Watch(model, self.sites, self.layer_names) as watch, Probe(model, "") as probe:
            changes.make(probe)
            self._run(ids, before, n_blocks, n_tokens)
        sites, stream = watch.sites, watch.stream
        if before is not None and n_blocks:  # what was not computed again is as it was
            stream = {**stream, **dict(list(before.stream.items())[: 1 + n_blocks])}
            stream = {name: stream[name] for name in before.stream}
            sites = {name: site if site.looked else before.site(name) for name, site in sites.items()}
        elif before is not None and n_tokens:
            stream = {name: np.concatenate([before.stream[name][:n_tokens], x]) for name, x in stream.items()}
            for name, site in sites.items():
                query, *others = site.args
                let_look(site, site.op, (_joined(before.site(name).args[0], n_tokens, query), *others))
        logits = self._logits if isinstance(model, GPT) else None
        texts = [self.say(token) for token in ids]
        reading = Reading(list(ids), texts, None, list(sites.values()), stream, logits, self.say, changes=changes)
        if logits is not None:  # what comes after the last token that stays is another
            known = before.predictions.first(n_tokens - 1) if n_tokens and before and before.predictions else None
            reading.predict(list(stream.values())[-1], known)
        return reading

    def _run(self, ids: Sequence[int], before: Reading | None, n_blocks: int, n_tokens: int) -> None:
        """Compute what is not as it was: all blocks but the first, or all tokens but the first, or everything."""
        model = self.model
        if before is not None and n_blocks:
            # the stream before the first block that changes; the later ones put theirs in its place
            x = model.place(Tensor(list(before.stream.values())[n_blocks][None], requires_grad=False))
            for block in model.blocks[n_blocks:]:
                x = block(x)
            return
        tokens = model.place(np.array([list(ids[n_tokens:])]))
        if not isinstance(model, GPT):
            model(tokens)
        elif before is None or not n_tokens:
            model.hidden_states(tokens)
        else:
            caches = []
            for name in self.n_heads:  # the first keys and values, all of them, for maps are of all that was read
                _, keys, values, *_ = before.site(name).args
                caches.append(KeyValueCache(model.config.context_window))
                caches[-1].append(keys.array[:, :n_tokens], values.array[:, :n_tokens])
            model.hidden_states(tokens, caches)

    def _kept(self, ids: Sequence[int], changes: Changes, before: Reading) -> tuple[int, int]:
        """How many of the first blocks stay as they were, or how many of the first tokens in all blocks."""
        if before.ids == list(ids):
            return changes.first_block(self.layer_names, before.changes), 0
        # what a token is made of must be its own, and keys and values of those before it
        attentions = [block.attention for block in self.model.blocks] if isinstance(self.model, GPT) else [None]
        sees_earlier = all(isinstance(one, MultiHeadSelfAttention) and not one.uses_shift for one in attentions)
        if before.changes != changes or not sees_earlier:
            return 0, 0
        pairs = zip(before.ids, ids)
        shared = next((i for i, (old, new) in enumerate(pairs) if old != new), min(len(before.ids), len(ids)))
        return 0, min(shared, len(ids) - 1)

    def spared(self, ids: Sequence[int], changes: Changes, before: Reading) -> float:
        n_blocks, n_tokens = self._kept(ids, changes, before)
        return max(n_blocks / len(self.layer_names), n_tokens / len(ids))

    def _logits(self, x: Tensor) -> Tensor:
        with self.model.evaluating():
            return self.model.logits(self.model.place(x))


# -------------------------------------------------------------------- encoder-decoders
class Translator(Subject):
    """An encoder-decoder: what its decoder says of a source, and where in that it looks.

    Args:
        model: a `Transformer` or a `Seq2SeqAttention`.
        encode, say: a text to ids; an id to its text.
        begin, end: the tokens around a target.
        most_tokens: of source and target each.
    """

    kind = "translator"
    first = 1

    def __init__(
        self,
        model: EncoderDecoder,
        encode: Callable[[str], Any],
        say: Callable[[int], str],
        begin: int,
        end: int,
        title: str = "translator",
        most_tokens: int = 128,
    ) -> None:
        super().__init__(model, None, title, most_tokens)
        self._encode, self._say = encode, say
        self.begin, self.end = begin, end
        self.layer_names = [name for name in self.layer_names if name.startswith("decoder.")]

    def encode(self, text: str) -> list[int]:
        return [int(token) for token in self._encode(text.strip())] if text.strip() else []

    def say(self, token: int) -> str:
        return "<begin>" if token == self.begin else "<end>" if token == self.end else self._say(token)

    def ids_of(self, text: str) -> list[int]:
        """A source, and behind it what the model makes of it, or what stands after a line with "=>"."""
        source, marked, target = text.partition("=>")
        self.source = self.encode(source)
        if not self.source:
            raise ValueError("expected a text of at least one character, got none")
        if len(self.source) > self.most_tokens:
            raise ValueError(f"expected a source of 1 to {self.most_tokens} tokens to look at, got {len(self.source)}")
        if marked:
            written = self.encode(target)
        else:
            settings = {"begin": self.begin, "end": self.end, "beam_size": 1}
            settings["max_length"] = min(self.most_tokens - 1, 2 * len(self.source) + 10)
            (written,) = beam_search(self.model, np.array([self.source]), [len(self.source)], **settings)
        ids = [self.begin, *written][: self.most_tokens]
        self.check(ids)
        return ids

    def check(self, ids: Sequence[int]) -> None:
        if not 0 < len(ids) <= self.most_tokens:
            raise ValueError(f"expected a target of 1 to {self.most_tokens} tokens to look at, got {len(ids)}")

    def read(self, ids: Sequence[int], changes: Changes, before: Reading | None = None) -> Reading:
        model = self.model
        source, target = np.array([self.source]), np.array([list(ids)])
        rows: list[tuple[np.ndarray, np.ndarray]] = []

        def keep_row(op: Any, out: Tensor, scores: Tensor) -> None:
            rows.append((to_cpu(scores.array)[0], to_cpu(out.array)[0]))

        with ExitStack() as stack:
            stack.enter_context(model.evaluating())
            watch = stack.enter_context(Watch(model, self.sites, self.layer_names))
            if isinstance(model, Seq2SeqAttention):
                stack.callback(add_hook(model.attention.softmax, "observers", keep_row))
                stack.callback(add_hook(model.attention.softmax, "substitutions", weighing_rows(changes)))
            else:
                changes.make(stack.enter_context(Probe(model, "")))
            logits = model.decode(target, model.start_decoding(source, [len(self.source)])).array[0]
            if isinstance(model, Seq2SeqAttention):
                scores, weights = (np.concatenate([row[i] for row in rows])[None] for i in (0, 1))
                watch.sites["attention"].looked = lambda: (scores, weights)
        texts, sources = [self.say(token) for token in ids], [self.say(token) for token in self.source]
        of_stream = partial(logits_of, model) if isinstance(model, Transformer) else None
        sites = list(watch.sites.values())
        reading = Reading(list(ids), texts, sources, sites, watch.stream, of_stream, self.say)
        reading.source = tuple(self.source)
        following = np.array([*reading.ids[1:], -1])
        numbers = to_cpu(logits).astype(np.float32)
        reading.said = None if reading.stream else numbers
        reading.predictions = Predictions(*summed_up(numbers.copy(), following))
        return reading


def saved_translator(path: Path) -> Translator:
    """One that `load_translator` opens.

    Raises:
        FileNotFoundError, ValueError: as there.
    """
    model, vocabulary, config = load_translator(path)
    say = lambda token: vocabulary.texts([token])[0]
    ends = vocabulary.begin, vocabulary.end
    return Translator(model, vocabulary.encode, say, *ends, path.stem, min(MOST_TOKENS, config.context_window))


def weighing_rows(changes: Changes) -> Substitution:
    """What lets a recurrent model's attention weigh keys as changes ask.

    Raises:
        ValueError: changes of parts that it has not, or a softmax that learns scales.
    """
    if changes.off or changes.heads:
        raise ValueError("changes: expected a model with blocks, to switch parts of it off")
    if changes.softmax == "blocks":
        raise ValueError("changes: expected a softmax without scales of its own, got blocks")
    other = None if changes.softmax is None else new_softmax(changes.softmax)

    def substitute(op: Any, args: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
        return (op if other is None else other), (args[0] * (1 / changes.temperature), *args[1:])

    return substitute


def logits_of(model: Transformer, x: Tensor) -> Tensor:
    """Of states of a Transformer's decoder, (..., C) to (..., V)."""
    with no_grad():
        normal = x if model.decoder.norm is None else model.decoder.norm(x)
        if model.head is not None:
            return model.head(normal)
        return linear(normal, model.decoder.embedding.weights, precision=model.precision, transposed=True)
