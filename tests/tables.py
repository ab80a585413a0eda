"""Tests that are tables."""

from collections.abc import Callable

import pytest


def bad_input(table: dict[str, tuple[Callable, str]]) -> Callable:
    """A test for each case: a call that must be refused, and the one line that it must be refused with."""

    @pytest.mark.parametrize("name", table)
    def test(name: str) -> None:
        attempt, message = table[name]
        with pytest.raises(ValueError) as caught:
            attempt()
        assert str(caught.value) == message

    return test
