"""Loading, making room, unloading, crashes and idle sleep at once, in random order."""

from __future__ import annotations

import asyncio
import random
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.model.serve.router.toys import spec
from tests.patience import PATIENCE
from urdir.model.serve.errors import ApiError
from urdir.model.serve.router.fleet import Fleet
from urdir.model.serve.router.spec import ModelSpec, RouterSettings
from urdir.model.serve.router.worker import Failure, LoadError

NAMES = "abcdef"


class Device:
    """What runs on it; ``memory`` models at once."""

    def __init__(self, seed: int, memory: int) -> None:
        self.random = random.Random(seed)
        self.memory = memory
        self.workers: list[FakeWorker] = []
        self.cut = 0  # answers whose worker was told to end

    async def pause(self) -> None:
        await asyncio.sleep(self.random.choice((0, 0.0005, 0.002)))


class FakeWorker:
    """A worker without a process."""

    def __init__(self, device: Device, spec: ModelSpec, path: Path, share: float | None) -> None:
        self.path = path
        self.device = device
        self.answers = 0
        self.has_crashed = False
        self.ended: asyncio.Future[Failure | None]

    def start(self) -> None:
        self.ended = asyncio.get_running_loop().create_future()

    async def ready(self) -> None:
        device = self.device
        assert len(device.workers) <= device.memory
        is_full = len(device.workers) == device.memory
        if not is_full:
            device.workers.append(self)
        await device.pause()
        if is_full or device.random.random() < 0.05:
            self.finish(Failure("full" if is_full else "broken", is_full))
        if self.ended.done():
            raise LoadError(self.ended.result() or Failure("unloaded"))

    def finish(self, failure: Failure | None) -> None:
        if not self.ended.done():
            self.ended.set_result(failure)
            if self in self.device.workers:
                self.device.workers.remove(self)

    async def end(self, seconds: float) -> None:
        self.device.cut += self.answers if seconds else 0
        await self.device.pause()
        self.finish(None)

    def crash(self) -> None:
        self.has_crashed = True
        self.finish(Failure("crashed"))


async def described(path: Path) -> dict[str, Any]:
    return {}


@pytest.mark.parametrize("seed", range(4))
def test_whatever_comes_all_are_answered(seed: int) -> None:
    """No request hangs, no answer is cut off by an eviction, no more models than there may be."""
    chance = random.Random(seed)
    most, memory = chance.choice((0, 1, 2, 3)), chance.choice((1, 2, 3, 6))
    device = Device(seed, memory)
    settings = RouterSettings(
        loaded=most, patience_seconds=0.005, room_seconds=PATIENCE, retry_seconds=0.005, waiting=60
    )
    specs = [spec(name, idle_seconds=chance.choice((None, 0.01))) for name in NAMES]

    async def ask(fleet: Fleet, name: str) -> str:
        try:
            async with fleet.use(fleet.models[name]) as worker:
                assert isinstance(worker, FakeWorker)
                worker.answers += 1
                assert not most or len(device.workers) <= most
                try:
                    for _ in range(device.random.randrange(6)):
                        await device.pause()
                        if worker.has_crashed:
                            return "crashed"
                        assert not worker.ended.done()
                finally:
                    worker.answers -= 1
                return "answered"
        except ApiError as error:
            return str(error.body["error"]["code"])

    async def run() -> list[str]:
        fleet = Fleet(lambda: specs, settings, described, partial(FakeWorker, device))
        await fleet.refresh()
        keeping = asyncio.create_task(fleet.run())
        tasks: list[asyncio.Task[Any]] = []
        for _ in range(300):
            name = chance.choice(NAMES)
            what = chance.random()
            if what < 0.05:
                tasks.append(asyncio.create_task(fleet.unload(fleet.models[name])))
            elif what < 0.07 and device.workers:
                chance.choice(device.workers).crash()
            elif what < 0.12 and tasks:
                chance.choice(tasks).cancel()  # a client leaves
            else:
                tasks.append(asyncio.create_task(ask(fleet, name)))
            await device.pause()
        async with asyncio.timeout(PATIENCE):
            found = await asyncio.gather(*tasks, return_exceptions=True)
        assert fleet.waiting == 0
        assert {model.open for model in fleet.models.values()} == {0}
        keeping.cancel()
        await asyncio.wait((keeping,))
        async with asyncio.timeout(PATIENCE):
            await fleet.close(aborts=True)
        assert device.workers == []
        errors = [each for each in found if isinstance(each, Exception)]
        assert not errors, errors
        return [each for each in found if isinstance(each, str)]

    ends = asyncio.run(run())
    assert device.cut == 0
    assert ends.count("answered") > 100
    assert {*ends} <= {"answered", "crashed", "no_room", "model_not_available"}
