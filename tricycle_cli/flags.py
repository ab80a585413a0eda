"""Command lines from dataclasses, through tyro, with errors on one line."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")
MOST_SAID = 1000  # characters of an error
# Other names of flags: two that are deprecated, and the American spelling.
ALIASES = {"--lookahead": "--draft-tokens", "--past-window": "--overflow", "--optimizer": "--optimiser"}


def parse(kind: type[T], default: T | None = None, args: Sequence[str] | None = None, description: str = "") -> T:
    """The dataclass that a command line describes. Prints one line and leaves with status 2 if it cannot be.

    Args:
        default: values of the flags that are not given.
        args: the words of the command line; those of this program if None.
    """
    known: Any = {} if default is None else {"default": default}
    return _parse(kind, sys.argv[1:] if args is None else args, description=description, **known)


def parse_known(kind: type[T], args: Sequence[str]) -> tuple[T, list[str]]:
    """Parse as `parse` does the flags that a dataclass has; returns the other words of the command line, too."""
    return _parse(kind, args, return_unknown_args=True)


def _parse(kind: Any, args: Sequence[str], **options: Any) -> Any:
    import tyro

    options["config"] = (tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes)
    args = [_resolve_alias(word) for word in args]
    if {"-h", "--help", "--help-all"} & set(args) and "config" in getattr(kind, "__dataclass_fields__", ()):
        _print_help(lambda: tyro.cli(kind, args=["--help"], **options), "--help-all" in args)
    complaint = io.StringIO()
    try:
        with contextlib.redirect_stderr(complaint):
            return tyro.cli(kind, args=args, **options)
    except SystemExit as leaving:
        if leaving.code not in (0, None):
            print(f"{_program()}: {_one_line(complaint.getvalue())}", file=sys.stderr)
        raise
    except ValueError as error:  # a config refuses its values when it is made
        fail(str(error), status=2)


def _print_help(print_tyros: Callable[[], Any], show_all: bool) -> NoReturn:
    """Print the help in groups, and leave the program."""
    from tricycle_cli.help_text import WIDE, format_help

    columns, text = os.environ.get("COLUMNS"), io.StringIO()
    os.environ["COLUMNS"] = str(WIDE)
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        print_tyros()
    os.environ["COLUMNS"] = columns or ""
    print(format_help(text.getvalue(), show_all), end="")
    raise SystemExit(0)


def _resolve_alias(word: str) -> str:
    """Return a word of a command line with the name of the flag where it is an alias."""
    name, equals, value = word.partition("=")
    return ALIASES.get(name.replace("_", "-"), name) + equals + value


def fail(message: str, status: int = 1) -> NoReturn:
    """Print one line and leave the program."""
    with contextlib.suppress(OSError):  # nobody may be there to read it
        print(f"{_program()}: {on_one_line(message)}", file=sys.stderr, flush=True)
    raise SystemExit(status)


def on_one_line(message: str) -> str:
    """A message without line breaks, at most 1,000 characters of it, the first and the last.

    What comes from files may be of any length, and hold characters that a terminal would obey.
    """
    line = " ".join(message.split())
    if len(line) > MOST_SAID:
        line = f"{line[: MOST_SAID // 2]} ... {line[-MOST_SAID // 2 :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in line)


def run_main(main: Callable[[], int | None]) -> None:
    """Run a program, as in a block of `one_line_errors`, and leave with its status."""
    with one_line_errors():
        sys.exit(main())


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Within this block, in a process that `tune_host` made fit for it, errors become one line and end the program.

    They are a trace where TRICYCLE_TRACEBACK is set.
    """
    _open_standard_streams()
    for stream in (sys.stdout, sys.stderr):  # some terminals cannot show all that a model may say
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        _tune_host()
        yield
    except BrokenPipeError:  # whoever read along, as `head` does, has had enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except UnicodeEncodeError as error:  # a byte of a file's name that is no UTF-8 is half of a surrogate pair
        around, byte = error.object[max(0, error.start - 30) : error.end + 30], ord(error.object[error.start]) & 0xFF
        fail(f"expected names of files in UTF-8, got one with the byte 0x{byte:02x}: {around!a}")
    except (ValueError, OSError, ArithmeticError, ImportError, MemoryError, RuntimeError) as error:
        if os.environ.get("TRICYCLE_TRACEBACK"):
            raise
        fail(str(error) or type(error).__name__)
    except KeyboardInterrupt:
        fail("interrupted", status=130)
    except BaseException as error:
        # a panic in a library's Rust is no Exception; other Exceptions are mistakes of ours and keep their trace
        if isinstance(error, (Exception, SystemExit)) or os.environ.get("TRICYCLE_TRACEBACK"):
            raise
        fail(f"a library failed: {str(error) or type(error).__name__}")


def _open_standard_streams() -> None:
    """Those that whoever started this closed lead nowhere; else a checkpoint could be the file that they lead to."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (until the program ends)


def _tune_host() -> None:
    """Make the process fit for training, where the accelerators are installed that know how."""
    try:
        from tricycle_accelerators.host import tune_host
    except ModuleNotFoundError:
        return
    tune_host()


def _program() -> str:
    *folders, name = sys.argv[0].replace("\\", "/").split("/")
    return folders[-1] if folders and name == "__main__.py" else name


def _one_line(box: str) -> str:
    """The words of the first paragraph in the box that tyro draws."""
    lines = [re.sub(r"^[│╭╰|]\s?|\s*[│╮╯|]$", "", line).strip() for line in box.splitlines()]
    words: list[str] = []
    for line in lines[1:]:
        if line.startswith(("─", "-----")) and words:
            break
        words.append(line.strip("─ "))
    return " ".join(word for word in words if word)
