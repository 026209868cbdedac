"""A headless Chromium that looks at pages of this machine only.

What must not live here: what a page should show.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

from tests.harness.processes import REPOSITORY
from tests.harness.rights import CHROMEDRIVER, CHROMIUM
from tests.harness.waiting import eventually

ARTIFACTS = REPOSITORY / ".test-artifacts"
_PAGE_S = 30.0
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
)
"""The last one: no name of another machine resolves, as without a network."""


class Browser:
    """One window."""

    def __init__(self, driver: webdriver.Chrome) -> None:
        self.driver = driver

    def open(self, url: str) -> None:
        """Load a page."""
        self.driver.get(url)

    def text(self, selector: str) -> str:
        """What one element shows; empty where there is none."""
        try:
            found = self.driver.find_elements(By.CSS_SELECTOR, selector)
            return found[0].text if found else ""
        except StaleElementReferenceException:
            return ""

    def texts(self, selector: str) -> list[str]:
        """What each element shows."""
        told: list[str] = self.run(
            "return [...document.querySelectorAll(arguments[0])].map((one) => one.innerText)",
            selector,
        )
        return told

    def count(self, selector: str) -> int:
        return len(self.driver.find_elements(By.CSS_SELECTOR, selector))

    def click(self, selector: str) -> None:
        self.run("document.querySelector(arguments[0]).click()", selector)

    def type(self, selector: str, text: str) -> None:
        """Type into an input that is cleared first."""
        field = self.driver.find_element(By.CSS_SELECTOR, selector)
        field.clear()
        field.send_keys(text)

    def press(self, *keys: str) -> None:
        """Press keys, whatever has the focus."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def run(self, script: str, *values: object) -> Any:
        """Run a script of the test's in the page."""
        return self.driver.execute_script(script, *values)

    def until(self, selector: str, part: str, deadline_s: float = _PAGE_S) -> str:
        """Wait until an element shows `part`; all that it shows."""
        return eventually(
            lambda: text if part in (text := self.text(selector)) else "",
            deadline_s,
            f"{selector} shows {part!r}",
        )

    def complaints(self) -> list[str]:
        """What the console got since the last call."""
        log: list[dict[str, Any]] = self.driver.get_log("browser")  # type: ignore[no-untyped-call]
        return [f"{entry['level']} {entry['message']}" for entry in log]

    def loaded_from(self) -> set[str]:
        """Origins of everything that the page has loaded."""
        origins: list[str] = self.run(
            "return performance.getEntries().filter((one) => one.name.includes('://'))"
            ".map((one) => new URL(one.name).origin)"
        )
        return set(origins)

    def overflow(self) -> int:
        """Pixels by which the page is wider than its window."""
        return int(self.run("return document.documentElement.scrollWidth - window.innerWidth"))

    def resize(self, width: int, height: int) -> None:
        self.driver.set_window_size(width, height)

    def picture(self, name: str) -> Path:
        """Keep a picture of the whole page for people to look at."""
        ARTIFACTS.mkdir(exist_ok=True)
        path = ARTIFACTS / f"{name}.png"
        width = int(self.run("return window.outerWidth"))
        high = int(self.run("return document.documentElement.scrollHeight"))
        before = self.driver.get_window_size()
        self.resize(width, min(max(high + 140, before["height"]), 6000))
        self.driver.save_screenshot(str(path))
        self.resize(before["width"], before["height"])
        return path


@contextmanager
def browser(profile: Path) -> Iterator[Browser]:
    """A fresh browser with a profile of its own."""
    options = Options()
    options.binary_location = CHROMIUM
    for flag in (*_FLAGS, f"--user-data-dir={profile}", "--window-size=1400,1000"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(CHROMEDRIVER))
    try:
        driver.set_page_load_timeout(_PAGE_S)
        driver.set_script_timeout(_PAGE_S)
        yield Browser(driver)
    finally:
        driver.quit()
