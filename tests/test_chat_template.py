"""Chat templates: equal texts with `transformers`, and templates that mean no good."""

import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("jinja2")

from chat_templates import CHATML, CONVERSATIONS, FORMS, HELLO

from tricycle.pretrained import chat_template
from tricycle.pretrained.chat_template import ChatTemplate

ROOT = Path(__file__).resolve().parents[1]
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "It's <hot> é", "parameters": {}}}]


def outcome(render) -> str:
    """The text, or the reason why there is none."""
    try:
        return render()
    except ValueError as error:
        return "refused: " + re.sub(r"^chat template(, line \d+)?: ", "", str(error))


def reference(template: str, messages: list, add_generation_prompt: bool, **variables) -> str:
    utilities = pytest.importorskip("transformers.utils.chat_template_utils")
    from jinja2 import TemplateError

    try:
        texts, _ = utilities.render_jinja_template(
            [messages], chat_template=template, add_generation_prompt=add_generation_prompt, **variables
        )
    except TemplateError as error:
        raise ValueError(str(error)) from None
    return texts[0]


@pytest.mark.parametrize("tools", [None, TOOLS], ids=["no tools", "tools"])
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("conversation", CONVERSATIONS)
@pytest.mark.parametrize("form", FORMS)
def test_texts_are_those_of_transformers(form, conversation, prompt, tools):
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    messages = CONVERSATIONS[conversation]
    wanted = outcome(lambda: reference(FORMS[form], messages, prompt, tools=tools, **names))
    variables = {"messages": messages, "add_generation_prompt": prompt, "tools": tools, "documents": None, **names}
    assert outcome(lambda: ChatTemplate(FORMS[form]).render(**variables)) == wanted
    assert wanted


def test_a_text_is_as_expected():
    text = ChatTemplate(CHATML).render(messages=HELLO, add_generation_prompt=True)
    said = "  Hello! <b>é</b> 你好 \n"
    start = "<|im_start|>"
    assert text == f"{start}system\nBe kind.<|im_end|>\n{start}user\n{said}<|im_end|>\n{start}assistant\n"


def test_a_conversation_is_not_changed():
    messages = [{"role": "user", "content": ["a", {"b": 1}]}]
    ChatTemplate("{% set x = messages[0].content %}{{ x }}").render(messages=messages)
    assert messages == [{"role": "user", "content": ["a", {"b": 1}]}]


def test_today():
    year = ChatTemplate("{{ strftime_now('%Y') }}").render()
    assert re.fullmatch(r"2\d{3}", year)


# -------------------------------------------------------------------- templates that mean no good
GROW = "{{% set ns = namespace(x={}) %}}{{% for i in range(60) %}}{{% set ns.x = {} %}}{{% endfor %}}{{{{ ns.x }}}}"
LOOP = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
LEVELS = "{% macro f(n) %}x{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}"
LARGE = "{% set b = 'a' * 4000000 %}"
HOSTILE = {
    "class": ("{{ ''.__class__.__mro__ }}", "unsafe"),
    "globals": ("{{ cycler.__init__.__globals__ }}", "unsafe"),
    "attr": ("{{ (''|attr('__class__')).x }}", "unsafe"),
    "format": ("{{ '{0.__class__.__mro__}'.format('') }}", "unsafe"),
    "namespace": ("{{ namespace(__class__=1) }}", "underscore"),
    "file": ("{% include '/etc/passwd' %}", "no loader"),
    "module": ("{% import 'os' as os %}", "no loader"),
    "messages": ("{{ messages.append(1) }}", "unsafe"),
    "range": ("{% for i in range(10**9) %}a{% endfor %}", "Range too big"),
    "loops": (LOOP, "1,000,000 rounds"),
    "macros": (LEVELS, "rounds"),
    "recursion": ("{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}", "nests too deeply"),
    "times": ("{{ 'a' * 10**10 }}", "4,194,304 characters"),
    "times a list": ("{{ 10**10 * [1] }}", "4,194,304 characters"),
    "power": ("{{ 9**(9**9) }}", "1,000 digits"),
    "numbers": (GROW.format("99", "ns.x * ns.x"), "bits"),
    "doubling": (GROW.format("'aa'", "ns.x ~ ns.x"), "4,194,304 characters"),
    "plus": (GROW.format("'aa'", "ns.x + ns.x"), "4,194,304 characters"),
    "lists": (GROW.format("[1]", "[ns.x, ns.x]"), "4,194,304 characters"),
    "tuples": (GROW.format("(1,)", "(ns.x, ns.x)"), "4,194,304 characters"),
    "dicts": (GROW.format("{}", "{'a': ns.x, 'b': ns.x}"), "4,194,304 characters"),
    "dict": (GROW.format("{}", "dict(a=ns.x, b=ns.x)"), "4,194,304 characters"),
    "replace": (GROW.format("'aa'", "ns.x.replace('a', ns.x)"), "4,194,304 characters"),
    "replace filter": (GROW.format("'aa'", "ns.x|replace('a', ns.x)"), "4,194,304 characters"),
    "join": ("{{ ('a' * 1000000).join(range(99999)|map('string')) }}", "4,194,304 characters"),
    "join filter": ("{{ range(99999)|join('a' * 1000000) }}", "4,194,304 characters"),
    "percent": ("{{ '%1000000000d' % 1 }}", "width"),
    "percent star": ("{{ '%*d' % (10**9, 1) }}", "width"),
    "format width": ("{{ '{:1000000000d}'.format(1) }}", "width"),
    "format widths": ("{{ '{:{w}}'.format(1, w=10**9) }}", "width"),
    "format filter": ("{{ '%1000000000d'|format(1) }}", "width"),
    "many places": (LARGE + "{{ ('{0}' * 1000).format(b) }}", "characters"),
    "ljust": ("{{ 'a'.ljust(10**9) }}", "width"),
    "center": ("{{ 'a'|center(width=10**9) }}", "width"),
    "indent": ("{{ 'a'|indent(10**9, true) }}", "width"),
    "indent by a text": ("{{ ('a\n' * 10000)|indent('x' * 10000) }}", "4,194,304 characters"),
    "tojson": ("{{ [1]|tojson(indent=10**9) }}", "width"),
    "translate": ("{{ 'a'.translate({97: 'b'}) }}", "translate"),
    "output": (LARGE + "{% for i in range(1000) %}{{ b }}{% endfor %}", "33,554,432 characters"),
    "block": (LARGE + "{% set c %}{% for i in range(1000) %}{{ b }}{% endfor %}{% endset %}", "33,554,432"),
    "text": ("{% for i in range(99999) %}" + "abc " * 999 + "{% endfor %}", "33,554,432 characters"),
    "recursive loop": ("{% for x in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}", "nests too deeply"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_it_is_refused_in_one_line_and_soon(name):
    source, reason = HOSTILE[name]
    started = time.perf_counter()
    with pytest.raises(ValueError, match=rf"^chat template, line \d+: .*({reason})") as caught:
        print(ChatTemplate(source).render(messages=HELLO)[:100])
    assert "\n" not in str(caught.value)
    assert time.perf_counter() - started < 10


@pytest.mark.parametrize(
    "source", ["{{ " + "(" * 5000 + ")" * 5000 + " }}", "{{ " + "-" * 5000 + "1 }}", "{{" + "[" * 999]
)
def test_it_nests_deeply(source):
    with pytest.raises(ValueError, match=r"^chat template(, line 1)?: \S"):
        ChatTemplate(source).render()


def test_a_long_one():
    with pytest.raises(ValueError, match="at most 1,048,576 characters, got 1,048,577"):
        ChatTemplate("a" * (2**20 + 1))


def test_a_slow_one(monkeypatch):
    monkeypatch.setattr(chat_template, "MOST_SECONDS", -1)
    with pytest.raises(ValueError, match="it takes more than -1 seconds"):
        ChatTemplate("{% for i in range(1000) %}{{ i }}{% endfor %}").render()
    monkeypatch.setattr(chat_template, "MOST_SECONDS", 10)
    template = ChatTemplate("{% for i in range(1000) %}{{ i }}{% endfor %}")
    assert {len(template.render()) for _ in range(3)} == {2890}


@pytest.mark.slow
def test_memory_stays_small():
    """All hostile templates in one process, with a limit to its memory."""
    resource = pytest.importorskip("resource")
    program = """
from test_chat_template import HOSTILE, HELLO, ChatTemplate
for source, _ in HOSTILE.values():
    try:
        ChatTemplate(source).render(messages=HELLO)
    except ValueError:
        continue
    raise SystemExit(source)
"""

    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (2**30, 2**30))

    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT / "tests", preexec_fn=limit, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("source", "line", "reason"),
    [
        ("a\n\n{% foo %}", 3, "unknown tag 'foo'"),
        ("a\n{{ x.y }}", 2, "'x' is undefined"),
        ("a\n{{ raise_exception('not\nthis') }}", 2, "not this"),
        ("{% for m in messages %}\n\n\n{{ m.content.foo() }}\n{% endfor %}", 4, "has no attribute 'foo'"),
        ("{{ 1 / 0 }}", 1, "division by zero"),
        ("{{ messages[0]", 1, "unexpected end"),
    ],
)
def test_errors_name_the_line(source, line, reason):
    with pytest.raises(ValueError, match=f"^chat template, line {line}: .*{reason}"):
        ChatTemplate(source).render(messages=HELLO)


def test_odd_objects_are_refused():
    with pytest.raises(
        ValueError, match=r"texts, numbers, lists and dicts in a conversation, got a (Posix|Windows)Path"
    ):
        ChatTemplate("{{ messages }}").render(messages=[{"role": "user", "content": ROOT}])


class Loud(str):
    def shout(self):
        raise AssertionError


def test_texts_of_other_classes_are_just_texts():
    assert ChatTemplate("{{ x }} {{ x.shout is defined }}").render(x=Loud("a")) == "a False"
