"""Text from a model, token by token, with cached keys and values: by sampling, and by search for encoder-decoders."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import DTypeLike

from tricycle.kernels import FEW_ROWS
from tricycle.kernels.quantized import dtype_of
from tricycle.models import GPT, next_logits
from tricycle.ops import check_range
from tricycle.sampling import Sampling

MANY_ROWS = 1024  # tokens that several texts read at once: more would be no faster, and take memory
PAST_WINDOW = ("reread", "refuse")
Listener = Callable[[int, np.ndarray], None]
GUESSED_FROM = 3  # so many tokens must have been written before in this order
# What logits may be off by where several tokens were read at once, and not one after the other, of the largest. The
# most that was measured is 2e-6, with float32; with weights of 8 or 16 bits nothing where oneDNN multiplies.
DOUBT = 1e-5


class Reader:
    """A model together with the text that it has read last, whose keys and values it remembers.

    Of the next text it reads only what comes after the beginning that both have.

    What is guessed is read several tokens at once, and sums of numbers in another order are rounded in another way. So
    the reader remembers from where on its keys and values are not, to the last bit, what tokens one by one would have
    left there, and can read that part again.

    Args:
        dtype: of keys and values: "float16" or "bfloat16" for half the memory; as they are computed, which is float32
            on a CPU, unless given.

    Attributes:
        tokens: what has been read.
    """

    def __init__(self, model: GPT, dtype: DTypeLike | None = None) -> None:
        self.model = model
        self._dtype = dtype_of("bfloat16") if dtype == "bfloat16" else dtype
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

    def fork(self, length: int) -> Reader:
        """Another reader that has read the first so many tokens; this one stays as it is.

        It has read nothing where what is remembered cannot be cut there, or is the result of guesses.
        """
        other = Reader(self.model, self._dtype)
        length = min(length, len(self.tokens))
        if length and not self.is_rough and self._can_crop(length):
            other._caches = [cache.select(np.array([0])) for cache in self._caches]
            other._crop(length)
            other.tokens = self.tokens[:length]
        return other

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """The logits (V,) after a text of one token or more, in host memory; dropout is off."""
        logits: np.ndarray = read_together([self], [tokens])[0][-1]
        return logits

    @property
    def can_go_back(self) -> bool:
        """Whether it can forget the end of what it has read, and keep the beginning."""
        return not any(cache.mixes for cache in self._caches)

    def _can_crop(self, length: int) -> bool:
        return all(cache.can_crop(length) for cache in self._caches)

    def _unread(self, tokens: list[int], n_guessed: int) -> list[int]:
        """What of a text is to be read, the last token and those guessed in any case; forgets all that is no part of
        it. Until it has been read the reader knows nothing, should something interrupt it.
        """
        n_known = min(_n_shared(self.tokens, tokens), len(tokens) - 1 - n_guessed)
        if not self._can_crop(n_known):
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
        if not self._rough:
            self._hold(None)
        self.tokens = []

    def _hold(self, place: int | None) -> None:
        for cache in self._caches:
            cache.hold(place)

    def read_again(self, tokens: Sequence[int]) -> np.ndarray:
        """The logits (V,) after a text that was read with guesses, to the last bit as if there had been none."""
        tokens = list(tokens)
        self._crop(len(tokens))
        pieces, self._rough = self._rough, []
        self._hold(None)
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
    for reader, text, tokens, n in zip(readers, whole, new, guessed):
        if n and not reader.is_rough:
            reader._hold(len(text) - len(tokens))
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
    sampling: Sampling | None = None,
    *,
    temperature: float | None = None,
    reader: Reader | None = None,
    lookahead: int = 0,
    past_window: str = "reread",
) -> Iterator[int]:
    """Continue a prompt; gives each token as soon as it is drawn.

    Keys and values of tokens seen are cached.

    Args:
        prompt: token ids, at least one and at most the context window.
        n_tokens: how many to draw at most.
        sampling: how tokens are drawn, and which of them end the text; the prompt counts as seen. `Sampling()` unless
            given.
        temperature: short for `Sampling(temperature=...)`: 0 for the likeliest tokens.
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
    writer = _Writer(model, prompt, n_tokens, _sampling(sampling, temperature), reader, past_window)

    def draw() -> Iterator[int]:
        while not writer.done:
            guess = writer.guess(lookahead)
            (logits,) = read_together([writer.reader], [writer.seen() + guess], [len(guess)])
            yield from writer.draw(logits, guess)

    return draw()


def _sampling(sampling: Sampling | None, temperature: float | None) -> Sampling:
    """
    Raises:
        ValueError: both are given, or the temperature is out of range.
        TypeError: no Sampling.
    """
    if not isinstance(sampling, Sampling | None):
        raise TypeError(f"expected a Sampling (or temperature=..., which is short for one), got {sampling!r}")
    if temperature is None:
        return sampling or Sampling()
    if sampling is not None:
        raise ValueError(f"expected a temperature or a Sampling, which has one, got both: {temperature!r}, {sampling}")
    return Sampling(temperature)


def generate_batch(
    model: GPT,
    prompts: Sequence[Sequence[int] | np.ndarray],
    n_tokens: int,
    sampling: Sampling | Sequence[Sampling] | None = None,
    *,
    temperature: float | None = None,
    lookahead: int = 0,
) -> list[list[int]]:
    """Continue several prompts at once, of any lengths: each token reads the weights once for all of them.

    Args:
        sampling: one for each prompt; or one for all, whose seed, where it is a number, goes up by 1 from prompt to
            prompt.
        temperature: short for `Sampling(temperature=...)`.
        lookahead: as of `Batch`.

    Returns:
        what `generate` gives for each prompt with its sampling.

    Raises:
        ValueError: as of `generate`, or samplings that are not as many as prompts.
    """
    if isinstance(sampling, Sequence) and temperature is None:
        if len(sampling) != len(prompts):
            raise ValueError(
                f"generate_batch: expected a Sampling for each of {len(prompts)} prompts, got {len(sampling)}"
            )
        ways = [_sampling(way, None) for way in sampling]
    else:
        way = _sampling(sampling, temperature)  # type: ignore[arg-type]
        ways = [way.of_text(i) for i in range(len(prompts))]
    batch = Batch(model, lookahead)
    for prompt, way in zip(prompts, ways):
        batch.add(prompt, n_tokens, way)
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

    Args:
        lookahead: as of `generate`, for each text; less of it where there are many, for guesses are rows too.
    """

    def __init__(self, model: GPT, lookahead: int = 0) -> None:
        self.model = model
        self.lookahead = lookahead
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
        sampling: Sampling | None = None,
        *,
        reader: Reader | None = None,
        past_window: str = "reread",
        listener: Listener | None = None,
    ) -> int:
        """Begin a text at the next step; returns its number, 0 for the first that was ever added.

        Args:
            prompt, n_tokens, sampling, reader, past_window: as of `generate`; each text has a reader of its own.
            listener: called with each token of this text and the logits (V,) that it was drawn from, as the model gave
                them.

        Raises:
            ValueError: as of `generate`.
        """
        writer = _Writer(self.model, prompt, n_tokens, sampling or Sampling(), reader, past_window)
        writer.listener = listener
        number = self._n_added
        self._n_added += 1
        if not writer.done:
            self._writers[number] = writer
        return number

    def remove(self, number: int) -> None:
        """Write no more of a text. One that has come to its end is gone already: that is no error."""
        self._writers.pop(number, None)

    def step(self) -> list[tuple[int, int]]:
        """Write a token of each text, or several where they were guessed: its number and the token, those of one text
        in their order. Texts that have come to their end leave.

        Raises:
            ValueError: logits that are not finite: the model's weights are broken.
        """
        drawn = []
        guesses = self._guesses()
        for part in self._parts(guesses):
            writers = [self._writers[number] for number in part]
            texts = [writer.seen() + guesses[number] for number, writer in zip(part, writers)]
            n_guessed = [len(guesses[number]) for number in part]
            every = read_together([writer.reader for writer in writers], texts, n_guessed)
            for number, writer, logits in zip(part, writers, every):
                drawn += [(number, token) for token in writer.draw(logits, guesses[number])]
        for number in [number for number, writer in self._writers.items() if writer.done]:
            self.remove(number)
        return sorted(drawn, key=lambda pair: pair[0])

    def _guesses(self) -> dict[int, list[int]]:
        """What is guessed of each text: together so much that all rows are still read at the speed of the weights."""
        guesses = {number: writer.guess(self.lookahead) for number, writer in self._writers.items()}
        n_guessing = sum(map(bool, guesses.values()))
        room = max(0, FEW_ROWS - len(guesses)) // max(1, n_guessing)
        return {number: guess[:room] for number, guess in guesses.items()}

    def _parts(self, guesses: dict[int, list[int]]) -> Iterator[list[int]]:
        """Texts that are read together: so many that their new tokens fit into memory, and, where that matters, into
        products of few rows, for such are more exact in weights of few bits; a long prompt alone.
        """
        part: list[int] = []
        n_rows = 0
        sizes = {number: writer.n_unread() + len(guesses[number]) for number, writer in self._writers.items()}
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


class _Writer:
    """One text while it is written.

    Attributes:
        tokens: of the prompt, and those drawn. done: whether that is all.
        rereads: whether it goes on when the context window is full.
        listener: as of `Batch.add`.
    """

    listener: Listener | None = None

    def __init__(
        self,
        model: GPT,
        prompt: Sequence[int] | np.ndarray,
        n_tokens: int,
        sampling: Sampling,
        reader: Reader | None,
        past_window: str,
    ) -> None:
        if past_window not in PAST_WINDOW:
            raise ValueError(f"generate: expected past_window to be {' or '.join(PAST_WINDOW)}, got {past_window!r}")
        self.tokens = [int(token) for token in prompt]
        check_prompt(self.tokens, n_tokens, sampling.n_vocab, model)
        self.n_prompt = len(self.tokens)
        self.sampling = sampling
        self.reader = reader or Reader(model)
        self.rereads = past_window == "reread"
        self.done = n_tokens == 0
        self._most = self.n_prompt + n_tokens
        self._window = model.config.context_window
        self._first = 0  # of the tokens that the model sees
        self._generator = sampling.new_generator()

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
            token, row = self._draw_surely(row)
            self.tokens.append(token)
            if self.listener is not None:
                self.listener(token, row)
            self.done = len(self.tokens) == self._most or self.sampling.ends_with(token)
            has_read_on = len(self.reader.tokens) > len(self.tokens) - 1 - self._first  # not if it had to read again
            yield token
            if self.done or token != guessed or not has_read_on:
                return

    def _draw_surely(self, row: np.ndarray) -> tuple[int, np.ndarray]:
        """The token that is drawn where nothing is guessed, and its logits."""
        if self.reader.is_rough:
            token = self.sampling.draw_if_sure(row, self._generator, self.tokens, DOUBT, self.n_prompt)
            if token is not None:
                return token, row
            row = self.reader.read_again(self.seen())
        return self.sampling.draw(row, self._generator, self.tokens, n_prompt=self.n_prompt), row


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
