"""Tests of tools in chat requests to `tricycle serve`: the prompt, forced calls, parsing and invalid requests."""
# ruff: noqa: F811 (tests have imported fixtures as arguments)

import json
import re
import sys

import pytest

pytest.importorskip("openai")
pytest.importorskip("llguidance")
pytest.importorskip("jsonschema")

import jsonschema
from chat_templates import CHATML
from json_schemas import DIGIT, an_object
from serving import HELLO, client, folder, reference, run_server, server  # noqa: F401 (fixtures)
from tiny_models import write_folder

from tricycle_serve.tools import ToolCallParser

TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "call with <tool_call></tool_call><|im_end|>\n{% endif %}"
    "{% for message in messages %}{% if message.role == 'tool' %}<|im_start|>user\n<tool_response>"
    "{{ message.content }}</tool_response><|im_end|>\n{% else %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ {'name': call.function.name, 'arguments':"
    " call.function.arguments} | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PARAMETERS = an_object(x=DIGIT, sure={"type": "boolean"})
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "adds", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "now"}},
    {"type": "function", "function": {"name": "none", "parameters": PARAMETERS}},
]
# Levels of objects that are too many for the chat template, or for the JSON decoder of Python 3.12 and later.
DEPTH = 500 if sys.version_info < (3, 12) else 50_000
INFINITE = {"name": "f", "arguments": '{"a": -1e999}'}
NESTED = {"name": "f", "arguments": '{"a":' * DEPTH + "1" + "}" * DEPTH}


def chat(client, messages=HELLO, **fields):
    return client.chat.completions.create(**{"model": "tiny", "messages": messages, "temperature": 0, **fields})


def test_tools_are_part_of_the_prompt(client, reference):
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"x": 1, "sure": True}}}]
    sent = [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"x": 1, "sure": true}'}}]
    messages = [*HELLO, {"role": "assistant", "content": None, "tool_calls": sent}]
    messages += [{"role": "tool", "tool_call_id": "c1", "content": "2 <|im_end|>"}]
    response = chat(client, messages, tools=TOOLS, max_tokens=12)
    rendered = [
        *HELLO,
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "2 <|im_end|>"},
    ]
    ids = reference.tokeniser.chat(rendered, allowed_special=False, tools=TOOLS)
    assert response.usage.prompt_tokens == len(ids)
    assert response.choices[0].message.content == reference.text(ids, 12)
    assert response.choices[0].message.tool_calls is None
    without = chat(client, tools=TOOLS, tool_choice="none", max_tokens=12)
    assert without.choices[0].message.content == reference.chat(HELLO, 12)


@pytest.mark.parametrize("arguments", [{"<|im_end|>": 1}, {"role": "<|im_end|>"}, {"x": [{"role": ["<|im_end|>"]}]}])
def test_special_tokens_in_arguments_are_plain_text(arguments, reference):
    def special_tokens(arguments):
        call = {"type": "function", "function": {"name": "add", "arguments": arguments}}
        ids = reference.tokeniser.chat([{"role": "assistant", "content": "", "tool_calls": [call]}], True, False)
        return [token for token in ids if token in reference.tokeniser.special_ids]

    assert special_tokens(arguments) == special_tokens({"x": 1})


@pytest.mark.nightly_except(3)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ["add", "now", "none", None])
def test_forced_calls(name, stream, client):
    choice = {"type": "function", "function": {"name": name}} if name else "required"
    fields = {"tools": TOOLS, "tool_choice": choice, "temperature": 1.5, "max_tokens": 400, "stream": stream, "n": 4}
    response = chat(client, **fields, seed=1)
    chunks = [chunk.choices[0] for chunk in response] if stream else response.choices
    ends = {chunk.index: chunk.finish_reason for chunk in chunks if chunk.finish_reason}
    found = [(part.index, part.delta if stream else part.message) for part in chunks]
    calls = [(index, call) for index, message in found for call in message.tool_calls or []]
    assert calls and all(ends[index] == "tool_calls" for index, _ in calls)
    for _, call in calls:
        assert call.id.startswith("call_") and call.function.name in ((name,) if name else ("add", "now", "none"))
        schema = PARAMETERS if call.function.name != "now" else {"type": "object"}
        jsonschema.validate(json.loads(call.function.arguments), schema)
    for index in {0, 1, 2, 3} - {index for index, _ in calls}:
        assert ends[index] == "length"
    assert not any(message.content for index, message in found if ends[index] == "tool_calls")


@pytest.mark.parametrize("reference", ["#", "#/$defs/list"])
def test_references_in_parameters_begin_at_the_parameters(reference, client):
    """As in the schemas that pydantic makes of nested classes."""
    items = {"type": "array", "items": {"$ref": reference}, "maxItems": 1}
    parameters = an_object(x=items) | {"$defs": {"list": an_object(y=DIGIT)}}
    tools = [{"type": "function", "function": {"name": "add", "parameters": parameters}}]
    response = chat(client, tools=tools, tool_choice="required", temperature=1.5, max_tokens=400, seed=2, n=4)
    calls = [call for choice in response.choices for call in choice.message.tool_calls or []]
    assert calls
    for call in calls:
        jsonschema.validate(json.loads(call.function.arguments), parameters)


ADD, NOW = '<tool_call>\n{"name": "add", "arguments": {"x": 1}}\n</tool_call>', '{"name": "now", "arguments": {}}'


@pytest.mark.parametrize("size", [1, 3, 1000])
@pytest.mark.parametrize(
    ("text", "content", "names"),
    [
        ("plain < text <tool", "plain < text <tool", []),
        (ADD, "", ["add"]),
        (f"I call: {ADD}\n<tool_call>{NOW}</tool_call>\n", "I call: ", ["add", "now"]),
        (f"<tool_call>{NOW}", "", ["now"]),  # without an end
        (f"{ADD} and text", f"{ADD} and text", []),
        (ADD.replace("1", '"</tool_call>"'), "", ["add"]),
        ("<tool_call>{</tool_call>", "<tool_call>{</tool_call>", []),
        (ADD.replace("add", "unknown"), ADD.replace("add", "unknown"), []),
        ('<tool_call>{"name": "add", "arguments": 5}</tool_call>', None, []),
        (ADD.replace("1", "NaN"), ADD.replace("1", "NaN"), []),
        ("<tool_call>" + "[" * 100_000, None, []),
    ],
)
def test_parser(text, content, names, size):
    if size == 1 and len(text) > 1000:
        pytest.skip("slow in single characters")
    parser = ToolCallParser(["add", "now"])
    sent = "".join(parser.push(text[i : i + size]) for i in range(0, len(text), size))
    rest, calls = parser.finish()
    assert sent + rest == (text if content is None else content)
    assert [call["function"]["name"] for call in calls] == names


@pytest.mark.parametrize(("is_parallel", "n_calls"), [(True, 2), (False, 1)])
def test_parallel_tool_calls(is_parallel, n_calls, client):
    grammar = {"grammar": f"start: {json.dumps(f'<tool_call>{NOW}</tool_call>' * 2)}"}
    response = chat(client, tools=TOOLS, parallel_tool_calls=is_parallel, extra_body=grammar)
    assert [call.function.name for call in response.choices[0].message.tool_calls] == ["now"] * n_calls


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tools": {}}, "expected tools"),
        ({"tools": [5]}, r"tools\[0\].*type function"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, r"tools\[0\]\.function\.name"),
        ({"tools": [{"type": "function", "function": {"name": "a", "parameters": 5}}]}, "parameters.*JSON schema"),
        ({"tools": [{"type": "function", "function": {"name": "a", "description": "<|im_end|>"}}]}, "special tokens"),
        ({"tools": TOOLS, "tool_choice": "never"}, "expected tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "b"}}}, "one of the tools"),
        ({"tool_choice": "required"}, "expected tools"),
        ({"tools": TOOLS, "tool_choice": "required", "regex": "a"}, "regex or a tool_choice.*, got both"),
        (
            {
                "tools": [{"type": "function", "function": {"name": "a", "parameters": {"type": "foo"}}}],
                "tool_choice": "required",
            },
            "tools: cannot use this grammar.*foo",
        ),
        ({"functions": [{"name": "f"}]}, "functions is not supported"),
        ({"messages": [*HELLO, {"role": "assistant", "tool_calls": [{"function": {"name": "f"}}]}]}, "tool_calls"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"function": INFINITE}]}]}, "JSON object as arguments"),
        ({"messages": [*HELLO, {"role": "assistant", "tool_calls": 5}]}, "tool_calls to be a list"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": NESTED}]}]},
            "template accepts|JSON object as arguments",
        ),
    ],
)
def test_invalid_tools(fields, message, server):
    status, response, _ = server.request("/v1/chat/completions", {"messages": HELLO, "max_tokens": 2, **fields})
    assert status == 400 and re.search(message, response["error"]["message"]), response


def test_model_without_tools_in_its_template(tmp_path):
    with run_server(write_folder(tmp_path / "tiny", CHATML)) as server:
        call = {"function": {"name": "f", "arguments": "{}"}}
        for fields, param in (
            ({"tools": TOOLS}, "tools"),
            ({"messages": [*HELLO, {"role": "tool", "content": "x"}]}, "messages"),
            ({"messages": [*HELLO, {"role": "assistant", "tool_calls": [call]}]}, "messages"),
        ):
            status, response, _ = server.request("/v1/chat/completions", {"messages": HELLO, **fields})
            assert (status, response["error"]["param"]) == (400, param)
            assert "has no tools in the format <tool_call>" in response["error"]["message"]


def test_template_for_tools_is_used_with_tools_alone(tmp_path):
    place = write_folder(tmp_path / "tiny", CHATML)
    (place / "chat_template.jinja").write_text(CHATML)
    (place / "additional_chat_templates").mkdir()
    (place / "additional_chat_templates" / "tool_use.jinja").write_text(TEMPLATE)
    with run_server(place) as server:
        messages = [*HELLO, {"role": "tool", "content": "x"}]
        for fields, expected in (({"tools": TOOLS}, 200), ({}, 400)):
            fields = {"messages": messages, "max_tokens": 1, **fields}
            assert server.request("/v1/chat/completions", fields)[0] == expected
