"""Parse command lines into dataclasses with tyro, and print errors on one line; all commands use this module."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn, TypeVar

T = TypeVar("T")
MAX_MESSAGE_LENGTH = 1000  # characters of an error
# The American spelling, and deprecated names of flags. An alias counts in the commands that have the new name only.
ALIASES = {
    "--optimizer": "--optimiser",
    "--shard-optimizer": "--shard-optimiser",
    "--lookahead": "--draft-tokens",
    "--past-window": "--overflow",
    "--cache": "--kv-cache-dtype",
    "--cut-answers": "--truncate-answers",
    "--rank-stabilised": "--rslora",
    "--beside": "--compare-with",
    "--texts": "--max-batch-size",
    "--queue": "--max-queue",
    "--conversations": "--cached-texts",
    "--seconds": "--timeout-seconds",
    "--body": "--max-request-bytes",
    "--name": "--model-name",
    "--names": "--allowed-hosts",
    "--origins": "--allowed-origins",
}
# Deprecated values of flags.
VALUE_ALIASES = {
    ("--overflow", "reread"): "truncate",
    ("--overflow", "refuse"): "error",
    ("--method", "all"): "full",
    ("--loss", "likelihood"): "cross-entropy",
}


def parse(kind: type[T], default: T | None = None, args: Sequence[str] | None = None, description: str = "") -> T:
    """Parse a command line into a dataclass with the defaults of `default`; print an error in one line and exit (2).

    Args:
        kind: the dataclass: a field for each flag, with the help text as its docstring.
        default: an instance with the values of the flags that are not given.
        args: the words of the command line; by default those of this process.
        description: the first paragraph of the help text.
    """
    known: Any = {} if default is None else {"default": default}
    return _parse(kind, sys.argv[1:] if args is None else args, description=description, **known)


def parse_known(kind: type[T], args: Sequence[str]) -> tuple[T, list[str]]:
    """Parse the flags of a dataclass as `parse` does; return the instance and the other words of the command line."""
    return _parse(kind, args, return_unknown_args=True)


def _parse(kind: Any, args: Sequence[str], **options: Any) -> Any:
    """Parse words by tyro, resolving old flags; print help, or an error in one line, and exit."""
    import tyro

    options["config"] = (tyro.conf.OmitArgPrefixes, tyro.conf.OmitSubcommandPrefixes)
    args = _resolve_aliases(kind, args)
    _check_lists(kind, args)
    has_rare_flags = "config" in getattr(kind, "__dataclass_fields__", ())
    if {"-h", "--help", *["--help-all"] * has_rare_flags} & set(args):
        show_help = lambda: tyro.cli(kind, args=["--help"], prog=_command(), **options)
        _print_help(show_help, "--help-all" in args, options.get("description", ""))
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


def _print_help(print_tyros: Callable[[], Any], show_all: bool, description: str) -> NoReturn:
    """Print the grouped help, `print_tyros`'s text in another form, and exit with status 0."""
    from tricycle_cli.help_text import WIDE, format_help

    columns, text = os.environ.get("COLUMNS"), io.StringIO()
    os.environ["COLUMNS"] = str(WIDE)
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        print_tyros()
    os.environ["COLUMNS"] = columns or ""
    print(format_help(text.getvalue(), show_all, description), end="")
    raise SystemExit(0)


def _resolve_aliases(kind: Any, args: Sequence[str]) -> list[str]:
    """Return the words of a command line, deprecated names of flags and values replaced by the present ones."""
    words: list[str] = []
    flag = ""  # the flag before a word
    for word in args:
        name, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
        if name:
            flag = _present_name(kind, name)
        value = VALUE_ALIASES.get((flag, value), value)
        words.append(flag + equals + value if name else value)
        flag = flag if name else ""
    return words


def _check_lists(kind: Any, args: Sequence[str]) -> None:
    """Exit with an error if a flag that takes several values is given twice, because tyro ignores the first values."""
    names = [word.split("=")[0].replace("_", "-") for word in args if word.startswith("--")]
    if len(set(names)) == len(names):
        return
    from tricycle_cli.completion import field_flags

    for flag in field_flags(kind):
        if flag.many and names.count(flag.name) > 1:
            fail(f"expected {flag.name} once, with all values after it, got it {names.count(flag.name)} times", 2)


def check_conditions(arguments: Any, conditions: Mapping[str, tuple[Any, str]]) -> None:
    """Raise ValueError for a flag that differs from its default, and has no effect because its condition is not met.

    Args:
        arguments: the parsed flags, a dataclass.
        conditions: by the text of a condition, such as "--loss dpo": whether it is met, and the names of the fields
            that need it.
    """
    defaults = {field.name: field.default for field in dataclasses.fields(arguments)}
    for condition, (is_met, names) in conditions.items():
        for name in names.split():
            if not is_met and getattr(arguments, name) != defaults[name]:
                flag = f"--{'no-' if defaults[name] is True else ''}{name.replace('_', '-')}"
                raise ValueError(f"expected {condition} with {flag}, which has no effect otherwise")


def _present_name(kind: Any, name: str) -> str:
    """Return the name of a flag; for a deprecated name the new one, in a command that has the new one only."""
    plain = name.replace("_", "-")
    prefix = "--no-" if plain.startswith("--no-") else "--"
    alias = ALIASES.get("--" + plain.removeprefix(prefix))
    if alias is None:
        return name
    from tricycle_cli.completion import field_flags

    names = {flag.name for flag in field_flags(kind)}
    return prefix + alias.removeprefix("--") if alias in names and plain not in names else name


def fail(message: str, status: int = 1) -> NoReturn:
    """Print an error on one line of stderr, after the program's name, and exit with this status."""
    with contextlib.suppress(OSError):  # stderr may be closed
        print(f"{_program()}: {on_one_line(message)}", file=sys.stderr, flush=True)
    raise SystemExit(status)


def on_one_line(message: str) -> str:
    """Join the lines of a message, escape control characters, and cut out the middle beyond 1,000 characters.

    Text from files may be of any length, and may contain control characters of terminals.
    """
    line = " ".join(message.split())
    if len(line) > MAX_MESSAGE_LENGTH:
        line = f"{line[: MAX_MESSAGE_LENGTH // 2]} ... {line[-MAX_MESSAGE_LENGTH // 2 :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in line)


def run_main(main: Callable[[], int | None]) -> None:
    """Run the main function of a program with `one_line_errors`, and exit with its status."""
    with one_line_errors():
        sys.exit(main())


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Tune the process; print ValueError, OSError and the like in one line on stderr, exit with 1 (130 if interrupted).

    With TRICYCLE_TRACEBACK set, errors keep their traceback.
    """
    # closed standard streams are opened as os.devnull; else a checkpoint could get the descriptor of stdout
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 (until the program ends)
    for stream in (sys.stdout, sys.stderr):  # some terminals cannot encode every character that a model generates
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    try:
        _tune_host()
        yield
    except BrokenPipeError:  # the reader of the pipe has exited, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except UnicodeEncodeError as error:  # a byte of a file name that is not UTF-8 is a lone surrogate
        around, byte = error.object[max(0, error.start - 30) : error.end + 30], ord(error.object[error.start]) & 0xFF
        fail(f"expected file names in UTF-8, got one with the byte 0x{byte:02x}: {around!a}")
    except (ValueError, OSError, ArithmeticError, ImportError, MemoryError, RuntimeError) as error:
        if os.environ.get("TRICYCLE_TRACEBACK"):
            raise
        fail(str(error) or type(error).__name__)
    except KeyboardInterrupt:
        fail("interrupted", status=130)
    except BaseException as error:
        # a panic in a Rust library is no Exception; other Exceptions are bugs of Tricycle and keep their traceback
        if isinstance(error, (Exception, SystemExit)) or os.environ.get("TRICYCLE_TRACEBACK"):
            raise
        fail(f"a library failed: {str(error) or type(error).__name__}")


def _tune_host() -> None:
    """Tune the process for training (memory allocator, BLAS threads) if `tricycle_accelerators` is installed."""
    try:
        from tricycle_accelerators.host import tune_host
    except ModuleNotFoundError:
        return
    tune_host()


def _program() -> str:
    """Return the program's name: the file name of sys.argv[0], or the package of a `__main__.py`."""
    *folders, name = sys.argv[0].replace("\\", "/").split("/")
    return folders[-1] if folders and name == "__main__.py" else name


def _command() -> str:
    """Return the command that started this program, without its arguments, such as "python -m experiments.names"."""
    spec = sys.modules["__main__"].__spec__
    if spec is None or not sys.argv[0].endswith(".py"):
        return _program()
    return f"python -m {spec.name.removesuffix('.__main__')}"


def _one_line(box: str) -> str:
    """Return the first paragraph of the error box that tyro draws as one line."""
    lines = [re.sub(r"^[│╭╰|]\s?|\s*[│╮╯|]$", "", line).strip() for line in box.splitlines()[1:]]
    end = next((i for i, line in enumerate(lines) if i and line.startswith(("─", "-----"))), None)
    return " ".join(word for line in lines[:end] if (word := line.strip("─ ")))
