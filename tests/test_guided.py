"""Tests of guided decoding: texts match their JSON schema, expression or grammar; hostile grammars are refused."""

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from json_schemas import REFUSED, SUPPORTED, an_object
from tiny_models import lively_model, tiny_tokeniser

pytest.importorskip("llguidance")
pytest.importorskip("jsonschema")

import jsonschema

from tricycle.decoding import guided
from tricycle.decoding.batch import generate_batch
from tricycle.decoding.guided import GrammarCompiler, check_grammar
from tricycle.decoding.penalties import PenalizedSamplingParams
from tricycle.decoding.prompt_lookup import generate_prompt_lookup
from tricycle.generate import generate
from tricycle.tokeniser import BPETokeniser

END = 2
FORMATS = jsonschema.Draft202012Validator.FORMAT_CHECKER


@pytest.fixture(scope="module")
def model():
    return lively_model()


@pytest.fixture(scope="module")
def tokeniser():
    return tiny_tokeniser()


@pytest.fixture(scope="module")
def compiler(tokeniser):
    return GrammarCompiler(tokeniser)


def sampling(constraint, tokeniser, **settings):
    return PenalizedSamplingParams(stop_tokens=END, n_vocab=tokeniser.n_vocab, constraint=constraint, **settings)


def test_number_of_schemas():
    assert len({json.dumps(schema) for schema in SUPPORTED}) >= 200


@pytest.mark.nightly_except(25)
@pytest.mark.parametrize("number", range(len(SUPPORTED)))
def test_completed_texts_are_valid_json_of_their_schema(number, model, tokeniser, compiler):
    # A high temperature ends strings and lists of a random model soon.
    constraint = compiler.from_json_schema(SUPPORTED[number])
    samplings = [sampling(constraint.new_text(), tokeniser, temperature=8.0, seed=i) for i in range(3)]
    prompts = [[3 + number] * 3] * 3
    completed = [ids[:-1] for ids in generate_batch(model, prompts, 300, samplings) if ids[-1] == END]
    assert completed
    for ids in completed:
        jsonschema.validate(json.loads(tokeniser.decode(ids)), SUPPORTED[number], format_checker=FORMATS)


@pytest.mark.parametrize("items", [{"$ref": "#/$defs/a"}, an_object(a={"$ref": "#/$defs/a"})])
def test_schemas_that_only_infinite_texts_match(items, model, tokeniser, compiler):
    params = sampling(compiler.from_json_schema({"$defs": {"a": items}, "$ref": "#/$defs/a"}), tokeniser)
    assert 0 < len([*generate(model, [5, 6], 60, params)]) <= 60


@pytest.mark.parametrize("regex", ["[a-z]{3,5}", "(foo|ba[rz])+", r"\d\d:\d\d", "ü?x", "the quick (brown )?fox"])
def test_completed_texts_match_the_regular_expression(regex, model, tokeniser, compiler):
    samplings = [sampling(compiler.from_regex(regex), tokeniser, temperature=3.0, seed=seed) for seed in range(3)]
    texts = [[*generate(model, [5, 6], 100, params)] for params in samplings]
    completed = [tokeniser.decode(ids[:-1]) for ids in texts if ids[-1] == END]
    assert completed and all(re.fullmatch(regex, text) for text in completed)


def test_lark_grammar_of_nested_brackets(model, tokeniser, compiler):
    params = sampling(compiler.from_lark('start: "(" start ")" | "x"'), tokeniser, temperature=3.0)
    ids = [*generate(model, [5, 6], 100, params)]
    text = tokeniser.decode(ids[:-1])
    assert ids[-1] == END and text == "(" * text.count("(") + "x" + ")" * text.count("(")


def test_greedy_text_is_the_most_probable_allowed_one(model, tokeniser, compiler):
    """Without a constraint the model gives another token; with it, the largest logit among the allowed ones."""
    params = sampling(compiler.from_regex("[0-9]"), tokeniser, temperature=0.0)
    (token, _) = generate(model, [5, 6], 2, params)
    digits = [tokeniser.encode_plain(str(i))[0] for i in range(10)]
    logits = model(np.array([[5, 6]])).array[0, -1]
    assert token == max(digits, key=lambda token: logits[token]) != int(logits.argmax())


def test_draft_tokens_give_the_same_text(model, tokeniser, compiler):
    schema = {"type": "array", "items": {"const": "the quick brown fox"}, "minItems": 4, "maxItems": 4}
    params = sampling(compiler.from_json_schema(schema), tokeniser, temperature=0.0)
    expected = [*generate(model, [5, 6], 200, params)]
    assert [*generate_prompt_lookup(model, [5, 6], 200, params.for_text(0))] == expected
    assert json.loads(tokeniser.decode(expected[:-1])) == ["the quick brown fox"] * 4


def test_texts_with_one_constraint_do_not_affect_each_other(model, tokeniser, compiler):
    params = sampling(compiler.from_regex("[a-z]{4}"), tokeniser, temperature=0.0)
    prompts = [[5, 6], [7, 8], [9]]
    expected = [[*generate(model, prompt, 9, replace(params))] for prompt in prompts]  # one after the other
    assert generate_batch(model, prompts, 9, params) == expected


def test_constraint_overrides_excluded_tokens(model, tokeniser, compiler):
    a, b = (int(tokeniser.encode_plain(letter)[0]) for letter in "ab")
    params = sampling(compiler.from_regex("ababababab"), tokeniser, temperature=0.0)
    for excluded in ({"no_repeat_ngram_size": 2}, {"suppress_tokens": [a, b]}, {"logit_bias": ((a, -100.0),)}):
        ids = [*generate(model, [5, 6], 20, replace(params, **excluded))]
        assert tokeniser.decode(ids[:-1]) == "ababababab"


def test_special_tokens_are_not_part_of_texts(tokeniser, compiler):
    allowed = compiler.from_regex(".*").allowed_tokens([], [END, tokeniser.n_vocab], tokeniser.n_vocab)
    assert allowed[END] and not allowed[0] and not allowed[1]
    assert not compiler.from_regex("x.*").allowed_tokens([], [END], tokeniser.n_vocab)[END]


def test_tokenizer_of_tricycle(model):
    own = BPETokeniser(300).train("a b c 0 1 2 true false " * 20, progress=False)
    params = PenalizedSamplingParams(
        temperature=3.0,
        stop_tokens=own.end_of_text,
        n_vocab=own.n_vocab,
        constraint=GrammarCompiler(own).from_json_schema({"type": "boolean"}),
    )
    (*ids, end) = generate(model, [5, 6], 20, params)
    assert end == own.end_of_text and own.decode(ids) in ("true", "false")


@pytest.mark.nightly_except(4)
@pytest.mark.parametrize("number", range(len(REFUSED)))
def test_schemas_that_cannot_be_used(number, compiler):
    schema, reason = REFUSED[number]
    with pytest.raises(ValueError, match=reason) as error:
        compiler.from_json_schema(schema)
    assert "\n" not in str(error.value)


def test_grammars_that_crash_or_delay_the_compiler(compiler, monkeypatch):
    lines = [f"T{i}: T{i + 1}\n" for i in range(4000)]  # overflows the stack
    with pytest.raises(ValueError, match="too complex"):
        compiler.from_lark(f'start: T0\n{"".join(lines)}T4000: "a"')
    patterns = [{"type": "string", "pattern": f"(a|b)*a(a|b){{{i}}}"} for i in range(5, 40)]  # takes hours
    grammar = compiler._llguidance.LLMatcher.grammar_from_json_schema({"allOf": patterns})
    with monkeypatch.context() as patch, pytest.raises(ValueError, match="more than 1 s"):
        patch.setattr(guided, "MAX_COMPILE_BYTES", 4_000_000_000)  # a fast processor reaches the limit in less than 1 s
        check_grammar(grammar, 1)
    with pytest.raises(ValueError, match=r"more than 1 s|too complex"):  # its parser takes 6 s and 300 MB
        compiler.from_json_schema({"type": "integer", "multipleOf": 1_000_003})


def test_constraint_that_becomes_too_complex_allows_only_stop_tokens(compiler, tokeniser, monkeypatch):
    monkeypatch.setitem(guided.LIMITS, "step_max_items", 200)
    constraint = compiler.from_lark('start: x{1000}\nx: y{1000}\ny: z{1000}\nz: "a"')
    a = int(tokeniser.encode_plain("a")[0])
    for n in range(50):
        allowed = constraint.allowed_tokens([a] * n, [END], tokeniser.n_vocab)
        if constraint.error:
            break
    assert "items" in constraint.error and np.flatnonzero(allowed).tolist() == [END]
    assert constraint.allowed_tokens([], [END], tokeniser.n_vocab)[a] or constraint.error


def test_cached_grammars(tokeniser, monkeypatch):
    monkeypatch.setattr(guided, "MAX_CACHED_GRAMMARS", 2)
    compiler = GrammarCompiler(tokeniser)
    for regex in ("a1", "a2", "a1", "a3"):
        compiler.from_regex(regex)
    assert [re.findall("a[0-9]", grammar) for grammar in compiler._compiled] == [["a1"], ["a3"]]


def test_constraint_needs_a_stop_token(compiler):
    with pytest.raises(ValueError, match="stop_tokens"):
        PenalizedSamplingParams(constraint=compiler.from_regex("a"))
