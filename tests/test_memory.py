"""Models and runs that do not fit in memory are rejected before memory is allocated."""

import functools
import os
import subprocess
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from programs import run_here
from transformers_families import LIKE_LLAMA

from tricycle.checkpoint import load_checkpoint, save_checkpoint
from tricycle.configs import DebugConfig, GPTConfig, ModelConfig
from tricycle.dataset import CausalLMDataset
from tricycle.debug import use_reference
from tricycle.models import GPT
from tricycle.optimiser_rules import OPTIMISERS
from tricycle.pretrained import load
from tricycle.pretrained.export import export_folder
from tricycle.pretrained.families import required_memory
from tricycle.system import cgroups, memory
from tricycle.system.memory import available_memory, check_memory, format_gigabytes
from tricycle.training_state import TrainingState, new_optimiser, train_step, training_bytes
from tricycle_cli.main import MODULE, main

ROOT = Path(__file__).resolve().parents[1]
SIZES = {"vocab_size": 1000, "context_window": 64, "embedding_dim": 32, "n_heads": 4, "n_layers": 2}
LLAMA = ModelConfig(**SIZES, **LIKE_LLAMA)


def call(*words: str, gigabytes: str | float) -> subprocess.CompletedProcess:
    """`python -m tricycle` in this process."""
    return run_here(functools.partial(main, MODULE), MODULE, words, TRICYCLE_MEMORY_GB=str(gigabytes))


# -------------------------------------------------------------------- free memory
@pytest.fixture
def system(tmp_path, monkeypatch):
    """Replace /proc/meminfo and the cgroup files by files under `tmp_path`."""
    monkeypatch.delenv(memory.MEMORY_VARIABLE, raising=False)
    monkeypatch.setattr(memory, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(cgroups, "_CGROUP", tmp_path / "cgroup")
    monkeypatch.setattr(cgroups, "_CGROUPS", tmp_path / "groups")
    (tmp_path / "meminfo").write_text("MemTotal:  9000 kB\nMemFree: 10 kB\nMemAvailable:  4000 kB\n")
    (tmp_path / "groups" / "a" / "b").mkdir(parents=True)
    monkeypatch.setattr(memory, "_available_address_space", lambda: None)  # the tests may run under `ulimit -v`
    return tmp_path


def test_free_memory_is_read_from_meminfo(system):
    assert available_memory() == 4000 * 1024
    (system / "meminfo").unlink()
    assert available_memory() == memory._available_on_machine() > 0


def test_cgroup_v2_limits(system):
    (system / "cgroup").write_text("0::/a/b\n")
    assert available_memory() == 4000 * 1024  # without any limit
    for file, text, free in (
        ("b/memory.max", "max", 4000 * 1024),
        ("b/memory.current", "500", 4000 * 1024),
        ("memory.max", "100000", 4000 * 1024),
        ("memory.current", "90000", 10_000),
        ("memory.stat", "anon 1\ninactive_file 20000\nactive_file 30000", 60_000),
        ("memory.current", "900000", 0),
    ):
        (system / "groups" / "a" / file).write_text(text + "\n")
        assert available_memory() == free


def test_cgroup_v1_limits(system):
    (system / "cgroup").write_text("9:name=systemd:/\n4:cpu,memory:/a\nodd\n")
    group = system / "groups" / "memory" / "a"
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text("3000\n")
    (group / "memory.usage_in_bytes").write_text("1000\n")
    assert available_memory() == 2000


@pytest.mark.skipif(sys.platform != "linux", reason="of Linux")
def test_shell_memory_limit_is_respected():
    program = "from tricycle.system.memory import available_memory; print(available_memory())"
    words = f"ulimit -v 4000000; {sys.executable} -c '{program}'"
    environment = {**os.environ, "TRICYCLE_MEMORY_GB": ""}
    out = subprocess.run(["bash", "-c", words], capture_output=True, text=True, cwd=ROOT, env=environment, check=True)
    assert 0 < int(out.stdout) < 4_000_000 * 1024


def test_environment_variable_sets_the_memory_limit(monkeypatch):
    monkeypatch.setenv(memory.MEMORY_VARIABLE, "1.5")
    assert available_memory() == 1_500_000_000
    for bad in ("much", "nan", "inf"):
        monkeypatch.setenv(memory.MEMORY_VARIABLE, bad)
        with pytest.raises(ValueError, match=f"TRICYCLE_MEMORY_GB: .*'{bad}'"):
            available_memory()


def test_check_memory_raises_when_too_little_is_free(monkeypatch):
    monkeypatch.setenv(memory.MEMORY_VARIABLE, "2")
    check_memory(2 * 10**9, "it")
    with pytest.raises(MemoryError, match=r"2\.5 GB.*2\.0 GB.*buy some$"):
        check_memory(2_500_000_000, "it", "buy some")
    monkeypatch.setattr(memory, "available_memory", lambda: None)
    check_memory(10**30, "it")
    formatted = [format_gigabytes(n) for n in (10**6, 36 * 10**6, 12 * 10**9, 10**15)]
    assert formatted == ["0.001 GB", "0.036 GB", "12.0 GB", "1,000,000 GB"]


# -------------------------------------------------------------------- models
@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "llama"
    export_folder(GPT(LLAMA), None, folder)
    return folder


def test_memory_error_suggests_a_dtype_that_fits(folder, monkeypatch):
    """It has 57,504 numbers: 230 kB in float32, 115 in bfloat16; of int8 the largest matrix needs five bytes each."""
    monkeypatch.setenv(memory.MEMORY_VARIABLE, "0.00017")
    needs = r"llama: the model in --weights float32 needs at least 0\.000\d+ GB of memory, 0\.00017 GB are free: "
    fits = r"--weights bfloat16 \(0\.00011 GB\) or --weights int8 .* would fit$"
    with pytest.raises(MemoryError, match=needs + fits):
        load(folder)
    load(folder, "bfloat16")
    load(folder, "int8")
    monkeypatch.setenv(memory.MEMORY_VARIABLE, "0.00005")
    with pytest.raises(MemoryError, match=r"--weights bfloat16, needs 0\.00011 GB$"):
        load(folder)
    with pytest.raises(MemoryError, match="--weights int8"):
        load(folder, "int8")
    monkeypatch.setenv(memory.MEMORY_VARIABLE, "1")
    load(folder)


@pytest.mark.parametrize("weights", ["float32", "bfloat16", "float16", "stored", "int8"])
@pytest.mark.parametrize("tied", [False, True])
def test_model_memory_matches_its_estimate(tied, weights, tmp_path):
    folder = tmp_path / "model"
    export_folder(GPT(replace(LLAMA, tied=tied, vocab_size=100)), None, folder, dtype="bfloat16")
    loaded = load(folder, weights)
    n_bytes = sum(parameter.array.nbytes for parameter in loaded.model.parameters())
    estimate = required_memory(loaded.model.config, loaded.source, weights)
    if weights == "int8":  # adds the scales, and one float32 matrix during quantization
        assert 0.9 * n_bytes < estimate < 1.5 * n_bytes
    else:
        assert estimate == n_bytes


def test_command_reports_too_little_memory(folder):
    done = call("generate", str(folder), "x", gigabytes=0.00017)
    assert done.returncode == 1
    assert "would fit" in done.stderr
    assert len(done.stderr.splitlines()) == 1


def test_checkpoint_larger_than_memory_raises(tmp_path, monkeypatch):
    save_checkpoint(tmp_path / "one.safetensors", GPT(DebugConfig()))
    monkeypatch.setenv(memory.MEMORY_VARIABLE, "0.0001")
    with pytest.raises(MemoryError, match=r"one\.safetensors.*0\.\d+ GB.*0\.0001 GB"):
        load_checkpoint(tmp_path / "one.safetensors")


# -------------------------------------------------------------------- training
@pytest.mark.parametrize(
    "changes", [*({"optimiser": name} for name in OPTIMISERS), {"batch_size": 32}, {"accumulation_steps": 3}]
)
def test_training_memory_is_at_least_the_estimate(changes):
    config = replace(GPTConfig.from_dict(DebugConfig().to_dict()), **changes)
    tokens = np.arange(20_000) % config.vocab_size
    with use_reference():
        tracemalloc.start()
        dataset = CausalLMDataset(tokens, config.vocab_size, config.batch_size, config.context_window)
        dataset = dataset.batch().shuffle().to_tensor()
        state = TrainingState(config, GPT(config), new_optimiser(config), dataset)
        for _ in range(2):
            train_step(state)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert training_bytes(config) < peak < 6 * training_bytes(config)


@pytest.mark.parametrize(
    "flags", [f"--batch-size {10**9}", f"--n-layers {10**8}", f"--vocab-size {10**12}", f"--accumulation-steps {10**9}"]
)
def test_excessive_sizes_are_rejected_before_allocation(flags, tmp_path):
    words = ["train", "--preset", "debug", "--device", "cpu", "--run-folder", str(tmp_path / "run"), *flags.split()]
    done = call(*words, gigabytes="")
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert "training" in line
    assert "--batch-size (now " in line
    assert not (tmp_path / "run").exists()
