"""Other people's trackers of experiments: what each is told of a run, and where it keeps that.

Nothing leaves the machine unless the user's own settings of a library say so, and what some of them report about their
use or their errors is switched off unless the user has switched it on.
"""

from __future__ import annotations

import importlib.util
import logging
import netrc
import os
import shlex
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args
from urllib.parse import urlsplit

from tricycle_cli.databases import sqlite_url

TrackerName = Literal["tensorboard", "wandb", "mlflow", "trackio"]
NAMES: tuple[str, ...] = get_args(TrackerName)
PROJECT = "tricycle"
MOST_PARAMS = 100  # that MLflow takes at once
# What the libraries would tell their makers, and how long one waits for a server that is not there.
UNLESS_SET = {
    "WANDB_ERROR_REPORTING": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
    "GRADIO_ANALYTICS_ENABLED": "False",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}


class Tracker:
    """What a run tells a tracker. All calls come from one thread.

    Attributes:
        id: under which the tracker knows the run; kept in the run's folder, so that it is gone on with.
        keeps: what has been logged is kept even where the process is killed; else only after `finish`.
        rewinds: it can forget what came after a step.
        where: for people.
    """

    keeps = False
    rewinds = False

    def __init__(self, folder: Path, id: str) -> None:
        self.folder, self.id = folder, id
        self.where = ""

    def start(self, facts: Mapping[str, Any], is_new: bool) -> None:
        """Begin a run, or go on with the one of this id."""

    def rewind(self, step: int) -> None:
        """Forget what was logged of this step and later ones."""

    def has(self, step: int, name: str) -> bool:
        """Whether the tracker knows a value already, as far as it can tell."""
        return False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Numbers of one step."""

    def flush(self) -> None:
        """Hand on what was logged."""

    def finish(self, went_well: bool) -> None:
        """The last call."""


class TensorBoard(Tracker):
    """Event files in the run's folder, by TensorBoard's own writer of records."""

    keeps = rewinds = True

    def start(self, facts: Mapping[str, Any], is_new: bool) -> None:
        from tensorboard.plugins.text.summary import text_pb
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder = self.folder / "tensorboard"
        folder.mkdir(exist_ok=True)
        # a file for each sitting: they are read in the order of their names
        now = time.time_ns()
        name = f"events.out.tfevents.{now // 10**9:010d}.{now % 10**9:09d}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("ab")
        self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        if is_new:
            rows = [f"| {name} | {value} |" for name, value in facts.items()]
            self._write(summary=text_pb("config", "\n".join(["| field | value |", "|:---|:---|", *rows])))
        self.flush()
        self.where = f"tensorboard --logdir {shlex.quote(str(folder))}"

    def _write(self, **fields: Any) -> None:
        from tensorboard.compat.proto.event_pb2 import Event

        self._records.write(Event(wall_time=time.time(), **fields).SerializeToString())

    def rewind(self, step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._write(step=step, session_log=SessionLog(status=SessionLog.START))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step=step, summary=Summary(value=scalars))

    def flush(self) -> None:
        self._file.flush()

    def finish(self, went_well: bool) -> None:
        self._file.close()


class WandB(Tracker):
    """Weights & Biases: offline, in the run's folder, unless WANDB_MODE says otherwise or the user is logged in."""

    def start(self, facts: Mapping[str, Any], is_new: bool) -> None:
        import wandb

        mode: Any = os.environ.get("WANDB_MODE") or ("online" if logged_in_to_wandb() else "offline")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=self.id,
            name=self.folder.name,
            dir=os.environ.get("WANDB_DIR", str(self.folder)),
            config=dict(facts),
            mode=mode,
            resume="allow",
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._first = self._run.step  # that its server does not know yet
        is_offline = self._run.settings.mode == "offline"
        self.where = (
            f"`wandb sync {shlex.quote(str(Path(self._run.dir).parent))}` would send it"
            if is_offline
            else f"{self._run.url}"
        )

    def has(self, step: int, name: str) -> bool:
        return step < self._first

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, went_well: bool) -> None:
        self._run.finish(exit_code=0 if went_well else 1)


def logged_in_to_wandb() -> bool:
    """Whether this user has said to that library who they are."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


class MLflow(Tracker):
    """A database in the run's folder, unless MLFLOW_TRACKING_URI names a server or another place."""

    keeps = True

    def start(self, facts: Mapping[str, Any], is_new: bool) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param, RunStatus

        for name in ("alembic", "mlflow"):  # how a database is set up is no news
            logging.getLogger(name).setLevel(logging.WARNING)
        elsewhere = os.environ.get("MLFLOW_TRACKING_URI")
        address = elsewhere or sqlite_url(self.folder / "mlflow.db")
        self._client = client = MlflowClient(address)
        if is_new:
            name = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
            known = client.get_experiment_by_name(name)
            artifacts = None if elsewhere else (self.folder.resolve() / "mlflow-artifacts").as_uri()
            experiment = known.experiment_id if known else client.create_experiment(name, artifacts)
            self.id = client.create_run(experiment, run_name=self.folder.name).info.run_id
            params = [Param(name, str(value)[:500]) for name, value in facts.items()]
            for first in range(0, len(params), MOST_PARAMS):
                client.log_batch(self.id, params=params[first : first + MOST_PARAMS])
        else:
            client.update_run(self.id, RunStatus.to_string(RunStatus.RUNNING))
        self._waiting: list[Any] = []
        self.where = elsewhere or f"mlflow ui --backend-store-uri {shlex.quote(address)}"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        from mlflow.entities import Metric

        now = time.time_ns() // 10**6
        self._waiting += [Metric(name, value, now, step) for name, value in values.items()]

    def flush(self) -> None:
        while self._waiting:
            self._client.log_batch(self.id, metrics=self._waiting[:1000])  # the most that it takes at once
            del self._waiting[:1000]

    def finish(self, went_well: bool) -> None:
        self._client.set_terminated(self.id, "FINISHED" if went_well else "KILLED")


class Trackio(Tracker):
    """Trackio's own folder (TRACKIO_DIR), where `trackio show` looks, unless TRACKIO_SPACE_ID or _SERVER_URL is set."""

    def start(self, facts: Mapping[str, Any], is_new: bool) -> None:
        import trackio

        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        name = f"{self.folder.name}-{self.id}"  # it knows runs by their names
        elsewhere = os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL")
        self._known = set() if is_new or elsewhere else self._logged(project, name)
        self._run = trackio.init(
            project,
            name=name,
            config=dict(facts),
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )
        self.where = elsewhere or f"trackio show --project {shlex.quote(project)}"

    @staticmethod
    def _logged(project: str, name: str) -> set[tuple[int, str]]:
        """Steps and names of what a run has in its database."""
        from trackio.sqlite_storage import SQLiteStorage

        return {(row["step"], key) for row in SQLiteStorage.get_logs(project, name) for key in row}

    def has(self, step: int, name: str) -> bool:
        return (step, name) in self._known

    def log(self, step: int, values: Mapping[str, float]) -> None:
        self._run.log(dict(values), step=step)

    def finish(self, went_well: bool) -> None:
        self._run.finish()


TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": TensorBoard,
    "wandb": WandB,
    "mlflow": MLflow,
    "trackio": Trackio,
}


def expect_trackers(names: Sequence[str]) -> None:
    """
    Raises:
        ValueError: a name that is none.
        ModuleNotFoundError: a library that is not installed; says how to install it.
    """
    for name in names:
        if name not in NAMES:
            raise ValueError(f"expected --track to be of {', '.join(NAMES)}, got {name!r}")
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # a folder of that name, as these leave some, is no library
            install = f'pip install "tricycle-gpt[{name}]"'
            raise ModuleNotFoundError(f"--track {name} needs a library that is not installed: {install}", name=name)
    for name, value in UNLESS_SET.items() if names else ():
        os.environ.setdefault(name, value)
