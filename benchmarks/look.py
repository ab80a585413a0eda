"""How long `tricycle look` lets one wait, in a real browser: python -m benchmarks.look MODEL

Starts the command in a process of its own, opens its page in a headless Chromium and clicks: from the click until the
page shows what came of it, map, tokens and loss. Needs Chromium with its driver, and selenium.
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
# Does something on the page, and says after how many milliseconds it has drawn what came of it.
WAIT = """
const done = arguments[arguments.length - 1], began = performance.now();
const act = () => { ACT };
act();
const busy = () => document.getElementById("status").textContent.endsWith("…");
const end = () => done(performance.now() - began);
const wait = () => requestAnimationFrame(busy() ? wait : end);
setTimeout(wait, 1);
"""
HEAD = "const p = panels[0]; p.ablatedHeads.add(p.trace.attentionLayers[{layer}].name + '/{head}'); p.rerun()"
TEMPERATURE = "const t = document.getElementById('temperature'); t.value = {value}; t.onchange()"
TOKEN = (
    "panels[0].selectToken({place}); const f = document.querySelector('form.bar');"
    "f.querySelector('input').value = ' {text}'; f.requestSubmit()"
)
UNDO = "document.getElementById('reset').click()"
READ = "document.getElementById('form').requestSubmit()"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="as `tricycle look` takes it")
    parser.add_argument("--weights", default="float32")
    parser.add_argument("--tokens", type=int, default=256, help="of the text, about")
    parser.add_argument("--times", type=int, default=3, help="that each change is made")
    settings = parser.parse_args()
    text = " ".join((TEXT * (1 + settings.tokens // 39)).split()[: round(settings.tokens / 1.075)])
    with headless_browser() as driver, look_server(settings.model, text, settings.weights) as (address, loading):
        print(f"the command, until it prints the address: {loading:.1f} s")
        for when in ("from there to the first view, the browser being open", "to the view when it is opened again"):
            began = time.perf_counter()
            driver.get(address)
            wait_until(driver, "return document.body.dataset.ready")
            print(f"{when}: {time.perf_counter() - began:.2f} s")
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
    """What is done, each time to another part, so that nothing was computed before."""
    layers = {"first": 0, "middle": n_layers // 2, "last": n_layers - 1}
    found = {}
    for name, layer in layers.items():
        found[f"a head of the {name} layer"] = [HEAD.format(layer=layer, head=head) for head in range(times)]
    found["the temperature"] = [TEMPERATURE.format(value=0.5 + i / 10) for i in range(times)]
    places = {"a token at the beginning": 1, "in the middle": n_tokens // 2, "at the end": n_tokens - times - 1}
    for name, place in places.items():
        found[name] = [TOKEN.format(place=place + i, text="dog") for i in range(times)]
    return found


def time_action(driver: Any, act: str) -> float:
    """Seconds until an action shows; then all is as it was."""
    seconds = driver.execute_async_script(WAIT.replace("ACT", act)) / 1000
    trouble = driver.execute_script("return document.getElementById('trouble').textContent")
    if trouble:
        raise ValueError(f"the page says: {trouble}")
    driver.execute_async_script(WAIT.replace("ACT", UNDO))
    driver.execute_async_script(WAIT.replace("ACT", READ))
    return float(seconds)


@contextmanager
def look_server(model: str, text: str, weights: str) -> Iterator[tuple[str, float]]:
    """The address of the page, and after how many seconds it was there."""
    words = [sys.executable, "-m", "tricycle", "look", model, text, "--no-browser", "--weights", weights]
    began = time.perf_counter()
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as program:
        try:
            assert program.stdout is not None
            address = program.stdout.readline().strip()
            if not address.startswith("http"):
                raise ValueError(f"expected an address, got {address!r}")
            yield address, time.perf_counter() - began
        finally:
            program.terminate()


@contextmanager
def headless_browser() -> Iterator[Any]:
    """A browser without a screen."""
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
    """Wait for something that is true, and give it back."""
    end = time.monotonic() + seconds
    while not (value := driver.execute_script(script)):
        if time.monotonic() > end:
            raise ValueError(f"the page was not ready within {seconds:.0f} s")
        time.sleep(0.02)
    return value


if __name__ == "__main__":
    raise SystemExit(main())
