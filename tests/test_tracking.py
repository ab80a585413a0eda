"""Trackers get what metrics.jsonl gets, whatever happens to the run, and nothing that happens to them ends a run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_programs import POSIX_ONLY, QUICK, TRAIN, call, good, lines_without_progress_bars, one_line
from test_training import CONFIG, TOKENS, new_run, same_files, stop_at, train, whole  # noqa: F401 (fixtures)

from tricycle.training_state import new_state, resume_state
from tricycle_cli import trackers, tracking
from tricycle_cli.run import read_metrics
from tricycle_cli.trackers import NAMES, TRACKERS, Tracker, check_trackers, logged_in_to_wandb
from tricycle_cli.tracking import Tracking

PROGRAM = Path(__file__).with_name("tracked_run.py")
# A home folder without settings of the user, and a folder for logs.
FOREIGN = ("WANDB_", "MLFLOW_", "TRACKIO_", "NETRC", "HF_")


def numbers_of(path: Path) -> dict[tuple[int, str], float]:
    entries = [((line["step"], name), value) for line in read_metrics(path) for name, value in line.items()]
    numbers = [entry for entry in entries if entry[0][1] != "step" and type(entry[1]) in (int, float)]
    assert len(dict(numbers)) == len(numbers)
    return dict(numbers)


# -------------------------------------------------------------------- the real libraries
def process(folder: Path, action: str, name: str, end: str = "", status: int = 0) -> str:
    """Run tracked_run.py in a home folder without the user's settings, and return its output."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    home = folder.parent / "home"
    home.mkdir(exist_ok=True)
    folders = {"HOME": str(home), "USERPROFILE": str(home), "TRACKIO_DIR": str(folder.parent / "trackio")}
    words = [sys.executable, str(PROGRAM), action, str(folder), name, *[end] * bool(end)]
    environment = {**clean, **folders, "PYTHONPATH": str(PROGRAM.parent)}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=240, cwd=folder.parent)
    assert done.returncode == status, done.stderr
    return done.stdout + done.stderr


def has(name: str) -> None:
    for module in [name, "sqlalchemy", "alembic"] if name == "mlflow" else [name]:
        pytest.importorskip(module)


def read(folder: Path, name: str) -> tuple[dict[tuple[int, str], float], dict[str, Any]]:
    (line,) = [line for line in process(folder, "read", name).splitlines() if line.startswith("READ ")]
    found = json.loads(line.removeprefix("READ "))
    rows = {(step, key): value for step, key, value in found["rows"]}
    assert len(rows) == len(found["rows"]), "something was logged twice"
    return rows, found["config"]


def same(rows: dict[tuple[int, str], float], metrics: Path, name: str, but: str = "") -> None:
    expected = numbers_of(metrics)
    assert rows.keys() == expected.keys()
    exact = np.float32 if name == "tensorboard" else float  # which keeps 32 bits
    assert {key: value for key, value in rows.items() if exact(expected[key]) != value and key[1] != but} == {}


@pytest.mark.nightly
@POSIX_ONLY
@pytest.mark.parametrize("name", NAMES)
def test_trackers_have_the_content_of_the_metrics(name: str, tmp_path: Path) -> None:
    """A run that is killed, gone on with, stopped, and gone on with to its end, by the library's own reader."""
    has(name)
    folder = tmp_path / "a run"
    process(folder, "run", name, "8", status=-9)
    for end in ("stop-13", "end"):
        assert "continues without this tracker" not in process(folder, "run", name, end)
    rows, config = read(folder, name)
    assert len(rows) == 4 * 20 + 2 * 4 + 3
    # what was logged before the kill, some cannot log again
    same(rows, folder / "metrics.jsonl", name, "" if name == "tensorboard" else "tokens_per_second")
    assert {key: str(value) for key, value in config.items()}.items() >= {("embedding_dim", "8"), ("seed", "3")}


@pytest.mark.nightly_except(3)
@pytest.mark.slow
@POSIX_ONLY
@pytest.mark.parametrize("name", NAMES)
def test_a_tracker_added_later_gets_all_metrics(name: str, tmp_path: Path) -> None:
    has(name)
    folder = tmp_path / "run"
    train(new_state(CONFIG, TOKENS), new_run(folder))
    before = numbers_of(folder / "metrics.jsonl")
    process(folder, "run", name, "end")
    assert numbers_of(folder / "metrics.jsonl").items() >= before.items()
    same(read(folder, name)[0], folder / "metrics.jsonl", name)


def test_an_unreachable_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has("mlflow")
    folder = tmp_path / "run"
    monkeypatch.setattr(sys.modules[__name__], "FOREIGN", ())
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    output = process(folder, "run", "mlflow", "end")
    assert output.count("--track mlflow: ") == output.count("continues without this tracker") == 1
    assert len(read_metrics(folder / "metrics.jsonl")) == 20 + 4 + 1


# -------------------------------------------------------------------- the programs
@pytest.mark.nightly
def test_track_flag_adds_and_removes_trackers_of_a_run(tmp_path: Path, cache: Path, text: Path) -> None:
    """One run, without a tracker at first; it has one from --resume on, and then none any more."""
    has("tensorboard")
    folder = tmp_path / "run"
    words = [TRAIN, *QUICK, "--sample-interval", "0", "--data", "text", "--files", text, "--run-folder", folder]
    n_files = []
    for line in (
        [*words, "--track", "tensorboard"],
        [TRAIN, "--resume", folder],
        [TRAIN, "--resume", folder, "--track"],
    ):
        good(call(*line))
        n_files.append(len([*(folder / "tensorboard").iterdir()]))
        kept = json.loads((folder / "data.json").read_text()).get("track", [])
        assert kept == ([] if line[-1] == "--track" else ["tensorboard"])
        if kept:
            same(read(folder, "tensorboard")[0], folder / "metrics.jsonl", "tensorboard")
    assert n_files[1:] == [n_files[0] + 1] * 2


NOT_THERE = """
import importlib.util, runpy, sys
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name in ("wandb", "trackio") else real(name, *more)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def write_run(folder: Path, tracker: str) -> None:
    """Write the settings of a run with a tracker, which has not begun."""
    (folder / "config.json").write_text(json.dumps(CONFIG.to_dict()))
    (folder / "data.json").write_text(json.dumps({"data": "python", "files": [], "track": [tracker]}))


@pytest.mark.parametrize("words", ["--preset debug --track wandb --run-folder", "--resume"])
def test_a_missing_library_is_reported_before_any_work(tmp_path: Path, words: str) -> None:
    if "--resume" in words:
        write_run(tmp_path, "wandb")
    done = call("-c", NOT_THERE, TRAIN, *words.split(), tmp_path)
    one_line(done, r"^train_smol_gpt\.py: --track wandb .*tricycle-gpt\[wandb\]")
    assert not (tmp_path / "metrics.jsonl").exists()


def test_unknown_trackers_are_refused(tmp_path: Path) -> None:
    done = call(TRAIN, "--track", "paper")
    assert done.returncode == 2
    assert "tensorboard" in "".join(lines_without_progress_bars(done.stderr))
    write_run(tmp_path, "paper")
    assert "expected data and files" in call(TRAIN, "--resume", tmp_path).stderr
    with pytest.raises(ValueError, match=r"--track.*tensorboard.*'paper'"):
        check_trackers(["paper"])


def test_a_folder_with_the_name_of_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trackers, "NAMES", ("nolibrary",))
    (tmp_path / "nolibrary").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match=r"tricycle-gpt\[nolibrary\]"):
        check_trackers(["nolibrary"])


def test_every_tracker_is_an_extra_and_in_the_documentation() -> None:
    import tomllib

    root = PROGRAM.parents[1]
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(TRACKERS) <= set(project["optional-dependencies"])
    page = (root / "docs" / "tracking.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|", page, re.M)
    assert rows[: len(TRACKERS)] == [(name, tracker.storage) for name, tracker in TRACKERS.items()]


def test_logged_in_to_wandb_reads_key_and_netrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert not logged_in_to_wandb()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password " + 40 * "x")
    os.chmod(tmp_path / "netrc", 0o600)
    assert logged_in_to_wandb()
    monkeypatch.setenv("WANDB_BASE_URL", "https://elsewhere.example")
    assert not logged_in_to_wandb()
    monkeypatch.setenv("WANDB_API_KEY", 40 * "x")
    assert logged_in_to_wandb()


# -------------------------------------------------------------------- what happens to trackers
class Notes(Tracker):
    """Keeps all in a dict, which outlives it."""

    there: dict[tuple[int, str], float] = {}
    calls: list[str] = []
    fails_at = -2
    hangs: threading.Event | None = None

    def __init__(self, folder: Path, id: str) -> None:
        super().__init__(folder, id)
        self.waiting: dict[tuple[int, str], float] = {}

    def start(self, facts: Any, is_new: bool) -> None:
        self.calls.append(f"start {is_new}")
        self._may_fail(-1)

    def _may_fail(self, step: int) -> None:
        if self.hangs is not None:
            self.hangs.wait(60)
        if step == self.fails_at:
            raise OSError(28, "No space left\non device")

    def rewind(self, step: int) -> None:
        for key in [key for key in self.there if key[0] >= step]:
            del self.there[key]

    def log(self, step: int, values: Any) -> None:
        self._may_fail(step)
        for name, value in values.items():
            assert (step, name) not in {**self.there, **self.waiting}
            self.waiting[step, name] = value

    def flush(self) -> None:
        self.there.update(self.waiting)
        self.waiting.clear()

    def finish(self, went_well: bool) -> None:
        self.calls.append(f"finish {went_well}")


@pytest.fixture(params=["keeps, rewinds", "keeps", "neither"])
def notes(request: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Notes]]:
    class Own(Notes):
        there, calls = {}, []
        keeps, rewinds = "keeps" in request.param, "rewinds" in request.param

    monkeypatch.setitem(TRACKERS, "tensorboard", Own)
    yield Own
    if Own.hangs is not None:
        Own.hangs.set()


def new_tracking(folder: Path, printed: list[str] | None = None) -> Tracking:
    return Tracking(["tensorboard"], folder, {}, (printed if printed is not None else []).append).start()


def tracked(folder: Path, printed: list[str] | None = None, stop_step: int = -1) -> Any:
    """Start or resume a run with a tracker, train to a step or to the end, and return the run."""
    run = new_run(folder / "run")
    run.tracking = new_tracking(run.folder, printed)
    state = resume_state(run.last, TOKENS) if run.last.exists() else new_state(CONFIG, TOKENS)
    run.stop = stop_at(state, stop_step)
    with run.tracking.finishing():
        assert train(state, run) == (stop_step < 0)
    return run


def test_a_tracked_run_is_the_same_run(tmp_path: Path, whole: Any, notes: type[Notes]) -> None:  # noqa: F811
    tracked(tmp_path, stop_step=7)
    run = tracked(tmp_path)
    same_files(run, whole)
    assert notes.there == numbers_of(run.metrics)
    assert notes.calls == ["start True", "finish True", "start False", "finish True"]


@pytest.mark.nightly_except(3)
@pytest.mark.parametrize("at", [-1, 1, 9])
def test_a_failed_tracker_gets_missing_metrics_on_resume(tmp_path, whole, notes: type[Notes], at: int) -> None:  # noqa: F811
    notes.fails_at = at
    printed: list[str] = []
    run = tracked(tmp_path, printed)
    same_files(run, whole)
    (failure,) = [line for line in printed if "continues without this tracker" in line]
    assert re.search(r"^--track tensorboard: .*Errno 28.*--resume", failure)
    assert notes.there != numbers_of(run.metrics)
    notes.fails_at = -2
    if not notes.keeps:
        notes.there.clear()  # what such a tracker had not sent
    run = tracked(tmp_path)
    assert notes.there == numbers_of(run.metrics)


@pytest.mark.nightly_except(3)
def test_a_hanging_tracker_does_not_block_the_run(tmp_path, whole, notes: type[Notes], monkeypatch) -> None:  # noqa: F811
    for name in ("START_TIMEOUT", "TIMEOUT"):
        monkeypatch.setattr(tracking, name, 0.2)
    notes.hangs = threading.Event()
    printed: list[str] = []
    run = tracked(tmp_path, printed)
    same_files(run, whole)
    assert "did not finish" in printed.pop() and not printed
    monkeypatch.setattr(tracking, "MAX_QUEUED", 3)
    hanging = new_tracking(tmp_path, printed)
    for step in range(9):
        hanging.log([{"step": step, "loss": 1.0}])
    assert "does not respond" in printed.pop() and not printed


def test_an_error_of_the_run_is_not_replaced(tmp_path: Path, notes: type[Notes]) -> None:
    tracking_ = new_tracking(tmp_path)
    with pytest.raises(ZeroDivisionError), tracking_.finishing():
        raise ZeroDivisionError
    assert notes.calls == ["start True", "finish False"]
    assert not tracking_._workers[0].thread.is_alive()


def test_only_numbers_are_sent(tmp_path: Path, notes: type[Notes]) -> None:
    no_numbers = {"step": 2, "not_finite": "x", "on_nan": "skip"}
    tracking_ = new_tracking(tmp_path)
    with tracking_.finishing():
        tracking_.synchronize([])
        tracking_.log([{"step": 1, "loss": None, "learning_rate": 0.5}, no_numbers])
        tracking_.log([{"step": 2, "loss": float("nan"), "n": 3, "is": True}])
    assert notes.there == {(1, "learning_rate"): 0.5}


@pytest.mark.parametrize("content", ["", "[1]", "{", '{"tensorboard": 3}', '{"tensorboard": {"id": 3}}'])
def test_a_damaged_tracking_file_starts_a_new_run(tmp_path: Path, notes: type[Notes], content: str) -> None:
    (tmp_path / "tracking.json").write_text(content)
    with new_tracking(tmp_path).finishing():
        pass
    assert notes.calls[0] == "start True"
    assert len(json.loads((tmp_path / "tracking.json").read_text())["tensorboard"]["id"]) == 8
