"""Models that a router loads and unloads: on demand, at the start, when idle, after failures."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import time

import pytest

from tests.model.serve.router.toys import LONG, Start, held, spec
from tests.patience import PATIENCE


def test_models_are_loaded_and_unloaded_on_demand(start: Start) -> None:
    router = start("a", "b", load_seconds=LONG)
    http = router.client
    assert http.post("/models/load", json={"model": "a"}).json() == {"success": True}
    router.wait_for(lambda: router.status("a") == "loading")
    router.toys.load_seconds = 0.0
    router.wait_for(lambda: router.status("a") == "loaded")
    assert http.post("/models/unload", json={"model": "a"}).json() == {"success": True}
    assert router.status("a") == "unloaded"
    assert http.post("/models/unload", json={"model": "a"}).json() == {"success": True}
    router.toys.load_seconds = LONG
    http.post("/models/load", json={"model": "a"})
    assert http.post("/models/unload", json={"model": "a"}).json() == {"success": True}
    assert router.status("a") == "unloaded"  # the load was stopped
    router.toys.load_seconds = 0.0
    status = http.get("/v1/models/a").json()["status"]
    assert status == {"value": "unloaded"}
    assert not router.toys.workers
    assert router.text("a") == "I am a."


def test_without_autoload_requests_are_told(start: Start) -> None:
    router = start("a", "b", autoload=False)
    refused = router.ask("a")
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "model_not_loaded")
    body = {"model": "b", "prompt": "Hi"}
    assert router.client.post("/v1/completions?autoload=true", json=body).status_code == 200
    router.call(router.fleet.unload(router.fleet.models["b"]))
    again = start("a", "b")
    assert again.client.post("/v1/completions?autoload=false", json=body).status_code == 400


def test_many_requests_load_a_model_once(start: Start) -> None:
    router = start("a", "b", load_seconds=LONG)
    router.ask_together("abab")
    assert sorted(router.toys.started) == ["a", "b"]


def test_idle_models_sleep(start: Start) -> None:
    router = start(spec("a", idle_seconds=0.3), "b")
    service = router.toys.service("a")
    service.delay, service.repeat = 0.02, 6
    began = time.monotonic()
    router.text("a")
    assert time.monotonic() - began > 0.35  # longer than it may be idle
    assert router.toys.started == ["a"]
    router.text("b")
    while router.status("a") != "unloaded":  # none of these is a use of it
        router.client.get("/metrics")
        router.client.get("/models")
        router.client.get("/props?model=a")
        assert time.monotonic() - began < PATIENCE
    assert router.status("b") == "loaded"
    service.delay = 0.0
    assert router.text("a").startswith("I am a.")


def test_models_are_loaded_at_the_start(start: Start) -> None:
    router = start("a", spec("b", load_on_startup=True))
    router.wait_for(lambda: router.status("b") == "loaded")
    assert router.status("a") == "unloaded"


def test_a_model_that_fails_says_why_and_is_tried_again(start: Start) -> None:
    router = start(spec("a", folder="/models"), "b", retry_seconds=LONG)
    router.toys.failing["a"] = "/models/a.gguf: not a GGUF file"
    for _ in range(3):
        error = router.ask("a").json()["error"]
        assert error["message"] == "the model 'a' could not be loaded: a.gguf: not a GGUF file"
        assert error["code"] == "model_not_available"
    assert router.toys.started == ["a"]
    assert router.text("b") == "I am b."
    router.toys.failing.clear()
    router.client.post("/models/load", json={"model": "a"})  # at once
    assert router.text("a") == "I am a."
    assert "failed" not in router.client.get("/v1/models/a").json()["status"]


def test_models_come_and_go(start: Start) -> None:
    router = start("a", "b")
    router.text("a")
    router.specs[:] = [spec("b"), spec("new", others=("new.gguf",))]
    assert router.text("new.gguf") == "I am new."
    assert router.text("a") == "I am a."  # as long as it is loaded
    router.unreadable = "/models: Permission denied"
    assert router.ask("later").status_code == 404
    router.unreadable = None
    router.call(router.fleet.unload(router.fleet.models["a"]))
    assert router.ask("a").status_code == 404


def test_an_unload_waits_for_open_answers(start: Start) -> None:
    router = start("a", "b")
    gate = held(router, "a")
    thread, found = router.in_thread(lambda: router.ask("a"))
    router.wait_for(lambda: router.toys.service("a").running == 1)
    unloading, unloaded = router.in_thread(
        lambda: router.client.post("/models/unload", json={"model": "a"})
    )
    router.wait_for(lambda: router.fleet.models["a"].leaves)
    gate.open()
    for each in (thread, unloading):
        each.join(PATIENCE)
    assert unloaded[0].json() == {"success": True}
    assert found[0].json()["choices"][0]["text"] == "I am a."
    assert router.status("a") == "unloaded"


def test_loads_beside_each_other_do_not_block(start: Start) -> None:
    """Another model answers while one is loaded."""
    router = start("a", "b")
    router.text("a")
    router.toys.load_seconds = LONG
    thread, found = router.in_thread(lambda: router.ask("b"))
    router.wait_for(lambda: router.status("b") == "loading")
    assert router.text("a") == "I am a."
    assert router.status("b") == "loading"
    router.toys.load_seconds = 0.0
    thread.join(PATIENCE)
    assert found[0].status_code == 200


def test_an_unload_goes_on_without_its_client(start: Start) -> None:
    router = start("a", "b")
    gate = held(router, "a")
    thread, found = router.in_thread(lambda: router.ask("a"))
    router.wait_for(lambda: router.toys.service("a").running == 1)

    async def unload_and_leave() -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.01):
                await router.fleet.unload(router.fleet.models["a"])

    router.call(unload_and_leave())
    assert router.fleet.models["a"].leaves
    gate.open()
    assert router.text("a") == "I am a."  # loaded again, once the first was answered
    thread.join(PATIENCE)
    assert found[0].json()["choices"][0]["text"] == "I am a."
    assert router.toys.started == ["a", "a"]


def test_a_load_that_waits_for_its_turn_can_be_stopped(start: Start) -> None:
    router = start("a", "b", load_seconds=LONG)
    http = router.client
    for name in "ab":
        http.post("/models/load", json={"model": name})
    listed = http.get("/models").json()["data"]
    assert [each["status"]["value"] for each in listed] == ["loading", "loading"]
    http.post("/models/unload", json={"model": "b"})
    assert http.get("/v1/models/b").json()["status"] == {"value": "unloaded"}
    router.toys.load_seconds = 0.0
    router.wait_for(lambda: router.status("a") == "loaded")
    assert router.toys.started == ["a"]


def test_a_failed_load_without_requests_is_no_unhandled_error(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    router = start("a", spec("b", load_on_startup=True))
    router.toys.failing |= {"a": "broken", "b": "broken"}
    router.client.post("/models/load", json={"model": "a"})
    router.wait_for(lambda: router.fleet.models["a"].cause is not None)
    router.server.should_exit = True
    router.wait_for(lambda: not router.fleet._tasks)
    gc.collect()
    assert "never retrieved" not in caplog.text


def test_idle_for_no_time_at_all(start: Start) -> None:
    router = start(spec("a", idle_seconds=0), "b")
    assert router.text("a") == "I am a."
    router.wait_for(lambda: router.status("a") == "unloaded")
    assert router.text("a") == "I am a."
