"""Malicious pickles: each runs code in Python's own `pickle`, or consumes much time or memory."""

from __future__ import annotations

import pickle
import struct

import numpy as np

from tricycle.configs import GPTConfig
from tricycle.models import GPT

MARKER = "marker"  # the file that attacks try to create in the working directory
SHELL = f"echo > {MARKER}"
PYTHON = f"open({MARKER!r}, 'w').close()"
CONFIG = GPTConfig(n_layers=1, embedding_dim=8, n_heads=2, vocab_size=260, context_window=8)


# -------------------------------------------------------------------- an assembler
def string(value: str) -> bytes:
    raw = value.encode()
    return pickle.BINUNICODE + struct.pack("<I", len(raw)) + raw


def integer(value: int) -> bytes:
    if -(2**31) <= value < 2**31:
        return pickle.BININT + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return pickle.LONG1 + bytes([len(raw)]) + raw


def bytes_value(raw: bytes) -> bytes:
    return pickle.BINBYTES + struct.pack("<I", len(raw)) + raw


def global_ref(module: str, attribute: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{attribute}\n".encode()


def stack_global(module: str, attribute: str) -> bytes:
    return string(module) + string(attribute) + pickle.STACK_GLOBAL


def tuple_of(*values: bytes) -> bytes:
    return pickle.MARK + b"".join(values) + pickle.TUPLE


def reduce(function: bytes, *args: bytes) -> bytes:
    return function + tuple_of(*args) + pickle.REDUCE


def shape(*sizes: int) -> bytes:
    return tuple_of(*map(integer, sizes))


def dict_of(*pairs: bytes, **named: bytes) -> bytes:
    pairs += tuple(string(name) + value for name, value in named.items())
    return pickle.EMPTY_DICT + pickle.MARK + b"".join(pairs) + pickle.SETITEMS


def build(target: bytes, state: bytes) -> bytes:
    return target + state + pickle.BUILD


def new(class_ref: bytes, **attributes: bytes) -> bytes:
    """Return an object of a class, with attributes if any are given."""
    made = class_ref + tuple_of() + pickle.NEWOBJ
    return build(made, dict_of(**attributes)) if attributes else made


def pickle_file(*parts: bytes, protocol: int = 4) -> bytes:
    return pickle.PROTO + bytes([protocol]) + b"".join(parts) + pickle.STOP


def model_with_attribute(part: bytes) -> bytes:
    """Return a pickled model with an additional attribute, which the opcodes `part` construct."""
    return pickle_file(new(GPT_CLASS, extra=part))


GPT_CLASS = global_ref("tricycle.models", "GPT")
GPT_CONFIG = global_ref("tricycle.configs.presets", "GPTConfig")
DENSE = global_ref("tricycle.layers", "Dense")
NDARRAY = global_ref("numpy", "ndarray")
RECONSTRUCT = global_ref("numpy._core.multiarray", "_reconstruct")


# -------------------------------------------------------------------- code execution
COMMANDS: dict[str, tuple[str, str, list[bytes]]] = {
    "os.system": ("os", "system", [string(SHELL)]),
    "posix.system": ("posix", "system", [string(SHELL)]),
    "popen": ("os", "popen", [string(SHELL)]),
    "eval": ("builtins", "eval", [string(PYTHON)]),
    "exec": ("builtins", "exec", [string(PYTHON)]),
    "__builtin__.eval": ("__builtin__", "eval", [string(PYTHON)]),
    "compile": ("builtins", "compile", [string(PYTHON), string("x"), string("exec")]),
    "open": ("builtins", "open", [string(MARKER), string("w")]),
    "io.open": ("io", "open", [string(MARKER), string("w")]),
    "__import__": ("builtins", "__import__", [string("antigravity")]),
    "import_module": ("importlib", "import_module", [string("antigravity")]),
    "getattr": ("builtins", "getattr", [global_ref("os", "path"), string("join")]),
    "attrgetter": ("operator", "attrgetter", [string("system")]),
    "methodcaller": ("operator", "methodcaller", [string("system"), string(SHELL)]),
    "partial": ("functools", "partial", [global_ref("os", "system"), string(SHELL)]),
    "subprocess": ("subprocess", "Popen", [string("ls")]),
    "check_output": ("subprocess", "check_output", [string("ls")]),
    "pty.spawn": ("pty", "spawn", [string("ls")]),
    "runpy": ("runpy", "run_path", [string("x.py")]),
    "timeit": ("timeit", "timeit", [string(PYTHON)]),
    "cProfile": ("cProfile", "run", [string(PYTHON)]),
    "pdb.run": ("pdb", "run", [string(PYTHON)]),
    "code": ("code", "interact", []),
    "runstring": ("numpy.testing", "runstring", [string(PYTHON), dict_of()]),
    "numpy.load": ("numpy", "load", [string(MARKER)]),
    "numpy.memmap": ("numpy", "memmap", [string(MARKER), string("uint8"), string("w+")]),
    "tofile": ("numpy", "ndarray.tofile", [string(MARKER)]),
    "pickle.loads": ("pickle", "loads", [bytes_value(pickle_file(reduce(global_ref("os", "system"), string(SHELL))))]),
    "marshal": ("marshal", "loads", [bytes_value(b"c")]),
    "CDLL": ("ctypes", "CDLL", [string("libc.so.6")]),
    "rmtree": ("shutil", "rmtree", [string(".")]),
    "touch": ("pathlib", "Path.touch", [string(MARKER)]),
    "socket": ("socket", "create_connection", [string("localhost"), integer(1)]),
    "webbrowser": ("webbrowser", "open", [string("http://localhost")]),
    "_reconstructor": (
        "copyreg",
        "_reconstructor",
        [global_ref("os", "system"), global_ref("builtins", "object"), pickle.NONE],
    ),
    "__newobj__": ("copyreg", "__newobj__", [global_ref("os", "system"), string(SHELL)]),
    "atomic_write": ("tricycle.system.files", "atomic_write", [string(MARKER)]),
    "our os": ("tricycle.checkpoint", "os.system", [string(SHELL)]),
    "our globals": ("tricycle.models", "GPT.__init__.__globals__", []),
    "our class": ("tricycle.layers", "Layer.__class__", []),
    "our base": ("tricycle.layers", "Layer.__subclasses__", []),
    "codecs": ("_codecs", "encode", [string("x"), string("latin1")]),
}


def command_attacks() -> dict[str, bytes]:
    attacks = {}
    for title, (module, attribute, args) in COMMANDS.items():
        attacks[f"REDUCE {title}"] = pickle_file(reduce(global_ref(module, attribute), *args))
        attacks[f"STACK_GLOBAL {title}"] = pickle_file(reduce(stack_global(module, attribute), *args))
        attacks[f"in a model: {title}"] = model_with_attribute(reduce(global_ref(module, attribute), *args))
    return attacks


def opcode_attacks() -> dict[str, bytes]:
    system, model = global_ref("os", "system"), GPT_CLASS
    return {
        "INST": pickle_file(pickle.MARK, string(SHELL), pickle.INST + b"os\nsystem\n"),
        "INST of Tricycle": pickle_file(pickle.MARK, pickle.INST + b"tricycle.models\nGPT\n"),
        "OBJ": pickle_file(pickle.MARK, system, string(SHELL), pickle.OBJ),
        "OBJ of Tricycle": pickle_file(pickle.MARK, model, pickle.OBJ),
        "NEWOBJ": pickle_file(system, tuple_of(string(SHELL)), pickle.NEWOBJ),
        "NEWOBJ_EX": pickle_file(system, tuple_of(string(SHELL)), dict_of(), pickle.NEWOBJ_EX),
        "NEWOBJ_EX of Tricycle": pickle_file(model, tuple_of(), dict_of(config=pickle.NONE), pickle.NEWOBJ_EX),
        "EXT1": pickle_file(pickle.EXT1 + b"\x01"),
        "EXT2": pickle_file(pickle.EXT2 + b"\x01\x00"),
        "EXT4": pickle_file(pickle.EXT4 + b"\x01\x00\x00\x00"),
        "PERSID": pickle_file(pickle.PERSID + b"os.system\n"),
        "BINPERSID": pickle_file(string("os.system"), pickle.BINPERSID),
        "NEXT_BUFFER": pickle_file(pickle.NEXT_BUFFER, protocol=5),
        "READONLY_BUFFER": pickle_file(bytes_value(b"x"), pickle.READONLY_BUFFER, protocol=5),
        "BUILD of a class": pickle_file(build(model, tuple_of(pickle.NONE, dict_of(forward=pickle.NONE)))),
        "BUILD of a function": pickle_file(
            build(global_ref("numpy._core.numeric", "_frombuffer"), tuple_of(pickle.NONE, dict_of(__code__=integer(1))))
        ),
        "BUILD of a list": pickle_file(build(pickle.EMPTY_LIST, dict_of())),
        "BUILD twice": model_with_attribute(
            build(build(reduce(global_ref("numpy", "dtype"), string("f4")), integer(1)), integer(2))
        ),
        "BUILD with __class__": model_with_attribute(new(DENSE, __class__=model)),
        "BUILD with __dict__": model_with_attribute(new(DENSE, __dict__=dict_of())),
        "STACK_GLOBAL of numbers": pickle_file(integer(1), integer(2), pickle.STACK_GLOBAL),
        "STACK_GLOBAL of a list": pickle_file(pickle.EMPTY_LIST, string("x"), pickle.STACK_GLOBAL),
        "a call of a text": pickle_file(string("os.system"), tuple_of(string(SHELL)), pickle.REDUCE),
        "a call of what was made": pickle_file(
            reduce(global_ref("tricycle.activation", "ReLU")), shape(3), pickle.REDUCE
        ),
        "a call with a list": pickle_file(global_ref("numpy", "dtype"), pickle.EMPTY_LIST, pickle.REDUCE),
        "protocol 0": b"cos\nsystem\n(S'" + SHELL.encode() + b"'\ntR.",
        "protocol 1": b"cposix\nsystem\nq\x00(U" + bytes([len(SHELL)]) + SHELL.encode() + b"q\x01tq\x02Rq\x03.",
        "a module as an ancestor": pickle_file(stack_global("tricycle.models", "GPT.to_gpu")),
        "an empty name": pickle_file(stack_global("", "")),
        "a dot": pickle_file(stack_global("tricycle.models", ".")),
        "a nameless line": pickle_file(pickle.GLOBAL + b"x" * 5000),
        "SETITEM on an object": pickle_file(reduce(NDARRAY), integer(0), integer(1), pickle.SETITEM),
        "APPEND on an object": pickle_file(reduce(NDARRAY), integer(0), pickle.APPEND),
        "APPENDS on a tuple": pickle_file(tuple_of(), pickle.MARK, integer(0), pickle.APPENDS),
        "ADDITEMS": pickle_file(pickle.EMPTY_SET, pickle.MARK, integer(0), pickle.ADDITEMS),
        "FROZENSET": pickle_file(pickle.MARK, integer(0), pickle.FROZENSET),
    }


# -------------------------------------------------------------------- memory access through NumPy
def array(sizes: bytes, dtype: bytes, content: bytes, kind: bytes = NDARRAY) -> bytes:
    """Return the opcodes of an array as in NumPy's own pickles."""
    empty = reduce(RECONSTRUCT, kind, shape(0), bytes_value(b"b"))
    return build(empty, tuple_of(integer(1), sizes, dtype, pickle.NEWFALSE, content))


def dtype(letters: str, *state: bytes) -> bytes:
    made = reduce(global_ref("numpy", "dtype"), string(letters), pickle.NEWFALSE, pickle.NEWTRUE)
    usual = (integer(3), string("<"), pickle.NONE, pickle.NONE, pickle.NONE, integer(-1), integer(-1), integer(0))
    return build(made, tuple_of(*(state or usual)))


def offset_dtype(offset: int) -> bytes:
    names, fields = tuple_of(string("x")), dict_of(x=tuple_of(dtype("O8"), integer(offset)))
    return dtype("V8", integer(3), string("|"), pickle.NONE, names, fields, integer(8), integer(1), integer(0))


def model_with_weights(made: bytes) -> bytes:
    """Return a pickled model whose only weights are constructed by the opcodes `made`."""
    tensor = new(global_ref("tricycle.parameter", "Parameter"), array=made)
    return pickle_file(new(GPT_CLASS, config=build(new(GPT_CONFIG), dict_of()), weights=tensor))


def numpy_attacks() -> dict[str, bytes]:
    ndarray, none = NDARRAY, pickle.NONE
    f4, u8, o8 = dtype("f4"), dtype("u8"), dtype("O8")
    with_metadata = [integer(4), string("<"), none, none, none, integer(4), integer(1), integer(63), dict_of()]
    of_odd_order = [integer(3), string("O"), none, none, none, integer(-1), integer(-1), integer(-1)]
    objects = array(shape(2), o8, pickle.EMPTY_LIST)
    eight = bytes_value(b"\x41" * 8)
    in_place = global_ref("numpy._core.numeric", "_frombuffer")
    scalar = global_ref("numpy._core.multiarray", "scalar")
    attacks = {
        "ndarray on objects": reduce(ndarray, shape(2), u8, objects),
        "ndarray on bytes as objects": reduce(ndarray, shape(1), o8, eight),
        "SETITEM on it": b"".join([reduce(ndarray, shape(2), u8, objects), integer(0), integer(1), pickle.SETITEM]),
        "ndarray with strides": reduce(ndarray, shape(4), u8, eight, integer(0), shape(2**40)),
        "ndarray with an offset": reduce(ndarray, shape(1), u8, eight, integer(-(2**40))),
        "object field, flags 0": array(shape(1), offset_dtype(0), eight),
        "object field far away": array(shape(1), offset_dtype(2**40), eight),
        "object field before": array(shape(1), offset_dtype(-(2**40)), eight),
        "objects from bytes": array(shape(1), o8, eight),
        "objects in place": reduce(in_place, eight, o8, shape(1), string("C")),
        "fields in place": reduce(in_place, eight, offset_dtype(2**30), shape(1), string("C")),
        "a scalar object": reduce(scalar, o8, eight),
        "a scalar of fields": reduce(scalar, offset_dtype(2**40), eight),
        "a subclass": array(shape(1), f4, eight, global_ref("numpy", "memmap")),
        "another class": array(shape(1), f4, eight, GPT_CLASS),
        "a generator by name": reduce(global_ref("numpy.random._pickle", "__bit_generator_ctor"), string("os.system")),
        "a generator's maker": reduce(
            global_ref("numpy.random._pickle", "__generator_ctor"), global_ref("numpy.random._pcg64", "PCG64"), ndarray
        ),
        "a seed's state": reduce(
            global_ref("numpy.random.bit_generator", "__pyx_unpickle_SeedSequence"), ndarray, integer(0), objects
        ),
        "too short": array(shape(3), f4, eight),
        "too long": array(shape(1), f4, eight),
        "negative": array(shape(-2), f4, eight),
        "negative twice": array(shape(-2, -1), f4, eight),
        "booleans as a shape": array(tuple_of(pickle.NEWTRUE, integer(2)), f4, eight),
        "zero times much": array(shape(2**62, 0), f4, bytes_value(b"")),
        "many axes": array(tuple_of(*[integer(1)] * 70, integer(2)), f4, eight),
        "texts": array(shape(1), dtype("U2"), eight),
        "void": array(shape(1), dtype("V8"), eight),
        "dates": array(shape(1), dtype("M8"), eight),
        "itemsize 0": array(shape(2**40), dtype("V0"), bytes_value(b"")),
        "a dtype of a text": array(shape(2), string("f4"), eight),
        "a dtype with metadata": array(shape(2), dtype("f4", *with_metadata), eight),
        "a byte order of odd letters": array(shape(2), dtype("f4", *of_odd_order), eight),
        "no bytes": array(shape(2), f4, string("x" * 8)),
        "a list of bytes": array(shape(2), f4, pickle.EMPTY_LIST),
        "never built": reduce(RECONSTRUCT, ndarray, shape(10**9), bytes_value(b"d")),
        "an array of an array": array(shape(2), f4, array(shape(2), f4, eight)),
    }
    return {title: model_with_weights(made) for title, made in attacks.items()}


# -------------------------------------------------------------------- excessive time or memory
def shared_lists(depth: int) -> bytes:
    """Return lists of which each contains the previous one twice: 2^depth elements in few bytes."""
    parts = [pickle.EMPTY_LIST + pickle.MEMOIZE]
    for i in range(depth):
        twice = 2 * (pickle.LONG_BINGET + struct.pack("<I", i))
        parts.append(pickle.EMPTY_LIST + pickle.MEMOIZE + pickle.MARK + twice + pickle.APPENDS)
    return b"".join(parts)


def repeated_weights(n: int) -> bytes:
    """Return a model with n parameters that share one array of a megabyte."""
    content = bytes_value(bytes(2**20))
    shared = array(shape(2**18), dtype("f4"), content) + pickle.MEMOIZE
    tensors = b""
    for i in range(n):
        part = shared if i == 0 else pickle.LONG_BINGET + struct.pack("<I", 0)
        tensors += string(f"w{i}") + new(global_ref("tricycle.tensor", "Tensor"), array=part)
    config = new(GPT_CONFIG, n_layers=integer(1), embedding_dim=integer(7680))
    state = dict_of(config=config) + pickle.MARK + tensors + pickle.SETITEMS
    return pickle_file(build(new(GPT_CLASS), state))


def nested_layers(depth: int) -> bytes:
    inner = pickle.NONE
    for _ in range(depth):
        inner = new(DENSE, x=inner)
    return model_with_attribute(inner)


def resource_attacks() -> dict[str, bytes]:
    def model_with_config(**fields: int) -> bytes:
        return pickle_file(new(GPT_CLASS, config=new(GPT_CONFIG, **{key: integer(n) for key, n in fields.items()})))

    first = pickle.BINGET + b"\x00"
    hashed = tuple_of() + pickle.MEMOIZE
    for i in range(60):
        pair = 2 * (pickle.BINGET + bytes([i]))
        hashed += pickle.POP + pair + pickle.TUPLE2 + pickle.MEMOIZE
    return {
        "12 bytes for 3 GB": pickle_file(pickle.BYTEARRAY8 + struct.pack("<Q", 3 * 10**9), protocol=5),
        "BINBYTES8": pickle_file(pickle.BINBYTES8 + struct.pack("<Q", 2**63)),
        "BINUNICODE8": pickle_file(pickle.BINUNICODE8 + struct.pack("<Q", 2**40)),
        "FRAME": pickle.PROTO + b"\x04" + pickle.FRAME + struct.pack("<Q", 2**62) + b".",
        "LONG_BINPUT": pickle_file(pickle.NONE, pickle.LONG_BINPUT + struct.pack("<I", 2**31 - 1)),
        "many LONG_BINPUT": pickle_file(
            pickle.NONE, *[pickle.LONG_BINPUT + struct.pack("<I", 2**32 - 1 - i) for i in range(10**5)]
        ),
        "LONG4": pickle_file(pickle.LONG4 + struct.pack("<i", 2**31 - 1)),
        "LONG of many digits": pickle_file(pickle.LONG + b"9" * 10**6 + b"L\n"),
        "LONG1 of 255 bytes": pickle_file(pickle.LONG1 + b"\xff" + b"\x7f" * 255),
        "an array of 8 GB": model_with_weights(reduce(RECONSTRUCT, NDARRAY, shape(10**9), bytes_value(b"d"))),
        "ndarray of 8 GB": model_with_weights(reduce(NDARRAY, shape(10**9), dtype("f8"))),
        "a key that hashes long": pickle_file(pickle.EMPTY_DICT, hashed, pickle.NONE, pickle.SETITEM),
        "dicts": pickle_file(pickle.EMPTY_DICT * 10**6),
        "lists": pickle_file(pickle.EMPTY_LIST * 10**6),
        "marks": pickle_file(pickle.MARK * 10**6),
        "tuples": pickle_file(pickle.NONE, pickle.TUPLE1 * 10**6),
        "DUP": pickle_file(pickle.EMPTY_LIST, pickle.DUP * 10**6),
        "texts": pickle_file((pickle.SHORT_BINUNICODE + b"\x01x") * 10**6),
        "one long text": pickle_file(string("x" * 10**7)),
        "a text of wide characters": pickle_file(string("\U0001f6b2" + "x" * 10**6)),
        "floats": pickle_file((pickle.BINFLOAT + bytes(8)) * 10**6),
        "views": pickle_file((pickle.SHORT_BINBYTES + b"\x00") * 10**6),
        "names": pickle_file(global_ref("numpy", "ndarray") * 10**6),
        "calls": pickle_file(global_ref("numpy", "dtype"), (tuple_of() + pickle.REDUCE) * 10**6),
        "memo": pickle_file(pickle.NONE + pickle.MEMOIZE * 10**6),
        "shared lists": model_with_attribute(shared_lists(60)),
        "shared lists as a field": pickle_file(new(GPT_CLASS, config=new(GPT_CONFIG, full_layers=shared_lists(40)))),
        "a list in itself": model_with_attribute(pickle.EMPTY_LIST + pickle.MEMOIZE + first + pickle.APPEND),
        "a model in itself": pickle_file(build(new(GPT_CLASS) + pickle.MEMOIZE, dict_of(a=first, config=first))),
        "layers in layers": nested_layers(3000),
        "lists in lists": model_with_attribute(pickle.EMPTY_LIST * 9000 + pickle.APPEND * 8999),
        "the same weights 3000 times": repeated_weights(3000),
        "many layers": model_with_config(n_layers=10**12),
        "many layers of nothing": model_with_config(
            n_layers=10**9, embedding_dim=1, n_heads=1, vocab_size=1, context_window=1
        ),
        "wide": model_with_config(embedding_dim=12 * 10**15),
        "a long window": model_with_config(context_window=2**62),
        "many tokens": model_with_config(vocab_size=2**62),
        "many heads": model_with_config(n_heads=10**12, head_size=10**12),
        "a great seed": model_with_config(seed=2**200),
    }


def damaged_pickles() -> dict[str, bytes]:
    """Return truncated and mutated versions of a valid pickle."""
    generator = np.random.default_rng(5)
    good = pickle.dumps(GPT(CONFIG))
    attacks = {f"cut at {n}": good[:n] for n in (0, 1, 2, 3, 11, 40, 700, len(good) // 2, len(good) - 1)}
    for i in range(40):
        content = bytearray(good)
        for place in generator.integers(0, min(len(good), 9000), 1 + i % 4):
            content[place] = int(generator.integers(256))
        attacks[f"changed {i}"] = bytes(content)
    return attacks


def all_attacks(only: str = "") -> dict[str, bytes]:
    """Return all pickles by "kind: name".

    Args:
        only: a kind; "" for all.
    """
    kinds = {
        "command": command_attacks,
        "instruction": opcode_attacks,
        "numpy": numpy_attacks,
        "bomb": resource_attacks,
        "damage": damaged_pickles,
    }
    chosen = {kind: make for kind, make in kinds.items() if only in ("", kind)}
    return {f"{kind}: {title}": content for kind, make in chosen.items() for title, content in make().items()}
