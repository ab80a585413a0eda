"""Checkpoints come back bit for bit, survive every accident, and never run or believe what a file says."""

import builtins
import copy
import errno
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import types
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tricycle import checkpoint as checkpoint_module
from tricycle.checkpoint import NonFiniteCheckpointError, load_checkpoint, save_checkpoint
from tricycle.configs import DebugConfig, ShakespeareConfig
from tricycle.dataset import CausalLMDataset
from tricycle.layers import Dense
from tricycle.loss import CrossEntropy
from tricycle.models import GPT
from tricycle.ops import OPS
from tricycle.optimiser_rules import OPTIMISERS
from tricycle.optimisers import AdamW, StochasticGradientDescent
from tricycle.softmaxes import SinkSoftmax
from tricycle.system.safetensors_file import read_header
from tricycle.tokeniser import BPETokeniser
from tricycle_cli.pickles import load_pickled_model

CONFIG = DebugConfig(vocab_size=260, context_window=8, embedding_dim=8, n_layers=1, batch_size=2, dropout=0.2)
PROGRESS = {"step": 3, "best_loss": float("inf"), "seconds": 0.1}


def new_parts(config=CONFIG, optimiser=None):
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, 500)
    dataset = CausalLMDataset(tokens, config.vocab_size, 2, config.context_window).batch().shuffle().to_tensor()
    return GPT(config), optimiser or AdamW(1e-2), dataset


def train(model, optimiser, dataset, n_steps: int) -> list[float]:
    losses = []
    for _ in range(n_steps):
        inputs, outputs = next(dataset)
        loss = CrossEntropy()(outputs, model(inputs))
        loss.backward()
        model.update(optimiser)
        losses.append(float(loss))
    return losses


@pytest.fixture(scope="module")
def trained():
    parts = new_parts()
    train(*parts, 3)
    return parts


@pytest.fixture(scope="module")
def tokeniser() -> BPETokeniser:
    return BPETokeniser(260).train("hello hello hello", progress=False)


@pytest.fixture
def saved(tmp_path, trained, tokeniser) -> Path:
    path = tmp_path / "run.safetensors"
    save_checkpoint(path, trained[0], tokeniser, trained[1], trained[2], PROGRESS)
    return path


def use(path) -> dict:
    """Everything that can be done with a checkpoint."""
    checkpoint = load_checkpoint(path)
    checkpoint.model()
    checkpoint.tokeniser()
    return checkpoint.restore(*new_parts(checkpoint.config))


def refused(path, run=use) -> str:
    """The one-line message with which a file is refused; it names the file."""
    with pytest.raises(ValueError) as caught:
        run(path)
    message = str(caught.value)
    assert type(caught.value) is ValueError
    assert message.startswith(f"{path}: ")
    assert "\n" not in message
    return message


# -------------------------------------------------------------------- round trip
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tied": False, "positions": "rotary", "norm": "rms_norm", "activation": "swiglu", "bias": False},
        {"n_layers": 3, "activation": "relu", "n_heads": 1},
    ],
)
@pytest.mark.parametrize(
    "optimiser",
    [
        *(lambda kind=row.kind: kind(1e-2) for row in OPTIMISERS.values()),
        lambda: StochasticGradientDescent(0.1, 0.9),
        lambda: StochasticGradientDescent(0.1),
    ],
    ids=[*OPTIMISERS, "momentum", "SGD"],
)
def test_resumed_training_is_bit_exact(tmp_path, changes, optimiser, tokeniser):
    model, first_optimiser, dataset = new_parts(replace(CONFIG, **changes), optimiser())
    train(model, first_optimiser, dataset, 3)
    save_checkpoint(tmp_path / "c", model, tokeniser, first_optimiser, dataset, PROGRESS)
    expected = train(model, first_optimiser, dataset, 4)

    checkpoint = load_checkpoint(tmp_path / "c")
    again, (_, second_optimiser, dataset) = checkpoint.model(), new_parts(checkpoint.config, optimiser())
    assert checkpoint.restore(again, second_optimiser, dataset) == PROGRESS
    assert checkpoint.tokeniser() == tokeniser
    assert checkpoint.config.to_dict() == model.config.to_dict()
    assert train(again, second_optimiser, dataset, 4) == expected
    for (name, a), (_, b) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert a.array.tobytes() == b.array.tobytes(), name
        (n_first, first), (n_second, second) = first_optimiser.state_of(a), second_optimiser.state_of(b)
        assert n_first == n_second == 7
        assert first.keys() == second.keys()
        assert all(first[key].tobytes() == second[key].tobytes() for key in first), name
    assert model.generator.bit_generator.state == again.generator.bit_generator.state
    assert first_optimiser.n_steps == second_optimiser.n_steps == 7


def test_state_of_16_bit_weights_keeps_32_bits(tmp_path):
    model, optimiser, dataset = new_parts(CONFIG)
    train(model, optimiser, dataset, 1)
    save_checkpoint(tmp_path / "c", model, None, optimiser, dataset, PROGRESS)
    checkpoint = load_checkpoint(tmp_path / "c")
    again, (_, other, dataset) = checkpoint.model(), new_parts(CONFIG)
    for parameter in again.parameters():
        parameter.array = parameter.array.astype(np.float16)
    checkpoint.restore(again, other, dataset)
    for a, b in zip(model.parameters(), again.parameters(), strict=True):
        first, second = optimiser.state_of(a)[1], other.state_of(b)[1]
        assert all(first[key].tobytes() == second[key].tobytes() for key in first)


def test_checkpoint_with_only_a_model(tmp_path, trained):
    save_checkpoint(tmp_path / "c", trained[0])
    checkpoint = load_checkpoint(str(tmp_path / "c"))
    assert checkpoint.tokeniser() is None
    for name, array in checkpoint.model().state_dict().items():
        np.testing.assert_array_equal(array, trained[0].state_dict()[name])
    with pytest.raises(ValueError, match="'optimiser'"):
        checkpoint.restore(*new_parts())


def test_softmax_object_is_saved_by_its_name_or_refused(tmp_path, trained):
    model = copy.deepcopy(trained[0])
    model.use_softmax(SinkSoftmax())
    model.blocks[0].attention.softmax_scales.array[...] = 2.0
    save_checkpoint(tmp_path / "c", model)
    loaded = load_checkpoint(tmp_path / "c").model()
    assert loaded.config.softmax == "sink"
    tokens = np.arange(5)[None]
    np.testing.assert_array_equal(loaded.eval()(tokens).array, model.eval()(tokens).array)
    model.use_softmax(SinkSoftmax(3.0))
    with pytest.raises(ValueError, match=r"functions\.SOFTMAXES, got SinkSoftmax\(initial=3\.0\)"):
        save_checkpoint(tmp_path / "d", model)
    assert not (tmp_path / "d").exists()


def test_equal_states_give_equal_files(tmp_path, saved, trained, tokeniser):
    save_checkpoint(tmp_path / "again", trained[0], tokeniser, trained[1], trained[2], PROGRESS)
    assert (tmp_path / "again").read_bytes() == saved.read_bytes()


# -------------------------------------------------------------------- accidents while writing


@pytest.mark.skipif(os.name != "posix", reason="needs SIGKILL")
@pytest.mark.parametrize("moment", ["fsync", "replace"])
def test_kill_during_save_keeps_the_previous_checkpoint(saved, moment):
    before = saved.read_bytes()
    program = f"""
import os, signal, sys
from tricycle.checkpoint import save_checkpoint
from tricycle.configs import DebugConfig
from tricycle.models import GPT
os.{moment} = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
save_checkpoint(sys.argv[1], GPT(DebugConfig()))
"""
    assert subprocess.run([sys.executable, "-c", program, str(saved)]).returncode == -signal.SIGKILL
    assert saved.read_bytes() == before
    assert use(saved) == PROGRESS


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    ("part", "name"),
    [
        ("model", "token_embedding.weights"),
        ("model", "norm.bias"),
        ("optimiser.first", "norm.bias"),
        ("optimiser.second", "norm.bias"),
    ],
)
def test_non_finite_numbers_are_neither_saved_nor_loaded(saved, trained, part, name, bad):
    before = saved.read_bytes()
    model, optimiser, dataset = copy.deepcopy(trained)
    parameter = dict(model.named_parameters())[name]
    arrays = {"model": parameter.array, **optimiser.state_of(parameter)[1]}
    arrays[part.removeprefix("optimiser.")][..., -1] = bad
    for path in (saved, saved.parent / "new"):
        with pytest.raises(NonFiniteCheckpointError, match=f"save_checkpoint: .*finite.*{part}.{name}.*NaN"):
            save_checkpoint(path, model, None, optimiser, dataset, PROGRESS)
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]
    rewrite(saved, f"tensors['{part}.{name}'].flat[-1] = {float(bad)!r}")
    assert re.search(f"finite.*{part.removeprefix('model')}.*{name}.*NaN", refused(saved))


@pytest.mark.parametrize("error", [MemoryError("no room"), OSError(errno.EIO, "no room")], ids=["MemoryError", "EIO"])
@pytest.mark.parametrize("where", ["read_header", "_read", "GPT"])
def test_machine_errors_are_not_reported_as_file_errors(saved, monkeypatch, error, where):
    def fail(*given, **options):
        raise error

    monkeypatch.setattr(checkpoint_module, where, fail)
    with pytest.raises(type(error), match="no room") as caught:
        use(saved)
    assert isinstance(error, MemoryError) or caught.value.filename == str(saved)


@pytest.mark.nightly_except(6)
@pytest.mark.skipif(sys.platform != "linux", reason="limits of memory as Linux has them")
@pytest.mark.parametrize("free", [20, 60, 100])
@pytest.mark.parametrize("statement", ["save_checkpoint(path, model)", "load_checkpoint(path)"])
def test_insufficient_memory_raises_memory_error(tmp_path, statement, free):
    """And neither an abort nor a damaged file; to save takes hardly more than the model has."""
    program = f"""
import resource, sys
from pathlib import Path
from tricycle.checkpoint import load_checkpoint, save_checkpoint
from tricycle.configs import DebugConfig
from tricycle.models import GPT
path = Path(sys.argv[1])
model = GPT(DebugConfig(vocab_size=300_000, embedding_dim=100, n_heads=1))
save_checkpoint(path, model)
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + {free} * 2**20,) * 2)
try:
    bytearray(2**30)
    print("no limit")
except MemoryError:
    pass
try:
    {statement}
except MemoryError:
    print("too little")
else:
    print("enough")
"""
    path = tmp_path / "large.safetensors"
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    if done.stdout.startswith("no limit"):
        pytest.skip("an emulator does not limit memory")
    assert done.stdout == ("enough\n" if statement.startswith("save") and free > 50 else "too little\n")
    assert os.listdir(tmp_path) == [path.name]


# -------------------------------------------------------------------- bit flips
def test_every_bit_flip_is_detected(saved):
    """Wherever it is in the file; but for one in the name of the checksum, which leaves all else as it was."""
    content = saved.read_bytes()
    name = content.index(b'"crc32"') + 1
    generator = np.random.default_rng(0)
    header = 8 + int.from_bytes(content[:8], "little")
    places = [*generator.integers(header, len(content), 200), *generator.integers(0, header, 200), len(content) - 1]
    for place in map(int, places):
        if place in range(name, name + 5):
            continue
        changed = bytearray(content)
        changed[place] ^= 1 << int(generator.integers(8))
        saved.write_bytes(changed)
        message = refused(saved)
        assert place < header or "changed" in message
    start = content.index(b'"crc32": "') + 10
    saved.write_bytes(content[:start] + b"00000000" + content[start + 8 :])
    assert "00000000" in refused(saved)


def test_checkpoints_are_interchangeable_with_safetensors(saved):
    """The format is everybody's: without a checksum, as of before there was one, a file is believed."""
    package = pytest.importorskip("safetensors.numpy")
    tensors = package.load_file(saved)
    again = load_checkpoint(saved).tensors
    assert tensors.keys() == again.keys()
    assert all(tensors[name].tobytes() == again[name].tobytes() for name in tensors)
    package.save_file(tensors, saved, {"tricycle": json.dumps(load_checkpoint(saved).about)})
    assert use(saved) == PROGRESS


@pytest.mark.parametrize("dtype", "f8 f4 f2 i8 i4 i2 i1 u8 u4 u2 u1 b1".split())
def test_all_dtypes_round_trip(tmp_path, dtype):
    arrays = {"a": np.arange(6).reshape(2, 3).astype(dtype), "b": np.zeros((0, 3), dtype), "c": np.array(1, dtype)}
    checkpoint_module._write(tmp_path / "file", arrays, "{}")
    with pytest.importorskip("safetensors").safe_open(tmp_path / "file", framework="numpy") as file:
        for name, array in arrays.items():
            assert np.array_equal(file.get_tensor(name), array)
    read = checkpoint_module._read(tmp_path / "file", *read_header(tmp_path / "file")[::2])
    assert all(read[name].dtype == array.dtype and np.array_equal(read[name], array) for name, array in arrays.items())
    with pytest.raises(ValueError, match="complex64"):
        checkpoint_module._write(tmp_path / "file", {"a": np.ones(1, np.complex64)}, "{}")


# -------------------------------------------------------------------- invalid files
@pytest.mark.parametrize("load", [load_checkpoint, load_pickled_model])
@pytest.mark.parametrize("name", ["missing", "."])
def test_missing_file_is_reported(tmp_path, load, name):
    with pytest.raises(FileNotFoundError, match="no such file") as caught:
        load(tmp_path / name)
    assert str(tmp_path / name) in str(caught.value)


def test_truncated_files_are_rejected(saved):
    content = saved.read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")  # where the header ends and the tensors begin
    middle = (start + len(content)) // 2
    for length in (0, 1, 7, 8, 9, 100, start // 2, start - 1, start, start + 1, middle, len(content) - 1):
        saved.write_bytes(content[:length])
        assert "complete checkpoint" in refused(saved), length
    saved.write_bytes(content + b"more")
    refused(saved)


def test_foreign_safetensors_are_rejected(tmp_path):
    path = tmp_path / "other"
    save_file = pytest.importorskip("safetensors.numpy").save_file
    for metadata in (None, {"format": "pt"}):
        save_file({"weight": np.ones(3, np.float32)}, path, metadata)
        assert "without Tricycle's metadata" in refused(path)
    header = json.dumps({"model.x": {"dtype": "F8_E4M3", "shape": [2], "data_offsets": [0, 2]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + b"\0\0")
    refused(path)


def rewrite(path: Path, change: str = "") -> None:
    """Save a checkpoint again after a statement has changed its tensors or its JSON (`about`, as object or text)."""
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(path, framework="numpy") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        scope = {"about": json.loads(file.metadata()["tricycle"]), "tensors": tensors, "np": np, "inf": np.inf}
    exec(change, {**scope, "nan": np.nan}, scope)
    about = scope["about"]
    pytest.importorskip("safetensors.numpy").save_file(
        scope["tensors"], path, {"tricycle": about if isinstance(about, str) else json.dumps(about)}
    )


TOKENS, MOMENT = "tensors['model.token_embedding.weights']", "tensors['optimiser.first.norm.gain']"
CRAFTED = {
    "not JSON": ("about = '{'", "Expecting"),
    "empty": ("about = ''", "Expecting value"),
    "null": ("about = None", ""),
    "nested": ("about = '[' * 100_000", ""),
    "no format": ("del about['format']", "lacks 'format'"),
    "format 2": ("about['format'] = 2", "format 1.*got 2"),
    "no config": ("del about['config']", "lacks 'config'"),
    "unknown field": ("about['config']['colour'] = 1", "known fields.*colour"),
    "unknown field of two lines": ("about['config']['a\\nb'] = 1", "known fields.*a b"),
    "field of a wrong type": ("about['config']['n_layers'] = 'many'", "n_layers.*whole number"),
    "negative field": ("about['config']['n_layers'] = -1", "n_layers.*got -1"),
    "many layers": ("about['config']['n_layers'] = 10**12", "at least"),
    "wide MLP": ("about['config']['expansion_ratio'] = 1e300", "at least"),
    "huge integer": ("about['config']['vocab_size'] = 10**400", ""),
    "NaN": ("about['config']['dropout'] = nan", "dropout.*finite"),
    "another width": ("about['config']['vocab_size'] = 259", r"token_embedding\.weights: .*\(259, 8\)"),
    "a weight is missing": (f"del {TOKENS}", "at least"),
    "a gain is missing": ("del tensors['model.norm.gain']", "missing norm.gain"),
    "a weight too many": ("tensors['model.x'] = np.ones(1)", "unexpected x"),
    "a complex weight": (f"{TOKENS} = np.ones((260, 8), np.complex64)", "types F64"),
    "no generator": ("del about['generator']", "lacks 'generator'"),
    "generator of another kind": ("about['generator']['bit_generator'] = 'MT19937'", ""),
    "generator lacks": ("del about['generator']['state']['inc']", "lacks 'inc'"),
    "tokeniser number": ("about['tokeniser'] = 5", "BPETokeniser"),
    "tokeniser tokens": ("about['tokeniser']['tokens'] = ['a'] * 300", "BPETokeniser"),
    "no optimiser": ("del about['optimiser']", "lacks 'optimiser'"),
    "optimiser steps": ("about['optimiser']['n_steps'] = 'x'", ""),
    "optimiser updates": ("del about['optimiser']['n_updates']['norm.gain']", "lacks 'norm.gain'"),
    "no moment": (f"del {MOMENT}", "lacks 'optimiser.first.norm.gain'"),
    "moment of another shape": (f"{MOMENT} = np.ones(9, np.float32)", r"state first.*\(8,\)"),
    "no dataset": ("del about['dataset']", "lacks 'dataset'"),
    "dataset of another size": ("about['dataset']['n_items'] = 7", "n_items"),
    "dataset position": ("about['dataset']['position'] = inf", "position"),
    "no progress": ("del about['progress']", "lacks 'progress'"),
    "progress number": ("about['progress'] = 3", ""),
}


@pytest.mark.parametrize(("change", "message"), CRAFTED.values(), ids=CRAFTED)
def test_crafted_metadata_is_rejected(saved, change, message):
    rewrite(saved)
    assert use(saved) == PROGRESS
    rewrite(saved, change)
    assert re.search(message, refused(saved))


# -------------------------------------------------------------------- pickles
@pytest.mark.parametrize("protocol", range(3, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize(
    "config",
    [
        CONFIG,
        replace(ShakespeareConfig(), n_layers=1, embedding_dim=12),
        replace(CONFIG, positions="rotary", norm="rms_norm", activation="swiglu", bias=False),
        replace(CONFIG, activation="swish"),
        replace(CONFIG, activation="relu"),
    ],
)
def test_pickled_model_round_trips(tmp_path, protocol, config):
    model = GPT(config)
    path, ops = tmp_path / "model.pkl", dict(OPS)
    path.write_bytes(pickle.dumps(model, protocol))
    again = load_pickled_model(path)
    assert ops == OPS
    assert again.config.to_dict() == config.to_dict()
    for (name, a), (_, b) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert a.array.tobytes() == b.array.tobytes(), name


class Call:
    """Pickles as a call of any function."""

    def __init__(self, function, *args) -> None:
        self.function, self.args = function, args

    def __reduce__(self):
        return self.function, self.args


def named(module: str, name: str) -> bytes:
    """A pickle (protocol 4) that asks for module.name and calls it with no argument."""
    parts = b"".join(b"\x8c" + bytes([len(text)]) + text.encode() for text in (module, name))
    return b"\x80\x04" + parts + b"\x93)R."


@pytest.mark.parametrize("inside", [False, True], ids=["alone", "in a model"])
@pytest.mark.parametrize("protocol", [0, 2, 4, 5])
@pytest.mark.parametrize("attack", ["os.system", "eval", "exec", "runstring", "subprocess", "Path", "open"])
def test_malicious_pickles_are_rejected_before_running(tmp_path, protocol, attack, inside):
    marker = tmp_path / "marker"
    code = f"open({str(marker)!r}, 'w').close()"
    call = Call(
        *{
            "os.system": (os.system, f"echo > {marker}"),
            "eval": (eval, code),
            "exec": (exec, code),
            "runstring": (np.testing.runstring, code, {}),
            "subprocess": (subprocess.call, [sys.executable, "-c", code]),
            "Path": (Path.touch, marker),
            "open": (builtins.open, str(marker), "w"),
        }[attack]
    )
    content = call
    if inside:
        content = GPT(CONFIG)
        content.extra = call
    path = tmp_path / "model.pkl"
    path.write_bytes(pickle.dumps(content, protocol))
    message = refused(path, load_pickled_model)
    assert "no model needs" in message
    assert not marker.exists()
    if attack != "Path":  # it is dangerous indeed: the pickle module itself would run it
        pickle.loads(path.read_bytes())
        assert marker.exists()


# Modules and functions of Tricycle's modules are below.
NAMES = {
    "tricycle.checkpoint": "os.system Path Checkpoint pickle",
    "tricycle.models": "GPT.to_gpu",
    "tricycle.dataset": "CausalLMDataset",
    "tricycle.nothing": "GPT",
    "tricycle": "Tensor",
    "tricycle_datasets.text": "TextFiles",
    "numpy": "load fromfile ndarray.tofile memmap",
    "numpy.testing": "runstring",
    "numpy.f2py": "compile",
    "builtins": "eval getattr",
    "posix": "system",
    "train_smol_gpt": "main",
    "__main__": "GPT",
}


@pytest.mark.parametrize(
    ("module", "name"), [("", ""), *((module, name) for module in NAMES for name in NAMES[module].split())]
)
def test_pickled_names_outside_the_allow_list_are_rejected(tmp_path, module, name):
    path = tmp_path / "model.pkl"
    path.write_bytes(named(module, name))
    assert f"{module}.{name}" in refused(path, load_pickled_model)


@pytest.mark.parametrize("module", sorted(name for name in sys.modules if name.startswith("tricycle.")))
def test_pickled_modules_and_functions_are_rejected(tmp_path, module):
    path = tmp_path / "model.pkl"
    for name, value in vars(sys.modules[module]).items():
        if isinstance(value, (types.ModuleType, types.FunctionType, types.BuiltinFunctionType)):
            path.write_bytes(named(module, name))
            assert "no model needs" in refused(path, load_pickled_model), name


def test_pickles_cannot_change_classes(tmp_path):
    """BUILD with a pair of states sets attributes, of a class too."""
    path = tmp_path / "model.pkl"
    for target in (b"ctricycle.models\nGPT\n", b"cnumpy._core.numeric\n_frombuffer\n"):
        path.write_bytes(b"\x80\x02" + target + b"N}X\x06\x00\x00\x00poisonK\x01s\x86b.")
        assert "it would change" in refused(path, load_pickled_model)
    assert not hasattr(GPT, "poison")
    assert not hasattr(np._core.numeric._frombuffer, "poison")


@pytest.mark.parametrize("content", [Dense(3, 4), CONFIG, np.ones(3), {"model": 1}, None, [GPT(CONFIG)], GPT])
def test_pickles_of_other_objects_are_rejected(tmp_path, content):
    path = tmp_path / "model.pkl"
    path.write_bytes(pickle.dumps(content))
    assert "pickled" in refused(path, load_pickled_model)


def test_damaged_pickles_are_rejected(tmp_path):
    content = pickle.dumps(GPT(CONFIG))
    path = tmp_path / "model.pkl"
    for length in (0, 1, 2, 10, 100, len(content) // 2, len(content) - 1):
        path.write_bytes(content[:length])
        refused(path, load_pickled_model)
    for content in (b"\x80\x04" + b"(" * 1000 + b".", np.random.default_rng(0).bytes(999)):
        path.write_bytes(content)
        refused(path, load_pickled_model)


DAMAGE = [
    "model.config = None",
    "model.config = {'vocab_size': 3}",
    "model.blocks = []",
    "model.blocks = model",
    "model.norm = Dense(8, 8)",
    "model.norm.gain.array = np.ones(9, np.float32)",
    "model.norm.gain.array = np.array([None] * 8)",
    "object.__setattr__(model.config, 'n_layers', 10**12)",
    "object.__setattr__(model.config, 'n_heads', 3)",
    "del model.config",
]


@pytest.mark.parametrize("damage", DAMAGE)
def test_inconsistent_pickled_models_are_rejected(tmp_path, damage):
    model = GPT(replace(CONFIG))
    exec(damage, {"model": model, "Dense": Dense, "np": np})
    path = tmp_path / "model.pkl"
    path.write_bytes(pickle.dumps(model))
    refused(path, load_pickled_model)
