"""Inspect the attention of `textgenrnn.py` over the last 40 characters, and measure the loss without it.

python -m experiments.pretrained.inspect_textgenrnn                       as in the README
python -m experiments.pretrained.inspect_textgenrnn --titles "My cat ate my homework"
python -m experiments.pretrained.inspect_textgenrnn --quick               three titles, and no other text
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from experiments.pretrained.textgenrnn import MARK, TITLES, WINDOW, CharacterModel, load, windows
from experiments.shared.figures import drawing
from experiments.shared.pooling_weights import Answer, Item, write_page
from experiments.shared.program import Outcome, run_study
from experiments.shared.results import save
from experiments.shared.tables import grid, markdown
from experiments.shared.texts import zen
from tricycle import kernels
from tricycle.loss import CrossEntropy
from tricycle.tensor import to_tensor
from tricycle_cli.flags import run_main
from tricycle_lab.plot import COLOURS

MORE_TITLES = (
    "What is something that everyone should know before they turn 30?",
    "TIL that octopuses have three hearts and blue blood",
    "My girlfriend made this cake for my birthday",
    "I just finished the game for the first time and I have a question about the ending",
    "[Discussion] Is it worth buying a new phone this year?",
    "Found this little guy in my backyard this morning",
    "Man arrested after police find 200 snakes in his car",
    "ELI5: Why does the sky look blue during the day and red at night?",
    "When your mom says that dinner is ready",
    "Trump says he will meet with the president of France next week",
    "LPT: If you want to save money, never go shopping when you are hungry",
    "The new season is so much better than the last one",
)
NOTE = (
    "Each text is what the network saw before it gave a character: the last 40, of which · stand before a text's "
    "beginning and ⊢ for its mark. The truth is the character that came. Attention: its weights. Gradient: shares of "
    "the norm of the gradient of that character's log probability with respect to each character's vector."
)
SHOWN = {MARK: "⊢", " ": "␣"}
KINDS = ("small letter", "capital", "digit", "space", "other sign", "mark", "before the beginning")
VISIBLE = (1, 2, 3, 5, 8, 12, 16, 20, 25, 30, 35, 40)  # last characters that are left standing


class Read(NamedTuple):
    """The network's inputs, states, scores and attention weights at each character of texts.

    Attributes:
        tokens: (N, 40), the window. labels: (N,), the next character.
        states: (N, 40, W). scores, weights: (N, 40).
    """

    tokens: np.ndarray
    labels: np.ndarray
    states: np.ndarray
    scores: np.ndarray
    weights: np.ndarray


def read(model: CharacterModel, vocabulary: dict[str, int], texts: Sequence[str]) -> Read:
    """Run the network over texts; return a Read with a row for each character and each text's end, in order."""
    tokens = np.concatenate([windows(vocabulary, list(text)) for text in texts])
    labels = [[*(vocabulary.get(character, 0) for character in text), vocabulary[MARK]] for text in texts]
    return _read_windows(model, tokens, np.concatenate(labels))


def _read_windows(model: CharacterModel, tokens: np.ndarray, labels: np.ndarray) -> Read:
    """Run the network over windows (N, T); return a Read with states, scores and attention weights."""
    with model.evaluating():
        states = model.states(model.embedding(to_tensor(tokens, dtype=int)))
        _, weights = model.attend(states)
    scores = states.array @ model.query.array
    return Read(tokens, labels, states.array, scores, weights.array)


# -------------------------------------------------------------------- loss without attention
def replacement_weights(weights: np.ndarray, seed: int = 0) -> dict[str, np.ndarray]:
    """Return by name seven arrays (N, 40): the given weights ("as it is") and replacements of them."""
    last, largest = np.zeros_like(weights), np.zeros_like(weights)
    last[:, -1] = 1
    np.put_along_axis(largest, weights.argmax(axis=1)[:, None], 1, axis=1)
    others = weights * (1 - last)
    generator = np.random.default_rng(seed)
    return {
        "as it is": weights,
        "the last alone": last,
        "the largest alone": largest,
        "their mean, the same every time": np.broadcast_to(weights.mean(axis=0), weights.shape),
        "all alike": np.full_like(weights, 1 / weights.shape[1]),
        "without the last": others / others.sum(axis=1, keepdims=True),
        "in random order": generator.permuted(weights, axis=1),
    }


def bits(model: CharacterModel, states: np.ndarray, weights: np.ndarray, labels: np.ndarray) -> float:
    """Return the mean bits per label (N,) if states (N, T, W) are averaged with these weights (N, T)."""
    with model.evaluating():
        logits = model.output((weights[:, None] @ states)[:, 0]).numpy().astype(np.float64)
    return float(-kernels.log_softmax(logits)[np.arange(len(labels)), labels].mean() / np.log(2))


def bits_by_visible(model: CharacterModel, reading: Read, n_visible: Sequence[int] = VISIBLE) -> list[float]:
    """Return the mean bits per character for each n of `n_visible`, all but the last n ids set to 0."""
    costs = []
    for n in n_visible:
        tokens = np.where(np.arange(WINDOW) >= WINDOW - n, reading.tokens, 0)
        part = _read_windows(model, tokens, reading.labels)
        costs.append(bits(model, part.states, part.weights, part.labels))
    return costs


def other_windows(model: CharacterModel, vocabulary: dict[str, int], text: str, sizes: Sequence[int]) -> list[dict]:
    """Return by window "size" the "weight on the last", and bits by "attention" and "the last alone".

    Bits are per character. All sizes predict the same characters, those after the first max(sizes).
    """
    ids = np.array([vocabulary.get(character, 0) for character in text])
    positions = np.arange(max(sizes), len(ids))
    rows = []
    for size in sizes:
        part = _read_windows(model, ids[positions[:, None] - np.arange(size, 0, -1)], ids[positions])
        last = np.eye(size, dtype=np.float32)[-1:].repeat(len(positions), axis=0)
        cost = {"attention": bits(model, part.states, part.weights, part.labels)}
        cost["the last alone"] = bits(model, part.states, last, part.labels)
        rows.append({"size": size, "weight on the last": float(part.weights[:, -1].mean()), **cost})
    return rows


# -------------------------------------------------------------------- attention and gradient shares
def gradient_shares(model: CharacterModel, reading: Read) -> np.ndarray:
    """Return (N, 40): the norms of the gradient of each label's log probability by embedding, rows sum to 1."""
    embedded = to_tensor(model.embedding(reading.tokens).array)
    logits = model.output(model.attend(model.states(embedded))[0])
    (CrossEntropy()(reading.labels, logits) * len(reading.labels)).backward()
    gradient: Any = embedded.grad
    norms = np.linalg.norm(gradient.numpy(), axis=-1)
    return norms / norms.sum(axis=1, keepdims=True)


def character_kind(character: str | None) -> str:
    """Return the name in KINDS for a character; pass None for padding and unknown characters."""
    if character is None:
        return KINDS[6]
    if character == MARK:
        return KINDS[5]
    tests = character.islower(), character.isupper(), character.isdigit(), character.isspace(), True
    return KINDS[tests.index(True)]


def by_kind(reading: Read, gradient: np.ndarray, characters: Mapping[int, str]) -> dict[str, dict[str, float]]:
    """Return by kind its fractions of "places", "attention", "gradient"; if ever last, its mean "where last"."""
    kinds = {number: character_kind(characters.get(number)) for number in np.unique(reading.tokens).tolist()}
    of_tokens = np.vectorize(kinds.get)(reading.tokens)
    table = {}
    for kind in (kind for kind in KINDS if (of_tokens == kind).any()):
        there = of_tokens == kind
        shares = {"places": there.mean(), "attention": reading.weights[there].sum() / len(there)}
        shares["gradient"] = gradient[there].sum() / len(there)
        table[kind] = {name: float(value) for name, value in shares.items()}
        if there[:, -1].any():
            table[kind]["where last"] = float(reading.weights[there[:, -1], -1].mean())
    return table


def by_word(shares: np.ndarray, texts: Sequence[str]) -> dict[str, float]:
    """Return {lower-case word of 3 or more letters: its share, relative to the mean share at its distances}.

    Its due is what characters so far back get in the mean of all windows; a word that comes again is counted as one.

    Args:
        shares: (N, 40), of the windows of all texts.
    """
    due = shares.mean(axis=0)
    got: dict[str, np.ndarray] = {}
    start = 0
    for text in texts:
        for match in re.finditer(r"[^\W\d_]{3,}", text):
            for now in range(match.end() + 1, min(len(text), match.start() + WINDOW) + 1):
                places = np.arange(match.start(), match.end()) + WINDOW - now
                pair = np.array([shares[start + now, places].sum(), due[places].sum()])
                got[match[0].lower()] = got.get(match[0].lower(), 0) + pair
        start += len(text) + 1
    return {word: float(share / due_share) for word, (share, due_share) in got.items()}


def least_on_last(reading: Read, characters: Mapping[int, str], n: int = 6) -> dict[str, tuple[float, str]]:
    """Return {last 16 characters: (weight on the last, character with the most)} of the n lowest weights."""
    rows: dict[str, tuple[float, str]] = {}
    for i in np.argsort(reading.weights[:, -1]):
        texts = [characters.get(token, "") for token in reading.tokens[i].tolist()]
        end = "".join(texts[-16:]).replace(MARK, SHOWN[MARK])
        rows.setdefault(end, (float(reading.weights[i, -1]), texts[reading.weights[i].argmax()]))
        if len(rows) == n:
            break
    return rows


# -------------------------------------------------------------------- pictures and page
def draw_title(path: Path, text: str, shares: Mapping[str, np.ndarray]) -> None:
    """Write a PNG of attention maps (T + 1, 40) of a title, one panel for each name in `shares`."""
    from matplotlib.colors import PowerNorm

    characters = [SHOWN.get(character, character) for character in text]
    columns, rows = [SHOWN[MARK], *characters], [*characters, SHOWN[MARK]]
    with drawing(path, (7 * len(shares), 0.13 * len(rows) + 1.2)) as figure:
        for axes, (title, array) in zip(figure.subplots(1, len(shares), squeeze=False)[0], shares.items()):
            map_ = np.zeros((len(rows), len(columns)))
            for i, row in enumerate(array):
                n = min(i + 1, WINDOW)
                map_[i, i + 1 - n : i + 1] = row[WINDOW - n :]
            image = axes.imshow(map_, norm=PowerNorm(0.5, 0, 1), cmap="gist_heat_r", aspect="auto")
            style = {"fontsize": 7, "family": "monospace"}
            axes.set_xticks(range(len(columns)), columns, **style)
            axes.set_yticks(range(len(rows)), rows, **style)
            axes.set(title=title, xlabel="attended character", ylabel="next character")
        figure.colorbar(image, ax=figure.axes, label="share", aspect=30)


def draw_averages(path: Path, reading: Read, gradient: np.ndarray, bits_visible: Sequence[float], least: float) -> None:
    """Write a PNG of attention, scores and `bits_visible` by distance, with a line at `least` bits."""
    with drawing(path, (12, 3.6)) as figure:
        shares, scores, costs = figure.subplots(1, 3)
        back = np.arange(WINDOW, 0, -1)
        for (label, array), color in zip({"attention": reading.weights, "gradient": gradient}.items(), COLOURS):
            shares.semilogy(back, 100 * array.mean(axis=0), color=color, label=label)
        shares.set(title="attention by distance", ylabel="share, %", ylim=(1e-4, 120))
        shares.yaxis.set_major_formatter("{x:g}")
        low, mean, high = (np.quantile(reading.scores, q, axis=0) for q in (0.05, 0.5, 0.95))
        scores.plot(back, mean, color=COLOURS[0], label="median")
        scores.fill_between(back, low, high, color=COLOURS[0], alpha=0.25, linewidth=0, label="5th to 95th percentile")
        scores.set(title="attention score", ylabel="score before the softmax")
        costs.plot(VISIBLE, bits_visible, color=COLOURS[0], marker="o", label="earlier characters set to zero")
        costs.axhline(least, color=COLOURS[1], linestyle="--", label="attention replaced by the last state")
        costs.set(title="loss with fewer characters", xlabel="visible characters", ylabel="bits per character")
        for axes in (shares, scores):
            axes.set_xlabel("characters back")
            axes.invert_xaxis()
        for axes in (shares, scores, costs):
            axes.grid(alpha=0.25)
            axes.legend(frameon=False, fontsize=8)


def write_weights_page(
    path: Path, model: CharacterModel, reading: Read, gradient: np.ndarray, characters: Mapping[int, str]
) -> None:
    """Write an HTML page of the windows, characters colored by attention and by gradient share."""
    with model.evaluating():
        logits = model(reading.tokens).numpy().astype(np.float64)
    p = np.exp(kernels.log_softmax(logits))
    numbers = sorted({*reading.labels.tolist(), *p.argmax(axis=1).tolist()})
    classes = [SHOWN.get(characters.get(number, "·"), characters.get(number, "·")) for number in numbers]
    items = []
    for row, label, attention, shares, q in zip(reading.tokens.tolist(), reading.labels, reading.weights, gradient, p):
        texts = [characters.get(token, "·") for token in row]
        texts = [{MARK: SHOWN[MARK], " ": "\N{NO-BREAK SPACE}"}.get(text, text) for text in texts]  # else it may vanish
        answer = numbers.index(int(q.argmax()))
        answers = {"attention": Answer(attention, answer, q.max()), "gradient": Answer(shares, answer, q.max())}
        items.append(Item(texts, [""] * WINDOW, [False] * WINDOW, numbers.index(int(label)), answers))
    write_page(path, "Titles: attention weights", NOTE, classes, items)


# -------------------------------------------------------------------- the program
@dataclass(frozen=True)
class Settings:
    """The command-line settings of the inspection."""

    titles: tuple[str, ...] = TITLES + MORE_TITLES  # the first is drawn, the first three are on the page
    path: Path | None = None  # see `textgenrnn.py`
    seed: int = 0  # of the random order
    quick: bool = False  # three titles
    output: Path = Path("runs/pretrained")  # where the plots, the page and textgenrnn.json are written


def measure_and_plot(model: CharacterModel, vocabulary: dict[str, int], settings: Settings) -> dict[str, Any]:
    """Measure attention, gradients and losses, write two PNGs and a page; return results for `tables`."""
    characters = {number: character for character, number in vocabulary.items()}
    texts = {"titles": settings.titles}
    if not settings.quick:
        texts["Zen of Python"] = tuple(filter(None, zen().splitlines()))
    readings = {name: read(model, vocabulary, of) for name, of in texts.items()}
    costs = {
        name: {
            method: bits(model, r.states, w, r.labels)
            for method, w in replacement_weights(r.weights, settings.seed).items()
        }
        for name, r in readings.items()
    }
    titles = readings["titles"]
    gradient = gradient_shares(model, titles)
    bits_visible = bits_by_visible(model, titles)
    first = slice(len(settings.titles[0]) + 1)
    draw_title(
        settings.output / "textgenrnn-title.png",
        settings.titles[0],
        {"attention weights": titles.weights[first], "gradient fractions": gradient[first]},
    )
    path = settings.output / "textgenrnn-averages.png"
    draw_averages(path, titles, gradient, bits_visible, costs["titles"]["the last alone"])
    shown = sum(len(title) + 1 for title in settings.titles[:3])
    part = Read(*(array[:shown] for array in titles))
    write_weights_page(settings.output / "textgenrnn.html", model, part, gradient[:shown], characters)
    return {
        "characters": {name: len(r.labels) for name, r in readings.items()},
        "bits": costs,
        "by distance": {
            name: array.mean(axis=0)[::-1].round(5).tolist()
            for name, array in {"attention": titles.weights, "gradient": gradient}.items()
        },
        "last has the most": float((titles.weights.argmax(axis=1) == WINDOW - 1).mean()),
        "by kind": by_kind(titles, gradient, characters),
        "by word": by_word(gradient, settings.titles),
        "least on the last": least_on_last(titles, characters),
        "visible": dict(zip(map(str, VISIBLE), bits_visible)),
        "windows": other_windows(model, vocabulary, " ".join(settings.titles), (10, 20, 30, 40, 50, 60, 80)),
    }


def check(settings: Settings) -> None:
    """Raise ValueError if the titles have under 100 characters in all, or the first is empty."""
    if sum(map(len, settings.titles)) < 100 or not settings.titles[0]:
        raise ValueError("expected --titles with 100 characters or more")


def study(settings: Settings) -> Outcome:
    """Measure the network, write textgenrnn.json, plots and a page; return (Markdown tables by title, file names)."""
    model, vocabulary = load(settings.path)
    results = measure_and_plot(model, vocabulary, settings)
    save(settings.output / "textgenrnn.json", settings, **results)
    files = ["textgenrnn.json", "textgenrnn-title.png", "textgenrnn-averages.png", "textgenrnn.html"]
    return tables(results), files


def main() -> int:
    """Parse `sys.argv`, run the study and print its tables; return 0, or raise ValueError for invalid settings."""
    return run_study(Settings, study, __doc__, {"titles": TITLES}, check)


def tables(results: dict[str, Any]) -> dict[str, str]:
    """Return Markdown tables by title from the results of `measure_and_plot`."""
    costs, kinds, back = results["bits"], results["by kind"], results["by distance"]
    of_texts = {f"{name}, {results['characters'][name]:,} characters": name for name in costs}
    distances = {str(i + 1): slice(i, i + 1) for i in range(5)} | {"6 to 40": slice(5, None)}
    of_kinds = {"of the places": "places", "of the attention": "attention", "of the gradient": "gradient"}
    of_kinds["weight where it is last"] = "where last"
    words = sorted(results["by word"].items(), key=lambda row: -row[1])
    format_words = lambda some: ", ".join(f"{word} {times:.1f}" for word, times in some)
    least = [[repr(end), f"{weight:.2f}", repr(most)] for end, (weight, most) in results["least on the last"].items()]
    windows = [
        [str(row["size"]), f"{100 * row['weight on the last']:.1f}"]
        + [f"{row[method]:.2f}" for method in ("attention", "the last alone")]
        for row in results["windows"]
    ]
    titles = ["window", "weight on the last, %", "bits with attention", "by the last alone"]
    return {
        "Bits a character by how the states are weighed": (
            grid(list(next(iter(costs.values()))), of_texts, lambda method, name: costs[name][method], 3)
        ),
        f"The last has the largest weight in {100 * results['last has the most']:.1f}% of the windows": (
            grid(back, distances, lambda row, part: sum(row[part]), 1, 100, "characters back, share in %")
        ),
        "Kinds of characters": grid(list(kinds), of_kinds, lambda kind, key: kinds[kind].get(key, []), 1, 100, "%"),
        "Words by the gradient, times what is due so far back": (
            markdown(["", "words"], [["most", format_words(words[:10])], ["least", format_words(words[-10:])]])
        ),
        "Least weight on the last": markdown(["end", "weight", "most on"], least),
        "Windows of other sizes": markdown(titles, windows),
        "Bits by characters seen": grid(["bits"], list(results["visible"]), lambda _, n: results["visible"][n], 2),
    }


if __name__ == "__main__":
    run_main(main)
