"""Pickles made to harm: each either does something when Python's own `pickle` reads it, or takes time or memory."""

from __future__ import annotations

import pickle
import struct

import numpy as np

from tricycle.configs import GPTConfig
from tricycle.models import GPT

MARKER = "marker"  # the file that attacks try to leave; the name is relative to where the program runs
SHELL = f"echo > {MARKER}"
PYTHON = f"open({MARKER!r}, 'w').close()"
CONFIG = GPTConfig(n_layers=1, embedding_dim=8, n_heads=2, vocab_size=260, context_window=8)


# -------------------------------------------------------------------- an assembler
def text(value: str) -> bytes:
    raw = value.encode()
    return pickle.BINUNICODE + struct.pack("<I", len(raw)) + raw


def whole(value: int) -> bytes:
    if -(2**31) <= value < 2**31:
        return pickle.BININT + struct.pack("<i", value)
    raw = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return pickle.LONG1 + bytes([len(raw)]) + raw


def blob(raw: bytes) -> bytes:
    return pickle.BINBYTES + struct.pack("<I", len(raw)) + raw


def name(module: str, attribute: str) -> bytes:
    return pickle.GLOBAL + f"{module}\n{attribute}\n".encode()


def name_on_stack(module: str, attribute: str) -> bytes:
    return text(module) + text(attribute) + pickle.STACK_GLOBAL


def several(*values: bytes) -> bytes:
    return pickle.MARK + b"".join(values) + pickle.TUPLE


def call(function: bytes, *args: bytes) -> bytes:
    return function + several(*args) + pickle.REDUCE


def mapping(*pairs: bytes) -> bytes:
    return pickle.EMPTY_DICT + pickle.MARK + b"".join(pairs) + pickle.SETITEMS


def built(target: bytes, state: bytes) -> bytes:
    return target + state + pickle.BUILD


def whole_file(*parts: bytes, protocol: int = 4) -> bytes:
    return pickle.PROTO + bytes([protocol]) + b"".join(parts) + pickle.STOP


def in_a_model(part: bytes) -> bytes:
    """A model with one more attribute, which is made by these instructions."""
    return whole_file(
        built(call(name("tricycle.models", "GPT")).replace(pickle.REDUCE, pickle.NEWOBJ), mapping(text("extra"), part))
    )


# -------------------------------------------------------------------- what runs something
COMMANDS: dict[str, tuple[str, str, list[bytes]]] = {
    "os.system": ("os", "system", [text(SHELL)]),
    "posix.system": ("posix", "system", [text(SHELL)]),
    "popen": ("os", "popen", [text(SHELL)]),
    "eval": ("builtins", "eval", [text(PYTHON)]),
    "exec": ("builtins", "exec", [text(PYTHON)]),
    "__builtin__.eval": ("__builtin__", "eval", [text(PYTHON)]),
    "compile": ("builtins", "compile", [text(PYTHON), text("x"), text("exec")]),
    "open": ("builtins", "open", [text(MARKER), text("w")]),
    "io.open": ("io", "open", [text(MARKER), text("w")]),
    "__import__": ("builtins", "__import__", [text("antigravity")]),
    "import_module": ("importlib", "import_module", [text("antigravity")]),
    "getattr": ("builtins", "getattr", [name("os", "path"), text("join")]),
    "attrgetter": ("operator", "attrgetter", [text("system")]),
    "methodcaller": ("operator", "methodcaller", [text("system"), text(SHELL)]),
    "partial": ("functools", "partial", [name("os", "system"), text(SHELL)]),
    "subprocess": ("subprocess", "Popen", [text("ls")]),
    "check_output": ("subprocess", "check_output", [text("ls")]),
    "pty.spawn": ("pty", "spawn", [text("ls")]),
    "runpy": ("runpy", "run_path", [text("x.py")]),
    "timeit": ("timeit", "timeit", [text(PYTHON)]),
    "cProfile": ("cProfile", "run", [text(PYTHON)]),
    "pdb.run": ("pdb", "run", [text(PYTHON)]),
    "code": ("code", "interact", []),
    "runstring": ("numpy.testing", "runstring", [text(PYTHON), mapping()]),
    "numpy.load": ("numpy", "load", [text(MARKER)]),
    "numpy.memmap": ("numpy", "memmap", [text(MARKER), text("uint8"), text("w+")]),
    "tofile": ("numpy", "ndarray.tofile", [text(MARKER)]),
    "pickle.loads": ("pickle", "loads", [blob(whole_file(call(name("os", "system"), text(SHELL))))]),
    "marshal": ("marshal", "loads", [blob(b"c")]),
    "CDLL": ("ctypes", "CDLL", [text("libc.so.6")]),
    "rmtree": ("shutil", "rmtree", [text(".")]),
    "touch": ("pathlib", "Path.touch", [text(MARKER)]),
    "socket": ("socket", "create_connection", [text("localhost"), whole(1)]),
    "webbrowser": ("webbrowser", "open", [text("http://localhost")]),
    "_reconstructor": ("copyreg", "_reconstructor", [name("os", "system"), name("builtins", "object"), pickle.NONE]),
    "__newobj__": ("copyreg", "__newobj__", [name("os", "system"), text(SHELL)]),
    "atomic_write": ("tricycle.system.files", "atomic_write", [text(MARKER)]),
    "our os": ("tricycle.checkpoint", "os.system", [text(SHELL)]),
    "our globals": ("tricycle.models", "GPT.__init__.__globals__", []),
    "our class": ("tricycle.layers", "Layer.__class__", []),
    "our base": ("tricycle.layers", "Layer.__subclasses__", []),
    "codecs": ("_codecs", "encode", [text("x"), text("latin1")]),
}


def commands() -> dict[str, bytes]:
    attacks = {}
    for title, (module, attribute, args) in COMMANDS.items():
        attacks[f"REDUCE {title}"] = whole_file(call(name(module, attribute), *args))
        attacks[f"STACK_GLOBAL {title}"] = whole_file(call(name_on_stack(module, attribute), *args))
        attacks[f"in a model: {title}"] = in_a_model(call(name(module, attribute), *args))
    return attacks


def other_instructions() -> dict[str, bytes]:
    system = name("os", "system")
    model = name("tricycle.models", "GPT")
    return {
        "INST": whole_file(pickle.MARK, text(SHELL), pickle.INST + b"os\nsystem\n"),
        "INST of Tricycle": whole_file(pickle.MARK, pickle.INST + b"tricycle.models\nGPT\n"),
        "OBJ": whole_file(pickle.MARK, system, text(SHELL), pickle.OBJ),
        "OBJ of Tricycle": whole_file(pickle.MARK, model, pickle.OBJ),
        "NEWOBJ": whole_file(system, several(text(SHELL)), pickle.NEWOBJ),
        "NEWOBJ_EX": whole_file(system, several(text(SHELL)), mapping(), pickle.NEWOBJ_EX),
        "NEWOBJ_EX of Tricycle": whole_file(model, several(), mapping(text("config"), pickle.NONE), pickle.NEWOBJ_EX),
        "EXT1": whole_file(pickle.EXT1 + b"\x01"),
        "EXT2": whole_file(pickle.EXT2 + b"\x01\x00"),
        "EXT4": whole_file(pickle.EXT4 + b"\x01\x00\x00\x00"),
        "PERSID": whole_file(pickle.PERSID + b"os.system\n"),
        "BINPERSID": whole_file(text("os.system"), pickle.BINPERSID),
        "NEXT_BUFFER": whole_file(pickle.NEXT_BUFFER, protocol=5),
        "READONLY_BUFFER": whole_file(blob(b"x"), pickle.READONLY_BUFFER, protocol=5),
        "BUILD of a class": whole_file(built(model, several(pickle.NONE, mapping(text("forward"), pickle.NONE)))),
        "BUILD of a function": whole_file(
            built(name("numpy._core.numeric", "_frombuffer"), several(pickle.NONE, mapping(text("__code__"), whole(1))))
        ),
        "BUILD of a list": whole_file(built(pickle.EMPTY_LIST, mapping())),
        "BUILD twice": in_a_model(built(built(call(name("numpy", "dtype"), text("f4")), whole(1)), whole(2))),
        "BUILD with __class__": in_a_model(
            built(name("tricycle.layers", "Dense") + several() + pickle.NEWOBJ, mapping(text("__class__"), model))
        ),
        "BUILD with __dict__": in_a_model(
            built(name("tricycle.layers", "Dense") + several() + pickle.NEWOBJ, mapping(text("__dict__"), mapping()))
        ),
        "STACK_GLOBAL of numbers": whole_file(whole(1), whole(2), pickle.STACK_GLOBAL),
        "STACK_GLOBAL of a list": whole_file(pickle.EMPTY_LIST, text("x"), pickle.STACK_GLOBAL),
        "a call of a text": whole_file(text("os.system"), several(text(SHELL)), pickle.REDUCE),
        "a call of what was made": whole_file(
            call(name("tricycle.activation", "ReLU")), several(whole(3)), pickle.REDUCE
        ),
        "a call with a list": whole_file(name("numpy", "dtype"), pickle.EMPTY_LIST, pickle.REDUCE),
        "protocol 0": b"cos\nsystem\n(S'" + SHELL.encode() + b"'\ntR.",
        "protocol 1": b"cposix\nsystem\nq\x00(U" + bytes([len(SHELL)]) + SHELL.encode() + b"q\x01tq\x02Rq\x03.",
        "a module as an ancestor": whole_file(name_on_stack("tricycle.models", "GPT.to_gpu")),
        "an empty name": whole_file(name_on_stack("", "")),
        "a dot": whole_file(name_on_stack("tricycle.models", ".")),
        "a nameless line": whole_file(pickle.GLOBAL + b"x" * 5000),
        "SETITEM on an object": whole_file(call(name("numpy", "ndarray")), whole(0), whole(1), pickle.SETITEM),
        "APPEND on an object": whole_file(call(name("numpy", "ndarray")), whole(0), pickle.APPEND),
        "APPENDS on a tuple": whole_file(several(), pickle.MARK, whole(0), pickle.APPENDS),
        "ADDITEMS": whole_file(pickle.EMPTY_SET, pickle.MARK, whole(0), pickle.ADDITEMS),
        "FROZENSET": whole_file(pickle.MARK, whole(0), pickle.FROZENSET),
    }


# -------------------------------------------------------------------- what reaches memory through NumPy
def array(shape: bytes, dtype: bytes, content: bytes, kind: bytes | None = None) -> bytes:
    """As NumPy's own pickles have one."""
    empty = call(
        name("numpy._core.multiarray", "_reconstruct"), kind or name("numpy", "ndarray"), several(whole(0)), blob(b"b")
    )
    return built(empty, several(whole(1), shape, dtype, pickle.NEWFALSE, content))


def dtype(letters: str, *state: bytes) -> bytes:
    made = call(name("numpy", "dtype"), text(letters), pickle.NEWFALSE, pickle.NEWTRUE)
    usual = (whole(3), text("<"), pickle.NONE, pickle.NONE, pickle.NONE, whole(-1), whole(-1), whole(0))
    return built(made, several(*(state or usual)))


def offset_dtype(offset: int, flags: int = 0) -> bytes:
    field = several(dtype("O8"), whole(offset))
    fields = mapping(text("x"), field)
    return dtype("V8", whole(3), text("|"), pickle.NONE, several(text("x")), fields, whole(8), whole(1), whole(flags))


def as_weights(made: bytes) -> bytes:
    """A model whose only weights are this."""
    tensor = built(name("tricycle.parameter", "Parameter") + several() + pickle.NEWOBJ, mapping(text("array"), made))
    model = name("tricycle.models", "GPT") + several() + pickle.NEWOBJ
    config = built(name("tricycle.configs.presets", "GPTConfig") + several() + pickle.NEWOBJ, mapping())
    return whole_file(built(model, mapping(text("config"), config, text("weights"), tensor)))


def through_numpy() -> dict[str, bytes]:
    ndarray = name("numpy", "ndarray")
    objects = array(several(whole(2)), dtype("O8"), pickle.EMPTY_LIST)
    eight = blob(b"\x41" * 8)
    in_place = name("numpy._core.numeric", "_frombuffer")
    scalar = name("numpy._core.multiarray", "scalar")
    attacks = {
        "ndarray on objects": call(ndarray, several(whole(2)), dtype("u8"), objects),
        "ndarray on bytes as objects": call(ndarray, several(whole(1)), dtype("O8"), eight),
        "SETITEM on it": call(ndarray, several(whole(2)), dtype("u8"), objects) + whole(0) + whole(1) + pickle.SETITEM,
        "ndarray with strides": call(ndarray, several(whole(4)), dtype("u8"), eight, whole(0), several(whole(2**40))),
        "ndarray with an offset": call(ndarray, several(whole(1)), dtype("u8"), eight, whole(-(2**40))),
        "object field, flags 0": array(several(whole(1)), offset_dtype(0), eight),
        "object field far away": array(several(whole(1)), offset_dtype(2**40), eight),
        "object field before": array(several(whole(1)), offset_dtype(-(2**40)), eight),
        "objects from bytes": array(several(whole(1)), dtype("O8"), eight),
        "objects in place": call(in_place, eight, dtype("O8"), several(whole(1)), text("C")),
        "fields in place": call(in_place, eight, offset_dtype(2**30), several(whole(1)), text("C")),
        "a scalar object": call(scalar, dtype("O8"), eight),
        "a scalar of fields": call(scalar, offset_dtype(2**40), eight),
        "a subclass": array(several(whole(1)), dtype("f4"), eight, name("numpy", "memmap")),
        "another class": array(several(whole(1)), dtype("f4"), eight, name("tricycle.models", "GPT")),
        "a generator by name": call(name("numpy.random._pickle", "__bit_generator_ctor"), text("os.system")),
        "a generator's maker": call(
            name("numpy.random._pickle", "__generator_ctor"), name("numpy.random._pcg64", "PCG64"), ndarray
        ),
        "a seed's state": call(
            name("numpy.random.bit_generator", "__pyx_unpickle_SeedSequence"), ndarray, whole(0), objects
        ),
        "too short": array(several(whole(3)), dtype("f4"), eight),
        "too long": array(several(whole(1)), dtype("f4"), eight),
        "negative": array(several(whole(-2)), dtype("f4"), eight),
        "negative twice": array(several(whole(-2), whole(-1)), dtype("f4"), eight),
        "booleans as a shape": array(several(pickle.NEWTRUE, whole(2)), dtype("f4"), eight),
        "zero times much": array(several(whole(2**62), whole(0)), dtype("f4"), blob(b"")),
        "many axes": array(several(*[whole(1)] * 70, whole(2)), dtype("f4"), eight),
        "texts": array(several(whole(1)), dtype("U2"), eight),
        "void": array(several(whole(1)), dtype("V8"), eight),
        "dates": array(several(whole(1)), dtype("M8"), eight),
        "itemsize 0": array(several(whole(2**40)), dtype("V0"), blob(b"")),
        "a dtype of a text": array(several(whole(2)), text("f4"), eight),
        "a dtype with metadata": array(
            several(whole(2)),
            dtype(
                "f4",
                whole(4),
                text("<"),
                pickle.NONE,
                pickle.NONE,
                pickle.NONE,
                whole(4),
                whole(1),
                whole(63),
                mapping(),
            ),
            eight,
        ),
        "a byte order of odd letters": array(
            several(whole(2)), dtype("f4", whole(3), text("O"), *[pickle.NONE] * 3, *[whole(-1)] * 3), eight
        ),
        "no bytes": array(several(whole(2)), dtype("f4"), text("x" * 8)),
        "a list of bytes": array(several(whole(2)), dtype("f4"), pickle.EMPTY_LIST),
        "never built": call(name("numpy._core.multiarray", "_reconstruct"), ndarray, several(whole(10**9)), blob(b"d")),
        "an array of an array": array(several(whole(2)), dtype("f4"), array(several(whole(2)), dtype("f4"), eight)),
    }
    return {title: as_weights(made) for title, made in attacks.items()}


# -------------------------------------------------------------------- what takes time or memory
def shared_lists(depth: int) -> bytes:
    """Each list holds the one before it twice: 2^depth in all, in few bytes."""
    parts = [pickle.EMPTY_LIST + pickle.MEMOIZE]
    for i in range(depth):
        twice = 2 * (pickle.LONG_BINGET + struct.pack("<I", i))
        parts.append(pickle.EMPTY_LIST + pickle.MEMOIZE + pickle.MARK + twice + pickle.APPENDS)
    return b"".join(parts)


def the_same_weights(n: int) -> bytes:
    """Many parameters with one array of a megabyte."""
    content = blob(bytes(2**20))
    shared = array(several(whole(2**18)), dtype("f4"), content) + pickle.MEMOIZE
    tensors = b""
    for i in range(n):
        part = shared if i == 0 else pickle.LONG_BINGET + struct.pack("<I", 0)
        made = built(name("tricycle.tensor", "Tensor") + several() + pickle.NEWOBJ, mapping(text("array"), part))
        tensors += text(f"w{i}") + made
    config = built(
        name("tricycle.configs.presets", "GPTConfig") + several() + pickle.NEWOBJ,
        mapping(text("n_layers"), whole(1), text("embedding_dim"), whole(7680)),
    )
    model = name("tricycle.models", "GPT") + several() + pickle.NEWOBJ
    return whole_file(built(model, mapping(text("config"), config) + pickle.MARK + tensors + pickle.SETITEMS))


def nested_layers(depth: int, itself: bool) -> bytes:
    dense = name("tricycle.layers", "Dense") + several() + pickle.NEWOBJ
    if itself:
        return whole_file(
            built(
                name("tricycle.models", "GPT") + several() + pickle.NEWOBJ + pickle.MEMOIZE,
                mapping(text("a"), pickle.BINGET + b"\x00", text("config"), pickle.BINGET + b"\x00"),
            )
        )
    inner = pickle.NONE
    for _ in range(depth):
        inner = built(dense, mapping(text("x"), inner))
    return in_a_model(inner)


def bombs() -> dict[str, bytes]:
    config = name("tricycle.configs.presets", "GPTConfig") + several() + pickle.NEWOBJ
    model = name("tricycle.models", "GPT") + several() + pickle.NEWOBJ

    def sized(**fields: int) -> bytes:
        pairs = b"".join(text(key) + whole(value) for key, value in fields.items())
        return whole_file(built(model, mapping(text("config"), built(config, mapping(pairs)))))

    hashed = several() + pickle.MEMOIZE
    for i in range(60):
        pair = 2 * (pickle.BINGET + bytes([i]))
        hashed += pickle.POP + pair + pickle.TUPLE2 + pickle.MEMOIZE
    attacks = {
        "12 bytes for 3 GB": whole_file(pickle.BYTEARRAY8 + struct.pack("<Q", 3 * 10**9), protocol=5),
        "BINBYTES8": whole_file(pickle.BINBYTES8 + struct.pack("<Q", 2**63)),
        "BINUNICODE8": whole_file(pickle.BINUNICODE8 + struct.pack("<Q", 2**40)),
        "FRAME": pickle.PROTO + b"\x04" + pickle.FRAME + struct.pack("<Q", 2**62) + b".",
        "LONG_BINPUT": whole_file(pickle.NONE, pickle.LONG_BINPUT + struct.pack("<I", 2**31 - 1)),
        "many LONG_BINPUT": whole_file(
            pickle.NONE, *[pickle.LONG_BINPUT + struct.pack("<I", 2**32 - 1 - i) for i in range(10**5)]
        ),
        "LONG4": whole_file(pickle.LONG4 + struct.pack("<i", 2**31 - 1)),
        "LONG of many digits": whole_file(pickle.LONG + b"9" * 10**6 + b"L\n"),
        "LONG1 of 255 bytes": whole_file(pickle.LONG1 + b"\xff" + b"\x7f" * 255),
        "an array of 8 GB": as_weights(
            call(
                name("numpy._core.multiarray", "_reconstruct"),
                name("numpy", "ndarray"),
                several(whole(10**9)),
                blob(b"d"),
            )
        ),
        "ndarray of 8 GB": as_weights(call(name("numpy", "ndarray"), several(whole(10**9)), dtype("f8"))),
        "a key that hashes long": whole_file(pickle.EMPTY_DICT, hashed, pickle.NONE, pickle.SETITEM),
        "dicts": whole_file(pickle.EMPTY_DICT * 10**6),
        "lists": whole_file(pickle.EMPTY_LIST * 10**6),
        "marks": whole_file(pickle.MARK * 10**6),
        "tuples": whole_file(pickle.NONE, pickle.TUPLE1 * 10**6),
        "DUP": whole_file(pickle.EMPTY_LIST, pickle.DUP * 10**6),
        "texts": whole_file((pickle.SHORT_BINUNICODE + b"\x01x") * 10**6),
        "one long text": whole_file(text("x" * 10**7)),
        "a text of wide characters": whole_file(text("\U0001f6b2" + "x" * 10**6)),
        "floats": whole_file((pickle.BINFLOAT + bytes(8)) * 10**6),
        "views": whole_file((pickle.SHORT_BINBYTES + b"\x00") * 10**6),
        "names": whole_file(name("numpy", "ndarray") * 10**6),
        "calls": whole_file(name("numpy", "dtype"), (several() + pickle.REDUCE) * 10**6),
        "memo": whole_file(pickle.NONE + pickle.MEMOIZE * 10**6),
        "shared lists": in_a_model(shared_lists(60)),
        "shared lists as a field": whole_file(
            built(model, mapping(text("config"), built(config, mapping(text("full_layers"), shared_lists(40)))))
        ),
        "a list in itself": in_a_model(pickle.EMPTY_LIST + pickle.MEMOIZE + pickle.BINGET + b"\x00" + pickle.APPEND),
        "a model in itself": nested_layers(0, True),
        "layers in layers": nested_layers(3000, False),
        "lists in lists": in_a_model(pickle.EMPTY_LIST * 9000 + pickle.APPEND * 8999),
        "the same weights 3000 times": the_same_weights(3000),
        "many layers": sized(n_layers=10**12),
        "many layers of nothing": sized(n_layers=10**9, embedding_dim=1, n_heads=1, vocab_size=1, context_window=1),
        "wide": sized(embedding_dim=12 * 10**15),
        "a long window": sized(context_window=2**62),
        "many tokens": sized(vocab_size=2**62),
        "many heads": sized(n_heads=10**12, head_size=10**12),
        "a great seed": sized(seed=2**200),
    }
    return attacks


def damaged() -> dict[str, bytes]:
    """A good one, cut off or with other bytes at many places."""
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
    """Each by its kind and its name.

    Args:
        only: those of one kind.
    """
    kinds = {
        "command": commands,
        "instruction": other_instructions,
        "numpy": through_numpy,
        "bomb": bombs,
        "damage": damaged,
    }
    chosen = {kind: make for kind, make in kinds.items() if only in ("", kind)}
    return {f"{kind}: {title}": content for kind, make in chosen.items() for title, content in make().items()}
