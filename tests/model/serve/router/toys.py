"""A router in a thread, whose models are toys in the same loop, behind Unix sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from tests.model.serve.conftest import Gate, ToyModel, ToyService
from tests.patience import PATIENCE, wait_for
from urdir.model.errors import ModelError
from urdir.model.serve.access import Access
from urdir.model.serve.counts import Counts
from urdir.model.serve.limits import Limits
from urdir.model.serve.listening import listen
from urdir.model.serve.router.app import make_router_app
from urdir.model.serve.router.fleet import Fleet
from urdir.model.serve.router.forward import own_headers
from urdir.model.serve.router.spec import ModelSpec, RouterSettings
from urdir.model.serve.router.upstream import describe
from urdir.model.serve.router.worker import Failure, LoadError
from urdir.model.serve.server import HttpServer, Server

LONG = 3600.0  # seconds


def never(*_: object) -> None:
    raise AssertionError("toys have no process")


def spec(name: str, **more: Any) -> ModelSpec:
    return ModelSpec((name,), never, **more)


@dataclass
class Toys:
    """What workers do; ``memory`` is that of a device, of which each model takes one."""

    texts: Any
    access: Access = field(default_factory=Access)
    load_seconds: float = 0.0  # may be set while a model is loaded
    memory: int = 100
    failing: dict[str, str] = field(default_factory=dict)  # by model: why it cannot be loaded
    services: dict[str, ToyService] = field(default_factory=dict)
    workers: dict[str, ToyWorker] = field(default_factory=dict)  # by model: those that run
    started: list[str] = field(default_factory=list)
    shares: list[float | None] = field(default_factory=list)

    def service(self, name: str) -> ToyService:
        tokenizer, template = self.texts
        if name not in self.services:
            model = ToyModel(
                tokenizer, template, names=(name, f"{name}.gguf"), answer_format=template.form
            )
            self.services[name] = ToyService(model, answer=f"I am {name}.")
        return self.services[name]


class ToyWorker:
    """A worker in this process: a whole server of a toy."""

    def __init__(self, toys: Toys, spec: ModelSpec, path: Path, share: float | None) -> None:
        self.path = path
        self.ended: asyncio.Future[Failure | None]
        self.name = spec.name
        self._toys = toys
        self.server: Server | None = None
        toys.started.append(spec.name)
        toys.shares.append(share)

    def start(self) -> None:
        self.ended = asyncio.get_running_loop().create_future()

    async def ready(self) -> None:
        begun = time.monotonic()
        while time.monotonic() - begun < self._toys.load_seconds and not self.ended.done():
            await asyncio.wait((self.ended,), timeout=0.01)
        failing = self._toys.failing.get(self.name)
        is_full = len(self._toys.workers) >= self._toys.memory
        if failing or is_full or self.ended.done():
            failure = Failure(failing or "no memory", is_memory=failing is None)
            if not self.ended.done():
                self.ended.set_result(failure)
            raise LoadError(failure)
        self._toys.workers[self.name] = self
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self.path))
        self._listener.listen()
        service = self._toys.service(self.name)
        self.server = Server(service, replace(self._toys.access, hosts=None), Limits())
        self.server.config.load()
        self.server.lifespan = self.server.config.lifespan_class(self.server.config)
        await self.server.startup([self._listener])  # without the loop that looks for signals

    async def end(self, seconds: float) -> None:
        await self._finish(None)

    async def crash(self) -> None:
        """End as if killed."""
        await self._finish(Failure("its process has ended: killed by SIGKILL"))

    async def _finish(self, failure: Failure | None) -> None:
        if self.server is not None:
            self.server.force_exit = True
            await self.server.shutdown([self._listener])
            self._listener.close()
            await self.server.hang_up()
        self._toys.workers.pop(self.name, None)
        if not self.ended.done():
            self.ended.set_result(failure)


class RunningRouter:
    """A router at work."""

    def __init__(
        self,
        toys: Toys,
        specs: list[ModelSpec],
        settings: RouterSettings,
        drain: float | None = None,
    ) -> None:
        self.toys = toys
        self.specs = specs
        self.unreadable: str | None = None
        self.settings = settings
        self.drain = drain
        self.fleet: Fleet
        self.loop: asyncio.AbstractEventLoop
        self.server: HttpServer
        self.url = ""
        self.client: httpx.Client

    def find(self) -> list[ModelSpec]:
        if self.unreadable is not None:
            raise ModelError(self.unreadable)
        return list(self.specs)

    async def run(self, listener: socket.socket, limits: Limits, begun: threading.Event) -> None:
        access, counts = self.toys.access, Counts()
        self.loop = asyncio.get_running_loop()
        self.fleet = Fleet(
            self.find,
            self.settings,
            partial(describe, own_headers(access)),
            partial(ToyWorker, self.toys),
        )
        app = make_router_app(self.fleet, access, limits, counts)
        self.server = HttpServer(app, access, limits, counts, self.drain, self.fleet.holds.tasks)
        self.server.on_stop = self.fleet.changes.end
        await self.fleet.refresh()
        begun.set()
        keeping = asyncio.create_task(self.fleet.run())
        await self.server.serve([listener])
        await self.server.hang_up()
        keeping.cancel()
        await asyncio.wait((keeping,))
        await self.fleet.close(aborts=True)

    def call(self, work: Awaitable[Any]) -> Any:
        """Await something in the router's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(PATIENCE)  # type: ignore[arg-type]

    def status(self, name: str) -> str:
        return self.fleet.models[name].status

    def ask(self, model: str | None, **more: Any) -> httpx.Response:
        named = {} if model is None else {"model": model}
        return self.client.post(
            "/v1/completions", json={"prompt": "Hi", "max_tokens": 500, **named, **more}
        )

    def text(self, model: str) -> str:
        answer = self.ask(model)
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def in_thread(self, ask: Callable[[], httpx.Response]) -> tuple[threading.Thread, list[Any]]:
        """Ask beside; the response, once it is there."""
        found: list[Any] = []
        thread = threading.Thread(target=lambda: found.append(ask()))
        thread.start()
        return thread, found

    def ask_together(self, names: str) -> None:
        """Ask models, named by a letter each, until all requests wait; then loading takes no time,
        and all are answered."""
        asked = [self.in_thread(partial(self.ask, name)) for name in names]
        self.wait_for(lambda: self.fleet.waiting == len(names))
        self.toys.load_seconds = 0.0
        for thread, found in asked:
            thread.join(PATIENCE)
            assert found[0].status_code == 200

    wait_for = staticmethod(wait_for)


@contextlib.contextmanager
def running_router(
    toys: Toys,
    specs: list[ModelSpec],
    settings: RouterSettings,
    limits: Limits,
    drain: float | None = None,
) -> Iterator[RunningRouter]:
    """A router on a free port, in a thread."""
    router, begun = RunningRouter(toys, specs, settings, drain), threading.Event()
    with listen("127.0.0.1", 0) as listener:
        router.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        thread = threading.Thread(target=lambda: asyncio.run(router.run(listener, limits, begun)))
        thread.start()
        assert begun.wait(PATIENCE)
        try:
            with httpx.Client(base_url=router.url, timeout=PATIENCE, trust_env=False) as client:
                router.client = client
                yield router
        finally:
            router.server.should_exit = router.server.force_exit = True
            thread.join(PATIENCE)
            assert not thread.is_alive()


#: The fixture `start`: toys, settings and limits as wanted.
Start = Callable[..., RunningRouter]


def held(router: RunningRouter, name: str, tokens: int = 1) -> Gate:
    """A gate in the next answers of a model, after so many tokens."""
    gate = router.toys.service(name).gate = Gate(tokens)
    return gate


@contextlib.contextmanager
def streamed(router: RunningRouter, name: str) -> Iterator[Iterator[str]]:
    """The lines of a stream whose first one has come."""
    body = {"model": name, "prompt": "Hi", "max_tokens": 500, "stream": True}
    with router.client.stream("POST", "/v1/completions", json=body) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = response.iter_lines()
        next(lines)
        yield lines
