"""The page of `tricycle export --html` in a browser: without network, by keyboard, on a phone, in light and dark mode.

With TRICYCLE_SCREENSHOTS=FOLDER the tests write screenshots.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import DISPLAYS, Browser, each_display
from test_models import lively
from test_standalone import CONFIG, TOKENISER

from benchmarks.standalone import export_random_model, measure
from tricycle.checkpoint import save_checkpoint
from tricycle_cli import export
from tricycle_cli import generate as generate_command

pytestmark = pytest.mark.nightly

STATUS = "return document.getElementById('status').textContent"
TROUBLE = "return document.getElementById('trouble').textContent"
IDS = "return tokens.map(({ id }) => id)"
TEXT = "return tokens.map(({ text }) => text).join('')"
SELECTED = "return [...document.querySelectorAll('[role=option]')].findIndex((e) => e.ariaSelected === 'true')"
N_COLORS = """
const canvas = document.querySelector(arguments[0]);
return new Set(canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height).data).size;
"""
GREEDY = {"temperature": 0, "length": 64, "seed": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "a <b> & <!-- run"  # a name with a slash would be two folders
    save_checkpoint(folder / "best.safetensors", lively(CONFIG), TOKENISER)
    return folder


@pytest.fixture(scope="module")
def file(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "run.html"
    export.main([str(folder), "--html", str(path)])
    return path.as_uri()


def generate(browser: Browser, prompt: str, **values: float) -> str:
    """Fill in the form, wait for the text, and return the status."""
    for name, value in {"prompt": prompt, **GREEDY, **values}.items():
        browser.run("document.getElementById(arguments[0]).value = arguments[1]", name, value)
    browser.find("#generate").click()
    return finished(browser)


def finished(browser: Browser) -> str:
    browser.until("return document.body.dataset.busy === 'false'")
    browser.until("return elements.length === tokens.length")  # they are drawn
    return browser.run(STATUS)


def test_texts_equal_those_of_the_command(
    browser: Browser, folder: Path, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    browser.open(file)
    assert browser.find("h1").text == folder.name == browser.driver.title
    for prompt, temperature in (("the cat", 0.0), ("</script><b>", 0.0), ("ran", 0.9)):
        status = generate(browser, prompt, temperature=temperature)
        flags = ["--temperature", str(temperature), "--length", "64", "--seed", "3", "--weights", "int8"]
        generate_command.main([str(folder), prompt, *flags])
        text = capsys.readouterr().out
        assert browser.run(TEXT + ".replaceAll('<|endoftext|>', '')") == text.removesuffix("\n")
        assert "64 tokens" in status and "seed 3" in status
    assert browser.errors() == []


@each_display
def test_page_is_accessible(browser: Browser, file: str, display: str) -> None:
    browser.open(file, *DISPLAYS[display])
    assert browser.violations() == []
    generate(browser, "the cat")
    browser.find("summary").click()
    assert browser.fits()
    assert browser.violations() == []
    assert browser.errors() == []
    assert browser.run("return performance.getEntriesByType('resource').length") == 0
    browser.screenshot(f"standalone, {display}", 1500 if "phone" not in display else 2600)
    browser.open(file, (320, 640))
    assert browser.fits()


def test_alternatives_are_shown_and_continue_the_text(browser: Browser, file: str) -> None:
    browser.open(file)
    generate(browser, "the cat")
    ids = browser.run(IDS)
    browser.driver.find_elements("css selector", "[role=option]")[9].click()
    assert browser.run(SELECTED) == 9
    table = browser.find("#alternatives")
    assert len(table.find_elements("css selector", "tbody tr")) in (8, 9)
    assert "← actual" in table.text
    other = browser.run("return tokens[9].top.find(({ id }) => id !== tokens[9].id).id")
    table.find_element("css selector", "button").click()
    finished(browser)
    again = browser.run(IDS)
    assert again[:10] == [*ids[:9], other]
    assert len(again) == 10 + 64


def test_hovered_token_is_shown_until_the_pointer_leaves(browser: Browser, file: str) -> None:
    from selenium.webdriver import ActionChains

    browser.open(file)
    generate(browser, "the cat", length=20)
    element = browser.driver.find_elements("css selector", "[role=option]")[5]
    ActionChains(browser.driver).move_to_element(element).perform()
    assert "at position 5" in browser.find("#token-summary").text
    ActionChains(browser.driver).move_to_element(browser.find("h1")).perform()
    assert f"at position {len(browser.run(IDS)) - 1}" in browser.find("#token-summary").text


def test_heads_and_tokens_are_selected_by_keyboard(browser: Browser, file: str) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.open(file)
    generate(browser, "the cat", length=20)
    browser.run("document.querySelector('[role=option][tabindex=\"0\"]').focus()")
    browser.press(Keys.HOME, Keys.ARROW_RIGHT)
    assert browser.run(SELECTED) == 1
    browser.run("document.querySelector('.heads [tabindex=\"0\"]').focus()")
    browser.press(Keys.ARROW_DOWN, Keys.ARROW_RIGHT)
    assert browser.find("#map-heading").text == "Attention map of layer 1, head 1"
    assert browser.run("return document.activeElement.ariaPressed") == "true"
    assert len(browser.driver.find_elements("css selector", ".heads canvas")) == CONFIG.n_layers * CONFIG.n_heads
    before = browser.run("return document.querySelector('[role=option]').style.background")
    browser.run("coloring.value = 'attention'; coloring.onchange()")
    assert browser.run("return document.querySelector('[role=option]').style.background") != before
    for selector in ("#map", ".heads canvas"):
        assert browser.run(N_COLORS, selector) > 5


def test_generation_stops_and_errors_are_shown(browser: Browser, file: str) -> None:
    browser.open(file)
    browser.run("document.getElementById('length').value = 5000; form.requestSubmit()")
    browser.until("return tokens.length > 20 && ($('stop').click(), true)")
    assert "stopped after" in browser.run(STATUS)
    n_tokens = len(browser.run(IDS))
    generate(browser, "x " * 30)
    assert "60 tokens" in browser.run(TROUBLE)
    assert n_tokens < 5000
    assert "2 tokens" in generate(browser, "the cat", length=2)
    assert browser.run(TROUBLE) == ""
    browser.run("document.getElementById('length').value = 0; form.requestSubmit()")
    assert browser.run("return document.getElementById('length').validity.rangeUnderflow")


def test_laptop_preset_has_five_megabytes_and_fifty_tokens_per_second(browser: Browser, tmp_path: Path) -> None:
    path = export_random_model(tmp_path)
    assert path.stat().st_size <= 5e6
    speeds = measure(browser.driver, path.as_uri(), 100, 3)
    assert max(speeds) >= 50, speeds
