"""Generate shell completion scripts for `tricycle --print-completion bash`, `zsh` or `fish`.

The scripts contain all commands and flags, from the dataclasses of the commands, and start no Python process when the
user presses Tab. The scripts of tyro's `--tyro-print-completion` start one. The scripts of shtab (1.13) start none, but
in bash they complete nothing after `--flag=`.
"""

from __future__ import annotations

import dataclasses
import importlib
import types
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

SHELLS = ("bash", "zsh", "fish")
OWN_FLAGS = ("--help", "--print-completion", "--version")


class Flag(NamedTuple):
    """A flag of a command."""

    name: str  # with the leading dashes
    choices: tuple[str, ...] = ()  # the values that the flag accepts; empty for any value
    alone: bool = False  # the flag takes no value
    many: bool = False  # the flag takes any number of values


def script(shell: str, commands: Mapping[str, str]) -> str:
    """Return a shell's completion script for commands {name: help text} and their flags; ValueError if shell unknown.

    Raises:
        ValueError: an unknown shell.
    """
    writers = {"bash": _bash, "zsh": _zsh, "fish": _fish}
    if shell not in writers:
        raise ValueError(f"expected a shell after --print-completion, one of {', '.join(SHELLS)}, got {shell!r}")
    return writers[shell](commands, {command: flags_of(command) for command in commands})


def flags_of(command: str) -> list[Flag]:
    """Return the flags of a command's `Arguments`, `ResumeArguments` if any, --help and, with a config, --help-all.

    The flags of the modules in `TASKS`, which the word after the command selects, are included.
    """
    module = importlib.import_module(f"tricycle_cli.{command}")
    modules = [module, *(importlib.import_module(f"tricycle_cli.{task}") for task in getattr(module, "TASKS", ()))]
    names = ("ResumeArguments", "Arguments")
    kinds = [getattr(each, name) for each in modules for name in names if hasattr(each, name)]
    flags = {flag.name: flag for kind in kinds for flag in field_flags(kind)}
    if "config" in module.Arguments.__dataclass_fields__:
        flags["--help-all"] = Flag("--help-all", alone=True)
    return [*flags.values(), Flag("--help", alone=True)]


def field_flags(kind: Any) -> Iterator[Flag]:
    """Yield a dataclass's flags, nested ones unprefixed, with tyro's names; a bool has --NAME and --no-NAME."""
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        hint = hints[field.name]
        name, marks = field.name.replace("_", "-"), list[Any]()
        if get_origin(hint) is Annotated:
            hint, *marks = get_args(hint)
            name = next((mark.name for mark in marks if getattr(mark, "name", None)), name)
        if not field.init or _is_no_flag(marks):
            continue
        if dataclasses.is_dataclass(hint):
            yield from field_flags(hint)
            continue
        yield Flag(f"--{name}", tuple(_choices(hint)), alone=hint is bool, many=_takes_many(hint))
        if hint is bool:
            yield Flag(f"--no-{name}", alone=True)


def _is_no_flag(marks: Sequence[Any]) -> bool:
    """Return whether tyro's annotations make a field a positional argument, or hide it from the command line."""
    from tyro.conf import Positional, Suppress

    no_flags = [Positional, Suppress, *get_args(Positional[str])[1:], *get_args(Suppress[str])[1:]]
    return any(mark in no_flags for mark in marks)


def _takes_many(hint: Any) -> bool:
    """Return whether a type is a tuple of any length, or one or None."""
    return ... in get_args(hint) or any(... in get_args(part) for part in get_args(hint))


def _choices(hint: Any) -> Iterator[str]:
    """Yield the values of every Literal within a type."""
    if get_origin(hint) is Literal:
        yield from map(str, get_args(hint))
    elif get_origin(hint) in (Union, types.UnionType, tuple, list):
        for part in get_args(hint):
            yield from _choices(part)


Flags = Mapping[str, list[Flag]]

BASH = r"""# Completion of `tricycle` for bash: source this file, or `source <(tricycle --print-completion bash)`.
_tricycle() {
    local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" offered=""
    if [ "$word" = "=" ]; then word=""; fi
    if [ "$before" = "=" ]; then before="${COMP_WORDS[COMP_CWORD-2]}"; fi
    COMPREPLY=()
    if [ "$COMP_CWORD" -eq 1 ]; then
        offered="COMMANDS"
    else
        case "${COMP_WORDS[1]} $before" in
CHOICES
            *)
                case "$word" in
                    -*)
                        case "${COMP_WORDS[1]}" in
FLAGS
                        esac
                        ;;
                esac
                ;;
        esac
    fi
    if [ -n "$offered" ]; then
        while IFS= read -r word; do COMPREPLY+=("$word"); done < <(compgen -W "$offered" -- "$word")
    fi
}
complete -o bashdefault -o default -F _tricycle tricycle
"""

ZSH = r"""#compdef tricycle
# Completion of `tricycle` for zsh: save as `_tricycle` in a folder of $fpath, or
# `source <(tricycle --print-completion zsh)`.
_tricycle() {
    local -a commands
    if (( CURRENT == 2 )); then
        commands=(
COMMANDS
        )
        _describe command commands
        return
    fi
    case "${words[2]} ${words[CURRENT-1]}" in
CHOICES
    esac
    if [[ "$PREFIX" == -* ]]; then
        case "${words[2]}" in
FLAGS
        esac
    else
        _files
    fi
}
if [[ "${funcstack[1]}" == _tricycle ]]; then
    _tricycle "$@"
else
    compdef _tricycle tricycle
fi
"""


def _filled(template: str, commands: str, flags: Flags, choice: str, names: str) -> str:
    """Return a bash or zsh script: `template` with COMMANDS, CHOICES and FLAGS replaced by the commands' and flags'.

    Args:
        template: the script with the placeholders COMMANDS, CHOICES (values of flags) and FLAGS.
        commands: the text for COMMANDS.
        choice: the format of a line with a command, a flag and its values.
        names: the format of a line with a command and the names of its flags.
    """
    all_flags = [(command, flag) for command, ones in flags.items() for flag in ones]
    choices = [
        choice.format(f"{command} {flag.name}", " ".join(flag.choices)) for command, flag in all_flags if flag.choices
    ]
    choices.append(choice.format("--print-completion --print-completion", " ".join(SHELLS)))
    known = [names.format(command, " ".join(flag.name for flag in ones)) for command, ones in flags.items()]
    template = template.replace("COMMANDS", commands).replace("CHOICES", "\n".join(choices))
    return template.replace("FLAGS", "\n".join(known))


def _bash(commands: Mapping[str, str], flags: Flags) -> str:
    """Return the completion script for bash."""
    choice, names = 12 * " " + '"{}") offered="{}" ;;', 28 * " " + '{}) offered="{}" ;;'
    return _filled(BASH, " ".join([*commands, *OWN_FLAGS]), flags, choice, names)


def _zsh(commands: Mapping[str, str], flags: Flags) -> str:
    """Return the completion script for zsh, with a help text for each command."""
    offered = [_quoted(f"{command}:{help}") for command, help in commands.items()]
    lines = "\n".join(12 * " " + word for word in [*offered, *OWN_FLAGS])
    choice, names = 8 * " " + "('{}') compadd -- {}; return ;;", 12 * " " + "({}) compadd -- {} ;;"
    return _filled(ZSH, lines, flags, choice, names)


def _fish(commands: Mapping[str, str], flags: Flags) -> str:
    """Return the completion script for fish, with a help text for each command."""
    lines = ["# Completion of `tricycle` for fish: save as ~/.config/fish/completions/tricycle.fish."]
    first = "complete -c tricycle -n __fish_use_subcommand"
    lines += [f"{first} -f -a {command} -d {_quoted(help)}" for command, help in commands.items()]
    lines += [f"{first} -f -l {name}" for name in ("help", "version")]
    lines.append(f"{first} -x -l print-completion -a '{' '.join(SHELLS)}'")
    for command, ones in flags.items():
        behind = f"complete -c tricycle -n '__fish_seen_subcommand_from {command}'"
        for flag in ones:
            follows = f" -x -a '{' '.join(flag.choices)}'" if flag.choices else "" if flag.alone else " -r"
            lines.append(f"{behind} -l {flag.name.removeprefix('--')}{follows}")
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """Return the text as one word of zsh or fish, in single quotes."""
    return "'" + text.replace("'", "'\\''") + "'"
