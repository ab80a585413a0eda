"""Tests of the chat page of `tricycle serve` in a browser: keyboard, phone, light and dark, accessibility.

With TRICYCLE_SCREENSHOTS=FOLDER the tests save screenshots there.
"""
# ruff: noqa: F811 (tests have imported fixtures as arguments)

import time

import pytest
from browser import DISPLAYS, each_display
from serving import ReferenceGenerator, folder, run_server, wait_until  # noqa: F401 (fixtures)
from tiny_models import smollm2_file, write_folder

from tricycle.decoding.batch import GenerationBatch
from tricycle_cli.models import ModelFlags

pytestmark = pytest.mark.nightly

TEXTS = "return [...document.querySelectorAll('article p')].map((paragraph) => paragraph.textContent)"
IS_DONE = "return document.getElementById('messages').getAttribute('aria-busy') === 'false'"
STATUS = "return document.getElementById('status').textContent"
ERROR = "const error = document.getElementById('error'); return error.checkVisibility() && error.textContent"
FOCUSED_ID = "return document.activeElement.id"
ENTER, SHIFT, TAB, ESCAPE = "\ue007", "\ue008", "\ue004", "\ue00c"


@pytest.fixture(scope="module")
def server(folder):
    with run_server(folder, length=4000) as server:
        yield server


def set_field(browser, field: str, text: str) -> None:
    """Replace the text of a field in the settings."""
    browser.run("document.getElementById('settings').open = true")
    element = browser.find(f"#{field}")
    element.clear()
    element.send_keys(text)


def send_message(browser, text: str) -> None:
    """Enter a message by keyboard, and wait for the response."""
    browser.find("#input").send_keys(text)
    browser.press(ENTER)
    browser.until(IS_DONE)


@each_display
def test_accessibility_and_layout(browser, server, display):
    browser.open(server.url, *DISPLAYS[display])
    assert browser.run(FOCUSED_ID) == "input"
    assert browser.violations() == []
    send_message(browser, "the quick brown fox")
    assert browser.run(STATUS) == "Response complete"
    assert browser.errors() == [] and browser.fits() and browser.violations() == []
    background = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(25, 26, 28)") == DISPLAYS[display][1]
    browser.screenshot(f"serve, {display}")
    browser.run("document.getElementById('settings').open = true")
    assert browser.fits() and browser.violations() == []
    browser.screenshot(f"serve settings, {display}")
    origins = browser.run("return performance.getEntriesByType('resource').map((entry) => new URL(entry.name).origin)")
    assert set(origins) == {server.url}


def test_chat(browser, server, folder):
    """The texts equal those of `generate` for the whole chat, with a system prompt; Shift+Enter starts a new line."""
    reference = ReferenceGenerator(folder)
    browser.open(server.url)
    set_field(browser, "temperature", "0")
    set_field(browser, "max-tokens", "9")
    set_field(browser, "system-prompt", "small birds")
    messages = [{"role": "system", "content": "small birds"}]
    expected = []
    for text in ("the quick", "seven dogs\nand <b>rain</b>"):
        messages.append({"role": "user", "content": text})
        response = reference.chat(messages, 9, repetition_penalty=1.0)
        messages.append({"role": "assistant", "content": response})
        expected += [text, response]
        browser.find("#input").send_keys(text.replace("\n", SHIFT + ENTER + SHIFT))
        browser.press(ENTER)
        browser.until(IS_DONE)
    assert browser.run(TEXTS) == expected
    assert browser.run("return document.querySelectorAll('article b').length") == 0
    browser.find("#new-chat").click()
    assert browser.run(TEXTS) == []
    assert browser.run(FOCUSED_ID) == "input"
    send_message(browser, "the quick")
    assert browser.run(TEXTS) == expected[:2]
    assert browser.errors() == []


def test_keyboard_navigation(browser, server):
    browser.open(server.url)
    browser.press(TAB, TAB, " ")  # opens the settings
    assert browser.run("return document.getElementById('settings').open")
    focused = []
    for _ in range(4):
        browser.press(TAB)
        focused.append(browser.run(FOCUSED_ID))
    assert focused == ["system-prompt", "temperature", "max-tokens", "api-key"]
    browser.run("document.getElementById('new-chat').focus()")
    browser.press(TAB)
    assert browser.run(FOCUSED_ID) == "messages"  # the arrow keys scroll it
    browser.press(TAB)
    assert browser.run(FOCUSED_ID) == "input"
    outline = browser.run("return getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"


def test_stop(browser, server, monkeypatch):
    """Escape and the button stop a response, and the engine ends the sequence."""
    step = GenerationBatch.step
    monkeypatch.setattr(GenerationBatch, "step", lambda batch: time.sleep(0.005) or step(batch))
    for stop in (lambda: browser.press(ESCAPE), lambda: browser.find("#stop").click()):
        browser.open(server.url)
        set_field(browser, "temperature", "0")  # a sampled text may end before it is stopped
        set_field(browser, "max-tokens", "3000")
        browser.find("#input").send_keys("the")
        browser.press(ENTER)
        browser.until("return document.querySelector('article:last-child p').textContent.length > 5")
        assert server.service.engine._has_work()
        stop()
        browser.until(IS_DONE)
        assert browser.run(STATUS) == "Stopped"
        wait_until(lambda: not server.service.engine._has_work())
    assert browser.run(FOCUSED_ID) == "input"
    assert browser.run(ERROR) is False


def test_stop_before_the_first_text(browser, server, monkeypatch):
    """The message is removed: many chat templates reject two consecutive messages of the user."""
    monkeypatch.setattr(GenerationBatch, "step", lambda batch: time.sleep(0.005) or [])
    browser.open(server.url)
    browser.find("#input").send_keys("the")
    browser.press(ENTER)
    wait_until(server.service.engine._has_work)
    browser.press(ESCAPE)
    browser.until(IS_DONE)
    assert browser.run(STATUS) == "Stopped"
    assert browser.run(TEXTS) == [] and browser.run("return messages.length") == 0
    assert browser.run("return document.getElementById('input').value") == "the"


def test_error_messages(browser, folder):
    with run_server(folder, key="sesame") as server:
        browser.open(server.url)
        assert "expected the API key" in browser.run(ERROR)
        assert browser.violations() == []
        browser.find("#api-key").send_keys("\u043a\u043b\u044e\u0447\t")
        browser.find("#new-chat").click()  # removes the message
        browser.find("#api-key").send_keys("x\t")
        browser.until(f"{ERROR}.includes('expected the API key')")
        browser.find("#api-key").clear()
        browser.find("#api-key").send_keys("sesame\t")
        browser.until("return !document.getElementById('input').disabled")
        assert browser.run(ERROR) is False
        browser.errors()  # discards the logged status 401
        browser.run("document.getElementById('input').value = 'the quick '.repeat(3000)")
        send_message(browser, "")
        assert "expected a prompt of at most 4095" in browser.run(ERROR)
        assert browser.run("return document.getElementById('input').value.length") == 30_000
        assert browser.run(TEXTS) == []
        browser.run("document.getElementById('input').value = ''")
        send_message(browser, "birds")
        assert len(browser.run(TEXTS)) == 2
    send_message(browser, "birds")
    assert browser.run(ERROR) == "The connection to the server is lost."


def test_model_without_chat_template(browser, tmp_path):
    folder = write_folder(tmp_path / "plain", chat_template=None)
    with run_server(folder) as server:
        browser.open(server.url)
        assert "no chat template" in browser.run("return document.getElementById('hint').textContent")
        set_field(browser, "temperature", "0")
        set_field(browser, "max-tokens", "6")
        send_message(browser, "the quick")
        reference = ReferenceGenerator(folder)
        assert browser.run(TEXTS) == ["the quick", reference.text(reference.tokeniser.encode("the quick"), 6)]
        assert browser.errors() == []


@pytest.mark.slow
def test_screenshot_for_the_documentation(browser):
    """Save docs/serving.png in the folder TRICYCLE_SCREENSHOTS."""
    with run_server(smollm2_file(), model_name="smollm2", model=ModelFlags(weights="exact")) as server:
        browser.open(server.url, (900, 560))
        browser.run("document.getElementById('temperature').value = '0'")
        for text in ("What is the capital of France?", "And what flows through it?"):
            browser.find("#input").send_keys(text)
            browser.press(ENTER)
            browser.until(IS_DONE, 100)
        assert "Paris" in browser.run(TEXTS)[1]
        browser.screenshot("serving")
