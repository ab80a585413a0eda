"""The run comparison page: its data matches the run folders, also damaged and incomplete ones."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_look import call, serving
from test_training import CONFIG, TOKENISER, TOKENS, new_run, stop_at, train

from tricycle.configs import DebugConfig
from tricycle.training_state import new_state
from tricycle_cli import compare, look
from tricycle_cli.compare import Runs, are_runs, read_run, short_names
from tricycle_lab.look.runs import MAX_POINTS, RunData, compare_runs, config_differences


def write_run(folder: Path, n_steps: int = 40, finished: bool = True, seed: int = 0, **changes: Any) -> Path:
    """Write a run folder as a training run would, without training."""
    config = DebugConfig(steps=40, eval_interval=10, seed=seed, **changes)
    folder.mkdir(parents=True)
    tokens = config.batch_size * config.context_window * config.accumulation_steps
    rng = np.random.default_rng(seed)
    lines: list[dict[str, Any]] = []
    for step in range(1, n_steps + 1):
        loss = 2 + 4 / step**0.5 * (1 + config.max_learning_rate) + 0.1 * float(rng.standard_normal())
        lines.append({"step": step, "loss": loss, "learning_rate": 1e-3, "tokens_per_second": tokens * (2 + seed)})
        if step % 10 == 0:
            lines.append({"step": step, "held_out_loss": loss, "bits_per_byte": 0.5 * loss})
    if finished:
        lines.append({"step": n_steps, "final_loss": 2.5, "final_bits_per_byte": 1.25, "best_step": n_steps})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "config.json").write_text(json.dumps(config.to_dict()))
    (folder / "data.json").write_text(json.dumps({"data": "python", "files": [], "corpus": "abc"}))
    (folder / "tokeniser.json").write_text(f"{config.vocab_size}")
    samples = [f"--- sample at step {step}\ndef f(x):\n    return <b>{step}</b>\n" for step in range(10, n_steps, 10)]
    (folder / "samples.txt").write_text("".join(samples))
    return folder


@pytest.fixture
def two(tmp_path: Path) -> list[Path]:
    return [write_run(tmp_path / "a"), write_run(tmp_path / "b", 25, False, 1, n_layers=3, max_learning_rate=0.01)]


def compare_folders(folders: list[Path]) -> dict[str, Any]:
    names = short_names(folders)
    return compare_runs([read_run(folder, name) for folder, name in zip(folders, names)])


# -------------------------------------------------------------------- data of the page
def test_curves_summary_and_differences_match_the_run_folders(two: list[Path]) -> None:
    data = compare_folders(two)
    a, b = data["runs"]
    assert (a["name"], b["name"]) == ("a", "b")
    assert a["training"]["step"] == list(range(1, 41))
    assert a["training"]["seconds"] == [step / 2 for step in range(1, 41)]  # two steps per second
    assert b["training"]["seconds"][2] == 1.0
    assert a["heldOut"]["step"] == [10, 20, 30, 40]
    assert a["heldOut"]["seconds"] == [5, 10, 15, 20]
    assert a["bitsPerNat"] == 0.5
    assert a["summary"] == {
        "state": "finished",
        "nParameters": None,
        "tokens": 40 * a["tokensPerStep"],
        "seconds": 20.0,
        "tokensPerSecond": 2 * a["tokensPerStep"],
        "bestStep": a["summary"]["bestStep"],
        "bestLoss": min(line["held_out_loss"] for line in read_lines(two[0]) if "held_out_loss" in line),
        "bestBitsPerByte": min(line["bits_per_byte"] for line in read_lines(two[0]) if "bits_per_byte" in line),
        "finalLoss": 2.5,
        "finalBitsPerByte": 1.25,
    }
    assert (b["summary"]["state"], b["summary"]["finalLoss"]) == ("step 25 of 40", None)
    assert {row["field"]: row["values"] for row in data["differences"]} == {
        "n_layers": ["2", "3"],
        "max_learning_rate": [f"{DebugConfig().max_learning_rate:g}", "0.01"],
        "seed": ["0", "1"],
    }
    assert data["unit"] == "bits"
    assert data["notes"] == []
    assert [sample["title"] for sample in a["samples"]] == [f"sample at step {step}" for step in (10, 20, 30)]
    assert a["samples"][0]["text"] == "def f(x):\n    return <b>10</b>"


def read_lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_head_scores_are_shown_for_runs_that_have_them(two: list[Path]) -> None:
    lines = read_lines(two[0])
    for i, line in enumerate(line for line in lines if "held_out_loss" in line):
        line |= {"induction_score": 0.1 * i, "previous_token_score": "bad"}
    (two[0] / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    data = compare_folders(two)
    scored, plain = (run["heldOut"] for run in data["runs"])
    assert data["scores"] == ["induction_score"]
    assert scored["scores"] == {"induction_score": [0.1 * i for i in range(4)]}
    assert scored["step"] == [10, 20, 30, 40] and plain["scores"] == {}


def test_folders_written_by_training_can_be_compared(tmp_path: Path) -> None:
    """Compare run folders that training wrote."""
    folders = []
    for name, step in (("complete", 20), ("partial", 9)):
        state, run = new_state(CONFIG, TOKENS), new_run(tmp_path / name)
        run.stop = stop_at(state, step)
        train(state, run)
        (run.folder / "config.json").write_text(json.dumps(CONFIG.to_dict()))
        (run.folder / "data.json").write_text(json.dumps({"data": "text", "files": []}))
        TOKENISER.save(run.folder / "tokeniser.json")
        folders.append(run.folder)
    complete, partial = compare_folders(folders)["runs"]
    assert complete["training"]["step"] == list(range(1, 21))
    assert partial["training"]["step"] == list(range(1, 10))
    assert complete["training"]["loss"][:9] == partial["training"]["loss"]
    assert complete["summary"]["nParameters"] == partial["summary"]["nParameters"] == state.model.n_parameters
    assert complete["training"]["seconds"][-1] > 0


def test_damaged_lines_are_skipped_and_reported(two: list[Path]) -> None:
    path = two[0] / "metrics.jsonl"
    lines = path.read_text().splitlines()
    lines[3] = "\x00" * 30
    lines[7] = lines[7][:20]
    lines[9] = '{"step": 10, "loss": "low"}'
    path.write_text("\n".join(lines) + '\n{"step": 41, "lo')
    (two[1] / "samples.txt").write_bytes(b"\xff\xfe--- sample\n\xff")
    (two[1] / "data.json").write_text("{")
    data = compare_folders(two)
    assert re.search(r"^a: 4 damaged lines.*metrics\.jsonl", data["notes"][-1])
    assert 4 not in data["runs"][0]["training"]["step"]
    assert data["runs"][0]["training"]["seconds"][-1] == 20.0  # skipped lines do not change the time
    json.dumps(data, allow_nan=False)


def test_runs_with_missing_files_are_shown_with_notes(two: list[Path]) -> None:
    for name in ("metrics.jsonl", "samples.txt", "tokeniser.json"):
        (two[0] / name).unlink()
    data = compare_folders(two)
    assert any(note.startswith("a: no training loss") for note in data["notes"])
    assert data["runs"][0]["training"]["step"] == []
    assert data["runs"][0]["summary"]["state"] == "step 0 of 40"
    assert data["runs"][0]["samples"] == []
    assert data["unit"] == "nats"
    assert Runs(two).page()


def test_different_vocabularies_and_texts_are_reported(two: list[Path]) -> None:
    (two[1] / "tokeniser.json").write_text("another")
    (two[1] / "data.json").write_text(json.dumps({"data": "text", "files": [], "corpus": "other"}))
    notes = compare_folders(two)["notes"]
    assert "bits/byte" in notes[0]
    assert "texts" in notes[1]


def test_fine_tuning_runs_have_no_time_axis(two: list[Path]) -> None:
    flags = {"rank": 8, "method": "lora"}
    (two[1] / "data.json").write_text(json.dumps({"data": [], "corpus": "abc", "arguments": flags}))
    data = compare_folders(two)
    assert data["runs"][1]["training"]["seconds"] == []
    assert data["runs"][1]["summary"]["seconds"] is None
    assert ["", "8"] in [row["values"] for row in data["differences"] if row["field"] == "rank"]
    assert "x-axis steps" in data["notes"][-1]


def test_nonfinite_losses_are_skipped(two: list[Path]) -> None:
    with (two[0] / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "not_finite": "the loss is nan", "on_nan": "skip"}\n')
        file.write('{"step": 42, "loss": NaN, "tokens_per_second": 0}\n{"step": 43, "held_out_loss": Infinity}\n')
        file.write('{"step": 44, "held_out_loss": 1e-320, "bits_per_byte": 1e308}\n{"step": 1%s}\n' % (30 * "0"))
        file.write(
            '{"step": 45, "held_out_loss": 0.1, "bits_per_byte": NaN}\n{"step": 46, "loss": 1%s}\n' % (400 * "0")
        )
    json.dumps(compare_folders(two), allow_nan=False)


def test_long_curves_are_downsampled() -> None:
    lines = [{"step": step, "loss": float(step % 2), "tokens_per_second": 10.0} for step in range(1, 10_001)]
    curve = compare_runs([RunData("a", {}, lines, tokens_per_step=10)])["runs"][0]["training"]
    assert len(curve["step"]) <= MAX_POINTS
    assert curve["step"][-1] == 10_000
    assert curve["seconds"][-1] == 10_000
    assert abs(np.mean(curve["loss"]) - 0.5) < 0.1


def test_config_differences_list_fields_that_differ() -> None:
    found = config_differences([{"a": 1, "b": 0.1, "c": "x"}, {"a": 1, "b": 0.1 + 1e-12, "d": True}])
    assert found == [{"field": "c", "values": ["x", ""]}, {"field": "d", "values": ["", "True"]}]


# -------------------------------------------------------------------- the command
def test_are_runs_recognizes_run_folders_in_arguments(
    two: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert are_runs(["a", "b"])
    assert are_runs(["a", "--out", "x.html", "b", "--no-browser"])
    for words in ("a", "a text", "a --compare-with b", "a b --graph", "--out", "a --port", ""):
        assert not are_runs(words.split())
    with pytest.raises(ValueError, match=r"c: .*run folder"):
        are_runs(["a", "b", "c"])


def test_short_names_are_unique(tmp_path: Path) -> None:
    assert short_names([tmp_path / "a" / "run", tmp_path / "b" / "run"]) == ["a/run", "b/run"]
    assert short_names([tmp_path / "run", tmp_path / "other"]) == ["run", "other"]
    assert short_names([tmp_path / "run", tmp_path / "run"])[1].endswith("(2)")


def test_command_writes_an_escaped_standalone_page(
    two: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    out = tmp_path / "runs.html"
    look.main([str(two[0]), str(two[1]), "--out", str(out)])
    page = out.read_text(encoding="utf-8")
    assert "<b>10</b>" not in page  # samples are escaped
    assert "runs.html" in capsys.readouterr().out
    assert "connect-src" not in page


def test_a_served_page_is_rendered_from_the_current_files(two: list[Path]) -> None:
    runs = Runs(two)
    before = runs.page()
    with (two[1] / "metrics.jsonl").open("a") as file:
        file.write('{"step": 26, "loss": 1.5, "tokens_per_second": 100}\n')
    assert runs.page() != before


def test_a_deleted_run_is_reported_by_its_page(two: list[Path]) -> None:
    with serving(Runs(two)) as server:
        (two[1] / "config.json").unlink()
        status, answer = call(server, f"/{server.token}/")
    assert status == 500 and "config.json" in answer["error"]


def test_too_many_runs_or_an_invalid_config_raise(two: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compare, "MAX_RUNS", 1)
    with pytest.raises(ValueError, match=r"at most 1 .*got 2"):
        Runs(two)
    monkeypatch.undo()
    (two[0] / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config.json: .*JSON object"):
        Runs(two)
