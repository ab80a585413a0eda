"""Pickles read as plain data: nothing that they name is imported, called or made.

A pickle is a program for a small machine with a stack. This machine knows those of its instructions that a model needs.
Where the usual one would look up a class and call it, this one writes down its name and what it was to be called with:
a `Made`. So a file can only say what it holds, and whoever asked for it builds that anew.

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

# A model of 48 layers takes some 20,000 instructions. Each makes an object of some hundred bytes at most.
MOST_INSTRUCTIONS = 2**18
MOST_TEXT = 2**22  # bytes, of all texts together: as Python's they may take four times as many
MOST_DIGITS = 32  # bytes of a whole number; the state of a generator has 16


class Refused(ValueError):
    """A pickle that asks for something that no model needs, or is none."""


@dataclass(frozen=True)
class Named:
    """A class or a function by its name, which nobody looks up."""

    name: str


@dataclass(eq=False)
class Made:
    """What would have been made by a call.

    Attributes:
        name: of the class or the function.
        args: what it was to be called with.
        state: what the object was to be given after that.
    """

    name: str
    args: tuple[Any, ...]
    state: Any = None


def read_pickle(content: Buffer, admit: Admit) -> Any:
    """What a pickle holds: plain values, tuples, lists, dicts, views of its bytes, `Named` and `Made`.

    Args:
        admit: the full name of what a module's name means, or None where no model needs it.

    Raises:
        Refused: it asks for something else, is cut off, damaged or far larger than a model's.
    """
    return _Machine(content, admit).run()


class _Machine:
    """
    Attributes:
        place: the byte to be read next.
        stack: what was made and not yet used.
        marks: how long the stack was when each open bracket came.
        memo: what is used several times.
    """

    def __init__(self, content: Buffer, admit: Admit) -> None:
        self.content = content
        self.admit = admit
        self.place = 0
        self.text_left = MOST_TEXT
        self.stack: list[Any] = []
        self.marks: list[int] = []
        self.memo: dict[int, Any] = {}

    def run(self) -> Any:
        for _ in range(MOST_INSTRUCTIONS):
            code = bytes(self.take(1))
            if code == pickle.STOP:
                return self.pop()
            step = _STEPS.get(code)
            if step is None:
                name = _NAMES.get(code)
                raise Refused(f"it has the instruction {name}, which no model needs" if name else "it is no pickle")
            step(self)
        raise Refused(f"expected at most {MOST_INSTRUCTIONS} instructions, got more")

    # ---------------------------------------------------------------- bytes
    def take(self, n_bytes: int) -> Buffer:
        first = self.place
        if n_bytes > len(self.content) - first:
            raise Refused(f"it is cut off or damaged: {n_bytes} bytes at {first} of {len(self.content)}")
        self.place = first + n_bytes
        return self.content[first : self.place]

    def number(self, layout: str) -> int:
        (value,) = struct.unpack(layout, self.take(struct.calcsize(layout)))
        return int(value)

    def counted(self, layout: str) -> Buffer:
        """So many bytes as the number before them says."""
        return self.take(self.number(layout))

    def text(self, layout: str) -> str:
        raw = self.counted(layout)
        self.text_left -= len(raw)
        if self.text_left < 0:
            raise Refused(f"expected at most {MOST_TEXT} bytes of texts, got more")
        return str(raw, "utf-8", "surrogatepass")

    def line(self) -> str:
        first = self.place
        while self.take(1) != b"\n":
            if self.place - first > 1000:
                raise Refused("it has a name of more than 1000 characters")
        return str(self.content[first : self.place - 1], "utf-8")

    # ---------------------------------------------------------------- the stack
    def push(self, value: Any) -> None:
        self.stack.append(value)

    def pop(self) -> Any:
        if len(self.stack) <= (self.marks[-1] if self.marks else 0):
            raise Refused("it is damaged: it takes more than it made")
        return self.stack.pop()

    def top(self) -> Any:
        value = self.pop()
        self.stack.append(value)
        return value

    def pop_mark(self) -> list[Any]:
        """All since the last open bracket."""
        if not self.marks:
            raise Refused("it is damaged: it closes what was not opened")
        start = self.marks.pop()
        values = self.stack[start:]
        del self.stack[start:]
        return values

    def pop_several(self, n: int) -> tuple[Any, ...]:
        return tuple([self.pop() for _ in range(n)][::-1])

    def remembered(self, key: int) -> Any:
        if key not in self.memo:
            raise Refused(f"it is damaged: it asks for its object {key}, which is not there")
        return self.memo[key]

    # ---------------------------------------------------------------- lists and dicts
    def append(self, values: list[Any]) -> None:
        self._expect_top(list, "a list").extend(values)

    def set_items(self, pairs: list[Any]) -> None:
        target = self._expect_top(dict, "a dict")
        if len(pairs) % 2:
            raise Refused("it is damaged: a key without a value")
        for key, value in zip(pairs[::2], pairs[1::2]):
            if type(key) not in (str, int):  # others could take long to hash
                raise Refused(f"expected texts or whole numbers as keys, got a {type(key).__name__}")
            target[key] = value

    def _expect_top(self, kind: type, what: str) -> Any:
        target = self.top()
        if type(target) is not kind:
            raise Refused(f"it would change a {_kind(target)} as if it were {what}")
        return target

    # ---------------------------------------------------------------- what would be calls
    def name(self, module: str, name: str) -> None:
        known = self.admit(module, name)
        if known is None:
            raise Refused(f"it asks for {module}.{name}, which no model needs"[:300])
        self.push(Named(known))

    def name_on_stack(self) -> None:
        module, name = self.pop_several(2)
        if type(module) is not str or type(name) is not str:
            raise Refused(f"expected a module and a name as texts, got a {_kind(module)} and a {_kind(name)}")
        self.name(module, name)

    def make(self) -> None:
        function, args = self.pop_several(2)
        if type(function) is not Named or type(args) is not tuple:
            raise Refused(f"it would call a {_kind(function)}, which no model needs")
        self.push(Made(function.name, args))

    def build(self) -> None:
        state = self.pop()
        target = self.top()
        if type(target) is not Made:
            raise Refused(f"it would change {target.name if type(target) is Named else 'a ' + _kind(target)}")
        if target.state is not None:
            raise Refused(f"it would change {target.name} twice")
        target.state = state


def _kind(value: Any) -> str:
    return type(value).__name__


def _long(machine: _Machine) -> None:
    raw = machine.counted("<B")
    if len(raw) > MOST_DIGITS:
        raise Refused(f"expected whole numbers of at most {MOST_DIGITS} bytes, got {len(raw)}")
    machine.push(int.from_bytes(raw, "little", signed=True))


def _protocol(machine: _Machine) -> None:
    protocol = machine.number("<B")
    if protocol > pickle.HIGHEST_PROTOCOL:
        raise Refused(f"expected a protocol up to {pickle.HIGHEST_PROTOCOL}, got {protocol}")


_Step = Callable[[_Machine], Any]
_STEPS: dict[bytes, _Step] = {
    pickle.PROTO: _protocol,
    pickle.FRAME: lambda m: m.take(8),  # how many bytes to read at once
    # ---- plain values
    pickle.NONE: lambda m: m.push(None),
    pickle.NEWTRUE: lambda m: m.push(True),
    pickle.NEWFALSE: lambda m: m.push(False),
    pickle.BININT: lambda m: m.push(m.number("<i")),
    pickle.BININT1: lambda m: m.push(m.number("<B")),
    pickle.BININT2: lambda m: m.push(m.number("<H")),
    pickle.LONG1: _long,
    pickle.BINFLOAT: lambda m: m.push(struct.unpack(">d", m.take(8))[0]),
    pickle.SHORT_BINUNICODE: lambda m: m.push(m.text("<B")),
    pickle.BINUNICODE: lambda m: m.push(m.text("<I")),
    pickle.BINUNICODE8: lambda m: m.push(m.text("<Q")),
    pickle.SHORT_BINBYTES: lambda m: m.push(m.counted("<B")),
    pickle.BINBYTES: lambda m: m.push(m.counted("<I")),
    pickle.BINBYTES8: lambda m: m.push(m.counted("<Q")),
    pickle.BYTEARRAY8: lambda m: m.push(m.counted("<Q")),
    # ---- containers
    pickle.MARK: lambda m: m.marks.append(len(m.stack)),
    pickle.POP: lambda m: m.pop(),
    pickle.POP_MARK: lambda m: m.pop_mark(),
    pickle.EMPTY_TUPLE: lambda m: m.push(()),
    pickle.TUPLE1: lambda m: m.push(m.pop_several(1)),
    pickle.TUPLE2: lambda m: m.push(m.pop_several(2)),
    pickle.TUPLE3: lambda m: m.push(m.pop_several(3)),
    pickle.TUPLE: lambda m: m.push(tuple(m.pop_mark())),
    pickle.EMPTY_LIST: lambda m: m.push([]),
    pickle.APPEND: lambda m: m.append([m.pop()]),
    pickle.APPENDS: lambda m: m.append(m.pop_mark()),
    pickle.EMPTY_DICT: lambda m: m.push({}),
    pickle.SETITEM: lambda m: m.set_items([*m.pop_several(2)]),
    pickle.SETITEMS: lambda m: m.set_items(m.pop_mark()),
    # ---- what is used again
    pickle.MEMOIZE: lambda m: m.memo.__setitem__(len(m.memo), m.top()),
    pickle.BINPUT: lambda m: m.memo.__setitem__(m.number("<B"), m.top()),
    pickle.LONG_BINPUT: lambda m: m.memo.__setitem__(m.number("<I"), m.top()),
    pickle.BINGET: lambda m: m.push(m.remembered(m.number("<B"))),
    pickle.LONG_BINGET: lambda m: m.push(m.remembered(m.number("<I"))),
    # ---- names and calls
    pickle.GLOBAL: lambda m: m.name(m.line(), m.line()),
    pickle.STACK_GLOBAL: _Machine.name_on_stack,
    pickle.REDUCE: _Machine.make,
    pickle.NEWOBJ: _Machine.make,
    pickle.BUILD: _Machine.build,
}
_NAMES = {
    value: name
    for name, value in vars(pickle).items()
    if name.isupper() and isinstance(value, bytes) and len(value) == 1
}
