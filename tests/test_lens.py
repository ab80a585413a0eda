"""The tuned lens predicts the model better than the logit lens in each layer, and is saved and loaded."""

from __future__ import annotations

import numpy as np
import pytest
from programs import good, run_here
from tables import bad_input
from test_models import GEMMA, TINY, lively
from tiny_models import TEXT, write_folder

from tricycle.models import GPT
from tricycle.tensor import no_grad
from tricycle_cli.inspect import main
from tricycle_lab.lens import TunedLens, evaluate_lens, fit_lens, lens_log_probabilities
from tricycle_lab.recorded_run import record_run

TEXTS = np.random.default_rng(1).integers(0, 11, (60, 10)).tolist()


def test_logit_lens_of_the_last_layer_is_the_model() -> None:
    model = lively(GEMMA).eval()
    with no_grad():
        logits = model(np.array(TEXTS[:1])).array[0].astype(np.float64)
    expected = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    stream = record_run(model, TEXTS[0]).stream
    np.testing.assert_allclose(lens_log_probabilities(model, stream[-1][0], 1), expected, atol=1e-4)
    scores = evaluate_lens(model, TEXTS[:3])
    assert scores.kl[-1] == pytest.approx(0, abs=1e-5) and scores.kl[0] > 0.01
    losses = []
    for text in TEXTS[:3]:
        with no_grad():
            logits = model(np.array([text])).array[0, :-1].astype(np.float64)
        losses.append((np.log(np.exp(logits).sum(axis=-1)) - logits[np.arange(9), text[1:]]).mean())
    assert scores.cross_entropy[-1] == pytest.approx(np.mean(losses), rel=1e-5)
    with pytest.raises(ValueError, match="two tokens"):
        evaluate_lens(model, [[1]])


def test_tuned_lens_is_better_on_other_texts() -> None:
    model = lively(GEMMA).eval()
    lens = fit_lens(model, TEXTS[:50])
    plain, tuned = evaluate_lens(model, TEXTS[50:]), evaluate_lens(model, TEXTS[50:], lens)
    assert (tuned.kl[:-1] < 0.9 * plain.kl[:-1]).all()
    np.testing.assert_array_equal(tuned.kl[-1], plain.kl[-1])


def test_affine_relation_is_found_and_a_high_penalty_gives_the_logit_lens(monkeypatch) -> None:
    model = lively(TINY).eval()
    generator = np.random.default_rng(0)
    matrix, bias = generator.normal(0, 1, (8, 8)), generator.normal(0, 1, 8)
    x = generator.normal(0, 1, (200, 8))
    monkeypatch.setattr("tricycle_lab.lens._streams", lambda *args: [[x, x @ matrix + bias]])
    lens = fit_lens(model, TEXTS, ridge=1e-6)
    np.testing.assert_allclose(lens.matrices[0], matrix, atol=1e-3)
    np.testing.assert_allclose(lens.biases[0], bias, atol=1e-3)
    np.testing.assert_allclose(lens.translate(0, x), x @ matrix + bias, atol=1e-2)
    np.testing.assert_allclose(fit_lens(model, TEXTS, ridge=1e9).matrices[0], np.eye(8), atol=1e-3)


def test_lens_comes_back_and_wrong_files_are_rejected(tmp_path) -> None:
    model = lively(TINY).eval()
    lens = fit_lens(model, TEXTS[:5])
    lens.save(tmp_path / "lens.safetensors")
    for array, loaded in zip(lens, TunedLens.load(tmp_path / "lens.safetensors", model)):
        np.testing.assert_array_equal(loaded, array)
    with pytest.raises(ValueError, match=r"expected tensors .*\(1, 12, 12\).*got .*\(1, 8, 8\)"):
        TunedLens.load(tmp_path / "lens.safetensors", lively(GEMMA))
    lens._replace(biases=lens.biases * np.nan).save(tmp_path / "nan.safetensors")
    with pytest.raises(ValueError, match="finite"):
        TunedLens.load(tmp_path / "nan.safetensors", model)


MODEL = GPT(TINY)
test_invalid_arguments = bad_input(
    {
        "no texts": (lambda: fit_lens(MODEL, []), "at least one text"),
        "id": (lambda: fit_lens(MODEL, [[11]]), "ids from 0 to 10"),
        "ridge": (lambda: fit_lens(MODEL, TEXTS, ridge=0), "ridge above 0"),
        "no model": (lambda: evaluate_lens(None, TEXTS), "decoder.*NoneType"),
    }
)


def test_command_prints_draws_and_writes(tmp_path) -> None:
    pytest.importorskip("jinja2")
    folder = write_folder(tmp_path / "tiny")
    (tmp_path / "text.txt").write_text(TEXT)
    words = ("lens", folder, "text.txt", "--length", "16", "--tokens", "400", "--prompt", "the quick")
    out = good(run_here(main, "tricycle inspect", (*words, "--save", "lens.safetensors", "--out", "a.png"), tmp_path))
    rows = [[float(value) for value in line.split()] for line in out.split("\n\n")[1].splitlines()[1:3]]
    for layer, plain, _, tuned, _ in rows:
        assert tuned < plain or (layer == 1 and tuned == plain < 1e-4)
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    again = good(run_here(main, "tricycle inspect", (*words, "--lens", "lens.safetensors"), tmp_path))
    assert again.splitlines()[:5] == out.splitlines()[:5]
    assert len(again.split("\n\n")[-1].splitlines()) == 3  # a line for each layer


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--length", "1"), "--length"),
        (("--tokens", "50", "--length", "16"), "at least 5 passages of 16 tokens, got 3"),
    ],
)
def test_wrong_flags_fail_with_one_line(words, message, tmp_path) -> None:
    pytest.importorskip("jinja2")
    (tmp_path / "text.txt").write_text(TEXT)
    done = run_here(main, "tricycle inspect", ("lens", write_folder(tmp_path / "a"), "text.txt", *words), tmp_path)
    assert done.returncode == 1 and message in done.stderr and len(done.stderr.splitlines()) == 1
