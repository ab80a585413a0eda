"""Run a small training with a tracker in a separate process, or read what was logged with the tracker's own reader.

    python tests/tracked_run.py run FOLDER TRACKER END    END: "end", "stop-STEP", or the step at which it kills itself
    python tests/tracked_run.py read FOLDER TRACKER       prints JSON: logged rows (step, name, value) and the config

A connection to another machine ends the process with an error.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from test_training import CONFIG, TOKENS, new_run, new_task, train

from tricycle.training_state import new_state, resume_state
from tricycle_cli.trackers import check_trackers
from tricycle_cli.tracking import Tracking
from tricycle_cli.updates import evaluate_and_record

Row = tuple[int, str, float]


def run(folder: Path, tracker: str, end: str) -> None:
    check_trackers([tracker])
    run = new_run(folder)
    state = resume_state(run.last, TOKENS) if run.last.exists() else new_state(CONFIG, TOKENS)
    facts = {"n_parameters": state.model.n_parameters, **CONFIG.to_dict()}
    run.tracking = Tracking([tracker], folder, facts).start()

    def stop() -> bool:
        if end == str(state.step):
            run.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return end == f"stop-{state.step}"

    run.stop = stop
    with run.tracking.finishing():
        if train(state, run):
            loss = evaluate_and_record(state, run, new_task())
            run.record(step=state.step, final_loss=loss, final_bits_per_byte=1.5, best_step=20)
            run.flush()


# -------------------------------------------------------------------- readers
def read_tensorboard(folder: Path) -> tuple[list[Row], dict[str, Any]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    rows = [(event.step, name, event.value) for name in events.Tags()["scalars"] for event in events.Scalars(name)]
    (text,) = events.Tensors("config")
    lines = text.tensor_proto.string_val[0].decode().splitlines()[2:]
    return rows, {name.strip(): value.strip() for name, value in (line.strip("|").split("|") for line in lines)}


def wandb_records(path: Path) -> Iterator[Any]:
    """Yield the records of a .wandb file: a LevelDB log of the library's messages."""
    from wandb.proto.wandb_internal_pb2 import Record

    content, place, part = path.read_bytes(), 7, b""
    while place + 7 <= len(content):
        left = 2**15 - place % 2**15
        if left < 7:
            place += left
            continue
        _, length, kind = struct.unpack("<IHB", content[place : place + 7])
        part += content[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # a full record, or its last part
            yield Record.FromString(part)
            part = b""


def read_wandb(folder: Path) -> tuple[list[Row], dict[str, Any]]:
    rows, config, ids = {}, {}, set()
    for path in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for record in wandb_records(path):
            if record.HasField("run"):
                ids.add(record.run.run_id)
                config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
            if record.HasField("history"):
                items = {item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
                step = items.pop("_step")
                for name, value in items.items():  # a server keeps the first value
                    if not name.startswith("_"):
                        rows.setdefault((step, name), value)
    assert len(ids) == 1
    return [(step, name, value) for (step, name), value in rows.items()], config


def read_mlflow(folder: Path) -> tuple[list[Row], dict[str, Any]]:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{folder.as_posix()}/mlflow.db")
    experiment = client.get_experiment_by_name("tricycle")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED"
    assert run.info.run_name == folder.name
    rows = [
        (one.step, name, one.value)
        for name in run.data.metrics
        for one in client.get_metric_history(run.info.run_id, name)
    ]
    return rows, run.data.params


def read_trackio(folder: Path) -> tuple[list[Row], dict[str, Any]]:
    import trackio
    from trackio.sqlite_storage import SQLiteStorage

    (run,) = trackio.Api().runs("tricycle")
    rows = []
    for logged in SQLiteStorage.get_logs("tricycle", run.name):
        rows += [(logged["step"], name, value) for name, value in logged.items() if name not in ("step", "timestamp")]
    return rows, run.config


READERS = {"tensorboard": read_tensorboard, "wandb": read_wandb, "mlflow": read_mlflow, "trackio": read_trackio}


def forbid_remote_connections(event: str, words: tuple[Any, ...]) -> None:
    if event == "socket.connect" and isinstance(words[1], tuple) and words[1][0] not in ("127.0.0.1", "::1"):
        print(f"a connection to {words[1]}", file=sys.stderr, flush=True)
        os._exit(66)


def main(verb: str, folder: str, tracker: str, *end: str) -> None:
    sys.addaudithook(forbid_remote_connections)
    if verb == "run":
        run(Path(folder), tracker, *end)
    else:
        rows, config = READERS[tracker](Path(folder))
        print("READ " + json.dumps({"rows": rows, "config": config}))


if __name__ == "__main__":
    main(*sys.argv[1:])
