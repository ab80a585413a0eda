"""The kernel registry: order of providers, registration by entry points, and the reference kernels."""

import inspect
import os
import shutil
import subprocess
import sys
import threading
import tomllib
from importlib import metadata
from types import SimpleNamespace

import numpy as np
import pytest
from implementations import registered_by
from programs import ROOT, call, good
from test_kernels import CASES, IN_PLACE, draw

from tricycle.debug import use_reference
from tricycle.kernels import KERNELS
from tricycle.kernels.dispatch import ENTRY_POINT_GROUP, Kernel
from tricycle_accelerators import compiled, cpu, cuda, onednn, registry


# -------------------------------------------------------------------- order of providers
class Box:
    """An array type without built-in kernels."""


def scale(x, factor: float, shift: float = 0.0):
    """Reference kernel."""
    return "plain", factor, shift


@pytest.fixture
def kernel() -> Kernel:
    return Kernel(scale)


def test_reference_runs_without_providers(kernel):
    assert kernel(Box(), 2) == ("plain", 2, 0.0)
    assert kernel.reference is scale


def test_providers_are_tried_in_registration_order(kernel):
    tried = []

    @kernel.register(Box)
    def for_large(x, factor: float, shift: float = 0.0):
        tried.append("for large")
        return ("large", factor, shift) if factor > 10 else NotImplemented

    @kernel.register(Box)
    def for_positive(x, factor: float, shift: float = 0.0):
        tried.append("for positive")
        return ("positive", factor, shift) if factor > 0 else NotImplemented

    assert for_large(Box(), 0) is NotImplemented  # the decorator gives the function back
    tried.clear()
    assert [kernel(Box(), factor)[0] for factor in (11, 1, -1)] == ["large", "positive", "plain"]
    assert tried == ["for large", "for large", "for positive", "for large", "for positive"]
    assert kernel("an array of another type", 11)[0] == "plain"
    with pytest.raises(KeyError), use_reference():
        with use_reference():
            pass
        assert kernel(Box(), 11)[0] == "plain"
        raise KeyError
    assert kernel(Box(), 11)[0] == "large"


def test_provider_may_register_after_the_first_call(kernel):
    assert kernel(Box(), 11)[0] == "plain"
    kernel.register(Box)(lambda x, factor, shift=0.0: "late")
    assert kernel(Box(), 11) == "late"


def test_returning_none_is_not_declining(kernel):
    kernel.register(Box)(lambda x, factor, shift=0.0: None)
    assert kernel(Box(), 1) is None


def test_arguments_may_be_keywords(kernel):
    kernel.register(Box)(lambda x, factor, shift=0.0: (type(x).__name__, factor, shift))
    assert kernel(Box(), factor=3, shift=1) == ("Box", 3, 1)
    assert kernel(shift=1, factor=3, x=Box()) == ("Box", 3, 1)
    assert kernel(factor=3, x="else") == ("plain", 3, 0.0)
    with pytest.raises(TypeError, match="factor"):
        kernel(x=Box())
    with pytest.raises(TypeError):
        kernel()


def test_kernel_has_signature_and_docstring_of_its_function(kernel):
    assert kernel.__name__ == "scale" and kernel.__doc__ == "Reference kernel."
    assert inspect.signature(kernel) == inspect.signature(scale)
    assert repr(kernel) == "<kernel scale>"


# -------------------------------------------------------------------- who registers
@pytest.fixture
def entries(monkeypatch):
    """Replace the installed entry points."""
    registered = []
    monkeypatch.setattr(
        metadata,
        "entry_points",
        lambda group, name: [e for e in registered if (group, name) == (ENTRY_POINT_GROUP, e.name)],
    )
    return registered


def new_array_type(library: str) -> type:
    return type("ndarray", (), {"__module__": f"{library}.core"})


def test_entry_point_loads_at_the_first_array_of_its_library(kernel, entries):
    calls, array_type = [], new_array_type("boxes")

    def register(array):
        calls.append(array)
        kernel.register(array)(lambda x, factor, shift=0.0: "fast")

    entries += [
        SimpleNamespace(name="boxes", module="fast.boxes", load=lambda: register),
        SimpleNamespace(name="others", module="fast.others", load=lambda: pytest.fail("not asked for")),
    ]
    assert [kernel(array_type(), 1) for _ in range(3)] == ["fast"] * 3
    assert Kernel(scale)(array_type(), 1)[0] == "plain"
    assert calls == [array_type]


def test_missing_package_is_skipped_but_other_import_errors_raise_on_every_call(kernel, entries):
    def missing(name: str):
        raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    entries.append(SimpleNamespace(name="boxes", module="fast.boxes", load=lambda: missing("fast")))
    assert kernel(new_array_type("boxes")(), 1)[0] == "plain"
    entries[0].load = lambda: missing("numpyy")
    array = new_array_type("boxes")()
    for _ in range(2):
        with pytest.raises(ModuleNotFoundError, match="numpyy"):
            kernel(array, 1)


def test_concurrent_calls_wait_for_registration(kernel, entries):
    """A concurrent first call waits until registration is complete, so that it uses the same kernels."""
    array_type, begun, answers = new_array_type("boxes"), threading.Event(), []

    def register(array):
        kernel.register(array)(lambda x, factor, shift=0.0: NotImplemented)
        begun.set()
        second.join(0.2)
        kernel.register(array)(lambda x, factor, shift=0.0: "fast")

    entries.append(SimpleNamespace(name="boxes", module="fast.boxes", load=lambda: register))

    def call() -> None:
        begun.wait(10)
        answers.append(kernel(array_type(), 1))

    second = threading.Thread(target=call)
    second.start()
    answers.append(kernel(array_type(), 1))
    second.join(10)
    assert answers == ["fast", "fast"]


def test_installed_entry_points_match_the_project():
    """If they differ, fast kernels are silently unused: reinstall after a change (pip install -e .)."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    expected = project["entry-points"][ENTRY_POINT_GROUP]
    assert {entry.name: entry.value for entry in metadata.entry_points(group=ENTRY_POINT_GROUP)} == expected
    loaded = {entry.name: entry.load() for entry in metadata.entry_points(group=ENTRY_POINT_GROUP)}
    assert loaded == {"numpy": registry.register_numpy, "cupy": registry.register_cupy}


@pytest.mark.parametrize(
    "name", ["kernels.sum_squares", "batched.run_over_batch", "muon.orthogonalize", "recurrent.prepare_matrix"]
)
def test_first_call_registers_providers_of_every_module(name):
    """The first call of any kernel loads the entry points of its array type."""
    pytest.importorskip("numba")  # the only provider of prepare_matrix
    code = f"""
import numpy as np
from tricycle import kernels
from tricycle.kernels import {name.split(".")[0]}
{name}(np.ones((1, 2, 2), np.float32), {"lambda items: None" if "run_over_batch" in name else ""})
assert {name}.registered[np.ndarray]
from tricycle.kernels import batched, muon, recurrent
for other in (kernels.sum_squares, batched.run_over_batch, muon.orthogonalize, recurrent.prepare_matrix):
    assert other.registered[np.ndarray]
"""
    good(call("-c", code.replace("from tricycle.kernels import kernels\n", "")))


# -------------------------------------------------------------------- all kernels
VERSIONS = [
    (name, version)
    for register in (compiled.register, onednn.register, cpu.register, cuda.register)
    for name, versions in registered_by(register).items()
    for version in versions
]


def parameters(function) -> list[tuple]:
    return [(p.name, p.kind, p.default) for p in inspect.signature(function).parameters.values()]


@pytest.mark.parametrize(("name", "version"), VERSIONS, ids=[f"{f.__module__}.{f.__name__}" for _, f in VERSIONS])
def test_providers_have_the_signature_of_the_reference(name, version):
    assert version.__name__ == name
    assert parameters(version) == parameters(KERNELS[name].reference)
    assert version.__module__.split(".")[0] == "tricycle_accelerators"
    signature = inspect.signature(version)
    assert all(p.annotation is not p.empty for p in signature.parameters.values())
    assert signature.return_annotation is not signature.empty


def outputs_by_name(name: str, named: bool) -> list:
    arguments = draw(name, CASES[name][1][0], np.float64)
    names = list(inspect.signature(KERNELS[name]).parameters)[: len(arguments)]
    result = KERNELS[name](**dict(zip(names, arguments))) if named else KERNELS[name](*arguments)
    if name in IN_PLACE:
        return arguments[IN_PLACE[name]]
    return list(result) if isinstance(result, tuple) else [result]


def has_varying_arguments(name: str) -> bool:
    return any(x.kind is x.VAR_POSITIONAL for x in inspect.signature(KERNELS[name]).parameters.values())


@pytest.mark.parametrize("name", [name for name in CASES if not has_varying_arguments(name)])
def test_kernels_accept_keyword_arguments(name):
    for actual, expected in zip(outputs_by_name(name, True), outputs_by_name(name, False), strict=True):
        np.testing.assert_array_equal(actual, expected)


def test_precision_as_keyword():
    a = np.ones((2, 3), np.float32)
    np.testing.assert_array_equal(KERNELS["matmul"](a, a.T, precision="float32"), np.full((2, 2), 3))


# -------------------------------------------------------------------- without those who make it faster
PROGRAM = """
import sys
from pathlib import Path

# an editable installation would find the packages that are not in this folder
sys.meta_path = [finder for finder in sys.meta_path if "editable" not in repr(finder).lower()]
sys.path = [sys.argv[1], *(path for path in sys.path if not Path(path, "tricycle_accelerators").is_dir())]
import numpy as np

import tricycle
from tricycle import kernels
from tricycle.generate import generate
from tricycle.layers import Dense
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.optimisers import AdamW
from tricycle.configs import DebugConfig
from tricycle.tensor import to_tensor

assert tricycle.__file__.startswith(sys.argv[1]), tricycle.__file__
model, optimiser = GPT(DebugConfig()), AdamW(1e-2)
tokens = np.arange(3 * 21).reshape(3, 21) % 7
losses = []
for _ in range(2):
    loss = CrossEntropy()(to_tensor(tokens[:, 1:], dtype=int), model(to_tensor(tokens[:, :-1], dtype=int)))
    loss.backward()
    model.update(optimiser)
    losses.append(float(loss))
assert losses[1] < losses[0], losses
assert len(list(generate(model, [1, 2, 3], 5, temperature=0))) == 5
assert kernels.gelu.implementations[np.ndarray] == []
assert not any(name.startswith("tricycle_accelerators") for name in sys.modules)
print("trained and talked")
"""


def test_library_works_without_accelerators(tmp_path):
    """A copy without the accelerators trains and generates with the reference kernels."""
    shutil.copytree(ROOT / "tricycle", tmp_path / "tricycle", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-W", "error", "-c", PROGRAM, str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, encoding="utf-8")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "trained and talked\n"
