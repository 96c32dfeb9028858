"""The chat page of a server with several models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.model.serve.router.toys import RunningRouter, Toys, running_router, spec
from urdir.model.serve.limits import Limits
from urdir.model.serve.router.spec import RouterSettings

pytestmark = pytest.mark.slow

Browser = Any
ENTER = "\ue007"


@pytest.fixture
def router(toy_texts: Any) -> Iterator[RunningRouter]:
    specs = [spec("a"), spec("org/b<i>"), spec("c")]
    with running_router(Toys(toy_texts), specs, RouterSettings(), Limits()) as found:
        found.toys.failing["c"] = "it is broken"
        yield found


def choose(page: Browser, model: str) -> None:
    page.run(
        f"(() => {{ const box = byId('models'); box.value = {model!r}; "
        "box.dispatchEvent(new Event('change')); })()"
    )
    page.wait_for(lambda: page.text("#model") == model)


def test_models_are_chosen_from(browser: Browser, router: RunningRouter) -> None:
    page = browser
    page.open(router.url)
    page.run("localStorage.clear()")
    page.open(router.url)
    page.wait_for(lambda: page.texts("#models option") == ["a", "org/b<i>", "c"])
    assert page.text("#model") == "a"
    choose(page, "org/b<i>")
    page.type("#input", "Hi" + ENTER)
    assert page.answer() == "I am org/b<i>."
    page.wait_for(lambda: page.texts("#models option") == ["a", "org/b<i> (loaded)", "c"])
    assert router.toys.started == ["org/b<i>"]
    page.wait_for(lambda: page.run("server.props !== null"))
    page.open(router.url)  # the choice stays
    page.wait_for(lambda: page.run("byId('models').value") == "org/b<i>")
    choose(page, "c")
    page.type("#input", "Hi" + ENTER)
    page.wait_for(lambda: "it is broken" in page.text("#messages"))
    page.wait_for(lambda: "c (failed)" in page.texts("#models option"))


def test_one_model_is_not_chosen(page: Browser) -> None:
    assert page.run("byId('models').hidden")
    assert page.run("server.models.length") == 0


def test_a_model_that_is_loading(browser: Browser, toy_texts: Any) -> None:
    toys = Toys(toy_texts, load_seconds=3600.0)
    with running_router(toys, [spec("a", any_name=True)], RouterSettings(), Limits()) as router:
        browser.open(router.url)
        browser.wait_for(lambda: browser.text("#model") == "a")
        assert browser.run("isAway(server.model)")
        router.client.post("/models/load", json={"model": "a"})
        browser.run("(() => { nameModel(); })()")
        router.wait_for(lambda: router.fleet.waiting == 1)  # for its props, and it was listed
        toys.load_seconds = 0.0
        browser.wait_for(lambda: browser.run("server.props !== null && !isAway(server.model)"))
