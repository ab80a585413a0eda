"""Text from a model, token by token, with cached keys and values: by sampling, and by search for encoder-decoders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import DTypeLike

from tricycle.decoding import FEW_ROWS, next_logits
from tricycle.models import GPT
from tricycle.ops import check_range

MANY_ROWS = 1024  # tokens that several texts read at once: more would be no faster, and take memory
GUESSED_FROM = 3  # so many tokens must have been written before in this order
# What logits may be off by where several tokens were read at once, and not one after the other, of the largest. The
# most that was measured is 2e-6, with float32; with weights of 8 or 16 bits nothing where oneDNN multiplies.
DOUBT = 1e-5


def sample(
    logits: np.ndarray,
    generator: np.random.Generator,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    never: Sequence[int] = (),
    repetition_penalty: float = 1.0,
    seen: Sequence[int] = (),
) -> int:
    """Draw a token. What follows happens in this order: repetition_penalty, never, temperature, top_k, top_p and min_p.

    Args:
        logits: (V,).
        temperature: divides the logits; 0 takes the largest.
        top_k: draw among the k largest only; 0 for all.
        top_p: draw among the fewest largest whose probabilities reach this sum (Holtzman et al. 2020).
        min_p: draw among those at least this many times as probable as the largest (Nguyen et al. 2024).
        never: tokens that are not drawn, unless there is no other.
        repetition_penalty: logits of tokens that were `seen` are divided by this, or multiplied where they are below 0
            (Keskar et al. 2019, section 4.1); 1 leaves them.

    Raises:
        ValueError: settings out of range, or logits that are not finite.
    """
    check_sampling(temperature, top_k, top_p, min_p, repetition_penalty=repetition_penalty)
    logits = _allowed(logits, never, repetition_penalty, seen)
    return _draw(logits, generator, temperature, top_k, top_p, min_p)[0]


def _allowed(
    logits: np.ndarray, never: Sequence[int], repetition_penalty: float = 1.0, seen: Sequence[int] = ()
) -> np.ndarray:
    """Logits in float64, -infinity for what is not to be drawn.

    Raises:
        ValueError: as of `sample`.
    """
    logits = logits.astype(np.float64)
    if not np.isfinite(logits).all():
        raise ValueError("sample: expected finite logits, got NaN or infinity: the model's weights are broken")
    if repetition_penalty != 1 and len(seen):
        known = np.unique(np.asarray(seen, np.int64))
        known = known[known < len(logits)]
        logits[known] = np.where(
            logits[known] < 0, logits[known] * repetition_penalty, logits[known] / repetition_penalty
        )
    if 0 < len(hidden := {token for token in never if token < len(logits)}) < len(logits):
        logits[list(hidden)] = -np.inf
    return logits


def _draw(
    logits: np.ndarray,
    generator: np.random.Generator,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    doubt: float = 0.0,
) -> tuple[int, bool]:
    """A token, and whether it is sure: no logits that differ from these by up to `doubt` would have given another.

    Tokens share the numbers from 0 to 1 in the order of their ids: in that of their probabilities, logits that are
    almost equal would change places with the smallest difference.
    """
    if temperature == 0:
        token = int(logits.argmax())
        return token, not doubt or np.count_nonzero(logits >= logits[token] - 2 * doubt) == 1
    order, probabilities = _likely(logits, temperature, top_k, top_p, min_p)
    by_id = np.argsort(order)
    ends = probabilities[by_id].cumsum()
    ends /= ends[-1]
    number = generator.random()
    place = int(ends.searchsorted(number, side="right"))
    token = int(order[by_id[place]])
    return token, not doubt or _is_sure(logits, token, number, (temperature, top_k, top_p, min_p), doubt)


def _is_sure(
    logits: np.ndarray, token: int, number: float, options: tuple[float, int, float, float], doubt: float
) -> bool:
    """Whether a token's share of the numbers from 0 to 1 holds this one, however logits differ by up to `doubt`."""
    temperature = max(options[0], 1e-6)
    turn = min(2 * doubt / temperature, 50.0)  # the logarithm of what the ratio of two weights may be off by
    surely, perhaps = _candidates(logits, options, doubt, turn)
    if not surely[token]:
        return False
    weights = np.exp((logits - logits.max()) / temperature)
    most_before = weights[:token] @ perhaps[:token]
    least_from_it = weights[token:] @ surely[token:]
    least_to_it = weights[: token + 1] @ surely[: token + 1]
    most_after = weights[token + 1 :] @ perhaps[token + 1 :]
    begin = _leaned(most_before, least_from_it, turn)
    end = 1 - _leaned(most_after, least_to_it, turn)
    return bool((most_before == 0 or begin < number) and (most_after == 0 or number < end))


def _leaned(one: float, other: float, turn: float) -> float:
    """The share that one weight has of both when it weighs e^turn as much beside the other."""
    return one / (one + other * np.exp(-turn))


def _candidates(
    logits: np.ndarray, options: tuple[float, int, float, float], doubt: float, turn: float
) -> tuple[np.ndarray, np.ndarray]:
    """Which tokens are drawn among in any case, and which perhaps (V,), where logits are off by up to `doubt`."""
    temperature, top_k, top_p, min_p = options
    if not top_k and top_p == 1 and not min_p:
        return np.isfinite(logits), np.isfinite(logits)
    factor = np.exp(turn)
    fewest, _ = _likely(logits, temperature, top_k, max(top_p - turn, 1e-9), min(min_p * factor, 1.0))
    most, _ = _likely(logits, temperature, top_k, min(top_p + turn, 1.0), min_p / factor)
    most = most[np.isfinite(logits[most])]
    perhaps = logits >= logits[most[-1]] - 2 * doubt
    if np.count_nonzero(perhaps) == len(fewest):
        return perhaps, perhaps
    return logits > logits[fewest[-1]] + 2 * doubt, perhaps


def _likely(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[np.ndarray, np.ndarray]:
    """The tokens to draw among, most probable first, and their probabilities. To sort all of them would take longer."""
    # the shift keeps a small temperature from overflowing
    weights = np.exp((logits - logits.max()) / max(temperature, 1e-6))
    chosen = np.arange(len(logits))
    if 0 < top_k < len(logits):
        chosen = chosen[logits >= np.partition(logits, -top_k)[-top_k]]
    else:
        # all tokens below the first bound have less than 1 - top_p together
        chosen = chosen[weights >= max((1 - top_p) / len(logits) * weights.sum(), min_p)]
    order = chosen[np.argsort(-logits[chosen], kind="stable")][: top_k or None]
    probabilities = weights[order] / (weights[order] if top_k else weights).sum()
    if top_p < 1 or min_p:
        n_likely = np.count_nonzero(probabilities >= min_p * probabilities[0])
        n_kept = min(n_likely, int(np.searchsorted(probabilities.cumsum(), top_p)) + 1)
        order, probabilities = order[:n_kept], probabilities[:n_kept]
    return order, probabilities / probabilities.sum()


def repeats(tokens: Sequence[int], size: int) -> list[int]:
    """The tokens that would complete a run of this many which the text already has (Paulus et al. 2017); 0 for none."""
    tail = tokens[len(tokens) - size + 1 :]
    starts = range(len(tokens) - size + 1) if size else ()
    return [tokens[i + size - 1] for i in starts if tokens[i : i + size - 1] == tail]


def check_sampling(
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float = 0.0,
    no_repeat_ngram_size: int = 0,
    repetition_penalty: float = 1.0,
) -> None:
    """Refuse settings out of range.

    Raises:
        ValueError: names the setting.
    """
    if not 0 <= temperature < np.inf:
        raise ValueError(f"expected temperature to be 0 or more, got {temperature!r}")
    if not isinstance(top_k, (int, np.integer)) or top_k < 0:
        raise ValueError(f"expected top_k to be a whole number, 0 or more, got {top_k!r}")
    if not isinstance(no_repeat_ngram_size, (int, np.integer)) or no_repeat_ngram_size < 0:
        got = f"got {no_repeat_ngram_size!r}"
        raise ValueError(f"expected no_repeat_ngram_size to be a whole number, 0 or more, {got}")
    if not 0 < top_p <= 1:
        raise ValueError(f"expected top_p to be above 0 and at most 1, got {top_p!r}")
    if not 0 <= min_p <= 1:
        raise ValueError(f"expected min_p to be from 0 to 1, got {min_p!r}")
    if not 0 < repetition_penalty < np.inf:
        raise ValueError(f"expected repetition_penalty to be above 0, got {repetition_penalty!r}")


class Reader:
    """A model together with the text that it has read last, whose keys and values it remembers.

    Of the next text it reads only what comes after the beginning that both have.

    What is guessed is read several tokens at once, and sums of numbers in another order are rounded in another way. So
    the reader remembers from where on its keys and values are not, to the last bit, what tokens one by one would have
    left there, and can read that part again.

    Args:
        dtype: of keys and values: "float16" for half the memory, float32 unless given.

    Attributes:
        tokens: what has been read.
    """

    def __init__(self, model: GPT, dtype: DTypeLike | None = None) -> None:
        self.model = model
        self._dtype = dtype
        self.forget()

    @property
    def is_rough(self) -> bool:
        """Whether some of it was read as a guess, so that logits may be rounded in another way."""
        return bool(self._rough)

    def forget(self) -> None:
        """Read the next text from its first token."""
        self.tokens: list[int] = []
        self._caches = self.model.new_caches(self._dtype)
        self._rough: list[int] = []  # sizes of the pieces in which the last tokens would have been read without guesses

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """The logits (V,) after a text of one token or more, in host memory; dropout is off."""
        logits: np.ndarray = read_together([self], [tokens])[0][-1]
        return logits

    @property
    def can_go_back(self) -> bool:
        """Whether it can forget the end of what it has read, and keep the beginning."""
        return all(cache.latest is None for cache in self._caches)

    def _unread(self, tokens: list[int], n_guessed: int) -> list[int]:
        """What of a text is to be read, the last token and those guessed in any case; forgets all that is no part of
        it. Until it has been read the reader knows nothing, should something interrupt it.
        """
        n_known = min(_n_shared(self.tokens, tokens), len(tokens) - 1 - n_guessed)
        if n_known < len(self.tokens) and not self.can_go_back:
            n_known = 0
        if n_known == 0:
            self.forget()
        self._crop(n_known)
        return tokens[n_known:]

    def _crop(self, length: int) -> None:
        """Until something has been read the reader knows nothing, should that be interrupted."""
        for cache in self._caches:
            cache.crop(length)
        n_gone = len(self.tokens) - length
        while self._rough and n_gone > 0:
            last = self._rough.pop()
            if last > n_gone:
                self._rough.append(last - n_gone)
            n_gone -= last
        self.tokens = []

    def read_again(self, tokens: Sequence[int]) -> np.ndarray:
        """The logits (V,) after a text that was read with guesses, to the last bit as if there had been none."""
        tokens = list(tokens)
        self._crop(len(tokens))
        pieces, self._rough = self._rough, []
        place = len(tokens) - sum(pieces)
        for cache in self._caches:
            cache.crop(place)
        for size in pieces:
            logits = next_logits(self.model, [tokens[place : place + size]], [self._caches])[0]
            place += size
        self.tokens = tokens
        return logits


def read_together(
    readers: Sequence[Reader], texts: Sequence[Sequence[int]], n_guessed: Sequence[int] | None = None
) -> list[np.ndarray]:
    """The logits after texts that a reader each reads, all in the same matrix products.

    Args:
        readers: of one model.
        n_guessed: how many of each text's last tokens are guesses; none unless given.

    Returns:
        for each text (G + 1, V): after each of the G guesses, and before the first.
    """
    guessed = [0] * len(texts) if n_guessed is None else list(n_guessed)
    whole = [list(text) for text in texts]
    new = [reader._unread(text, n) for reader, text, n in zip(readers, whole, guessed)]
    caches = [reader._caches for reader in readers]
    if not any(guessed):
        rows = next_logits(readers[0].model, new, caches)
        logits = [row[None] for row in rows]
    else:
        rows = next_logits(readers[0].model, new, caches, every=True)
        ends = np.cumsum([len(tokens) for tokens in new])
        logits = [rows[end - 1 - n : end] for end, n in zip(ends, guessed)]
    for reader, text, tokens, n in zip(readers, whole, new, guessed):
        if n:
            reader._rough += [1] * len(tokens)
        elif reader.is_rough:
            reader._rough.append(len(tokens))
        reader.tokens = text
    return logits


def _n_shared(left: list[int], right: list[int]) -> int:
    """How many tokens two texts have in common at their beginning."""
    n_both = min(len(left), len(right))
    if left[:n_both] == right[:n_both]:
        return n_both
    return next(i for i in range(n_both) if left[i] != right[i])


def generate(
    model: GPT,
    prompt: Sequence[int] | np.ndarray,
    n_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | np.random.Generator | None = 0,
    stop_token: int | Sequence[int] | None = None,
    n_vocab: int | None = None,
    min_p: float = 0.0,
    no_repeat_ngram_size: int = 0,
    repetition_penalty: float = 1.0,
    reader: Reader | None = None,
    lookahead: int = 0,
    past_window: str = "reread",
) -> Iterator[int]:
    """Continue a prompt; gives each token as soon as it is drawn.

    Keys and values of tokens seen are cached.

    Args:
        prompt: token ids, at least one and at most the context window.
        n_tokens: how many to draw at most.
        temperature, top_k, top_p, min_p, repetition_penalty: as of `sample`; the prompt counts as seen.
        stop_token: end after drawing this one, or one of these.
        n_vocab: draw only ids below this (a tokeniser may know fewer than the model).
        no_repeat_ngram_size: never write so many tokens a second time in the same order; 0 lets them be. Small models
            run in circles without it.
        reader: one of this model, which may have read the beginning of the prompt already; a new one if None.
        lookahead: where the text repeats itself, guess that it goes on so for this many tokens, and read them at once:
            those that would have been drawn anyway are kept. It changes nothing but the time: where rounding might have
            given another token, what was guessed is read again one by one. It pays where much is repeated, as in code
            that is edited, and tokens are not drawn by chance (Saxena 2023, "Prompt lookup decoding").
        past_window: when the context window is full, "reread" reads its later half anew and goes on from there, and
            "refuse" raises a ValueError where another token is wanted.

    Raises:
        ValueError: an empty or too long prompt, ids outside the vocabulary, settings out of range.
    """
    settings = Sampling(temperature, top_k, top_p, min_p, no_repeat_ngram_size, repetition_penalty)
    if past_window not in ("reread", "refuse"):
        raise ValueError(f"generate: expected past_window to be reread or refuse, got {past_window!r}")
    writer = _Writer(model, prompt, n_tokens, settings, seed, stop_token, n_vocab, reader)
    writer.rereads = past_window == "reread"

    def draw() -> Iterator[int]:
        while not writer.done:
            guess = writer.guess(lookahead)
            (logits,) = read_together([writer.reader], [writer.seen() + guess], [len(guess)])
            yield from writer.draw(logits, guess)

    return draw()


def generate_batch(
    model: GPT,
    prompts: Sequence[Sequence[int] | np.ndarray],
    n_tokens: int,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int | Sequence[int] = 0,
    stop_token: int | Sequence[int] | None = None,
    n_vocab: int | None = None,
    min_p: float = 0.0,
    no_repeat_ngram_size: int = 0,
    repetition_penalty: float = 1.0,
) -> list[list[int]]:
    """Continue several prompts at once, of any lengths: each token reads the weights once for all of them.

    Args:
        seed: one for each prompt, or a number: then the prompt at place i has seed + i.
        others as of `generate`.

    Returns:
        what `generate` gives for each prompt with its seed.

    Raises:
        ValueError: as of `generate`, or seeds that are not as many as prompts.
    """
    seeds = [seed + i for i in range(len(prompts))] if isinstance(seed, (int, np.integer)) else list(seed)
    if len(seeds) != len(prompts):
        raise ValueError(f"generate_batch: expected a seed for each of {len(prompts)} prompts, got {len(seeds)}")
    settings = Sampling(temperature, top_k, top_p, min_p, no_repeat_ngram_size, repetition_penalty)
    batch = Batch(model)
    for prompt, own in zip(prompts, seeds):
        batch.add(prompt, n_tokens, settings, own, stop_token, n_vocab)
    drawn: list[list[int]] = [[] for _ in prompts]
    while len(batch):
        for number, token in batch.step():
            drawn[number].append(token)
    return drawn


class Batch:
    """Texts that are written at the same time: each step reads the weights once, and each text gets a token.

    Texts come and go at any time, and each has settings of its own, as a server needs it. Nothing is padded: new tokens
    of all texts are rows of the same matrix products, and attention looks at each text alone. So every text becomes
    what `generate` makes of it, but for what rounding does: the sums in a product of several rows may be added up in
    another order than those of one. A step takes a little longer for each text.
    """

    def __init__(self, model: GPT) -> None:
        self.model = model
        self._writers: dict[int, _Writer] = {}
        self._n_added = 0
        self._n_rows = MANY_ROWS if _is_float32(model) else FEW_ROWS

    def __len__(self) -> int:
        """How many texts are at work."""
        return len(self._writers)

    def add(
        self,
        prompt: Sequence[int] | np.ndarray,
        n_tokens: int,
        settings: Sampling | None = None,
        seed: int | np.random.Generator | None = 0,
        stop_token: int | Sequence[int] | None = None,
        n_vocab: int | None = None,
        reader: Reader | None = None,
    ) -> int:
        """Begin a text at the next step; returns its number, 0 for the first that was ever added.

        Args: as of `generate`; each text that is at work has a reader of its own.

        Raises:
            ValueError: as of `generate`.
        """
        writer = _Writer(self.model, prompt, n_tokens, settings or Sampling(), seed, stop_token, n_vocab, reader)
        number = self._n_added
        self._n_added += 1
        if not writer.done:
            self._writers[number] = writer
        return number

    def remove(self, number: int) -> None:
        """Write no more of a text. One that has come to its end is gone already: that is no error."""
        self._writers.pop(number, None)

    def step(self) -> list[tuple[int, int]]:
        """Write a token of each text: its number and the token. Texts that have come to their end leave.

        Raises:
            ValueError: logits that are not finite: the model's weights are broken.
        """
        drawn = []
        for part in self._parts():
            writers = [self._writers[number] for number in part]
            every = read_together([writer.reader for writer in writers], [writer.seen() for writer in writers])
            for number, writer, logits in zip(part, writers, every):
                drawn += [(number, token) for token in writer.draw(logits, [])]
        for number in [number for number, writer in self._writers.items() if writer.done]:
            self.remove(number)
        return sorted(drawn)

    def _parts(self) -> Iterator[list[int]]:
        """Texts that are read together: so many that their new tokens fit into memory, and, where that matters, into
        products of few rows, for such are more exact in weights of few bits; a long prompt alone.
        """
        part: list[int] = []
        n_rows = 0
        sizes = {number: writer.n_unread() for number, writer in self._writers.items()}
        for number in sorted(sizes, key=lambda number: sizes[number]):
            if part and n_rows + sizes[number] > self._n_rows:
                yield part
                part, n_rows = [], 0
            part.append(number)
            n_rows += sizes[number]
        if part:
            yield part


def _is_float32(model: GPT) -> bool:
    return model.precision == "float32" and all(p.array.dtype == np.float32 for p in model.parameters())


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn, as `sample` and `generate` say.

    Raises:
        ValueError: names the setting that is out of range.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    no_repeat_ngram_size: int = 0
    repetition_penalty: float = 1.0

    def __post_init__(self) -> None:
        names = self.temperature, self.top_k, self.top_p, self.min_p
        check_sampling(*names, self.no_repeat_ngram_size, self.repetition_penalty)

    def draw(self, logits: np.ndarray, generator: np.random.Generator, tokens: list[int]) -> int:
        """A token after some others."""
        return _draw(self._allowed(logits, tokens), generator, *self._options)[0]

    def draw_if_sure(
        self, logits: np.ndarray, generator: np.random.Generator, tokens: list[int], doubt: float
    ) -> int | None:
        """The same; None, and nothing drawn, where logits off by that share of the largest might have given another."""
        state = generator.bit_generator.state
        logits = self._allowed(logits, tokens)
        doubt *= float(np.abs(logits[np.isfinite(logits)]).max()) * max(
            self.repetition_penalty, 1 / self.repetition_penalty
        )
        token, sure = _draw(logits, generator, *self._options, doubt)
        if not sure:
            generator.bit_generator.state = state
        return token if sure else None

    def _allowed(self, logits: np.ndarray, tokens: list[int]) -> np.ndarray:
        never = repeats(tokens, self.no_repeat_ngram_size)
        return _allowed(logits, never, self.repetition_penalty, tokens)

    @property
    def _options(self) -> tuple[float, int, float, float]:
        return self.temperature, self.top_k, self.top_p, self.min_p


class _Writer:
    """One text while it is written.

    Attributes:
        tokens: of the prompt, and those drawn. done: whether that is all.
        rereads: whether it goes on when the context window is full.
    """

    rereads = True

    def __init__(
        self,
        model: GPT,
        prompt: Sequence[int] | np.ndarray,
        n_tokens: int,
        settings: Sampling,
        seed: int | np.random.Generator | None,
        stop_token: int | Sequence[int] | None,
        n_vocab: int | None,
        reader: Reader | None,
    ) -> None:
        self.tokens = [int(token) for token in prompt]
        check_prompt(self.tokens, n_tokens, n_vocab, model)
        self.n_prompt = len(self.tokens)
        self.settings = settings
        self.n_vocab = n_vocab
        self.reader = reader or Reader(model)
        self.done = n_tokens == 0
        self._most = self.n_prompt + n_tokens
        self._window = model.config.context_window
        self._first = 0  # of the tokens that the model sees
        self._stops = () if stop_token is None else np.atleast_1d(stop_token).tolist()
        self._generator = np.random.default_rng(seed)

    def seen(self) -> list[int]:
        """What the model is to see next.

        Raises:
            ValueError: more than the context window, where that is refused.
        """
        if len(self.tokens) - self._first > self._window:
            if not self.rereads:
                raise ValueError(f"generate: the context window of {self._window} tokens is full")
            self._first = len(self.tokens) - max(1, self._window // 2)
        return self.tokens[self._first :]

    def n_unread(self) -> int:
        """How many tokens are to be read next."""
        seen = self.seen()
        return len(seen) - min(_n_shared(self.reader.tokens, seen), len(seen) - 1)

    def guess(self, n_most: int) -> list[int]:
        """What followed when the text was last as it is now at its end; [] where it never was, nobody asks, or more
        than the last token is to be read anyway.
        """
        room = min(n_most, self._window - len(self.seen()), self._most - len(self.tokens) - 1)
        room = min(room, FEW_ROWS - 1)
        if room < 1 or not self.reader.can_go_back or self.n_unread() > 1:
            return []
        *before, last = self.tokens[-GUESSED_FROM:]
        n = len(before)
        for i in range(len(self.tokens) - 2, n - 1, -1):
            if self.tokens[i] == last and self.tokens[i - n : i] == before:
                since = self.tokens[i + 1 :]  # perhaps a few tokens that are written over and over
                return (since * -(-room // len(since)))[:room]
        return []

    def draw(self, logits: np.ndarray, guess: list[int]) -> Iterator[int]:
        """The next tokens: one, and after each that was guessed another.

        Args:
            logits: (G + 1, V).
        """
        for row, guessed in zip(logits, [*guess, None]):
            token = self._draw_surely(row)
            self.tokens.append(token)
            self.done = len(self.tokens) == self._most or token in self._stops
            has_read_on = len(self.reader.tokens) > len(self.tokens) - 1 - self._first  # not if it had to read again
            yield token
            if self.done or token != guessed or not has_read_on:
                return

    def _draw_surely(self, row: np.ndarray) -> int:
        """The token that is drawn where nothing is guessed."""
        if self.reader.is_rough:
            token = self.settings.draw_if_sure(row[: self.n_vocab], self._generator, self.tokens, DOUBT)
            if token is not None:
                return token
            row = self.reader.read_again(self.seen())
        return self.settings.draw(row[: self.n_vocab], self._generator, self.tokens)


def check_prompt(tokens: list[int], n_tokens: int, n_vocab: int | None, model: GPT) -> None:
    """
    Raises:
        ValueError: as of `generate`.
    """
    window, size = model.config.context_window, model.config.vocab_size
    if not 1 <= len(tokens) <= window:
        raise ValueError(f"generate: expected a prompt of 1 to {window} tokens, got {len(tokens)}")
    if not isinstance(n_tokens, (int, np.integer)) or n_tokens < 0:
        raise ValueError(f"generate: expected n_tokens to be 0 or more, got {n_tokens}")
    if n_vocab is not None and not 1 <= n_vocab <= size:
        raise ValueError(f"generate: expected n_vocab from 1 to {size}, got {n_vocab}")
    check_range("generate: prompt", np.array(tokens), size)
