"""Tables in Markdown, plots and a page of the sentiment study."""

from experiments.sentiment.study import Settings, gaps
from experiments.shared.classification import MODELS, Outcome, Problem, model_cells
from experiments.shared.figures import plot_folds, plot_training
from experiments.shared.pooling_weights import evenly_spaced, new_items, plot_texts, write_page
from experiments.shared.results import Runs, distinct, of, select
from experiments.shared.tables import cell, grid, markdown

KIM = "CNN of Kim 2014, own vectors", 76.1  # his table 2, CNN-rand on MR: ten-fold, no pretrained vectors
NOTE = (
    "Sentences from film reviews, each read by models that did not learn from it. Recurrent, Transformer: the weights "
    "of the attention pooling; what is weighed are vectors that know of the words around. Convolution: the share of "
    "filters whose largest value comes from the three to five words around this one. As many sentences as there are, "
    "up to a third each, were drawn from those that all models have right, where they differ, that all have wrong."
)


# -------------------------------------------------------------------- tables
def main_table(runs: Runs) -> str:
    """Return a Markdown table of accuracies in %, mean ± SD over folds, a row per model, Kim's CNN last."""
    by_name = {name: select(runs, model=name) for name in distinct(runs)}
    rows = [
        [name, *model_cells(model_runs), cell(of(model_runs, "test"), 1, 100)] for name, model_runs in by_name.items()
    ]
    rows.append([KIM[0], "", "", "", f"{KIM[1]}"])
    return markdown(["", "parameters", "seconds", "validation, %", "test, %"], rows)


def masking_table(runs: Runs) -> str:
    """Return a Markdown table of the % of answers that change if one word is masked, by model and weight."""
    kinds = {"largest weight": "most", "random": "random", "smallest weight": "least"}
    names = [name for name in distinct(runs) if name in MODELS]
    return grid(names, kinds, lambda name, kind: of(select(runs, model=name), kind), 1, 100)


def top_words_table(words: dict[str, list[tuple[str, float, int]]], n: int = 12) -> str:
    """Return a Markdown table of the first n entries of each model's `top_weighted_tokens`, a column per model."""
    rows = []
    for i in range(min(n, min(map(len, words.values())))):
        rows.append([f"{i + 1}", *(f"`{word}` {share:.1f}" for word, share, _ in (own[i] for own in words.values()))])
    return markdown(["", *words], rows)


def tables(runs: Runs, words: dict[str, list[tuple[str, float, int]]]) -> dict[str, str]:
    """Return all Markdown tables by title; `words` is `top_weighted_tokens` by model."""
    return {
        "Accuracy": main_table(runs),
        "Answers that change when one word is masked, %": masking_table(runs),
        "Words with the largest weights, relative to uniform weights": top_words_table(words),
    }


# -------------------------------------------------------------------- pictures
def draw(texts: list[str], problem: Problem, outcome: Outcome, runs: Runs, settings: Settings) -> list[str]:
    """Write three plots and a page into `settings.output`; return the four file names."""
    folder = settings.output
    shown = new_items(problem, outcome, lambda number: gaps(texts[number]), settings.shown, settings.seed)
    values = {name: [100 * right for right in of(select(runs, model=name), "test")] for name in distinct(runs)}
    title = f"Film reviews, folds: {len(next(iter(values.values())))}"
    plot_folds(values, folder / "accuracy.png", "accuracy on the test fold, %", title, KIM)
    plot_training(runs, folder / "training.png")
    plot_texts(folder / "words.png", problem.classes, evenly_spaced(shown, 4))
    write_page(
        folder / "pooling_weights.html", "Film reviews: attention weights of the models", NOTE, problem.classes, shown
    )
    return ["accuracy.png", "training.png", "words.png", "pooling_weights.html"]
