"""The benchmark of the tokeniser runs and prints its tables; how fast is no test's business."""

import importlib.util

import pytest
from test_programs import NEEDS_SHAKESPEARE, call, good

from benchmarks.tokeniser import SKIPPED_FOLDERS, code, tokens_in_common, train_tokenizers, train_tricycle

NEEDS_TOKENIZERS = pytest.mark.skipif(importlib.util.find_spec("tokenizers") is None, reason="needs tokenizers")
PEERS = [("none", 0), pytest.param("tokenizers", 3, marks=NEEDS_TOKENIZERS)]
QUICK = ["--megabytes", "0.05", "--vocab-sizes", "300", "400", "--repeats", "1"]


@pytest.mark.nightly
@pytest.mark.parametrize(("peer", "n_more"), PEERS)
@pytest.mark.parametrize("text", ["code", pytest.param("shakespeare", marks=NEEDS_SHAKESPEARE)])
def test_both_tables(text, peer, n_more):
    out = good(call("-m", "benchmarks.tokeniser", "--texts", text, "--peer", peer, *QUICK))
    assert "tiktoken" in out.splitlines()[0]
    rows = [line.split() for line in out.splitlines() if line.startswith(f"{text} ")]
    assert [row[2] for row in rows] == ["300", "400"] * 2
    training, encoding = rows[:2], rows[2:]
    assert all(len(row) == 4 + n_more and float(row[3]) >= 0 for row in training)
    assert all(len(row) == 7 and float(row[3]) > 0 for row in encoding)


@pytest.mark.nightly
def test_code_is_cut_to_size_and_has_no_tests_in_it():
    assert {"test", "site-packages"} <= SKIPPED_FOLDERS
    texts = code(100_000)
    assert 99_900 < sum(len(text.encode("utf-8")) for text in texts) <= 100_000
    assert texts == code(100_000)


@pytest.mark.nightly
@NEEDS_TOKENIZERS
def test_both_sides_learn_the_same():
    texts = code(200_000)
    ours, theirs = train_tricycle(texts, 400), train_tokenizers(texts, 400)
    assert theirs.get_vocab_size() == ours.n_vocab == 400
    assert tokens_in_common(ours, theirs) > 0.9  # ties may go either way
