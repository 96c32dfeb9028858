"""The chat page in headless Chromium: answers, what scripts may not do, settings, sizes."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from typing import Any

import pytest

from tests.model.serve.conftest import Gate
from urdir.model.errors import ModelError
from urdir.model.serve.endpoints import Endpoints
from urdir.model.serve.errors import loading
from urdir.model.serve.interface import Defaults
from urdir.model.text.answers import AnswerFormat
from urdir.model.text.reasoning import THINK_TAGS

pytestmark = pytest.mark.slow

Browser = Any
ENTER, SHIFT, ESCAPE = "\ue007", "\ue008", "\ue00c"


def test_a_conversation_streams(page: Browser, server: Any) -> None:
    server.service.gate = gate = Gate(4)
    page.type("#input", "What is 2 plus 3?" + ENTER)
    page.wait_for(lambda: page.text(".turn:last-child > .text").startswith("2 plus"))
    assert page.text("#send") == "Stop"
    assert page.run("document.querySelectorAll('.foot').length") == 0
    gate.open()
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


def test_a_page_that_is_open_while_the_model_is_loaded(
    browser: Browser, server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(self: Endpoints) -> None:
        raise loading()

    with monkeypatch.context() as changed:
        changed.setattr(Endpoints, "_model", property(load))
        browser.open(server.url)
        browser.wait_for(lambda: browser.text("#model").startswith("loading"))
    browser.wait_for(lambda: browser.text("#model") == "toy")


@pytest.mark.parametrize("how", ["button", "key"])
def test_stop(page: Browser, server: Any, how: str) -> None:
    usual, server.service.gate = server.service.gate, Gate(20)
    server.service.repeat = 3
    page.type("#input", "Hi" + ENTER)
    page.wait_for(lambda: "2 plus" in page.text(".turn:last-child > .text"))
    if how == "button":
        page.click("#send")
    else:
        page.type("#input", ESCAPE)
    kept = page.answer()
    server.wait_for(lambda: server.service.cancelled == 1)
    assert page.text(".foot > span") == "stopped"
    server.service.gate, server.service.repeat = usual, 1
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
    page.run(
        "(() => { const copy = document.querySelector('.foot button'); window.labels = [];"
        "new MutationObserver(() => labels.push(copy.textContent))"
        ".observe(copy, { childList: true }); })()"
    )
    page.click(".foot button")
    page.wait_for(lambda: page.run("labels[0]") == "Copied")  # for a while
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
    assert page.run("Object.keys(chat.nodes).length") == 0
    server.service.error = None
    page.run("byId('clear').click()")
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


def test_a_stream_that_a_proxy_ends_early(page: Browser, server: Any) -> None:
    """Its text stays, with a note."""
    events = 'data: {"choices": [{"index": 0, "delta": {"content": "2 plus"}}]}\\n\\n'
    page.run(f"(() => {{ window.fetch = async () => new Response('{events}') }})()")
    page.type("#input", "Hi" + ENTER)
    assert page.answer() == "2 plus"
    page.wait_for(lambda: page.texts(".note") == ["cut off: the connection ended"])


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
