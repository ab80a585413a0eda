"""Sweeps: what a command line may say, that what is cut off is gone on with, and that the best is the best."""

from __future__ import annotations

import csv
import itertools
import json
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread
from programs import environment
from test_programs import POSIX_ONLY, call, good, lines_without_progress_bars

from tricycle.configs import DebugConfig, GPTConfig
from tricycle.system.locks import FolderLock, LockedError
from tricycle_cli import sweep as sweeping
from tricycle_cli.run import read_metrics
from tricycle_cli.search_space import (
    Categorical,
    Range,
    apply_parameters,
    check_search_space,
    flags_of,
    grid_points,
    parse_search_space,
)
from tricycle_cli.sweep import main
from tricycle_cli.train import parse_arguments
from tricycle_lab.sweep_plot import TrialResult, plot_sweep

BASE = GPTConfig.from_dict(DebugConfig().to_dict())


# -------------------------------------------------------------------- what a command line says
def test_help_shows_the_defaults_of_the_preset(capsys: Any) -> None:
    with pytest.raises(SystemExit):
        main(["--preset", "debug", "--help"])
    assert re.search(r"--n-layers INT .*\(default: 2\)", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("word", "field"),
    [
        ("max_learning_rate=1e-4..1e-2:log", Range(1e-4, 1e-2, True, False)),
        ("--max-learning-rate=0.1..0.2", Range(0.1, 0.2, False, False)),
        ("n_layers=2,3,4", Categorical((2, 3, 4))),
        ("n_layers=2..6", Range(2, 6, False, True)),
        ("batch_size=2..16:log:4", Categorical((2, 4, 8, 16), True)),
        ("dropout=0..0.2:3", Categorical((0.0, 0.1, 0.2))),
        ("n_layers=1..3:9", Categorical((1, 2, 3))),
        ("activation=gelu, relu", Categorical(("gelu", "relu"))),
        ("tied=true,False", Categorical((True, False))),
        ("qkv_bias=none,True", Categorical((None, True))),
    ],
)
def test_specs(word: str, field: Any) -> None:
    (found,) = parse_search_space([word]).values()
    assert found == field


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "expected --over FIELD="),
        (["n_layers"], "expected --over FIELD="),
        (["n_layers="], "expected --over FIELD="),
        (["n_layer=2,3"], "'n_layer' .*did you mean n_layers"),
        (["zzz=1"], "field of the config.*'zzz'"),
        (["n_layers=2,3", "n-layers=4"], "got n_layers twice"),
        (["n_layers=2,2"], "got a value twice"),
        (["n_layers=2,3.5"], "integers.*'3.5'"),
        (["dropout=low,high"], "numbers.*'low'"),
        (["tied=1,0"], "true or false.*'1'"),
        (["activation=gelu..relu"], "expected choices such as A,B"),
        (["dropout=0.2..0.1"], "range from low to high"),
        (["dropout=0..0.1:log"], "range.*both above 0"),
        (["dropout=0..inf"], "range from low to high"),
        (["dropout=0..0.1:few"], ":log or a number"),
        (["dropout=0..0.1:1"], ":log or a number"),
    ],
)
def test_bad_specs_are_one_line(words: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=rf"^.*{message}.*$"):  # one line
        parse_search_space(words)


def test_invalid_configs_are_rejected_before_any_work() -> None:
    check_search_space(BASE, parse_search_space(["n_heads=1,2,4", "embedding_dim=16,32"]), [])
    with pytest.raises(ValueError, match=r"--over: .*n_heads.*\(with n_heads=3, embedding_dim=16\)"):
        check_search_space(BASE, parse_search_space(["n_heads=1,3", "embedding_dim=16,32"]), [])
    with pytest.raises(ValueError, match="dropout"):
        check_search_space(BASE, parse_search_space(["dropout=0..1.5"]), [])
    many = [f"{name}=1..90:90" for name in ("batch_size", "eval_interval", "eval_batches")]
    check_search_space(BASE, parse_search_space(many), [])  # one at a time
    with pytest.raises(ValueError, match="activation"):
        check_search_space(BASE, parse_search_space([*many, "activation=gelu,paper"]), [])


def test_min_learning_rate_keeps_its_ratio_to_the_maximum() -> None:
    share = BASE.min_learning_rate / BASE.max_learning_rate
    assert apply_parameters(BASE, {"max_learning_rate": 0.02}, []).min_learning_rate == pytest.approx(0.02 * share)
    kept = apply_parameters(BASE, {"max_learning_rate": 0.02}, ["min_learning_rate"])
    assert kept.min_learning_rate == BASE.min_learning_rate
    both = {"max_learning_rate": 0.02, "min_learning_rate": 0.001}
    assert apply_parameters(BASE, both, []).min_learning_rate == 0.001


def test_flags_reproduce_the_config() -> None:
    """`tricycle train` with them has the config that was tried."""
    over = "max_learning_rate=0.00123457,1e-2 n_layers=2,3 tied=true,false qkv_bias=none,true,false schedule=linear"
    for params in grid_points(parse_search_space(over.split())):
        config = apply_parameters(BASE, params, [])
        words = ["--preset", "debug", "--device", "cpu", *flags_of(BASE, config)]
        assert parse_arguments(words)[0].config == config


def test_the_preset_determines_the_fields() -> None:
    """Those of Mamba layers, for example, are flags with the preset `mamba`."""
    base = parse_arguments(["--preset", "mamba", "--device", "cpu"])[0].config
    (params,) = grid_points(parse_search_space(["state_size=16"], type(base)))
    assert flags_of(base, apply_parameters(base, params, [])) == ["--state-size", "16"]


def test_a_grid_needs_values() -> None:
    assert len(grid_points(parse_search_space(["n_layers=1,2,3", "dropout=0..0.2:2"]))) == 6
    with pytest.raises(ValueError, match=r"--sampler grid: .*dropout"):
        grid_points(parse_search_space(["dropout=0..0.2"]))


# -------------------------------------------------------------------- trials, with a stand-in for training
class Trainer:
    """Writes the metrics that a training might have, at once."""

    def __init__(self) -> None:
        self.tried: list[dict[str, Any]] = []
        self.dies_at = -1  # which trial, in the middle
        self.fails: set[int] = set()

    def __call__(self, work: Any, trial: Any, params: dict[str, Any]) -> bool:
        folder = work.run_folder(trial.number)
        folder.mkdir(exist_ok=True)
        if trial.number == self.dies_at:
            self.dies_at = -1
            raise KeyboardInterrupt
        if trial.number in self.fails:
            raise RuntimeError("out of luck")
        self.tried.append(params)
        bits = 1 + abs(params["dropout"] - 0.3) + 0.1 * params["n_layers"]
        for step in (5, 10):
            trial.report(bits + 1 / step, step)
            if trial.should_prune():
                return True
        line = {"step": 10, "final_loss": 2 * bits, "final_bits_per_byte": bits, "best_step": 10}
        (folder / "metrics.jsonl").write_text(json.dumps(line) + "\n")
        return False


OVER = ("--over", "dropout=0..0.9", "n_layers=1,2,3")


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Trainer:
    pytest.importorskip("optuna")
    trainer = Trainer()
    monkeypatch.setattr(sweeping, "train_trial", trainer)
    drawn = sweeping.plot_sweep
    # a plot takes longer than all else
    monkeypatch.setattr(sweeping, "plot_sweep", lambda shown, *more: len(shown) == 12 and drawn(shown, *more))
    return trainer


def sweep(folder: Path, *words: str) -> None:
    over = () if "--over" in words else OVER
    main([*over, "--preset", "debug", "--device", "cpu", "--run-folder", str(folder), *words])


def rows_of(folder: Path) -> list[dict[str, str]]:
    with (folder / "sweep.csv").open(newline="") as file:
        return [{name: value for name, value in row.items() if name != "seconds"} for row in csv.DictReader(file)]


@pytest.mark.slow
@pytest.mark.nightly_except(3)
@pytest.mark.parametrize(("sampler", "n"), [("tpe", 12), ("random", 4), ("grid", 4)])
def test_a_resumed_sweep_equals_an_uninterrupted_one(
    sampler: str, n: int, tmp_path: Path, trainer: Trainer, capsys: pytest.CaptureFixture
) -> None:
    words = ["--sampler", sampler, "--trials", str(n)]
    if sampler == "grid":
        words += ["--over", "dropout=0..0.9:5", "n_layers=1,2,3"]
    sweep(tmp_path / "whole", *words)
    whole = list(trainer.tried)
    for folder, at in (("a", 0), ("b", n - 1)):
        trainer.tried.clear()
        trainer.dies_at = at
        with pytest.raises(KeyboardInterrupt):
            sweep(tmp_path / folder, *words)
        main(["--resume", str(tmp_path / folder)])
        assert trainer.tried == whole
        assert rows_of(tmp_path / folder) == rows_of(tmp_path / "whole")
    out = capsys.readouterr().out
    best = min(rows_of(tmp_path / "whole"), key=lambda row: float(row["bits_per_byte"]))
    assert f"best trial: {best['trial']}, {float(best['bits_per_byte']):.4f} bits/byte" in out
    assert out.count("Train with these settings:\n") == 3
    assert n < 12 or imread(tmp_path / "whole" / "sweep.png").shape[0] > 300
    assert len({tuple(params.values()) for params in whole}) == n


@pytest.mark.parametrize("sampler", ["tpe", "random", "grid"])
@pytest.mark.parametrize("n_suggested", [0, 1])
def test_a_sweep_resumes_after_a_kill_between_the_values_of_a_trial(
    sampler: str, n_suggested: int, tmp_path: Path, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = ["--over", "dropout=0..0.9:5", "n_layers=1,2,3"] if sampler == "grid" else []
    words = ["--sampler", sampler, "--trials", "2", *over]
    sweep(tmp_path / "whole", *words)
    whole = list(trainer.tried)
    trainer.tried.clear()
    kind, calls = sys.modules["optuna"].trial.Trial, itertools.count()
    suggest = kind._suggest

    def suggest_or_die(*args: Any) -> Any:
        if next(calls) == 2 + n_suggested:
            raise KeyboardInterrupt
        return suggest(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(kind, "_suggest", suggest_or_die)
        sweep(tmp_path / "a", *words)
    main(["--resume", str(tmp_path / "a")])
    assert trainer.tried == whole


@pytest.mark.slow
def test_sweep_folders_with_url_characters(tmp_path: Path, trainer: Trainer) -> None:
    names = ["new?1", "new?2", "a#b", "%41", "A", "x;y&z=1", "{name}", "a b'c\"d", "Größe"]
    for i, name in enumerate(names):
        sweep(tmp_path / name, "--trials", "1", "--sampler", "random", "--sampler-seed", str(i))
    assert {path.name for path in tmp_path.iterdir()} == set(names)
    assert len({rows_of(tmp_path / name)[0]["dropout"] for name in names}) == len(names)
    assert all(len(rows_of(tmp_path / name)) == 1 and (tmp_path / name / "sweep.db").is_file() for name in names)


@pytest.mark.slow
def test_tpe_learns_from_trials(tmp_path: Path, trainer: Trainer) -> None:
    sweep(tmp_path / "a", "--trials", "24")
    off = [abs(params["dropout"] - 0.3) for params in trainer.tried]
    assert sum(off[14:]) < sum(off[:10])


@pytest.mark.slow
def test_more_trials_and_a_grid_that_ends(tmp_path: Path, trainer: Trainer) -> None:
    sweep(tmp_path / "a", "--trials", "2", "--sampler", "random")
    main(["--resume", str(tmp_path / "a"), "--trials", "3"])
    assert len(rows_of(tmp_path / "a")) == 3
    sweep(tmp_path / "b", "--sampler", "grid", "--over", "n_layers=1,2", "dropout=0.1,0.2")
    assert len(rows_of(tmp_path / "b")) == 4
    main(["--resume", str(tmp_path / "b"), "--trials", "9"])
    assert len(rows_of(tmp_path / "b")) == 4


@pytest.mark.slow
def test_worse_trials_are_pruned(tmp_path: Path, trainer: Trainer, capsys: pytest.CaptureFixture) -> None:
    sweep(tmp_path / "a", "--trials", "12", "--sampler", "random", "--prune")
    states = [row["state"] for row in rows_of(tmp_path / "a")]
    assert states[:4] == ["complete"] * 4
    assert "pruned" in states
    assert "pruned" in capsys.readouterr().out


def test_trials_that_fail(tmp_path: Path, trainer: Trainer, capsys: pytest.CaptureFixture) -> None:
    trainer.fails = {1, 3, 4}
    sweep(tmp_path / "a", "--trials", "6")
    assert [row["trial"] for row in rows_of(tmp_path / "a") if row["state"] == "fail"] == ["1", "3", "4"]
    assert [row["trial"] for row in rows_of(tmp_path / "a") if row["state"] == "complete"] == ["0", "2", "5"]
    assert "trial 3 failed: out of luck" in capsys.readouterr().out
    trainer.fails = {1, 2, 3}
    with pytest.raises(RuntimeError, match=r"3 trials.*out of luck"):
        sweep(tmp_path / "b", "--trials", "6")
    trainer.fails = {0}
    with pytest.raises(RuntimeError, match="completed trial"):
        sweep(tmp_path / "c", "--trials", "1")


def test_a_trial_with_an_invalid_config_fails(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    """Both ends of the range are valid, but 3 heads do not divide the width 32."""
    pytest.importorskip("optuna")
    words = ["--over", "n_heads=1..4", "--trials", "1", "--sampler", "random"]
    with pytest.raises(RuntimeError, match="completed trial"):
        main([*words, "--preset", "debug", "--device", "cpu", "--run-folder", str(tmp_path / "a")])
    assert "trial 0 failed: GPTConfig: expected n_heads to be a divisor" in capsys.readouterr().out


def test_second_sweep_in_one_folder_is_rejected(tmp_path: Path, trainer: Trainer) -> None:
    sweep(tmp_path / "a", "--trials", "1")
    with FolderLock(tmp_path / "a"):
        for words in (["--resume", str(tmp_path / "a")], [*OVER, "--run-folder", str(tmp_path / "a")]):
            with pytest.raises(LockedError, match="another process"):
                main(words)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--trials", "0"], "--trials.*got 0"),
        (["--sampler-seed", "-1"], "--sampler-seed.*0 or more"),
        (["--find-learning-rate"], "flags.*--find-learning-rate"),
        (["--dropout", "0.1"], "dropout.*--over.*both"),
        (["--over", "optimiser=adamw,muon", "--optimizer", "adamw"], "optimiser.*--over.*both"),
        (["--sampler", "grid"], "--sampler grid: .*dropout"),
        (["--sampler", "grid", "--sampler-seed", "3"], "--sampler tpe or random with --sampler-seed"),
    ],
)
def test_invalid_sweeps_are_rejected(words: list[str], message: str, tmp_path: Path, trainer: Trainer) -> None:
    with pytest.raises(ValueError, match=message):
        sweep(tmp_path / "a", *words)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("package", ["optuna", "matplotlib"])
def test_a_missing_package_is_reported_first(tmp_path: Path, monkeypatch: Any, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ModuleNotFoundError, match=r'pip install "tricycle-gpt\[sweep\]"'):
        sweep(tmp_path / "sweep")
    assert list(tmp_path.iterdir()) == []


def test_resuming_folders_without_a_sweep(tmp_path: Path, trainer: Trainer) -> None:
    with pytest.raises(FileNotFoundError, match="folder of a sweep"):
        main(["--resume", str(tmp_path)])
    sweep(tmp_path / "a", "--trials", "1")
    with pytest.raises(ValueError, match="already"):
        sweep(tmp_path / "a")
    for flags in ("--n-layers 2", "--over n_layers=1,2", "--sampler random", "--prune", "--run-folder b"):
        with pytest.raises(ValueError, match=rf"--trials.*--resume.*{flags.split()[0]}"):
            main(["--resume", str(tmp_path / "a"), *flags.split()])
    plan = tmp_path / "a" / "sweep.json"
    for damaged in ("{", "[]", '{"train": 3}', plan.read_text().replace('"tpe"', '"cat"')):
        plan.write_text(damaged)
        with pytest.raises(ValueError, match=r"sweep\.json"):
            main(["--resume", str(tmp_path / "a")])


def test_plots_of_unusual_sweeps(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    plot_sweep([], path)
    plot_sweep([TrialResult(0, None, None, {"a": 1})], path)
    results = [TrialResult(0, 1.0, None, {"a": "x", "b": True}), TrialResult(1, None, 2.0, {"a": "y", "b": False})]
    plot_sweep(results, path, ["a"])
    assert path.stat().st_size > 1000


# -------------------------------------------------------------------- with real training
REAL = (
    "-m tricycle sweep --over max_learning_rate=1e-3,1e-2 --sampler grid --preset debug --steps 4 --eval-interval 2 "
    "--context-window 16 --batch-size 2 --sample-interval 0 --data text --device cpu --files"
).split()


@pytest.fixture(scope="module")
def words(text: Path, cache: Path) -> list[str]:
    pytest.importorskip("optuna")
    return [*REAL, str(text)]


@pytest.mark.nightly
def test_real_trials_are_run_folders(tmp_path: Path, words: list[str]) -> None:
    folder = tmp_path / "a sweep"
    out = good(call(*words, "--trials", "1", "--run-folder", folder))
    assert "trial 0: max_learning_rate=0.001" in out
    run = folder / "trial-0000"
    assert (run / "best.safetensors").is_file()
    config = json.loads((run / "config.json").read_text())
    assert (config["max_learning_rate"], config["min_learning_rate"]) == (0.001, 0.0001)
    assert "--max-learning-rate 0.001" in out
    assert good(call("-m", "tricycle", "generate", run, "--length", "3"))


@pytest.mark.slow
def test_a_failed_run_reports_the_reason(tmp_path: Path, words: list[str]) -> None:
    done = call(*words[:-1], tmp_path / "none.txt", "--run-folder", tmp_path / "a")
    assert done.returncode == 1
    assert done.stdout.count(" failed: ") == 2
    assert "none.txt" in done.stdout
    assert re.search("a: .*completed trial", lines_without_progress_bars(done.stderr)[-1])


@pytest.mark.nightly
@POSIX_ONLY
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_sweep_resumes(number: int, tmp_path: Path, words: list[str]) -> None:
    """The run may live on: then it is waited for."""
    folder = tmp_path / "sweep"
    more = ["--steps", "400", "--eval-interval", "50", "--run-folder", str(folder)]
    program = subprocess.Popen([sys.executable, *words, *more], stdout=subprocess.DEVNULL, env=environment())
    end = time.monotonic() + 120
    while not (folder / "trial-0000" / "last.safetensors").exists() and time.monotonic() < end:
        time.sleep(0.05)
    program.send_signal(number)
    program.wait(60)
    assert program.returncode == -number
    out = good(call("-m", "tricycle", "sweep", "--resume", folder))
    assert "best trial: " in out
    assert [row["state"] for row in rows_of(folder)] == ["complete", "complete"]
    for row in rows_of(folder):
        lines = read_metrics(folder / row["folder"] / "metrics.jsonl")
        assert [line["step"] for line in lines if "loss" in line] == list(range(1, 401))
