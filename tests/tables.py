"""Tests that are tables."""

import sys
from collections.abc import Callable

import pytest


def bad_input(table: dict[str, tuple[Callable, str]]) -> Callable:
    """A test for each case: a call that must be refused, and what the one line that refuses it begins with."""

    @pytest.mark.parametrize("name", table)
    def test(name: str) -> None:
        attempt, message = table[name]
        with pytest.raises(ValueError) as caught:
            attempt()
        assert str(caught.value).startswith(message) and "\n" not in str(caught.value)

    return test


def wrong_flags(main: Callable, *cases: tuple[list[str], str]) -> Callable:
    """A test for each case: the words of a command line, and a pattern of the one line that refuses them."""

    @pytest.mark.parametrize(("words", "said"), cases)
    def test(monkeypatch: pytest.MonkeyPatch, words: list[str], said: str) -> None:
        monkeypatch.setattr(sys, "argv", ["program", *words])
        with pytest.raises(ValueError, match=said):
            main()

    return test
