"""Providers of kernels: their names, who of them is asked, and what they say of arguments (`kernels.explain`)."""

import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from imports import imported
from test_threads import run_with

from tricycle import kernels
from tricycle.debug import use_reference
from tricycle.kernels import KERNELS
from tricycle.kernels.dispatch import Kernel
from tricycle.kernels.explanation import UNAVAILABLE, explain, provider_name
from tricycle_accelerators import __path__ as accelerators
from tricycle_accelerators import compiled, onednn, registry

A = np.ones((200, 160), np.float32)


def in_process(code: str, **variables: str) -> str:
    """What a new process prints."""
    done = run_with(f"import numpy as np\nfrom tricycle import kernels\n{code}", **variables)
    return done.stdout + done.stderr


# -------------------------------------------------------------------- explain
def test_first_provider_that_supports_the_arguments_runs():
    explanation = kernels.explain(kernels.matmul, A, A.T)
    reasons = [answer.reason for answer in explanation.answers]
    assert explanation.kernel == "matmul" and None in reasons
    assert explanation.provider == explanation.answers[reasons.index(None)].provider
    names = [answer.provider for answer in explanation.answers]
    assert names.index("numpy") < names.index("plain")
    assert explanation == kernels.explain("matmul", A, A.T)
    assert str(explanation).startswith(f"matmul: {explanation.provider} runs (")


def test_explained_provider_runs(monkeypatch):
    """For products of all shapes: the version that is named first without a reason gives the result."""
    rng = np.random.default_rng(0)
    for shape in ((1, 600, 900), (4, 600, 900), (300, 96, 128), (2, 3, 4), (1, 3, 4)):
        for order in "CF":
            a = rng.standard_normal(shape[:2]).astype(np.float32)
            b = np.asarray(rng.standard_normal(shape[1:]).astype(np.float32), order=order)
            expected = kernels.explain(kernels.matmul, a, b)
            versions, ran = kernels.matmul.registered[np.ndarray], []

            def noting(*args, version, ran=ran):
                result = version(*args)
                ran += [] if result is NotImplemented else [version]
                return result

            noted = [(None, partial(noting, version=version)) for version in versions]
            with monkeypatch.context() as patch:
                patch.setitem(kernels.matmul.implementations, np.ndarray, noted)
                kernels.matmul(a, b)
            assert [provider_name(version) for version in ran][-1:] == [expected.provider]


def test_explain_computes_nothing():
    weights, grad, first, second = (np.ones(5, np.float32) for _ in range(4))
    kernels.explain(kernels.adamw, weights, grad, first, second, 1, 0.1, (0.9, 0.99), 1e-8, 0.1)
    assert all((array == 1).all() for array in (weights, grad, first, second))


def test_explain_names_the_package_of_a_user_provider():
    class Array(np.ndarray):
        pass

    kernel = Kernel(lambda x: "plain")
    kernel.register(Array)(lambda x: "mine")
    explanation = explain(kernel, np.ones(3).view(Array))
    assert explanation.provider == __name__.split(".")[0]


def test_within_a_block_of_the_reference_the_plain_version_runs():
    with use_reference():
        explanation = kernels.explain(kernels.matmul, A, A.T)
    assert explanation.provider == "plain"
    assert "use_reference" in explanation.answers[0].reason


def test_explain_rejects_unknown_kernels():
    with pytest.raises(ValueError, match=r"adamw, .*'product'"):
        kernels.explain("product", A)
    with pytest.raises(ValueError, match="<kernel matmul>"):
        kernels.explain(kernels.matmul)


# -------------------------------------------------------------------- who is asked
@pytest.mark.nightly_except(2)
@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        ("numpy", {"numpy"}),
        ("plain", set()),
        ("-numba", {"onednn", "numpy"}),
        ("-onednn, -numba", {"numpy"}),
        ("numba,numpy", {"numba", "numpy"}),
        ("numba,numpy,-numba", {"numpy"}),
    ],
)
def test_environment_variable_selects_and_excludes_providers(variable, expected):
    code = """
kernels.matmul(np.ones((2, 2), np.float32), np.ones((2, 2), np.float32))
from tricycle.kernels.explanation import provider_name
print(*sorted({provider_name(v) for kernel in kernels.KERNELS.values() for v in kernel.registered.get(np.ndarray, ())}))
print(kernels.explain("matmul", np.ones((2, 2), np.float32), np.ones((2, 2), np.float32)))
"""
    here = {provider.PROVIDER for provider in (compiled, onednn) if provider.unavailable_reason() is None}
    names, *explanation = in_process(code, TRICYCLE_KERNELS=variable).splitlines()
    assert set(names.split()) == expected & (here | {"numpy"})
    excluded = {"numba", "onednn", "numpy"} - expected
    assert all(any(line.split()[:3] == [name, "excluded", "by"] for line in explanation) for name in excluded)


def test_an_unknown_provider_is_rejected():
    message = in_process("kernels.matmul(np.ones((2, 2)), np.ones((2, 2)))", TRICYCLE_KERNELS="numpy,-mlk")
    assert re.search("TRICYCLE_KERNELS: .*onednn.*got 'numpy,-mlk'", message)


def test_unavailable_providers_give_a_reason(monkeypatch):
    class Array(np.ndarray):
        pass

    monkeypatch.setattr(compiled, "unavailable_reason", lambda: "not today")
    monkeypatch.setitem(UNAVAILABLE, "numba", "")
    registry.register_numpy(Array)
    for kernel in KERNELS.values():
        kernel.registered.pop(Array, None)
        kernel.implementations.pop(Array, None)
    assert UNAVAILABLE["numba"] == "not today"
    (answer,) = (answer for answer in kernels.explain("gelu", A).answers if answer.reason == "not today")
    assert answer.provider == "numba"


@pytest.mark.parametrize(("version", "is_old"), [("0.61.2", True), ("0.62.0", False), ("1.0", False)])
def test_numba_that_crashes_is_not_used(version, is_old, monkeypatch):
    monkeypatch.setattr(compiled, "exclusion_reason", lambda name: None)
    monkeypatch.setattr(compiled, "find_spec", lambda name: name)
    monkeypatch.setattr(compiled, "version", lambda name: version)
    assert bool(re.search("0.62.*0.61.2.*pip install", compiled.unavailable_reason() or "")) == is_old


# -------------------------------------------------------------------- packages
FOLDER = Path(accelerators[0])
PACKAGES = sorted(path.parent.name for path in FOLDER.glob("*/__init__.py"))


@pytest.mark.parametrize("package", PACKAGES)
def test_no_provider_imports_another(package):
    """What two of them need is a module of tricycle_accelerators itself; registry.py alone knows them all."""
    assert {"compiled", "cpu", "cuda", "onednn"} <= set(PACKAGES)
    others = {("tricycle_accelerators", other) for other in PACKAGES if other != package}
    for path in sorted((FOLDER / package).rglob("*.py")):
        across = sorted(name for name in imported(path) if tuple(name.split(".")[:2]) in others)
        assert not across, f"{path.relative_to(FOLDER)} imports {', '.join(across)}"
