"""train_smol_gpt.py and inference.py from end to end, as a user starts them."""

import dataclasses
import functools
import json
import os
import pickle
import random
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from chaos.runs import differences
from matplotlib.image import imread
from programs import call, environment, good, lines_without_progress_bars, metrics_of, one_line, run_here

from tricycle.checkpoint import load_checkpoint
from tricycle.configs import PRESETS, DebugConfig, GPTConfig, ShakespeareConfig
from tricycle.models import GPT
from tricycle.tokeniser import BPETokeniser
from tricycle_cli import generate as inference
from tricycle_cli import inspect, train
from tricycle_lab.head_scores import score_heads

ROOT = Path(__file__).resolve().parents[1]
TRAIN, INFER = ROOT / "train_smol_gpt.py", ROOT / "inference.py"
CHANGES = {"steps": 12, "eval_interval": 4, "sample_interval": 6, "accumulation_steps": 2, "dropout": 0.1}
QUICK = ["--preset", "debug"]
QUICK += [word for name, value in CHANGES.items() for word in ("--" + name.replace("_", "-"), str(value))]
POSIX_ONLY = pytest.mark.skipif(os.name != "posix", reason="POSIX signals")
NEEDS_SHAKESPEARE = pytest.mark.skipif(
    not Path(os.environ.get("TRICYCLE_DATA", "-"), "tinyshakespeare", "input.txt").is_file(),
    reason="tinyshakespeare/input.txt is not under TRICYCLE_DATA",
)


PROGRAMS = {TRAIN: train.main, INFER: inference.main}


def call_here(program: Path, *words, folder=ROOT) -> subprocess.CompletedProcess:
    """Run train_smol_gpt.py or inference.py in this process."""
    return run_here(PROGRAMS[program], str(program), words, folder)


def quick(text: Path, folder: Path, *words) -> list:
    """Return the flags of a run with the settings of `finished`."""
    return [*QUICK, "--data", "text", "--files", text, "--run-folder", folder, *words]


def step_of(folder: Path) -> int:
    return load_checkpoint(folder / "last.safetensors").about["progress"]["step"]


@pytest.fixture(scope="module")
def finished(tmp_path_factory, cache, text) -> tuple[Path, subprocess.CompletedProcess]:
    """A run that went through without a break, in a folder whose name has a space."""
    folder = tmp_path_factory.mktemp("runs") / "a run"
    done = call(TRAIN, *quick(text, folder))
    assert done.returncode == 0, done.stderr
    return folder, done


# -------------------------------------------------------------------- a run
def test_run_folder_has_all_files(finished):
    folder, _ = finished
    names = "best.safetensors config.json data.json last.safetensors loss.png metrics.jsonl samples.txt tokeniser.json"
    assert sorted(path.name for path in folder.iterdir()) == names.split()
    config = json.loads((folder / "config.json").read_text())
    assert GPTConfig.from_dict(config).to_dict() == config
    assert config == {**DebugConfig().to_dict(), **CHANGES}
    height, width, _ = imread(folder / "loss.png").shape
    assert height > 300 < width
    tokeniser = BPETokeniser.load(folder / "tokeniser.json")
    for name in ("last", "best"):
        checkpoint = load_checkpoint(folder / f"{name}.safetensors")
        assert checkpoint.config.to_dict() == config
        assert checkpoint.tokeniser() == tokeniser
        assert isinstance(checkpoint.model(), GPT)
    assert step_of(folder) == 12


def test_metrics_have_each_step_and_estimate_once(finished):
    metrics = metrics_of(finished[0])
    training = [line for line in metrics if "loss" in line]
    assert [line["step"] for line in training] == list(range(1, 13))
    for line in training:
        assert line.keys() == {"step", "loss", "learning_rate", "gradient_norm", "tokens_per_second"}
    held_out = [line for line in metrics if "held_out_loss" in line]
    assert [line["step"] for line in held_out] == [4, 8, 12]
    assert held_out[-1]["held_out_loss"] < held_out[0]["held_out_loss"]
    (final,) = [line for line in metrics if "final_loss" in line]
    assert final["best_step"] == 12
    bits_per_nat = {round(line["bits_per_byte"] / line["held_out_loss"], 4) for line in held_out}
    assert bits_per_nat == {round(final["final_bits_per_byte"] / final["final_loss"], 4)}


@pytest.mark.nightly
def test_accuracy_in_tasks_is_part_of_evaluations(tmp_path, cache, text):
    folder = tmp_path / "run"
    words = ("--context-window", "64", "--sample-interval", "0", "--evaluate-tasks", "induction")
    done = good(call(TRAIN, *quick(text, folder, *words, "--steps", "8")))
    assert json.loads((folder / "data.json").read_text())["evaluate_tasks"] == ["induction"]
    lines = [line for line in metrics_of(folder) if "held_out_loss" in line]
    assert len(lines) == 2 and all(0 <= line["induction_accuracy"] <= 1 for line in lines)
    for line in lines:
        percent = 100 * line["induction_accuracy"]
        assert re.search(rf"step {line['step']}: held-out loss .* bits/byte, induction {percent:.0f}%", done)
    (folder / "last.safetensors").unlink()
    assert "induction" in good(call(TRAIN, "--resume", folder))
    failure = call(TRAIN, *quick(text, tmp_path / "short", "--context-window", "32", "--evaluate-tasks", "induction"))
    assert failure.returncode and "induction: expected a window above 48 tokens, got 32" in failure.stderr


@pytest.mark.nightly
def test_head_scores_are_recorded_and_drawn(tmp_path, cache, text):
    folder = tmp_path / "run"
    words = ("--context-window", "24", "--sample-interval", "0", "--score-heads", "--steps", "8")
    done = good(call(TRAIN, *quick(text, folder, *words)))
    assert done.count(", best induction head 0.") >= 2
    (folder / "last.safetensors").unlink()
    assert "best induction head" in good(call(TRAIN, "--resume", folder))
    out = good(run_here(inspect.main, "tricycle inspect", ("scores", folder, "--out", "scores.png"), tmp_path))
    _, columns, *rows, picture = out.splitlines()
    assert columns.split() == "step held-out loss induction previous token duplicate token".split()
    lines = [line for line in metrics_of(folder) if "held_out_loss" in line]
    names = ("step", "held_out_loss", "induction_score", "previous_token_score", "duplicate_token_score")
    expected = [[line[name] for name in names] for line in lines]
    np.testing.assert_allclose([list(map(float, row.split())) for row in rows], expected, atol=1e-4)
    checkpoint = load_checkpoint(folder / "best.safetensors")
    step, tokeniser = checkpoint.about["progress"]["step"], BPETokeniser.load(folder / "tokeniser.json")
    scores = score_heads(checkpoint.model(), start=tokeniser.end_of_text)
    (row,) = [row for row in expected if row[0] == step][-1:]
    np.testing.assert_allclose(row[2:], [values.max() for values in scores], rtol=1e-4)
    assert imread(tmp_path / picture).shape[2] >= 3
    (folder / "metrics.jsonl").write_text('{"step": 1, "held_out_loss": 2.0}\n')
    failure = run_here(inspect.main, "tricycle inspect", ("scores", folder), tmp_path)
    assert failure.returncode and "expected a run of `tricycle train --score-heads`" in failure.stderr


def test_output_of_a_training_run(finished, text):
    folder, done = finished
    out = done.stdout
    assert lines_without_progress_bars(done.stderr) == []
    assert "12/12" in done.stderr
    assert "tokens/s" in done.stderr
    table = dict(re.findall(r"^  (gzip -9|bz2 -9|xz -9|this model) +(\d\.\d{3})$", out, re.MULTILINE))
    assert table.keys() == {"gzip -9", "bz2 -9", "xz -9", "this model"}
    assert list(table.values()) == sorted(table.values(), reverse=True)
    final = metrics_of(folder)[-1]
    assert float(table["this model"]) == pytest.approx(final["final_bits_per_byte"], abs=1e-3)
    assert f"{final['final_loss']:.4f} nats/token = {table['this model']} bits/byte" in out
    n_bytes = len(text.read_bytes()) // 10
    assert f"{n_bytes:,} bytes" in out
    assert re.search(r"step 4: held-out loss \d\.\d{4} nats/token, \d\.\d{3} bits/byte", out)
    for printed in (out, (folder / "samples.txt").read_text(encoding="utf-8")):
        assert re.findall(r"--- sample at step (\d+)\n", printed) == ["6", "12"]


SMALL = "--vocab-size 270 --context-window 16 --embedding-dim 16 --n-heads 2 --head-size 8 --hidden-size 16 --seed 3"
KINDS = {"mamba": "--n-layers 2 --attention-layers 1 --n-key-heads 1 --state-size 4", "encoder_decoder": "--n-layers 1"}


@pytest.mark.nightly
@POSIX_ONLY
@pytest.mark.parametrize("kind", KINDS)
def test_presets_of_other_kinds_train_resume_and_generate(tmp_path, cache, text, kind):
    steps = "--minutes 0 --steps 6 --eval-interval 3 --sample-interval 3 --eval-batches 2 --batch-size 2 --dropout 0.1"
    words = ["--preset", kind, *f"{SMALL} {KINDS[kind]} {steps}".split(), "--data", "text", "--files", text]
    good(call(TRAIN, *words, "--run-folder", tmp_path / "whole"))
    assert call_with(f"after(4, {send('SIGKILL')})", *words, "--run-folder", tmp_path / "run").returncode == -9
    assert "resuming after step 3" in good(call(TRAIN, "--resume", tmp_path / "run"))
    assert differences(tmp_path / "run", tmp_path / "whole") == []
    assert good(call_here(INFER, tmp_path / "run", "the quick", "--seed", 1, "--length", 9)).endswith("\n")
    message = {"mamba": "above 48 tokens, got 16", "encoder_decoder": "no --evaluate-tasks with an encoder-decoder"}[
        kind
    ]
    one_line(call_here(TRAIN, *words, "--evaluate-tasks", "induction", "--run-folder", tmp_path / "new"), message)


def test_the_printed_command_generates(finished):
    command = finished[1].stdout.splitlines()[-1].strip()
    words = shlex.split(command)
    assert words == ["python", "inference.py", str(finished[0])]
    assert len(good(call(*words[1:], "--no-stop", "--seed", "0"))) > 20


# Prints the functions on the stack where the first update calls `loss.backward()`, from the script on.
STACK = """
import runpy, sys
from tricycle.tensor import Tensor
backward = Tensor.backward
def watched(self, *args, **kwargs):
    frame, names = sys._getframe(1), []
    while frame.f_code.co_filename != sys.argv[0]:
        names.append(frame.f_code.co_name)
        frame = frame.f_back
    print("STACK", *reversed(names))
    Tensor.backward = backward
    return backward(self, *args, **kwargs)
Tensor.backward = watched
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_four_calls_lead_from_the_script_to_the_backward_pass(tmp_path, cache, text):
    """The fourth is `loss.backward()`."""
    output = good(call("-c", STACK, TRAIN, *quick(text, tmp_path / "run", "--steps", "1")))
    assert re.findall("STACK (.*)", output) == ["main train compute_gradients"]


# -------------------------------------------------------------------- interrupted runs
def call_with(snippet: str, *words) -> subprocess.CompletedProcess:
    """Run train_smol_gpt.py after a few lines that change what it uses."""
    program = f"""
import os, signal, sys
sys.path.insert(0, {str(ROOT)!r})
sys.argv[0] = "train_smol_gpt.py"
import tricycle_cli.train as program
from tricycle import training_state
from tricycle_cli import text_task, updates
from tricycle_cli.flags import run_main

def after(step, action):
    log = updates.RunSession.log
    def patched(session, loss, norm):
        if session.step == step:
            action(session)
        log(session, loss, norm)
    updates.RunSession.log = patched

{snippet}
run_main(program.main)
"""
    return call("-c", program, *words)


def send(name: str) -> str:
    return f"lambda *args, **kwargs: os.kill(os.getpid(), signal.{name})"


@POSIX_ONLY
@pytest.mark.parametrize(
    ("name", "step", "status"),
    [
        pytest.param("SIGINT", 8, 0, marks=pytest.mark.slow),
        pytest.param("SIGTERM", 5, 0, marks=pytest.mark.nightly),
        ("SIGKILL", 7, -9),
        pytest.param("SIGKILL", 2, -9, marks=pytest.mark.nightly),
    ],
)
def test_interrupted_run_resumes_with_equal_results(tmp_path, finished, text, name, step, status):
    folder = tmp_path / "run"
    done = call_with(f"after({step}, {send(name)})", *quick(text, folder))
    assert done.returncode == status, done.stderr
    saved = step_of(folder)
    if status == 0:
        assert saved == step
        (notice,) = lines_without_progress_bars(done.stderr)
        assert "after this step" in notice and "Ctrl-C" in notice
        assert f"stopped after step {step}" in done.stdout
        command = shlex.split(done.stdout.splitlines()[-1])
        assert command == ["python", "train_smol_gpt.py", "--resume", str(folder)]
    else:
        assert saved == {7: 6, 2: 0}[step]  # before the sample at step 6
    out = good(call(TRAIN, "--resume", folder))
    assert ("resuming after step" in out) == (saved > 0)
    assert "this model" in out
    assert differences(folder, finished[0]) == []


@pytest.mark.slow
@POSIX_ONLY
def test_run_that_stops_after_an_evaluation_counts_it_once(tmp_path, text):
    """The resumed run evaluates the same step again, and writes its sample again."""
    words = [
        "--max-learning-rate",
        "1e-30",
        "--min-learning-rate",
        "1e-30",
    ]  # so that only the first evaluation is best
    words += ["--sample-interval", "4"]
    runs = tmp_path / "run", tmp_path / "whole"
    snippet = "usual = updates.RunSession.evaluate\ndef evaluate(session):\n    usual(session)\n"
    snippet += "    if session.step == 8:\n        os.kill(os.getpid(), signal.SIGTERM)\n"
    done = call_with(f"{snippet}updates.RunSession.evaluate = evaluate", *quick(text, runs[0], *words))
    assert done.returncode == 0 and "stopped after step 8" in done.stdout, done.stderr
    good(call(TRAIN, "--resume", runs[0]))
    good(call(TRAIN, *quick(text, runs[1], *words)))
    assert load_checkpoint(runs[1] / "last.safetensors").about["progress"]["n_worse"] == 1
    assert differences(*runs) == []


@pytest.mark.nightly_except(2)
@pytest.mark.slow
@POSIX_ONLY
@pytest.mark.parametrize(("name", "status"), [("SIGINT", 130), ("SIGTERM", -signal.SIGTERM)])
def test_the_final_evaluation_can_be_interrupted(tmp_path, finished, text, name, status):
    """And the run is saved before it begins."""
    folder = tmp_path / "run"
    done = call_with(f"text_task.load_checkpoint = {send(name)}", *quick(text, folder))
    assert done.returncode == status
    assert lines_without_progress_bars(done.stderr) == (["train_smol_gpt.py: interrupted"] if status == 130 else [])
    assert step_of(folder) == 12
    assert "this model" in good(call(TRAIN, "--resume", folder))
    assert differences(folder, finished[0]) == []


@pytest.mark.nightly
@POSIX_ONLY
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
def test_training_survives_closed_streams(tmp_path, finished, text, closed):
    """And no checkpoint gets the place, and the output, of a stream that was closed."""
    folder = tmp_path / "run"
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", sys.executable, TRAIN, *quick(text, folder)]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=300)
    assert done.returncode == 0
    assert "Traceback" not in done.stderr
    assert differences(folder, finished[0]) == []


@pytest.mark.slow
def test_run_folder_without_progress_is_started_again(tmp_path, finished, text):
    """As after a disk that filled up at its second file."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text((finished[0] / "config.json").read_text())
    one_line(call(TRAIN, "--resume", folder), r"data\.json.*no training progress")
    good(call(TRAIN, *quick(text, folder)))
    assert differences(folder, finished[0]) == []


@pytest.mark.slow
def test_full_disk_ends_a_run_that_can_be_resumed(tmp_path, finished, text):
    """With `--on-full-disk wait`, tests/test_training.py."""
    folder = tmp_path / "run"
    full = """
import errno
usual = training_state.save_checkpoint
def save(path, *args):
    if str(path).endswith("last.safetensors") and args[4]["step"] == 6:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    usual(path, *args)
training_state.save_checkpoint = save
"""
    done = call_with(full, *quick(text, folder, "--on-full-disk", "stop"))
    one_line(done, r"last\.safetensors.*intact.*train_smol_gpt\.py --resume")
    assert step_of(folder) == 4
    good(call(TRAIN, "--resume", folder))
    assert differences(folder, finished[0]) == []


@pytest.mark.slow
@POSIX_ONLY
def test_second_interrupt_ends_the_run_at_once(tmp_path, cache, text):
    twice = "def twice(session):\n    for _ in range(2): os.kill(os.getpid(), signal.SIGINT)\nafter(6, twice)"
    done = call_with(twice, *quick(text, tmp_path / "run"))
    assert done.returncode == 130
    assert lines_without_progress_bars(done.stderr)[-1] == "train_smol_gpt.py: interrupted"
    assert step_of(tmp_path / "run") == 4


def test_nonfinite_loss_ends_the_run_and_keeps_checkpoints(tmp_path, cache, text):
    folder = tmp_path / "run"
    spoil = """
after(6, lambda session: session.state.model.norm.gain.array.fill(float("nan")))
"""
    done = call_with(spoil, *quick(text, folder, "--sample-interval", "0"))
    assert done.returncode == 1
    *_, line = lines_without_progress_bars(done.stderr)
    assert re.search("step 7: .*nan", line) and "norm.gain" in line
    assert "--max-learning-rate" in line
    assert step_of(folder) == 4
    lines = metrics_of(folder)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 4, 5, 6, 7]
    assert lines[-1]["on_nan"] == "stop"
    assert "the parameter norm.gain" in lines[-1]["not_finite"]


@pytest.mark.slow
@pytest.mark.parametrize("on_nan", ["stop", "rollback"])
@pytest.mark.parametrize("flag", ["--max-learning-rate", "--weight-decay"])
def test_a_diverging_run_fails_with_one_line(tmp_path, cache, text, flag, on_nan):
    words = quick(text, tmp_path / "run", flag, "1e30", "--on-nan", on_nan)
    done = call_here(TRAIN, *words)
    one_line(done, "step 2: .*(loss|norm)")
    assert done.stderr.count("step 2: ") == 1 and "step 1: " not in done.stdout
    assert step_of(tmp_path / "run") == 0
    last = metrics_of(tmp_path / "run")[-1]
    assert (last["step"], last["on_nan"]) == (2, "stop") and not last["not_finite"].startswith("step")


# -------------------------------------------------------------------- help
@pytest.mark.parametrize("preset", [None, "debug", "shakespeare"])
def test_help_lists_every_field_with_its_default(preset):
    out = good(call_here(TRAIN, *(["--preset", preset] if preset else []), "--help-all"))
    words = " ".join(re.sub(r"[│╭╮╰╯─]", " ", out).split())
    for field in dataclasses.fields(GPTConfig):
        flag = "--" + field.name.replace("_", "-")
        described = re.search(rf"{flag}[, ].*?\(default: ([^)]*)\)", words)
        assert described, flag
        if preset:
            value = getattr(PRESETS[preset](), field.name)
            shown = " ".join(map(str, value)) if isinstance(value, tuple) else str(value)
            expected = ("True", "--" + field.name) if value is True else (shown,)
            assert described[1].startswith(expected), flag
    for flag in ("--preset", "--data", "--files", "--run-folder", "--device"):
        assert flag in words


# -------------------------------------------------------------------- inference
def test_inference_generates_reproducible_text_from_a_seed(tmp_path, finished):
    """Of a run folder, of its best checkpoint, and of a pickled model with its tokenizer."""
    folder, path = finished[0], tmp_path / "model.pkl"
    path.write_bytes(pickle.dumps(load_checkpoint(folder / "best.safetensors").model()))

    def text_of(source: Path, flags: str, *more, prompt: str = "the fox") -> str:
        return good(call_here(INFER, source, prompt, *flags.split(), *more))

    seeded = text_of(folder, "--seed 1 --length 30")
    assert seeded.startswith("the fox")
    assert text_of(folder, "--seed 1 --length 30") == seeded
    assert text_of(folder / "best.safetensors", "--seed 1 --length 30") == seeded
    assert text_of(path, "--seed 1 --length 30", "--tokeniser", folder / "tokeniser.json") == seeded
    greedy = text_of(folder, "--temperature 0 --length 60 --no-stop")
    assert text_of(folder, "--top-k 1 --length 60 --no-stop --device cpu") == greedy
    assert text_of(folder, "--length 0", prompt="é🚲") == "é🚲\n"


# -------------------------------------------------------------------- what goes wrong
FILES = ("config.json", "data.json", "last.safetensors", "best.safetensors")


@pytest.fixture(scope="module")
def odd(tmp_path_factory, finished) -> Path:
    """A folder with files and run folders that have something wrong."""
    folder = tmp_path_factory.mktemp("odd")
    run = finished[0]
    (folder / "empty.txt").write_bytes(b"")
    (folder / "short.txt").write_text("a text too short to train")
    (folder / "binary.bin").write_bytes(bytes(range(256)))
    large = BPETokeniser(400).train(" ".join(f"w{i % 97} w{i % 97}" for i in range(2000)), progress=False)
    large.save(folder / "large.json")
    assert large.n_vocab > 300

    def copy(name: str, **changes: bytes | None) -> None:
        (folder / name).mkdir()
        for file in FILES:
            content = changes.get(file.partition(".")[0], (run / file).read_bytes())
            if content is not None:
                (folder / name / file).write_bytes(content)

    half = lambda file: (run / file).read_bytes()[: (run / file).stat().st_size // 2]
    copy("cut", last=half("last.safetensors"), best=half("best.safetensors"))
    copy("nothing", config=None)
    copy("no data", data=None)
    copy("half config", config=half("config.json"))
    copy("other data", data=b'{"data": "nonsense", "files": []}')
    copy("no checkpoint", last=None, best=None)
    copy("numbers", data=b'{"data": "text", "files": [3]}')
    copy("odd source", data=b'{"data": "text", "files": [], "init_from": 3}')
    copy("gone text", data=b'{"data": "text", "files": ["gone.txt"]}')

    class Evil:
        def __reduce__(self):
            return os.system, (f"echo > {shlex.quote(str(folder / 'marker'))}",)

    model = load_checkpoint(run / "best.safetensors").model()
    model.evil = Evil()
    (folder / "evil.pkl").write_bytes(pickle.dumps(model))
    (folder / "random.pkl").write_bytes(random.Random(0).randbytes(500))
    return folder


TRAIN_WRONG = [
    ("--steps 2 --unknown 3", "--unknown"),
    ("--steps many", "invalid literal.*'many'"),
    ("--preset large", "'large'"),
    ("--preset", "Missing value.*--preset"),
    ("--data nonsense", "'nonsense'"),
    ("--steps 0", "steps.*minutes.*got 0"),
    ("--vocab-size 100", "vocab_size.*257"),
    ("--embedding-dim 100000000", "at least.*memory"),
    ("--data text", "--files.*--data text.*none"),
    ("--files short.txt", "--files.*--data text.*--data python"),
    ("--files short.txt --find-learning-rate", "--files.*--data text.*--data python"),
    ("--find-learning-rate --track wandb", "no --find-learning-rate with --track"),
    ("--data text --files missing.txt", r"missing\.txt"),
    ("--data text --files empty.txt", "empty"),
    ("--data text --files binary.bin", "text file"),
    ("--data text --files short.txt", "at least 33 tokens"),
    ("--run-folder cut", "cut .*--resume"),
    ("--run-folder short.txt", "short.txt"),
    ("--device gpu", "--device gpu: .*no GPU"),
]
RESUME_WRONG = [
    ("--resume missing", r"missing: .*run folder.*no such folder"),
    ("--resume nothing", r"nothing: .*run folder.*config\.json"),
    ("--resume numbers", r"data\.json: .*data and files"),
    ("--resume 'odd source'", r"data\.json: .*data and files"),
    ("--resume 'no data'", r"no data: .*run folder.*data\.json"),
    ("--resume 'half config'", "JSON"),
    ("--resume 'other data'", r"data\.json: .*data and files"),
    ("--resume cut", r"last\.safetensors: .*complete checkpoint"),
    ("--resume 'gone text'", "gone.txt"),
    ("--resume cut --steps 3", "--steps"),
]
INFER_WRONG = [
    ("", r"run folder.*checkpoint.*\.pkl.*Hugging Face"),
    ("missing.safetensors", r"missing\.safetensors: .*no such file"),
    ("missing.pkl", r"missing\.pkl: .*no such file"),
    ("'no checkpoint'", r"best\.safetensors or last\.safetensors"),
    ("cut", r"best\.safetensors: .*complete checkpoint"),
    ("short.txt", r"short\.txt: .*\.safetensors, \.gguf"),
    ("evil.pkl", "system.*no model"),
    ("random.pkl", r"random\.pkl: .*pickled"),
    ("good ''", "prompt.*at least one"),
    (f"good '{'the fox ' * 50}'", "prompt.*1 to 32 tokens"),
    ("good --tokeniser large.json", "tokenizer.*300 tokens"),
    ("good --tokeniser short.txt", r"short\.txt: .*tokeniser"),
    ("good --softmax hard", "'hard'.*--softmax"),
    ("good --length -1", "n_tokens.*got -1"),
    ("good --colour", "--colour"),
    ("good the fox", "fox"),
    ("good --device gpu", "--device gpu: .*no GPU"),
]


@pytest.mark.parametrize(
    ("program", "line", "message"),
    [
        *((TRAIN, f"--preset debug {line}", message) for line, message in TRAIN_WRONG),
        *((TRAIN, line, message) for line, message in RESUME_WRONG),
        *((INFER, line, message) for line, message in INFER_WRONG),
    ],
)
def test_bad_arguments_fail_with_one_line(odd, finished, program, line, message):
    words = [str(finished[0]) if word == "good" else word for word in shlex.split(line)]
    one_line(call_here(program, *words, folder=odd), message)
    assert not (odd / "marker").exists()


# -------------------------------------------------------------------- tiny Shakespeare
# The toy script of the README that this library follows, call by call.
TOY = """
import pickle

from tqdm import tqdm

from tricycle.configs import ShakespeareConfig
from tricycle.dataset import CausalLMDataset
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.optimisers import AdamW
from tricycle_datasets.shakespeare import Shakespeare

config = ShakespeareConfig()
model = GPT(config)

tokens = Shakespeare(vocab_size=config.vocab_size)
dataset = (
    CausalLMDataset(
        tokens=tokens,
        vocab_size=config.vocab_size,
        batch_size=config.batch_size,
        context_window=config.context_window,
    )
    .batch()
    .shuffle()
    .to_tensor()
)
loss_fn = CrossEntropy()
optimiser = AdamW(
    learning_rate=config.max_learning_rate,
    weight_decay=config.weight_decay,
    betas=(config.beta1, config.beta2),
)

model.to_gpu()
loading_bar = tqdm(range(config.steps))
for step in loading_bar:
    optimiser.step()
    inputs, outputs = next(dataset)
    inputs = inputs.to_gpu()
    outputs = outputs.to_gpu()

    logits = model(inputs)
    loss = loss_fn(outputs, logits)
    loss.backward()

    loading_bar.set_description(f"loss: {loss:.3f}")
    model.update(optimiser)

# save results
with open("model.pkl", "wb") as f:
    pickle.dump(model, f)
"""


def shrink_shakespeare(patch: pytest.MonkeyPatch) -> None:
    """Let `ShakespeareConfig()` be a small model that makes few steps, and be of that class still."""
    sizes = {"steps": 3, "batch_size": 2, "n_layers": 2, "embedding_dim": 48, "n_heads": 2}
    patch.setattr(ShakespeareConfig, "__init__", functools.partialmethod(ShakespeareConfig.__init__, **sizes))


@NEEDS_SHAKESPEARE
@pytest.mark.filterwarnings("ignore:to_gpu")
def test_the_toy_script_and_inference_from_its_pickle(tmp_path, cache, monkeypatch):
    shrink_shakespeare(monkeypatch)
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(TOY, "toy", "exec"), names)
    assert 0 < float(names["loss"]) < 8
    assert names["optimiser"].n_steps == 3
    model = pickle.loads((tmp_path / "model.pkl").read_bytes())
    assert model.n_parameters == names["model"].n_parameters
    for words in (["--no-stop"], ["ROMEO:", "--length", "20", "--seed", "1"]):
        assert len(good(call_here(INFER, "model.pkl", *words, folder=tmp_path))) > 10


@pytest.mark.slow
@NEEDS_SHAKESPEARE
def test_training_on_shakespeare_by_flag(tmp_path, cache):
    words = "--preset debug --data shakespeare --vocab-size 1024 --steps 2 --context-window 128 --batch-size 16"
    out = good(call(TRAIN, *shlex.split(words), "--run-folder", tmp_path / "run"))
    assert "data: shakespeare" in out
    assert ", 111,539 bytes, context 64 to 127)" in out
    assert "this model" in out
