"""The pages of `tricycle look` in a browser: without network, by keyboard, on a phone, in light and dark mode.

With TRICYCLE_SCREENSHOTS=FOLDER the tests write screenshots; those in docs/ are from `pytest -m slow` on this file.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from browser import DESKTOP, DISPLAYS, PHONE, Browser, each_display
from test_look import CONFIG, TEXT, TOKENISER, encoder_decoders, new_encoder_decoder, new_inspectable, serving
from test_measures import CORRUPTED
from test_measures import new_model as new_measured
from tiny_models import smollm2_file

from tricycle.checkpoint import save_checkpoint
from tricycle.configs.mamba import MambaConfig
from tricycle.models import GPT
from tricycle.sequences.translators import find_translators
from tricycle_cli import look
from tricycle_lab.look.graph_functions import build_graph_from_spec
from tricycle_lab.look.inspectable import InspectableStack, load_inspectable_translator
from tricycle_lab.look.interventions import Interventions
from tricycle_lab.look.page import collect_static_data, render_page, write_page
from tricycle_lab.look.server import LookServer, ViewerService

pytestmark = pytest.mark.nightly

SELECTED = "return document.querySelector('[role=option][aria-selected=true]').textContent"
STATUS = "return document.getElementById('status').textContent"
PIXEL = """
const map = document.querySelector("canvas.map");
return [...map.getContext("2d").getImageData(map.width - 3, 3, 1, 1).data];
"""
TROUBLE = "return document.getElementById('trouble').textContent"


@pytest.fixture(scope="module")
def server() -> Iterator[LookServer]:
    with serving(ViewerService([new_inspectable()], TEXT)) as server:
        yield server


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("page") / "look.html"
    inspectable = new_inspectable()
    model = collect_static_data(inspectable, inspectable.run(inspectable.encode_input(TEXT), Interventions()))
    data = {"hasServer": False, "text": TEXT, "models": [model], "command": "tricycle look"}
    write_page(path, render_page("look", "tiny", data, scripts=["experts.js"]))
    return path.as_uri()


# -------------------------------------------------------------------- accessibility
@each_display
def test_file_and_served_page_are_accessible(browser: Browser, file: str, server: LookServer, display: str) -> None:
    for name, address in (("served", server.address), ("file", file)):
        browser.open(address, *DISPLAYS[display])
        assert browser.errors() == []
        assert browser.fits()
        assert browser.violations() == []
        browser.screenshot(f"{name}, {display}")
    assert browser.run("return performance.getEntriesByType('resource').length") == 0
    background = browser.run("return getComputedStyle(document.body).backgroundColor")
    dark = DISPLAYS[display][1]
    assert (background == "rgb(22, 22, 22)") == dark
    assert browser.run(PIXEL)[:3] == ([30, 30, 30] if dark else [255, 255, 255])  # a masked key


# -------------------------------------------------------------------- standalone file
def test_standalone_file_shows_predictions_lens_and_maps(browser: Browser, file: str) -> None:
    browser.open(file, (320, 640))
    assert browser.fits()
    browser.open(file)
    assert not browser.find("#form").is_displayed()
    assert "tricycle look" in browser.find("#static").text
    options = browser.driver.find_elements("css selector", "[role=option]")
    options[4].click()
    assert browser.run(SELECTED) == options[4].text
    predictions = browser.find("[aria-label='Next-token predictions']")
    assert len(predictions.find_elements("css selector", "tbody tr")) == 10
    assert "set next" not in predictions.text
    lens = browser.find("[aria-label='Logit lens of the selected token']")
    assert len(lens.find_elements("css selector", "tbody tr")) == 4
    summary = browser.find(".frame + p")
    before = summary.text
    browser.driver.find_elements("css selector", ".heads button")[5].click()
    browser.until("return document.querySelector('.frame + p').textContent.includes('layer 2, head 1')")
    assert summary.text != before
    browser.find("input[value=scores]").click()
    assert summary.text.startswith("Scores of layer 2, head 1, from ")
    show_all = "b.textContent === 'Show all positions' && b.click()"
    browser.run(f"document.querySelectorAll('button').forEach((b) => {show_all})")
    browser.until("return document.querySelectorAll('[aria-label=\"Logit lens of all tokens\"] tbody tr').length === 4")
    browser.find("[aria-label='Residual stream'] summary").click()
    assert "kurtosis" in browser.find("details table").text
    for coloring in ("attention", "norm", "surprisal"):
        browser.run("const s = document.querySelector('.model select'); s.value = arguments[0]; s.onchange()", coloring)
    assert browser.violations() == []
    assert browser.errors() == []


def test_standalone_file_is_navigable_by_keyboard(browser: Browser, file: str) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.open(file)
    focus = "const e = document.activeElement; return e.getAttribute('role') ?? e.tagName"
    browser.press(Keys.TAB)
    assert browser.run(focus) == "SELECT"
    browser.press(Keys.TAB)
    assert browser.run(focus) == "option"
    first = browser.run(SELECTED)
    browser.press(Keys.ARROW_RIGHT, Keys.ARROW_RIGHT)
    assert browser.run(SELECTED) != first
    assert browser.run("return document.activeElement.getAttribute('aria-selected')") == "true"
    browser.press(Keys.END)
    assert browser.run("return document.activeElement === document.querySelector('[role=option]:last-child')")
    browser.run("document.querySelector('.heads [tabindex=\"0\"]').focus()")
    browser.press(Keys.ARROW_DOWN, Keys.ARROW_RIGHT)
    browser.until("return document.querySelector('.frame + p').textContent.includes('layer 1, head 1')")
    assert browser.run("return document.activeElement.getAttribute('aria-pressed')") == "true"


# -------------------------------------------------------------------- page with server
def wait_for_interventions(browser: Browser) -> str:
    return browser.until(f"const s = (() => {{ {STATUS} }})(); return s.includes('without interventions') && s")


def test_interventions_are_applied_and_reset_on_the_page(browser: Browser, server: LookServer) -> None:
    browser.open(server.address)
    status = browser.run(STATUS)
    assert status.startswith("Loss ")
    for index in range(4):
        browser.driver.find_elements("css selector", "fieldset input[type=checkbox]")[index].click()
        assert wait_for_interventions(browser)
        assert browser.run("return document.activeElement.type") == "checkbox"  # the focus is unchanged
        assert browser.run("return document.querySelector('.model select').value") == "effect"
        browser.driver.find_elements("css selector", "fieldset input[type=checkbox]")[index].click()
        browser.until(f"return (() => {{ {STATUS} }})() === {status!r}")
    browser.run("const s = document.getElementById('softmax'); s.value = 'softmax1'; s.onchange()")
    wait_for_interventions(browser)
    browser.until("return document.querySelector('.frame + p').textContent.includes('on no key')")
    browser.find("#temperature").send_keys("0")
    browser.run("document.getElementById('temperature').onchange()")
    wait_for_interventions(browser)
    browser.find("#reset").click()
    browser.until(f"return (() => {{ {STATUS} }})() === {status!r}")
    browser.run("const t = document.getElementById('temperature'); t.value = '-1'; t.onchange()")
    assert "temperature" in browser.until(TROUBLE)
    assert browser.errors() == []


def test_edited_tokens_and_texts_rerun_the_model(browser: Browser, server: LookServer) -> None:
    browser.open(server.address)
    tokens = "return [...document.querySelectorAll('[role=option]')].map((e) => e.textContent)"
    before = browser.run(tokens)
    browser.driver.find_elements("css selector", "[role=option]")[1].click()
    browser.find("form.bar input").send_keys("dog")
    browser.find("form.bar button").click()
    browser.until(f"return (() => {{ {tokens} }})().join('') !== {''.join(before)!r}")
    count = len(browser.run(tokens))
    browser.run("document.querySelector('[role=option]:last-child').click()")
    browser.until("return document.querySelectorAll('[aria-label=\"Next-token predictions\"] button').length === 10")
    browser.run("document.querySelector('[aria-label=\"Next-token predictions\"] button').click()")
    browser.until(f"return document.querySelectorAll('[role=option]').length === {count + 1}")
    for text, error in (("", "at least one character"), ("z" * 200, "1 to 40 tokens"), ("the dog", "")):
        browser.run("document.getElementById('text').value = arguments[0]", text)
        browser.find("#run").click()
        if error:
            browser.until(f"return (() => {{ {TROUBLE} }})().includes({error!r})")
        else:
            browser.until("return document.querySelector('.tokens[role=listbox]').textContent.endsWith('the dog')")
    assert browser.run(TROUBLE) == ""
    assert all("400" in line for line in browser.errors())  # the browser logs the rejected requests


MEASURED = "return [...document.querySelectorAll('.grid h3')].map((e) => e.textContent)"
FINISHED = "return document.querySelector('.grids').previousSibling.textContent.startsWith('Computed')"
CELL = """
const map = document.querySelectorAll(".grid canvas")[arguments[0]], box = map.getBoundingClientRect();
const at = { clientX: box.left + box.width * 0.99, clientY: box.top + box.height * 0.99, bubbles: true };
for (const type of ["pointermove", "click"]) map.dispatchEvent(new PointerEvent(type, at));
return map.closest(".grid").querySelector("p").textContent;
"""


def compute_measure(browser: Browser, name: str, **texts: str) -> None:
    """Choose a measure in the first panel, fill in its texts, and wait until it is computed."""
    choose = "const s = document.querySelector('[aria-label^=Measures] select'); s.value = arguments[0]; s.onchange()"
    browser.run(choose, name)
    labels = browser.driver.find_elements("css selector", "[aria-label^=Measures] label:not(:has(select))")
    shown = [label for label in labels if label.is_displayed()]
    assert [label.text.strip() for label in shown] == [label.replace("_", " ") for label in texts]
    for label, text in zip(shown, texts.values()):
        browser.run("arguments[0].querySelector('input, textarea').value = arguments[1]", label, text)
    browser.find("[aria-label^=Measures] button[type=submit]").click()
    browser.until(FINISHED)
    assert browser.run(TROUBLE) == ""


@each_display
def test_measures_are_drawn_as_heat_maps(browser: Browser, display: str) -> None:
    prompts = {"Corrupted_prompt": CORRUPTED, "Answer": "a", "Other_answer": "b"}
    with serving(ViewerService([new_measured()], TEXT)) as served:
        browser.open(served.address, *DISPLAYS[display])
        compute_measure(browser, "patching", **prompts)
        expected = ["residual stream after each layer", "attention layers", "MLPs", "heads"]
        assert browser.run(MEASURED) == expected
        right = "return document.querySelector('[aria-label^=Measures] select').getBoundingClientRect().right"
        assert browser.fits() and browser.run(right) <= DISPLAYS[display][0][0]
        browser.run("document.querySelectorAll('.grid details').forEach((e) => (e.open = true))")
        assert browser.violations() == []
        browser.screenshot(f"measures, {display}", 2600)
        text = browser.run(CELL, 0)
        assert text.startswith("layer 2, position ") and ": 1" in text  # the last token after the last layer
        assert browser.run("return document.querySelector('[role=option]:last-child').ariaSelected") == "true"
        assert browser.run(CELL, 3).startswith("layer 2, head 1: ")
        browser.until("return document.querySelector('.frame + p').textContent.includes('layer 2, head 1')")
        browser.driver.find_elements("css selector", "[aria-label='Strongest values of heads'] button")[0].click()
        compute_measure(browser, "tuned_lens")
        assert "most probable" in browser.run(CELL, 0)
        compute_measure(browser, "features")
        assert browser.run(CELL, 0).startswith("feature ")
        compute_measure(browser, "attribution", Answer="a", Other_answer="")
        assert browser.run(MEASURED) == ["heads", "MLPs and attention biases"]
        assert browser.fits()
        assert browser.errors() == []


def test_steering_and_errors_of_measures_are_shown(browser: Browser) -> None:
    with serving(ViewerService([new_measured()], TEXT)) as served:
        browser.open(served.address)
        status = browser.run(STATUS)
        browser.run("const s = document.getElementById('steering'); s.value = '2'; s.onchange()")
        wait_for_interventions(browser)
        browser.find("#reset").click()
        browser.until(f"return (() => {{ {STATUS} }})() === {status!r}")
        browser.run("document.querySelector('[aria-label^=Measures] select').value = 'patching'")
        browser.find("[aria-label^=Measures] button[type=submit]").click()
        assert "at least one character" in browser.until(TROUBLE)
        assert browser.violations() == []


def test_a_table_of_all_heads_of_a_large_model_is_drawn(browser: Browser, server: LookServer) -> None:
    browser.open(server.address)
    browser.run("""
        const values = Array.from({ length: 1024 }, () => Array(128).fill(-0.5)), names = (n) => Array(n).fill("x");
        const labels = { rows: names(1024), columns: names(128), rowName: "layer", columnName: "position" };
        panels[0].measureView.showTable({ title: "large", values, ...labels });
    """)
    assert "Scale: \u22120.5 to 0.5." in browser.find("[aria-label=large]").text


def test_numbers_that_are_not_finite_are_dashes(browser: Browser) -> None:
    inspectable = new_inspectable()
    inspectable.model.blocks[1].mlp.up.weights.array[0, 0] = float("nan")
    with serving(ViewerService([inspectable], TEXT)) as server:
        browser.open(server.address)
        assert browser.run(STATUS) == "Loss \u2013 nats/token."
        assert ": probability \u2013, rank 1." in browser.run(
            "return document.querySelector('.part:nth-child(2)').textContent"
        )


def test_two_models_are_shown_side_by_side(browser: Browser) -> None:
    models = [new_inspectable(), new_encoder_decoder(encoder_decoders()["norm first, tied"])]
    with serving(ViewerService(models, "the cat => the dog")) as served:
        browser.open(served.address)
        titles = browser.run("return [...document.querySelectorAll('.model h2')].map((e) => e.textContent)")
        assert titles == ["tiny", "translator"]
        tops = browser.run("return [...document.querySelectorAll('.model')].map((e) => e.offsetTop)")
        assert tops[0] == tops[1]
        assert browser.violations() == []
        browser.open(served.address, PHONE)
        assert browser.fits()
        assert browser.errors() == []


@pytest.mark.parametrize("kind", ["transformer", "additive, before"])
def test_cross_attention_is_shown_with_source_tokens(browser: Browser, kind: str) -> None:
    with serving(ViewerService([new_encoder_decoder(encoder_decoders()[kind])], "the cat => the dog")) as served:
        browser.open(served.address)
        names = browser.run("return [...document.querySelectorAll('.heads .name')].map((e) => e.textContent)")
        last = len(browser.driver.find_elements("css selector", ".heads button")) - 1
        assert names[-1] == ("decoder layer 1 cross" if kind == "transformer" else "attention")
        # the page shows cross-attention first
        assert "cross" in browser.find(".frame + p").text or kind != "transformer"
        browser.run(f"document.querySelectorAll('.heads button')[{last}].click()")
        source_tokens = "document.querySelectorAll('[aria-label=\"Source tokens\"] > span')"
        browser.until(f"return [...{source_tokens}].some((e) => e.style.background)")
        spans = "document.querySelectorAll('.frame:has(canvas.map) .BOX span')"
        labels = f"return [...{spans}].map((e) => e.textContent).join(' ')"
        assert browser.run(labels.replace("BOX", "rows")).startswith("<begin> the ␣ d")
        assert browser.run(labels.replace("BOX", "columns")).replace(" ", "") == "thecat"
        assert browser.violations() == []
        assert browser.errors() == []
        browser.screenshot(f"alignment, {kind}")


@each_display
def test_mixtures_and_sinks_are_shown(browser: Browser, display: str) -> None:
    config = replace(CONFIG, n_experts=5, n_active_experts=2, softmax="sink")
    with serving(ViewerService([new_inspectable(config)], TEXT)) as server:
        browser.open(server.address, *DISPLAYS[display])
        rows = "document.querySelectorAll('[aria-label=\"Experts with the highest loads\"] tbody tr')"
        browser.until(f"return {rows}.length === 5")
        browser.run("const s = document.querySelector('[aria-label=Experts] select'); s.value = 2; s.onchange()")
        label = "return document.querySelector('[aria-label=Experts] canvas.map').getAttribute('aria-label')"
        browser.until(f"return (() => {{ {label} }})().includes('layer 2 mlp: 5 experts')")
        browser.run("document.querySelector('[aria-label=Experts] details').open = true")
        browser.until("return document.querySelector('[aria-label=Experts] details p').textContent.startsWith('Rows')")
        browser.until("return !document.querySelector('option[value=unassigned]').hidden")
        assert "no key" in browser.find("[aria-label='Keys with the highest attention weights']").text
        assert browser.fits() and browser.violations() == [] and browser.errors() == []
        browser.screenshot(f"mixture, {display}", 2600)


def test_hybrids_show_maps_of_mixers_and_half_lives(browser: Browser) -> None:
    fields = {"vocab_size": TOKENISER.n_vocab, "embedding_dim": 16, "n_heads": 2, "head_size": 8, "context_window": 40}
    config = MambaConfig(**fields, n_layers=2, state_size=4, attention_layers=(1,))
    with serving(ViewerService([InspectableStack(GPT(config), TOKENISER, "hybrid")], TEXT)) as server:
        browser.open(server.address)
        summary = "return [...document.querySelectorAll('.part .quiet')].map((p) => p.textContent).join()"
        assert "The state before it is multiplied by" in browser.run(summary)
        browser.run(
            "const box = [...document.querySelectorAll('select')].find((one) => one.value === 'entropy');"
            "box.value = 'halfLife'; box.onchange();"
        )
        browser.until(
            "return [...document.querySelectorAll('.heads button')].some((b) => b.title.includes('half-life'))"
        )
        browser.find(".heads button:last-of-type").click()
        browser.until("return document.querySelector('canvas.map').ariaLabel.includes('layer 1, head 1')")
        assert "multiplied by" not in browser.run(summary)
        assert browser.errors() == []


def test_map_has_token_labels_if_there_is_room(browser: Browser, server: LookServer) -> None:
    for text, size, expected in (("the dog", DESKTOP, True), ("the cat " * 3, PHONE, True), ("z" * 38, PHONE, False)):
        browser.open(server.address, size)
        browser.run("document.getElementById('text').value = arguments[0]", text)
        browser.find("#run").click()
        shown = "document.querySelector('.tokens[role=listbox]').textContent"
        browser.until(f"return {shown}.includes({text.strip()[-4:]!r})")
        browser.until("return document.getElementById('status').textContent.startsWith('Loss')")
        for box in ("rows", "columns"):
            assert browser.find(f".frame .{box}").is_displayed() == expected, (text, box)
        height = browser.run("const c = document.querySelector('canvas.map'); return c.clientWidth - c.clientHeight")
        assert abs(height) <= 2
        assert browser.fits()
    assert browser.errors() == []


def test_page_reports_a_stopped_server_and_keeps_its_results(browser: Browser, tmp_path: Path) -> None:
    checkpoint = tmp_path / "best.safetensors"
    save_checkpoint(checkpoint, new_inspectable().model, TOKENISER)
    words = [sys.executable, "-m", "tricycle", "look", str(checkpoint), TEXT, "--no-browser"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as program:
        try:
            browser.open(program.stdout.readline().strip())
            browser.until("return document.querySelectorAll('.heads button[title*=entropy]').length === 6")
        finally:
            program.kill()
    browser.find("#run").click()
    assert "The server does not respond" in browser.until(TROUBLE)
    assert len(browser.driver.find_elements("css selector", "[role=option]")) > 5  # the results remain
    assert browser.violations() == []


# -------------------------------------------------------------------- gradients
@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("graph") / "graph.html"
    write_page(path, render_page("graph", "Gradients of attention", build_graph_from_spec("attention")))
    return path.as_uri()


@each_display
def test_graph_is_accessible(browser: Browser, graph: str, display: str) -> None:
    browser.open(graph, *DISPLAYS[display])
    assert browser.errors() == []
    assert browser.run("return performance.getEntriesByType('resource').length") == 0
    assert browser.fits()
    for _ in range(3):
        browser.find("#next").click()
    assert browser.violations() == []
    browser.screenshot(f"graph, {display}")


def test_backward_pass_can_be_stepped_through(browser: Browser, graph: str) -> None:
    from selenium.webdriver.common.keys import Keys

    browser.open(graph)
    grads = "return [...document.querySelectorAll('svg .grad')].filter((e) => e.textContent).length"
    assert browser.run(grads) == 0
    assert not browser.find("#previous").is_enabled()
    counts = []
    for _ in range(7):
        browser.find("#next").click()
        counts.append(browser.run(grads))
    assert counts == sorted(counts)
    assert counts[0] == 1
    assert counts[-1] == 9
    assert browser.run(STATUS) == "Backward pass: all gradients are computed."
    assert not browser.find("#next").is_enabled()
    browser.find("#previous").click()
    assert "Step 6 of 6" in browser.run(STATUS)
    browser.find("#first").click()
    assert browser.run(grads) == 0
    browser.run("document.querySelector('svg [role=button]').focus()")
    browser.press(Keys.ENTER)
    assert "input, requires a gradient" in browser.find("#node").text
    browser.press("n", "n", "n")
    assert "softmax" in browser.find("#node").text
    assert "tricycle/functions.py:" in browser.find("#node").text
    assert browser.errors() == []


# -------------------------------------------------------------------- softmax comparison
@each_display
def test_softmax_comparison_is_accessible(browser: Browser, tmp_path: Path, display: str) -> None:
    runs = [[[3.0, 2.5, 2.25], [3.1, 2.6, 2.4]], [[3.0, 2.4, 2.2], [3.2, 2.7, 2.3]]]
    common = {"spread": 0.1, "ms": 20.5}
    rows = [{"name": n, "losses": x, "mean": x[0][-1], **common} for n, x in zip(("Mine", "softmax"), runs)]
    about = {"own": "Mine", "file": "mine.py", "source": "class Mine(RowSoftmax):\n    …", "seeds": 2, "minutes": 1.5}
    data = {**about, "shape": "2 layers", "steps": [1, 2, 3], "softmaxes": rows}
    path = tmp_path / "softmax.html"
    write_page(path, render_page("bench", "Mine", data))
    browser.open(path.as_uri(), *DISPLAYS[display])
    assert browser.errors() == []
    assert browser.fits()
    assert browser.violations() == []
    assert len(browser.driver.find_elements("css selector", "polyline")) == 4
    assert "-0.05" in browser.find("#table").text
    browser.screenshot(f"bench, {display}")


@pytest.mark.slow
def test_look_benchmark_prints_its_table(browser: Browser, tmp_path: Path) -> None:
    model = new_inspectable(replace(CONFIG, context_window=600)).model
    save_checkpoint(tmp_path / "best.safetensors", model, TOKENISER)
    words = ["-m", "benchmarks.look", str(tmp_path / "best.safetensors"), "--tokens", "60", "--times", "2"]
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    assert len([line for line in done.stdout.splitlines() if line.startswith("| ")]) == 7
    assert "show the first view" in done.stdout


# -------------------------------------------------------------------- pretrained models, screenshots
SENTENCE = "The keys to the old cabinet in the kitchen were on the table, because the cook had left"


@pytest.mark.slow
def test_smollm2_page_shows_all_heads_and_fits_a_phone(browser: Browser) -> None:
    pytest.importorskip("gguf")
    path = str(smollm2_file())
    model = look.load_inspectable(look.Arguments(path), path)
    model.title = "smollm2"
    with serving(ViewerService([model], SENTENCE)) as served:
        browser.open(served.address, (1440, 900))
        browser.until("return document.querySelectorAll('.heads button[title*=entropy]').length === 270", 120)
        assert browser.run("return document.querySelectorAll('[role=option]').length") == 19
        browser.run("document.querySelectorAll('[role=option]')[9].click()")
        browser.run("document.querySelectorAll('.heads button')[8 * 9 + 4].click()")
        browser.until("return document.querySelector('.frame + p').textContent.includes('layer 8, head 4')")
        lens = "[aria-label='Logit lens of the selected token']"
        browser.until(f'return document.querySelectorAll("{lens} tbody tr").length === 31')
        browser.screenshot("look", 960)
        browser.run("document.querySelector('fieldset input[type=checkbox]').click()")
        wait_for_interventions(browser)
        browser.open(served.address, PHONE, dark=True)
        assert browser.fits()
        browser.until("return document.querySelectorAll('.heads button[title*=entropy]').length === 270", 120)
        browser.screenshot("look-phone", 1250)
        assert browser.errors() == []


@pytest.mark.slow
def test_translator_page_shows_cross_attention_over_the_source(browser: Browser) -> None:
    """Use TRICYCLE_TRANSLATOR, or the result of `python -m experiments.translation --model transformer`."""
    paths = find_translators(os.environ.get("TRICYCLE_TRANSLATOR", "runs/translation"))
    if not paths:
        pytest.skip("no translator has been trained here")
    text = "A little girl in a red dress is playing with a dog."
    with serving(ViewerService([load_inspectable_translator(paths[0])], text)) as served:
        browser.open(served.address, (1440, 900))
        browser.until("return document.querySelectorAll('.heads button:not([title*=entropy])').length === 0", 60)
        browser.find(".heads button[title^='decoder layer 1 cross, head 3']").click()
        browser.until("return document.querySelector('.frame + p').textContent.includes('layer 1 cross, head 3')")
        browser.run("document.querySelectorAll('.tokens[role=listbox] [role=option]')[5].click()")
        browser.until("return document.querySelectorAll('[aria-label=\"Next-token predictions\"] button').length")
        assert browser.find(".frame .columns").text.split()[:3] == ["A", "little", "girl"]
        assert browser.violations() == []
        browser.screenshot("look-alignment", 1000)
        assert browser.errors() == []
