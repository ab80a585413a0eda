"""Tests of /v1/responses with OpenAI's client: texts, events, formats, tools and invalid requests."""
# ruff: noqa: F811 (tests have imported fixtures as arguments)

import json
import re

import pytest

pytest.importorskip("openai")
pytest.importorskip("llguidance")
pytest.importorskip("jsonschema")

import jsonschema
import openai
from serving import HELLO, client, folder, reference, server  # noqa: F401 (fixtures)
from test_serve_guides import SCHEMA
from test_serve_tools import PARAMETERS, TEMPLATE  # noqa: F401 (of the model that `folder` writes)
from test_serve_tools import TOOLS as CHAT_TOOLS

TOOLS = [{"type": "function", **tool["function"]} for tool in CHAT_TOOLS]
FORMAT = {"format": {"type": "json_schema", "name": "answer", "schema": SCHEMA, "strict": True}}
LONG = {"logit_bias": {"2": -100}}  # prevents the end of an answer


def respond(client, given="the quick brown fox", **fields):
    return client.responses.create(**{"model": "tiny", "input": given, "temperature": 0, **fields})


def test_text_equals_generate(client, reference):
    unsupported = {"reasoning": {"effort": "none", "summary": None}, "store": False, "text": {"verbosity": "medium"}}
    response = respond(
        client, max_output_tokens=12, extra_body=LONG, metadata={"a": "b"}, max_tool_calls=3, **unsupported
    )
    n_prompt = len(reference.tokeniser.chat(HELLO))
    assert response.output_text == reference.text(reference.tokeniser.chat(HELLO), 12, logit_bias=((2, -100.0),))
    assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert (response.object, response.error, response.metadata) == ("response", None, {"a": "b"})
    assert response.max_tool_calls == 3
    assert (response.usage.input_tokens, response.usage.output_tokens) == (n_prompt, 12)
    assert response.usage.total_tokens == n_prompt + 12
    ended = respond(client, extra_body={"logit_bias": {"2": 100}})
    assert (ended.status, ended.output_text, ended.output[0].status) == ("completed", "", "completed")


def test_instructions_and_input_items(client, reference):
    first = respond(client, instructions="small birds", max_output_tokens=9)
    assert first.output_text == reference.chat([{"role": "system", "content": "small birds"}, *HELLO], 9)
    items = [
        {"role": "developer", "content": [{"type": "input_text", "text": "small "}, {"type": "text", "text": "birds"}]},
        {"type": "message", "role": "user", "content": "the quick brown fox"},
        *first.output,  # as a client sends the answer back
        {"role": "user", "content": "rain"},
    ]
    messages = [
        {"role": "system", "content": "small birds"},
        *HELLO,
        {"role": "assistant", "content": first.output_text},
        {"role": "user", "content": "rain"},
    ]
    assert respond(client, items, max_output_tokens=9).output_text == reference.chat(messages, 9)


def test_streamed_events_equal_the_complete_response(client):
    fields = {"max_output_tokens": 30, "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    complete = respond(client, **fields)
    events = list(respond(client, stream=True, **fields))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type.removeprefix("response.") for event in events]
    deltas = [event for event in events if event.type == "response.output_text.delta"]
    begin = ["created", "in_progress", "output_item.added", "content_part.added"]
    end = ["output_text.done", "content_part.done", "output_item.done", complete.status]
    assert kinds == [*begin, *["output_text.delta"] * len(deltas), *end]
    text = "".join(event.delta for event in deltas)
    assert text == complete.output_text == events[-4].text and len(deltas) > 1
    (part,) = complete.output[0].content
    assert sum(len(event.logprobs) for event in deltas) == len(part.logprobs) > 1
    assert all(len(entry.top_logprobs) == 2 and entry.logprob <= 0 for entry in part.logprobs)
    same = {"id", "created_at", "output"}
    assert events[-1].response.model_dump(exclude=same) == complete.model_dump(exclude=same)
    assert events[-1].response.output[0].content == complete.output[0].content
    with client.responses.stream(model="tiny", input="the", max_output_tokens=300, temperature=0) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert text == respond(client, "the", max_output_tokens=300).output_text


def test_json_schema(client):
    fields = {"text": FORMAT, "temperature": 2.0, "max_output_tokens": 300}
    responses = [respond(client, extra_body={"seed": seed}, **fields) for seed in range(5)]
    completed = [response for response in responses if response.status == "completed"]
    assert completed and completed[0].text.format.type == "json_schema"
    for response in completed:
        jsonschema.validate(json.loads(response.output_text), SCHEMA)
    text = respond(client, text={"format": {"type": "json_object"}}, max_output_tokens=9).output_text
    assert text.startswith("{")


@pytest.mark.parametrize("stream", [False, True])
def test_function_calls(stream, client):
    fields = {"tools": TOOLS, "tool_choice": {"type": "function", "name": "add"}, "temperature": 1.5}
    fields["parallel_tool_calls"] = False
    found = []
    for seed in range(6):
        response = respond(client, stream=stream, max_output_tokens=400, extra_body={"seed": seed}, **fields)
        if stream:
            events = list(response)
            response = events[-1].response
        if response.status == "incomplete":
            continue
        (call,) = response.output
        assert not response.parallel_tool_calls
        assert call.type == "function_call" and call.name == "add" and call.id != call.call_id
        jsonschema.validate(json.loads(call.arguments), PARAMETERS)
        found.append(call)
        if stream:
            kinds = [event.type.removeprefix("response.") for event in events]
            arguments = ["function_call_arguments.delta", "function_call_arguments.done"]
            middle = ["output_item.added", *arguments, "output_item.done"]
            assert kinds == ["created", "in_progress", *middle, "completed"]
            assert events[3].delta == events[4].arguments == call.arguments == events[5].item.arguments
    assert found


def test_results_of_functions_are_part_of_the_prompt(client, reference):
    calls = [{"type": "function_call", "call_id": f"c{i}", "name": "add", "arguments": '{"x": 1}'} for i in range(2)]
    outputs = [{"type": "function_call_output", "call_id": f"c{i}", "output": f"result {i}"} for i in range(2)]
    said = {"role": "assistant", "content": "small birds"}
    response = respond(client, [*HELLO, said, *calls, *outputs], tools=TOOLS, max_output_tokens=12)
    call = {"type": "function", "function": {"name": "add", "arguments": {"x": 1}}}
    results = [{"role": "tool", "content": f"result {i}"} for i in range(2)]
    messages = [*HELLO, {**said, "tool_calls": [call, call]}, *results]
    ids = reference.tokeniser.chat(messages, allowed_special=False, tools=CHAT_TOOLS)
    assert response.usage.input_tokens == len(ids)
    assert response.output_text == reference.text(ids, 12)


def test_failure_in_a_stream(server, client, monkeypatch):
    monkeypatch.setattr(server.service.engine._batch, "step", lambda: 1 / 0)
    *_, last = respond(client, stream=True)
    assert (last.type, last.response.status) == ("response.failed", "failed")
    assert last.response.error.message == "the model failed"
    with pytest.raises(openai.InternalServerError, match="the model failed"):
        monkeypatch.setattr(server.service.engine._batch, "step", lambda: 1 / 0)
        respond(client)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": []}, "expected input to be a string, or a list"),
        ({"input": ["x"]}, r"input\[0\]"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, r"input\[0\]\.content"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, r"input\[0\]\.type.*function_call_output"),
        ({"input": [{"type": "function_call", "name": "f", "arguments": "["}]}, r"input\[0\].*JSON object"),
        ({"input": [{"type": "function_call_output"}]}, r"input\[0\]\.content"),
        ({"input": "x" * 3_000_000}, "characters do not fit"),
        ({"previous_response_id": "resp_1"}, "previous_response_id is not supported.*send the earlier items"),
        ({"conversation": "c"}, "conversation is not supported"),
        ({"background": True}, "background is not supported"),
        ({"truncation": "auto"}, "truncation is not supported"),
        ({"include": ["file_search_call.results"]}, "expected include"),
        ({"text": 5}, "expected text to be an object"),
        ({"text": {"format": 5}}, "expected text.format to be an object"),
        ({"text": {"verbosity": "low"}}, "text.verbosity is not supported"),
        ({"text": {"size": 1}}, "unrecognised field: text.size"),
        ({"store": True}, "store is not supported"),
        ({"reasoning": {"effort": "high"}}, "reasoning.effort is not supported"),
        ({"reasoning": {"size": 1}}, "unrecognised field: reasoning.size"),
        ({"max_tool_calls": 0}, "expected max_tool_calls"),
        ({"metadata": {"a": 1}}, "metadata to be an object of strings"),
        ({"metadata": [1]}, "metadata to be an object of strings"),
        ({"text": {"format": {"type": "xml"}}}, "expected text.format to be an object of type text"),
        ({"text": {"format": {"type": "json_schema", "schema": {"type": "foo"}}}}, "text.format: cannot use.*foo"),
        ({"tools": [{"type": "web_search"}]}, r"tools\[0\].*type function"),
        ({"tools": [{"type": "function", "name": "a b"}]}, r"tools\[0\]\.name"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "name": "b"}}, "one of the tools"),
        ({"max_output_tokens": 0}, "max_output_tokens.*1 to"),
        ({"n": 2}, "unrecognised field: n"),
        ({"messages": HELLO}, "unrecognised field: messages"),
    ],
)
def test_invalid_requests(fields, message, server):
    status, response, _ = server.request("/v1/responses", {"input": "x", **fields})
    assert status == 400 and re.search(message, response["error"]["message"]), response
    assert (response["error"]["param"] or "").split("[")[0].split(".")[0] in fields
