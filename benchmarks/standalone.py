"""Tokens per second of a page of `tricycle export --html` in a browser (`python -m benchmarks.standalone [PAGE]`).

The benchmark opens the page in headless Chromium, generates texts of random seeds and prints the tokens per second of
each, as the page shows them. Without PAGE, it exports a model of the preset "laptop" with random weights. It needs
Chromium, chromedriver and selenium.
"""

from __future__ import annotations

import argparse
import re
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.look import headless_browser, wait_until

GENERATE = """
const values = {prompt: "the", temperature: 1, length: arguments[0], seed: arguments[1]};
for (const name in values) document.getElementById(name).value = values[name];
document.getElementById("generate").click();
"""
STATUS = "return document.getElementById('status').textContent"


def export_random_model(folder: Path) -> Path:
    """Write best.safetensors and laptop.html of a random "laptop" model to `folder`; return the page's path."""
    from tricycle.checkpoint import save_checkpoint
    from tricycle.configs import LaptopConfig
    from tricycle.models import GPT
    from tricycle.tokeniser import BPETokeniser
    from tricycle_cli import export

    config = LaptopConfig(zero_projections=False)
    tokens = [bytes([i]) for i in range(256)] + [f"{i:05}".encode() for i in range(config.vocab_size - 257)]
    save_checkpoint(folder / "best.safetensors", GPT(config), BPETokeniser.from_tokens(tokens))
    export.main([str(folder), "--html", str(folder / "laptop.html")])
    return folder / "laptop.html"


def tokens_per_second(status: str) -> int:
    """Return the tokens per second that the page's status line states; ValueError if it states none.

    Raises:
        ValueError: it states none.
    """
    found = re.search(r"([\d,]+) tokens/s", status)
    if found is None:
        raise ValueError(f"expected a status line with tokens/s, got {status!r}")
    return int(found[1].replace(",", ""))


def measure(driver: Any, address: str, n_tokens: int, times: int) -> list[int]:
    """Return the tokens per second of each of `times` generated texts of a page."""
    driver.get(address)
    wait_until(driver, "return !document.getElementById('generate').disabled", 60)  # it is enabled with the model
    speeds = []
    for seed in range(times):
        driver.execute_script(GENERATE, n_tokens, seed)
        wait_until(driver, "return document.body.dataset.busy === 'false'", 600)
        speeds.append(tokens_per_second(driver.execute_script(STATUS)))
    return speeds


def main() -> int:
    """Parse sys.argv, measure a page in headless Chromium, print the tokens per second, and return 0."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("page", type=Path, nargs="?", help="a file of `tricycle export RUN --html FILE`")
    parser.add_argument("--tokens", type=int, default=200, help="of each text; it ends earlier at an end of text")
    parser.add_argument("--times", type=int, default=5, help="number of texts")
    settings = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, headless_browser() as driver:
        page = settings.page or export_random_model(Path(folder))
        speeds = measure(driver, page.resolve().as_uri(), settings.tokens, settings.times)
    print(f"tokens/s: {', '.join(map(str, speeds))}; median {statistics.median(speeds):g}, best {max(speeds)}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
