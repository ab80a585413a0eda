"""Compile every CUDA kernel with NVRTC, without a GPU, and report registers and memory for several architectures.

`python -m tricycle_accelerators.cuda` prints it as a table. Needs NVRTC and CUDA's headers, as `cupy-cuda13x[ctk]`
brings them, or the packages nvidia-cuda-nvrtc and nvidia-cuda-runtime alone.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from tricycle_accelerators.cuda.launch import CUPY_OPTIONS, KERNELS, OPTIONS, read_source, template_names

ARCHITECTURES = ("sm_80", "sm_90", "sm_100")


class KernelUsage(NamedTuple):
    """The registers, shared memory and local memory that a compiled kernel uses.

    Registers are of a thread, static shared memory (bytes) of a block, stack and spills (bytes) of a thread.
    """

    kernel: str
    architecture: str
    registers: int
    shared: int
    stack: int
    spills: int


def _installed(pattern: str) -> Path | None:
    """Return the first file of an nvidia-cuda-* package whose path matches a regular expression, or None."""
    for distribution in metadata.distributions():
        if (distribution.metadata["Name"] or "").lower().startswith("nvidia-cuda-"):
            for file in distribution.files or ():
                if re.fullmatch(pattern, file.as_posix()):
                    return Path(str(distribution.locate_file(file)))
    return None


# Cache: valid for the life of the process: what is installed later is found after a restart.
@cache
def unavailable_reason() -> str | None:
    """Return, cached, why CUDA kernels cannot be compiled (no headers or NVRTC), in one line; None when they can."""
    if _headers() is None:
        return "CUDA's headers are not installed (pip install 'nvidia-cuda-runtime==13.0.*')"
    if _installed(_NVRTC) is None:
        return "NVRTC is not installed (pip install 'nvidia-cuda-nvrtc==13.0.*')"
    return None


_NVRTC = r".*/(libnvrtc\.so\.\d+|nvrtc64_\d+_\d+\.dll)"
_BUILTINS = r".*/(libnvrtc-builtins\.so\.[\d.]+|nvrtc-builtins64_\d+\.dll)"


def _headers() -> Path | None:
    """Return the folder of the installed CUDA headers, or None."""
    header = _installed(r".*/include/cuda_bf16\.h")
    return None if header is None else header.parent


# Cache: valid for the life of the process: a loaded library.
@cache
def _nvrtc() -> ctypes.CDLL:
    """Load and return NVRTC and, if installed, its built-ins (cached); ImportError if it is not available."""
    if unavailable_reason():
        raise ImportError(unavailable_reason())
    builtins = _installed(_BUILTINS)
    if builtins is not None:  # NVRTC looks for it by name alone
        ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
    library = ctypes.CDLL(str(_installed(_NVRTC)))
    library.nvrtcGetErrorString.restype = ctypes.c_char_p
    return library


def compile_file(file: str, architecture: str) -> Iterator[KernelUsage]:
    """Compile the kernels of `file`.cu for an architecture and yield each one's KernelUsage; RuntimeError if it fails.

    Raises:
        RuntimeError: with the compiler's words.
    """
    nvrtc, program = _nvrtc(), ctypes.c_void_p()
    names = template_names(file)

    def call(name: str, *arguments: Any) -> None:
        code = getattr(nvrtc, name)(*arguments)
        if code:
            said = nvrtc.nvrtcGetErrorString(code).decode()
            raise RuntimeError(f"{file}.cu for {architecture}: {name}: {said}\n{text('ProgramLog') if program else ''}")

    def text(what: str) -> str:
        size = ctypes.c_size_t()
        getattr(nvrtc, f"nvrtcGet{what}Size")(program, ctypes.byref(size))
        log = ctypes.create_string_buffer(size.value)
        getattr(nvrtc, f"nvrtcGet{what}")(program, log)
        return log.value.decode()

    call("nvrtcCreateProgram", ctypes.byref(program), read_source(file).encode(), f"{file}.cu".encode(), 0, None, None)
    for name in names:
        call("nvrtcAddNameExpression", program, name.encode())
    options = (f"--gpu-architecture={architecture}", *OPTIONS, *CUPY_OPTIONS, f"-I{_headers()}", "--ptxas-options=-v")
    words = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
    call("nvrtcCompileProgram", program, len(options), words)
    mangled, lowered = {}, ctypes.c_char_p()
    for name in names:
        call("nvrtcGetLoweredName", program, name.encode(), ctypes.byref(lowered))
        mangled[(lowered.value or b"").decode()] = name
    log = text("ProgramLog")
    call("nvrtcDestroyProgram", ctypes.byref(program))
    yield from parse_usages(log, mangled, architecture)


def parse_usages(log: str, mangled: dict[str, str], architecture: str) -> Iterator[KernelUsage]:
    """Yield the KernelUsage of each kernel of `mangled` (symbol: C++ name) from a log; ValueError if one is missing.

    Args:
        mangled: from the names in the log to those in C++.

    Raises:
        ValueError: a kernel is missing in the log.
    """
    for symbol, name in mangled.items():
        part = re.search(rf"Compiling entry function '{re.escape(symbol)}'(.*?)(?=Compiling entry|\Z)", log, re.DOTALL)
        said = part[1] if part else ""
        numbers = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", said)
        registers, shared = re.search(r"Used (\d+) registers", said), re.search(r"(\d+) bytes smem", said)
        if numbers is None or registers is None:
            raise ValueError(f"expected the assembler's words on {name} for {architecture}, got {log[:2000]!r}")
        stack, stores, loads = map(int, numbers.groups())
        used = int(shared[1]) if shared else 0
        yield KernelUsage(name, architecture, int(registers[1]), used, stack, stores + loads)


def format_table(usages: list[KernelUsage]) -> str:
    """Return a Markdown table of kernels: registers per architecture, maximal shared memory, and stack plus spills."""
    names = list(dict.fromkeys(usage.kernel for usage in usages))
    where = list(dict.fromkeys(usage.architecture for usage in usages))
    lines = [f"| kernel | registers {' / '.join(where)} | shared bytes | stack and spills |"]
    lines.append("| --- | --- | --- | --- |")
    for name in names:
        own = [usage for usage in usages if usage.kernel == name]
        registers = " / ".join(str(usage.registers) for usage in own)
        local = max(usage.stack + usage.spills for usage in own)
        lines.append(f"| `{name}` | {registers} | {max(usage.shared for usage in own)} | {local} |")
    return "\n".join(lines)


def compile_all() -> list[KernelUsage]:
    """Compile every kernel for every architecture without a GPU; return each one's KernelUsage (registers, memory)."""
    return [usage for file in KERNELS for where in ARCHITECTURES for usage in compile_file(file, where)]
