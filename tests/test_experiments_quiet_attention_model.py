"""experiments/quiet_attention with a pretrained model: int8 rounding, outliers, and training."""

import json
import math

import numpy as np
import pytest

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from studies import check_files
from tiny_models import TEXT, lively_model, write_folder

from experiments.quiet_attention import __main__ as program
from experiments.quiet_attention import pretrained
from experiments.quiet_attention.continued_training import TrainingPlan, Variant, train_variant, use_softmax
from experiments.quiet_attention.int8_simulation import MORE_ROUNDINGS, ROUNDINGS, Rounding, rounded, simulate_int8
from experiments.quiet_attention.outliers import massive_tokens, measure_outliers, weight_outliers
from experiments.quiet_attention.pretrained import FREE, Settings, variants_of
from experiments.quiet_attention.pretrained_report import grouped, report
from experiments.shared import language_models
from experiments.shared.language_models import load_model, token_losses
from experiments.shared.results import Record
from tricycle_lab.probe import excess_kurtosis

SMALL = {"steps": 2, "rows": 2, "tokens": 24, "tested": 2, "rounded": 1, "inside": 1, "survey": 2}


@pytest.fixture(scope="module")
def ids():
    return np.random.default_rng(1).integers(3, 400, (3, 33))


@pytest.fixture
def texts(monkeypatch):
    monkeypatch.setattr(language_models, "READERS", dict.fromkeys(language_models.TEXTS, lambda held_out: TEXT))


# -------------------------------------------------------------------- 8 bits
def test_int8_rounding_by_tensor_row_and_column():
    x = np.array([[1, -127, 0.4], [10, 5, 0]], np.float32)
    assert rounded(x, "tensor").tolist() == [[1, -127, 0], [10, 5, 0]]
    by_row = rounded(x, "row")
    assert by_row[0].tolist() == [1, -127, 0]
    np.testing.assert_allclose(by_row[1], [10, 10 / 127 * 64, 0], rtol=1e-6)
    columns = rounded(x, "row", axis=0)
    np.testing.assert_allclose(columns[:, 2], [0.4, 0], rtol=1e-6)
    assert rounded(np.zeros((2, 3), np.float32), "tensor").tolist() == np.zeros((2, 3)).tolist()


def test_simulate_int8_restores_the_weights(ids):
    model = lively_model()
    plain = token_losses(model, ids, n_rows=1)
    weights = {name: p.array.copy() for name, p in model.named_parameters()}
    losses = {}
    for name, rounding in {**ROUNDINGS, **MORE_ROUNDINGS, "nothing": Rounding()}.items():
        with simulate_int8(model, rounding):
            losses[name] = token_losses(model, ids, n_rows=1)
    assert all(np.array_equal(p.array, weights[name]) for name, p in model.named_parameters())
    np.testing.assert_array_equal(token_losses(model, ids, n_rows=1), plain)
    np.testing.assert_allclose(losses.pop("nothing"), plain, rtol=1e-5)
    off = {name: abs(some - plain).mean() for name, some in losses.items()}
    assert min(off.values()) > 1e-4
    assert off["weights and activations, a scale a row"] < off["weights and activations, a scale a tensor"]


def test_outliers_cost_more_with_one_scale_per_tensor(ids):
    model = lively_model()
    for block in model.blocks:
        block.mlp.up.weights.array[0, 0] = 500.0
    plain = token_losses(model, ids, n_rows=1)
    off = {}
    for scales in ("tensor", "row"):
        with simulate_int8(model, Rounding(scales)):
            off[scales] = abs(token_losses(model, ids, n_rows=1) - plain).mean()
    assert off["tensor"] > 5 * off["row"]


# -------------------------------------------------------------------- outliers
def test_massive_tokens_are_found():
    streams = np.random.default_rng(0).standard_normal((3, 20, 8))
    assert not massive_tokens(streams).any()
    streams[1, [0, 7], 3] = 5000, -900
    streams[1, 9, 3] = 90
    assert np.flatnonzero(massive_tokens(streams)).tolist() == [0, 7]


def test_measure_outliers_with_and_without_sinks(ids):
    model = lively_model()
    inside = measure_outliers(model, ids[:, :-1])
    assert inside.first.shape == (2, 4)
    assert inside.kurtosis.shape == (2,)
    np.testing.assert_allclose(inside.nothing, 0, atol=1e-6)
    use_softmax(model, Variant("sink", "sinks", initial=50.0))
    quiet = measure_outliers(model, ids[:, :-1])
    assert quiet.nothing.min() > 0.99
    assert quiet.first.max() < 0.01
    json.dumps(inside.as_dict())


def test_weight_outliers_locate_the_head_and_matrix():
    model = lively_model()
    model.blocks[1].attention.qkv.weights.array[3, 8] = 50.0  # of the second head's queries
    found = weight_outliers(model)
    assert len(found["heads"]["queries"][1]) == 4
    assert len(found["heads"]["keys"][1]) == 2
    assert int(np.argmax(found["heads"]["queries"][1])) == 1
    kurtosis, largest = found["matrices"]["attention.qkv"][1]
    assert kurtosis == pytest.approx(excess_kurtosis(model.blocks[1].attention.qkv.weights.array), abs=1e-3)
    assert largest > found["matrices"]["attention.qkv"][0][1]


# -------------------------------------------------------------------- training
TRAINED = [
    Variant("sink", "sinks", initial=-1.0),
    *(Variant(*words.split()) for words in ("sink lora", "softmax1 lora", "sink all")),
]


@pytest.mark.parametrize("variant", TRAINED, ids=lambda variant: variant.title)
def test_only_parameters_of_the_method_change(variant, tmp_path):
    loaded = load_model(str(write_folder(tmp_path / "tiny")))
    before = {name: p.array.copy() for name, p in loaded.model.named_parameters()}
    text = loaded.tokeniser.encode_plain(TEXT).astype(np.int64)
    losses = train_variant(loaded, variant, TrainingPlan([text, text[::-1]], 3, 2, 16))
    assert len(losses) == 3
    assert all(map(math.isfinite, losses))
    after = dict(loaded.model.named_parameters())
    changed = {name for name, array in before.items() if not np.array_equal(after[name].array, array)}
    sinks = [p for name, p in after.items() if name.endswith("softmax_scales")]
    assert len(sinks) == (2 if variant.softmax == "sink" else 0)
    assert all((p.array != variant.initial).all() for p in sinks)
    if variant.method == "sinks":
        assert not changed
    elif variant.method == "lora":
        assert {name.rpartition(".")[2] for name in changed} == {"weights"}
        assert not any("embedding" in name for name in changed)
        assert after.keys() - before.keys() == {name for name in after if name.endswith("softmax_scales")}
    else:
        assert changed == before.keys()


def test_lora_training_lowers_the_loss(tmp_path):
    loaded = load_model(str(write_folder(tmp_path / "tiny")))
    text = loaded.tokeniser.encode_plain(TEXT).astype(np.int64)
    losses = train_variant(loaded, Variant("softmax1", "lora"), TrainingPlan([text], 30, 2, 16))
    assert np.mean(losses[-5:]) < 0.92 * np.mean(losses[:5])


# -------------------------------------------------------------------- the study
def test_variants_are_unique_and_ordered_by_seed():
    variants = variants_of(Settings("tiny", 3, 1), quick=False)
    assert len({variant.key for variant in variants}) == len(variants) == 20
    trained = [variant.seed for variant in variants if variant.softmax != "sink"]
    assert trained == sorted(trained)


@pytest.mark.nightly
def test_run_writes_results_and_resumes_without_recomputing(tmp_path, texts, monkeypatch, capsys):
    folder = write_folder(tmp_path / "tiny")
    settings = Settings(str(folder), 1, output=tmp_path / "out", **SMALL)
    monkeypatch.setattr(pretrained, "BEGINNINGS", ("the", "\n"))
    monkeypatch.setattr(pretrained, "variants_of", lambda *_: [Variant("softmax"), Variant("sink", "lora")])
    results = pretrained.measure(settings, quick=True)
    report(settings, results)
    check_files(settings.output, ["results.json", "model.png", "model.html"])
    tables = capsys.readouterr().out
    assert "Training reads 96 tokens in 2 updates." in tables
    for row in ("softmax, no training", "sink, LoRA", "mlp.projection", "tokens | 1 | 2 to 16 | 17 to 24"):
        assert f"| {row} |" in tables
    monkeypatch.setattr(pretrained, "train_variant", lambda *_: pytest.fail("trained again"))
    assert pretrained.measure(settings, quick=True)["variants"] == results["variants"]
    with pytest.raises(ValueError, match=r"steps 2.*3"):
        Record(Settings(str(folder), 1, output=tmp_path / "out", **{**SMALL, "steps": 3}), FREE)
    assert list(grouped(results["variants"])) == ["softmax, no training", "sink, LoRA"]


def test_model_flag_selects_the_pretrained_study(tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(program, "measure_model", lambda settings, quick: calls.append((settings, quick)))
    monkeypatch.setattr(program, "report_model", lambda settings, results: None)
    monkeypatch.setattr("sys.argv", ["x", "--model", "smollm2", "--quick", "--output", str(tmp_path)])
    program.main()
    settings, quick = calls[0]
    assert quick
    assert (settings.model, settings.seeds, settings.steps, settings.tokens) == ("smollm2", 1, 4, 128)
    assert settings.output == tmp_path / "smollm2-quick"
