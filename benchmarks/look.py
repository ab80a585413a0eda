"""Response times of `tricycle look` in a browser (`python -m benchmarks.look MODEL`).

The benchmark starts the command in a separate process, opens its page in headless Chromium, and measures the time from
a click until the page shows the resulting map, tokens and loss. It needs Chromium, chromedriver and selenium.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

TEXT = (
    "The keys to the old cabinet in the kitchen were on the table, because the cook had left them there when he went "
    "out into the garden to look for some parsley, which he wanted for the soup. "
)
FLAGS = "--headless=new --no-sandbox --disable-gpu --disable-dev-shm-usage --disable-background-networking".split()
# Runs an action on the page, and returns the milliseconds until the page has drawn its result.
TIMED_ACTION = """
const done = arguments[arguments.length - 1], start = performance.now();
const act = () => { ACT };
act();
const busy = () => document.getElementById("status").textContent.endsWith("…");
const end = () => done(performance.now() - start);
const wait = () => requestAnimationFrame(busy() ? wait : end);
setTimeout(wait, 1);
"""
ABLATE_HEAD = "const p = panels[0]; p.ablatedHeads.add(p.trace.attentionLayers[{layer}].name + '/{head}'); p.rerun()"
SET_TEMPERATURE = "const t = document.getElementById('temperature'); t.value = {value}; t.onchange()"
REPLACE_TOKEN = (
    "panels[0].selectToken({place}); const f = document.querySelector('form.bar');"
    "f.querySelector('input').value = ' {text}'; f.requestSubmit()"
)
UNDO = "document.getElementById('reset').click()"
SUBMIT = "document.getElementById('form').requestSubmit()"


def main() -> int:
    """Parse sys.argv, measure the page in headless Chromium, print the seconds of each action, and return 0."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="model of `tricycle look`")
    parser.add_argument("--weights", default="float32")
    parser.add_argument("--tokens", type=int, default=256, help="approximate length of the text")
    parser.add_argument("--times", type=int, default=3, help="repeats of each action")
    settings = parser.parse_args()
    text = " ".join((TEXT * (1 + settings.tokens // 39)).split()[: round(settings.tokens / 1.075)])
    with headless_browser() as driver, look_server(settings.model, text, settings.weights) as (address, loading):
        print(f"start the command, until it prints the address: {loading:.1f} s")
        for title in ("show the first view in an open browser", "show the view again"):
            start = time.perf_counter()
            driver.get(address)
            wait_until(driver, "return document.body.dataset.ready")
            print(f"{title}: {time.perf_counter() - start:.2f} s")
        n_tokens, n_layers = driver.execute_script(
            "return [panels[0].trace.ids.length, panels[0].trace.attentionLayers.length]"
        )
        print(
            f"\n{n_tokens} tokens, {n_layers} layers; seconds from the click, median and slowest of {settings.times}\n"
        )
        for title, actions in page_actions(n_layers, n_tokens, settings.times).items():
            seconds = [time_action(driver, act) for act in actions]
            print(f"| {title} | {statistics.median(seconds):.2f} | {max(seconds):.2f} |", flush=True)
    return 0


def page_actions(n_layers: int, n_tokens: int, times: int) -> dict[str, list[str]]:
    """Return {title: `times` JavaScript actions}; each repeat differs, so that no result is cached."""
    layers = {"first": 0, "middle": n_layers // 2, "last": n_layers - 1}
    actions = {}
    for name, layer in layers.items():
        actions[f"disable a head of the {name} layer"] = [
            ABLATE_HEAD.format(layer=layer, head=head) for head in range(times)
        ]
    actions["change the softmax temperature"] = [SET_TEMPERATURE.format(value=0.5 + i / 10) for i in range(times)]
    places = {"at the beginning": 1, "in the middle": n_tokens // 2, "at the end": n_tokens - times - 1}
    for name, place in places.items():
        actions[f"replace a token {name}"] = [REPLACE_TOKEN.format(place=place + i, text="dog") for i in range(times)]
    return actions


def time_action(driver: Any, action: str) -> float:
    """Return the seconds until the page shows an action's result, and undo it; ValueError for an error on it."""
    seconds = driver.execute_async_script(TIMED_ACTION.replace("ACT", action)) / 1000
    message = driver.execute_script("return document.getElementById('trouble').textContent")
    if message:
        raise ValueError(f"expected no error on the page, got: {message}")
    driver.execute_async_script(TIMED_ACTION.replace("ACT", UNDO))
    driver.execute_async_script(TIMED_ACTION.replace("ACT", SUBMIT))
    return float(seconds)


@contextmanager
def look_server(model: str, text: str, weights: str) -> Iterator[tuple[str, float]]:
    """Yield (page address of a new `tricycle look`, seconds until printed), then terminate it; ValueError if none."""
    command = [sys.executable, "-m", "tricycle", "look", model, text, "--no-browser", "--weights", weights]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().strip()
            if not address.startswith("http"):
                raise ValueError(f"expected an address, got {address!r}")
            yield address, time.perf_counter() - start
        finally:
            process.terminate()


@contextmanager
def headless_browser() -> Iterator[Any]:
    """Run headless Chromium in a context that yields its selenium driver and then quits it."""
    from selenium import webdriver

    options = webdriver.ChromeOptions()
    names = ("chromium", "chromium-browser", "google-chrome")
    options.binary_location = next(filter(None, map(shutil.which, names)), "")
    for flag in FLAGS:
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


def wait_until(driver: Any, script: str, seconds: float = 60) -> Any:
    """Run a JavaScript every 20 ms until its value is true, and return it; ValueError after `seconds`.

    Raises:
        ValueError: no true value within `seconds`.
    """
    end = time.monotonic() + seconds
    while not (value := driver.execute_script(script)):
        if time.monotonic() > end:
            raise ValueError(f"the page was not ready within {seconds:.0f} s")
        time.sleep(0.02)
    return value


if __name__ == "__main__":
    raise SystemExit(main())
