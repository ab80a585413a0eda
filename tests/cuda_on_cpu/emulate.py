"""Compile the CUDA kernels for the CPU with g++, and launch them on NumPy arrays in place of `launch.launch`."""

from __future__ import annotations

import ctypes
import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from tricycle_accelerators.cuda.launch import FOLDER, KERNELS, LaunchPlan, read_source, template_name, template_names

HERE = Path(__file__).parent
FLAGS = "-std=c++17 -O1 -shared -fPIC -fno-strict-aliasing -ffp-contract=off -w".split()


def problem() -> str | None:
    """Return why kernels cannot be emulated on this machine; None if they can."""
    if not sys.platform.startswith("linux"):
        return "the emulator of CUDA is written for Linux"
    return None if shutil.which("g++") else "no g++ to compile the kernels for the CPU with"


def program(file: str) -> str:
    """Return a file of kernels as C++, with a table of its kernels.

    Dynamic shared memory, which has no name in C++, becomes a pointer to where the emulator keeps it.
    """
    text = read_source(file, (HERE, FOLDER))
    text = re.sub(
        r"extern __shared__ (?:__align__\(\d+\) )?([\w ]+?) (\w+)\[\];",
        r"\1* const \2 = static_cast<\1*>(emulator::shared());",
        text,
    )
    cases = "".join(
        f"case {i}: return emulator::launch(&{name}, arguments, grid, block, n_shared, order);\n"
        for i, name in enumerate(template_names(file))
    )
    return f"""#include "emulator.h"
{text}
extern "C" const char* run(
    int which, void** arguments, const unsigned* grid, const unsigned* block, size_t n_shared, int order
) {{
    switch (which) {{ {cases} }}
    return "no such kernel";
}}
"""


@cache
def library(file: str, folder: Path) -> ctypes.CDLL:
    written, made = folder / f"{file}.cpp", folder / f"{file}.so"
    written.write_text(program(file), encoding="utf-8")
    done = subprocess.run(
        ["g++", *FLAGS, f"-I{HERE}", str(written), "-o", str(made)], stderr=subprocess.PIPE, text=True
    )
    if done.returncode:
        raise RuntimeError(done.stderr[:4000])
    found = ctypes.CDLL(str(made))
    found.run.restype = ctypes.c_char_p
    return found


class Emulator:
    """Launches kernels on NumPy arrays.

    Attributes:
        order: which thread goes first (see emulator.h).
        launched: the kernels that ran.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self.order, self.launched = folder, 0, []

    def launch(self, file: str, kernel: str, template: tuple[str, ...], plan: LaunchPlan, *arguments: Any) -> None:
        if template not in KERNELS[file][kernel]:
            raise ValueError(f"{file}.cu: no {template_name(kernel, template)} in the table")
        plan.check()
        self.launched.append((kernel, template))
        held = [_argument_bytes(argument) for argument in arguments]
        pointers = (ctypes.c_void_p * len(held))(*(ctypes.addressof(each) for each in held))
        grid, block = ((ctypes.c_uint * 2)(*pair) for pair in (plan.grid, plan.block))
        which = template_names(file).index(template_name(kernel, template))
        error = library(file, self.folder).run(
            which, pointers, grid, block, ctypes.c_size_t(plan.shared), ctypes.c_int(self.order)
        )
        if error:
            raise RuntimeError(f"{template_name(kernel, template)} with {plan}: {error.decode()}")


def _argument_bytes(argument: Any) -> ctypes.Array:
    """Return the bytes of an argument: of a number or struct, or of the address of an array."""
    if argument is None:
        given = np.uint64(0).tobytes()
    elif isinstance(argument, np.generic) or argument.dtype.names:
        given = argument.tobytes()
    else:
        given = np.uint64(argument.ctypes.data).tobytes()
    return ctypes.create_string_buffer(given, max(8, len(given)))
