"""Tests of the model type `tricycle` of the LM Evaluation Harness, with local tasks."""

import importlib.util
import re
import sys
import tomllib
from importlib.metadata import EntryPoint
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

pytest.importorskip("lm_eval")
pytest.importorskip("tokenizers")

from lm_eval.api.instance import Instance
from lm_eval.api.registry import Registry, get_model
from serving import ReferenceGenerator
from tiny_models import write_folder

from benchmarks import harness
from tricycle_cli.likelihoods import Pair, iter_likelihoods
from tricycle_cli.lm_eval import TricycleLM
from tricycle_cli.multiple_choice import encode_pair

ROOT = Path(__file__).resolve().parents[1]
WORDS = "the quick brown fox jumps over the lazy dogs while seven small birds sing of rain".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_folder(tmp_path_factory.mktemp("models") / "tiny", context_window=64)


@pytest.fixture(scope="module")
def reference(folder):
    return ReferenceGenerator(folder)


@pytest.fixture(scope="module")
def lm(folder):
    return TricycleLM(str(folder), batch_size=3)


def instances(kind, *arguments):
    return [Instance(kind, {}, args, i) for i, args in enumerate(arguments)]


def expected_logprob(reference, ids, n):
    """Return the log-likelihood of the last n ids. The model's vocabulary is larger than the tokenizer's."""
    logits = reference.loaded.model(np.array([ids[:-1]])).array[0, -n:].astype(float)
    return (logits - np.log(np.exp(logits).sum(-1, keepdims=True)))[range(n), ids[-n:]].sum()


def test_log_likelihoods(lm, reference):
    """Of contexts of different lengths, one of them empty, in batches of three."""
    pairs = [(" ".join(WORDS[: i % 5]), f" {WORDS[i]} {WORDS[-i]}") for i in range(11)]
    results = lm.loglikelihood(instances("loglikelihood", *pairs), disable_tqdm=True)
    for (context, continuation), (logprob, is_greedy) in zip(pairs, results):
        prefix = reference.tokeniser.encode(context) if context else [lm.prefix_token_id]
        whole = reference.tokeniser.encode(context + continuation)
        ids = whole if context else prefix + whole
        assert logprob == pytest.approx(expected_logprob(reference, ids, len(ids) - len(prefix)), abs=1e-3)
        assert not is_greedy
    context = reference.tokeniser.encode("the quick")
    greedy = reference.tokens(context, 3, n_vocab=None)
    ((_, likelihood),) = iter_likelihoods(lm.model, [Pair(context, greedy)])
    assert likelihood.is_greedy


def test_long_contexts_are_cut_at_their_beginning(lm, reference):
    ids = [int(token) for token in np.random.default_rng(0).integers(3, 400, 90)]
    ((_, likelihood),) = iter_likelihoods(lm.model, [Pair(ids[:-2], ids[-2:])])
    assert likelihood.logprob == pytest.approx(expected_logprob(reference, ids[-65:], 2), abs=1e-3)
    for context, continuation in (([], [3]), ([3], []), ([3], [4] * 65)):
        with pytest.raises(ValueError, match=r"a continuation of 1 to 64 tokens, got"):
            list(iter_likelihoods(lm.model, [Pair(context, continuation)]))


def test_maximum_length(folder, reference):
    lm = TricycleLM(str(folder), max_length=16)
    ids = [int(token) for token in np.random.default_rng(0).integers(3, 400, 30)]
    for n in (1, 5, 16):
        ((logprob, _),) = lm._loglikelihood_tokens([(None, ids[:-n], ids[-n:])], disable_tqdm=True)
        assert logprob == pytest.approx(expected_logprob(reference, ids[-17:], n), abs=1e-3)
    with pytest.raises(ValueError, match="1 to 16 tokens, got 13 and 17"):
        lm._loglikelihood_tokens([(None, ids[:-17], ids[-17:])], disable_tqdm=True)


def test_continuations_that_are_joined_with_the_context(lm, monkeypatch):
    """By a tokenizer that has tokens of several words, as one that is trained on little text."""
    ids = {"two of": [5], "two of three": [6], " three": [7, 8]}
    monkeypatch.setattr(lm, "tok_encode", lambda text, **options: ids[text])
    assert lm._encode_pair("two of ", "three") == ([5], [7, 8])
    tokeniser = Mock(encode=ids.get, encode_plain=ids.get)
    assert encode_pair(tokeniser, "two of", "three") == Pair([5], [7, 8])


def test_rolling_log_likelihoods(lm, reference):
    short, long = " ".join(WORDS[:4]), " ".join(WORDS * 8)
    assert len(lm.tok_encode(long)) >= 2 * lm.max_length
    got = lm.loglikelihood_rolling(instances("loglikelihood_rolling", (short,), (long,)), disable_tqdm=True)
    ids = [lm.prefix_token_id, *lm.tok_encode(short)]
    assert got[0] == pytest.approx(expected_logprob(reference, ids, len(ids) - 1), abs=1e-3)
    assert got[1] < got[0]


def test_generated_texts(lm, reference):
    ids = reference.tokeniser.encode("the quick")
    text = reference.text(ids, 20)
    middle = text[8:10]
    requests = [
        ("the quick", {"max_gen_toks": 20, "until": []}),
        ("the quick", {"max_gen_toks": 20, "until": [middle, "zzz"], "do_sample": False}),
        ("the quick", {"max_new_tokens": 20, "until": middle, "temperature": 0}),
        ("the quick", {"max_gen_toks": 5, "do_sample": True, "temperature": 1.5, "top_k": 0}),
        ("seven small birds", {"max_gen_toks": 9}),
    ]
    got = lm.generate_until(instances("generate_until", *requests), disable_tqdm=True)
    assert got[0] == text.replace("<|endoftext|>", "").replace("<|im_start|>", "")
    assert got[1] == got[2] == text[: text.index(middle)]
    sampled = reference.tokens(ids, 5, temperature=1.5, seed=3)
    assert got[3] == reference.tokeniser.decode(sampled, skip_special_tokens=True)
    assert got[4] == reference.text(reference.tokeniser.encode("seven small birds"), 9)
    for options, message in (
        ({"max_gen_toks": 64}, "fewer new tokens"),
        ({"max_gen_toks": 4, "beams": 3}, "got beams"),
    ):
        with pytest.raises(ValueError, match=message):
            lm.generate_until(instances("generate_until", ("x", options)))


def test_chat_template(lm, reference):
    messages = [{"role": "user", "content": "the quick"}]
    text = lm.apply_chat_template(messages)
    assert lm.tok_encode(text) == reference.tokeniser.chat(messages)
    continued = lm.apply_chat_template([*messages, {"role": "assistant", "content": "brown fox "}], False)
    assert continued == text + "brown fox"
    assert lm.chat_template(True) == reference.tokeniser.chat_template


def test_entry_point():
    """Releases after 0.4.13 look for it; the model type is imported when its name is requested."""
    group = "lm_eval.models"
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["entry-points"][group]
    registry = Registry("model")
    for name, value in declared.items():
        registry.register(name, target=EntryPoint(name, value, group))
    assert registry.get("tricycle") is TricycleLM


def test_items_of_the_benchmark():
    text = "one two three four five six seven eight nine. " * 9 + "small birds sing of rain.\nmany lazy dogs jump.\n"
    text += "the foxes sleep. they dream of green trees.\n"
    code = "".join(f"value_{i} = {i} * other\n" for i in range(30))
    items = harness.make_items(20, [text, "the quick foxes run.\n"], [code])
    for name, rows in items.items():
        for row in rows:
            assert len({*row["choices"]}) == len(row["choices"]) == (1 if name == "counting" else 4)
    for row in items["numbers"]:
        a, b = map(int, row["prompt"].removeprefix("1 + 2 = 3, 10 + 7 = 17, ").removesuffix(" =").split(" + "))
        assert row["choices"][row["answer"]] == str(a + b)
    for row in items["endings"]:
        words = row["prompt"].split()
        assert f"{' '.join(words[-3:])} {row['choices'][row['answer']]}." in " ".join(text.split())
    for row in items["code"]:
        assert f"{row['prompt']}{row['choices'][row['answer']]}\n" in code
    ours = {"a": [[(-1.0, False), (-2.0, False)]]}
    assert not harness.largest_difference(ours["a"], ours["a"])[0]
    assert harness.largest_difference(ours["a"], [[(-3.0, False), (-2.0, False)]]) == (2.0, 1)


@pytest.mark.slow
def test_harness_with_local_tasks(tmp_path, monkeypatch, capsys):
    """With transformers beside, if the packages that the harness needs for it are installed."""
    has_transformers = all(importlib.util.find_spec(name) for name in ("torch", "transformers", "accelerate", "peft"))
    assert get_model("tricycle") is TricycleLM
    folder = write_folder(tmp_path / "tiny", context_window=512)
    words = ["--folder", str(folder)] if has_transformers else []
    monkeypatch.setattr(sys, "argv", ["harness", str(folder), "--items", "8", *words])
    for name in ("HF_DATASETS_OFFLINE", "HF_DATASETS_CACHE"):
        monkeypatch.setenv(name, "1")  # restored after the test
    assert harness.main() == 0
    out = capsys.readouterr().out
    assert "tricycle local_endings: acc,none " in out and "local_counting: exact_match,none 0.0000" in out
    if has_transformers:
        assert "local_counting: 0 of 8 texts differ" in out and out.count("0 of 8 choices differ") == 9
        assert all(float(found) < 1e-3 for found in re.findall(r"([^ ]+) nats", out))
        assert all(float(found) < 1e-4 for found in re.findall(r"Tricycle from float64 ([^ ]+)", out))
