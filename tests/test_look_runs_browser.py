"""The page that compares runs, in a real browser: without a network, by keyboard, on a phone, light and dark.

With TRICYCLE_SCREENSHOTS=FOLDER the tests leave pictures there; that in docs/ is of real runs.
"""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from browser import LOOKS, Browser, each_look
from test_look_runs import write_run

from tricycle_cli.compare import Runs
from tricycle_lab.look.page import write_page
from tricycle_lab.look.server import LookServer

pytestmark = pytest.mark.nightly

PATHS = "return document.querySelectorAll('#chart path').length"
READ = "return document.getElementById('readout').innerText"
AT = "return document.getElementById('at').textContent"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("runs")
    other = write_run(place / "three-layers, wider", 25, False, 1, n_layers=3, max_learning_rate=0.01)
    (other / "tokeniser.json").write_text("another")
    with (other / "metrics.jsonl").open("a") as file:
        file.write('{"step": 26, "los')
    return [write_run(place / "baseline"), other, write_run(place / "third", 40, True, 2, beta2=0.99)]


@pytest.fixture(scope="module")
def file(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "runs.html"
    write_page(path, Runs(folders).page())
    return path.as_uri()


@each_look
def test_it_is_for_everybody(browser: Browser, file: str, way: str) -> None:
    browser.open(file, *LOOKS[way])
    assert browser.errors() == []
    assert browser.run("return performance.getEntriesByType('resource').length") == 0
    assert browser.fits()
    assert browser.violations() == []
    browser.picture(f"runs, {way}", 1500 if "phone" not in way else 2300)


def test_a_narrow_window(browser: Browser, file: str) -> None:
    browser.open(file, (320, 640))
    assert browser.fits()


def test_what_it_shows(browser: Browser, file: str) -> None:
    browser.open(file)
    notes = browser.find("#notes").text
    assert "bits a byte do" in notes
    assert "a damaged line of metrics.jsonl was left out" in notes
    assert browser.run("return document.querySelector('input[value=bits]').checked")
    assert browser.run(PATHS) == 9  # of each run: as it was, smoothed, held out
    assert "step 25 of 40" in browser.find("#figures").text
    differences = browser.find("#differences").text
    assert "n_layers" in differences
    assert "batch_size" not in differences
    assert "return <b>30</b>" in browser.find("#samples pre").text
    browser.run("const s = document.querySelector('#samples select'); s.selectedIndex = 0; s.onchange()")
    assert "return <b>10</b>" in browser.find("#samples pre").text


def test_axes_units_and_smoothing(browser: Browser, file: str) -> None:
    browser.open(file)
    assert browser.run("return document.getElementById('smoothing').value") == "0.5"  # the runs are short
    whole = browser.run(READ)
    browser.find("input[value=seconds]").click()
    assert browser.run(AT) == "20 s"
    browser.find("input[value=tokens]").click()
    assert browser.run(AT).startswith("token ")
    browser.find("input[value=step]").click()
    assert browser.run(AT) == "step 40"
    browser.find("input[value=nats]").click()
    assert browser.run(READ) != whole
    first = browser.run("return document.querySelector('#chart path').getAttribute('d')")
    for selector in ("#log-x", "#log-y"):
        browser.find(selector).click()
        assert browser.errors() == []
    assert browser.run("return document.querySelector('#chart path').getAttribute('d')") != first
    browser.run("const s = document.getElementById('smoothing'); s.value = 0; s.oninput()")
    assert browser.run(PATHS) == 6
    browser.find("#training").click()
    browser.find("#held_out").click()
    assert browser.run(PATHS) == 0
    assert "nothing to draw" in browser.find("#trouble").text
    assert browser.violations() == []
    browser.find("#training").click()
    assert browser.run(PATHS) == 3
    browser.find("#figures input").click()
    assert browser.run(PATHS) == 2
    assert browser.errors() == []


def test_reading_by_keyboard_and_by_pointer(browser: Browser, file: str) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    browser.open(file)
    assert browser.run(AT) == "step 40"
    browser.run("document.getElementById('place').focus()")
    browser.press(Keys.HOME)
    assert browser.run(AT) == "step 0"
    before = browser.run(READ)
    browser.press(*[Keys.PAGE_UP] * 5)
    assert browser.run(AT) != "step 0"
    assert browser.run(READ) != before
    ActionChains(browser.driver).move_to_element(browser.find("#chart svg")).perform()
    assert 15 < int(browser.run(AT).split()[1]) < 25
    steps = "return [...document.querySelectorAll('#controls input')].every((e) => e.tabIndex === 0)"
    assert browser.run(steps)


def test_a_served_page_grows_with_its_runs(browser: Browser, folders: list[Path]) -> None:
    server = LookServer(Runs(folders))
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    browser.open(server.address)
    assert "step 25 of 40" in browser.find("#figures").text
    with (folders[1] / "metrics.jsonl").open("a") as file:
        file.write('\n{"step": 26, "loss": 2.5, "tokens_per_second": 1000}\n')
    browser.open(server.address)
    assert "step 26 of 40" in browser.find("#figures").text
    assert browser.errors() == []
    server.shutdown()
    server.server_close()
