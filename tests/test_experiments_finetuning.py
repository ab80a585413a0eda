"""experiments/finetuning: sums, docstrings, Shakespeare, and a small interrupted run."""

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from studies import check_tables, run_study
from tables import wrong_flags

pytest.importorskip("tokenizers")
pytest.importorskip("jinja2")

from tiny_models import tiny_tokeniser, write_folder

from experiments.finetuning import docstrings, report, shakespeare, study, sums, tasks
from experiments.finetuning.__main__ import main
from experiments.finetuning.sums import Sum, last_number, number_in_words
from experiments.shared.results import read
from tricycle import training
from tricycle_datasets.examples import ExampleEncoder, read_records

PLAYS = "\n\n".join(
    f"KING {i}:\nThe {i} words of day {i % 7}, my lord, are {'very many ' * (i % 30)}, my lord" for i in range(400)
)


@pytest.fixture(scope="module", autouse=True)
def no_downloads():
    """Texts that are always there."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shakespeare, "plays", lambda: PLAYS)
        patch.setattr(study, "captions", lambda: "two dogs run over the grass.\n" * 9)
        patch.setattr(study, "reviews", lambda: "a quick film, and a lazy one.\n" * 9)
        shakespeare.training_n_grams.cache_clear()
        yield
    shakespeare.training_n_grams.cache_clear()


# -------------------------------------------------------------------- sums
def test_numbers_in_words_round_trip():
    words = "zero, thirteen, twenty, forty-two, one hundred, one hundred nineteen, three hundred forty-two"
    assert ", ".join(map(number_in_words, (0, 13, 20, 42, 100, 119, 342))) == words
    assert all(last_number(f"Seven, no: {number_in_words(n).capitalize()}.") == n for n in range(1000))
    with pytest.raises(ValueError, match="999, got 1000"):
        number_in_words(1000)


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("34 + 17 = 51. Fifty-one.", 51),
        ("so there are 1,200 left!", 1200),
        ("One hundred and forty two apples", 142),
        ("five six", 6),
        ("thirty-four and then", 34),
        ("someone has none; often and tense", None),
        ("", None),
    ],
)
def test_last_number_of_a_text(text, number):
    assert last_number(text) == number


def test_sum_has_the_expected_values_and_answer():
    one = Sum(34, (17, 0, -9))
    assert one.values() == [34, 51, 102, 93]
    assert one.answer() == "34 + 17 = 51. 51 * 2 = 102. 102 - 9 = 93. Ninety-three."


def test_stories_contain_the_numbers_of_their_sums():
    """The numbers of a story are those of its sum, in order; no sum is in two splits."""
    parts = sums.sums(300)
    assert {name: len(part) for name, part in parts.items()} == {"test": 400, "validation": 200, "train": 300}
    every = [one for part in parts.values() for one in part]
    assert len(set(every)) == len(every)
    assert all(0 <= value <= sums.MOST for one in every for value in one.values())
    generator = np.random.default_rng(0)
    for one in every:
        expected = [one.start, *(abs(step) for step in one.steps if step)]
        for tell in (sums.story, sums.bus_story):
            text = tell(one, generator).replace("twice", "")
            assert [last_number(word) for word in text.split() if last_number(word) is not None] == expected
        equations = one.working()
        assert all(eval(line.rstrip(".").replace("=", "==")) for line in equations)


def test_bus_stories_share_no_sentence_with_training_stories():
    generator = np.random.default_rng(0)
    parts = sums.sums(200)
    known = {sentence for one in parts["train"] for sentence in sums.story(one, generator).split(". ")}
    for one in parts["test"]:
        assert not known & set(sums.bus_story(one, generator).removesuffix(sums.ASK).strip().split(". "))


def test_unseen_steps_are_those_absent_from_training():
    trained = [Sum(10, (5, 7))]  # 10 + 5, 15 + 7
    assert sums.unseen_steps([Sum(10, (5, 3)), Sum(15, (7, 0)), Sum(10, (6, 5))], trained) == [False, False, True]


def test_score_sums_by_question_group():
    questions = [
        tasks.Question("", True, "1 + 1 = 2. Two.", tasks.KNOWN),
        tasks.Question("", True, "3 + 4 = 7. Seven.", tasks.NEW),
        tasks.Question("", True, "3 + 5 = 8. Eight.", tasks.OTHER),
    ]
    scores = tasks.score_sums(questions, ["There are 2", "3 + 4 = 7. Seven.", "nine"])
    assert scores == {"right": 1.0, "to the letter": 0.5, "new steps": 1.0, "other wording": 0.0}


# -------------------------------------------------------------------- docstrings
@pytest.mark.nightly
def test_no_module_is_in_two_splits_and_no_docstring_line_in_its_function():
    parts = docstrings.functions()
    modules = [module for part in parts.values() for module in {one.module for one in part}]
    assert len(set(modules)) == len(modules)
    for field in ("line", "code"):
        train = {getattr(one, field).lower() for one in parts["train"]}
        assert not any(getattr(one, field).lower() in train for one in (*parts["test"], *parts["validation"]))
    assert len(parts["train"]) > 4 * len(parts["test"]) > 1000
    assert not any(one.line in one.code for part in parts.values() for one in part)


def test_functions_in_removes_docstrings():
    source = '''
class Box:
    @property
    def size(self):
        """How large the box is.  With its lid.

        More about it.
        """
        # its sides
        return self.width * self.height * self.depth + lid(self)

    def empty(self):
        """Nothing is in it any more."""
'''
    tree = docstrings.ast.parse(source)
    (found,) = docstrings.functions_in(tree, source.split("\n"), "boxes")
    assert found.line == "How large the box is."
    assert found.code == (
        "@property\ndef size(self):\n    # its sides\n    return self.width * self.height * self.depth + lid(self)"
    )


def test_docstring_overlap_scores():
    assert docstrings.rouge1_f1("Return the size.", "return the whole size") == pytest.approx(6 / 7)
    assert docstrings.rouge1_f1("", "") == 0
    assert docstrings.rouge1_f1("the the", "the size") == 0.5
    assert docstrings.same("Return the size", "return the size.")
    assert docstrings.first_line('\n  """Return it."""\nmore') == "Return it."
    questions = [tasks.Question("", True, "Return the size."), tasks.Question("", True, "Open a file.")]
    assert tasks.score_lines(questions, ["Return the size\n", "?"]) == {"overlap": 0.5, "the same": 0.5}


# -------------------------------------------------------------------- the voice
def test_shakespeare_splits_cover_the_text():
    assert "".join(shakespeare.part(name) for name in ("train", "validation", "test")) == PLAYS
    assert all(shakespeare.part(name).endswith("\n") for name in ("train", "validation"))
    openings = shakespeare.openings(5)
    assert len(openings) == 5
    assert all(opening + rest in shakespeare.part("test") and rest for opening, rest in openings)


def test_copied_fraction():
    known = shakespeare.part("train").split()
    copied_fraction, mixed = " ".join(known[:9]), " ".join(known[:9][::-1])
    assert shakespeare.copied_fraction([copied_fraction]) == 1
    assert shakespeare.copied_fraction([mixed]) == 0
    assert shakespeare.copied_fraction(["too short"]) == 0


# -------------------------------------------------------------------- the program
@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("models") / "tiny", context_window=1024)


@pytest.fixture(scope="module")
def finished(model, tmp_path_factory):
    """Interrupt a small run once and finish it; yield its folder, the first results and its flags."""
    folder = tmp_path_factory.mktemp("runs") / "a run"
    words = ["--quick", "--model", str(model), "--tasks", *tasks.TASKS, "--methods", *study.METHODS]
    words += ["--output", str(folder), "--precision", "float32"]
    words += "--updates 4 --tested 3 --context-window 512 --batch-size 1".split()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["finetuning", *words])
        patch.setattr(tasks, "N_TESTED_TEXTS", 5)
        patch.setattr(study, "ANSWER_TOKENS", 4)
        for name, task in tasks.TASKS.items():
            few = lambda part, task=task: task.records(part)[:40]
            patch.setitem(tasks.TASKS, name, replace(task, n_tokens=3, records=few))
        step, n_calls = training.compute_gradients, []

        def breaking(*args):
            n_calls.append(1)
            if len(n_calls) == 7:
                raise OSError("the power is gone")
            return step(*args)

        patch.setattr(training, "compute_gradients", breaking)
        with pytest.raises(OSError, match="the power is gone"):
            main()
        before = read(folder / "results.json")
        patch.setattr(training, "compute_gradients", step)
        assert main() == 0
        yield folder, before, words


@pytest.mark.nightly
def test_run_writes_results_plots_and_tables(finished):
    folder, before, _ = finished
    results = read(folder / "results.json")
    assert results["before"] == before["before"]
    assert [(run["task"], run["method"]) for run in before["runs"]] == [("sums", "lora")]
    expected = [(task, method) for task in tasks.TASKS for method in study.METHODS]
    assert [(run["task"], run["method"]) for run in results["runs"]] == expected
    assert [run["resumed"] for run in results["runs"]] == [i == 1 for i in range(9)]
    for run in results["runs"]:
        assert run["updates"] == 4
        assert run["bits"].keys() == results["before"]["bits"].keys() == set(report.TEXTS)
        assert all(np.isfinite(value) and value > 0 for value in run["bits"].values())
        assert run["bits"] != results["before"]["bits"]
        assert (folder / "runs" / f"{run['task']}-{run['method']}-0" / "loss.png").is_file()
    assert not list(folder.glob("runs/*/*.safetensors"))
    assert len(list(folder.glob("runs/*/adapter/*.safetensors"))) == 6  # of LoRA and QLoRA
    height, width, _ = imread(folder / "finetuning.png").shape
    assert height > 300 < width


@pytest.mark.nightly
def test_finished_runs_are_skipped(finished, monkeypatch):
    folder, _, words = finished
    monkeypatch.setattr(study, "finetune", None)
    printed = run_study(main, *words)
    check_tables(report.tables(read(folder / "results.json")), printed)
    with pytest.raises(ValueError, match=r"batch_size 1.*2"):
        run_study(main, *words, "--batch-size", 2)


def test_stopped_finetuning_raises_keyboard_interrupt(monkeypatch, tmp_path):
    """`finetune` returns when it is stopped."""
    settings = study.Settings(output=tmp_path)
    monkeypatch.setattr(study, "finetune", lambda words: 0)
    with pytest.raises(KeyboardInterrupt):
        study.run_finetuning(tasks.VOICE, "lora", 0, settings, tmp_path / "run")


@pytest.mark.nightly
def test_page_escapes_samples(finished, tmp_path):
    folder, _, _ = finished
    results = read(folder / "results.json")
    results["before"]["samples"]["sums"][0][2] = "<script>&"
    report.write_page(results, tmp_path / "samples.html")
    text = (tmp_path / "samples.html").read_text(encoding="utf-8")
    assert "&lt;script&gt;&amp;" in text and "<script>" not in text
    assert text.count("<table>") == 6
    assert "Rosa" in text or "books" in text or "How many" in text


@pytest.mark.nightly
def test_written_records_are_read_by_read_records(tmp_path):
    encoder = ExampleEncoder(tiny_tokeniser(), 2000)
    for task in tasks.TASKS.values():
        path = tasks.write_records(task, "test", tmp_path)
        records = read_records([path])
        assert len(records) == (1 if task.suffix == ".txt" else tasks.N_TESTED_TEXTS)
        assert encoder.encode(records[0])[0].n_labels > 3


def test_chosen_questions_are_evenly_spaced():
    questions = [tasks.Question(str(i), True, "") for i in range(10)]
    assert [one.text for one in study.chosen(questions, 4)] == ["0", "3", "6", "9"]
    assert study.chosen(questions, 99) == questions


test_wrong_flags_are_refused = wrong_flags(
    main,
    (["--tasks", "poems"], "--tasks.*got poems"),
    (["--methods"], "--methods.*got none"),
    (["--precision", "int8"], "--precision.*got int8"),
    (["--seeds", "0"], "--seeds.*got 0"),
    (["--context-window", "20"], "--context-window.*got 20"),
)
