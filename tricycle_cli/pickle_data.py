"""Read a pickle as plain data, without importing, calling or instantiating anything that the file names.

A pickle is a program for a stack machine. Here `pickle._Unpickler`, Python's implementation in Python, runs the program
with a restricted table of opcodes. Opcodes that make plain values are Python's own. Opcodes that would look up a name,
call a function or change an object are recorded as a `RecordedCall`. All other opcodes raise an error. The caller
(`tricycle_cli/pickles.py`) builds the model from the recorded data.

The documentation of `pickle` recommends an allow-list in `find_class` of the unpickler in C. An allow-list is not
sufficient, even if every class is replaced by a stub: of the 237 undamaged files of tests/hostile/pickles.py, four made
the unpickler in C allocate more than 6 GB (BINUNICODE8, FRAME and LONG_BINPUT state a size, and memory is allocated
before the content is read), and one made it hash a tuple of shared tuples without end.

Source: Python's `pickletools` describes the opcodes.
"""

from __future__ import annotations

import pickle
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Buffer = memoryview
ResolveName = Callable[[str, str], str | None]

# A model of 48 layers takes 51,000 reads. An opcode takes one to three, and makes a few hundred bytes at most.
MAX_READS = 2**19
MAX_STRING_BYTES = 2**22  # of all strings together: Python's str may take four times as many bytes
MAX_NAME_BYTES = 1000
# The opcodes with Python's own implementation: they make plain values, or move values on the stack.
STANDARD_NAMES = """
    PROTO STOP NONE NEWTRUE NEWFALSE BININT BININT1 BININT2 LONG1 BINFLOAT MARK POP POP_MARK EMPTY_TUPLE TUPLE1 TUPLE2
    TUPLE3 TUPLE EMPTY_LIST EMPTY_DICT MEMOIZE BINPUT LONG_BINPUT BINGET LONG_BINGET GLOBAL STACK_GLOBAL
"""
_CODES = [getattr(pickle, name)[0] for name in STANDARD_NAMES.split()]
STANDARD_OPCODES: dict[int, Any] = {code: pickle._Unpickler.dispatch[code] for code in _CODES}


class UnsupportedPickleError(ValueError):
    """The pickle is damaged, too large, or contains something that no model needs."""


@dataclass(frozen=True)
class GlobalName:
    """The full name of a class or function in a pickle, which is not imported."""

    name: str


@dataclass(eq=False)
class RecordedCall:
    """A call that a pickle declares, recorded and not executed."""

    name: str  # the full name of the class or function
    args: tuple[Any, ...]
    state: Any = None  # that the pickle assigns to the object (the BUILD opcode)


def read_pickle(content: Buffer, resolve_name: ResolveName) -> Any:
    """Decode a pickle to data and records, running nothing; UnsupportedPickleError if damaged or a name is not allowed.

    The result consists of plain values, tuples, lists, dicts, memoryviews of the pickle's bytes, `GlobalName` and
    `RecordedCall`.

    Args:
        content: the bytes of the pickle.
        resolve_name: returns the full name for a module and a name in it, or None for a name that is not allowed.

    Raises:
        UnsupportedPickleError: the pickle names something that is not allowed, is truncated, damaged or too large.
    """
    try:
        return _Reader(content, resolve_name).load()
    except (pickle.UnpicklingError, IndexError, EOFError) as error:
        raise UnsupportedPickleError(f"the pickle is damaged: {error}") from None


class _File:
    """The bytes of a pickle as a file for an unpickler, without copies."""

    def __init__(self, content: Buffer) -> None:
        self.content, self.offset, self.reads_left = content, 0, MAX_READS

    def read(self, n_bytes: int) -> Buffer | bytes:
        """Return the next `n_bytes` bytes; raise if fewer remain, or after `MAX_READS` reads."""
        start, self.reads_left = self.offset, self.reads_left - 1
        size = len(self.content)
        if n_bytes > size - start:
            raise UnsupportedPickleError(f"it is cut off or damaged: {n_bytes} bytes at offset {start} of {size}")
        if self.reads_left < 0:
            raise UnsupportedPickleError(f"expected at most {MAX_READS} reads of opcodes and arguments, got more")
        self.offset = start + n_bytes
        part = self.content[start : self.offset]
        return bytes(part) if n_bytes == 1 else part  # an opcode must be bytes

    def readline(self) -> bytes:
        """Return a line with its end; UnsupportedPickleError if the next MAX_NAME_BYTES bytes have no newline."""
        name, newline, _ = bytes(self.content[self.offset : self.offset + MAX_NAME_BYTES]).partition(b"\n")
        if not newline:
            raise UnsupportedPickleError(f"expected a name of at most {MAX_NAME_BYTES} bytes on one line, got none")
        return bytes(self.read(len(name) + 1))


class _Opcodes(dict[int, Callable[[Any], Any]]):
    """The function that executes each opcode; other opcodes raise an error."""

    def __missing__(self, code: int) -> Any:
        """Raise an UnsupportedPickleError that names the opcode, or says that this is no pickle."""
        names = [name for name, value in vars(pickle).items() if value == bytes([code])]
        problem = f"it has the opcode {names[0]}, which no model needs" if names else "it is no pickle"
        raise UnsupportedPickleError(problem)


class _Reader(pickle._Unpickler):
    stack: list[Any]  # the values since the last MARK
    append: Callable[[Any], None]  # pushes a value on the stack
    pop_mark: Callable[[], list[Any]]
    read: Callable[[int], Buffer]

    def __init__(self, content: Buffer, resolve_name: ResolveName) -> None:
        file: Any = _File(content)
        super().__init__(file)
        self.resolve_name, self.string_bytes_left = resolve_name, MAX_STRING_BYTES

    def find_class(self, module: str, name: str) -> GlobalName:
        """Return a GlobalName in place of a class; UnsupportedPickleError if no model needs it."""
        full_name = self.resolve_name(module, name)
        if full_name is None:
            raise UnsupportedPickleError(f"it asks for {module}.{name}, which no model needs"[:300])
        return GlobalName(full_name)

    def record_call(self) -> None:
        """Replace a function and its arguments on the stack by a `RecordedCall`, without calling it."""
        args, function = self.stack.pop(), self.stack.pop()
        if type(function) is not GlobalName or type(args) is not tuple:
            raise UnsupportedPickleError(f"it would call a {type(function).__name__}, which no model needs")
        self.append(RecordedCall(function.name, args))

    def record_state(self) -> None:
        """Take a state from the stack and store it in the `RecordedCall` below, which must have none yet."""
        state, target = self.stack.pop(), self.stack[-1]
        if type(target) is not RecordedCall or target.state is not None:
            name = getattr(target, "name", type(target).__name__)
            raise UnsupportedPickleError(f"it would change {name}, which no model needs")
        target.state = state

    def read_counted(self, layout: str) -> Buffer:
        """Read a byte count in this struct layout, and return that many bytes."""
        (n_bytes,) = struct.unpack(layout, self.read(struct.calcsize(layout)))
        return self.read(n_bytes)

    def append_string(self, raw: Buffer) -> None:
        """Push a string; UnsupportedPickleError for more than MAX_STRING_BYTES in all."""
        self.string_bytes_left -= len(raw)
        if self.string_bytes_left < 0:
            raise UnsupportedPickleError(f"expected at most {MAX_STRING_BYTES} bytes of strings, got more")
        self.append(str(raw, "utf-8", "surrogatepass"))

    def extend(self, values: list[Any]) -> None:
        """Append values in place to the list on top of the stack, which must be one."""
        self.expect_top(list).extend(values)

    def set_items(self, pairs: list[Any]) -> None:
        """Put alternating keys (str or int) and values in the dict on top of the stack; else UnsupportedPickleError."""
        target = self.expect_top(dict)
        if len(pairs) % 2:
            raise UnsupportedPickleError("it is damaged: a key without a value")
        for key, value in zip(pairs[::2], pairs[1::2]):
            if type(key) not in (str, int):  # other keys could take long to hash
                raise UnsupportedPickleError(f"expected strings or integers as keys, got a {type(key).__name__}")
            target[key] = value

    def expect_top(self, kind: type) -> Any:
        """Return the top of the stack; UnsupportedPickleError unless it is exactly of a type."""
        found = type(self.stack[-1])
        if found is not kind:
            raise UnsupportedPickleError(f"it would change a {found.__name__} as if it were a {kind.__name__}")
        return self.stack[-1]

    dispatch = _Opcodes(
        {
            **STANDARD_OPCODES,
            pickle.FRAME[0]: lambda self: self.read(8),  # the size of a frame, which is not used
            pickle.SHORT_BINBYTES[0]: lambda self: self.append(self.read_counted("<B")),
            pickle.BINBYTES[0]: lambda self: self.append(self.read_counted("<I")),
            **dict.fromkeys(pickle.BINBYTES8 + pickle.BYTEARRAY8, lambda self: self.append(self.read_counted("<Q"))),
            pickle.SHORT_BINUNICODE[0]: lambda self: self.append_string(self.read_counted("<B")),
            pickle.BINUNICODE[0]: lambda self: self.append_string(self.read_counted("<I")),
            pickle.BINUNICODE8[0]: lambda self: self.append_string(self.read_counted("<Q")),
            pickle.APPEND[0]: lambda self: self.extend([self.stack.pop()]),
            pickle.APPENDS[0]: lambda self: self.extend(self.pop_mark()),
            pickle.SETITEM[0]: lambda self: self.set_items([self.stack.pop(-2), self.stack.pop()]),
            pickle.SETITEMS[0]: lambda self: self.set_items(self.pop_mark()),
            **dict.fromkeys(pickle.REDUCE + pickle.NEWOBJ, record_call),
            pickle.BUILD[0]: record_state,
        }
    )
