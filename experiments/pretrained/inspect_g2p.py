"""Inspect the network of `g2p.py`, which has no attention: input attributions of its sounds, and its hidden state.

    python -m experiments.pretrained.inspect_g2p                              as in the README
    python -m experiments.pretrained.inspect_g2p --words tricycle gradient    maps of words of your own
    python -m experiments.pretrained.inspect_g2p --quick                      200 words for the averages

Averages are over words of the Python language reference, which comes with Python; its text differs a little from one
version to the next.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any

import numpy as np

from experiments.pretrained.g2p import LETTERS, SOUNDS, Speller, ids_of, load, pronounce
from experiments.shared.figures import drawing
from experiments.shared.program import Outcome, check_minimum, run_study
from experiments.shared.results import save
from experiments.shared.tables import grid, markdown
from tricycle import kernels
from tricycle.loss import CrossEntropy
from tricycle.tensor import no_grad, to_tensor
from tricycle_cli.flags import run_main

BEGIN, END = SOUNDS.index("<s>"), SOUNDS.index("</s>")
LONGEST = 40  # sounds of a word: twice what g2p-en allows, so that nothing is cut off
SURE: dict[str, set[str]] = {  # letters that are nearly always this sound
    **{letter: {letter.upper()} for letter in "bdfklmptvz"},
    "r": {"R", "ER0", "ER1", "ER2"},
}
HEARD = {**{sound: sound.lower() for sound in "BFLMNPRV"}, "NG": "n", "ER0": "r", "ER1": "r", "ER2": "r"}
LENGTHS = ((3, 5), (6, 8), (9, 11), (12, 14), (15, 17), (18, 20), (21, 30))
VIEWS = ("letter left out", "gradient", "gradient times vector", "probability's rise")


# -------------------------------------------------------------------- views of one word
def log_probabilities(model: Speller, hidden: Any, sounds: Sequence[int]) -> np.ndarray:
    """Return log probabilities (N, T, V) from states (N, H): [:, t] is for sound t, given those before it."""
    targets = np.tile([BEGIN, *sounds[:-1]], (len(hidden), 1))
    return kernels.log_softmax(model.decode(targets, {"hidden": to_tensor(hidden)}).numpy().astype(np.float64))


def leave_one_out(model: Speller, word: str, sounds: Sequence[int]) -> np.ndarray:
    """Return the KL divergence (sounds, letters) in bits of each sound's distribution if one letter is left out.

    KL(with all letters || without this one), both given the same sounds before it.
    """
    tokens, lengths = ids_of([word, *(word[:i] + word[i + 1 :] for i in range(len(word)))])
    with no_grad():
        log_p = log_probabilities(model, model.start_decoding(tokens, lengths)["hidden"].array, sounds)
    return ((np.exp(log_p[:1]) * (log_p[:1] - log_p[1:])).sum(axis=-1) / np.log(2)).T


def gradients(model: Speller, word: str, sounds: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """Return (norm, dot product with the embedding), (T, S), of d log p(sound t) / d embedding of letter s.

    The product is how the log probability would fall, were it a line, if the vector were 0.
    """
    n_sounds = len(sounds)
    tokens, _ = ids_of([word] * n_sounds)  # one row of the batch for each sound
    letters = to_tensor(model.letters(tokens).array)
    _, final = model.encoder(letters)
    logits = model.decode(np.tile([BEGIN, *sounds[:-1]], (n_sounds, 1)), {"hidden": final[0]})
    rows = np.arange(n_sounds)
    (CrossEntropy()(np.array(sounds), logits[rows, rows]) * -n_sounds).backward()
    full: Any = letters.grad
    gradient = full.numpy()[:, : len(word)]
    return np.linalg.norm(gradient, axis=-1), (gradient * letters.array[:, : len(word)]).sum(axis=-1)


def states_of(model: Speller, word: str) -> np.ndarray:
    """Return the encoder states (S + 2, H): before the first letter, after each, and after the end mark."""
    tokens, _ = ids_of([word])
    with no_grad():
        outputs, _ = model.encoder(model.letters(tokens))
    return np.concatenate([np.zeros_like(outputs.array[0, :1]), outputs.array[0]])


def probabilities_by_state(model: Speller, word: str, sounds: Sequence[int]) -> np.ndarray:
    """Return (T, S + 2): the probability of each sound if the decoder starts from each state of `states_of`."""
    with no_grad():
        log_p = log_probabilities(model, states_of(model, word), sounds)
    return np.exp(log_p[:, np.arange(len(sounds)), sounds]).T


def views(model: Speller, word: str, sounds: Sequence[int]) -> dict[str, np.ndarray]:
    """Return four maps (T, S) of sounds to letters by the names in VIEWS, negative values set to 0."""
    rise = np.diff(probabilities_by_state(model, word, sounds), axis=1)[:, : len(word)]
    maps = leave_one_out(model, word, sounds), *gradients(model, word, sounds), rise
    return {name: map_.clip(0) for name, map_ in zip(VIEWS, maps)}


def greedy_sounds(model: Speller, hidden: np.ndarray) -> list[list[str]]:
    """Return the greedy phonemes from each hidden state (N, H), up to the end mark, at most LONGEST."""
    state, last = {"hidden": to_tensor(hidden)}, np.full(len(hidden), BEGIN)
    rows = []
    with no_grad():
        for _ in range(LONGEST):
            last = model.decode(last[:, None], state).array[:, -1].argmax(axis=-1)
            rows.append(last)
    ends = [[*sounds, END].index(END) for sounds in np.array(rows).T.tolist()]
    return [[SOUNDS[row[i]] for row in rows[:end]] for i, end in enumerate(ends)]


# -------------------------------------------------------------------- is it like an alignment?
def unambiguous_pairs(word: str, sounds: Sequence[str]) -> list[tuple[int, int]]:
    """Return (sound index, letter index) of each letter in SURE that occurs once, and whose sound occurs once."""
    pairs = []
    for letter, names in SURE.items():
        places = [j for j, sound in enumerate(sounds) if sound in names]
        if word.count(letter) == 1 and len(places) == 1:
            pairs.append((places[0], word.index(letter)))
    return pairs


def count_ordered_pairs(places: np.ndarray) -> tuple[int, int]:
    """Return (pairs in order, pairs with different letters) of sounds, given the letter index of each sound (T,)."""
    signs = np.sign(np.subtract.outer(places, places))[np.tril_indices(len(places), -1)]
    return int((signs > 0).sum()), int((signs != 0).sum())


def alignment(maps: Sequence[dict[str, np.ndarray]], words: Sequence[str], spoken: Sequence[list[str]]) -> dict:
    """Return by view "hit", "near", "in order" (fractions) and "pairs" (count) of the maps' row maxima.

    "hit" and "near" are the fractions of unambiguous pairs whose row maximum is at the letter, or at most one letter
    away; "in order" is that of pairs of sounds. The view "by its place alone" is the diagonal.
    """
    measured = {}
    for view in (*VIEWS, "by its place alone"):
        hits, near, n_pairs, ordered, n_ordered = 0, 0, 0, 0, 0
        for word, sounds, of_word in zip(words, spoken, maps):
            if view in of_word:
                largest = of_word[view].argmax(axis=1)[: len(sounds)]
            else:
                largest = np.arange(len(sounds)) * len(word) // max(len(sounds), 1)
            pairs = unambiguous_pairs(word, sounds)
            hits += sum(largest[j] == i for j, i in pairs)
            near += sum(abs(largest[j] - i) <= 1 for j, i in pairs)
            n_pairs += len(pairs)
            forward, different = count_ordered_pairs(largest)
            ordered, n_ordered = ordered + forward, n_ordered + different
        shares = {"hit": hits / max(n_pairs, 1), "near": near / max(n_pairs, 1)}
        measured[view] = {**shares, "in order": ordered / max(n_ordered, 1), "pairs": n_pairs}
    return measured


def mean_map(maps: Sequence[np.ndarray], size: int = 24) -> np.ndarray:
    """Return the mean (size, size) of maps (T, S), both axes stretched to `size` and rows scaled to sum to 1."""
    total = np.zeros((size, size))
    for map_ in maps:
        shares = map_ / np.maximum(map_.sum(axis=1, keepdims=True), 1e-12)
        rows, columns = (np.arange(size) * n // size for n in shares.shape)
        total += shares[np.ix_(rows, columns)] * shares.shape[1] / size
    return total / len(maps)


def recognition_delays(model: Speller, words: Sequence[str], spoken: Sequence[list[str]]) -> list[int]:
    """Return per unambiguous pair how many letters after its own the sound's probability rises most.

    Negative before its letter; the end mark counts as one more letter.
    """
    late = []
    for word, sounds in zip(words, spoken):
        if sounds:
            rise = np.diff(probabilities_by_state(model, word, [*map(SOUNDS.index, sounds)]), axis=1)
            late += [int(rise[j].argmax()) - i for j, i in unambiguous_pairs(word, sounds)]
    return late


# -------------------------------------------------------------------- letters in the state
def letter_readout(states: np.ndarray, words: Sequence[str], seed: int, penalty: float = 1.0) -> dict[int, list[float]]:
    """Return {length of 8 or more words: cross-validated accuracy of each letter position} of a linear readout.

    Ridge regression for each place, fitted on four fifths of the words,
    measured on the others, five times.

    Args:
        states: (N, H), the last of each word.
    """
    fold = np.random.default_rng(seed).permutation(len(words)) % 5
    features = np.concatenate([states, np.ones_like(states[:, :1])], axis=1).astype(np.float64)
    sizes = np.array([len(word) for word in words])
    right: dict[int, list[float]] = {n: [] for n, count in enumerate(np.bincount(sizes)) if count >= 8}
    for place in range(max(right, default=0)):
        letters = np.array([LETTERS.index(word[place]) if len(word) > place else 0 for word in words])
        is_right = np.zeros(len(words), bool)
        for number in range(5):
            fitted = (fold != number) & (sizes > place)
            x, y = features[fitted], np.eye(len(LETTERS))[letters[fitted]]
            weights = np.linalg.solve(x.T @ x + penalty * np.eye(x.shape[1]), x.T @ y)
            tested = fold == number
            is_right[tested] = (features[tested] @ weights).argmax(axis=1) == letters[tested]
        for length in (length for length in right if length > place):
            right[length].append(float(is_right[sizes == length].mean()))
    return right


def consonants_of_word(word: str) -> str:
    """Return the consonant letters with a regular pronunciation (b, f, l, m, n, p, r, v), without doubling."""
    plain = word.replace("ph", "f").replace("mb", "m").replace("mn", "m")
    return re.sub(r"(.)\1+", r"\1", "".join(letter for letter in plain if letter in "bflmnprv"))


def consonants_of_sounds(sounds: Sequence[str]) -> str:
    """Return the letters of the phonemes for b, f, l, m, n, p, r and v, in order, without doubling."""
    return re.sub(r"(.)\1+", r"\1", "".join(HEARD.get(sound, "") for sound in sounds))


def count_missed(word: str, sounds: Sequence[str]) -> tuple[int, int]:
    """Return (missing, all) counts of a word's regular consonants, matched in order to the pronunciation."""
    written = consonants_of_word(word)
    blocks = SequenceMatcher(None, written, consonants_of_sounds(sounds), autojunk=False).get_matching_blocks()
    return len(written) - sum(block.size for block in blocks), len(written)


def missed_by_length(words: Sequence[str], spoken: Sequence[list[str]]) -> dict[str, tuple[int, float]]:
    """Return {"3 to 5": (number of words, fraction of missed consonants)} by range of word lengths."""
    counts = [count_missed(word, sounds) for word, sounds in zip(words, spoken)]
    return {label: (len(rows), share(rows)) for label, rows in by_length(words, counts).items()}


def missed_in_pairs(joined: Sequence[str], apart: Sequence[list[str]], together: Sequence[list[str]]) -> dict:
    """Return {length range: [fraction of missed sounds of the first word, of the second]} for joined words.

    Args:
        apart: the sounds of the first word alone, of the second, and so on. Stress does not count.
    """
    counts = []
    for first, second, sounds in zip(apart[::2], apart[1::2], together):
        expected, predicted = ([sound.rstrip("012") for sound in sequence] for sequence in (first + second, sounds))
        blocks = SequenceMatcher(None, expected, predicted, autojunk=False).get_matching_blocks()
        matched = [i for block in blocks for i in range(block.a, block.a + block.size)]
        n_first = sum(i < len(first) for i in matched)
        counts.append((len(first) - n_first, len(first), len(second) - len(matched) + n_first, len(second)))
    rows = by_length(joined, counts)
    return {label: [share([row[:2] for row in of]), share([row[2:] for row in of])] for label, of in rows.items()}


def by_length(words: Sequence[str], rows: Sequence[tuple[int, ...]]) -> dict[str, list[tuple[int, ...]]]:
    """Return the rows by range of word lengths, such as "3 to 5"; ranges without words are left out."""
    table: dict[str, list[tuple[int, ...]]] = {}
    for least, most in LENGTHS:
        of_length = [row for word, row in zip(words, rows) if least <= len(word) <= most]
        table |= {f"{least} to {most}": of_length} if of_length else {}
    return table


def share(counts: Sequence[tuple[int, ...]]) -> float:
    """Return sum(first) / max(sum(second), 1) over pairs of counts."""
    some, all_ = np.array(counts).sum(axis=0)
    return float(some / max(all_, 1))


# -------------------------------------------------------------------- pictures
def draw_maps(path: Path, model: Speller, words: Sequence[str]) -> None:
    """Write a PNG of three maps, sounds by letters, for each word: letter left out, gradient, probability."""
    spoken = pronounce(model, list(words))
    heights = [len(sounds) + 3 for sounds in spoken]
    with drawing(path, (12, 0.21 * sum(heights) + 0.8)) as figure:
        grid = figure.subplots(len(words), 3, squeeze=False, height_ratios=heights)
        for row, word, sounds in zip(grid, words, spoken):
            ids = [*(SOUNDS.index(sound) for sound in sounds), END]
            gradient, _ = gradients(model, word, ids)
            maps = (
                leave_one_out(model, word, ids),
                gradient / gradient.sum(axis=1, keepdims=True),
                probabilities_by_state(model, word, ids),
            )
            columns = list(word), list(word), ["·", *word, "end"]
            for axes, map_, letters in zip(row, maps, columns):
                axes.imshow(map_, cmap="gist_heat_r", aspect="auto", vmin=0, vmax=1 if letters[0] == "·" else None)
                axes.set_xticks(range(len(letters)), letters, fontsize=8)
                axes.set_yticks(range(len(ids)), [*sounds, "end"], fontsize=8, family="monospace")
        titles = (
            "letter removed: KL divergence of\nthe phoneme's distribution, bits",
            "fraction of the gradient norm of\nthe phoneme's log-probability",
            "probability of the phoneme\nif the word ends here",
        )
        for axes, title in zip(grid[0], titles):
            axes.set_title(title, fontsize=9)


def plot_state_contents(path: Path, mean: np.ndarray, delay: Sequence[int], held: dict, errors: dict) -> None:
    """Write a PNG of `mean_map`, `recognition_delays`, `letter_readout`, and `missed_by_length` by label."""
    with drawing(path, (12, 8)) as figure:
        (place, when), (memory, lost) = figure.subplots(2, 2)
        place.imshow(mean, cmap="gist_heat_r", vmin=0, extent=(0, 1, 1, 0), aspect="auto")
        place.set(
            title="letter removed: mean over words", xlabel="position of the letter", ylabel="position of the phoneme"
        )
        late = np.clip(delay, -2, 6)
        shares = [100 * float((late == n).mean()) for n in range(-2, 7)]
        when.bar(range(-2, 7), shares)
        when.set_xticks(range(-2, 7), ["≤ -2", *range(-1, 6), "≥ 6"])
        when.set(title="when a phoneme becomes probable", xlabel="delay, letters", ylabel="phonemes, %")
        lengths = list(held)
        grid = np.full((len(lengths), max(lengths)), np.nan)
        for row, length in zip(grid, lengths):
            row[:length] = held[length]
        image = memory.imshow(100 * grid, cmap="viridis", vmin=0, vmax=100, aspect="auto")
        memory.set_yticks(range(len(lengths)), lengths)
        memory.set_xticks(range(0, max(lengths), 2), range(1, max(lengths) + 1, 2))
        memory.set(title="letters recovered from the final state, %", xlabel="letter", ylabel="letters of the word")
        figure.colorbar(image, ax=memory)
        for label, of_length in errors.items():
            lost.plot(list(of_length), [100 * part for _, part in of_length.values()], marker="o", label=label)
        lost.set(
            title="missed consonants (b f l m n p r v)",
            xlabel="letters of the word",
            ylabel="%",
            ylim=(0, None),
        )
        lost.legend(frameon=False)
        lost.grid(alpha=0.25)


# -------------------------------------------------------------------- the program
@dataclass(frozen=True)
class Settings:
    """The command-line settings of the inspection."""

    words: tuple[str, ...] = ("softmax", "transformer", "transformation")  # words whose maps are drawn
    path: Path | None = None  # see `g2p.py`
    most: int = 10_000  # reference words for the averages
    seed: int = 0  # of held-out words, joined words, and an untrained network
    quick: bool = False  # 200 words
    output: Path = Path("runs/pretrained")  # where the plots and g2p.json are written


def reference_words(most: int) -> list[str]:
    """Return at most `most` words of 3 to 20 letters, evenly spaced in the alphabet, from pydoc's topics."""
    from pydoc_data.topics import topics

    counts: dict[str, int] = {}
    for line in "\n".join(topics.values()).splitlines():
        for word in () if "::=" in line else re.findall(r"(?<![\w.\"'*])[a-z]{3,20}(?![\w(\"'*])", line):
            counts[word] = counts.get(word, 0) + 1
    words = sorted(word for word, count in counts.items() if count > 1)
    return words[:: -(-len(words) // most)]


def measure_and_plot(model: Speller, settings: Settings) -> dict[str, Any]:
    """Measure attributions and states, write two PNGs to `settings.output`; return results for `tables`."""
    words = reference_words(200 if settings.quick else settings.most)
    last = np.array([states_of(model, word)[-2:] for word in words])  # after the last letter, and after the end
    spoken, unended = greedy_sounds(model, last[:, 1]), greedy_sounds(model, last[:, 0])
    maps = [views(model, w, [*map(SOUNDS.index, sounds), END]) for w, sounds in zip(words, spoken)]
    others = np.random.default_rng(settings.seed).permutation(len(words))
    joined = [words[i] + words[other] for i, other in enumerate(others)]
    together = greedy_sounds(model, np.array([states_of(model, word)[-1] for word in joined]))
    apart = [spoken[i] for pair in enumerate(others) for i in pair]
    errors = {"one word": missed_by_length(words, spoken), "two joined words": missed_by_length(joined, together)}
    held = letter_readout(last[:, 1], words, settings.seed)
    untrained = Speller(last.shape[-1], settings.seed)
    random = letter_readout(np.array([states_of(untrained, word)[-1] for word in words]), words, settings.seed)
    delay = recognition_delays(model, words, spoken)
    draw_maps(settings.output / "g2p-maps.png", model, settings.words)
    mean = mean_map([of_word[VIEWS[0]][:-1] for of_word in maps])
    plot_state_contents(settings.output / "g2p-memory.png", mean, delay, held, errors)
    return {
        "words": len(words),
        "alignment": alignment(maps, words, spoken),
        "delay": {str(n): float(np.mean(np.array(delay) == n)) for n in sorted(set(delay))},
        "same unended": float(np.mean([a == b for a, b in zip(spoken, unended)])),
        "letters held": {"trained": held, "untrained": random},
        "consonants missed": errors,
        "sounds missed of two joined": missed_in_pairs(joined, apart, together),
    }


def check(settings: Settings) -> None:
    """Raise ValueError if `most` < 50, `seed` < 0, there are no words, or one is not only of letters."""
    check_minimum(settings, most=50, seed=0)
    if not settings.words or not all(word.isalpha() for word in settings.words):
        raise ValueError(f"expected --words with a word or more, of letters alone, got {' '.join(settings.words)}")


def study(settings: Settings) -> Outcome:
    """Print decodings of prefixes, measure, write g2p.json and plots; return (Markdown tables by title, file names)."""
    model = load(settings.path)
    for word in settings.words:
        print(f"\n{word}: phonemes after each prefix without the end mark, then with it")
        decoded = greedy_sounds(model, states_of(model, word)[1:])
        for prefix, sounds in zip([*(word[: i + 1] for i in range(len(word))), f"{word}."], decoded):
            print(f"  {prefix:<22}{' '.join(sounds)}")
    results = measure_and_plot(model, settings)
    save(settings.output / "g2p.json", settings, **results)
    return tables(results), ["g2p.json", "g2p-maps.png", "g2p-memory.png"]


def main() -> int:
    """Parse `sys.argv`, run the study and print its tables; return 0, or raise ValueError for invalid settings."""
    return run_study(Settings, study, __doc__, check=check)


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Return Markdown tables by title from the results of `measure_and_plot`."""
    views, shares = results["alignment"], results["delay"]
    columns = {"the right letter": "hit", "that letter or a neighbor": "near", "pairs in order": "in order"}
    late = ", ".join(f"{n}: {100 * share:.1f}" for n, share in shares.items() if share >= 0.005)
    held = {}
    for name, of_lengths in results["letters held"].items():
        for least, most in LENGTHS[:4]:  # of longer words there are too few
            of_length = [of_lengths[n] for n in range(least, most + 1) if n in of_lengths]
            if of_length:
                held[f"{name}, {least} to {most}"] = of_length
    places = {"1st": lambda n: 0, "2nd": lambda n: 1, "middle": lambda n: n // 2}
    places |= {"last but one": lambda n: n - 2, "last": lambda n: n - 1}
    mean_at = lambda rows, place: np.mean([shares[place(len(shares))] for shares in rows])
    rows = []
    for length in dict.fromkeys(length for of_length in results["consonants missed"].values() for length in of_length):
        row = [length]
        for of_length in results["consonants missed"].values():
            row += [str(of_length[length][0]), f"{100 * of_length[length][1]:.1f}"] if length in of_length else ["", ""]
        parts = results["sounds missed of two joined"].get(length, [])
        rows.append(row + [f"{100 * part:.1f}" for part in parts] + [""] * (2 - len(parts)))
    titles = ["letters", "words", "consonants missed, %", "two words joined", "consonants missed, %"]
    n_pairs, same = views[VIEWS[0]]["pairs"], f"{100 * results['same unended']:.1f}%"
    return {
        f"{results['words']} words, {n_pairs} letters whose sound is sure; %": (
            grid(list(views), columns, lambda view, key: views[view][key], 1, 100)
        ),
        f"Letters after its own at which a sound's probability rises most, %: {late}; without the mark of the end, "
        f"{same} are said the same": grid(held, places, mean_at, 0, 100, "letters decoded from the last state, %"),
        "Missed consonants": markdown([*titles, "sounds of the first, %", "of the second, %"], rows),
    }


if __name__ == "__main__":
    run_main(main)
