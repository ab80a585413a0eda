"""docs/architecture.md speaks of the code as it is: its files, its functions, its lines."""

import ast
import re
import sys

import numpy as np
import pytest
from imports import ROOT, SHIPPED, name_of, tree_of
from test_rooms import LIBRARY

from tricycle import kernels
from tricycle.configs import ModelConfig
from tricycle.kernels.explanation import provider_name
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.optimisers import AdamW
from tricycle.training import apply_gradients, compute_gradients, supervised_loss
from tricycle_accelerators import compiled, onednn, processor

PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
TEXT = re.sub(r"^```.*?^```$", "", PAGE, flags=re.MULTILINE | re.DOTALL)  # blocks are run by test_pages.py
IN_TICKS = re.findall(r"`([^`\n]+)`", TEXT)
STOPS = re.findall(r"^### (\d+)\. .*?`([\w/]+\.py):([\w.]+)`$(.*?)(?=^##)", TEXT, re.MULTILINE | re.DOTALL)
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
PLACES = sorted(set(re.findall(r"`([\w/]+\.py:[\w.]+)`", TEXT + GLOSSARY)))
OTHERS = ("np", "loss", "pyproject", "x")  # what a dotted name may begin with besides our modules


def defined_in(tree: ast.Module) -> set[str]:
    """Names of functions, classes, methods ("Class.method"), constants, and what a module imports to hand on."""
    names = set()
    for node in tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names.update(target.id for target in targets if isinstance(target, ast.Name))
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            names.update(alias.asname or alias.name for alias in node.names)
        if isinstance(node, ast.ClassDef):
            names.update(f"{node.name}.{part.name}" for part in node.body if isinstance(part, ast.FunctionDef))
    return names


def exists(file: str, name: str) -> bool:
    path = ROOT / file
    return path.is_file() and name in defined_in(tree_of(path))


# -------------------------------------------------------------------- names
def test_each_term_of_the_glossary_names_its_code():
    terms = re.findall(r"^- .*$", GLOSSARY, re.MULTILINE)
    assert len(terms) > 140
    assert [term for term in terms if not re.search(r"\(`[\w/]+\.py:[\w.]+`\)$", term)] == []


@pytest.mark.parametrize("place", PLACES)
def test_code_references_of_architecture_and_glossary_exist(place):
    file, name = place.split(":")
    assert exists(file, name)


@pytest.mark.parametrize("file", sorted({t for t in IN_TICKS if re.fullmatch(r"[\w/]+(\.py|/)", t)}))
def test_paths_on_the_page_exist(file):
    """Below the root, tricycle/ or tricycle_accelerators/."""
    assert any((ROOT / folder / file).exists() for folder in (".", "tricycle", "tricycle_accelerators"))


def test_dotted_names_exist():
    """`kernels.matmul` is a kernel; so is every other name that begins with a module of the library."""
    dotted = [ticked for ticked in IN_TICKS if re.fullmatch(r"[a-z]\w*(\.\w+)+", ticked) and not ticked.endswith(".py")]
    checked = [ticked for ticked in dotted if ticked.split(".")[0] not in OTHERS and not ticked.endswith(".toml")]
    assert "kernels.matmul" in checked
    for ticked in checked:
        *modules, name = ticked.split(".")
        place = "/".join(["tricycle", *modules])
        assert exists(f"{place}.py", name) or exists(f"{place}/__init__.py", name), ticked


def test_undotted_names_occur_in_the_code():
    """A name that the page gives without its place occurs somewhere in the code."""
    single = {ticked for ticked in IN_TICKS if re.fullmatch(r"[A-Za-z_]\w*", ticked)}
    words = {word for path in SHIPPED for word in re.findall(r"\w+", path.read_text(encoding="utf-8"))}
    assert len(single) > 10 and single - words == set()


# -------------------------------------------------------------------- the map
def test_file_tables_list_every_library_file():
    """Each file and folder of tricycle/ is in the reading list's table, or in the one below it."""
    linked = set(re.findall(r"\(\.\./tricycle/([\w/]+(?:\.py)?)\)", TEXT))
    in_list = {name for name in linked if f"`{name}`" in TEXT and name.endswith(".py")}
    for path in LIBRARY:
        name = name_of(path).removeprefix("tricycle/")
        assert name in in_list or name.split("/")[0] in linked, name


def test_page_lists_every_top_level_folder():
    around = {name_of(path).split("/")[0] for path in SHIPPED if "/" in name_of(path)} - {"tricycle"}
    for folder in (*around, "experiments", "benchmarks"):
        assert f"| [`{folder}/`](../{folder})" in TEXT or f", [`{folder}/`](../{folder})" in TEXT


# -------------------------------------------------------------------- the stops


@pytest.mark.parametrize("stop", STOPS, ids=lambda stop: stop[0])
def test_quoted_code_matches_its_function(stop):
    """Indented lines stand in the function that the stop is about, one after another."""
    _, file, name, text = stop
    assert exists(file, name)
    quoted = [line.strip() for line in re.findall(r"^    (.+)$", text, re.MULTILINE)]
    lines = [line.strip() for line in source_of(file, name)]
    starts = [i for i in range(len(lines)) if lines[i : i + len(quoted)] == quoted]
    assert starts or not quoted, f"{file}:{name} has no lines {quoted}"
    assert len(quoted) < 6


def source_of(file: str, name: str) -> list[str]:
    """The lines of a function or method."""
    body: list[ast.stmt] = tree_of(ROOT / file).body
    for part in name.split("."):
        (node,) = (node for node in body if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and node.name == part)
        body = node.body
    return (ROOT / file).read_text(encoding="utf-8").splitlines()[node.lineno - 1 : node.end_lineno]


def test_training_step_calls_the_quoted_functions_in_order():
    """Functions that are called or left: of an op its backward function, whose name begins with the op's."""
    model = GPT(ModelConfig(vocab_size=17, context_window=8, embedding_dim=8, n_heads=2, n_layers=1))
    tokens = np.arange(16).reshape(2, 8)
    events: list[str] = []

    def note(frame, event, argument):
        if event in ("call", "return"):
            events.append(f"{frame.f_code.co_filename}:{frame.f_code.co_qualname}")

    sys.setprofile(note)
    try:
        grads = compute_gradients(model, supervised_loss(model, CrossEntropy()), [(tokens, tokens)])
        apply_gradients(model, AdamW(), grads)
    finally:
        sys.setprofile(None)
    place = 0
    for _, file, name, _ in STOPS:
        expected = f"{ROOT / file}:{name}"
        in_backward = expected + ".<locals>.backward"
        expected = in_backward if in_backward in events else expected
        assert expected in events[place:], f"{file}:{name} is not reached after the stop before it"
        place = events.index(expected, place) + 1


def test_matmul_providers_are_listed_in_dispatch_order():
    kernels.matmul(np.ones((2, 2), np.float32), np.ones((2, 2), np.float32))
    providers = [
        f"{version.__module__.replace('.', '/')}.py:matmul" for version in kernels.matmul.registered[np.ndarray]
    ]
    (text,) = (text for *_, name, text in STOPS if name == "Kernel.__call__")
    named = re.findall(r"`(tricycle_accelerators/(?!cuda)\w+/\w+\.py:matmul)`", text)
    assert [place for place in named if place in providers] == providers
    assert named[-1] == providers[-1]


def test_provider_table_matches_a_training_step(monkeypatch):
    kernels.matmul(np.ones((2, 2), np.float32), np.ones((2, 2), np.float32))  # all have registered
    taken: dict[str, set[str]] = {}

    def noting(name, version, provider):
        def noted(*args, **options):
            result = version(*args, **options)
            if result is not NotImplemented:
                taken.setdefault(name, set()).add(provider)
            return result

        return noted

    for name, kernel in kernels.KERNELS.items():
        versions = [(version, provider_name(version)) for version in kernel.registered.get(np.ndarray, ())]
        noted = [(None, noting(name, *version)) for version in (*versions, (kernel.reference, "plain"))]
        monkeypatch.setitem(kernel.implementations, np.ndarray, noted)
    page = (ROOT / "docs" / "log" / "speed.md").read_text(encoding="utf-8")
    text = page.partition("## Providers of a training step")[2]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) ?\| (.*?) ?\|$", text, re.MULTILINE)
    everywhere = {"numpy", "plain"}  # these take what others would elsewhere
    if processor.has_amx_bfloat16():
        everywhere.add("numba")
    for place, precision in ((1, "float32"), (2, "bfloat16")):
        if precision == "bfloat16" and onednn.unavailable_reason():
            continue
        documented = {row[0]: set(row[place].split(", ")) for row in rows if row[place]}
        shape = {"vocab_size": 500, "context_window": 128, "embedding_dim": 128, "n_heads": 4, "n_layers": 2}
        model = GPT(ModelConfig(**shape)).use_precision(precision)
        tokens = np.arange(512).reshape(4, 128) % 500
        taken.clear()
        apply_gradients(
            model, AdamW(), compute_gradients(model, supervised_loss(model, CrossEntropy()), [(tokens, tokens)])
        )
        if compiled.unavailable_reason():
            taken.pop("multiply", None)  # of NumPy's provider of gelu_backward
        assert set(taken) == set(documented)
        others = (
            everywhere
            if compiled.unavailable_reason() or onednn.unavailable_reason() or processor.is_intel()
            else set()
        )
        assert all(taken[name] <= documented[name] | others for name in documented), taken
