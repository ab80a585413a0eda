"""Experiment trackers for --track: a class for each library, listed in `TRACKERS`.

By default all data stay on the machine; a user's settings of a library can send them to a server. Usage and error
reports of the libraries are disabled unless the user's environment enables them.
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
from typing import Any, ClassVar
from urllib.parse import urlsplit

from tricycle.configs.validated import OneOf
from tricycle_cli.databases import sqlite_url

PROJECT = "tricycle"
MAX_PARAMS = 100  # of one request to MLflow


class Tracker:
    """The base class of trackers; a run calls all methods from one thread.

    Attributes:
        settings: default values of environment variables of the library.
        storage: where the tracker stores a run by default; docs/tracking.md lists it.
        keeps: logged values survive a kill of the process; else `finish` stores them.
        rewinds: the tracker can delete the values after a step.
        id: the id of the run in the tracker; a resumed run has the same id.
        where: the command or address for viewing the run.
    """

    settings: ClassVar[Mapping[str, str]] = {}
    storage: ClassVar[str] = ""
    keeps = False
    rewinds = False

    def __init__(self, folder: Path, id: str) -> None:
        self.folder, self.id = folder, id
        self.where = ""

    def start(self, run_settings: Mapping[str, Any], is_new: bool) -> None:
        """Start a run with these settings if `is_new`, or else resume the run of this id; by default do nothing."""

    def rewind(self, step: int) -> None:
        """Delete the values of this step and of later steps; by default do nothing."""

    def has(self, step: int, name: str) -> bool:
        """Return whether the tracker is known to have this value already; by default False."""
        return False

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of one step, by name; by default do nothing."""

    def flush(self) -> None:
        """Send or write the logged values; by default do nothing."""

    def finish(self, went_well: bool) -> None:
        """End the run, as failed unless `went_well`, after which no calls are allowed; by default do nothing."""


class TensorBoard(Tracker):
    """Write event files for TensorBoard with its record writer."""

    storage = "`tensorboard/` in the run folder"
    keeps = rewinds = True

    def start(self, run_settings: Mapping[str, Any], is_new: bool) -> None:
        """Open a new event file in the run folder's `tensorboard`, and write the settings to it if the run is new."""
        from tensorboard.plugins.text.summary import text_pb
        from tensorboard.summary.writer.record_writer import RecordWriter

        folder = self.folder / "tensorboard"
        folder.mkdir(exist_ok=True)
        # a file for each session: TensorBoard reads files in the order of their names
        now = time.time_ns()
        name = f"events.out.tfevents.{now // 10**9:010d}.{now % 10**9:09d}.{socket.gethostname()}.{os.getpid()}"
        self._file = (folder / name).open("ab")
        self._records = RecordWriter(self._file)
        self._write(file_version="brain.Event:2")
        if is_new:
            rows = [f"| {name} | {value} |" for name, value in run_settings.items()]
            self._write(summary=text_pb("config", "\n".join(["| field | value |", "|:---|:---|", *rows])))
        self.flush()
        self.where = f"tensorboard --logdir {shlex.quote(str(folder))}"

    def _write(self, **fields: Any) -> None:
        """Append an event with the present time to the event file, without a flush."""
        from tensorboard.compat.proto.event_pb2 import Event

        self._records.write(Event(wall_time=time.time(), **fields).SerializeToString())

    def rewind(self, step: int) -> None:
        """Write a session start, with which TensorBoard discards values from this step on."""
        from tensorboard.compat.proto.event_pb2 import SessionLog

        self._write(step=step, session_log=SessionLog(status=SessionLog.START))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Write the values of one step as scalars."""
        from tensorboard.compat.proto.summary_pb2 import Summary

        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._write(step=step, summary=Summary(value=scalars))

    def flush(self) -> None:
        """Flush the event file."""
        self._file.flush()

    def finish(self, went_well: bool) -> None:
        """Close the event file; `went_well` is ignored."""
        self._file.close()


class WandB(Tracker):
    """Log to Weights & Biases."""

    storage = "`wandb/` in the run folder, offline mode"
    settings = {"WANDB_ERROR_REPORTING": "false"}

    def start(self, run_settings: Mapping[str, Any], is_new: bool) -> None:
        """Start or resume a W&B run, offline without login or WANDB_MODE; set `where` to its URL or a sync command."""
        import wandb

        mode: Any = os.environ.get("WANDB_MODE") or ("online" if logged_in_to_wandb() else "offline")
        self._run = wandb.init(
            project=os.environ.get("WANDB_PROJECT", PROJECT),
            id=self.id,
            name=self.folder.name,
            dir=os.environ.get("WANDB_DIR", str(self.folder)),
            config=dict(run_settings),
            mode=mode,
            resume="allow",
            settings=wandb.Settings(silent=True, console="off"),
        )
        self._first = self._run.step  # the first step that the server does not have
        sync = f"upload with `wandb sync {shlex.quote(str(Path(self._run.dir).parent))}`"
        self.where = sync if self._run.settings.mode == "offline" else f"{self._run.url}"

    def has(self, step: int, name: str) -> bool:
        """Return whether the run had this step, with any values, when it was resumed; `name` is ignored."""
        return step < self._first

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Log the values of one step."""
        self._run.log(dict(values), step=step)

    def finish(self, went_well: bool) -> None:
        """End the run, with exit code 0 if `went_well`, else 1."""
        self._run.finish(exit_code=0 if went_well else 1)


def logged_in_to_wandb() -> bool:
    """Return whether WANDB_API_KEY is set, or the netrc file has an entry for the server of Weights & Biases."""
    if os.environ.get("WANDB_API_KEY"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False


class MLflow(Tracker):
    """Log to MLflow."""

    storage = "`mlflow.db` in the run folder (SQLite)"
    settings = {
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",  # by default an unreachable server is retried for minutes
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
    }
    keeps = True

    def start(self, run_settings: Mapping[str, Any], is_new: bool) -> None:
        """Create an MLflow run (by default in the run folder's mlflow.db), set `id`, log the settings; or resume it."""
        from mlflow import MlflowClient
        from mlflow.entities import Param, RunStatus

        for name in ("alembic", "mlflow"):  # no messages about the set-up of the database
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
            params = [Param(name, str(value)[:500]) for name, value in run_settings.items()]
            for first in range(0, len(params), MAX_PARAMS):
                client.log_batch(self.id, params=params[first : first + MAX_PARAMS])
        else:
            client.update_run(self.id, RunStatus.to_string(RunStatus.RUNNING))
        self._waiting: list[Any] = []
        self.where = elsewhere or f"mlflow ui --backend-store-uri {shlex.quote(address)}"

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Buffer the values of one step until `flush`."""
        from mlflow.entities import Metric

        now = time.time_ns() // 10**6
        self._waiting += [Metric(name, value, now, step) for name, value in values.items()]

    def flush(self) -> None:
        """Send the buffered values, and empty the buffer."""
        while self._waiting:
            self._client.log_batch(self.id, metrics=self._waiting[:1000])  # the maximum of one request
            del self._waiting[:1000]

    def finish(self, went_well: bool) -> None:
        """End the run with the status FINISHED if `went_well`, else KILLED."""
        self._client.set_terminated(self.id, "FINISHED" if went_well else "KILLED")


class Trackio(WandB):
    """Log to Trackio, whose functions are those of wandb."""

    storage = "Trackio's folder (`TRACKIO_DIR`)"
    settings = {"GRADIO_ANALYTICS_ENABLED": "False", "HF_HUB_DISABLE_TELEMETRY": "1"}

    def start(self, run_settings: Mapping[str, Any], is_new: bool) -> None:
        """Start or resume the run in Trackio; if local, read the values that it has, so that they are not resent."""
        import trackio
        from trackio.sqlite_storage import SQLiteStorage

        project = os.environ.get("TRACKIO_PROJECT", PROJECT)
        name = f"{self.folder.name}-{self.id}"  # Trackio identifies runs by name
        elsewhere = os.environ.get("TRACKIO_SPACE_ID") or os.environ.get("TRACKIO_SERVER_URL")
        rows = [] if is_new or elsewhere else SQLiteStorage.get_logs(project, name)
        self._known = {(row["step"], key) for row in rows for key in row}
        options: Any = {"resume": "allow", "embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        self._run = trackio.init(project, name=name, config=dict(run_settings), **options)
        self.where = elsewhere or f"trackio show --project {shlex.quote(project)}"

    def has(self, step: int, name: str) -> bool:
        """Return whether local Trackio had this value when the run was resumed; False for a Space or server."""
        return (step, name) in self._known

    def finish(self, went_well: bool) -> None:
        """End the run; `went_well` is ignored."""
        self._run.finish()


# By name, which is the name of the library and of the extra that installs it.
TRACKERS: dict[str, type[Tracker]] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow, "trackio": Trackio}
NAMES = tuple(TRACKERS)
TrackerName = OneOf[str, NAMES]


def check_trackers(names: Sequence[str]) -> None:
    """Raise ValueError for an unknown tracker, ModuleNotFoundError if it is not installed; disable usage reports."""
    for name in names:
        if name not in NAMES:
            raise ValueError(f"expected --track to be of {', '.join(NAMES)}, got {name!r}")
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:  # a folder of that name, which trackers create, is no library
            install = f'pip install "tricycle-gpt[{name}]"'
            raise ModuleNotFoundError(f"--track {name} needs a library that is not installed: {install}", name=name)
        for variable, value in TRACKERS[name].settings.items():
            os.environ.setdefault(variable, value)
