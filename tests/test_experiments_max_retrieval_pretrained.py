"""experiments/max_retrieval with a language model: tasks, temperatures, fits, and a small run."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from studies import run_study
from tiny_models import TEXT, lively_model, tiny_tokeniser, write_folder

from experiments.max_retrieval import fits, pretrained, pretrained_report
from experiments.max_retrieval.prompts import TASKS, Prompt, Prompter, new_prompt, words_of
from experiments.max_retrieval.temperatures import MIDDLE, Betas, LogN, use_temperature
from experiments.shared.language_models import set_context_window
from tricycle.models import GPT
from tricycle.softmaxes import AdaptiveSoftmax
from tricycle.tensor import no_grad
from tricycle_lab.probe import Probe, entropy

IDS = np.random.default_rng(0).integers(0, 400, (2, 20))
RUN = "--seeds 1 --texts 1 --largest-size 4 --steps 3 --length 64 --beyond 128".split()


@pytest.fixture(scope="module")
def model() -> GPT:
    return lively_model().freeze()


@pytest.fixture(scope="module")
def prompter() -> Prompter:
    return Prompter(tiny_tokeniser())


@pytest.fixture(scope="module")
def batch(prompter: Prompter) -> list[Prompt]:
    return [prompter.prompts(task, 4, 1, (1, 2))[0] for task in TASKS]


def logits(model: GPT) -> np.ndarray:
    with no_grad():
        return model(IDS).array


# -------------------------------------------------------------------- texts
def test_largest_task_answers_with_the_maximum(rng):
    for n in (2, 64):
        text = TASKS["largest"](n, [], rng)
        for question, answer in text.questions:
            numbers = [int(word) for word in re.findall(r"\d+", question)]
            assert int(answer) == max(numbers) and len(set(numbers)) == len(numbers)
        assert len(numbers) == n and text.n_examples == len(text.questions) - 1


def test_name_and_table_tasks_contain_each_answer_once(rng):
    words = words_of(tiny_tokeniser())
    for n in (4, 100):
        text = TASKS["name"](n, words, rng)
        assert text.context.count("\n") == 8 + n
        assert all(text.context.count(question + answer) == 1 for question, answer in text.questions)
        text = TASKS["table"](n, words, rng)
        assert text.context.count(":") == n + 1 and len(text.questions) > text.n_examples
        assert all(f"{question}{answer}" in text.context for question, answer in text.questions)
        assert len({question for question, _ in text.questions}) == len(text.questions)


@pytest.mark.parametrize("task", TASKS)
def test_prompt_answer_slices_decode_to_the_answers(task, rng):
    tokeniser = tiny_tokeniser()
    text = TASKS[task](4, words_of(tokeniser), rng)
    prompt = new_prompt(tokeniser, text)
    whole = text.context + "".join(question + answer for question, answer in text.questions)
    assert tokeniser.decode(prompt.ids.tolist()) == whole
    expected = [answer.rstrip(".\n") for _, answer in text.questions[text.n_examples :]]
    assert [tokeniser.decode(prompt.ids[part].tolist()) for part in prompt.answers] == expected


def test_prompts_depend_on_the_stream_key(prompter):
    one, same, other = (prompter.prompts("name", 4, 1, key)[0].ids.tolist() for key in ((1, 2), (1, 2), (1, 3)))
    assert one == same != other


# -------------------------------------------------------------------- temperatures
def test_use_temperature_scales_the_attention_scores(model):
    betas = Betas(np.full((2, 4), np.log(1.7)))
    with Probe(model) as probe, probe.change_softmax(temperature=1 / 1.7):
        expected = logits(model)
    plain = logits(model)
    with use_temperature(model, betas):
        np.testing.assert_allclose(logits(model), expected, rtol=1e-4, atol=1e-4)
    assert abs(expected - plain).max() > 0.1
    np.testing.assert_array_equal(logits(model), plain)
    with use_temperature(model, None):
        np.testing.assert_array_equal(logits(model), plain)


def test_temperature_of_one_head_changes_only_that_head(model):
    levels = np.zeros((2, 4))
    levels[1, 2] = 1.0
    with Probe(model) as probe, use_temperature(model, Betas(levels)):
        logits(model)
        changed = {name: weights.copy() for name, weights in probe.weights.items()}
    with Probe(model) as probe:
        logits(model)
    same = [
        np.allclose(changed["blocks.1.attention"][:, h], probe.weights["blocks.1.attention"][:, h]) for h in range(4)
    ]
    assert same == [True, True, False, True]
    np.testing.assert_allclose(changed["blocks.0.attention"], probe.weights["blocks.0.attention"], atol=1e-6)


def test_betas_grow_with_the_number_of_keys():
    betas = Betas(np.zeros((1, 3)), np.array([[0.0, 0.5, -4.0]])).of(0, 2, MIDDLE).array
    below = np.log((MIDDLE - 1) / MIDDLE)
    np.testing.assert_allclose(betas[:, :, 0], [[1, 1 + 0.5 * below, 1 - 4 * below], [1, 1, 1]], rtol=1e-5)
    assert Betas(np.zeros((1, 1)), np.ones((1, 1)), least=0.2).of(0, 4, 4).array.min() == np.float32(0.2)
    np.testing.assert_allclose(LogN(16).of(0, 3, 256).array.ravel()[[0, 2]], [np.log(254) / np.log(16), 2], rtol=1e-6)
    np.testing.assert_array_equal(LogN(16).of(0, 16, 16).array, 1)


def test_ln_n_temperature_is_equal_with_and_without_a_cache(model):
    with use_temperature(model, LogN(4)):
        expected = logits(model)
        caches = model.new_caches()
        with no_grad():
            parts = [model(IDS[:, :13], caches).array, model(IDS[:, 13:], caches).array]
    np.testing.assert_allclose(np.concatenate(parts, axis=1), expected, rtol=1e-3, atol=1e-3)


def test_use_temperature_accepts_an_adaptive_softmax(model):
    with Probe(model) as probe, probe.change_softmax(softmax=AdaptiveSoftmax()):
        expected = logits(model)
    with use_temperature(model, AdaptiveSoftmax()):
        np.testing.assert_array_equal(logits(model), expected)


def test_betas_round_trip_through_json():
    betas = Betas(np.full((2, 3), 0.25), np.full((2, 3), -0.5))
    again = Betas.from_table(json.loads(json.dumps(betas.table())))
    assert again.table() == betas.table()
    assert Betas.from_table(Betas(np.zeros((1, 1))).table()).growth is None


# -------------------------------------------------------------------- fits
def test_beta_gradients_match_finite_differences(model, batch):
    found = fits.beta_gradients(model, [batch], fits.loss_of_answers)[0]

    def loss(layer: int, head: int, level: float) -> float:
        levels = np.zeros((2, 4))
        levels[layer, head] = level
        with use_temperature(model, Betas(levels)), no_grad():
            return float(fits.loss_of_answers(model, batch).array)

    for layer, head in ((0, 1), (1, 3)):
        difference = (loss(layer, head, 0.02) - loss(layer, head, -0.02)) / 0.04
        assert found[layer, head] == pytest.approx(difference, rel=0.05, abs=0.02)


@pytest.mark.parametrize("growth", [None, np.zeros((2, 4))])
def test_fit_betas_lowers_the_loss(model, batch, growth):
    betas = Betas(np.zeros((2, 4)), growth)
    losses = fits.fit_betas(model, betas, [batch] * 8, fits.loss_of_answers)
    assert losses[-1] < losses[0]
    assert all(parameter.grad is None for parameter in model.parameters())


def test_grades_are_independent_of_the_batch(model, batch):
    right, nats = fits.grade_answers(model, batch)
    alone = [fits.grade_answers(model, [prompt]) for prompt in batch]
    assert right == [value for part, _ in alone for value in part]
    np.testing.assert_allclose(nats, [value for _, part in alone for value in part], rtol=1e-4)
    prompt = batch[0]
    with no_grad():
        rows = model(prompt.ids[None]).array[0].astype(float)
    place = prompt.answers[0]
    shares = rows[place.start - 1 : place.stop - 1]
    shares = shares - np.log(np.exp(shares).sum(axis=-1, keepdims=True))
    assert alone[0][1][0] == pytest.approx(-sum(shares[i, t] for i, t in enumerate(prompt.ids[place])), rel=1e-4)
    top = Prompt(
        np.append(prompt.ids[: place.start], rows[place.start - 1].argmax()), [slice(place.start, place.start + 1)]
    )
    assert fits.grade_answers(model, [top])[0] == [True]


def test_row_costs_match_the_model_loss(model, batch):
    prompt = batch[1]
    at = prompt.answers[0].start
    with no_grad():
        row = model(prompt.ids[None, :at]).array[0, -1].astype(float)
    expected = np.log(np.exp(row).sum()) - row[prompt.ids[at]]
    for scores, cost in fits._cases_of(model, prompt):
        assert scores.shape == (4, at)
        weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        assert cost(weights) == pytest.approx(expected, rel=1e-3)
        assert abs(cost(np.eye(at)[:4]) - expected) > 0.05  # only the first keys
    assert len(fits.fit_polynomial(model, [prompt], (1, 2, 4)).coefficients) == 5


# -------------------------------------------------------------------- measuring
def test_recorded_entropies_match_the_attention_weights(model):
    ids = np.random.default_rng(1).integers(0, 400, (1, 64))
    with Probe(model) as probe, pretrained.record_entropies(model, [16, 64]) as table, no_grad():
        model(ids)
    for layer, weights in enumerate(probe.weights.values()):
        for i, n in enumerate((16, 64)):
            ends = np.linspace(3 * n // 4 + pretrained.TOGETHER, n, pretrained.GROUPS).astype(int)
            rows = weights[0][:, [q for end in ends for q in range(end - pretrained.TOGETHER, end)]]
            np.testing.assert_allclose(table["entropy"][i][layer], entropy(rows).mean(axis=-1), atol=1e-3)
            np.testing.assert_allclose(table["first"][i][layer], rows[..., 0].mean(axis=-1), atol=1e-3)


def test_keep_best_heads_keeps_the_largest_expected_gains():
    levels = Betas(np.array([[0.5, 0.5], [-1.0, 0.1]]))
    chosen = pretrained.keep_best_heads(levels, np.array([[-1.0, -3.0], [2.0, -9.0]]), 2)
    np.testing.assert_allclose([row.array for row in chosen.levels], [[0, 0.5], [-1, 0]])


def test_entropy_slopes_of_known_entropies():
    lengths = [64, 128, 256]
    entropies = np.log(lengths)[:, None, None] * np.array([[0.0, 1.0, 0.25]]) + 0.3
    np.testing.assert_allclose(pretrained_report.entropy_slopes(lengths, entropies), [[0, 1, 0.25]], atol=1e-9)


def test_longer_context_window_accepts_longer_inputs():
    model = lively_model(context_window=8)
    with pytest.raises(ValueError, match="context_window=8"):
        logits(model)
    set_context_window(model, 32)
    assert np.isfinite(logits(model)).all()


@pytest.mark.nightly
def test_run_writes_results_and_resumes_without_recomputing(tmp_path, monkeypatch):
    monkeypatch.setattr(pretrained, "text_of", lambda name, part: f"{name} {part} {TEXT * 3}")
    monkeypatch.setattr(fits, "TRIED", (1.0, 2.0))
    folder = write_folder(tmp_path / "model")
    words = ["--model", str(folder), *RUN, "--output", str(tmp_path / "out")]
    printed = run_study(pretrained.main, *words)
    left = {path.name for path in (tmp_path / "out").iterdir()}
    pictures = {"accuracy.png", "nats.png", "positions.png", "entropy.png", "heads.png"}
    assert left == {"parts", "results.json", "tables.md", "heads.html", *pictures}
    assert "a key in a table of n rows: 4" in printed and "tasks, ln n, 0: " in printed
    page = (tmp_path / "out" / "heads.html").read_text(encoding="utf-8")
    assert "__DATA__" not in page and "http" not in page
    first = json.loads((tmp_path / "out" / "results.json").read_text(encoding="utf-8"))
    assert first["beyond"]["softmax, shakespeare"]["lengths"] == [64, 128]
    assert "tasks, ln n, 0: " not in run_study(pretrained.main, *words)  # nothing is computed again
    for path in (tmp_path / "out" / "parts").glob("tasks-*"):
        path.unlink()
    printed = run_study(pretrained.main, *words, "--report")  # of what is there
    assert "left out, for this part is not there: 'tasks'" in printed and "| code, 1 to 64 |" in printed
    words[words.index("--steps") + 1] = "4"
    with pytest.raises(ValueError, match=r"steps 3.*4"):
        run_study(pretrained.main, *words)
