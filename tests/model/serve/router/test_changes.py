"""Changes of models as a stream of events."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Iterator
from typing import Any

import httpx

from tests.model.serve.router.toys import RunningRouter, Start, spec
from tests.patience import PATIENCE
from urdir.model.serve.limits import Limits
from urdir.model.serve.router.fleet import Fleet
from urdir.model.serve.router.spec import RouterSettings
from urdir.model.serve.router.watch import model_events


@contextlib.contextmanager
def watching(router: RunningRouter) -> Iterator[Iterator[dict[str, Any]]]:
    """The events of /models/sse as they come."""
    with router.client.stream("GET", "/models/sse") as reply:
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reply.headers["x-accel-buffering"] == "no"
        lines = (line for line in reply.iter_lines() if line.startswith("data: "))
        router.wait_for(lambda: bool(router.server.server_state.tasks))
        yield (json.loads(line[6:]) for line in lines)


def test_changes_of_models_are_streamed(start: Start) -> None:
    router = start("a", "b", load_seconds=0.05, limits=Limits(pulse_seconds=0.2))
    router.toys.failing["b"] = "it has no tensor 'x'"
    with watching(router) as events:
        thread, answers = router.in_thread(
            lambda: httpx.post(
                f"{router.url}/v1/completions",
                json={"model": "a", "prompt": "Hi", "max_tokens": 9},
                timeout=PATIENCE,
            )
        )
        first, second = next(events), next(events)
        assert first == {"model": "a", "event": "status_change", "data": {"status": "loading"}}
        assert (second["model"], second["data"]["status"]) == ("a", "loaded")
        assert second["data"]["info"] == router.client.get("/v1/models/a").json()
        thread.join(PATIENCE)
        assert answers[0].status_code == 200
        for name in ("b", "a"):
            way = "load" if name == "b" else "unload"
            assert router.client.post(f"/models/{way}", json={"model": name}).is_success
        seen = [next(events) for _ in range(3)]
        assert [(each["model"], each["data"]) for each in seen if each["model"] == "b"] == [
            ("b", {"status": "loading"}),
            ("b", {"status": "unloaded", "failed": True, "cause": "it has no tensor 'x'"}),
        ]
        assert {"model": "a", "event": "status_change", "data": {"status": "unloaded"}} in seen
        router.specs.append(spec("c"))
        assert len(router.client.get("/models").json()["data"]) == 3
        assert next(events) == {"model": "*", "event": "models_reload"}
    router.wait_for(lambda: not router.server.server_state.tasks)  # the client is gone


def test_a_model_may_go_while_its_events_are_sent() -> None:
    """To a client that does not read."""

    async def check() -> None:
        fleet = Fleet(lambda: [spec("a"), spec("b")], RouterSettings(), dict)
        await fleet.refresh()
        events = model_events(fleet, 60)
        first = asyncio.ensure_future(anext(events))
        await asyncio.sleep(0)
        for name in ("a", "b"):
            fleet.models[name].status = "loaded"
        fleet.changes.notify()
        found = [await first]
        fleet.models.clear()
        fleet.changes.notify()
        found += [await anext(events) for _ in range(2)]
        names = [json.loads(event.removeprefix(b"data: "))["model"] for event in found]
        assert names == ["a", "b", "*"]
        await events.aclose()
        await fleet.close(aborts=True)

    asyncio.run(check())


def test_a_stream_of_changes_does_not_hold_up_the_end(start: Start) -> None:
    """It is silent before, which a comment says."""
    router = start("a", limits=Limits(pulse_seconds=0.05))
    with router.client.stream("GET", "/models/sse") as reply:
        lines = reply.iter_lines()
        assert next(lines) == ": still here"
        router.server.should_exit = True
        assert [line for line in lines if line not in ("", ": still here")] == []
