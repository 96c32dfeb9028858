"""Work for a client that may leave."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from starlette.requests import ClientDisconnect

from urdir.model.serve.stream import while_connected

Receive = Callable[[], Awaitable[dict[str, Any]]]


def connection(leaves: asyncio.Event) -> Receive:
    """The messages of a client that sends a body, then nothing until it leaves."""
    messages = [{"type": "http.request"}]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await leaves.wait()
        return {"type": "http.disconnect"}

    return receive


async def waiting(begun: asyncio.Event, ended: list[str], ends_at_once: bool = False) -> None:
    try:
        begun.set()
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        if not ends_at_once:
            await asyncio.sleep(0)
        ended.append("cancelled")
        raise


def test_result_and_error_of_the_work() -> None:
    async def run() -> None:
        leaves = asyncio.Event()

        async def failing() -> None:
            await asyncio.sleep(0)
            raise LookupError("nothing there")

        assert await while_connected(connection(leaves), asyncio.sleep(0, 7)) == 7
        with pytest.raises(LookupError, match="nothing there"):
            await while_connected(connection(leaves), failing())
        await asyncio.sleep(0)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(run())


def test_work_is_cancelled_when_the_client_leaves() -> None:
    async def run() -> None:
        leaves, ended = asyncio.Event(), list[str]()
        asyncio.get_running_loop().call_later(0.01, leaves.set)
        with pytest.raises(ClientDisconnect):
            await while_connected(connection(leaves), waiting(asyncio.Event(), ended))
        assert ended == ["cancelled"]
        this = asyncio.current_task()
        assert this is not None
        assert this.cancelling() == 0
        async with asyncio.timeout(1):  # the task can go on
            assert await asyncio.sleep(0.01, "later") == "later"

    asyncio.run(run())


def test_cancellation_from_outside_stays_one() -> None:
    async def run() -> None:
        begun, ended = asyncio.Event(), list[str]()
        work = while_connected(connection(asyncio.Event()), waiting(begun, ended))
        task = asyncio.create_task(work)
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert task.cancelled()
        assert ended == ["cancelled"]

    asyncio.run(run())


@pytest.mark.parametrize("is_first", [True, False])
def test_both_at_once_end_the_task(is_first: bool) -> None:
    """A client that leaves while the server stops: the task ends as cancelled."""

    async def run() -> None:
        begun, leaves, ended = asyncio.Event(), asyncio.Event(), list[str]()
        task = asyncio.create_task(
            while_connected(connection(leaves), waiting(begun, ended, ends_at_once=is_first))
        )
        await begun.wait()
        await asyncio.sleep(0.01)  # the client is watched
        if is_first:
            leaves.set()
            await asyncio.sleep(0)
        task.cancel()
        leaves.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert ended == ["cancelled"]

    asyncio.run(run())
