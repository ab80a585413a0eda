"""Code shared by studies: limits of flags, presets, rounding, resuming, and training."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from studies import run_study as run

from experiments.shared import training
from experiments.shared.program import check_choices, check_fractions, check_minimum, run_study
from experiments.shared.results import Record, rounded
from experiments.shared.training import train_best
from tricycle.layers import Dense


@dataclass(frozen=True)
class Settings:
    n: int = 1
    rate: float = 0.5
    rates: tuple[float, ...] = (0.1, 0.9)
    models: tuple[str, ...] = ("a", "b, c")
    quick: bool = False
    output: Path = Path("out")


def test_checks_accept_limits_and_reject_values_beyond():
    check_minimum(Settings(), n=1)
    check_fractions(Settings(), "rate", "rates")
    check_choices(Settings(), models=("a", "b, c", "d"))
    for rate in (0, 1):
        with pytest.raises(ValueError, match=f"--rate.*got {rate}"):
            check_fractions(Settings(rate=rate), "rate")
    with pytest.raises(ValueError, match=r"--models.*a; b, c; got d"):
        check_choices(Settings(models=("a", "d")), models=("a", "b, c"))


def test_flags_override_the_preset():
    study = lambda settings: ({"title": f"{settings.n} {settings.rate}"}, ["file"])
    main = lambda: run_study(Settings, study, "", {"n": 5, "rate": 0.2})
    assert run(main) == "\ntitle\n\n1 0.5\n\nout: file\n"
    assert run(main, "--quick", "--n", 7) == "\ntitle\n\n7 0.2\n\nout: file\n"


@pytest.mark.parametrize("name", ["file", "file/new"])
def test_output_that_is_no_folder_is_refused_before_the_study(tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match="expected --output to be a folder that can be written to"):
        run(lambda: run_study(Settings, None, ""), "--output", tmp_path / name)


def test_rounded_keeps_types_and_significant_digits():
    value = {"a": [1.234567, 3, True], "b": (np.float32(0.1), "x", None)}
    assert rounded(value) == {"a": [1.2346, 3, True], "b": [0.1, "x", None]}
    assert rounded(123456.7, 3) == 123000


def test_results_of_other_settings_are_refused(tmp_path):
    record = Record(Settings(output=tmp_path), runs=[])
    record["runs"].append(1)
    record.save()
    assert Record(Settings(output=tmp_path, n=2), ("n",))["runs"] == [1]
    with pytest.raises(ValueError, match=r"n 1.*2.*--output"):
        Record(Settings(output=tmp_path, n=2), ("rate",))


def test_train_best_passes_the_gradient_norm_limit(monkeypatch):
    norms, model = [], Dense(1, 1)
    monkeypatch.setattr(training, "train_on_batch", lambda *args: norms.append(args[-1]))
    train_best(model, None, [0] * 3, 3, 0.1, lambda: 1.0, "", 0.25)
    assert norms == [0.25] * 3
