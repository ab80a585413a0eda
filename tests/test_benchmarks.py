"""The benchmarks run and print their tables, and both sides do the same work; how fast is no test's business."""

import importlib.util
import math
import re
import warnings
from dataclasses import replace

import numpy as np
import pytest
from test_programs import call, good

from benchmarks import attention, finetuning, matmul, overhead, recurrent, small_networks, tokeniser
from benchmarks.finetuning_workers import STEPS
from benchmarks.generation import n_common_prefix
from benchmarks.shapes import SHAPES
from benchmarks.workers import SIDES, random_batches
from tricycle.configs import GPTConfig
from tricycle.models import GPT
from tricycle_cli.speed import flops_per_token


def needs(*modules: str) -> pytest.MarkDecorator:
    lacking = [name for name in modules if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(lacking), reason=f"needs {', '.join(lacking)}")


NEEDS_TORCH = needs("torch")
QUICK = ["--turns", "1", "--seconds", "0", "--settling", "0", "--threads", "1"]
PEERS = ["none", pytest.param("torch", marks=[NEEDS_TORCH, pytest.mark.slow])]


@pytest.fixture
def one_thread_each(monkeypatch):
    """Of PyTorch as many threads as it has already."""
    torch = pytest.importorskip("torch")
    monkeypatch.setenv("OMP_NUM_THREADS", str(torch.get_num_threads()))


# -------------------------------------------------------------------- tables
TABLES = {  # a benchmark: the first words of the rows below its table's title
    "train --shape tiny": ["tricycle"],
    "train --shape tiny --softmax softmax1 blocks": ["tricycle", "softmax1", "blocks"],
    "attention --lengths 128": ["128"],
    "attention --train 32": ["tricycle"],
    "products --layer 64 48 80": ["64x48x80"] * 3,
    "recurrent --batch 2 --length 5 --width 4 --cells LSTM GRU": ["LSTM", "GRU"],
}


@pytest.mark.nightly
@pytest.mark.parametrize("peer", PEERS)
@pytest.mark.parametrize("line", TABLES)
def test_a_table_is_printed(line, peer):
    """With positive numbers; a peer adds a row or a column."""
    name, *words = line.split()
    lines = good(call("-m", f"benchmarks.{name}", *words, "--peer", peer, *QUICK)).splitlines()
    expected = TABLES[line] + ["torch"] * (TABLES[line][0] == "tricycle" and peer == "torch")
    rows = [row.split() for row in lines[-len(expected) :]]
    assert sorted(row[0] for row in rows) == sorted(expected)
    numbers = [
        float(word.replace(",", "")) for row in rows for word in row[1:] if re.fullmatch(r"[\d,]+(\.\d+)?", word)
    ]
    assert len(numbers) >= len(rows) and min(numbers) >= 0 < max(numbers)
    assert name == "train" or peer == "none" or any("PyTorch" in each or "torch" in each for each in lines)


@pytest.mark.nightly
@pytest.mark.parametrize("flags", [[], ["--recompute"]])
@pytest.mark.parametrize(
    "peer", ["none", pytest.param("torch", marks=[needs("torch", "transformers", "peft"), pytest.mark.slow])]
)
def test_the_table_of_finetuning(flags, peer):
    words = ["--model", "tiny", "--batch", "2", "--tokens", "8", "--precision", "float32", "--peer", peer]
    out = good(call("-m", "benchmarks.finetuning", *words, *QUICK, *flags))
    assert "batch 2 x 8" in out and ("blocks computed again" in out) == bool(flags)
    assert len(re.findall(r"^tricycle float32 +[\d,]+ +1\.00 +[\d,]+ +100% +\d\.\d+$", out, re.MULTILINE)) == 2
    assert re.findall(r"^learning: (\w+)$", out, re.MULTILINE) == ["lora", "all"]


@pytest.mark.nightly
@pytest.mark.parametrize(("peer", "n_more"), [("none", 0), pytest.param("tokenizers", 3, marks=needs("tokenizers"))])
def test_the_tables_of_the_tokeniser(peer, n_more):
    words = ["--texts", "code", "--megabytes", "0.05", "--vocab-sizes", "300", "400", "--repeats", "1", "--peer", peer]
    rows = [
        line.split() for line in good(call("-m", "benchmarks.tokeniser", *words)).splitlines() if line[:4] == "code"
    ]
    assert [row[2] for row in rows] == ["300", "400"] * 2
    assert [len(row) for row in rows] == [4 + n_more] * 2 + [7] * 2


def generation_table(*sides: str) -> dict[str, list[str]]:
    """The columns of each side."""
    words = ["--model", "tiny", "--threads", "1", "--turns", "1", "--prompts", "9", "4", "--new", "5"]
    out = good(call("-m", "benchmarks.generation", *words, "--sides", *sides))
    rows = out.splitlines()[-len(sides) :]
    return {side: row.removeprefix(side).replace(",", "").split() for side, row in zip(sides, rows)}


@pytest.mark.nightly
def test_generation_prints_its_table():
    (row,) = generation_table("tricycle float32").values()
    long_prompt, short_prompt, new, ratio, alike, limit, share, with_text, same, loaded, most = row
    assert min(float(long_prompt), float(short_prompt), float(new)) > 0
    assert float(limit) >= float(with_text) > 0
    assert (ratio, alike, same) == ("1.00", "1.00", "6")
    assert share.endswith("%")
    assert 0 <= float(loaded) <= float(most) < 1000


@pytest.mark.slow
@needs("torch", "transformers")
def test_generation_beside_transformers_writes_the_same_tokens():
    rows = generation_table("tricycle float32", "transformers float32")
    assert [row[8] for row in rows.values()] == ["6", "6"]


@pytest.mark.parametrize(
    ("left", "right", "n"), [([1, 2, 3], [1, 2, 3], 3), ([1, 2], [1, 3], 1), ([4], [5], 0), ([], [], 0)]
)
def test_same_tokens(left, right, n):
    assert n_common_prefix(left, right) == n


# -------------------------------------------------------------------- the same work
def test_both_sides_of_training_do_the_same_work(one_thread_each):
    """As many parameters, one of them updated by a step as by the other."""
    sizes = {}
    for side in ("tricycle", "torch"):
        step = SIDES[side](SHAPES["tiny"])
        model = dict(zip(step.__code__.co_freevars, step.__closure__))["model"].cell_contents
        sizes[side] = sum(math.prod(parameter.shape) for parameter in model.parameters())
        first, second = step(), step()
        assert first != second
        assert np.isfinite([first, second]).all()
    assert sizes["tricycle"] == sizes["torch"]


def test_batches_are_the_same_for_every_side():
    first, second = random_batches(SHAPES["tiny"]), random_batches(SHAPES["tiny"])
    for _ in range(3):
        np.testing.assert_array_equal(next(first), next(second))


@pytest.mark.nightly
def test_both_sides_of_attention_compute_the_same(one_thread_each):
    ours, theirs = (attention.ATTENTION[side](2, 40)() for side in ("tricycle", "torch"))
    assert ours[0].shape == (2, 40, attention.WIDTH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # without oneDNN products are made in float32, and it says so
        narrow = [attention.ATTENTION[side](2, 40, "bfloat16")() for side in ("tricycle", "torch")]
    for side, tolerance in ((ours, 1e-3), *((side, 0.1) for side in narrow)):
        for a, b in zip(side, theirs, strict=True):
            assert a.dtype == np.float32
            np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("cell", recurrent.CELLS)
def test_both_sides_of_recurrent_layers_do_the_same_work(cell, one_thread_each):
    """The same outputs and gradients, twice."""
    ours, theirs = (recurrent.SIDES[side](cell, 3, 7, 5) for side in ("tricycle", "torch"))
    for _ in range(2):
        for mine, their in zip(ours(), theirs(), strict=True):
            np.testing.assert_allclose(mine, their, 1e-4, 1e-4)


@pytest.mark.nightly
@needs("torch", "transformers", "peft")
@pytest.mark.filterwarnings("ignore:fan_in_fan_out", "ignore:.*is_gradient_checkpointing")
@pytest.mark.parametrize("learn", ["lora", "all"])
def test_both_sides_of_finetuning_lose_alike(learn, tmp_path, monkeypatch):
    """From the same weights; with adapters only the first loss is the same, for A is drawn by each side."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    finetuning.export_model("tiny", tmp_path / "hf")
    losses = {}
    for side in ("tricycle", "torch"):
        step = STEPS[side](tmp_path / "hf", learn, "float32", (2, 8), False)
        losses[side] = [float(step()) for _ in range(3)]
    n_alike = 1 if learn == "lora" else 3
    assert losses["tricycle"][:n_alike] == pytest.approx(losses["torch"][:n_alike], rel=1e-4)
    assert len(set(losses["tricycle"])) == 3


@pytest.mark.nightly
@pytest.mark.parametrize("side", overhead.SIDES)
def test_every_side_of_the_overhead_does_the_same_work(side):
    """The gradients of x, b and c as by hand."""
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
def test_a_step_of_each_side_of_small_things(network):
    for side in small_networks.SIDES.values():
        step = side(*small_networks.NETWORKS[network])
        step()
        step()


@pytest.mark.nightly
@needs("tokenizers")
def test_both_sides_of_the_tokeniser_learn_the_same():
    texts = tokeniser.standard_library_code(200_000)
    ours, theirs = tokeniser.train_tricycle(texts, 400), tokeniser.train_tokenizers(texts, 400)
    assert theirs.get_vocab_size() == ours.n_vocab == 400
    assert tokeniser.shared_token_fraction(ours, theirs) > 0.9  # ties may go either way


# -------------------------------------------------------------------- what they work on
@pytest.mark.nightly
def test_code_is_cut_to_size_and_has_no_tests_in_it():
    assert {"test", "site-packages"} <= tokeniser.SKIPPED_FOLDERS
    texts = tokeniser.standard_library_code(100_000)
    assert 99_900 < sum(len(text.encode("utf-8")) for text in texts) <= 100_000
    assert texts == tokeniser.standard_library_code(100_000)


@pytest.mark.parametrize("which", range(3), ids=matmul.PASSES)
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_operands_have_the_layouts_of_a_layer(which, precision):
    """x (N, K), weights (K, M) and the gradient (N, M) by rows; two of these are seen transposed."""
    a, b = matmul.operands(((5, 3, 4), which))
    assert (a.shape, b.shape) == [((5, 3), (3, 4)), ((5, 4), (4, 3)), ((3, 5), (5, 4))][which]
    assert (a.flags.c_contiguous, b.flags.c_contiguous) == (which != 2, which != 1)
    multiply, _ = matmul.tricycle_product(((5, 3, 4), which), precision)
    np.testing.assert_allclose(multiply(), a @ b, 0.05, 0.05)


@pytest.mark.parametrize("name", SHAPES)
def test_shapes_are_sound(name):
    config = SHAPES[name]
    assert config.embedding_dim % config.n_heads == 0
    if name == "tiny":
        assert GPT(config).n_parameters < 100_000


def test_operations_a_token():
    """GPT-2's: six for each weight of a product, and its attention."""
    config = GPTConfig()
    weights = 12 * 12 * 768**2 + 50_257 * 768
    assert flops_per_token(config) == 6 * weights + 12 * 12 * 1024 * 768
    gated = replace(config, gated=True, hidden_size=100)
    assert flops_per_token(gated) == 6 * (12 * (4 * 768**2 + 3 * 768 * 100) + 50_257 * 768) + 12 * 12 * 1024 * 768
