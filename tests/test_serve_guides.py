"""Tests of requests for JSON, regular expressions and grammars to `tricycle serve`."""
# ruff: noqa: F811 (tests have imported fixtures as arguments)

import json
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("openai")
pytest.importorskip("llguidance")
pytest.importorskip("jsonschema")

import jsonschema
from json_schemas import DIGIT, an_object
from serving import HELLO, client, folder, server  # noqa: F401 (fixtures)

SCHEMA = an_object(name={"type": "string", "maxLength": 5}, ok={"type": "boolean"}, x=DIGIT)
FORMAT = {"type": "json_schema", "json_schema": {"name": "answer", "schema": SCHEMA, "strict": True}}


def chat(client, **fields):
    return client.chat.completions.create(**{"model": "tiny", "messages": HELLO, "temperature": 2.0, **fields})


def complete(client, **fields):
    return client.completions.create(**{"model": "tiny", "prompt": "the quick", "max_tokens": 200, **fields})


def check(text, finish_reason, schema=SCHEMA):
    assert finish_reason in ("stop", "length")
    if finish_reason == "stop":
        jsonschema.validate(json.loads(text), schema)
    return finish_reason == "stop"


def test_json_schema_in_a_batch_with_other_requests(client):
    """Each of several concurrent texts follows its own schema, or none."""
    plain = chat(client, temperature=0, max_tokens=60).choices[0].message.content
    with ThreadPoolExecutor(6) as pool:
        guided = [pool.submit(chat, client, response_format=FORMAT, n=3, seed=seed) for seed in range(3)]
        digits = [pool.submit(chat, client, extra_body={"regex": "[0-9]{30}"}) for _ in range(2)]
        free = pool.submit(chat, client, temperature=0, max_tokens=60)
        choices = [choice for future in guided for choice in future.result(60).choices]
        assert sum(check(choice.message.content, choice.finish_reason) for choice in choices) >= 6
        for future in digits:
            assert re.fullmatch("[0-9]{30}", future.result(60).choices[0].message.content)
        assert free.result(60).choices[0].message.content == plain


def test_streamed_json_equals_the_complete_response(client):
    fields = {"response_format": FORMAT, "seed": 3, "max_tokens": 200}
    (choice,) = chat(client, **fields).choices
    chunks = [chunk.choices[0] for chunk in chat(client, stream=True, **fields)]
    assert "".join(chunk.delta.content or "" for chunk in chunks) == choice.message.content
    assert chunks[-1].finish_reason == choice.finish_reason
    check(choice.message.content, choice.finish_reason)


def test_json_object(client):
    choices = chat(client, response_format={"type": "json_object"}, n=8, seed=1, max_tokens=300).choices
    assert sum(check(choice.message.content, choice.finish_reason, {"type": "object"}) for choice in choices) >= 1
    assert all(choice.message.content.startswith("{") for choice in choices)


def test_completions_with_a_grammar_and_a_regex(client):
    (choice,) = complete(client, extra_body={"grammar": 'start: "[" "x"* "]"'}, max_tokens=200, logprobs=1).choices
    assert choice.finish_reason == "length" or re.fullmatch(r"\[x*\]", choice.text)
    assert len(choice.logprobs.tokens) == len(choice.logprobs.token_logprobs)
    (choice,) = complete(client, extra_body={"regex": "[a-c]{3}"}, echo=True).choices
    assert re.fullmatch("the quick[a-c]{3}", choice.text) and choice.finish_reason == "stop"
    assert complete(client, extra_body={"response_format": {"type": "text"}}, max_tokens=2).choices


def test_stop_strings_and_stop_tokens_with_a_schema(client):
    (choice,) = complete(client, extra_body={"regex": "[a-c]{3};[a-c]{3}"}, stop=";").choices
    assert re.fullmatch("[a-c]{3}", choice.text) and choice.finish_reason == "stop"
    (choice,) = complete(client, extra_body={"regex": "[a-c]{9}"}, logit_bias={"2": 100}).choices
    assert re.fullmatch("[a-c]{9}", choice.text)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "foo"}}}}, "json schema.*foo"),
        ({"response_format": {"type": "json_schema", "json_schema": {"schema": {"not": {}}}}}, "Unimplemented.*not"),
        ({"regex": "(a"}, "regex: .*unclosed group"),
        ({"grammar": "start: x"}, "grammar: .*x"),
        ({"grammar": "start: T0\n" + "".join(f"T{i}: T{i + 1}\n" for i in range(4000)) + 'T4000: "a"'}, "too complex"),
        ({"regex": "a" * 70_000}, "more than 65,536"),
    ],
)
def test_guides_that_cannot_be_used(fields, message, server):
    status, response, _ = server.request("/v1/completions", {"prompt": "x", **fields})
    assert status == 400 and re.search(message, response["error"]["message"]), response
    assert response["error"]["param"] in fields and "\n" not in response["error"]["message"]
    assert server.request("/health")[0] == 200


def test_error_without_llguidance(server, monkeypatch):
    monkeypatch.setattr(server.service._guides, "_compiler", None)
    monkeypatch.setitem(sys.modules, "llguidance", None)
    status, response, _ = server.request("/v1/completions", {"prompt": "x", "regex": "a"})
    assert status == 400 and "tricycle-gpt[guided]" in response["error"]["message"]


def test_grammar_that_becomes_too_complex_fails_only_its_request(server, monkeypatch):
    monkeypatch.setitem(sys.modules["tricycle.decoding.guided"].LIMITS, "step_max_items", 200)
    body = {"prompt": "x", "max_tokens": 60, "temperature": 0}
    with ThreadPoolExecutor(2) as pool:
        nested = 'start: x{1000}\nx: y{1000}\ny: z{1000}\nz: "a"'
        failing = pool.submit(server.request, "/v1/completions", {**body, "grammar": nested})
        free = pool.submit(server.request, "/v1/completions", body)
        status, response, _ = failing.result(60)
        assert (status, response["error"]["code"]) == (500, "grammar_failed")
        assert free.result(60)[0] == 200
