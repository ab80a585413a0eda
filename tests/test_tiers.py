"""How conftest.py divides the tests."""

import datetime
from types import SimpleNamespace

import conftest
import pytest


def items(*names: str, mark: pytest.MarkDecorator | None = None) -> list:
    """Stand-ins for what pytest collects."""
    made = []
    for name in names:
        marks = [mark.mark] if mark else []
        find = lambda name, marks=marks: next((each for each in marks if each.name == name), None)
        add = lambda new, marks=marks: marks.append(new.mark)
        made.append(SimpleNamespace(name=name, nodeid=f"a.py::{name}", get_closest_marker=find, add_marker=add))
    return made


def test_parts_of_the_nightly_tests():
    today = datetime.date.today().toordinal()
    assert conftest.nightly_part("") is None
    assert conftest.nightly_part("3/14") == (3, 14)
    assert conftest.nightly_part("14") in {(day % 14, 14) for day in (today, today + 1)}
    for wrong in ("14/14", "0", "-1/3", "x", "1/"):
        with pytest.raises(pytest.UsageError, match="K/N"):
            conftest.nightly_part(wrong)


def test_every_nightly_test_is_in_one_part():
    names, left = [f"test_{i}" for i in range(200)], []
    for number in range(5):
        config = SimpleNamespace(nightly_part=(number, 5), hook=SimpleNamespace(pytest_deselected=lambda items: None))
        some = [*items(*names, mark=pytest.mark.nightly), *items("test_plain")]
        conftest.deselect_other_nightly_parts(config, some)
        assert some.pop().name == "test_plain"
        assert 20 < len(some) < 60
        left += [item.name for item in some]
    assert sorted(left) == sorted(names)


def test_one_case_in_n_is_not_nightly():
    for n, n_left in ((1, 10), (3, 4), (5, 2), (20, 1)):
        cases = items(*(f"test_a[{i}]" for i in range(10)), mark=pytest.mark.nightly_except(n))
        conftest.mark_all_but_some_cases_as_nightly(cases)
        assert sum(item.get_closest_marker("nightly") is None for item in cases) == n_left
