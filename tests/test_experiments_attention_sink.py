"""experiments/attention_sink: changes at the first token, their measures, and a small run."""

from types import SimpleNamespace

import numpy as np
import pytest
from studies import check_files, check_tables, run_study
from tables import wrong_flags
from tiny_models import lively_model, tiny_tokeniser

from experiments.attention_sink import report, study
from experiments.attention_sink.__main__ import main
from experiments.shared.language_models import token_losses
from experiments.shared.results import read
from tricycle_lab.recorded_run import record_run

IDS = np.random.default_rng(0).integers(0, 400, (2, 9))


@pytest.fixture(scope="module")
def model():
    return lively_model(context_window=128)


def test_measures_of_the_intact_model(model):
    measured = study.measure(model, IDS)
    assert measured["loss"] == pytest.approx(token_losses(model, IDS)[:, 1:].mean(), rel=1e-4)
    stream = np.linalg.norm([record_run(model, row[:-1]).stream[1][0] for row in IDS], axis=-1)
    assert measured["norms"][0] == pytest.approx((stream[:, 0] / np.median(stream[:, 1:], axis=1)).mean(), rel=1e-4)
    assert len(measured["sink"]) == 2 and all(0 < sink < 1 for sink in measured["sink"])


def test_hidden_first_token_gets_no_attention(model):
    measured = study.measure(model, IDS, mask=study.hide_first(8))
    assert measured["sink"] == [0, 0] and measured["loss"] != study.measure(model, IDS)["loss"]


def test_ablation_changes_the_first_token_alone(model):
    intact = study.measure(model, IDS)
    ablated = study.measure(model, IDS, study.ablate("blocks.0.mlp"))
    assert ablated["sink"][0] == intact["sink"][0] and ablated["sink"][1] != intact["sink"][1]
    assert study.measure(model, IDS, study.ablate("blocks.1.mlp"))["sink"] == intact["sink"]


def test_removed_values_keep_the_weights_of_the_first_layer(model):
    intact, removed = study.measure(model, IDS), study.measure(model, IDS, study.remove_values)
    assert removed["sink"][0] == intact["sink"][0] and removed["loss"] != intact["loss"]


def test_streams_in_the_middle_are_patched_at_the_first_token(model):
    before = np.random.default_rng(1).integers(0, 400, (2, study.N_BEFORE))
    streams = study.streams_in_the_middle(model, IDS, before)
    for row, tokens, text in zip(streams[1], IDS, before):
        expected = record_run(model, [*text, tokens[0]]).stream[2][0, -1:]
        np.testing.assert_allclose(row, expected, rtol=1e-4, atol=1e-4)
    measured = study.measure(model, IDS, study.patch_first(0, streams[0]))
    own = np.stack([record_run(model, row[:1]).stream[1][0] for row in IDS])
    assert study.measure(model, IDS, study.patch_first(0, own))["loss"] == pytest.approx(
        study.measure(model, IDS)["loss"], rel=1e-4
    )
    assert measured["sink"][1] != study.measure(model, IDS)["sink"][1]


@pytest.mark.slow
def test_run_writes_results_plots_and_tables(tmp_path, monkeypatch):
    loaded = SimpleNamespace(model=lively_model(context_window=128), tokeniser=tiny_tokeniser())
    monkeypatch.setattr(study, "load_model", lambda name: loaded)
    monkeypatch.setattr(study, "text_of", lambda name, part: "the quick brown fox jumps over the lazy dogs. " * 40)
    out = run_study(main, "--texts", "2", "--tokens", "20", "--output", tmp_path / "run")
    check_files(tmp_path / "run", ["results.json", "sink.png"])
    tables = report.tables(read(tmp_path / "run" / "results.json")["results"])
    check_tables(tables, out)
    assert all("first token hidden | 0.0 |" in table for table in tables.values())


test_wrong_flags_are_refused = wrong_flags(
    main, (["--texts", "0"], "--texts.*got 0"), (["--tokens", "4"], "--tokens.*got 4"), (["--stride", "0"], "--stride")
)
