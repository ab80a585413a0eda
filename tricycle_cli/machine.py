"""What this machine offers Tricycle, and what is in use."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
import textwrap
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import numpy as np

import tricycle
from tricycle import devices
from tricycle.kernels import KERNELS
from tricycle.kernels.explanation import PLAIN, UNAVAILABLE, provider_name
from tricycle_accelerators import blas as float32_products
from tricycle_accelerators import host, threads
from tricycle_accelerators import processor as processor_facts
from tricycle_accelerators.cuda import cudnn, gemm
from tricycle_accelerators.onednn import library as onednn
from tricycle_accelerators.processor import fields_of
from tricycle_accelerators.providers import VARIABLE, excluded
from tricycle_cli import speed

# What Linux calls the instructions that matter for speed.
INSTRUCTIONS = {"AVX2": "avx2", "AVX-512": "avx512f", "AVX-512 bf16": "avx512_bf16", "AMX bf16": "amx_bf16"}
# Variables that keep OpenBLAS, MKL, BLIS or NumPy from the kernels that they would choose for this processor.
PINS = ("OPENBLAS_CORETYPE", "MKL_ENABLE_INSTRUCTIONS", "BLIS_ARCH_TYPE", "NPY_DISABLE_CPU_FEATURES")
CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
OPTIONAL = """
    threadpoolctl tiktoken tqdm tyro matplotlib datasets ml_dtypes onednn-cpu-gomp numba mkl
""".split()
PACKAGES = {"numba": "numba", "onednn": onednn.DISTRIBUTION}  # what providers need, by their names
SPEED = "`tricycle machine --speed` measures fractions of peak, and where a step's time goes"
NOTHING = "nothing that this program knows of"
WIDTH, INDENT = 110, 12


@dataclass(frozen=True)
class Arguments:
    """What to tell.

    Args:
        kernels: list all kernels with the providers that are asked for NumPy arrays, in order.
        speed: measure for about 15 seconds which fraction of peak a training step reaches, and where its time goes.
    """

    kernels: bool = False
    speed: bool = False


def installed(*packages: str) -> list[str]:
    """Those of the packages that are installed, each with its version."""
    found = []
    for package in packages:
        try:
            found.append(f"{package}=={version(package)}")
        except PackageNotFoundError:
            continue
    return found


def processor(cpuinfo: str) -> str:
    """Its name, cores and instructions, from the text of Linux's /proc/cpuinfo ("" elsewhere)."""
    fields = fields_of(cpuinfo)
    name = fields.get("model name") or platform.processor() or platform.machine() or "unknown"
    flags = fields.get("flags", "").split()
    if flags:
        known = [f"{'' if flag in flags else 'no '}{instruction}" for instruction, flag in INSTRUCTIONS.items()]
        instructions = ", ".join(known)
    else:
        simd = (np.show_config(mode="dicts") or {}).get("SIMD Extensions", {})
        instructions = "bf16 and AMX unknown; NumPy uses " + " ".join(simd.get("found") or ["none it could choose"])
    return f"{name}, {os.cpu_count()} logical cores; {instructions}"


def blas() -> str:
    """Which BLAS NumPy calls, and the kernels that it chose."""
    pins = [f"pinned by {name}={os.environ[name]}" for name in PINS if os.environ.get(name)]
    found = [
        f"{library.internal_api} {library.version or ''}, {getattr(library, 'architecture', None) or 'unknown'} kernels"
        for library in threads.blas_libraries()
    ]
    if not found:
        built = (np.show_config(mode="dicts") or {}).get("Build Dependencies", {}).get("blas", {})
        found = [f"{built.get('name', 'unknown')} {built.get('version', '')}, kernels unknown"]
    return ", ".join(found + pins)


def setter() -> str | None:
    """The variable that says how many threads there are."""
    names = ["TRICYCLE_NUM_THREADS", "OMP_NUM_THREADS"]
    names += [f"{library.internal_api.upper()}_NUM_THREADS" for library in threads.blas_libraries()]
    return next((name for name in names if os.environ.get(name, "").split(",")[0].isdecimal()), None)


def thread_report() -> str:
    number = threads.n_threads()
    name = setter()
    why = f"set by {name}={os.environ[name]}" if name else "no variable sets them (TRICYCLE_NUM_THREADS would)"
    of_blas = "/".join(str(library.num_threads) for library in threads.blas_libraries()) or "unknown"
    return f"{number}, {why}; of BLAS: {of_blas}"


def host_report() -> str:
    """What Tricycle's programs, of which this is one, change of their own process."""
    done = host.tune_host()
    changes = [
        "freed memory stays with the process, in huge pages" if done.keeps_memory else "",
        "BLAS computes in one thread, and Tricycle's threads share its work" if done.holds_blas else "",
    ]
    told = "; ".join(change for change in changes if change)
    if not told:
        return f"left alone, by {host.SWITCH}=0" if os.environ.get(host.SWITCH) == "0" else "left alone"
    return f"programs tune it: {told} ({host.SWITCH}=0 switches this off)"


def nvidia_smi(*words: str) -> list[str]:
    """The lines that NVIDIA's own program prints; none where it is not there."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run([program, *words], capture_output=True, text=True, errors="replace", timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines()


def gpus() -> list[str]:
    """The GPUs that NVIDIA's driver shows, whether CuPy can use them or not."""
    return [line.split(" (UUID")[0] for line in nvidia_smi("-L") if line.startswith("GPU")]


def driver() -> str:
    versions = nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")
    return f"driver {versions[0].strip()}" if versions else "driver unknown"


def gpu_libraries() -> dict[str, str | None]:
    """What makes a GPU's matrix products and attention, or why it cannot."""
    found: dict[str, str | None] = {}
    for module in (gemm, cudnn):
        problem = module.problem()
        found[problem or module.version()] = problem
    return found


def speed_report() -> str:
    """How fast matrices are multiplied, and which share of that training reaches."""
    problem = onednn.problem()
    said = [
        f"{found.product_rate / 1e9:,.0f} GFLOP/s in {found.precision}, of which a training step reaches "
        f"{found.fraction:.0%}"
        for found in speed.measure_precisions(speed.SMALL_GPT, seconds=0)
    ]
    return "; ".join([*said, f"no bfloat16: {problem}"] if problem else said)


def advice(shown: list[str], problem: str | None) -> list[str]:
    """Return what would make it faster, given the GPUs that the driver shows and why none can be used."""
    pins = [name for name in PINS if os.environ.get(name)]
    found = [f"unset {name}: it may keep NumPy from the best kernels for this processor" for name in pins]
    cores, name = os.cpu_count() or 1, setter()
    if name and threads.n_threads() < cores:
        found.append(f"unset {name}: {threads.n_threads()} of {cores} logical cores are in use")
    names = [name for name in ("numba", "onednn", "numpy") if excluded(name) and installed(PACKAGES.get(name, name))]
    if names:
        found.append(f"unset {VARIABLE}={os.environ[VARIABLE]}: it excludes {', '.join(names)}")
    if not installed("threadpoolctl"):
        found.append("pip install threadpoolctl: Tricycle can then share all of its work between the cores")
    if not installed("numba"):
        found.append(
            "pip install 'tricycle-gpt[fast]': Numba compiles what lies between products, and models write faster"
        )
    elif onednn.EXTRA in (onednn.problem() or "") and processor_facts.computes_bfloat16():
        found.append(f"{onednn.EXTRA}: this processor has instructions for products of bfloat16")
    if float32_products.EXTRA in (float32_products.problem() or ""):
        found.append("pip install 'tricycle-gpt[mkl]': Intel's library multiplies fastest on this processor (220 MB)")
    if shown and problem:
        found.append(f"use {', '.join(shown)}: {problem}")
    if problem is None:
        found += [f"on the GPU: {lacking}" for lacking in gpu_libraries().values() if lacking]
    return found


def kernel_report() -> str:
    """Return who is asked for each kernel of NumPy arrays, in order, and why other providers are not."""
    KERNELS["matmul"].implementations_for(np.ndarray)  # all providers register, and list their kernels
    asked = {name: [*map(provider_name, kernel.registered.get(np.ndarray, ()))] for name, kernel in KERNELS.items()}
    width = max(map(len, asked))
    cpuinfo = Path("/proc/cpuinfo")
    lines = [f"CPU: {processor(cpuinfo.read_text(encoding='utf-8', errors='replace') if cpuinfo.exists() else '')}", ""]
    lines += [f"{name:<{width}}  {', '.join(dict.fromkeys([*names, PLAIN]))}" for name, names in sorted(asked.items())]
    lines += ["", *(f"{name} is not asked: {reason}" for name, reason in UNAVAILABLE.items())]
    return "\n".join(lines).rstrip()


def report() -> str:
    cpuinfo, shown, problem = Path("/proc/cpuinfo"), gpus(), devices.gpu_problem()
    cupy = ", ".join(installed(*CUPY))
    in_use = [f"{', '.join(shown) or 'there'}, in use after .to_gpu()"]
    in_use += [driver(), *gpu_libraries()] if not problem else []
    tuned = host_report()  # first, for it may set the threads of BLAS
    rows = {
        "Tricycle": f"{tricycle.__version__}, in {Path(tricycle.__file__).parent}",
        "Python": f"{platform.python_version()}, {platform.system()} {platform.machine()}",
        "arrays": f"NumPy {np.__version__}" + ("" if problem else f"; on a GPU {cupy or 'CuPy'}"),
        "GPU": f"none in use: {problem}" if problem else "; ".join(in_use),
        "CPU": processor(cpuinfo.read_text(encoding="utf-8", errors="replace") if cpuinfo.exists() else ""),
        "BLAS": blas(),
        "threads": thread_report(),
        "host": tuned,
        "products": speed_report(),
        "packages": ", ".join(installed(*OPTIONAL)) or "none",
        "missing": ", ".join(name for name in OPTIONAL if not installed(name)) or "none",
    }
    lines = [
        textwrap.fill(
            value,
            WIDTH,
            initial_indent=f"{name:<{INDENT}}",
            subsequent_indent=" " * INDENT,
            break_long_words=False,
            break_on_hyphens=False,
        )
        for name, value in rows.items()
    ]
    lines.insert([*rows].index("products") + 1, " " * INDENT + SPEED)
    return "\n".join([*lines, *advice_lines(advice(shown, problem))])


def advice_lines(found: list[str]) -> list[str]:
    """Return the end of a report."""
    return ["", "What would make it faster:", *(f"  {line}" for line in found or [NOTHING])]


def fraction_report() -> str:
    """Measure which fraction of peak a training step reaches; return the tables and the advice."""
    host.tune_host()  # as the programs that train do
    print("measuring for about 15 seconds", end="" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)
    config = speed.config_for(speed.product_rate())
    speeds = speed.measure_precisions(config)
    found = advice(gpus(), devices.gpu_problem()) + speed.advice(speeds)
    return "\n".join([speed.report(speeds, config), *advice_lines(found)])


def main() -> int:
    arguments = Arguments()
    if sys.argv[1:]:
        from tricycle_cli.flags import parse

        arguments = parse(Arguments, description=__doc__ or "")
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    if arguments.kernels:
        print(kernel_report())
    if arguments.speed:
        print(fraction_report())
    if not (arguments.kernels or arguments.speed):
        print(report())
    return 0
