"""Read pickles as plain data: nothing that they name is imported, called or made.

A pickle is a program for a small machine with a stack. `pickle._Unpickler`, which Python has beside the machine in C,
runs it here with another table of instructions: those that make plain values are Python's own; those that would look up
a name, call something or change an object write down what they were asked for, as a `Made`; all others are refused. So
a file can only declare what it holds, and the caller builds that anew.

What the documentation of `pickle` recommends, an allow-list in `find_class` of the machine in C, is not enough even
with stand-ins for all classes. Of the 237 undamaged files of tests/hostile/pickles.py four made it ask for more than
6 GB (BINUNICODE8, FRAME and LONG_BINPUT name a size, for which it takes memory before there is content), and one made
it hash a tuple of shared tuples without end.

Source: the instructions are described in Python's own `pickletools`.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Buffer = memoryview
Admit = Callable[[str, str], str | None]

# A model of 48 layers takes 51,000 reads. An instruction takes one to three, and makes some hundred bytes at most.
MOST_READS = 2**19
MOST_TEXT = 2**22  # bytes, of all texts together: as Python's they may take four times as many
MOST_NAME = 1000  # bytes
# The instructions that Python's own machine executes: they make plain values, or move what was made.
PYTHONS_OWN = """
    PROTO STOP NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT MARK POP POP_MARK EMPTY_TUPLE TUPLE1 TUPLE2
    TUPLE3 TUPLE EMPTY_LIST EMPTY_DICT MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET GLOBAL STACK_GLOBAL
"""


class Refused(ValueError):
    """A pickle that asks for something that no model needs, or is none."""


@dataclass(frozen=True)
class Named:
    """The name of a class or a function, which is not looked up."""

    name: str


@dataclass(eq=False)
class Made:
    """A call that was not made.

    Attributes:
        name: of the class or the function.
        args: what it was to be called with.
        state: what the object was to be given after that.
    """

    name: str
    args: tuple[Any, ...]
    state: Any = None


def read_pickle(content: Buffer, admit: Admit) -> Any:
    """Return what a pickle holds: plain values, tuples, lists, dicts, views of its bytes, `Named` and `Made`.

    Args:
        admit: the full name of what a module's name means, or None where no model needs it.

    Raises:
        Refused: it asks for something else, is cut off, damaged or far larger than a model's.
    """
    try:
        return _Reader(content, admit).load()
    except (pickle.UnpicklingError, IndexError, EOFError) as error:
        raise Refused(f"it is damaged: {error}") from None


class _File:
    """The bytes of a pickle, as an unpickler reads them, without copies."""

    def __init__(self, content: Buffer) -> None:
        self.content, self.place, self.n_left = content, 0, MOST_READS

    def read(self, n_bytes: int) -> Buffer | bytes:
        first, self.n_left = self.place, self.n_left - 1
        if n_bytes > len(self.content) - first:
            raise Refused(f"it is cut off or damaged: {n_bytes} bytes at {first} of {len(self.content)}")
        if self.n_left < 0:
            raise Refused(f"expected at most {MOST_READS} parts of instructions, got more")
        self.place = first + n_bytes
        part = self.content[first : self.place]
        return bytes(part) if n_bytes == 1 else part  # an instruction must be bytes

    def readline(self) -> bytes:
        name, newline, _ = bytes(self.content[self.place : self.place + MOST_NAME]).partition(b"\n")
        if not newline:
            raise Refused(f"it has a name of more than {MOST_NAME} characters, or none")
        return bytes(self.read(len(name) + 1))


class _Instructions(dict[int, Callable[[Any], Any]]):
    """What is done for each instruction; the others are refused."""

    def __missing__(self, code: int) -> Any:
        names = [name for name, value in vars(pickle).items() if value == bytes([code])]
        raise Refused(f"it has the instruction {names[0]}, which no model needs" if names else "it is no pickle")


def _pythons_own() -> dict[int, Any]:
    codes = [getattr(pickle, name)[0] for name in PYTHONS_OWN.split()]
    return {code: pickle._Unpickler.dispatch[code] for code in codes}


class _Reader(pickle._Unpickler):
    stack: list[Any]  # since the last open bracket
    append: Callable[[Any], None]  # to the stack
    pop_mark: Callable[[], list[Any]]
    read: Callable[[int], Buffer]

    def __init__(self, content: Buffer, admit: Admit) -> None:
        file: Any = _File(content)
        super().__init__(file)
        self.admit, self.text_left = admit, MOST_TEXT

    def find_class(self, module: str, name: str) -> Named:
        known = self.admit(module, name)
        if known is None:
            raise Refused(f"it asks for {module}.{name}, which no model needs"[:300])
        return Named(known)

    def make(self) -> None:
        args, function = self.stack.pop(), self.stack.pop()
        if type(function) is not Named or type(args) is not tuple:
            raise Refused(f"it would call a {type(function).__name__}, which no model needs")
        self.append(Made(function.name, args))

    def build(self) -> None:
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is not Made or target.state is not None:
            raise Refused(f"it would change {getattr(target, 'name', type(target).__name__)}, which no model needs")
        target.state = state

    def counted(self, layout: str) -> Buffer:
        """Return the bytes whose number is before them."""
        (n_bytes,) = struct.unpack(layout, self.read(struct.calcsize(layout)))
        return self.read(n_bytes)

    def text(self, raw: Buffer) -> None:
        self.text_left -= len(raw)
        if self.text_left < 0:
            raise Refused(f"expected at most {MOST_TEXT} bytes of texts, got more")
        self.append(str(raw, "utf-8", "surrogatepass"))

    def extend(self, values: list[Any]) -> None:
        self.expect_top(list).extend(values)

    def set_items(self, pairs: list[Any]) -> None:
        target = self.expect_top(dict)
        if len(pairs) % 2:
            raise Refused("it is damaged: a key without a value")
        for key, value in zip(pairs[::2], pairs[1::2]):
            if type(key) not in (str, int):  # others could take long to hash
                raise Refused(f"expected texts or whole numbers as keys, got a {type(key).__name__}")
            target[key] = value

    def expect_top(self, kind: type) -> Any:
        if type(self.stack[-1]) is not kind:
            raise Refused(f"it would change a {type(self.stack[-1]).__name__} as if it were a {kind.__name__}")
        return self.stack[-1]

    dispatch = _Instructions(
        {
            **_pythons_own(),
            pickle.FRAME[0]: lambda self: self.read(8),  # how many bytes to read at once
            pickle.SHORT_BINBYTES[0]: lambda self: self.append(self.counted("<B")),
            pickle.BINBYTES[0]: lambda self: self.append(self.counted("<I")),
            pickle.BINBYTES8[0]: lambda self: self.append(self.counted("<Q")),
            pickle.BYTEARRAY8[0]: lambda self: self.append(self.counted("<Q")),
            pickle.SHORT_BINUNICODE[0]: lambda self: self.text(self.counted("<B")),
            pickle.BINUNICODE[0]: lambda self: self.text(self.counted("<I")),
            pickle.BINUNICODE8[0]: lambda self: self.text(self.counted("<Q")),
            pickle.APPEND[0]: lambda self: self.extend([self.stack.pop()]),
            pickle.APPENDS[0]: lambda self: self.extend(self.pop_mark()),
            pickle.SETITEM[0]: lambda self: self.set_items([self.stack.pop(-2), self.stack.pop()]),
            pickle.SETITEMS[0]: lambda self: self.set_items(self.pop_mark()),
            pickle.REDUCE[0]: make,
            pickle.NEWOBJ[0]: make,
            pickle.BUILD[0]: build,
        }
    )
