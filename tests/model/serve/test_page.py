"""The chat page in headless Chromium, driven over the WebDriver protocol.

Needs chromium and chromedriver (Debian: chromium, chromium-driver).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import httpx
import pytest

from urdir.model.errors import ModelError
from urdir.model.serve.interface import Defaults
from urdir.model.text.answers import AnswerFormat
from urdir.model.text.reasoning import THINK_TAGS

CHROMIUM = shutil.which("chromium")
DRIVER = shutil.which("chromedriver")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None, reason="chromium or chromedriver is missing"
    ),
]

ENTER, SHIFT, ESCAPE = "\ue007", "\ue008", "\ue00c"
_ELEMENT = "element-6066-11e4-a52e-4f735466cecf"  # the protocol's name of a reference


class Browser:
    """A session of a browser."""

    def __init__(self, driver: httpx.Client) -> None:
        flags = ["--headless=new", "--disable-gpu", "--disable-dev-shm-usage"]
        if os.geteuid() == 0:
            flags.append("--no-sandbox")  # root has none
        options = {"binary": CHROMIUM, "args": flags}
        capabilities = {"alwaysMatch": {"goog:chromeOptions": options}}
        session = driver.post("/session", json={"capabilities": capabilities}).json()["value"]
        self._driver = driver
        self._path = f"/session/{session['sessionId']}"

    def command(self, path: str, **body: Any) -> Any:
        reply = self._driver.post(f"{self._path}/{path}", json=body).json()["value"]
        assert not (isinstance(reply, dict) and "error" in reply), reply
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

    def wait_for(self, condition: Callable[[], Any], seconds: float = 30) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, self.text("body")
            time.sleep(0.02)

    def answer(self, count: int = 1) -> str:
        """The last answer, once there are so many finished ones."""
        self.wait_for(lambda: self.run("document.querySelectorAll('.foot').length") == count)
        return self.text(".turn:last-child > .text")

    def close(self) -> None:
        self._driver.delete(self._path)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert DRIVER is not None
    with subprocess.Popen([DRIVER, "--port=0"], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = None
        while found is None:
            line = process.stdout.readline()
            assert line, "chromedriver did not start"
            found = re.search(r"started successfully on port (\d+)", line)
        url = f"http://127.0.0.1:{found[1]}"
        with httpx.Client(base_url=url, timeout=60, trust_env=False, verify=False) as driver:
            opened = Browser(driver)
            yield opened
            opened.close()
        process.terminate()


@pytest.fixture
def page(browser: Browser, server: Any) -> Browser:
    """The page of a server, as new."""
    browser.open(server.url)
    browser.run("(localStorage.clear(), sessionStorage.clear())")
    browser.open(server.url)
    browser.wait_for(lambda: browser.text("#model") == "toy")
    return browser


def test_a_conversation_streams(page: Browser, server: Any) -> None:
    server.service.delay = 0.5
    page.type("#input", "What is 2 plus 3?" + ENTER)
    page.wait_for(lambda: page.text(".turn:last-child > .text").startswith("2 plus"))
    assert page.text("#send") == "Stop"
    assert page.run("document.querySelectorAll('.foot').length") == 0
    server.service.delay = 0.05
    assert page.answer() == "2 plus 3 is 5."
    assert re.search(r"8 tokens, [\d.]+ a second", page.text(".foot"))
    assert page.text("#send") == "Send"
    page.type("#input", "And")
    page.type("#input", SHIFT + ENTER)
    page.type("#input", "more?" + ENTER)
    page.answer(2)
    tokenizer = server.service.model.tokenizer
    prompt = tokenizer.decode(server.service.requests[1].prompt, keep_control=True)
    assert prompt == (
        "<|im_start|>user\nWhat is 2 plus 3?<|im_end|>\n"
        "<|im_start|>assistant\n2 plus 3 is 5.<|im_end|>\n"
        "<|im_start|>user\nAnd\nmore?<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("how", ["button", "key"])
def test_stop(page: Browser, server: Any, how: str) -> None:
    server.service.delay, server.service.repeat = 0.02, 1000
    page.type("#input", "Hi" + ENTER)
    page.wait_for(lambda: "2 plus" in page.text(".turn:last-child > .text"))
    if how == "button":
        page.click("#send")
    else:
        page.type("#input", ESCAPE)
    kept = page.answer()
    server.wait_for(lambda: server.service.cancelled == 1)
    assert page.text(".foot > span") == "stopped"
    server.service.delay, server.service.repeat = 0.0, 1
    page.type("#input", "Go on" + ENTER)
    page.answer(2)
    prompt = server.service.model.tokenizer.decode(server.service.requests[1].prompt)
    assert kept.split("\n")[0][:20] in prompt


def test_no_message_runs_a_script(page: Browser, server: Any) -> None:
    attacks = (
        "<script>window.hit = 1</script> <img src=x onerror='window.hit = 2'> "
        "[click](javascript:window.hit=3) <a href='javascript:window.hit=4'>x</a> "
        "[b](https://e.example/'onmouseover='window.hit=5) `<svg onload=window.hit=6>` "
        "<iframe srcdoc='<script>parent.hit = 7</script>'></iframe>"
    )
    server.service.answer = f"{attacks}\n\n```html\n{attacks}\n```\n# {attacks}\n- {attacks}\n"
    page.type("#input", attacks + ENTER)
    page.answer()
    made = page.run("[...document.querySelectorAll('#messages *')].map((e) => e.localName)")
    assert not {"script", "img", "iframe", "svg"} & set(made)
    links = page.run("[...document.querySelectorAll('#messages a')].map((a) => a.href)")
    assert links
    assert all(link.startswith("https://e.example/") for link in links)
    for link in range(len(links)):
        page.run(
            f"document.querySelectorAll('#messages a')[{link}].dispatchEvent("
            "new MouseEvent('mouseover', {bubbles: true}))"
        )
    assert page.run("window.hit ?? null") is None
    assert page.text(".turn.user").startswith("<script>")


@pytest.mark.parametrize(
    "attack",
    [
        "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=hit()>')",
        "document.querySelector('main').innerHTML = '<img src=x onerror=hit()>'",
        "document.querySelector('main').setAttribute('onclick', 'hit()')",
        "document.body.append(Object.assign(document.createElement('script'), {text: 'hit()'}))",
        "fetch('https://e.example/')",
    ],
)
def test_the_policy_stops_what_slips_through(page: Browser, attack: str) -> None:
    """Were a message to get further, the browser itself would refuse it."""
    refused = page.run(
        "(async () => { window.hits = 0; window.hit = () => { window.hits++; };"
        f"try {{ await ({attack}); }} catch (error) {{ return true; }} return false; }})()"
    )
    time.sleep(0.05)
    page.run("document.querySelector('main').click()")
    assert page.run("window.hits") == 0
    assert refused


def test_markdown(page: Browser, server: Any) -> None:
    server.service.answer = (
        "# Title\n\nSome **bold**, *slanted* and `code`, a [link](https://e.example/a).\n"
        "second line\n\n- one\n  1. inner\n- two\n\n> quoted\n\n| a | b |\n|---|---|\n| 1 | 2 |\n\n"
        "```py\nif a < b:\n    # no title\n```\n5 * 3 * 2"
    )
    page.type("#input", "Hi" + ENTER)
    page.answer()

    def texts(selector: str) -> Any:
        return page.run(
            f"[...document.querySelectorAll('.turn:last-child {selector}')]"
            ".map((e) => e.textContent)"
        )

    assert texts("h2") == ["Title"]
    assert texts("strong") == ["bold"]
    assert texts("em") == ["slanted"]
    assert texts("p > code") == ["code"]
    assert texts("p br") == [""]
    assert texts("ul > li > ol > li") == ["inner"]
    assert texts(".text > ul > li") == ["oneinner", "two"]
    assert texts("blockquote") == ["quoted"]
    assert texts("tr") == ["ab", "12"]
    assert texts("pre code") == ["if a < b:\n    # no title"]
    assert texts(".text > p")[-1] == "5 * 3 * 2"
    assert page.run("document.querySelector('#messages a').rel") == "noopener noreferrer"


#: As JavaScript. Before patterns were linear these took seconds, or ended the stack.
LONG = {
    "brackets": "'['.repeat(200000)",
    "links without an end": "'[a](https:'.repeat(20000)",
    "quotes in quotes": "'>'.repeat(5000)",
    "no rule of a table": "'a|b\\n' + ' '.repeat(20000) + 'x'",
    "an item before a strange line break": "'-' + ' '.repeat(50000) + 'a\\u2028' + 'b'.repeat(100)",
    "lists in lists": "Array.from({length: 500}, (_, i) => ' '.repeat(i) + '- a').join('\\n')",
}


@pytest.mark.parametrize("text", LONG.values(), ids=LONG)
def test_long_texts_are_shown_at_once(page: Browser, text: str) -> None:
    milliseconds, shown, depth = page.run(
        "(() => { const shown = document.createElement('div'), start = performance.now();"
        f"markdown({text}, shown); const time = performance.now() - start;"
        "const depth = (node) => 1 + Math.max(0, ...[...node.children].map(depth));"
        "return [time, shown.textContent.length, depth(shown)]; })()"
    )
    assert milliseconds < 500
    assert shown > 100
    assert depth < 40


def test_an_answer_of_quotes_alone(page: Browser, server: Any) -> None:
    server.service.answer, server.service.repeat = ">" * 100, 50
    page.type("#input", "Hi" + ENTER)
    assert len(page.answer()) > 100


def test_the_page_sends_nothing_that_nobody_set(page: Browser, server: Any) -> None:
    usual = Defaults()
    settings = replace(usual.settings, temperature=0.25)
    server.service.model.defaults = replace(usual, settings=settings, limit=3)
    page.type("#input", "Hi" + ENTER)
    page.answer()
    page.click("#open-settings")
    page.type("#temperature", "0")
    page.click("#settings button")
    page.type("#input", "Hi" + ENTER)
    page.answer(2)
    asked = [(each.settings.temperature, each.limit) for each in server.service.requests]
    assert asked == [(0.25, 3), (0.0, 3)]


def test_settings_reasoning_and_copy(page: Browser, server: Any) -> None:
    page.click("#open-settings")
    page.type("#system", "Be brief.")
    page.type("#temperature", "0.25")
    page.type("#limit", "40")
    page.click("#settings button")
    server.service.answer = "<think>Hm.</think>Right."
    server.service.model.answer_format = AnswerFormat(thinks=THINK_TAGS[0])
    page.type("#input", "Hi" + ENTER)
    assert page.answer() == "Right."
    assert page.run("document.querySelector('.reasoning div').textContent") == "Hm."
    [request] = server.service.requests
    assert (request.settings.temperature, request.limit) == (0.25, 40)
    assert "Be brief." in server.service.model.tokenizer.decode(request.prompt)
    page.click(".foot button")
    page.wait_for(lambda: page.text(".foot button") == "Copied")
    page.open(server.url)  # settings are kept
    assert page.run("document.getElementById('system').value") == "Be brief."


def test_errors_are_shown(page: Browser, server: Any) -> None:
    server.service.error = ValueError("secret")
    page.type("#input", "Hi" + ENTER)
    page.answer()
    assert page.text(".error") == "internal error; see the server's log"
    assert page.run("document.getElementById('input').value") == "Hi"
    page.type("#input", " there")
    page.type("#input", ENTER)
    page.answer(2)
    assert page.run("document.getElementById('input').value") == "Hi there"
    assert page.run("conversation.length") == 0
    server.service.error = None
    page.click("#clear")
    page.run("(() => { document.getElementById('input').value = '' })()")
    assert page.text("#messages") == "Ask the model something."
    page.type("#input", "Hi" + ENTER)
    assert page.answer() == "2 plus 3 is 5."


@pytest.mark.parametrize("good", [0, 3])
def test_a_text_whose_answer_fails_is_back_in_the_input(
    page: Browser, server: Any, good: int
) -> None:
    """Refused, or broken off in the middle; then the same is asked once more."""
    server.service.error, server.service.good = ModelError("no"), good
    page.type("#input", "What is 2 plus 3?" + ENTER)
    page.answer()
    assert page.run("document.getElementById('input').value") == "What is 2 plus 3?"
    server.service.error = None
    page.type("#input", ENTER)
    assert page.answer(2) == "2 plus 3 is 5."
    first, second = server.service.requests
    assert first.prompt == second.prompt


def test_an_error_of_a_proxy(page: Browser, server: Any) -> None:
    page.run("(() => { window.fetch = async () => new Response('<p>', {status: 502}) })()")
    page.type("#input", "Hi" + ENTER)
    page.answer()
    assert page.text(".error").startswith("502")
    assert page.run("document.getElementById('input').value") == "Hi"


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [(360, 640), (1280, 800)])
def test_it_fits_every_screen(
    page: Browser, server: Any, scheme: str, size: tuple[int, int]
) -> None:
    width, height = size
    page.devtools(
        "Emulation.setDeviceMetricsOverride",
        width=width,
        height=height,
        deviceScaleFactor=1,
        mobile=width < 600,
    )
    page.devtools(
        "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
    )
    server.service.answer = "word " * 30 + "x" * 300 + "\n\n```\n" + "code " * 100 + "\n```"
    page.type("#input", "long" * 100 + ENTER)
    page.answer()
    assert page.run("document.documentElement.scrollWidth") <= width
    assert page.run("document.documentElement.scrollHeight") <= height
    low = page.run("document.getElementById('composer').getBoundingClientRect().bottom")
    assert low <= height
    small = page.run(
        "[...document.querySelectorAll('header button, #send')]"
        ".filter((b) => b.getBoundingClientRect().height < 44).length"
    )
    assert small == 0
    colours = page.run(
        "['color', 'backgroundColor'].map((name) => getComputedStyle(document.body)[name])"
    )
    text, back = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in colours)
    assert (text < back) == (scheme == "light")
    assert abs(text - back) > 400
    page.devtools("Emulation.clearDeviceMetricsOverride")
