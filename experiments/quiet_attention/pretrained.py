"""Run the study on a pretrained model: each variant is trained, measured and stored."""

import itertools
import math
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from experiments.quiet_attention.continued_training import TrainingPlan, Variant, train_variant, use_softmax
from experiments.quiet_attention.int8_simulation import MATRICES, MORE_ROUNDINGS, ROUNDINGS, Rounding, simulate_int8
from experiments.quiet_attention.outliers import attention_maps, measure_outliers, weight_outliers
from experiments.shared.language_models import (
    TEXTS,
    Windows,
    bits_per_byte,
    load_model,
    perplexity,
    text_of,
    token_losses,
    windows,
)
from experiments.shared.results import Record
from tricycle.models import GPT
from tricycle.pretrained import Pretrained
from tricycle_cli import clock
from tricycle_lab.hooks import add_hook

LEARNT_CHARACTERS = 2**20  # of each text, to draw from
SHOWN_TOKENS = 40
FREE = ("seeds",)  # settings that ask for more results, not for other ones
BEGINNINGS = "<|im_start|>", "<|endoftext|>", "\n", " the", ".", " King", "def", " ", "0"


@dataclass(frozen=True)
class Settings:
    """The model, the training of the variants, and the texts."""

    model: str  # as `tricycle.pretrained.load` takes it
    seeds: int  # runs of each trained variant
    steps: int  # updates of each training
    rows: int = 2  # pieces of text an update
    tokens: int = 256  # of each piece
    tested: int = 6  # pieces of each text that perplexity is taken of
    rounded: int = 3  # of these, how many with 8 bits
    inside: int = 2  # of these, how many are looked into
    survey: int = 24  # pieces of each text in which massive tokens are counted, of the model as it is
    output: Path = Path("runs/quiet_attention/model")  # the output folder


def variants_of(settings: Settings, quick: bool) -> list[Variant]:
    """Return the variants to measure: five if `quick`, else all for `settings.seeds`; untrained ones first."""
    made = [Variant("softmax"), Variant("softmax1"), Variant("sink", "sinks")]
    if quick:
        return [*made, Variant("softmax", "lora"), Variant("softmax1", "lora")]
    for seed in range(settings.seeds):
        for method in ("all", "lora"):
            made += [Variant(softmax, method, seed) for softmax in ("softmax1", "softmax")]
        if seed == 0:
            made.append(Variant("sink", "all"))
    made += [Variant("sink", "sinks", seed) for seed in range(1, settings.seeds)]
    return [*made, Variant("sink", "lora"), Variant("sink", "sinks", 0, -5.0)]


def measure(settings: Settings, quick: bool = False) -> Record:
    """Train and measure every variant that has no stored result, saving each; return the Record of all.

    Raises:
        ValueError: the folder holds results of other settings.
    """
    results = Record(settings, FREE, variants={})
    loaded = load_model(settings.model)
    pieces = {
        name: windows(loaded.tokeniser, text_of(name, "test"), settings.tested, settings.tokens) for name in TEXTS
    }
    plan: TrainingPlan | None = None
    if "before" not in results:
        results["before"] = survey_outliers(loaded, settings)
        results.save()
    for variant in variants_of(settings, quick):
        if variant.key in results["variants"]:
            continue
        print(f"=== {variant.key}", flush=True)
        if plan is None:
            texts = [loaded.tokeniser.encode_plain(text_of(name, "train")[:LEARNT_CHARACTERS]) for name in TEXTS]
            ids = [text.astype(np.int64) for text in texts]
            plan = TrainingPlan(ids, settings.steps, settings.rows, settings.tokens)
        loaded = load_model(settings.model)
        started = clock.awake_seconds()
        losses = train_variant(loaded, variant, plan)
        trained = clock.awake_seconds()
        result = measure_model(loaded, pieces, settings, ROUNDINGS if variant.method else ROUNDINGS | MORE_ROUNDINGS)
        seconds = {"teaching": round(trained - started, 1), "looking": round(clock.awake_seconds() - trained, 1)}
        about = {"variant": variant._asdict(), "title": variant.title, "losses": np.round(losses, 4).tolist()}
        results["variants"][variant.key] = {**about, "seconds": seconds, **result}
        results.save()
    if "places" not in results:
        results["places"] = input_effects(load_model(settings.model), pieces, settings)
        results["positions"] = cost_by_position(load_model(settings.model), pieces)
        results.save()
    return results


# -------------------------------------------------------------------- what is measured
def measure_model(
    loaded: Pretrained, pieces: dict[str, Windows], settings: Settings, roundings: dict[str, Rounding]
) -> dict[str, Any]:
    """Return "texts": {text: {rounding: [perplexity, bits per byte]}}, "inside": outliers, and any "sinks".

    Of each text, "all" is without rounding, and "same pieces" is that of the pieces that are also measured with 8 bits.
    """
    model = loaded.model
    result: dict[str, Any] = {"texts": {}}
    for name, some in pieces.items():
        losses = token_losses(model, some.ids, n_rows=1)
        few = Windows(some.ids[: settings.rounded], some.n_bytes[: settings.rounded])
        found: dict[str, Any] = {"all": perplexity_and_bits(losses, some.n_bytes)}
        found["same pieces"] = perplexity_and_bits(losses[: settings.rounded], few.n_bytes)
        for way_name, rounding in roundings.items():
            with simulate_int8(model, rounding):
                found[way_name] = perplexity_and_bits(token_losses(model, few.ids, n_rows=1), few.n_bytes)
        result["texts"][name] = found
    rows = np.concatenate([some.ids[: settings.inside, :-1] for some in pieces.values()])
    result["inside"] = measure_outliers(model, rows).as_dict()
    sinks = [p.numpy().round(3).tolist() for name, p in model.named_parameters() if name.endswith("softmax_scales")]
    return result | ({"sinks": sinks} if sinks else {})


def input_effects(loaded: Pretrained, pieces: dict[str, Windows], settings: Settings) -> dict[str, list[float]]:
    """Return {matrix: [perplexity ratio if its input is rounded, largest input, ratio to the median, layer]}."""
    found = {}
    for name in MATRICES:
        logs = []
        for some in pieces.values():
            ids = some.ids[: settings.rounded]
            with simulate_int8(loaded.model, Rounding("", "tensor", only=name)):
                rounded = token_losses(loaded.model, ids, n_rows=1)
            logs.append(rounded.mean() - token_losses(loaded.model, ids, n_rows=1).mean())
        largest = largest_inputs(loaded.model, next(iter(pieces.values())).ids[0, :-1], name)
        found[name] = [round(math.exp(np.mean(logs)), 4), round(largest[0], 1), round(largest[1], 1), largest[2]]
    return found


def cost_by_position(loaded: Pretrained, pieces: dict[str, Windows]) -> list[list[float]]:
    """Return [first, last, nats that untrained softmax1 adds] by token range; the model keeps softmax1."""
    ids = np.concatenate([some.ids for some in pieces.values()])
    plain = token_losses(loaded.model, ids, n_rows=1)
    use_softmax(loaded.model, Variant("softmax1"))
    more = token_losses(loaded.model, ids, n_rows=1) - plain
    ends = [0, 1, 16, 64, 128, *range(256, ids.shape[1] + 128, 128)]
    bounds = [(a, min(b, more.shape[1])) for a, b in itertools.pairwise(ends) if a < more.shape[1]]
    return [[a + 1, b, round(float(more[:, a:b].mean()), 4)] for a, b in bounds]


def largest_inputs(model: GPT, row: np.ndarray, name: str) -> tuple[float, float, int]:
    """Return (largest input of matrix `name`, ratio to the median token's, layer) where the ratio is highest."""
    found: list[tuple[float, float, int]] = []

    def listen(layer: Any, out: Any, x: Any, *others: Any) -> None:
        sizes = abs(x.array[0]).max(axis=-1)
        found.append((float(sizes.max()), float(sizes.max() / np.median(sizes)), len(found)))

    with ExitStack() as undo, model.evaluating():
        for block in model.blocks:
            undo.callback(add_hook(dict(block.named_layers())[name], "observers", listen))
        model.hidden_states(model.place(row[None]))
    return max(found, key=lambda one: one[1])


def perplexity_and_bits(losses: np.ndarray, n_bytes: np.ndarray) -> list[float]:
    """Return [perplexity per token, bits per byte] of losses in nats, rounded to 4 and 5 decimals."""
    return [round(perplexity(losses), 4), round(bits_per_byte(losses, n_bytes), 5)]


def survey_outliers(loaded: Pretrained, settings: Settings) -> dict[str, Any]:
    """Return "weights", "texts" and "beginnings": weight outliers, massive tokens, effects of first tokens.

    Returns:
        "weights"; by text "first_is_massive", the share of pieces whose first token is, "first_share", the weight that
        goes to the first token, and "others": other massive tokens with their place; and "beginnings": the largest
        value at the first token for some tokens in its place, before the same piece of text.
    """
    result: dict[str, Any] = {"weights": weight_outliers(loaded.model), "texts": {}}
    for name in TEXTS:
        ids = windows(loaded.tokeniser, text_of(name, "test"), settings.survey, settings.tokens).ids[:, :-1]
        inside = measure_outliers(loaded.model, ids)
        firsts = [number for number, place, _ in inside.tokens if place == 0]
        others = [(place, loaded.tokeniser.decode([token])) for _, place, token in inside.tokens if place]
        result["texts"][name] = {
            "first_is_massive": len(firsts) / len(ids),
            "first_share": np.round(inside.first, 4).tolist(),
            "massive_share": np.round(inside.massive, 4).tolist(),
            "others": others,
        }
    result["beginnings"] = first_token_effects(loaded, settings)
    return result


def first_token_effects(loaded: Pretrained, settings: Settings) -> dict[str, list[float]]:
    """Return {first token: [largest stream value there, mean attention weight on it]} for BEGINNINGS."""
    text = windows(loaded.tokeniser, text_of("shakespeare", "test"), 1, settings.tokens - 1).ids[0]
    found = {}
    for token in BEGINNINGS:
        ids = loaded.tokeniser.encode(token, add_special_tokens=False)[:1]
        inside = measure_outliers(loaded.model, np.array([[*ids, *text[:-1]]]))
        found[token] = [round(float(inside.largest_first.max()), 1), round(float(inside.first.mean()), 4)]
    return found


def maps(settings: Settings, layers: list[int]) -> tuple[list[str], dict[str, dict[str, np.ndarray]]]:
    """Return the tokens of a short text, and {softmax or softmax1: {"layer i": attention weights (H, T, T)}}."""
    loaded = load_model(settings.model)
    row = windows(loaded.tokeniser, text_of("shakespeare", "test"), 3, SHOWN_TOKENS - 1).ids[1]
    found = {}
    for softmax in ("softmax", "softmax1"):
        use_softmax(loaded.model, Variant(softmax))
        found[softmax] = attention_maps(loaded.model, row, layers)
    return [loaded.tokeniser.decode([int(token)]) for token in row], found
