"""Models that a router evicts for others, and requests that wait for room."""

from __future__ import annotations

import json

from tests.model.serve.router.toys import LONG, Start, held, spec, streamed
from tests.patience import PATIENCE
from urdir.model.errors import ModelError


def test_the_model_used_longest_ago_makes_room(start: Start) -> None:
    router = start("a", "b", "c", loaded=2)
    for name in "abac":
        router.text(name)
    assert [router.status(name) for name in "abc"] == ["loaded", "unloaded", "loaded"]
    router.text("b")
    assert [router.status(name) for name in "abc"] == ["unloaded", "loaded", "loaded"]
    assert router.fleet.room.evictions == 2


def test_a_full_device_makes_room(start: Start) -> None:
    router = start("a", "b", "c", memory=2)
    for name in "abc":
        router.text(name)
    assert [router.status(name) for name in "abc"] == ["unloaded", "loaded", "loaded"]
    small = start("a", memory=0)
    assert small.ask("a").json()["error"]["message"].endswith("no memory")


def test_answers_are_not_cut_to_make_room(start: Start) -> None:
    router = start("a", "b", loaded=1, patience_seconds=0.05)
    gate = held(router, "a")
    router.toys.service("a").repeat = 8
    answering, found = router.in_thread(lambda: router.ask("a"))
    router.wait_for(lambda: router.toys.service("a").running == 1)
    waiting, later = router.in_thread(lambda: router.ask("b"))
    router.wait_for(lambda: router.fleet.models["a"].leaves)
    third, last = router.in_thread(lambda: router.ask("a"))  # does not hold up the second
    router.wait_for(lambda: router.fleet.waiting == 2)
    gate.open()
    for thread in (answering, waiting, third):
        thread.join(PATIENCE)
    assert found[0].json()["choices"][0]["text"] == "I am a." * 8
    assert later[0].json()["choices"][0]["text"] == "I am b."
    assert last[0].status_code == 200
    assert router.toys.started == ["a", "b", "a"]


def test_only_some_requests_wait(start: Start) -> None:
    router = start("a", "b", "c", loaded=1, room_seconds=LONG, waiting=2)
    gate = held(router, "a")
    with streamed(router, "a") as lines:
        asked = [router.in_thread(lambda: router.ask("b")) for _ in range(2)]
        router.wait_for(lambda: router.fleet.waiting == 2)
        full = router.ask("c")
        assert (full.status_code, full.headers["retry-after"]) == (503, "5")
        assert "2 requests wait" in full.json()["error"]["message"]
        gate.open()
        assert list(lines)
    for thread, found in asked:
        thread.join(PATIENCE)
        assert found[0].status_code == 200


def test_waiting_ends(start: Start) -> None:
    router = start("a", "b", loaded=1, patience_seconds=0.0, room_seconds=0.3)
    gate, service = held(router, "a"), router.toys.service("a")
    service.delay, service.repeat = 0.02, 1000
    with streamed(router, "a"):
        asked = [router.in_thread(lambda: router.ask("b")) for _ in range(2)]
        for thread, found in asked:
            thread.join(PATIENCE)
            assert found[0].status_code == 503
            assert found[0].json()["error"]["code"] == "no_room"
            assert "retry-after" in found[0].headers
        assert router.status("a") == "loaded"
        assert not router.fleet.models["a"].leaves
    gate.open()
    router.wait_for(lambda: service.cancelled == 1)  # the client is gone
    router.wait_for(lambda: router.fleet.models["a"].open == 0)
    assert router.text("b") == "I am b."


def test_files_that_are_no_models_evict_none(start: Start) -> None:
    def check() -> None:
        raise ModelError("it is empty")

    router = start("a", spec("b", check=check), loaded=1)
    router.text("a")
    assert "it is empty" in router.ask("b").text
    assert router.status("a") == "loaded"
    assert router.toys.started == ["a"]


def test_models_take_turns(start: Start) -> None:
    """A model is not evicted before the requests that it was loaded for are answered."""
    router = start("a", "b", "c", loaded=1, load_seconds=LONG, patience_seconds=0.05)
    router.ask_together("abcabcabc")
    assert sorted(router.toys.started) == ["a", "b", "c"]


def test_responses_in_the_background_are_not_cut_off(start: Start) -> None:
    router = start("a", "b", loaded=1, patience_seconds=0.01)
    gate = held(router, "a")
    body = {"model": "a", "input": "Hi", "background": True, "stream": True}
    with router.client.stream("POST", "/v1/responses", json=body) as response:
        lines = response.iter_lines()
        begun = json.loads(next(line for line in lines if line.startswith("data: "))[6:])
    assert router.status("a") == "loaded"
    thread, found = router.in_thread(lambda: router.ask("b"))
    name = begun["response"]["id"]
    router.wait_for(lambda: router.fleet.waiting == 1)
    with router.client.stream("GET", f"/v1/responses/{name}?stream=true") as response:
        lines = response.iter_lines()
        next(lines)
        gate.open()
        kinds = [line for line in lines if line.startswith("event: ")]
    assert kinds[-1] == "event: response.completed"
    thread.join(PATIENCE)
    assert found[0].status_code == 200
    assert router.status("a") == "unloaded"
    assert router.toys.service("a").cancelled == 0
