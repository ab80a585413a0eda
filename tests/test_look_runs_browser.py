"""The run comparison page in a browser: without network, by keyboard, on a phone, in light and dark mode.

With TRICYCLE_SCREENSHOTS=FOLDER the tests write screenshots. docs/look-runs.png shows real runs.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from browser import DISPLAYS, Browser, each_display
from test_look import serving
from test_look_runs import write_run

from tricycle_cli.compare import Runs
from tricycle_lab.look.page import write_page

pytestmark = pytest.mark.nightly

PATHS = "return document.querySelectorAll('#chart path').length"
READOUT = "return document.getElementById('readout').innerText"
CURSOR = "return document.getElementById('cursor-value').textContent"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    place = tmp_path_factory.mktemp("runs")
    other = write_run(place / "three-layers, wider", 25, False, 1, n_layers=3, max_learning_rate=0.01)
    (other / "tokeniser.json").write_text("another")
    with (other / "metrics.jsonl").open("a") as file:
        file.write('{"step": 26, "los')
    baseline = write_run(place / "baseline")
    scored = '"induction_score": 0.25, "duplicate_token_score": 0.5, "held_out_loss"'
    lines = (baseline / "metrics.jsonl").read_text().replace('"held_out_loss"', scored)
    (baseline / "metrics.jsonl").write_text(lines)
    return [baseline, other, write_run(place / "third", 40, True, 2, beta2=0.99)]


@pytest.fixture(scope="module")
def file(folders: list[Path], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "runs.html"
    write_page(path, Runs(folders).page())
    return path.as_uri()


@each_display
def test_runs_page_is_accessible(browser: Browser, file: str, display: str) -> None:
    browser.open(file, *DISPLAYS[display])
    assert browser.errors() == []
    assert browser.run("return performance.getEntriesByType('resource').length") == 0
    assert browser.fits()
    assert browser.violations() == []
    browser.screenshot(f"runs, {display}", 1500 if "phone" not in display else 2300)


def test_page_shows_notes_curves_summary_and_samples(browser: Browser, file: str) -> None:
    browser.open(file, (320, 640))
    assert browser.fits()
    browser.open(file)
    notes = browser.find("#notes").text
    assert "bits/byte" in notes
    assert "1 damaged line" in notes
    assert browser.run("return document.querySelector('input[value=bits]').checked")
    assert browser.run(PATHS) == 9  # of each run: training loss, smoothed training loss, held-out loss
    assert "step 25 of 40" in browser.find("#summary").text
    differences = browser.find("#differences").text
    assert "n_layers" in differences
    assert "batch_size" not in differences
    assert "return <b>30</b>" in browser.find("#samples pre").text
    browser.run("const s = document.querySelector('#samples select'); s.selectedIndex = 0; s.onchange()")
    assert "return <b>10</b>" in browser.find("#samples pre").text


def test_axes_units_and_smoothing_change_the_chart(browser: Browser, file: str) -> None:
    browser.open(file)
    assert browser.run("return document.getElementById('smoothing').value") == "0.5"  # the runs are short
    readout = browser.run(READOUT)
    browser.find("input[value=seconds]").click()
    assert browser.run(CURSOR) == "20 s"
    browser.find("input[value=tokens]").click()
    assert browser.run(CURSOR).startswith("token ")
    browser.find("input[value=step]").click()
    assert browser.run(CURSOR) == "step 40"
    browser.find("input[value=nats]").click()
    assert browser.run(READOUT) != readout
    first = browser.run("return document.querySelector('#chart path').getAttribute('d')")
    for selector in ("#log-x", "#log-y"):
        browser.find(selector).click()
        assert browser.errors() == []
    assert browser.run("return document.querySelector('#chart path').getAttribute('d')") != first
    browser.run("const s = document.getElementById('smoothing'); s.value = 0; s.oninput()")
    assert browser.run(PATHS) == 6
    browser.find("#training").click()
    browser.find("#heldOut").click()
    assert browser.run(PATHS) == 0
    assert "No data" in browser.find("#trouble").text
    assert browser.violations() == []
    browser.find("#training").click()
    assert browser.run(PATHS) == 3
    browser.find("#summary input").click()
    assert browser.run(PATHS) == 2
    assert browser.errors() == []


def test_head_scores_are_drawn_for_runs_that_have_them(browser: Browser, file: str) -> None:
    browser.open(file)
    labels = browser.run("return [...document.querySelectorAll('#units label')].map((e) => e.textContent.trim())")
    assert labels[2:] == ["induction score", "duplicate token score"]
    browser.find("input[value=duplicate_token_score]").click()
    assert browser.run(PATHS) == 1
    assert "nearest duplicate token score" in browser.run(READOUT)
    assert "0.5000 at 40" in browser.run(READOUT)
    assert browser.violations() == []
    browser.find("input[value=nats]").click()
    assert browser.run(PATHS) == 9
    assert browser.errors() == []


def test_cursor_moves_by_keyboard_and_pointer(browser: Browser, file: str) -> None:
    from selenium.webdriver import ActionChains
    from selenium.webdriver.common.keys import Keys

    browser.open(file)
    assert browser.run(CURSOR) == "step 40"
    browser.run("document.getElementById('cursor').focus()")
    browser.press(Keys.HOME)
    assert browser.run(CURSOR) == "step 0"
    before = browser.run(READOUT)
    browser.press(*[Keys.PAGE_UP] * 5)
    assert browser.run(CURSOR) != "step 0"
    assert browser.run(READOUT) != before
    ActionChains(browser.driver).move_to_element(browser.find("#chart svg")).perform()
    assert 15 < int(browser.run(CURSOR).split()[1]) < 25
    in_tab_order = "return [...document.querySelectorAll('#controls input')].every((e) => e.tabIndex === 0)"
    assert browser.run(in_tab_order)


def test_a_reload_shows_new_metrics(browser: Browser, folders: list[Path]) -> None:
    with serving(Runs(folders)) as server:
        browser.open(server.address)
        assert "step 25 of 40" in browser.find("#summary").text
        with (folders[1] / "metrics.jsonl").open("a") as file:
            file.write('\n{"step": 26, "loss": 2.5, "tokens_per_second": 1000}\n')
        browser.open(server.address)
        assert "step 26 of 40" in browser.find("#summary").text
        assert browser.errors() == []
