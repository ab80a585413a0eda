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
from test_programs import QUICK, TRAIN, cache, call, good, lines_without_progress_bars, text  # noqa: F401 (fixtures)
from test_training import CONFIG, TOKENS, new_run, same_files, stop_at, train, whole  # noqa: F401 (fixtures)

from tricycle.training_state import new_state, resume_state
from tricycle_cli import trackers, tracking
from tricycle_cli.run import read_metrics
from tricycle_cli.trackers import NAMES, TRACKERS, Tracker, check_trackers, logged_in_to_wandb
from tricycle_cli.tracking import Tracking

PROGRAM = Path(__file__).with_name("tracked_run.py")
POSIX_ONLY = pytest.mark.skipif(os.name != "posix", reason="SIGKILL")
# A home folder without settings of the user, and a folder for logs.
FOREIGN = ("WANDB_", "MLFLOW_", "TRACKIO_", "NETRC", "HF_")


def numbers_of(path: Path) -> dict[tuple[int, str], float]:
    lines = read_metrics(path)
    numbers = {
        (line["step"], name): value
        for line in lines
        for name, value in line.items()
        if name != "step" and type(value) in (int, float)
    }
    assert len(numbers) == sum(type(value) in (int, float) for line in lines for value in line.values()) - len(lines)
    return numbers


# -------------------------------------------------------------------- the real libraries
def process(folder: Path, *words: str) -> subprocess.CompletedProcess:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    home = folder.parent / "home"
    home.mkdir(exist_ok=True)
    folders = {"HOME": str(home), "USERPROFILE": str(home), "TRACKIO_DIR": str(folder.parent / "trackio")}
    return subprocess.run(
        [sys.executable, str(PROGRAM), words[0], str(folder), *words[1:]],
        env={**clean, **folders, "PYTHONPATH": str(PROGRAM.parent)},
        capture_output=True,
        text=True,
        timeout=240,
        cwd=folder.parent,
    )


def has(name: str) -> None:
    pytest.importorskip(name)
    if name == "mlflow":
        pytest.importorskip("sqlalchemy")
        pytest.importorskip("alembic")


def read(folder: Path, name: str) -> tuple[dict[tuple[int, str], float], dict[str, Any]]:
    done = process(folder, "read", name)
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("READ ")]
    found = json.loads(line.removeprefix("READ "))
    rows = {(step, key): value for step, key, value in found["rows"]}
    assert len(rows) == len(found["rows"]), "something was logged twice"
    return rows, found["config"]


def same(rows: dict[tuple[int, str], float], metrics: Path, name: str, but: str = "") -> None:
    expected = numbers_of(metrics)
    assert rows.keys() == expected.keys()
    exact = np.float32 if name == "tensorboard" else float  # which keeps 32 bits
    assert {key: value for key, value in rows.items() if exact(expected[key]) != value and key[1] != but} == {}


@pytest.mark.slow
@POSIX_ONLY
@pytest.mark.parametrize("name", NAMES)
def test_trackers_have_the_content_of_the_metrics(name: str, tmp_path: Path) -> None:
    """A run that is killed, gone on with, stopped, and gone on with to its end, by the library's own reader."""
    has(name)
    folder = tmp_path / "a run"
    killed = process(folder, "run", name, "8")
    assert killed.returncode == -9, killed.stderr
    for end in ("stop-13", "end"):
        done = process(folder, "run", name, end)
        assert done.returncode == 0, done.stderr
        assert "continues without this tracker" not in done.stdout + done.stderr
    rows, config = read(folder, name)
    assert len(rows) == 4 * 20 + 2 * 4 + 3
    # what was logged before the kill, some cannot log again
    same(rows, folder / "metrics.jsonl", name, "" if name == "tensorboard" else "tokens_per_second")
    assert {key: str(value) for key, value in config.items()}.items() >= {("embedding_dim", "8"), ("seed", "3")}


@pytest.mark.slow
@POSIX_ONLY
@pytest.mark.parametrize("name", NAMES)
def test_a_tracker_added_later_gets_all_metrics(name: str, tmp_path: Path) -> None:
    has(name)
    folder = tmp_path / "run"
    train(new_state(CONFIG, TOKENS), new_run(folder))
    before = numbers_of(folder / "metrics.jsonl")
    done = process(folder, "run", name, "end")
    assert done.returncode == 0, done.stderr
    assert numbers_of(folder / "metrics.jsonl").items() >= before.items()
    same(read(folder, name)[0], folder / "metrics.jsonl", name)


def test_an_unreachable_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has("mlflow")
    folder = tmp_path / "run"
    monkeypatch.setattr(sys.modules[__name__], "FOREIGN", ())
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    done = process(folder, "run", "mlflow", "end")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("--track mlflow: ") == 1
    assert done.stdout.count("continues without this tracker") == 1
    assert len(read_metrics(folder / "metrics.jsonl")) == 20 + 4 + 1


# -------------------------------------------------------------------- the programs
@pytest.mark.slow
def test_track_flag_adds_and_removes_trackers_of_a_run(tmp_path: Path, cache: Path, text: Path) -> None:  # noqa: F811
    """One run, without a tracker at first; it has one from --resume on, and then none any more."""
    has("tensorboard")
    folder = tmp_path / "run"
    words = [TRAIN, *QUICK, "--sample-interval", "0", "--data", "text", "--files", text, "--run-folder", folder]
    good(call(*words, "--track", "tensorboard"))
    assert json.loads((folder / "data.json").read_text())["track"] == ["tensorboard"]
    same(read(folder, "tensorboard")[0], folder / "metrics.jsonl", "tensorboard")
    files = sorted((folder / "tensorboard").iterdir())
    good(call(TRAIN, "--resume", folder))
    assert len(sorted((folder / "tensorboard").iterdir())) == len(files) + 1
    same(read(folder, "tensorboard")[0], folder / "metrics.jsonl", "tensorboard")
    good(call(TRAIN, "--resume", folder, "--track"))
    assert len(sorted((folder / "tensorboard").iterdir())) == len(files) + 1
    assert json.loads((folder / "data.json").read_text()).get("track", []) == []


NOT_THERE = """
import importlib.util, runpy, sys
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name in ("wandb", "trackio") else real(name, *more)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.parametrize("words", [("--preset", "debug"), ("--resume", "RUN")])
def test_a_missing_library_is_reported_before_any_work(tmp_path: Path, words: tuple[str, str]) -> None:
    folder = tmp_path / "run"
    if "--resume" in words:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(CONFIG.to_dict()))
        (folder / "data.json").write_text(json.dumps({"data": "python", "files": [], "track": ["wandb"]}))
    words = [str(folder) if word == "RUN" else word for word in words]
    more = [] if "--resume" in words else ["--run-folder", str(folder), "--track", "wandb"]
    done = call("-c", NOT_THERE, TRAIN, *words, *more)
    assert done.returncode == 1
    (message,) = lines_without_progress_bars(done.stderr)
    assert re.search(r"^train_smol_gpt\.py: --track wandb .*tricycle-gpt\[wandb\]", message)
    assert not (folder / "metrics.jsonl").exists()


def test_unknown_trackers_are_refused(tmp_path: Path) -> None:
    done = call(TRAIN, "--track", "paper")
    assert done.returncode == 2
    assert "tensorboard" in "".join(lines_without_progress_bars(done.stderr))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG.to_dict()))
    (tmp_path / "data.json").write_text(json.dumps({"data": "python", "files": [], "track": ["paper"]}))
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


def tracked(run: Any, printed: list[str] | None = None) -> Any:
    run.tracking = Tracking(["tensorboard"], run.folder, {}, (printed if printed is not None else []).append).start()
    return run


def test_a_tracked_run_is_the_same_run(tmp_path: Path, whole: Any, notes: type[Notes]) -> None:  # noqa: F811
    state, run = new_state(CONFIG, TOKENS), tracked(new_run(tmp_path / "run"))
    run.stop = stop_at(state, 7)
    with run.tracking.finishing():
        assert not train(state, run)
    state, run = resume_state(run.last, TOKENS), tracked(new_run(tmp_path / "run"))
    with run.tracking.finishing():
        assert train(state, run)
    same_files(run, whole)
    assert notes.there == numbers_of(run.metrics)
    assert notes.calls == ["start True", "finish True", "start False", "finish True"]


@pytest.mark.slow_except(3)
@pytest.mark.parametrize("at", [-1, 1, 9])
def test_a_failed_tracker_gets_missing_metrics_on_resume(
    tmp_path: Path,
    whole: Any,  # noqa: F811
    notes: type[Notes],
    at: int,
) -> None:
    notes.fails_at = at
    printed: list[str] = []
    state, run = new_state(CONFIG, TOKENS), tracked(new_run(tmp_path / "run"), printed)
    with run.tracking.finishing():
        assert train(state, run)
    same_files(run, whole)
    (failure,) = [line for line in printed if "continues without this tracker" in line]
    assert re.search(r"^--track tensorboard: .*Errno 28.*--resume", failure)
    assert notes.there != numbers_of(run.metrics)
    notes.fails_at = -2
    if not notes.keeps:
        notes.there.clear()  # what such a tracker had not sent
    state, run = resume_state(run.last, TOKENS), tracked(new_run(tmp_path / "run"))
    with run.tracking.finishing():
        train(state, run)
    assert notes.there == numbers_of(run.metrics)


@pytest.mark.slow_except(3)
def test_a_hanging_tracker_does_not_block_the_run(
    tmp_path: Path,
    whole: Any,  # noqa: F811
    notes: type[Notes],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("START_TIMEOUT", "TIMEOUT"):
        monkeypatch.setattr(tracking, name, 0.2)
    notes.hangs = threading.Event()
    printed: list[str] = []
    state, run = new_state(CONFIG, TOKENS), tracked(new_run(tmp_path / "run"), printed)
    with run.tracking.finishing():
        assert train(state, run)
    same_files(run, whole)
    assert len(printed) == 1
    assert "did not finish" in printed[0]


def test_the_queue_of_a_hanging_tracker_is_bounded(
    tmp_path: Path, notes: type[Notes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "START_TIMEOUT", 0.01)
    monkeypatch.setattr(tracking, "MAX_QUEUED", 3)
    notes.hangs = threading.Event()
    printed: list[str] = []
    tracking_ = Tracking(["tensorboard"], tmp_path, {}, printed.append).start()
    for step in range(9):
        tracking_.log([{"step": step, "loss": 1.0}])
    assert len(printed) == 1
    assert "does not respond" in printed[0]


def test_an_error_of_the_run_is_not_replaced(tmp_path: Path, notes: type[Notes]) -> None:
    tracking_ = Tracking(["tensorboard"], tmp_path, {}, lambda line: None).start()
    with pytest.raises(ZeroDivisionError), tracking_.finishing():
        raise ZeroDivisionError
    assert notes.calls == ["start True", "finish False"]
    assert not tracking_._workers[0].thread.is_alive()


def test_only_numbers_are_sent(tmp_path: Path, notes: type[Notes]) -> None:
    tracking_ = Tracking(["tensorboard"], tmp_path, {}, lambda line: None).start()
    with tracking_.finishing():
        tracking_.synchronize([])
        tracking_.log(
            [{"step": 1, "loss": None, "learning_rate": 0.5}, {"step": 2, "not_finite": "x", "on_nan": "skip"}]
        )
        tracking_.log([{"step": 2, "loss": float("nan"), "n": 3, "is": True}])
    assert notes.there == {(1, "learning_rate"): 0.5}


@pytest.mark.parametrize("content", ["", "[1]", "{", '{"tensorboard": 3}', '{"tensorboard": {"id": 3}}'])
def test_a_damaged_tracking_file_starts_a_new_run(tmp_path: Path, notes: type[Notes], content: str) -> None:
    (tmp_path / "tracking.json").write_text(content)
    with Tracking(["tensorboard"], tmp_path, {}, lambda line: None).start().finishing():
        pass
    assert notes.calls[0] == "start True"
    assert len(json.loads((tmp_path / "tracking.json").read_text())["tensorboard"]["id"]) == 8
