"""experiments/learned_statistics with a small random model of OPT's architecture."""

import dataclasses
import json
import random
import re
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from studies import check_files, run_study
from tables import wrong_flags

from experiments.learned_statistics import __main__ as program
from experiments.learned_statistics import blocks, pretrained, pretrained_report, pretrained_study, random_opt
from experiments.learned_statistics.blocks import (
    GRAINS,
    Job,
    ResultRows,
    average_scales,
    block_starts,
    digest,
    exact_shares,
    first_scales,
    job_of,
    train_scales,
    use_block_softmax,
)
from experiments.learned_statistics.pretrained_study import (
    FREE,
    PretrainedEvaluator,
    PretrainedSettings,
    all_jobs,
    common_prefix_length,
    expand_scales,
    explained,
    generation_jobs,
    learned_job,
    load_frozen_model,
    mean_job,
    repeated_fraction,
)
from experiments.shared.language_models import read
from tricycle.pretrained import load

WINDOW = 22  # blocks of 6, of which the last is shorter
SHAPE = random_opt.Settings(Path(), width=16, layers=2, heads=4, context_window=40, vocabulary=300)
TEXTS = {
    (text, part): " ".join(random.Random(f"{text} {part}").choices(f"{text} </script> one two three".split(), k=900))
    for text in pretrained.TEXTS
    for part in ("train", "test")
}


def text_of(text: str, part: str) -> str:
    return TEXTS[text, part]


@pytest.fixture(scope="module", autouse=True)
def _texts():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretrained_study, "text_of", text_of)
        patch.setattr(random_opt, "text_of", text_of)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """As the program of random weights leaves it."""
    folder = tmp_path_factory.mktemp("models") / "an opt"
    with pytest.MonkeyPatch.context() as patch:
        flags = [f"--{name.replace('_', '-')}={value}" for name, value in vars(SHAPE).items() if name != "folder"]
        patch.setattr(sys, "argv", ["random_opt", str(folder), *flags])
        assert random_opt.main() == 0
    return folder


@pytest.fixture
def settings(folder, tmp_path) -> PretrainedSettings:
    few = {"steps": 3, "batch_size": 2, "test_windows": 3, "measured_windows": 2, "prompts": 1, "n_written": 5}
    return PretrainedSettings(
        str(folder), blocks=(2, 4), window=WINDOW, seeds=2, rate=0.5, output=tmp_path / "out", **few
    )


@pytest.fixture
def frozen(settings):
    """With attention that differs from place to place, which that of first weights hardly does."""
    frozen = load_frozen_model(settings)
    for block in frozen.model.blocks:
        block.attention.qkv.weights.array *= 40
        block.attention.projection.weights.array *= 40
    return frozen


def rows_of(frozen, text: str) -> np.ndarray:
    return frozen.rows(text, "test", 3)


# -------------------------------------------------------------------- the model
def test_exported_model_has_the_opt_architecture(folder):
    fields = json.loads((folder / "config.json").read_text())
    assert (fields["model_type"], fields["architectures"]) == ("opt", ["OPTForCausalLM"])
    assert (fields["num_hidden_layers"], fields["hidden_size"], fields["activation_function"]) == (2, 16, "relu")
    model = load(folder).model
    assert model.config.position_offset == 2
    np.testing.assert_array_equal(
        model.blocks[0].mlp.up.weights.array, random_opt.new_opt(SHAPE).blocks[0].mlp.up.weights.array
    )


def test_scales_and_rows_have_the_size_of_the_window(settings, frozen):
    use_block_softmax(
        frozen.model, Job("learned", 4, "position"), first_scales(Job("learned", 4, "position"), 2, 4, WINDOW)
    )
    (scales, *_) = (block.attention.softmax_scales for block in frozen.model.blocks)
    assert scales.shape == (4, WINDOW)
    evaluator = PretrainedEvaluator(settings, frozen)
    assert [rows.shape for rows in evaluator.tests.values()] == [(3, WINDOW + 1)] * 3
    assert [len(prompt) for prompt in evaluator.prompts] == [16] * 3
    with pytest.raises(ValueError, match=r"--window.*40, got 41"):
        load_frozen_model(dataclasses.replace(settings, window=41))


# -------------------------------------------------------------------- scales
@pytest.mark.parametrize("grain", GRAINS)
def test_training_changes_only_softmax_scales(frozen, settings, grain):
    job = learned_job(settings, grain=grain)
    before = digest(frozen.model)
    first = first_scales(job, 2, 4, WINDOW)
    scales, losses = train_scales(frozen, job, 3, 2, first)
    assert digest(frozen.model) == before
    per_head, per_position = GRAINS[grain]
    shape = (*[4] * per_head, 4, WINDOW if per_position else 4)
    assert [array.shape for array in (*scales, *first)] == [shape] * 4
    assert all(abs(a - b).max() > 0.05 for a, b in zip(scales, first))
    assert [name for name, p in frozen.model.named_parameters() if p.requires_grad] == [
        f"blocks.{i}.attention.softmax_scales" for i in range(2)
    ]
    for a, b in zip(scales, first):  # positions that do not see a block have no gradient
        unseen = [(..., i, slice(0, start if per_position else 0)) for i, start in enumerate(block_starts(4, WINDOW))]
        assert all((a[place] == b[place]).all() for place in unseen)
    assert len(losses) == settings.steps
    again, _ = train_scales(frozen, job, 3, 2, first)
    other, _ = train_scales(frozen, job._replace(seed=1), 3, 2, first)
    for a, b, c in zip(scales, again, other):
        np.testing.assert_array_equal(a, b)
        assert abs(a - c).max() > 0


def test_training_that_changes_weights_raises(frozen, settings, monkeypatch):
    def careless(model, *args):
        model.norm.gain.array[0] += 1
        return 1.0

    monkeypatch.setattr(blocks, "train_on_batch", careless)
    with pytest.raises(RuntimeError, match="weights"):
        train_scales(frozen, learned_job(settings), 3, 2, first_scales(learned_job(settings), 2, 4, WINDOW))


def test_initial_scales_of_each_start():
    job = Job("learned", 4, "position", start="1 / k")
    (array,) = first_scales(job, 1, 3, WINDOW)
    assert array[:, 0].tolist() == [1] * 4 and array[:, -1].tolist() == [0.25] * 4
    (pairs,) = first_scales(job._replace(grain="layer"), 1, 3, WINDOW)
    np.testing.assert_allclose(pairs, array[:, ::6])
    (heads,) = first_scales(job._replace(grain="head", start="1"), 1, 3, WINDOW)
    assert heads.shape == (3, 4, 4) and (heads == 1).all()


# -------------------------------------------------------------------- shares
def test_mean_shares_of_one_row_give_the_full_softmax(frozen):
    """The mean over one row is exact, so attention equals the full softmax."""
    row = rows_of(frozen, "code")[:1]
    shares = exact_shares(frozen, row, (4,))
    whole = read(frozen.model, row)
    begun = np.arange(WINDOW) >= np.arange(0, WINDOW, 6)[:, None]
    np.testing.assert_allclose(shares.mean[4].sum(axis=2), 1, rtol=1e-5)
    assert (shares.mean[4][..., ~begun] == 0).all()
    use_block_softmax(frozen.model, Job("none", 4))
    assert abs(read(frozen.model, row).losses - whole.losses).max() > 0.1
    means = average_scales(shares.mean[4], "head and position")
    for job, arrays in ((Job("mean", 4, "head and position"), means), (Job("exact", 4), ())):
        use_block_softmax(frozen.model, job, list(arrays))
        np.testing.assert_allclose(read(frozen.model, row).losses, whole.losses, rtol=1e-4)
    assert explained(shares, 4, "head and position") == pytest.approx(1, abs=1e-5)


def test_average_scales_of_coarser_grains(frozen):
    shares = exact_shares(frozen, rows_of(frozen, "code"), (2, 4))
    mean = shares.mean[4]
    np.testing.assert_allclose(mean[:, :, 0] + mean[:, :, 1] + mean[:, :, 2] + mean[:, :, 3], 1, rtol=1e-5)
    np.testing.assert_allclose(average_scales(mean, "position"), mean.mean(axis=1), rtol=1e-6)
    pairs = average_scales(mean, "head")
    np.testing.assert_allclose(pairs[1, 2, 1, 3], mean[1, 2, 1, 18:].mean(), rtol=1e-6)
    np.testing.assert_allclose(average_scales(mean, "layer"), pairs.mean(axis=1), rtol=1e-6)
    assert all(expand_scales(mean, grain).shape == mean.shape for grain in GRAINS)
    np.testing.assert_allclose(expand_scales(mean, "layer")[1, 3, 1, -1], pairs[1, :, 1, 3].mean(), rtol=1e-6)
    known = {grain: explained(shares, 4, grain) for grain in GRAINS}
    assert known["layer"] < min(known["head"], known["position"])
    assert max(known["head"], known["position"]) < known["head and position"] < 1
    # by the definition, over all rows of each window by itself
    each = np.stack([exact_shares(frozen, row[None], (4,)).mean[4] for row in rows_of(frozen, "code")])
    equal = np.where(np.arange(WINDOW) >= np.arange(0, WINDOW, 6)[:, None], 1 / (np.arange(WINDOW) // 6 + 1), 0)
    distances = [((each - scales) ** 2)[..., 6:].sum() for scales in (expand_scales(mean, "position"), equal)]
    assert known["position"] == pytest.approx(1 - distances[0] / distances[1], rel=1e-4)


# -------------------------------------------------------------------- measuring
def test_repeated_fraction_and_common_prefix_length():
    assert repeated_fraction([1, 2, 3, 4, 5, 6]) == 0
    assert repeated_fraction([1, 2, 1, 2, 1, 2], 2) == pytest.approx(3 / 5)
    assert repeated_fraction([1, 2]) == 0
    assert common_prefix_length([1, 2, 3], [1, 2, 4]) == 2 == common_prefix_length([1, 2], [1, 2, 4])


def test_jobs_are_unique_and_cover_all_settings():
    jobs = all_jobs(PretrainedSettings())
    assert len(set(jobs)) == len(jobs)
    assert len({job.file_name for job in jobs}) == len(jobs)
    assert set(generation_jobs(PretrainedSettings())) <= set(jobs)
    middle = {(job.grain, job.start) for job in jobs if job.kind == "learned" and job.blocks == 4}
    assert middle == {("position", "1"), ("position", "mean"), *((grain, "1 / k") for grain in GRAINS)}
    assert {job.text for job in jobs if job.kind == "learned"} == set(pretrained.TEXTS)
    assert {job.blocks for job in jobs if job.start == "1 / k"} == {1, 2, 4, 8, 16}


def test_scales_are_stored_and_reused(frozen, settings):
    evaluator, record = PretrainedEvaluator(settings, frozen), ResultRows(settings, FREE, rows=[])
    job = learned_job(settings)
    for one in (Job("whole"), job, mean_job(settings)):
        record.add(one._asdict(), evaluator.measure(one))
    for a, b in zip(evaluator.first(job._replace(start="mean")), evaluator.scales(mean_job(settings))[0]):
        np.testing.assert_array_equal(a, b)
    assert evaluator.measure(job)["texts"] == record.row(job._asdict())["texts"]  # with scales from their file
    assert record.row(Job("whole")._asdict())["texts"]["code"]["same"] == 1


# -------------------------------------------------------------------- the program
PICTURES = {"blocks.png", "positions.png", "grains.png", "learning.png", "scales.png"}


@pytest.mark.nightly
def test_run_writes_results_and_resumes_without_recomputing(folder, tmp_path, monkeypatch):
    output = tmp_path / "a run"
    words = ["--model", folder, "--output", output, "--window", WINDOW, "--steps", 2, "--batch-size", 1, "--seeds", 2]
    words += ["--test-windows", 2, "--measured-windows", 1, "--prompts", 1, "--n-written", 4, "--blocks", 2, 4]
    out = run_study(program.main, *words)
    check_files(output, {"results.json", "page.html", "scales", *PICTURES}, 200)
    results = json.loads((output / "results.json").read_text())
    settings = PretrainedSettings(str(folder), blocks=(2, 4), seeds=2)
    assert [job_of(row) for row in results["rows"]] == all_jobs(settings)
    assert [job_of(variant) for variant in results["written"]] == generation_jobs(settings)
    assert results["unchanged"] is True and "own weights are unchanged" in out
    assert results["written"][0]["same"] == 1 and results["written"][0]["until"] == 4
    page = (output / "page.html").read_text(encoding="utf-8")
    assert page.count("</script>") == 1  # that of the prompts does not end the page's own
    data = json.loads(re.search(r"const data = (.*);\n", page).group(1))
    assert "</script>" in data["prompts"][0]
    assert len(data["scales"]) == 4

    def never(*args):
        raise AssertionError("done again")

    monkeypatch.setattr(blocks, "train_scales", never)
    monkeypatch.setattr(PretrainedEvaluator, "measure", never)
    monkeypatch.setattr(pretrained_report, "plot", lambda *args: None)  # which takes long
    assert run_study(program.main, *words) == out


def test_pretrained_model_names_are_recognized(folder):
    for name in ("smollm2", "model.gguf", str(folder), f"{folder}/model.safetensors"):
        assert pretrained.names_pretrained_model(["--model", name])
    assert pretrained.names_pretrained_model(["--quick", "--model=smollm2"])
    for words in (["--model", "runs/mine"], ["--model=last.safetensors"], []):
        assert not pretrained.names_pretrained_model(words)


OF_SMOLLM2 = ["--model", "smollm2"]
test_wrong_flags_are_refused = wrong_flags(
    program.main,
    ([*OF_SMOLLM2, "--seeds", "0"], "--seeds.*got 0"),
    ([*OF_SMOLLM2, "--text", "poems"], "--text.*got poems"),
    ([*OF_SMOLLM2, "--rate", "0"], "rates.*got 0.0"),
    ([*OF_SMOLLM2, "--blocks", "2", "8"], "--blocks.*got 2 8 and 4"),
    ([*OF_SMOLLM2, "--window", "12"], "blocks.*tokens in a window"),
    ([*OF_SMOLLM2, "--n-written", "65"], "--n-written.*got 65"),
)


def test_folder_without_a_tokeniser_is_rejected(folder, tmp_path, monkeypatch):
    broken = tmp_path / "broken"
    shutil.copytree(folder, broken)
    for path in broken.glob("token*"):
        path.unlink()
    with pytest.raises(ValueError, match="tokeniser"):
        load_frozen_model(PretrainedSettings(str(broken), window=WINDOW))
