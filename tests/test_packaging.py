"""What is shipped: dependencies, imports, line budget, and rules that hold for every file."""

import ast
import io
import os
import re
import subprocess
import sys
import tokenize
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
EXTRAS = PROJECT["project"]["optional-dependencies"]
PACKAGES = ("tricycle", "tricycle_accelerators", "tricycle_cli", "tricycle_datasets", "tricycle_lab")
LIBRARY = sorted((ROOT / "tricycle").rglob("*.py"))
AROUND = sorted(path for name in PACKAGES[1:] for path in (ROOT / name).rglob("*.py"))
SHIPPED = [*LIBRARY, *AROUND, ROOT / "train_smol_gpt.py", ROOT / "inference.py"]
MODULES = [".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for path in SHIPPED]
CORE = "tricycle tricycle.tensor tricycle.ops tricycle.layers tricycle.models tricycle.loss tricycle.optimisers"


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


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
    name, versions = re.fullmatch(r"([\w-]+)(?:\[\w+\])?(.*)", requirement).groups()
    name = "cupy" if name.startswith("cupy-cuda") else ON_CONDA.get(name, name)
    return name + versions


@pytest.mark.parametrize(("file", "extras"), ENVIRONMENTS.items())
def test_conda_environments_equal_the_project(file, extras):
    environment = yaml.safe_load((ROOT / file).read_text(encoding="utf-8"))
    assert environment.keys() == {"name", "channels", "dependencies"}
    assert environment["name"] == "tricycle"
    assert environment["channels"] == ["conda-forge", "nodefaults"]
    *found, pip = environment["dependencies"]
    assert pip == {"pip": ["--editable ."]}
    wanted = [f"python{PROJECT['project']['requires-python']}", "pip"]
    wanted += map(for_conda, PROJECT["project"]["dependencies"])
    for extra in extras:
        # conda has no packages of pip's NVIDIA names; what needs them says so and is skipped
        wanted += (for_conda(requirement) for requirement in EXTRAS[extra] if not requirement.startswith("nvidia-"))
    wanted += ["cuda-version=13.*"] * ("cuda13" in extras)
    assert sorted(found) == sorted(set(wanted))
    assert len(set(found)) == len(found)


def test_the_extras():
    assert EXTRAS.keys() >= {"bf16", "cuda12", "cuda13", "datasets", "test", "dev"}
    for number in ("12", "13"):
        assert f"cupy-cuda{number}x[ctk]>=14.2,<15" in EXTRAS[f"cuda{number}"]
        assert {for_conda(requirement) for requirement in EXTRAS[f"cuda{number}"]} == CONDA_CUDA
    assert any(requirement.startswith("datasets>=") for requirement in EXTRAS["datasets"])
    assert {re.match(r"[\w-]+", requirement)[0] for requirement in EXTRAS["test"]} >= {"pytest", "hypothesis", "pyyaml"}
    assert PROJECT["project"]["name"] == "tricycle-gpt"
    assert PROJECT["project"]["requires-python"] == ">=3.11"
    assert "numpy>=2.1" in PROJECT["project"]["dependencies"]


def test_what_is_imported_is_declared():
    """Every package imported anywhere is a dependency or in an extra."""
    requirements = [*PROJECT["project"]["dependencies"], *(one for extra in EXTRAS.values() for one in extra)]
    declared = {re.match(r"[\w-]+", requirement)[0].lower() for requirement in requirements}
    # by cupy-cuda12x and -13x (twice), nvidia-cudnn-frontend, pooch, tiktoken
    declared |= {"cupy", "cuda", "cudnn", "requests", "tiktoken_ext"}
    ours = {*PACKAGES, "train_smol_gpt", "inference"}
    for path in SHIPPED:
        for module in imported(path, everywhere=True):
            top = module.split(".")[0]
            assert top in ours | sys.stdlib_module_names or top.lower() in declared, f"{name_of(path)} imports {top}"


def test_every_package_and_the_type_marker_are_shipped():
    packages = {name_of(path.parent).replace("/", ".") for path in SHIPPED if path.name == "__init__.py"}
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == packages
    assert "py.typed" in PROJECT["tool"]["setuptools"]["package-data"]["tricycle"]
    assert (ROOT / "tricycle" / "py.typed").is_file()
    assert "MIT" in (ROOT / "LICENSE").read_text(encoding="utf-8")


# -------------------------------------------------------------------- imports
def python(program: str, *words: str, folder: Path = ROOT) -> str:
    """What a program prints, on either stream."""
    command = [sys.executable, "-W", "error", "-c", program, *words]
    done = subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": str(ROOT)}, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_the_core_needs_numpy_alone():
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


@pytest.mark.parametrize("names", [CORE, " ".join(MODULES)], ids=["core", "everything"])
def test_importing_runs_nothing_and_loads_nothing_heavy(tmp_path, names):
    program = """
import importlib, sys, threading
for name in sys.argv[1:]:
    importlib.import_module(name)
heavy = "cupy matplotlib tiktoken torch datasets requests pooch tqdm safetensors sklearn".split()
print(*(name for name in heavy if name in sys.modules), *(["threads"] if threading.active_count() > 1 else []))
"""
    assert python(program, *names.split(), folder=tmp_path).split() == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("path", SHIPPED, ids=name_of)
def test_nothing_happens_at_module_level(path):
    """Besides definitions, constants and the programs' last two lines."""
    allowed = (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.ClassDef, ast.Assign, ast.AnnAssign)
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.If):
            assert ast.unparse(node.test) in ("TYPE_CHECKING", "__name__ == '__main__'")
        elif isinstance(node, ast.Expr):
            docstring = isinstance(node.value, ast.Constant)
            registering = ast.unparse(node).startswith(("register(", "setattr(Tensor"))
            assert docstring or registering, f"{name_of(path)}:{node.lineno}"
        elif isinstance(node, ast.For):
            assert name_of(path) in ("tricycle/ops.py", "tricycle/einsum.py", "tricycle/kernels/__init__.py")
        else:
            assert isinstance(node, allowed), f"{name_of(path)}:{node.lineno}"


# Each room uses only those before it.
ROOMS = re.findall(
    r"\S+",
    """
    files backend tensor
    kernels.reference kernels
    ops einsum functions activation loss
    initialisers layers optimisers scheduler attention blocks convolution recurrent seq2seq
    classifiers autoencoders
    configs models tokeniser dataset
    checkpoint generate training hub gradcheck __main__
    """,
)


def imported(path: Path, everywhere: bool = False) -> set[str]:
    """The modules that a file imports; those within functions too if `everywhere`. Not for type checkers alone."""
    found = set()

    def look(nodes) -> None:
        for node in nodes:
            if isinstance(node, ast.Import):
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{name_of(path)}:{node.lineno} imports relatively"
                inside = ROOT.joinpath(*node.module.split("."))
                for alias in node.names:
                    is_module = (inside / f"{alias.name}.py").exists() or (inside / alias.name).is_dir()
                    found.add(f"{node.module}.{alias.name}" if is_module else node.module)
            elif isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
                continue
            elif everywhere or not isinstance(node, (ast.FunctionDef, ast.Lambda)):
                look(ast.iter_child_nodes(node))

    look(ast.parse(path.read_text(encoding="utf-8")).body)
    return found


@pytest.mark.parametrize("path", [path for path in LIBRARY if path.name != "__init__.py"], ids=name_of)
def test_imports_follow_the_order_of_the_rooms(path):
    own = ".".join(path.relative_to(ROOT / "tricycle").with_suffix("").parts)
    assert own in ROOMS, f"tricycle/{own}.py has no place in the order of the rooms"
    for module in imported(path):
        if module.startswith("tricycle."):
            room = module.removeprefix("tricycle.")
            assert ROOMS.index(room) < ROOMS.index(own), f"{own} imports {room}"
        outside = module.startswith(("tricycle_", "benchmarks", "tests", "experiments"))
        assert not outside or own == "__main__"


def test_cupy_is_imported_in_backend_and_accelerators_alone():
    for path in SHIPPED:
        if "cupy" in {module.split(".")[0] for module in imported(path, everywhere=True)}:
            assert name_of(path).startswith(("tricycle/backend.py", "tricycle/kernels/", "tricycle_accelerators/"))


# -------------------------------------------------------------------- every file
def code_lines(path: Path) -> int:
    """Lines that hold code: no blanks, comments or docstrings."""
    source = path.read_text(encoding="utf-8")
    marks = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in marks:
            lines.update(range(token.start[0], token.end[0] + 1))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, documented) and ast.get_docstring(node, clean=False) is not None:
            lines -= set(range(node.body[0].lineno, node.body[0].end_lineno + 1))
    return len(lines)


def test_the_line_counter(tmp_path):
    lines = ['"""Doc', "", 'string."""', "# comment", 'x = """two', 'lines"""  # comment', "", "def f():"]
    lines += ['    """Doc."""', "    return (", "        1", "    )", ""]
    (tmp_path / "file.py").write_text("\n".join(lines))
    assert code_lines(tmp_path / "file.py") == 6


@pytest.mark.parametrize(
    ("names", "limit"), [("tensor ops einsum backend", 1000), (None, 4500)], ids=["the engine", "the library"]
)
def test_the_line_budget(names, limit):
    paths = LIBRARY if names is None else [ROOT / "tricycle" / f"{name}.py" for name in names.split()]
    sizes = {name_of(path): code_lines(path) for path in paths}
    assert sum(sizes.values()) <= limit, sizes


@pytest.mark.parametrize("path", [path for path in LIBRARY if path.stem != "__init__"], ids=name_of)
def test_every_module_has_its_tests(path):
    name = "kernels" if path.parent.name == "kernels" else path.stem.strip("_")
    assert (ROOT / "tests" / f"test_{name}.py").is_file()


FILES = [
    path
    for folder in (".", *PACKAGES, "tests", "benchmarks", "experiments", "docs")
    for path in sorted((ROOT / folder).glob("*" if folder == "." else "**/*"))
    if path.suffix in (".py", ".md", ".toml", ".yml", ".cu", ".cuh", "") and path.is_file()
]


def test_no_file_names_the_paths_of_one_machine():
    pattern = re.compile(rf"/({'|'.join(['work', 'farm', 'root', 'tmp', 'home'])})/")
    assert len(FILES) > 60
    found = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in FILES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line)
    ]
    assert found == []


FORBIDDEN = {
    "assert on what may be a user's input": r"^\s*assert\b",
    "unpickling without the allow-list": r"pickle\.loads?\(|allow_pickle=True",
    "global random state": r"np\.random\.(seed|rand|randn|normal|randint|shuffle|choice|random)\(",
    "an error swallowed": r"except( Exception)?:\s*(pass)?$",
    "running text": r"\b(eval|exec|os\.system)\(",
}


@pytest.mark.parametrize("rule", FORBIDDEN)
def test_rules_for_every_line(rule):
    pattern = re.compile(FORBIDDEN[rule])
    found = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in SHIPPED
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if pattern.search(line) and not re.search(r"\.eval\(|def eval\(", line)
    ]
    assert found == []


@pytest.mark.parametrize("path", SHIPPED, ids=name_of)
def test_text_is_read_and_written_as_utf8(path):
    """Not in whatever encoding the system prefers."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Attribute, ast.Name)):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
            if name in ("read_text", "write_text"):
                assert any(keyword.arg == "encoding" for keyword in node.keywords), f"{name_of(path)}:{node.lineno}"
