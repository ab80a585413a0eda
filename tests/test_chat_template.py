"""Chat templates: equal texts with `transformers`, and templates that mean no good."""

import hashlib
import os
import random
import re
import subprocess
import sys
import threading
import time
import weakref
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

pytest.importorskip("jinja2")

from chat_templates import CHATML, CONVERSATIONS, FORMS, HELLO, LONGER

from tricycle.pretrained import chat_template, template_process
from tricycle.pretrained.chat_template import ChatTemplate
from tricycle.pretrained.template_process import UntrustedTemplate, open_template

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
def test_rendered_texts_match_transformers(form, conversation, prompt, tools):
    names = {"bos_token": "<s>", "eos_token": "</s>"}
    messages = CONVERSATIONS[conversation]
    expected = outcome(lambda: reference(FORMS[form], messages, prompt, tools=tools, **names))
    variables = {"messages": messages, "add_generation_prompt": prompt, "tools": tools, "documents": None, **names}
    assert outcome(lambda: ChatTemplate(FORMS[form]).render(**variables)) == expected
    assert expected


def test_chatml_text_matches_literal():
    text = ChatTemplate(CHATML).render(messages=HELLO, add_generation_prompt=True)
    content = "  Hello! <b>é</b> 你好 \n"
    start = "<|im_start|>"
    assert text == f"{start}system\nBe kind.<|im_end|>\n{start}user\n{content}<|im_end|>\n{start}assistant\n"


def test_rendering_does_not_modify_messages():
    messages = [{"role": "user", "content": ["a", {"b": 1}]}]
    ChatTemplate("{% set x = messages[0].content %}{{ x }}").render(messages=messages)
    assert messages == [{"role": "user", "content": ["a", {"b": 1}]}]


# -------------------------------------------------------------------- hostile templates
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
    "loops": (LOOP, "1,000,000 iterations"),
    "macros": (LEVELS, "iterations"),
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
    "round": ("{{ 1|round(10**6, 'ceil') }}", "width"),
    "encode": ("{{ 'a'.encode() * 10**7 }}", "encode"),
    "to_bytes": ("{{ (1).to_bytes(10**7, 'big') }}", "to_bytes"),
    "translate": ("{{ 'a'.translate({97: 'b'}) }}", "translate"),
    "output": (LARGE + "{% for i in range(1000) %}{{ b }}{% endfor %}", "33,554,432 characters"),
    "block": (LARGE + "{% set c %}{% for i in range(1000) %}{{ b }}{% endfor %}{% endset %}", "33,554,432"),
    "text": ("{% for i in range(99999) %}" + "abc " * 999 + "{% endfor %}", "33,554,432 characters"),
    "recursive loop": ("{% for x in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}", "nests too deeply"),
}


@pytest.mark.nightly_except(4)
@pytest.mark.parametrize(("source", "reason"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_templates_are_rejected_quickly_in_one_line(source, reason):
    started = time.perf_counter()
    with pytest.raises(ValueError, match=rf"^chat template, line \d+: .*({reason}|more than 5 seconds)") as caught:
        print(ChatTemplate(source).render(messages=HELLO)[:100])
    assert "\n" not in str(caught.value)
    assert time.perf_counter() - started < 10


NESTED = ["{{ " + "(" * 5000 + ")" * 5000 + " }}", "{{ " + "-" * 5000 + "1 }}", "{{" + "[" * 999]


def test_deeply_nested_and_long_templates_are_rejected():
    for source in NESTED:
        with pytest.raises(ValueError, match=r"^chat template(, line 1)?: \S"):
            ChatTemplate(source).render()
    with pytest.raises(ValueError, match=r"1,048,576.*1,048,577"):
        ChatTemplate("a" * (2**20 + 1))


def test_rendering_beyond_the_time_limit_raises(monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_SECONDS", -1)
    with pytest.raises(ValueError, match="-1 seconds"):
        ChatTemplate("{% for i in range(1000) %}{{ i }}{% endfor %}").render()
    monkeypatch.setattr(chat_template, "MAX_SECONDS", 5)
    template = ChatTemplate("{% for i in range(1000) %}{{ i }}{% endfor %}")
    assert {len(template.render()) for _ in range(3)} == {2890}


# -------------------------------------------------------------------- in a child process
# What cannot be measured before it is made: it takes gigabytes, or minutes.
UNMEASURED = {
    "expandtabs": "{% set a = '\t' * 4000000 %}{{ a.expandtabs(9999)|length }}",
    "indent": "{{ ('a\n' * 1900000)|indent(9999)|length }}",
    "many widths": "{{ ('%9999d' * 40000) % ((1,) * 40000) }}",
    "wordwrap": "{{ ('a' * 4000000)|wordwrap(1)|length }}",
    "slices": "{% set a = 'ab' * 2000000 %}" + "{% set b = a[::-1] %}" * 8000 + "{{ b }}",
    "a large constant": "{{ 'a' * 3000000 }}" * 20,
    "nested lists": "{% set a = [range(99999)|list] * 40 %}{{ a|map('list')|list|length }}",
}
EVERY = {**{name: source for name, (source, _) in HOSTILE.items()}, **UNMEASURED}
FILTERS = """expandtabs(N) indent(N) wordwrap(N) center(N) ljust(N) zfill(N) replace('a',T) join(T) split('a') upper()
    title() encode() format(N) count('a') rsplit('a') swapcase() casefold() strip('a') rjust(N)""".split()
PIPED = """indent(N) wordwrap(N) center(N) replace('a',T) join(T) list unique sort reverse batch(N) slice(N)
    tojson(indent=N) upper title striptags urlize truncate(N) wordcount xmlattr string length map('string') pprint
    forceescape format(N) urlencode""".split()
NUMBERS = ["0", "1", "3", "999", "9999", "99999", "10**9", "-1", "2**62"]
STRINGS = ["'a'", "'ab \t\n'", "'{}'", "'%d'", "'%9999d'", "'<a>'", "('ab' * N)"]
ATOMS = [*STRINGS, "[1, 2]", "range(N)", "messages", "{'a': 'b'}", "N"]


def generated(seed: int) -> str:
    """A template that puts together filters, methods, operators, loops and macros with small and large numbers."""
    draw = random.Random(seed)

    def filled(form: str) -> str:
        form = re.sub("N", lambda _: draw.choice(NUMBERS), form)
        return re.sub("T", lambda _: f"('xy' * {draw.choice(NUMBERS)})", form)

    def value(depth: int) -> str:
        if depth == 0 or draw.random() < 0.1:
            return filled(draw.choice(ATOMS))
        kind = draw.randrange(6)
        inner = value(depth - 1)
        forms = [
            f"({inner})|{filled(draw.choice(PIPED))}",
            f"({inner}).{filled(draw.choice(FILTERS))}",
            f"({inner}){draw.choice(['[::-1]', '[1:]', '[::2]', '[0]'])}",
            f"({inner} {draw.choice(['*', '+', '~', '%', '**'])} {value(depth - 1)})",
            f"({inner}) * {draw.choice(NUMBERS)}",
            f"[{inner}, {value(depth - 1)}]",
        ]
        return forms[kind]

    lines = [f"{{% set a = {value(3)} %}}"]
    for _ in range(draw.randrange(1, 6)):
        statements = [
            f"{{% set a = {value(2)} %}}",
            "{% set a = a ~ a %}" * draw.choice([1, 20, 400]),
            f"{{% for i in {value(2)} %}}{{{{ {value(2)} }}}}{{% endfor %}}",
            f"{{% macro f(n) %}}{{{{ {value(2)} }}}}{{% if n %}}{{{{ f(n - 1) }}}}{{% endif %}}{{% endmacro %}}"
            f"{{{{ f({draw.choice(NUMBERS)}) }}}}",
            f"{{{{ {value(4)} }}}}",
        ]
        lines.append(draw.choice(statements))
    return "\n".join([*lines, "{{ a }}"])


class WatchedChild(subprocess.Popen):
    """A child process whose most memory is kept: the system's own figure after its end includes its parent's."""

    most_memory = 0

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        if sys.platform == "linux":
            self._watcher = threading.Thread(target=self._watch)
            self._watcher.start()

    def _watch(self):
        while memory := re.search(r"VmHWM:\s*(\d+) kB", status_of(self.pid)):
            self.most_memory = int(memory[1]) * 1024
            time.sleep(0.002)


def status_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except OSError:  # it has ended
        return ""


@pytest.fixture
def children(monkeypatch):
    """Every child process that the test starts."""
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda *a, **k: started.append(WatchedChild(*a, **k)) or started[-1])
    return started


def within_limits(source: str, seconds: float, children: list[WatchedChild]) -> str:
    """Render an untrusted template; how it ended, if that was within the limits."""
    children.clear()
    started = time.perf_counter()
    try:
        text = UntrustedTemplate(source, seconds).render(messages=HELLO)
        assert len(text) <= chat_template.MAX_OUTPUT_CHARACTERS
        ended = "text"
    except ValueError as error:
        assert str(error).startswith("chat template") and "\n" not in str(error) and len(str(error)) < 700
        ended = str(error)
    assert time.perf_counter() - started < 2 * (seconds + 1)  # to compile and to render, each with a child's start
    assert children
    if sys.platform == "linux":
        most = [child._watcher.join(10) or child.most_memory for child in children]
        assert min(most) > 10e6 and max(most) < template_process.MAX_MEMORY + 50e6, most  # Python and Jinja take 40 MB
    return ended


@pytest.mark.nightly_except(6)
@pytest.mark.parametrize("name", EVERY)
def test_untrusted_templates_keep_the_limits(name, children):
    within_limits(EVERY[name], 1.0, children)


@pytest.mark.parametrize("seed", range(6))
def test_generated_templates_keep_the_limits(seed, children):
    within_limits(generated(seed), 1.0, children)


@pytest.mark.nightly
def test_more_generated_templates_keep_the_limits(children):
    """Render 200 generated templates and those of EVERY with the default time limit."""
    sources = [*map(generated, range(100, 300)), *EVERY.values()]
    n_threads = threading.active_count()
    reasons = [within_limits(source, 5.0, children) for source in sources]
    ended = Counter(re.sub(r"^chat template(, line \d+)?: |\d[\d,]*|'.*", "", reason) for reason in reasons)
    assert ended["text"] and len(ended) > 10, ended  # some are harmless, the others fail in many ways
    assert threading.active_count() == n_threads


@pytest.mark.slow
def test_child_process_serves_many_renderings_and_restarts_after_limit():
    source = (
        "{% if messages[0].content == 'slow' %}{{ ('a' * 4000000)|wordwrap(1) }}{% endif %}{{ messages[0].content }}"
    )
    template = UntrustedTemplate(source, 1.0)
    first = template._process.pid
    assert [template.render(messages=[{"content": text}]) for text in ("é", "\ud800", "<>")] == ["é", "\ud800", "<>"]
    assert template._process.pid == first
    with pytest.raises(ValueError, match="1 seconds"):
        template.render(messages=[{"content": "slow"}])
    assert template.render(messages=[{"content": "again"}]) == "again"
    assert template._process.pid != first
    killed = template._process
    killed.kill()  # as the system does where memory is short
    killed.wait()
    assert template.render(messages=[{"content": "and again"}]) == "and again"
    assert killed.stdin.closed and killed.stdout.closed
    with ThreadPoolExecutor(4) as pool:
        texts = [str(i) for i in range(40)]
        assert list(pool.map(lambda text: template.render(messages=[{"content": text}]), texts)) == texts
    process, ended = template._process, weakref.ref(template)
    template = None
    assert ended() is None and process.returncode == 0


def test_child_process_renders_like_the_parent():
    variables = {"messages": LONGER, "tools": TOOLS, "x": {1: [None, 1.5, True]}}
    variables |= {"bos_token": "<s>", "eos_token": "</s>"}
    for source in (*FORMS.values(), "{{ x }} {{ x[1] }} {{ strftime_now('%Y') }} {{ tools|tojson }}"):
        texts = [outcome(partial(kind(source).render, **variables)) for kind in (ChatTemplate, UntrustedTemplate)]
        assert texts[0] == texts[1]


def test_known_templates_stay_in_the_process(monkeypatch):
    assert type(open_template(CHATML)) is UntrustedTemplate
    known = hashlib.sha256(CHATML.encode()).hexdigest()
    monkeypatch.setattr(template_process, "KNOWN_TEMPLATES", {known})
    assert type(open_template(CHATML)) is ChatTemplate


@pytest.mark.skipif(not hasattr(os, "fork"), reason="Windows has no fork")
def test_forked_process_starts_a_separate_child():
    template = UntrustedTemplate("{{ x }}")
    parents = template._process.pid
    child = os.fork()
    if child == 0:
        fine = template.render(x="a") == "a" and template._process.pid != parents
        template._finalizer()
        os._exit(0 if fine else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert template.render(x="b") == "b" and template._process.pid == parents


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


class Loud(str):
    def shout(self):
        raise AssertionError


def test_unsupported_objects_are_rejected_and_str_subclasses_are_plain_strings():
    with pytest.raises(ValueError, match=r"conversation, got a (Posix|Windows)Path"):
        ChatTemplate("{{ messages }}").render(messages=[{"role": "user", "content": Path()}])
    assert ChatTemplate("{{ x }} {{ x.shout is defined }}").render(x=Loud("a")) == "a False"
