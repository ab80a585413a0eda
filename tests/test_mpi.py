"""Two ranks, started by mpiexec. Left out without mpi4py and an mpiexec."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from imports import ROOT

from tricycle_mpi.launch import VARIABLES, Launched, launched

MPIEXEC = next(
    (
        path
        for path in (str(Path(sys.executable).parent / "mpiexec"), shutil.which("mpiexec"))
        if path and Path(path).is_file()
    ),
    None,
)
needs_mpi = pytest.mark.skipif(
    MPIEXEC is None or importlib.util.find_spec("mpi4py") is None, reason="needs mpi4py and mpiexec"
)
TIMEOUT = 120


def mpi_environment(**more):
    """One thread a rank; more ranks than processors, and root, are fine here."""
    clean = {
        name: value for name, value in os.environ.items() if not name.startswith(("OMPI_", "PMI", "PRTE_", "SLURM_"))
    }
    may = dict.fromkeys(("OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"), "1")
    may |= {"PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", "PRTE_MCA_hwloc_default_binding_policy": "none"}
    threads = {"OMP_NUM_THREADS": "1", "TRICYCLE_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return {**clean, **may, **threads, "PYTHONPATH": str(ROOT), **more}


def start(n, words, **more):
    """A program of n ranks."""
    command = [MPIEXEC, "-n", str(n), sys.executable, *words]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "encoding": "utf-8", "errors": "replace"}
    return subprocess.Popen(command, cwd=ROOT, env=mpi_environment(**more), **pipes)


def ranks(n, program, *words, **more):
    """What a program of n ranks prints."""
    process = start(n, ["-W", "error", "-c", program, *words], **more)
    out, err = process.communicate(timeout=TIMEOUT)
    assert process.returncode == 0, out + err
    return out


TRAINING = """
import sys
import numpy as np
from tricycle.configs import DebugConfig, GPTConfig
from tricycle.training import new_state, train_step
from tricycle.processes import ALONE
from tricycle_mpi.launch import launched
def train(path, optimiser, wide):
    processes = ALONE
    if launched().size > 1:
        from tricycle_mpi.ranks import join
        processes = join()
    processes.bucket_bytes = 20_000
    config = {**DebugConfig().to_dict(), "batch_size": 2, "accumulation_steps": 4, "dropout": 0.1, "steps": 8}
    config = GPTConfig.from_dict({**config, "optimiser": optimiser})
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, 5000)
    state = new_state(config, tokens, processes=processes)
    for parameter in state.model.parameters():
        parameter.array = parameter.array.astype(wide)
    results = np.array([train_step(state) for _ in range(8)])
    weights = np.concatenate([parameter.array.ravel() for parameter in state.model.parameters()])
    if processes.is_first:
        np.savez(path, results=results, weights=weights)
    assert len({each.tobytes() for each in processes.gather(weights)}) == 1
"""


@pytest.fixture(scope="module")
def alone():
    """Losses and norms of one process with accumulation, in float64."""
    space = {}
    exec(TRAINING, space)
    return space["train"]


@needs_mpi
@pytest.mark.parametrize("optimiser", ["adamw", "muon"])
def test_two_ranks_train_as_one(tmp_path, alone, optimiser):
    alone(tmp_path / "one.npz", optimiser, "float64")
    one = np.load(tmp_path / "one.npz")
    for name in ("first", "again"):
        ranks(2, TRAINING + "train(*sys.argv[1:])", str(tmp_path / f"{name}.npz"), optimiser, "float64")
    first, again = np.load(tmp_path / "first.npz"), np.load(tmp_path / "again.npz")
    np.testing.assert_allclose(first["results"], one["results"], rtol=0, atol=1e-10)
    assert first["results"].tobytes() == again["results"].tobytes()
    assert first["weights"].tobytes() == again["weights"].tobytes()


TALK = """
from tricycle_mpi.ranks import join
processes = join()
assert processes.size == 3
assert processes.agree({"of": processes.rank}) == {"of": 0}
assert processes.gather(processes.rank) == [0, 1, 2]
assert processes.sum([1, processes.rank]) == [3, 3]
assert processes.any(processes.rank == 2) and not processes.any(False)
print(f"rank {processes.rank} of {processes.size}")
"""


@needs_mpi
def test_what_ranks_tell_each_other():
    assert sorted(ranks(3, TALK).splitlines()) == [f"rank {rank} of 3" for rank in range(3)]


@needs_mpi
def test_another_mpi_than_mpiexec():
    """One that starts processes, of which MPI knows nothing: each would train by itself."""
    program = "from tricycle_mpi.ranks import join\ntry:\n    join()\nexcept RuntimeError as error:\n    print(error)"
    environment = mpi_environment(PMI_RANK="0", PMI_SIZE="2")
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert "2 processes were started together, but MPI knows of 1: mpiexec belongs to another MPI" in run.stdout


def test_who_was_started(monkeypatch):
    for names in VARIABLES:
        for name in names:
            monkeypatch.delenv(name, raising=False)
    assert launched() == (0, 1)
    for rank, size in VARIABLES:
        with monkeypatch.context() as patch:
            patch.setenv(rank, "3")
            assert launched() == (0, 1)
            patch.setenv(size, "4")
            assert launched() == Launched(3, 4)
            patch.setenv(size, "many")
            assert launched() == (0, 1)
    monkeypatch.setenv("SLURM_PROCID", "0")  # a batch script with many tasks, which has not called srun
    monkeypatch.setenv("SLURM_NTASKS", "4")
    assert launched() == (0, 1)


def test_alone_nothing_of_mpi_is_imported():
    program = "import sys, tricycle.training, tricycle_cli.train, tricycle_mpi.launch\n"
    program += "print([name for name in sys.modules if name.startswith(('mpi4py', 'tricycle_mpi.ranks'))])"
    run = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
