"""A headless browser for tests of pages; without a browser the tests are skipped."""

from __future__ import annotations

import io
import os
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
DRIVER = shutil.which("chromedriver")
SCREENSHOTS = os.environ.get("TRICYCLE_SCREENSHOTS")  # the folder of screenshots; none are written without it
# Only connections to this machine are possible, so a page that loads something from another host fails.
FLAGS = """
--headless=new --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking
--disable-component-update --disable-sync --disable-dev-shm-usage --force-color-profile=srgb
""".split()
FLAGS.append("--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1")
PHONE, DESKTOP = (375, 812), (1280, 900)
DISPLAYS = {"light": (DESKTOP, False), "dark": (DESKTOP, True), "phone": (PHONE, False), "dark phone": (PHONE, True)}
each_display = pytest.mark.parametrize("display", DISPLAYS)


@contextmanager
def browsing() -> Iterator[Browser]:
    """Start a browser, and stop it at the end of the context."""
    webdriver = pytest.importorskip("selenium.webdriver")
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("there is no Chromium with its driver (Debian: chromium, chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    for flag in FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        yield Browser(driver)
    finally:
        driver.quit()


class Browser:
    """A headless Chromium with one page."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, address: str, size: tuple[int, int] = DESKTOP, dark: bool = False) -> None:
        """Open a page, and wait until its script sets `data-ready`."""
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": size == PHONE}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [scheme]})
        self.driver.get_log("browser")  # discard the messages of earlier pages
        self.driver.get(address)
        self.until("return document.body.dataset.ready")

    def run(self, script: str, *args: Any) -> Any:
        """Run JavaScript in the page, and return its result."""
        return self.driver.execute_script(script, *args)

    def until(self, script: str, seconds: float = 30) -> Any:
        """Wait until a script returns a true value, and return it."""
        end = time.monotonic() + seconds
        while not (value := self.run(script)):
            if time.monotonic() > end:
                message = self.run("return document.getElementById('trouble')?.textContent")
                raise AssertionError(f"waited {seconds} s for {script!r}; the page shows {message!r}; {self.errors()}")
            time.sleep(0.02)
        return value

    def find(self, selector: str) -> Any:
        """Return the first element that matches a CSS selector."""
        return self.driver.find_element("css selector", selector)

    def errors(self) -> list[str]:
        """Return the console messages since the last call."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def press(self, *keys: str) -> None:
        """Press keys on the focused element."""
        from selenium.webdriver import ActionChains

        ActionChains(self.driver).send_keys(*keys).perform()

    def violations(self) -> list[str]:
        """Return the accessibility violations that axe finds."""
        package = pytest.importorskip("axe_core_python")
        self.run((Path(package.__file__).parent / "axe.min.js").read_text(encoding="utf-8"))
        found = self.driver.execute_async_script("axe.run().then(arguments[0])")
        return [f"{rule['impact']} {rule['id']}: {rule['nodes'][0]['html'][:200]}" for rule in found["violations"]]

    def fits(self) -> bool:
        """Return whether the page is not wider than the window."""
        return self.run("return document.documentElement.scrollWidth <= window.innerWidth")

    def screenshot(self, name: str, height: int = 0) -> None:
        """Write a screenshot if TRICYCLE_SCREENSHOTS is set."""
        if SCREENSHOTS:
            if height:
                width = self.run("return window.innerWidth")
                metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
                self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
            Path(SCREENSHOTS).mkdir(parents=True, exist_ok=True)
            image = Image.open(io.BytesIO(self.driver.get_screenshot_as_png())).convert("RGB")
            image.quantize(96, dither=Image.Dither.NONE).save(Path(SCREENSHOTS) / f"{name}.png", optimize=True)
