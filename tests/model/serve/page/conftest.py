"""A headless Chromium, driven over the WebDriver protocol.

Needs chromium and chromedriver (Debian: chromium, chromium-driver).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from tests.patience import PATIENCE, wait_for
from tests.processes import running, start

CHROMIUM = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's name of a reference


class Browser:
    """A session of a browser."""

    def __init__(self, driver: httpx.Client) -> None:
        flags = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage"]
        if os.geteuid() == 0:
            flags.append("--no-sandbox")  # root has none
        options = {"binary": CHROMIUM, "args": flags}
        # "implicit": an element is looked for so long; a page just opened may not have it yet
        timeouts = dict.fromkeys(("script", "pageLoad", "implicit"), int(1000 * PATIENCE))
        capabilities = {"alwaysMatch": {"goog:chromeOptions": options, "timeouts": timeouts}}
        session = driver.post("/session", json={"capabilities": capabilities}).json()["value"]
        self._driver = driver
        self._path = f"/session/{session['sessionId']}"

    def command(self, path: str, **body: Any) -> Any:
        reply = self._driver.post(f"{self._path}/{path}", json=body).json()["value"]
        assert not (isinstance(reply, dict) and "error" in reply), (reply, self.get("source"))
        return reply

    def get(self, path: str) -> Any:
        return self._driver.get(f"{self._path}/{path}").json()["value"]

    def devtools(self, name: str, **params: Any) -> Any:
        return self.command("goog/cdp/execute", cmd=name, params=params)

    def open(self, url: str) -> None:
        self.command("url", url=url)

    def run(self, script: str) -> Any:
        return self.command("execute/sync", script=f"return {script}", args=[])

    def find(self, selector: str) -> str:
        found: str = self.command("element", using="css selector", value=selector)[_ELEMENT]
        return f"element/{found}"

    def type(self, selector: str, text: str) -> None:
        self.command(f"{self.find(selector)}/value", text=text)

    def click(self, selector: str) -> None:
        self.command(f"{self.find(selector)}/click")

    def text(self, selector: str) -> str:
        return str(self.get(f"{self.find(selector)}/text"))

    def wait_for(self, condition: Callable[[], Any]) -> None:
        wait_for(condition, show=lambda: self.text("body"))

    def texts(self, selector: str) -> list[str]:
        """The text content of all elements that match."""
        found: list[str] = self.run(
            f"[...document.querySelectorAll({selector!r})].map((e) => e.textContent)"
        )
        return found

    def press(self, text: str, within: str = "body") -> None:
        """Click the last button with this text."""
        self.run(
            f"[...document.querySelectorAll({within + ' button'!r})]"
            f".findLast((e) => e.textContent === {text!r}).click()"
        )

    def answer(self, count: int = 1) -> str:
        """The last answer, once there are so many finished ones."""
        self.wait_for(lambda: self.run("document.querySelectorAll('.foot').length") == count)
        return self.text(".turn:last-child > .text")

    def close(self) -> None:
        self._driver.delete(self._path)


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    if CHROMIUM is None or DRIVER is None:
        pytest.skip("chromium or chromedriver is missing")
    with running(start([DRIVER, "--port=0"], stdout=subprocess.PIPE)) as process:
        assert process.stdout is not None
        found = None
        while found is None:
            line = process.stdout.readline()
            assert line, "chromedriver did not start"
            found = re.search(r"started successfully on port (\d+)", line)
        url = f"http://127.0.0.1:{found[1]}"
        with httpx.Client(
            base_url=url, timeout=2 * PATIENCE, trust_env=False, verify=False
        ) as driver:
            opened = Browser(driver)
            yield opened
            opened.close()


@pytest.fixture
def page(browser: Browser, server: Any) -> Iterator[Browser]:
    """The page of a server, as new; it is left at the end."""
    browser.open(server.url)
    browser.run("(localStorage.clear(), sessionStorage.clear())")
    browser.run("inStore('readwrite', (store) => store.clear())")
    browser.open(server.url)
    browser.wait_for(lambda: browser.text("#model") == "toy")
    yield browser
    browser.open("about:blank")
