"""The README of each study contains its tables; missing data gives an error that names the file."""

import importlib
import json
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from studies import ROOT, readme

from experiments.learned_statistics.blocks import ResultRows
from experiments.shared.results import read
from tricycle_datasets.download import DownloadError

FOLDERS = sorted(path.parent.name for path in (ROOT / "experiments").glob("*/README.md"))
Results = dict[str, Any]


def report_of(name: str) -> Any:
    return importlib.import_module(f"experiments.{name}.report")


def all_tables(*keys: str) -> Callable[[str, Results], Iterator[str]]:
    """`tables` of a report, called with parts of results.json."""
    return lambda name, results: report_of(name).tables(*(results[key] for key in keys)).values()


def learned_statistics(name: str, results: Results) -> Iterator[str]:
    yield from report_of(name).tables(results["rows"], results["attention"]).values()
    yield report_of(name).recovered_loss_table(
        read(ROOT / "experiments" / name / "results" / "equal_start.json")["rows"]
    )


def max_retrieval(name: str, results: Results) -> Iterator[str]:
    falling = read(ROOT / "experiments" / name / "results" / "falling.json")
    assert falling["settings"]["decay"] and not results["settings"]["decay"]
    for found in (results, falling):
        yield report_of(name).accuracy_table(found["sizes"], found["runs"])


def dates(name: str, results: Results) -> Iterator[str]:
    yield from report_of(name).tables(results["runs"]).values()
    yield report_of(name).multiple_dates_table(read(ROOT / "experiments" / name / "results" / "several.json")["runs"])


def finetuning(name: str, results: Results) -> Iterator[str]:
    yield from report_of(name).tables(results).values()
    yield report_of(name).main_table(read(ROOT / "experiments" / name / "results" / "qlora.json"))


TABLES: dict[str, Callable[[str, Results], Iterator[str]]] = {
    "anomalies": all_tables("runs"),
    "attention_sink": all_tables("results"),
    "autoencoder": all_tables("runs", "settings"),
    "code_features": all_tables("results"),
    "comparison": lambda name, results: report_of(name).tables(results).values(),
    "dates": dates,
    "finetuning": finetuning,
    "learned_statistics": learned_statistics,
    "max_retrieval": max_retrieval,
    "model_kinds": lambda name, results: report_of(name).tables(results).values(),
    "names": all_tables("runs", "classes", "confusion"),
    "second_derivatives": lambda name, results: report_of(name).tables(results).values(),
    "sentiment": all_tables("runs", "words"),
    "sink_circuits": all_tables("runs"),
}


@pytest.mark.parametrize("name", TABLES)
def test_tables_of_results_are_in_the_readme(name):
    results = read(ROOT / "experiments" / name / "results" / "results.json")
    assert not results["settings"].get("quick")
    text, tables = readme(name), list(TABLES[name](name, results))
    assert tables and all(table in text for table in tables)


@pytest.mark.parametrize(("name", "n_tables"), [("ten_minutes", 4), ("translation", 4)])
def test_tables_of_result_folders_are_in_the_readme(name, n_tables):
    folder, report = ROOT / "experiments" / name / "results", report_of(name)
    tables = report.tables(folder) if name == "ten_minutes" else report.tables(report.load_runs(folder))
    assert len(tables) == n_tables and all(table in readme(name) for table in tables.values())


@pytest.mark.parametrize("name", ["names", "sentiment"])
def test_stored_recipes_equal_the_code(name):
    study = importlib.import_module(f"experiments.{name}.study")
    recipes = json.loads(json.dumps({model: vars(recipe) for model, recipe in study.RECIPES.items()}))
    assert read(ROOT / "experiments" / name / "results" / "results.json")["recipes"] == recipes


def test_tables_of_pretrained_scales_are_in_the_readme(tmp_path):
    from experiments.learned_statistics import pretrained_report
    from experiments.learned_statistics.pretrained_study import FREE, PretrainedSettings

    shutil.copy(ROOT / "experiments" / "learned_statistics" / "results" / "pretrained" / "results.json", tmp_path)
    settings = PretrainedSettings(output=tmp_path)
    tables = pretrained_report.tables(pretrained_report.Results(ResultRows(settings, FREE), settings))
    assert all(table in readme("learned_statistics") for table in tables.values())


def test_tables_of_smollm2_are_in_the_readmes():
    from experiments.max_retrieval import pretrained_report as max_retrieval_report
    from experiments.quiet_attention import pretrained_report as quiet_attention_report

    found = read(ROOT / "experiments" / "quiet_attention" / "results" / "smollm2.json")
    tables = quiet_attention_report.tables(found, quiet_attention_report.grouped(found["variants"]))
    del tables["Seconds"]
    assert all(table in readme("quiet_attention") for table in tables.values())
    found = read(ROOT / "experiments" / "max_retrieval" / "results" / "smollm2" / "results.json")
    tables = max_retrieval_report.tables(found)
    del tables["The start of ln n"]
    assert len(tables) == 5 and all(table in readme("max_retrieval") for table in tables.values())


@pytest.mark.parametrize("name", FOLDERS)
def test_every_result_file_is_documented_or_json(name):
    """Each file of results is named in the documentation, or is JSON, from which tables are made."""
    pages = (page.read_text(encoding="utf-8") for page in (ROOT / "docs").rglob("*.md"))
    text = "\n".join([*pages, readme(name)])
    for path in (ROOT / "experiments" / name / "results").rglob("*.*"):
        place = path.relative_to(ROOT / "experiments" / name).as_posix()
        assert place in text or path.suffix == ".json", place


@pytest.mark.parametrize(
    ("dataset", "word", "file"),
    [
        ("names", "Arabic", "Arabic.txt"),
        ("rt_polarity", "", "rt-polarity.neg"),
        ("mnist", "train", "train-images-idx3"),
    ],
)
def test_missing_and_wrong_dataset_files_raise(tmp_path, monkeypatch, dataset, word, file):
    for name in ("TRICYCLE_DATA", "TRICYCLE_CACHE"):
        monkeypatch.setenv(name, str(tmp_path / name))
    module = importlib.import_module(f"tricycle_datasets.{dataset}")
    monkeypatch.setattr(module, "URL", "http://127.0.0.1:9/{name}")
    load = lambda: getattr(module, f"load_{dataset}")(*word.split())
    with pytest.raises(DownloadError, match=file):
        load()
    by_hand = tmp_path / "TRICYCLE_DATA" / dataset.replace("_", "-") / file
    if by_hand.suffix:
        by_hand.parent.mkdir(parents=True)
        by_hand.write_text("another file\n", encoding="utf-8")
        with pytest.raises(ValueError, match=f"{file}: .*SHA-256"):
            load()
