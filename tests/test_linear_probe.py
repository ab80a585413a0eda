"""Linear probes find a planted direction in activations, and nothing in random labels."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import numpy as np
import pytest
from programs import good, run_here
from tables import bad_input
from test_models import TINY, lively
from tiny_models import write_folder

from tricycle.models import GPT
from tricycle.tensor import no_grad
from tricycle_cli.inspect import main
from tricycle_cli.probe import site_curves
from tricycle_lab.linear_probe import collect_activations, probe_accuracy, read_labeled_texts
from tricycle_lab.probe import Probe

pytest.importorskip("sklearn")
TEXTS = [[1, 2, 3], [4, 5], [6, 7, 8, 9]]


def test_activations_are_those_of_the_last_token() -> None:
    model = lively(TINY).eval()
    found = collect_activations(model, TEXTS, "position_*", "blocks.*.mlp", "blocks.1", "norm")
    assert list(found) == ["position_embedding", "blocks.0.mlp", "blocks.1", "blocks.1.mlp", "norm"]
    for i, tokens in enumerate(TEXTS):
        with Probe(model, *found) as probe, no_grad():
            model(np.array([tokens]))
        for name, rows in found.items():
            # Without Numba, sums of a batch have other last digits.
            np.testing.assert_allclose(rows[i], probe.activations[name].reshape(-1, 8)[-1], rtol=1e-5, atol=1e-6)
    assert list(collect_activations(model, TEXTS)) == ["blocks.0", "blocks.1"]


def test_planted_directions_are_found_and_random_labels_are_not() -> None:
    generator = np.random.default_rng(0)
    x = generator.normal(0, 1, (120, 8))
    x[:, 3] *= 50
    labels = ["yes" if value > 0 else "no" for value in x @ np.array([1, -1, 0, 0, 2, 0, 0, 0])]
    assert probe_accuracy(x, labels) > 0.9
    assert abs(probe_accuracy(x, generator.permutation(labels)) - 0.5) < 0.15
    assert probe_accuracy(x, labels) == probe_accuracy(x, labels)


def damaged() -> GPT:
    """Return a model with a NaN in its second block."""
    model = lively(TINY)
    model.blocks[1].mlp.up.weights.array[0, 0] = np.nan
    return model


def read(content: str | bytes) -> list[tuple[str, str]]:
    """Write a file of labeled texts and read it."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "labels.tsv"
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return read_labeled_texts(path)


def test_files_with_a_byte_order_mark_and_line_separators_in_texts() -> None:
    assert read("\ufeffa\tone\u2028two\r\nb\tthree\x0c\n") == [("a", "one\u2028two"), ("b", "three\x0c")]


def test_curves_have_a_point_per_layer() -> None:
    found = site_curves({"blocks.0.mlp": 0.5, "blocks.2": 0.9, "blocks.2.mlp": 0.75, "norm": 1.0}, 2)
    assert found == {"blocks.*.mlp": ([0, 2], [0.5, 0.75]), "blocks.*": ([2], [0.9]), "norm": ([0, 2], [1.0, 1.0])}


X = np.zeros((6, 2))
test_invalid_arguments = bad_input(
    {
        "labels": (lambda: probe_accuracy(X, list("ab")), "expected 6 labels.*got 2"),
        "one label": (lambda: probe_accuracy(X, list("aaaaaa")), "two of them different"),
        "few": (lambda: probe_accuracy(X, list("aaaabb"), 3), r"each of 3 texts or more, got 6 with counts \[4, 2\]"),
        "no texts": (lambda: collect_activations(GPT(TINY), []), "at least one text"),
        "layer": (lambda: collect_activations(GPT(TINY), TEXTS, "nothing"), r"nothing.*the layers .*blocks\.\*\.mlp,"),
        "NaN weights": (lambda: collect_activations(damaged(), TEXTS), "expected finite activations.* from blocks.1"),
        "file without a text": (lambda: read("a\tb\n\n \tb"), "a tab and a text in each line, got another line 3"),
        "empty file": (lambda: read("\n"), "got no line"),
        "other encoding": (lambda: read(b"a\tb\xff"), "expected UTF-8 text, got another encoding at byte 3"),
    }
)


def test_command_separates_texts_by_their_last_word(tmp_path) -> None:
    pytest.importorskip("jinja2")
    folder = write_folder(tmp_path / "a")
    words = ["quick", "brown", "lazy", "seven", "small"]
    lines = [f"{last}\tthe {first} {last}" for first in words for last in ("fox", "dogs")]
    (tmp_path / "labels.tsv").write_text("\n".join(lines))
    out = good(run_here(main, "tricycle inspect", ("probe", folder, "labels.tsv", "--out", "a.png"), tmp_path))
    assert "most frequent label has 0.5000" in out
    assert re.findall(r"^ +([\d.]+)  (\S+)$", out, re.MULTILINE) == [("1.0000", "blocks.0"), ("1.0000", "blocks.1")]
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "labels.tsv").write_text("no tab\n")
    done = run_here(main, "tricycle inspect", ("probe", folder, "labels.tsv"), tmp_path)
    assert done.returncode == 1 and "a label, a tab and a text" in done.stderr
