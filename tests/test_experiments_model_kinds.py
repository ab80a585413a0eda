"""experiments/model_kinds: equal time as updates, resuming, and the README's table."""

import pytest
from studies import check_files, run_study
from tables import wrong_flags

from experiments.model_kinds import report, study
from experiments.model_kinds.__main__ import main
from experiments.shared.results import read, write_json
from tricycle.configs import PRESETS

TINY = "--vocab-size 270 --context-window 16 --embedding-dim 16 --n-heads 2 --head-size 8 --hidden-size 16"


def test_active_parameters_of_a_mixture_are_those_of_the_dense_model_and_the_routers():
    dense, mixture = (study.parameter_counts(PRESETS[name]()) for name in ("portable", "mixture"))
    assert dense["parameters"] == dense["active"]
    assert mixture["active"] - dense["active"] == 4 * 192 * 8 < mixture["parameters"] - mixture["active"]


@pytest.mark.nightly
def test_study_resumes_and_renders(tmp_path, monkeypatch):
    rates = {"portable": 3.0, "mixture": 2.0, "mamba": 1.0, "encoder_decoder": 4.0}
    names = iter(rates)
    monkeypatch.setattr(study, "updates_per_second", lambda config, n_updates: rates[next(names)])
    output, train_run = tmp_path / "results", study.train_run
    words = ["--quick", "--minutes", "0.05", "--modules", "bisect", "keyword", f"--flags={TINY} --batch-size 2"]
    words += ["--output", output]

    def stop_at_mamba(settings, preset, *values):
        if preset == "mamba":
            raise KeyboardInterrupt
        return train_run(settings, preset, *values)

    monkeypatch.setattr(study, "train_run", stop_at_mamba)
    with pytest.raises(KeyboardInterrupt):
        run_study(main, *words)
    first = read(output / "results.json")
    assert [each["preset"] for each in first["runs"]] == ["portable", "mixture"] and first["rates"] == rates
    monkeypatch.setattr(study, "train_run", train_run)
    out = run_study(main, *words)
    results = read(output / "results.json")
    assert results["runs"][:2] == first["runs"] and [each["steps"] for each in results["runs"]] == [9, 6, 3, 12]
    assert all(each["curve"][-1][0] == each["steps"] and 0 < each["bits"] < 9 for each in results["runs"])
    check_files(output, ["results.json", "bits.png", "runs"])
    (table,) = report.tables(results).values()
    assert table in out and table.count("\n") == 5
    page = tmp_path / "README.md"
    page.write_text(f"a\n{report.BEGIN}old\n{report.END}b\n", encoding="utf-8")
    monkeypatch.setattr(report, "README", page)
    run_study(main, *words, "--render")
    text = page.read_text(encoding="utf-8")
    assert table in text and report.PICTURE in text and "0.05 minutes for each run, 1 seeds" in text
    assert "old" not in text and text.startswith("a\n") and text.endswith(f"{report.END}b\n")
    write_json(output / "results.json", {**results, "settings": {**results["settings"], "minutes": 1}})
    with pytest.raises(ValueError, match=r"minutes 1 there and 0\.05 here"):
        run_study(main, *words)


test_wrong_flags_are_refused = wrong_flags(
    main,
    (["--minutes", "0"], "--minutes above 0, got 0"),
    (["--seeds", "0"], "--seeds.*got 0"),
    (["--presets", "large"], "--presets among"),
    (["--modules", "bisect", "missing"], "--modules that have source files, got missing"),
)
