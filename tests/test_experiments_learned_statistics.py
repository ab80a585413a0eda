"""experiments/learned_statistics: nothing frozen changes, exact is exact, and a tiny run leaves all it promises."""

import dataclasses
import json
import random
import shlex
import sys
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from test_programs import call, good

from experiments.learned_statistics import report
from experiments.learned_statistics.__main__ import main
from experiments.learned_statistics.bench import Bench, Job, Record, all_jobs
from experiments.learned_statistics.study import (
    Settings,
    Subject,
    about_maps,
    block_starts,
    cut,
    equal_shares,
    find_checkpoint,
    held_out_rows,
    learn,
    look,
    loss_of,
    make_whole,
    mean_shares,
    set_scales,
)
from tricycle.checkpoint import save_checkpoint
from tricycle.configs import GPTConfig
from tricycle.evaluation import HeldOut
from tricycle.models import GPT
from tricycle.tokeniser import BPETokeniser
from tricycle.training_state import new_state, train_step

TINY = "--blocks 2 3 --width 8 --layers 2 --heads 2 --context-window 13 --batch-size 3 --steps 4"
TINY += " --scale-steps 2 --windows 6"
CONFIG = GPTConfig(vocab_size=257, context_window=13, embedding_dim=8, n_heads=2, n_layers=2, batch_size=3, steps=9)
# runs in a blink
SETTINGS = Settings(blocks=(2, 3), seeds=2, batch_size=3, scale_steps=5, windows=6)


@pytest.fixture
def subject() -> Subject:
    tokens = np.random.default_rng(0).integers(0, 7, 800)
    state = new_state(CONFIG, tokens)
    for _ in range(5):
        train_step(state)
    for block in state.model.blocks:  # weights of attention that differ from each other
        block.attention.qkv.weights.array *= 30
    state.model.freeze().eval()
    return Subject(state.model, BPETokeniser(257), tokens, HeldOut(tokens[:200], 199))


# -------------------------------------------------------------------- blocks and scales
@pytest.mark.parametrize("per_head", [False, True])
def test_nothing_but_scales_changes(subject, per_head):
    before = {name: p.array.tobytes() for name, p in subject.model.named_parameters()}
    scales = learn(subject, 3, per_head, 0, SETTINGS)
    after = dict(subject.model.named_parameters())
    new = {name for name, p in after.items() if p.requires_grad}
    assert new == after.keys() - before.keys() == {f"blocks.{i}.attention.softmax_scales" for i in range(2)}
    assert {name: p.array.tobytes() for name, p in after.items() if name in before} == before
    for array in scales:
        assert array.shape == ((2, 3, 13) if per_head else (3, 13))
        for i, start in enumerate(block_starts(3, 13)):
            assert (array[..., i, :start] == 1).all()  # positions that do not see the block have no gradient
            assert (array[..., i, start:] != 1).mean() > 0.9


def test_scales_learn_other_things_from_other_batches(subject):
    first, again, other = (learn(subject, 2, False, seed, SETTINGS) for seed in (0, 0, 1))
    for a, b, c in zip(first, again, other):
        np.testing.assert_array_equal(a, b)
        assert (a != c).any()


@pytest.mark.parametrize("per_head", [False, True])
def test_where_scales_begin(subject, per_head):
    settings = dataclasses.replace(SETTINGS, scale_steps=1, scale_rate=1e-6, equal_start=True)
    for array in learn(subject, 3, per_head, 0, settings):
        np.testing.assert_allclose(array, np.broadcast_to(equal_shares(3, 13), array.shape), rtol=1e-5)


@pytest.mark.parametrize("n_blocks", [2, 3, 8])
def test_exact_statistics_give_the_whole_softmax(subject, n_blocks):
    make_whole(subject.model)
    whole = loss_of(subject, SETTINGS)
    cut(subject.model, n_blocks, "exact")
    assert loss_of(subject, SETTINGS) == pytest.approx(whole, rel=1e-6)
    cut(subject.model, n_blocks, "none")
    assert loss_of(subject, SETTINGS) != pytest.approx(whole, rel=1e-4)


def test_equal_shares():
    np.testing.assert_allclose(equal_shares(2, 5), np.tile([1, 1, 1, 1 / 2, 1 / 2], (2, 1)))
    np.testing.assert_allclose(equal_shares(3, 6)[0], [1, 1, 1 / 2, 1 / 2, 1 / 3, 1 / 3], rtol=1e-6)


@pytest.mark.parametrize("n_blocks", [2, 3, 5])
def test_measured_shares(subject, n_blocks):
    means = mean_shares(subject, n_blocks, per_head=False)
    by_head = mean_shares(subject, n_blocks, per_head=True)
    for mean, heads in zip(means, by_head, strict=True):
        assert (mean.shape, heads.shape) == ((n_blocks, 13), (2, n_blocks, 13))
        np.testing.assert_allclose(heads.sum(axis=1), 1, rtol=1e-5)
        np.testing.assert_allclose(heads.mean(axis=0), mean, rtol=1e-5)
        for i, start in enumerate(block_starts(n_blocks, 13)):
            assert (mean[i, :start] == 0).all()
            assert (mean[i, start:] > 0).all()


def test_measured_shares_of_one_text_are_its_exact_statistics(subject):
    """Where all training text is one window, and heads have their own scales, nothing is averaged."""
    row = subject.train[:13]
    alone = subject._replace(train=row)
    measured = mean_shares(alone, 2, per_head=True)
    set_scales(cut(subject.model, 2, "learned", per_head=True), measured)
    ours = look(subject.model, row[None])
    make_whole(subject.model)
    for name, weights in look(subject.model, row[None]).items():
        np.testing.assert_allclose(ours[name], weights, rtol=1e-4, atol=1e-6)


def test_numbers_of_maps(subject):
    rows = held_out_rows(subject, 4)
    assert rows.shape == (4, 13)
    make_whole(subject.model)
    whole = look(subject.model, rows)
    cut(subject.model, 2, "none")
    none = look(subject.model, rows)
    assert [w.shape for w in none.values()] == [(4, 2, 13, 13)] * 2
    assert about_maps(whole, whole)["distance"] == [0, 0]
    # rows of the second block sum to 2, those of the first to 1: 6 of 13 are at least 1 away
    assert all(6 / 13 - 1e-5 <= distance < 3 * 6 / 13 for distance in about_maps(none, whole)["distance"])
    assert all(0 < value < 1 for value in about_maps(none, whole)["spikiness"])


# -------------------------------------------------------------------- rows
def test_a_row_is_measured_once(subject, tmp_path):
    settings = dataclasses.replace(SETTINGS, output=tmp_path)
    record, bench = Record(settings), Bench(subject, 0, settings)
    job = Job("learned", 2, 1)
    assert not record.has(0, job)
    record.add(0, job, bench.measure(job))
    again = Record(dataclasses.replace(settings, seeds=5, blocks=(2,)))
    assert again.has(0, job)
    assert not again.has(0, Job("learned", 2, 0))
    assert not again.has(1, job)
    first = bench.scales(job)
    (path,) = (tmp_path / "scales").iterdir()
    assert path.name == "0-2-learned-1.npz"
    for a, b in zip(first, Bench(subject, 0, settings).scales(job), strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ValueError, match="expected these settings, found others; name another --output"):
        Record(dataclasses.replace(settings, scale_steps=6))


def row(kind: str, perplexity: float, blocks: int = 2, seed: int = 0) -> dict:
    return {"model": 0, "kind": kind, "blocks": blocks, "seed": seed, "perplexity": perplexity}


def test_tables():
    rows = [row("whole", 4.0, 1), row("none", 8.0), row("learned", 5.0), row("learned", 4.6, seed=1)]
    rows += [row(kind, 4.0) for kind in ("1 / k", "measured", "measured per head", "learned per head", "exact")]
    np.testing.assert_allclose(report.won_back(rows, "learned", 2, 0), [75, 85])
    table = report.won_back_table(rows).splitlines()
    assert table[0] == "| model | blocks | 1 / k | measured | measured per head | learned | learned per head | exact |"
    assert table[2] == "| 0 | 2 | 100.0 | 100.0 | 100.0 | 80.0 ± 7.1 | 100.0 | 100.0 |"
    values = "4.000 | 8.000 | 4.000 | 4.000 | 4.000 | 4.800 ± 0.283 | 4.000 | 4.000"
    assert report.perplexity_table(rows).splitlines()[2] == f"| 0 | 2 | {values} |"
    seeds = report.seed_table(rows).splitlines()
    assert seeds[3] == "| OPT-350M | 16.84 | 17.81 | +5.8% |"
    assert seeds[-1] == "| ours, 0 | 4.000 | 4.800 ± 0.283 | +20.0% |"


# -------------------------------------------------------------------- the program
@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    generator = random.Random(0)
    path = tmp_path_factory.mktemp("texts") / "a text.txt"
    path.write_text(" ".join(generator.choices("one two three four".split(), k=900)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def finished(tmp_path_factory, text) -> tuple[Path, list, str]:
    folder = tmp_path_factory.mktemp("runs") / "a run"
    words = ["-m", "experiments.learned_statistics", *shlex.split(TINY), "--seeds", 2, "--files", text]
    words += ["--output", folder]
    return folder, words, good(call(*words))


PICTURES = {"attention-best.png", "attention-worst.png", "spikiness.png", "scales.png"}


@pytest.mark.nightly
def test_what_a_run_leaves(finished):
    folder, _, out = finished
    assert {path.name for path in folder.iterdir()} == {
        "results.json",
        "model-0.safetensors",
        "scales",
        "attention.html",
        *PICTURES,
    }
    for name in PICTURES:
        height, width, _ = imread(folder / name).shape
        assert height > 300 < width
    results = json.loads((folder / "results.json").read_text())
    jobs = all_jobs(dataclasses.replace(SETTINGS, seeds=2))
    assert [Job(row["kind"], row["blocks"], row["seed"]) for row in results["rows"]] == jobs
    assert len({row["perplexity"] for row in results["rows"]}) > 10
    for table in (report.perplexity_table, report.won_back_table, report.seed_table):
        assert table(results["rows"]) in out
    for what in ("spikiness", "distance"):
        assert report.maps_table(results["attention"], what) in out
    exact = report.won_back(results["rows"], "exact", 2, 0)
    assert exact == pytest.approx(100, abs=5)  # of next to nothing after four steps


@pytest.mark.nightly
def test_what_is_finished_is_not_done_again(finished):
    folder, words, out = finished
    before = (folder / "model-0.safetensors").stat().st_mtime_ns
    rows = json.loads((folder / "results.json").read_text())["rows"]
    assert good(call(*words)) == out
    assert (folder / "model-0.safetensors").stat().st_mtime_ns == before
    assert json.loads((folder / "results.json").read_text())["rows"] == rows  # with the seconds that it took


@pytest.mark.nightly
def test_a_model_of_a_run_folder(finished, text, tmp_path):
    run = tmp_path / "a run of its own"
    save_checkpoint(run / "last.safetensors", GPT(dataclasses.replace(CONFIG, vocab_size=300)), BPETokeniser(257))
    assert find_checkpoint(run) == run / "last.safetensors"
    words = [*shlex.split(TINY), "--files", text, "--seeds", 1, "--model", run, "--output", tmp_path / "out"]
    out = good(call("-m", "experiments.learned_statistics", *words))
    assert not list((tmp_path / "out").glob("*.safetensors"))
    assert out.count("| ours, 0 |") == 1


@pytest.mark.nightly
def test_another_softmax_and_other_tokens_are_refused(text, tmp_path):
    for config, tokeniser, said in (
        (dataclasses.replace(CONFIG, softmax="softmax1"), None, "expected a model that learned with a plain softmax"),
        (dataclasses.replace(CONFIG, vocab_size=256), None, "expected a tokeniser of at most 256 tokens"),
    ):
        save_checkpoint(tmp_path / "odd.safetensors", GPT(config), tokeniser)
        words = ["--files", text, "--model", tmp_path / "odd.safetensors", "--output", tmp_path / "out"]
        done = call("-m", "experiments.learned_statistics", *words)
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
        assert said in done.stderr


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--seeds 0", "expected --seeds to be at least 1, got 0"),
        ("--scale-steps 0", "expected --scale-steps to be at least 1, got 0"),
        ("--blocks 2 1", "expected --blocks of 2 or more, got 2 1"),
        ("--model x --models 2", "expected one model with --model, got --models 2"),
        ("--scale-rate 0", "expected --scale-rate to be above 0, got 0.0"),
    ],
)
def test_wrong_flags_are_refused(monkeypatch, words, said):
    monkeypatch.setattr(sys, "argv", ["learned_statistics", *words.split()])
    with pytest.raises(ValueError, match=said):
        main()


@pytest.mark.nightly
def test_a_missing_model_is_named(tmp_path):
    done = call("-m", "experiments.learned_statistics", "--model", tmp_path / "no", "--output", tmp_path / "out")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "there is no such file" in done.stderr


def test_the_readme_shows_the_results_that_lie_beside_it():
    folder = Path(report.__file__).parent
    results = json.loads((folder / "results" / "results.json").read_text())
    readme = (folder / "README.md").read_text(encoding="utf-8")
    for table in (report.perplexity_table, report.won_back_table, report.seed_table):
        assert table(results["rows"]) in readme
    for what in ("spikiness", "distance"):
        assert report.maps_table(results["attention"], what) in readme
    other = json.loads((folder / "results" / "equal_start.json").read_text())
    assert report.won_back_table(other["rows"]) in readme
