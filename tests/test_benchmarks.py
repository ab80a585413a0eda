"""Tests that the benchmarks run, print their tables, and do the same work on all sides; speed is not tested."""

import importlib.util
import math
import re
import sys
import warnings
from dataclasses import replace

import numpy as np
import pytest
from programs import call, good

from benchmarks import (
    attention,
    experts,
    families,
    finetuning,
    matmul,
    ops,
    overhead,
    recurrent,
    small_networks,
    tokeniser,
)
from benchmarks.finetuning_workers import STEPS
from benchmarks.shapes import SHAPES
from benchmarks.workers import SIDES, Worker, random_batches
from tricycle.configs import GPTConfig
from tricycle.models import GPT
from tricycle_cli.speed import flops_per_token


def needs(*modules: str) -> pytest.MarkDecorator:
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(missing), reason=f"needs {', '.join(missing)}")


NEEDS_TORCH = needs("torch")
QUICK = ["--rounds", "1", "--seconds", "0", "--warmup", "0", "--threads", "1"]
PEERS = ["none", pytest.param("torch", marks=[NEEDS_TORCH, pytest.mark.slow])]


@pytest.fixture
def keep_torch_threads(monkeypatch):
    """Keep PyTorch's number of threads, which the sides set from OMP_NUM_THREADS."""
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))


# -------------------------------------------------------------------- tables
TABLES = {  # arguments of a benchmark: the first words of its last rows
    "train --shape tiny": ["tricycle"],
    "train --shape tiny --softmax softmax1 blocks": ["tricycle", "softmax1", "blocks"],
    "attention --lengths 128": ["128"],
    "attention --train 32": ["tricycle"],
    "matmul --layer 64 48 80": ["64x48x80"] * 3,
    "recurrent --batch 2 --length 5 --width 4 --cells LSTM GRU": ["LSTM", "GRU"],
}


@pytest.mark.nightly
@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("line", TABLES)
def test_benchmark_prints_a_table_of_positive_numbers(line, peer):
    """A peer adds a row or a column."""
    name, *words = line.split()
    lines = good(call("-m", f"benchmarks.{name}", *words, "--peer", peer, *QUICK)).splitlines()
    expected = TABLES[line] + ["torch"] * (TABLES[line][0] == "tricycle" and peer == "torch")
    rows = [row.split() for row in lines[-len(expected) :]]
    assert sorted(row[0] for row in rows) == sorted(expected)
    numbers = [
        float(word.replace(",", "")) for row in rows for word in row[1:] if re.fullmatch(r"[\d,]+(\.\d+)?", word)
    ]
    assert len(numbers) >= len(rows) and min(numbers) >= 0 < max(numbers)
    assert name == "train" or peer == "none" or any("PyTorch" in line or "torch" in line for line in lines)


@pytest.mark.parametrize("flag", ["--rounds", "--threads"])
def test_counts_are_above_0(flag, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["matmul", flag, "0"])
    with pytest.raises(SystemExit):
        matmul.main()
    assert f"argument {flag}" in (error := capsys.readouterr().err) and "a whole number above 0, got 0" in error


@pytest.mark.nightly
@pytest.mark.parametrize("flags", [[], ["--recompute"]])
@pytest.mark.parametrize(
    "peer", ["none", pytest.param("torch", marks=[needs("torch", "transformers", "peft"), pytest.mark.slow])]
)
def test_finetuning_prints_its_tables(flags, peer):
    words = ["--model", "tiny", "--batch", "2", "--tokens", "8", "--precision", "float32", "--peer", peer]
    out = good(call("-m", "benchmarks.finetuning", *words, *QUICK, *flags))
    assert "batch 2 x 8" in out and ("checkpointing" in out) == bool(flags)
    assert len(re.findall(r"^tricycle float32 +[\d,]+ +1\.00 +[\d,]+ +100% +\d\.\d+$", out, re.MULTILINE)) == 2
    assert re.findall(r"^trained: (\w+)$", out, re.MULTILINE) == ["lora", "all"]


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("peer", "n_peer_columns"), [("none", 0), pytest.param("tokenizers", 3, marks=needs("tokenizers"))]
)
def test_tokeniser_prints_its_tables(peer, n_peer_columns):
    words = ["--texts", "code", "--megabytes", "0.05", "--vocab-sizes", "300", "400", "--repeats", "1", "--peer", peer]
    rows = [
        line.split() for line in good(call("-m", "benchmarks.tokeniser", *words)).splitlines() if line[:4] == "code"
    ]
    assert [row[2] for row in rows] == ["300", "400"] * 2
    assert [len(row) for row in rows] == [4 + n_peer_columns] * 2 + [7] * 2


def generation_table(*sides: str) -> dict[str, list[str]]:
    """Run the benchmark of generation, and return the columns of each side's row."""
    words = ["--model", "tiny", "--threads", "1", "--rounds", "1", "--prompts", "9", "4", "--new", "5"]
    out = good(call("-m", "benchmarks.generation", *words, "--sides", *sides))
    rows = out.splitlines()[-len(sides) :]
    return {side: row.removeprefix(side).replace(",", "").split() for side, row in zip(sides, rows)}


@pytest.mark.nightly
def test_generation_prints_its_table():
    (row,) = generation_table("tricycle float32").values()
    long_prompt, short_prompt, decode, speed_up, same_size, peak, fraction, peak_with_kv, n_equal, loaded, peak_mb = row
    assert min(float(long_prompt), float(short_prompt), float(decode)) > 0
    assert float(peak) >= float(peak_with_kv) > 0
    assert (speed_up, same_size, n_equal) == ("1.00", "1.00", "6")
    assert fraction.endswith("%")
    assert 0 <= float(loaded) <= float(peak_mb) < 1000


@pytest.mark.slow
@needs("torch", "transformers")
def test_tricycle_and_transformers_generate_the_same_tokens():
    rows = generation_table("tricycle float32", "transformers float32")
    assert [row[8] for row in rows.values()] == ["6", "6"]


# -------------------------------------------------------------------- the same work
def test_both_sides_of_training_have_equal_parameter_counts_and_update(keep_torch_threads):
    sizes = {}
    for side in ("tricycle", "torch"):
        step = SIDES[side](SHAPES["tiny"])
        model = dict(zip(step.__code__.co_freevars, step.__closure__))["model"].cell_contents
        sizes[side] = sum(math.prod(parameter.shape) for parameter in model.parameters())
        first, second = step(), step()
        assert first != second
        assert np.isfinite([first, second]).all()
    assert sizes["tricycle"] == sizes["torch"]


def test_a_worker_that_has_ended_is_an_error():
    worker = Worker("missing", 1, "benchmarks.no_such_module")
    worker.process.wait(60)
    with pytest.raises(RuntimeError, match="the worker missing ended with status 1"):
        worker.request("step")
    worker.close()


def test_batches_are_the_same_for_every_side():
    first, second = random_batches(SHAPES["tiny"]), random_batches(SHAPES["tiny"])
    for _ in range(3):
        np.testing.assert_array_equal(next(first), next(second))


@pytest.mark.nightly
def test_both_sides_of_attention_compute_the_same(keep_torch_threads):
    actual, expected = (attention.ATTENTION[side](2, 40)() for side in ("tricycle", "torch"))
    assert actual[0].shape == (2, 40, attention.WIDTH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without oneDNN, products are made in float32 with a warning
        bfloat16_results = [attention.ATTENTION[side](2, 40, "bfloat16")() for side in ("tricycle", "torch")]
    for results, tolerance in ((actual, 1e-3), *((results, 0.1) for results in bfloat16_results)):
        for a, b in zip(results, expected, strict=True):
            assert a.dtype == np.float32
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.slow
@needs("torch", "transformers")
@pytest.mark.parametrize("name", families.FAMILIES)
def test_both_sides_of_families_compute_the_same(name, tmp_path, keep_torch_threads):
    family = families.FAMILIES[name]
    family = family._replace(options={**family.options, "num_hidden_layers": 4}, shape=(family.shape[0], 9))
    families.write_model(family, tmp_path / name)
    actual, expected = (families.SIDES[side](family, tmp_path / name)() for side in ("tricycle", "torch"))
    np.testing.assert_allclose(actual.reshape(expected.shape), expected, atol=1e-4)
    if family.is_decoder:
        steps = [make(tmp_path / name, "all", "float32", (2, 9), False) for make in STEPS.values()]
        losses, expected_losses = ([step(), step()] for step in steps)
        np.testing.assert_allclose(losses, expected_losses, 1e-4)


@needs("torch")
@pytest.mark.parametrize("case", ops.CASES)
def test_both_sides_of_operations_compute_the_same(case, monkeypatch, keep_torch_threads):
    monkeypatch.setattr(ops, "SHAPE", (2, 9, 20))
    actual, expected = (ops.SIDES[side](case)() for side in ("tricycle", "torch"))
    np.testing.assert_allclose(actual, expected, 1e-5, 1e-5)


@pytest.mark.parametrize("cell", recurrent.CELLS)
def test_both_sides_of_recurrent_layers_compute_the_same_twice(cell, keep_torch_threads):
    tricycle_step, torch_step = (recurrent.SIDES[side](cell, 3, 7, 5) for side in ("tricycle", "torch"))
    for _ in range(2):
        for actual, expected in zip(tricycle_step(), torch_step(), strict=True):
            np.testing.assert_allclose(actual, expected, 1e-4, 1e-4)


@pytest.mark.nightly
@needs("torch", "transformers", "peft")
@pytest.mark.filterwarnings("ignore:fan_in_fan_out", "ignore:.*is_gradient_checkpointing")
@pytest.mark.parametrize("method", ["lora", "all"])
def test_both_sides_of_finetuning_have_equal_losses(method, tmp_path, monkeypatch):
    """With LoRA only the first loss is equal, because each side initializes A randomly."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    finetuning.export_model("tiny", tmp_path / "hf")
    losses = {}
    for side in ("tricycle", "torch"):
        step = STEPS[side](tmp_path / "hf", method, "float32", (2, 8), False)
        losses[side] = [float(step()) for _ in range(3)]
    n_equal = 1 if method == "lora" else 3
    assert losses["tricycle"][:n_equal] == pytest.approx(losses["torch"][:n_equal], rel=1e-4)
    assert len(set(losses["tricycle"])) == 3


@pytest.mark.nightly
@pytest.mark.parametrize("side", overhead.SIDES)
def test_every_side_of_overhead_computes_the_gradients_of_x_b_and_c(side):
    if importlib.util.find_spec(side) is None:
        pytest.skip(f"needs {side}")
    x, b, c = overhead.VALUES
    expected = [1.0, 0.0, 0.0]  # of x, b and c
    for _ in range(20):
        expected = [expected[0] * b, x + b * expected[1], 1 + b * expected[2]]
        x = x * b + c
    forward, backward, gradients = overhead.time_chain(side, 20, True)
    assert forward > 0 and backward > 0
    np.testing.assert_allclose(gradients, expected, 1e-5)


@pytest.mark.nightly
@NEEDS_TORCH
@pytest.mark.parametrize("network", small_networks.NETWORKS)
@pytest.mark.parametrize("side", small_networks.SIDES.values())
def test_each_side_of_small_networks_makes_steps(network, side):
    step = side(*small_networks.NETWORKS[network])
    step()
    step()


@pytest.mark.nightly
@needs("tokenizers")
def test_both_sides_of_the_tokeniser_learn_the_same():
    texts = tokeniser.standard_library_code(200_000)
    tricycle, tokenizers = tokeniser.train_tricycle(texts, 400), tokeniser.train_tokenizers(texts, 400)
    assert tokenizers.get_vocab_size() == tricycle.n_vocab == 400
    assert tokeniser.shared_token_fraction(tricycle, tokenizers) > 0.9  # ties are resolved differently


# -------------------------------------------------------------------- data, operands and shapes
@pytest.mark.nightly
def test_code_has_the_requested_size_and_no_tests():
    assert {"test", "site-packages"} <= tokeniser.SKIPPED_FOLDERS
    texts = tokeniser.standard_library_code(100_000)
    assert 99_900 < sum(len(text.encode("utf-8")) for text in texts) <= 100_000
    assert texts == tokeniser.standard_library_code(100_000)


@pytest.mark.parametrize("pass_index", range(3), ids=matmul.PASSES)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_operands_have_the_layouts_of_a_layer(pass_index, precision):
    """The arrays x (N, K), weights (K, M) and gradient (N, M) are row-major; two of the operands are transposed."""
    a, b = matmul.operands(((5, 3, 4), pass_index))
    assert (a.shape, b.shape) == [((5, 3), (3, 4)), ((5, 4), (4, 3)), ((3, 5), (5, 4))][pass_index]
    assert (a.flags.c_contiguous, b.flags.c_contiguous) == (pass_index != 2, pass_index != 1)
    multiply, _ = matmul.tricycle_product(((5, 3, 4), pass_index), precision)
    np.testing.assert_allclose(multiply(), a @ b, 0.05, 0.05)


def test_tiny_shape_is_small():
    assert GPT(SHAPES["tiny"]).n_parameters < 100_000


def test_flops_per_token_match_formula():
    """GPT-2 needs six operations for each weight of a matrix product, and those of attention."""
    config = GPTConfig()
    weights = 12 * 12 * 768**2 + 50_257 * 768
    assert flops_per_token(config) == 6 * weights + 12 * 12 * 1024 * 768
    gated = replace(config, gated=True, hidden_size=100)
    assert flops_per_token(gated) == 6 * (12 * (4 * 768**2 + 3 * 768 * 100) + 50_257 * 768) + 12 * 12 * 1024 * 768


@pytest.mark.parametrize("peer", ["none", pytest.param("transformers", marks=pytest.mark.nightly)])
def test_mixtures_are_compared_in_training_and_decoding(peer, monkeypatch, capsys):
    if peer == "transformers":
        pytest.importorskip("transformers")
    words = "--tokens 12 --width 8 --hidden 4 --experts 3 --rounds 1 --peer"
    monkeypatch.setattr(sys, "argv", ["experts", *words.split(), peer])
    experts.main()
    lines = capsys.readouterr().out.splitlines()[-2:]
    names = ["transformers"] * (peer != "none") + ["mixture", "dense"]
    for line, start in zip(lines, ("training, 12 tokens: ", "decoding, 1 token: ")):
        assert line.startswith(start) and re.findall(r"(\w+) [\d.]+ ms", line) == names
        assert all(float(ms) > 0 for ms in re.findall(r"([\d.]+) ms", line)) and " x dense" in line


def test_mixture_and_dense_mlp_have_equal_active_parameters():
    mixture, dense = experts.new_mixture(8, 4, 3, 2), experts.MLPBlock(8, hidden_size=8, **experts.FIELDS)
    assert 2 * mixture.experts[0].n_parameters == dense.n_parameters
