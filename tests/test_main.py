"""The report of `python -m tricycle machine`, and the modules that `import tricycle` loads."""

import os
import re
import subprocess
import sys
from unittest.mock import Mock

import numpy as np
import pytest
from programs import call, good

from tricycle_cli import machine

ROWS = "Tricycle Python arrays GPU CPU BLAS threads process matmul packages optional".split()
NUMPY_ALONE = """
import runpy, sys
from importlib.machinery import PathFinder

class OnlyNumPy:
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        if top not in {*sys.stdlib_module_names, "numpy", "tricycle", "tricycle_cli", "tricycle_accelerators"}:
            raise ImportError(f"{name} is not available")

sys.meta_path.insert(0, OnlyNumPy())
PathFinder.find_distributions = lambda *words: iter(())
runpy.run_module("tricycle", run_name="__main__")
"""


def rows_of(out: str) -> dict[str, str]:
    table, _, better = out.partition("\n\nSuggestions for more speed:\n")
    assert all(len(line) <= machine.WIDTH for line in table.splitlines())
    assert all(line.startswith("  ") for line in better.splitlines())
    starts = [line for line in table.splitlines() if not line.startswith(" ")]
    return {line[: machine.INDENT].strip(): line[machine.INDENT :] for line in starts} | {"faster": better}


@pytest.fixture
def no_variables(monkeypatch):
    for name in os.environ:
        if name in (*machine.PINNING_VARIABLES, machine.VARIABLE) or name.endswith("_NUM_THREADS"):
            monkeypatch.delenv(name)


def advised(word: str, gpu_problem: str | None = None) -> bool:
    """Return whether a suggestion contains a word."""
    return any(word in line for line in machine.advice([], gpu_problem))


# -------------------------------------------------------------------- the program
@pytest.mark.slow
def test_machine_report_has_all_rows_in_24_lines(no_variables):
    out = good(call("-m", "tricycle"))
    assert len(out.splitlines()) <= 24
    rows = rows_of(out)
    assert [*rows] == [*ROWS, "faster"]
    assert sum("tricycle machine --speed" in line for line in out.splitlines()) == 1
    assert rows["arrays"].startswith(f"NumPy {np.__version__}")
    assert rows["threads"].startswith("1, set by OMP_NUM_THREADS=1; ")
    pattern = r"([\d,]+) GFLOP/s in float32 \(training step: (\d+)% of peak\)"
    rate, share = re.match(pattern, rows["matmul"]).groups()
    assert float(rate.replace(",", "")) > 0 and int(share) > 0


@pytest.mark.slow
def test_machine_report_works_with_numpy_alone(no_variables):
    rows = rows_of(good(call("-c", NUMPY_ALONE)))
    assert [*rows] == [*ROWS, "faster"]
    assert "kernels unknown" in rows["BLAS"]
    assert rows["threads"].endswith("BLAS threads: unknown")
    assert rows["packages"] == "none"
    assert rows["optional"].startswith("not installed: threadpoolctl")
    assert "pip install threadpoolctl" in rows["faster"]


def test_invalid_thread_count_gives_a_one_line_error(monkeypatch):
    monkeypatch.setenv("TRICYCLE_NUM_THREADS", "many")
    done = call("-m", "tricycle")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1) and "TRICYCLE_NUM_THREADS" in done.stderr


# -------------------------------------------------------------------- rows of the report
def test_host_tuning_is_reported(monkeypatch, no_variables):
    """Run another process, because tuning changes the process."""
    program = "from tricycle_cli.machine import host_report; print(host_report())"
    monkeypatch.delenv("TRICYCLE_TUNE_HOST", raising=False)
    assert sys.platform != "linux" or "BLAS uses one thread" in good(call("-c", program))
    monkeypatch.setenv("TRICYCLE_TUNE_HOST", "0")
    assert good(call("-c", program)) == "not tuned (TRICYCLE_TUNE_HOST=0)\n"


def test_kernels_are_listed_with_their_providers(monkeypatch):
    monkeypatch.setenv("TRICYCLE_KERNELS", "-numba")
    lines = good(call("-m", "tricycle", "machine", "--kernels")).splitlines()
    assert lines[0].startswith("CPU: ")
    providers = {words[0]: words[1:] for line in lines[2:] if (words := line.replace(",", " ").split())}
    assert providers["matmul"][-2:] == ["numpy", "plain"] and providers["dropout_mask"] == ["plain"]
    assert {"lstm", "quantized_matmul", "orthogonalize"} <= set(providers)
    assert any("TRICYCLE_KERNELS=-numba" in line for line in lines)


CPUINFO = "".join(f"processor\t: {i}\nmodel name\t: A CPU\nflags\t\t: fpu avx2 avx512f amx_bf16\n\n" for i in (0, 1))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (CPUINFO, "^A CPU, .*; AVX2, AVX-512, no AVX-512 bf16, AMX bf16$"),
        ("cpu family\t: 25\nmodel\t\t: 1\nmodel name\t: A CPU\n", r"^A CPU \(family 25, model 1\), "),
        ("", "bf16 and AMX unknown; NumPy uses "),
        ("Features\t: fp asimd bf16\n", "bf16 and AMX unknown; NumPy uses "),
    ],
    ids=["x86", "family", "no such file", "ARM"],
)
def test_instruction_sets_are_read_from_cpuinfo(text, expected):
    assert re.search(expected, machine.describe_processor(text))


def test_a_pinned_blas_is_reported(monkeypatch, no_variables):
    assert "pinned" not in machine.describe_blas()
    assert not advised("OPENBLAS")
    monkeypatch.setenv("OPENBLAS_CORETYPE", "Haswell")
    assert machine.describe_blas().endswith("pinned by OPENBLAS_CORETYPE=Haswell")
    assert machine.advice([], None)[0].startswith("unset OPENBLAS_CORETYPE: ")


def test_variable_that_sets_the_threads_is_reported(monkeypatch, no_variables):
    assert machine.thread_variable() is None
    assert "the default (set TRICYCLE_NUM_THREADS" in machine.thread_report()
    monkeypatch.setenv("OMP_NUM_THREADS", "all")  # not a number: no library uses it
    assert machine.thread_variable() is None
    monkeypatch.setenv("OMP_NUM_THREADS", "3,2")
    assert machine.thread_variable() == "OMP_NUM_THREADS"
    monkeypatch.setenv("TRICYCLE_NUM_THREADS", "2")
    assert machine.thread_variable() == "TRICYCLE_NUM_THREADS"


def test_idle_cores_are_reported(monkeypatch, no_variables):
    monkeypatch.setattr(machine.os, "cpu_count", lambda: 64)
    monkeypatch.setattr(machine.threads, "n_threads", lambda: 2)
    assert not advised("64")  # without a variable, BLAS chose the number
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert advised("OMP_NUM_THREADS: 2 of 64")


def test_mkl_is_suggested_on_intel_processors(monkeypatch, no_variables):
    for problem in ("MKL is not installed (pip install 'tricycle-gpt[mkl]')", "MKL is for Intel's processors", None):
        monkeypatch.setattr(machine.float32_products, "unavailable_reason", lambda problem=problem: problem)
        for has_amx in (False, True):  # by which Numba's products of float32 are faster than MKL's
            monkeypatch.setattr(machine.processor_facts, "has_amx_bfloat16", lambda has_amx=has_amx: has_amx)
            assert advised("[mkl]") == ("[mkl]" in (problem or "") and not has_amx)


@pytest.mark.parametrize("lacks_onednn", [True, False])
@pytest.mark.parametrize("has_numba", [True, False])
@pytest.mark.parametrize("has_instructions", [True, False])
def test_bf16_extra_is_suggested_only_if_fast_extra_is_not(
    monkeypatch, no_variables, lacks_onednn, has_numba, has_instructions
):
    problem = f"onednn-cpu-gomp is not installed ({machine.onednn.EXTRA})" if lacks_onednn else None
    monkeypatch.setattr(machine.onednn, "unavailable_reason", lambda: problem)
    monkeypatch.setattr(machine, "installed", lambda *packages: [x for x in packages if has_numba or x != "numba"])
    monkeypatch.setattr(machine.processor_facts, "has_fast_bfloat16", lambda: has_instructions)
    assert advised("[fast]", "no GPU") == (not has_numba)  # [fast] includes [bf16]
    assert advised("[bf16]", "no GPU") == (lacks_onednn and has_numba and has_instructions)


def test_providers_excluded_by_a_variable_are_reported(monkeypatch, no_variables):
    monkeypatch.setattr(machine, "installed", lambda *packages: [x for x in packages if x != "onednn-cpu-gomp"])
    monkeypatch.setenv("TRICYCLE_KERNELS", "numba")
    assert advised("TRICYCLE_KERNELS=numba: it excludes numpy", "no GPU")
    assert not advised("onednn", "no GPU")  # oneDNN is not installed
    monkeypatch.setenv("TRICYCLE_KERNELS", "-numba")
    assert advised("TRICYCLE_KERNELS=-numba", "no GPU")
    monkeypatch.setenv("TRICYCLE_KERNELS", "-onednn")
    assert not advised("TRICYCLE_KERNELS", "no GPU")


def test_an_unused_gpu_is_reported(monkeypatch, no_variables):
    monkeypatch.setattr(machine, "installed", lambda *packages: [*packages])
    monkeypatch.setattr(machine.float32_products, "unavailable_reason", lambda: None)
    monkeypatch.setattr(machine.onednn, "unavailable_reason", lambda: None)
    assert machine.advice([], "CuPy is not installed") == []
    assert machine.advice_lines([])[-1] == "  nothing to suggest"
    monkeypatch.setattr(machine, "gpu_libraries", lambda: {"cuBLASLt 13.0.2": None})
    assert machine.advice(["GPU 0: H200"], None) == []
    (line,) = machine.advice(["GPU 0: H200"], "CuPy is not installed")
    assert "GPU 0: H200" in line and "CuPy" in line


def test_gpu_names_are_read_from_nvidia_smi(monkeypatch):
    output = "GPU 0: NVIDIA H200 (UUID: GPU-1)\nGPU 1: NVIDIA H200 (UUID: GPU-2)\n"
    monkeypatch.setattr(machine.shutil, "which", lambda name: None)
    assert machine.gpu_names() == []
    monkeypatch.setattr(machine.shutil, "which", lambda name: name)
    run = Mock(return_value=subprocess.CompletedProcess([], 0, output))
    monkeypatch.setattr(machine.subprocess, "run", run)
    assert machine.gpu_names() == ["GPU 0: NVIDIA H200", "GPU 1: NVIDIA H200"]
    run.side_effect = subprocess.TimeoutExpired([], 10)
    assert machine.gpu_names() == []


def test_a_used_gpu_is_reported(monkeypatch):
    monkeypatch.setattr(machine.devices, "gpu_problem", lambda: None)
    monkeypatch.setattr(machine, "gpu_names", lambda: ["GPU 0: H200"])
    monkeypatch.setattr(machine, "speed_report", lambda: "1,234 GFLOP/s")
    monkeypatch.setattr(machine, "nvidia_smi", lambda *words: ["580.159.03"])
    monkeypatch.setattr(machine.gemm, "unavailable_reason", lambda: None)
    monkeypatch.setattr(machine.gemm, "version_text", lambda: "cuBLASLt 13.0.2")
    monkeypatch.setattr(machine.cudnn, "unavailable_reason", lambda: "no cuDNN")
    rows = rows_of(machine.report())
    gpu_row = machine.report().partition("\nGPU")[2].partition("\nCPU")[0].split()
    assert re.search(r"GPU 0: H200.*580\.159\.03.*cuBLASLt 13\.0\.2.*no cuDNN", " ".join(gpu_row))
    assert "no cuDNN" in rows["faster"]
    assert "; on a GPU " in rows["arrays"]
    assert rows["matmul"].startswith("1,234 GFLOP/s")


# -------------------------------------------------------------------- imports
def test_import_loads_only_numpy_and_the_standard_library():
    program = "import sys; before = {*sys.modules}; import tricycle; print(*{*sys.modules} - before)"
    loaded = {name.split(".")[0] for name in good(call("-c", program)).split()}
    assert loaded - {*sys.stdlib_module_names} == {"numpy", "tricycle"}
