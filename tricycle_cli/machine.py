"""Report the hardware, libraries and kernel providers that Tricycle uses on this machine."""

from __future__ import annotations

import contextlib
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
from tricycle_accelerators.providers import VARIABLE, exclusion_reason
from tricycle_cli import speed

# Instruction sets that matter for speed, with their names in Linux's /proc/cpuinfo.
INSTRUCTIONS = {"AVX2": "avx2", "AVX-512": "avx512f", "AVX-512 bf16": "avx512_bf16", "AMX bf16": "amx_bf16"}
# Variables that override the kernels that OpenBLAS, MKL, BLIS or NumPy choose for this processor.
PINNING_VARIABLES = ("OPENBLAS_CORETYPE", "MKL_ENABLE_INSTRUCTIONS", "BLIS_ARCH_TYPE", "NPY_DISABLE_CPU_FEATURES")
CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")
OPTIONAL = """
    threadpoolctl tiktoken tqdm tyro matplotlib datasets ml_dtypes onednn-cpu-gomp numba mkl
""".split()
PACKAGES = {"numba": "numba", "onednn": onednn.DISTRIBUTION, "numpy": "numpy"}  # the packages that providers need
SPEED_HINT = "`tricycle machine --speed` measures the fraction of peak and the time of each part of a step"
WIDTH, INDENT = 110, 12


@dataclass(frozen=True)
class Arguments:
    """The flags of `tricycle machine`.

    Args:
        kernels: list all kernels with their providers for NumPy arrays, in order of priority.
        speed: measure for about 15 seconds the fraction of peak of a training step, and the time of its parts.
    """

    kernels: bool = False
    speed: bool = False


def installed(*packages: str) -> list[str]:
    """Return those of the packages that are installed, each as "NAME==VERSION"."""
    found = []
    for package in packages:
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{package}=={version(package)}")
    return found


def read_cpuinfo() -> str:
    """Return the text of Linux's /proc/cpuinfo; "" on other systems."""
    path = processor_facts.CPUINFO
    return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""


def describe_processor(cpuinfo: str) -> str:
    """Describe the processor, given Linux's /proc/cpuinfo ("" elsewhere): name, logical cores, and instruction sets."""
    fields = processor_facts.parse_cpuinfo(cpuinfo)
    name = fields.get("model name") or platform.processor() or platform.machine() or "unknown"
    if "cpu family" in fields:  # virtual machines often hide the number that follows "AMD EPYC"
        name += f" (family {fields['cpu family']}, model {fields.get('model')})"
    flags = fields.get("flags", "").split()
    if flags:
        instructions = ", ".join(("" if flag in flags else "no ") + title for title, flag in INSTRUCTIONS.items())
    else:
        simd = (np.show_config(mode="dicts") or {}).get("SIMD Extensions", {})
        instructions = "bf16 and AMX unknown; NumPy uses " + " ".join(simd.get("found") or ["its baseline"])
    return f"{name}, {os.cpu_count()} logical cores; {instructions}"


def describe_blas() -> str:
    """Describe NumPy's BLAS libraries: name, version, processor type of the kernels, and variables that pin it."""
    pins = [f"pinned by {name}={os.environ[name]}" for name in PINNING_VARIABLES if os.environ.get(name)]
    found = [
        f"{library.internal_api} {library.version or ''}, {getattr(library, 'architecture', None) or 'unknown'} kernels"
        for library in threads.blas_libraries()
    ]
    if not found:
        built = (np.show_config(mode="dicts") or {}).get("Build Dependencies", {}).get("blas", {})
        found = [f"{built.get('name', 'unknown')} {built.get('version', '')}, kernels unknown"]
    return ", ".join(found + pins)


def thread_variable() -> str | None:
    """Return the name of the environment variable that sets the number of threads; None if none is set."""
    names = ["TRICYCLE_NUM_THREADS", "OMP_NUM_THREADS"]
    names += [f"{library.internal_api.upper()}_NUM_THREADS" for library in threads.blas_libraries()]
    return next((name for name in names if os.environ.get(name, "").split(",")[0].isdecimal()), None)


def thread_report() -> str:
    """Describe the number of threads, the variable that sets it, and the number of BLAS threads."""
    number = threads.n_threads()
    name = thread_variable()
    origin = f"set by {name}={os.environ[name]}" if name else "the default (set TRICYCLE_NUM_THREADS to change it)"
    n_blas_threads = "/".join(str(library.num_threads) for library in threads.blas_libraries()) or "unknown"
    return f"{number}, {origin}; BLAS threads: {n_blas_threads}"


def host_report() -> str:
    """Tune this process (malloc, BLAS threads) as every command does; return a line that describes the changes."""
    done = host.tune_host()
    changes = [
        "freed memory stays with the process, in huge pages" if done.keeps_memory else "",
        "BLAS uses one thread, and Tricycle divides matrix products among its own threads" if done.holds_blas else "",
    ]
    described = "; ".join(change for change in changes if change)
    if described:
        return f"tuned: {described} ({host.SWITCH}=0 disables this)"
    return f"not tuned ({host.SWITCH}=0)" if os.environ.get(host.SWITCH) == "0" else "not tuned"


def nvidia_smi(*words: str) -> list[str]:
    """Run nvidia-smi with arguments; return its output lines, [] if it is missing, does not start, or takes 10 s."""
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    try:
        done = subprocess.run([program, *words], capture_output=True, text=True, errors="replace", timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return []
    return done.stdout.splitlines()


def gpu_names() -> list[str]:
    """Return the names of the GPUs that nvidia-smi lists, including GPUs that CuPy cannot use; [] without a driver."""
    return [line.split(" (UUID")[0] for line in nvidia_smi("-L") if line.startswith("GPU")]


def driver_version() -> str:
    """Return the text "driver VERSION" for NVIDIA's driver, or "driver unknown"."""
    versions = nvidia_smi("--query-gpu=driver_version", "--format=csv,noheader")
    return f"driver {versions[0].strip()}" if versions else "driver unknown"


def gpu_libraries() -> dict[str, str | None]:
    """Return a dict of GPU libraries for matmul and attention: version to None if it works, else problem to problem."""
    problems = [(module, module.unavailable_reason()) for module in (gemm, cudnn)]
    return {problem or module.version_text(): problem for module, problem in problems}


def speed_report() -> str:
    """Measure float32 (and bfloat16); return a line: matmul GFLOP/s, and a training step's fraction of that rate."""
    problem = onednn.unavailable_reason()
    rates = [
        f"{found.product_rate / 1e9:,.0f} GFLOP/s in {found.precision} (training step: {found.fraction:.0%} of peak)"
        for found in speed.measure_precisions(speed.SMALL_GPT, seconds=0)
    ]
    return "; ".join([*rates, f"no bfloat16: {problem}"] if problem else rates)


def advice(listed_gpus: list[str], gpu_problem: str | None) -> list[str]:
    """Return suggestions for more speed: variables to unset, packages to install, GPUs that are not used.

    Args:
        listed_gpus: the names of the GPUs that the driver lists.
        gpu_problem: the reason why no GPU can be used; None if one can be used.
    """
    pins = [name for name in PINNING_VARIABLES if os.environ.get(name)]
    found = [f"unset {name}: it may prevent the best kernels for this processor" for name in pins]
    cores, name = os.cpu_count() or 1, thread_variable()
    if name and threads.n_threads() < cores:
        found.append(f"unset {name}: {threads.n_threads()} of {cores} logical cores are in use")
    names = [name for name, package in PACKAGES.items() if exclusion_reason(name) and installed(package)]
    if names:
        found.append(f"unset {VARIABLE}={os.environ[VARIABLE]}: it excludes {', '.join(names)}")
    if not installed("threadpoolctl"):
        found.append("pip install threadpoolctl: Tricycle can then divide matrix products among the cores")
    if not installed("numba"):
        found.append("pip install 'tricycle-gpt[fast]': Numba compiles the kernels besides matrix products")
    elif onednn.EXTRA in (onednn.unavailable_reason() or "") and processor_facts.has_fast_bfloat16():
        found.append(f"{onednn.EXTRA}: this processor has instructions for bfloat16 matrix products")
    lacks_mkl = float32_products.EXTRA in (float32_products.unavailable_reason() or "")
    if lacks_mkl and not processor_facts.has_amx_bfloat16():
        found.append("pip install 'tricycle-gpt[mkl]': MKL has the fastest matrix products on this processor (220 MB)")
    if listed_gpus and gpu_problem:
        found.append(f"use {', '.join(listed_gpus)}: {gpu_problem}")
    if gpu_problem is None:
        found += [f"on the GPU: {lacking}" for lacking in gpu_libraries().values() if lacking]
    return found


def kernel_report() -> str:
    """Return lines: the CPU, each kernel's providers for NumPy arrays by priority, and why others are unavailable."""
    KERNELS["matmul"].implementations_for(np.ndarray)  # all providers register their kernels
    providers = {name: [*map(provider_name, kernel.registered.get(np.ndarray, ()))] for name, kernel in KERNELS.items()}
    width = max(map(len, providers))
    lines = [f"CPU: {describe_processor(read_cpuinfo())}", ""]
    for name, names in sorted(providers.items()):
        lines.append(f"{name:<{width}}  {', '.join(dict.fromkeys([*names, PLAIN]))}")
    lines += ["", *(f"{name} is unavailable: {reason}" for name, reason in UNAVAILABLE.items())]
    return "\n".join(lines).rstrip()


def report() -> str:
    """Tune the process, measure for seconds; return a report: versions, hardware, threads, speed, packages, advice."""
    shown, problem = gpu_names(), devices.gpu_problem()
    cupy = ", ".join(installed(*CUPY))
    in_use = [f"{', '.join(shown) or 'available'}, used after .to_gpu()"]
    in_use += [driver_version(), *gpu_libraries()] if not problem else []
    tuned = host_report()  # first, because it may set the number of BLAS threads
    rows = {
        "Tricycle": f"{tricycle.__version__}, in {Path(tricycle.__file__).parent}",
        "Python": f"{platform.python_version()}, {platform.system()} {platform.machine()}",
        "arrays": f"NumPy {np.__version__}" + ("" if problem else f"; on a GPU {cupy or 'CuPy'}"),
        "GPU": f"not used: {problem}" if problem else "; ".join(in_use),
        "CPU": describe_processor(read_cpuinfo()),
        "BLAS": describe_blas(),
        "threads": thread_report(),
        "process": tuned,
        "matmul": speed_report(),
        "packages": ", ".join(installed(*OPTIONAL)) or "none",
        "optional": "not installed: " + (", ".join(name for name in OPTIONAL if not installed(name)) or "none"),
    }
    wrapper = textwrap.TextWrapper(
        WIDTH, subsequent_indent=" " * INDENT, break_long_words=False, break_on_hyphens=False
    )
    lines = []
    for name, value in rows.items():
        wrapper.initial_indent = f"{name:<{INDENT}}"
        lines.append(wrapper.fill(value))
    lines.insert([*rows].index("matmul") + 1, " " * INDENT + SPEED_HINT)
    return "\n".join([*lines, *advice_lines(advice(shown, problem))])


def advice_lines(found: list[str]) -> list[str]:
    """Return the last section of a report as lines: a title and the indented suggestions, or "nothing to suggest"."""
    return ["", "Suggestions for more speed:", *(f"  {line}" for line in found or ["nothing to suggest"])]


def fraction_report() -> str:
    """Measure for 15 s which fraction of the CPU's peak a training step reaches; return tables and suggestions."""
    host.tune_host()  # as the commands for training do
    print("measuring for about 15 seconds", end="" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)
    config = speed.config_for(speed.product_rate())
    speeds = speed.measure_precisions(config)
    found = advice(gpu_names(), devices.gpu_problem()) + speed.advice(speeds)
    return "\n".join([speed.report(speeds, config), *advice_lines(found)])


def main() -> int:
    """Run `tricycle machine`: print a report of this machine, or with flags the kernels' providers or speed tables."""
    arguments = Arguments()
    if sys.argv[1:]:
        from tricycle_cli.flags import parse

        arguments = parse(Arguments, description=__doc__ or "")
    sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]
    reports = [kernel_report] * arguments.kernels + [fraction_report] * arguments.speed
    for write in reports or [report]:
        print(write())
    return 0
