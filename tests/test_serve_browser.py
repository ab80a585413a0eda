"""The page of `tricycle serve` in a real browser: by keyboard, on a phone, light and dark, with nothing from elsewhere.

With TRICYCLE_SCREENSHOTS=FOLDER the tests leave pictures there.
"""

import time
from pathlib import Path

import pytest

pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")
pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from browser import DISPLAYS, each_display
from serving import Alone, serving, until
from tiny_models import smollm2_file, write_folder

from tricycle.decoding.batch import GenerationBatch

pytestmark = pytest.mark.nightly

TEXTS = "return [...document.querySelectorAll('article p')].map((one) => one.textContent)"
DONE = "return document.getElementById('log').getAttribute('aria-busy') === 'false'"
STATE = "return document.getElementById('state').textContent"
PROBLEM = "const one = document.getElementById('problem'); return one.checkVisibility() && one.textContent"
FOCUS = "return document.activeElement.id"


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_folder(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def running(folder):
    with serving(folder, length=4000) as running:
        yield running


def enter(browser, field: str, text: str) -> None:
    """Type over what stands in a field."""
    browser.run("document.getElementById('settings').open = true")
    element = browser.find(f"#{field}")
    element.clear()
    element.send_keys(text)


def say(browser, text: str) -> None:
    """By keyboard, and wait for the answer."""
    browser.find("#said").send_keys(text)
    browser.press("\ue007")
    browser.until(DONE)


@each_display
def test_the_page_is_for_everybody(browser, running, display):
    browser.open(running.url, *DISPLAYS[display])
    assert browser.run(FOCUS) == "said"
    assert browser.violations() == []
    say(browser, "the quick brown fox")
    assert browser.run(STATE) == "Answer complete"
    assert browser.errors() == [] and browser.fits() and browser.violations() == []
    background = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert (background == "rgb(25, 26, 28)") == DISPLAYS[display][1]
    browser.screenshot(f"serve, {display}")
    browser.run("document.getElementById('settings').open = true")
    assert browser.fits() and browser.violations() == []
    origins = browser.run("return performance.getEntriesByType('resource').map((one) => new URL(one.name).origin)")
    assert set(origins) == {running.url}


def test_a_conversation(browser, running, folder):
    """The server's own words, with the system's message and what was said before; a key for a new line."""
    alone = Alone(folder)
    browser.open(running.url)
    enter(browser, "temperature", "0")
    enter(browser, "length", "9")
    enter(browser, "system", "small birds")
    messages = [{"role": "system", "content": "small birds"}]
    wanted = []
    for said in ("the quick", "seven dogs\nand <b>rain</b>"):
        messages.append({"role": "user", "content": said})
        answer = alone.chat(messages, 9, repetition_penalty=1.0)
        messages.append({"role": "assistant", "content": answer})
        wanted += [said, answer]
        element = browser.find("#said")
        element.send_keys(said.replace("\n", "\ue008\ue007\ue008"))  # shift and enter
        browser.press("\ue007")
        browser.until(DONE)
    assert browser.run(TEXTS) == wanted
    assert browser.run("return document.querySelectorAll('article b').length") == 0
    browser.find("#anew").click()
    assert browser.run(TEXTS) == []
    assert browser.run(FOCUS) == "said"
    say(browser, "the quick")
    assert browser.run(TEXTS) == wanted[:2]
    assert browser.errors() == []


def test_everything_can_be_reached_by_keyboard(browser, running):
    browser.open(running.url)
    browser.press("\ue004", "\ue004", " ")  # tab, tab, and the settings open
    assert browser.run("return document.getElementById('settings').open")
    reached = []
    for _ in range(4):
        browser.press("\ue004")
        reached.append(browser.run(FOCUS))
    assert reached == ["system", "temperature", "length", "key"]
    browser.run("document.getElementById('anew').focus()")
    browser.press("\ue004")
    assert browser.run(FOCUS) == "log"  # which can be scrolled by arrows
    browser.press("\ue004")
    assert browser.run(FOCUS) == "said"
    outline = browser.run("return getComputedStyle(document.activeElement).outlineStyle")
    assert outline == "solid"


def test_an_answer_can_be_stopped(browser, running, monkeypatch):
    """By Escape, and by the button; the model writes no more of it."""
    step = GenerationBatch.step
    monkeypatch.setattr(GenerationBatch, "step", lambda batch: time.sleep(0.005) or step(batch))
    browser.open(running.url)
    enter(browser, "length", "3000")
    for stop in (lambda: browser.press("\ue00c"), lambda: browser.find("#stop").click()):
        browser.find("#said").send_keys("the")
        browser.press("\ue007")
        browser.until("return document.querySelector('article:last-child p').textContent.length > 5")
        assert running.served.engine._has_work()
        stop()
        browser.until(DONE)
        assert browser.run(STATE) == "Stopped"
        until(lambda: not running.served.engine._has_work())
    assert browser.run(FOCUS) == "said"
    assert browser.run(PROBLEM) is False


def test_what_goes_wrong_is_told(browser, folder):
    with serving(folder, key="sesame") as running:
        browser.open(running.url)
        assert "expected the server's key" in browser.run(PROBLEM)
        assert browser.violations() == []
        browser.find("#key").send_keys("sesame\t")
        browser.until("return !document.getElementById('said').disabled")
        assert browser.run(PROBLEM) is False
        browser.errors()  # a 401 is logged
        browser.run("document.getElementById('said').value = 'the quick '.repeat(3000)")
        say(browser, "")
        assert "expected a prompt of at most 4095" in browser.run(PROBLEM)
        assert browser.run("return document.getElementById('said').value.length") == 30_000
        assert browser.run(TEXTS) == []
        browser.run("document.getElementById('said').value = ''")
        say(browser, "birds")
        assert len(browser.run(TEXTS)) == 2
    say(browser, "birds")
    assert browser.run(PROBLEM) == "The connection to the server is lost."


def test_a_model_that_was_not_taught_to_talk(browser, tmp_path):
    folder = write_folder(tmp_path / "plain", chat_template=None)
    with serving(folder) as running:
        browser.open(running.url)
        assert "continues texts" in browser.run("return document.getElementById('hint').textContent")
        enter(browser, "temperature", "0")
        enter(browser, "length", "6")
        say(browser, "the quick")
        alone = Alone(folder)
        assert browser.run(TEXTS) == ["the quick", alone.text(alone.tokeniser.encode("the quick"), 6)]
        assert browser.errors() == []


@pytest.mark.slow
def test_the_picture_of_the_docs(browser):
    """docs/serving.png is what this leaves, in the folder TRICYCLE_SCREENSHOTS."""
    with serving(smollm2_file(), model_name="smollm2") as running:
        browser.open(running.url, (900, 560))
        for said in ("What is the capital of France?", "And what flows through it?"):
            browser.find("#said").send_keys(said)
            browser.press("\ue007")
            browser.until(DONE, 100)
        assert "Paris" in browser.run(TEXTS)[1]
        browser.screenshot("serving")
