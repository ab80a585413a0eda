"""The documentation site: what it must name, and that it builds without a warning."""

import ast
import os
import re
import subprocess
import sys
from functools import cache
from html.parser import HTMLParser
from pathlib import Path

import pytest
from imports import ROOT, SHIPPED, module_of, name_of, tree_of
from pages import STUB
from tiny_models import smollm2_file

DOCS = ROOT / "docs"
DESCRIBED = ("tricycle", "tricycle_lab", "tricycle_mpi", "tricycle_datasets")
NOTEBOOKS = sorted((DOCS / "notebooks").glob("*.py"))


def is_described(path: Path) -> bool:
    """Whether the reference has the module of a file."""
    package = name_of(path).split("/")[0]
    return (package in DESCRIBED and path.name != "__main__.py") or module_of(path) == "tricycle_accelerators.host"


PUBLIC = [path for path in SHIPPED if is_described(path)]


# -------------------------------------------------------------------- what there must be
def test_reference_lists_every_public_module_once(monkeypatch):
    monkeypatch.syspath_prepend(str(DOCS / "_extensions"))
    pytest.importorskip("sphinx")
    from repository import remaining_modules

    pages = [path.read_text(encoding="utf-8") for path in sorted((DOCS / "reference").glob("*.rst"))]
    named = re.findall(r"^\.\. automodule:: (\S+)$", "\n".join(pages), re.MULTILINE)
    titles = re.findall(r"^(tricycle\S*)\n-+\n\n\.\. automodule:: \1$", "\n".join(pages), re.MULTILINE)
    assert len(titles) == len(named)
    remaining = [module for modules in remaining_modules().values() for module in modules]
    assert sorted(named + remaining) == sorted(map(module_of, PUBLIC))


def test_table_of_contents_lists_every_page():
    index = (DOCS / "index.md").read_text(encoding="utf-8")
    trees = re.findall(r"^```\{toctree\}\n(.*?)^```$", index, re.MULTILINE | re.DOTALL)
    named = [line for tree in trees for line in tree.splitlines() if line and not line.startswith(":")]
    pages = [path for suffix in ("md", "rst", "py") for path in DOCS.rglob(f"*.{suffix}")]
    pages = [path for path in pages if path.name not in ("index.md", "conf.py") and path.parent.name != "_extensions"]
    assert sorted(named) == sorted(path.relative_to(DOCS).with_suffix("").as_posix() for path in pages)


def test_stub_pages_show_existing_files():
    shown = set()
    for path in DOCS.rglob("*.md"):
        if stub := STUB.match(path.read_text(encoding="utf-8")):
            assert (path.parent / stub[1]).is_file(), stub[1]
            shown.add(Path(os.path.relpath(path.parent / stub[1], ROOT)).as_posix())
    expected = {name_of(path) for path in (ROOT / "experiments").glob("**/README.md")}
    kept = {name for name in ("SECURITY.md", "CONTRIBUTING.md", "CHANGELOG.md") if (ROOT / name).is_file()}
    results = {name_of(path) for path in (ROOT / "benchmarks").glob("**/*.md")}
    assert shown >= expected | kept | results


def test_notebook_runs_as_script(tmp_path):
    """The other notebooks, which take longer, run when the site is built."""
    environment = {**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", str(DOCS / "notebooks" / "autograd.py")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    by_hand, by_difference, by_tricycle, fitted = done.stdout.splitlines()
    assert by_hand.split()[1][:6] == by_difference[:6] == "1.2391"
    assert "Tensor(1.23910" in by_tricycle
    first, last = map(float, fitted.split())
    assert last < 0.05 * first


@pytest.mark.nightly
def test_circuit_notebook_finds_a_faithful_circuit(tmp_path):
    pytest.importorskip("gguf")
    environment = {**os.environ, "MPLBACKEND": "Agg", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    smollm2_file()
    command = [sys.executable, str(DOCS / "notebooks" / "circuit.py")]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    assert float(re.search(r"correlation .*: ([\d.]+)", done.stdout)[1]) > 0.9
    faithfulness = {
        int(n): float(value) for n, value in re.findall(r"(\d+) heads: faithfulness (-?[\d.]+)", done.stdout)
    }
    assert abs(faithfulness[0]) < 0.1 and faithfulness[32] > 0.7 and faithfulness[270] == pytest.approx(1, abs=0.02)


# -------------------------------------------------------------------- the site
class Page(HTMLParser):
    """What a page links to, what it loads, and the places in it."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list) -> None:
        values = dict(attributes)
        self.places.update(filter(None, (values.get("id"), values.get("name"))))
        if tag == "a" and values.get("href"):
            self.links.append(values["href"])
        elif tag in ("script", "img") and values.get("src"):
            self.loaded.append(values["src"])
        elif tag == "link" and values.get("href"):
            self.loaded.append(values["href"])


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """A site that was built just now, by .ci/run or here."""
    if "TRICYCLE_SITE" in os.environ:
        return Path(os.environ["TRICYCLE_SITE"])
    for needed in ("sphinx", "furo", "myst_nb", "jupytext", "latex2mathml"):
        pytest.importorskip(needed)
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "-q", "-j", "2", "-W", "--keep-going", str(DOCS), str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, encoding="utf-8", timeout=900)
    assert done.returncode == 0, done.stderr
    return folder


# Looking through a site takes seconds, building it minutes.
needs_a_site = pytest.mark.slow if "TRICYCLE_SITE" in os.environ else pytest.mark.nightly


@cache
def page_at(path: Path) -> Page:
    return Page(path.read_text(encoding="utf-8"))


@needs_a_site
def test_links_have_targets_and_pages_load_nothing_external(site):
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 150
    for path in pages:
        for target in page_at(path).loaded:
            assert target.startswith(("data:", "#")) or (path.parent / target.split("?")[0]).exists(), (path, target)
        for link in page_at(path).links:
            if not re.match(r"[a-z]+:", link):
                _leads_somewhere(site, path, link)


def _leads_somewhere(site: Path, path: Path, link: str) -> None:
    place, _, anchor = link.partition("#")
    target = Path(os.path.normpath(path.parent / place)) if place else path
    if not target.is_relative_to(site):  # a file of the repository, for a site that lies in it
        assert (ROOT / target.relative_to(site.parent)).exists(), (path, link)
        return
    assert target.exists(), (path, link)
    assert not anchor or target.suffix != ".html" or anchor in page_at(target).places, (path, link)


def names_in(path: Path) -> list[str]:
    """Public functions, classes and methods that a file defines, with the module's name in front."""
    names = []
    for node in tree_of(path).body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            names.append(f"{module_of(path)}.{node.name}")
            if isinstance(node, ast.ClassDef):
                methods = [part for part in node.body if isinstance(part, ast.FunctionDef)]
                names += [f"{names[-1]}.{part.name}" for part in methods if not part.name.startswith("_")]
    return list(dict.fromkeys(names))


@needs_a_site
def test_reference_has_every_public_name(site):
    from sphinx.util.inventory import InventoryFile

    with open(site / "objects.inv", "rb") as file:
        inventory = InventoryFile.load(file, "", os.path.join)
    objects = getattr(inventory, "data", inventory)  # a dict before Sphinx 8.2 or so
    described = {name for kind in objects for name in objects[kind] if kind.startswith("py:")}
    missing = [name for path in PUBLIC for name in names_in(path) if name not in described]
    assert missing == []
    assert len(described) > 1500


@needs_a_site
def test_notebooks_show_their_outputs(site):
    for path in NOTEBOOKS:
        page = (site / "notebooks" / f"{path.stem}.html").read_text(encoding="utf-8")
        if path.stem in ("smollm2", "circuit"):
            try:
                from tricycle.pretrained.smollm2 import smollm2_path

                smollm2_path()
            except FileNotFoundError:
                continue  # it is shown without its outputs
            assert ("Rome" if path.stem == "smollm2" else "faithfulness") in page
        assert re.search(r'<img[^>]* src="\.\./_images/', page), path
        assert 'class="output' in page
    page = (site / "notebooks" / "finetune.html").read_text(encoding="utf-8")
    first, tuned, again = re.findall(r"accuracy, copy: ([\d.]+) reverse: ([\d.]+)", page)
    assert float(first[0]) > 0.75 < float(tuned[1])  # near 0.9 each, by processor and number of threads
    assert again[0] == first[0] or float(again[0]) > 0.75
