"""Translate image captions (Multi30k) from English to German or French, with and without attention.

    python -m experiments.translation --minutes 25                       all four models, English to German
    python -m experiments.translation --model transformer --target fr    one model, English to French
    python -m experiments.translation --quick                            all four in under three minutes
    python -m experiments.translation --translate "A man rides a horse." with a model that was trained before
    python -m experiments.translation --look "A man rides a horse."      the same model, looked into in a browser
    python -m experiments.translation --report                           tables and pictures of all runs in --output

A run leaves <model>-<target>-<seed>.json and .safetensors in --output. While it lasts the latter is written every three
minutes, and --resume goes on from there.
"""

import dataclasses
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.shared.program import check_choices, check_minimum, flag, print_tables
from experiments.shared.results import about, rounded, write_json
from experiments.translation import report
from experiments.translation.alignment import SHOWN, translate_with_attention
from experiments.translation.study import (
    CONTEXT_WINDOW,
    RECIPES,
    Pairs,
    Recipe,
    Training,
    TrainingSettings,
    bleu,
    bleu_metric,
    mean_loss,
    translate,
)
from tricycle.sequences.translators import Vocabulary, load_translator
from tricycle_cli.flags import parse, run_main
from tricycle_cli.look import show
from tricycle_datasets.multi30k import LANGUAGES, load_multi30k
from tricycle_lab.look.inspectable import load_inspectable_translator

QUICK: dict[str, Any] = {"minutes": 0.4, "measurements": 2, "measured": 50, "tested": 100}
NOT_OF_A_RUN = ("output", "translate", "look", "out")  # settings
RANGES = ((1, 8), (9, 10), (11, 12), (13, 15), (16, 19), (20, 99))  # words of a source


@dataclass(frozen=True)
class Settings(TrainingSettings):
    """The command-line settings of the study; other settings are in RECIPES, for each model."""

    model: str = "all"  # fixed, bahdanau, luong, transformer or all
    target: str = "de"  # translate English to de (German) or fr (French)
    processor_time: bool = False  # count minutes of CPU time, for a busy machine
    width: int | None = None  # channels of embeddings and states
    layers: int | None = None  # of the encoder and of the decoder each
    learning_rate: float | None = None  # the highest
    dropout: float | None = None  # probability of dropping an element
    max_tokens: int | None = None  # of a batch, both sides and padding included
    vocab_size: int = 3000  # byte-pair tokens of both languages together
    tested: int = 0  # test sentences; 0 for all
    beam: int = 5  # the beam size
    length_penalty: float = 1.0  # finished translations are compared by log probability / length to this power
    quick: bool = False  # less than half a minute of training for each model, and less test data
    resume: bool = False  # resume an interrupted run
    translate: str = ""  # a sentence to translate with a trained model (the Transformer unless --model names another)
    look: str = ""
    """a sentence to inspect in the browser with that model; an optional part behind => is its translation"""
    out: Path | None = None  # write what --look shows as one HTML file
    report: bool = False  # only write tables and plots of the runs in --output
    output: Path = Path("runs/translation")  # the output folder


def main() -> int:
    """Train and report, or translate or show a sentence, by the flags of `sys.argv`, and return 0."""
    default = Settings(**(QUICK if "--quick" in sys.argv[1:] else {}))
    settings = parse(Settings, default, description=__doc__ or "")
    check(settings)
    if settings.translate or settings.look:
        name = "transformer" if settings.model == "all" else settings.model
        path = path_of(settings, name, "safetensors")
        if settings.look:
            show([load_inspectable_translator(path)], settings.look, settings.out)
            return 0
        model, vocabulary, _ = load_translator(path)
        how = settings.beam, settings.length_penalty
        print(*translate(model, vocabulary, [settings.translate], *how, progress=False))
        return 0
    if not settings.report:
        bleu_metric()  # a missing package should be missed before the training
        data = load_data(settings)
        for name in RECIPES if settings.model == "all" else [settings.model]:
            run(settings, name, *data)
    runs = report.load_runs(settings.output)
    print_tables(report.tables(runs))
    print(f"\n{', '.join(report.draw(runs, settings.output))} are in {settings.output}")
    return 0


def check(settings: Settings) -> None:
    """Raise ValueError for the first setting that is unknown or out of range."""
    check_choices(settings, model=("all", *RECIPES), target=[language for language in LANGUAGES if language != "en"])
    if settings.steps == 0 and not 0 < settings.minutes < float("inf"):
        raise ValueError(f"expected --minutes to be above 0, got {settings.minutes}")
    for name in ("warmup", "average", "dropout", "label_smoothing"):
        value = getattr(settings, name)
        if value is not None and not 0 <= value < 1:
            raise ValueError(f"expected {flag(name)} from 0 to below 1, got {value}")
    for name in ("width", "layers", "learning_rate", "max_tokens"):
        value = getattr(settings, name)
        if value is not None and not 0 < value < float("inf"):
            raise ValueError(f"expected {flag(name)} to be above 0, got {value}")
    check_minimum(settings, steps=0, vocab_size=260, measurements=0, measured=1, tested=0, beam=1, seed=0)


def path_of(settings: Settings, name: str, ending: str) -> Path:
    """Return the path name-target-seed.ending in the output folder; `ending` has no dot."""
    return settings.output / f"{name}-{settings.target}-{settings.seed}.{ending}"


def recipe_of(settings: Settings, name: str) -> Recipe:
    """Return a copy of RECIPES[name] with those values of the command line that are not None."""
    changes = {name: getattr(settings, name) for name in ("width", "learning_rate", "dropout", "max_tokens")}
    changes["n_layers"] = settings.layers
    return dataclasses.replace(RECIPES[name], **{key: value for key, value in changes.items() if value is not None})


def load_data(settings: Settings) -> tuple[Pairs, Pairs, list[tuple[str, str]]]:
    """Return the training and the validation Pairs, with a new vocabulary, and test (source, reference) texts."""
    train, held_out, test = (
        [load_multi30k(split, language) for language in ("en", settings.target)]
        for split in ("train", "val", report.TEST)
    )
    vocabulary = Vocabulary.train(train[0] + train[1], settings.vocab_size, progress=False)
    pairs, validation = (
        Pairs(vocabulary, train[0], train[1], CONTEXT_WINDOW),
        Pairs(vocabulary, held_out[0], held_out[1]),
    )
    return pairs, validation, list(zip(*test))[: settings.tested or None]


def run(settings: Settings, name: str, pairs: Pairs, held_out: Pairs, test: list[tuple[str, str]]) -> None:
    """Train one model (resuming if `settings.resume`), measure it, and write its .safetensors and .json."""
    plan = TrainingSettings(
        **{field.name: getattr(settings, field.name) for field in dataclasses.fields(TrainingSettings)}
    )
    plan = dataclasses.replace(plan, minutes=0.0) if settings.steps else plan
    clock = time.process_time if settings.processor_time else time.perf_counter
    training = Training(name, recipe_of(settings, name), plan, pairs, held_out, clock)
    saved = path_of(settings, name, "safetensors")
    if settings.resume:
        training.load(saved)
    training.run(keep=lambda: training.save(saved))
    started = time.perf_counter()
    sources, references = map(list, zip(*test))
    with training.averaged_weights() as model:
        texts = held_out.texts[: settings.tested or None]
        translations = translate(model, pairs.vocabulary, [source for source, _ in texts])
        validation = {
            "loss": mean_loss(model, held_out),
            "greedy": bleu(translations, [target for _, target in texts])[0],
        }
        greedy = translate(model, pairs.vocabulary, sources)
        beam = translate(model, pairs.vocabulary, sources, settings.beam, settings.length_penalty)
        shown = [held_out.texts[i][0] for i in SHOWN if i < len(held_out)]
        alignments = [translate_with_attention(model, pairs.vocabulary, sentence, settings.beam) for sentence in shown]
    score, signature = bleu(beam, references)
    result: dict[str, Any] = {
        "settings": {key: value for key, value in vars(settings).items() if key not in NOT_OF_A_RUN},
        "recipe": vars(training.recipe),
        **about(),
        "vocabulary": len(pairs.vocabulary),
        "parameters": training.model.n_parameters,
        "steps": training.step,
        "passes": round(training.step / len(training.buckets.batches(0)), 2),
        "seconds": round(training.seconds, 1),
        "seconds_of_evaluation": round(time.perf_counter() - started, 1),
        "curve": training.curve,
        "validation": validation,
        "test": {"greedy": bleu(greedy, references)[0], "beam": score, "signature": signature},
        "by_length": by_length(sources, references, beam),
        "examples": [
            {"source": sources[i], "reference": references[i], "translation": beam[i]}
            for i in np.linspace(0, len(test) - 1, min(8, len(test))).astype(int)
        ],
        "alignments": alignments,
    }
    write_json(path_of(settings, name, "json"), rounded(result))
    scores = f"{result['test']['greedy']:.1f} greedy, {score:.1f} with a beam of {settings.beam}"
    print(f"{name}: BLEU {scores}; {signature}")


def by_length(sources: list[str], references: list[str], translations: list[str]) -> list[dict[str, Any]]:
    """Return "words" (a range), "sentences", "mean_words" and "bleu" (0 to 100) of each range that has sentences."""
    words = np.array([len(source.split()) for source in sources])
    parts = []
    for low, high in RANGES:
        chosen = np.flatnonzero((low <= words) & (words <= high))
        if len(chosen):
            score, _ = bleu([translations[i] for i in chosen], [references[i] for i in chosen])
            title = f"{low} to {high}" if high != RANGES[-1][1] else f"{low} and more"
            mean = float(words[chosen].mean())
            parts.append({"words": title, "sentences": len(chosen), "mean_words": mean, "bleu": score})
    return parts


if __name__ == "__main__":
    run_main(main)
