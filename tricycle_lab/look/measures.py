"""The measures that the model viewer offers for a decoder, and their tables as JSON data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np

from tricycle.models import GPT
from tricycle_lab.attribution import attribute_logit, check_decoder
from tricycle_lab.circuits import TASKS
from tricycle_lab.look.inspectable import InspectableModel, InspectableStack
from tricycle_lab.look.trace import Trace, round_significant
from tricycle_lab.measures import (
    Table,
    attribution_tables,
    circuit_tables,
    estimate_tables,
    feature_tables,
    lens_tables,
    patch_tables,
    path_tables,
    probe_tables,
    score_tables,
)
from tricycle_lab.patching import Prompts
from tricycle_lab.sparse_autoencoder import SparseAutoencoder

MAX_PATCHED_TOKENS = 128  # of a prompt; longer ones take minutes for each layer
ANSWERS = ("answer", "otherAnswer")
PROMPTS = ("corruptedPrompt", *ANSWERS)


@dataclass(frozen=True)
class Inputs:
    """What a measure is computed for.

    Attributes:
        trace: the text, and the run with the interventions of the page.
        position: of the selected token.
        texts: the texts of the measure's inputs, by name.
    """

    trace: Trace
    position: int
    texts: Mapping[str, str]


Compute = Callable[[InspectableStack, Inputs], Iterator[Table]]


class Measure(NamedTuple):
    """A measure: its title on the page, a function that yields its tables, the names of text inputs, and a condition.

    Attributes:
        title: on the page.
        compute: yields the tables, with repeated titles for more complete ones.
        inputs: the names of its text inputs.
        needs: the attribute of `InspectableStack` that must not be None.
    """

    title: str
    compute: Compute
    inputs: tuple[str, ...] = ()
    needs: str = "model"


def _attribute(inspectable: InspectableStack, inputs: Inputs) -> Iterator[Table]:
    """Yield direct logit attribution after the selected token; the second answer may be empty."""
    first, other = (inputs.texts[name] for name in ANSWERS)
    answers = inspectable.encode_answer(first), inspectable.encode_answer(other) if other else None
    result = attribute_logit(inspectable.model, inputs.trace.ids, *answers, inputs.position)
    yield from attribution_tables(result)


def _prompts(inspectable: InspectableStack, inputs: Inputs) -> Prompts:
    """Return Prompts: token ids of the page's text, the corrupted prompt and both answers; ValueError if too long."""
    clean, corrupted = inputs.trace.ids, inspectable.encode_input(inputs.texts["corruptedPrompt"])
    if len(clean) > MAX_PATCHED_TOKENS:
        raise ValueError(f"expected a prompt of at most {MAX_PATCHED_TOKENS} tokens to patch, got {len(clean)}")
    first, second = (inspectable.encode_answer(inputs.texts[name]) for name in ANSWERS)
    return Prompts(clean, corrupted, (first, second))


def _patch(*kinds: str) -> Compute:
    """Return a function that yields the effects of patching activations of some kinds."""
    return lambda inspectable, inputs: patch_tables(inspectable, _prompts(inspectable, inputs), kinds)


def _circuit(task: str) -> Compute:
    """Return a function that yields the effects of heads on a task, and the faithfulness of the strongest."""
    return lambda inspectable, _: circuit_tables(inspectable, task)


def _lens(inspectable: InspectableStack, inputs: Inputs, is_tuned: bool) -> Iterator[Table]:
    """Yield the logit lens or the tuned lens at all positions."""
    streams = list(inputs.trace.stream.values())[1:]
    return lens_tables(inspectable, streams, inputs.trace.texts, inspectable.lens if is_tuned else None)


def _probes(inspectable: InspectableStack, inputs: Inputs) -> Iterator[Table]:
    """Yield the accuracy of linear probes, and their probabilities at all positions; only with labeled texts."""
    streams = list(inputs.trace.stream.values())[1:]
    return probe_tables(inspectable, inspectable.labeled or [], streams, inputs.trace.texts)


def _features(inspectable: InspectableStack, inputs: Inputs) -> Iterator[Table]:
    """Yield the features that are strongest at the selected token; only for a model with an autoencoder."""
    autoencoder, layer = cast("tuple[SparseAutoencoder, int]", inspectable.autoencoder)
    stream = inputs.trace.stream[inspectable.block_names[layer]]
    return feature_tables(autoencoder, stream, inputs.trace.texts, inputs.position)


MEASURES: dict[str, Measure] = {
    "scores": Measure("head scores on repeated random tokens", lambda inspectable, _: score_tables(inspectable)),
    "attribution": Measure("direct logit attribution at the selected token", _attribute, ANSWERS),
    "patching": Measure("activation patching", _patch("stream", "attention", "mlp", "heads"), PROMPTS),
    "patching_by_position": Measure("activation patching of heads by position", _patch("heads_by_position"), PROMPTS),
    "estimate": Measure(
        "attribution patching (estimate by gradients)",
        lambda inspectable, inputs: estimate_tables(inspectable, _prompts(inspectable, inputs)),
        PROMPTS,
    ),
    "paths": Measure(
        "path patching from heads to the logits",
        lambda inspectable, inputs: path_tables(inspectable, _prompts(inspectable, inputs)),
        PROMPTS,
    ),
    **{f"circuit_{task}": Measure(f"circuit of a task: {task}", _circuit(task)) for task in TASKS},
    "logit_lens": Measure("logit lens", lambda inspectable, inputs: _lens(inspectable, inputs, False)),
    "tuned_lens": Measure("tuned lens", lambda inspectable, inputs: _lens(inspectable, inputs, True), needs="lens"),
    "probes": Measure("linear probes", _probes, needs="labeled"),
    "features": Measure("features at the selected token", _features, needs="autoencoder"),
}


def find_measures(inspectable: InspectableModel) -> dict[str, Measure]:
    """Return the measures that a model supports, by name; none unless it is a decoder."""
    if not isinstance(inspectable, InspectableStack) or not isinstance(inspectable.model, GPT):
        return {}
    try:
        check_decoder("find_measures", inspectable.model)
    except ValueError:  # layers other than multi-head attention, such as Mamba
        return {"logit_lens": MEASURES["logit_lens"]}
    return {name: one for name, one in MEASURES.items() if getattr(inspectable, one.needs) is not None}


def describe_measures(inspectable: InspectableModel) -> list[dict[str, Any]]:
    """Return JSON data of the measures that a model supports: name, title and inputs."""
    found = find_measures(inspectable)
    return [{"name": name, "title": one.title, "inputs": one.inputs} for name, one in found.items()]


def start_measure(inspectable: InspectableModel, trace: Trace, fields: Mapping[str, Any]) -> Iterator[Table]:
    """Return an iterator over the tables of the measure that `fields` name, computed lazily; ValueError if invalid.

    Args:
        inspectable: the model.
        trace: the run of the text on the page.
        fields: "name", "position" and the texts of the inputs.

    Raises:
        ValueError: a measure that the model does not support, or invalid fields.
    """
    measures = find_measures(inspectable)
    if not isinstance(inspectable, InspectableStack) or fields.get("name") not in [*measures]:
        raise ValueError(f"expected a measure, one of {', '.join(measures) or 'none for this model'}")
    position = fields.get("position")
    if type(position) is not int or not 0 <= position < len(trace.ids):
        raise ValueError(f"expected a position from 0 to {len(trace.ids) - 1}")
    measure = measures[fields["name"]]
    texts = {name: text for name in measure.inputs if isinstance(text := fields.get(name), str)}
    if len(texts) < len(measure.inputs):
        raise ValueError(f"expected texts for {', '.join(measure.inputs)}")
    return measure.compute(inspectable, Inputs(trace, position, texts))


def table_data(table: Table) -> dict[str, Any]:
    """Return a table as JSON data: values to 4 digits, None if not finite; a row per (layer, head) of 3-D values."""
    values = table.values.reshape(-1, table.values.shape[-1])
    rows = table.rows
    if table.values.ndim == 3:
        rows = [f"{layer}, head {head}" for layer, head in np.ndindex(*table.values.shape[:2])]
    return {
        "title": table.title,
        "values": [[round_significant(float(value)) for value in row] for row in values],
        "rows": [str(i) for i in range(len(values))] if rows is None else rows,
        "columns": table.columns,
        "rowName": table.row_name,
        "columnName": table.column_name,
        "texts": table.texts,
    }
