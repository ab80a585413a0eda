"""Parametrized tests made from tables of invalid inputs."""

import re
import sys
from collections.abc import Callable

import pytest


def bad_input(table: dict[str, tuple[Callable, str]]) -> Callable:
    """Return a test of invalid calls: each raises a one-line ValueError that matches a pattern.

    Args:
        table: name of the case: a call without arguments, and the pattern of the message.
    """

    @pytest.mark.parametrize("name", table)
    def test(name: str) -> None:
        invalid_call, message = table[name]
        with pytest.raises(ValueError) as error:
            invalid_call()
        assert re.search(message, str(error.value)) and "\n" not in str(error.value)

    return test


def wrong_flags(main: Callable, *cases: tuple[list[str], str]) -> Callable:
    """Return a test of invalid command lines: each raises a ValueError that matches a pattern.

    Args:
        cases: arguments of the command line, and the pattern of the message.
    """

    @pytest.mark.parametrize(("arguments", "message"), cases)
    def test(monkeypatch: pytest.MonkeyPatch, arguments: list[str], message: str) -> None:
        monkeypatch.setattr(sys, "argv", ["program", *arguments])
        with pytest.raises(ValueError, match=message):
            main()

    return test
