"""The models of a router: which are loaded, loading them on demand, making room for others.

One load runs at a time, so that each finds the memory that the device really has. A model with an
open request is never unloaded to make room. All methods are of one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import tempfile
import time
from collections.abc import AsyncGenerator, Callable, Iterable
from itertools import count
from pathlib import Path
from typing import Any

from urdir.model.errors import ModelError
from urdir.model.serve.errors import ApiError
from urdir.model.serve.router.changes import Changes
from urdir.model.serve.router.holds import Holds
from urdir.model.serve.router.model import AnyWorker, Model
from urdir.model.serve.router.room import Room, busy
from urdir.model.serve.router.spec import ModelSpec, RouterSettings
from urdir.model.serve.router.upstream import GoneError
from urdir.model.serve.router.worker import Failure, LoadError, Worker

log = logging.getLogger("urdir.serve")

#: Seconds between looks whether models are idle.
_LEAST_TICK, _MOST_TICK = 0.05, 1.0


class Fleet:
    """The models that ``find`` finds.

    ``launch`` makes the worker of a model, given its socket's path and share of the free memory;
    ``describe`` asks a worker that answers what it says of its model.
    """

    def __init__(
        self,
        find: Callable[[], Iterable[ModelSpec]],
        settings: RouterSettings,
        describe: Callable[[Path], Any],
        launch: Callable[[ModelSpec, Path, float | None], AnyWorker] = Worker,
    ) -> None:
        self.models: dict[str, Model] = {}
        self.settings = settings
        self.waiting = 0  # requests for models that are not loaded
        self._find = find
        self._launch = launch
        self._describe = describe
        self._by_name: dict[str, Model] = {}
        self._turn = asyncio.Lock()  # of loads
        self.changes = Changes()
        self.room = Room(self.models, settings, self.changes, self._stop)
        self.holds = Holds(self.changes, self._begin)
        self._tasks: set[asyncio.Task[Any]] = set()
        self._owners = contextlib.ExitStack()
        self._sockets = Path(
            self._owners.enter_context(tempfile.TemporaryDirectory(prefix="urdir-"))
        )
        self._numbers = count()

    # ---- which models ----

    async def refresh(self) -> None:
        """Find the models again. Those that are gone stay as long as they are loaded. What cannot
        be read changes nothing, and is logged."""
        try:
            specs = await asyncio.to_thread(lambda: list(self._find()))
        except ModelError as error:
            log.warning("the models are as they were: %s", error)
            return
        found = {spec.name: spec for spec in specs}
        for name in [*self.models]:
            is_used = self.models[name].status != "unloaded" or self.models[name].loading
            if name not in found and not is_used:
                del self.models[name]
        for name, spec in found.items():
            if name in self.models:
                self.models[name].spec = spec
            else:
                self.models[name] = Model(spec)
        self._by_name = {}
        named = [(name, model) for model in self.models.values() for name in model.spec.names]
        named += [(name, model) for model in self.models.values() for name in model.spec.others]
        for name, model in named:
            self._by_name.setdefault(name, model)
        self.changes.notify()

    def get(self, name: str) -> Model | None:
        """The model of a name."""
        return self._by_name.get(name)

    # ---- use ----

    @contextlib.asynccontextmanager
    async def use(
        self, model: Model, loads: bool | None = None, unloads: bool = False
    ) -> AsyncGenerator[AnyWorker, None]:
        """A worker of a model, for one request; it is not unloaded meanwhile, but after it, if the
        request ``unloads`` it.

        A model that is not loaded is, unless ``loads`` (by default `RouterSettings.autoload`) is
        False. Raises ApiError: 400 if it is not loaded then, 503 if it cannot be, or too many
        requests wait.
        """
        is_look = loads is False  # at a model that may be about to leave; no reason to stay
        while model.status != "loaded" or (model.leaves and not is_look):
            if not (self.settings.autoload if loads is None else loads) and not model.loading:
                raise ApiError(
                    f"the model {model.name!r} is not loaded: POST /models/load",
                    param="model",
                    code="model_not_loaded",
                )
            await self._wait_until_loaded(model)
        worker = model.worker
        assert worker is not None
        model.open += 1
        try:
            yield worker
        finally:
            model.open -= 1
            model.used = model.used if is_look else time.monotonic()
            self.changes.notify()
            if unloads:
                self.begin_unload(model)

    async def _wait_until_loaded(self, model: Model) -> None:
        """Wait for a load, which goes on if this is cancelled. Raises ApiError."""
        if self.waiting >= self.settings.waiting:
            raise busy(f"{self.waiting} requests wait for models to be loaded, which is the limit")
        age = time.monotonic() - model.failed_at
        if not model.loading and model.cause and age < self.settings.retry_seconds:
            raise self._not_loaded(model)
        task = self.load(model)
        self.waiting += 1
        model.awaited += 1
        try:
            await asyncio.wait((task,))
        finally:
            self.waiting -= 1
            model.awaited -= 1
            self.changes.notify()
        if not task.cancelled() and isinstance(task.exception(), ApiError):
            raise task.exception()  # type: ignore[misc]
        if task.cancelled() or task.exception() is not None:
            raise self._not_loaded(model)

    def _not_loaded(self, model: Model) -> ApiError:
        why = model.cause or "it was to be unloaded meanwhile"
        return ApiError(
            f"the model {model.name!r} could not be loaded: {why}",
            status=500 if model.cause else 503,
            kind="server_error",
            param="model",
            code="model_not_available",
            headers={"Retry-After": str(max(1, round(self.settings.retry_seconds)))},
        )

    # ---- loading and unloading ----

    def load(self, model: Model) -> asyncio.Task[None]:
        """Begin to load a model, or join the load that runs."""
        if model.loading is None:
            model.loading = self._begin(self._load(model))
            self.changes.notify()
        return model.loading

    async def unload(self, model: Model) -> None:
        """Unload a model once its open requests are answered; one that is loading is stopped. It
        goes on if this is cancelled."""
        await asyncio.wait((self.begin_unload(model),))

    def begin_unload(self, model: Model) -> asyncio.Task[None]:
        """See `unload`."""
        return self._begin(self._unload(model))

    async def _unload(self, model: Model) -> None:
        if model.loading is not None and not model.leaves:
            model.loading.cancel()
            await asyncio.wait((model.loading,))
        if model.status == "loaded":
            model.leaves = True
            await self.changes.until(lambda: model.status != "loaded" or not model.open)
        if model.status == "loaded":
            self._stop(model)
        await self.changes.until(lambda: model.status != "unloading")

    async def _load(self, model: Model) -> None:
        """Load a model once it may, and there is room. Raises LoadError, ModelError, and ApiError
        where it waited too long."""

        def is_settled() -> bool:
            return model.status != "unloading" and not model.leaves

        try:
            await self.changes.until(is_settled)
            if model.status == "loaded":
                return  # it was not to leave after all
            async with self._turn:
                await self.changes.until(is_settled)
                if model.status == "unloaded":
                    await self._load_now(model)
        finally:
            model.loading = None
            self.changes.notify()

    async def _load_now(self, model: Model) -> None:
        """See `_load`."""
        model.status = "loading"
        try:
            await asyncio.to_thread(model.spec.check)
            await self.room.make_place(model)
            while not await self._try_to_load(model):
                pass
        except BaseException as error:
            model.status, model.worker = "unloaded", None
            if not isinstance(error, ApiError | asyncio.CancelledError):
                folder = f"{model.spec.folder}{os.sep}" if model.spec.folder else ""
                model.cause = str(error).replace(folder, "")
                model.failed_at = time.monotonic()
                model.failures += 1
                log.error("the model %s could not be loaded: %s", model.name, error)
            raise

    async def _try_to_load(self, model: Model) -> bool:
        """Load a model; False where another one had to make room, so that it may fit now. Raises
        LoadError."""
        worker = self._launch(model.spec, self._socket(), self._share(model))
        model.worker = worker
        began = time.monotonic()
        log.info("loading %s", model.name)
        try:
            worker.start()
            await worker.ready()
            model.info = await self._describe(worker.path)
        except (OSError, GoneError) as error:
            await worker.end(0)
            raise LoadError(worker.ended.result() or Failure(str(error))) from error
        except LoadError as error:
            if error.is_memory and await self.room.evict():
                return False
            raise
        except asyncio.CancelledError:
            await worker.end(0)
            raise
        model.status, model.cause, model.used = "loaded", None, time.monotonic()
        model.loads += 1
        log.info("loaded %s in %.1f s", model.name, model.used - began)
        self._begin(self._watch(model, worker))
        return True

    async def _watch(self, model: Model, worker: AnyWorker) -> None:
        """Notice the end of a model's process."""
        await asyncio.wait((worker.ended,))
        if model.worker is not worker:
            return
        if (failure := worker.ended.result()) is not None:
            model.cause = failure.cause
            log.error("the model %s is gone: %s", model.name, failure.cause)
        model.status, model.worker, model.leaves = "unloaded", None, False
        self.changes.notify()

    def _stop(self, model: Model) -> None:
        """Begin to unload a model without open requests."""
        assert model.worker is not None
        assert model.is_idle
        model.status = "unloading"
        log.info("unloading %s", model.name)
        self._begin(model.worker.end(self.settings.end_seconds))  # `_watch` notices it

    def _socket(self) -> Path:
        return self._sockets / f"{next(self._numbers)}.sock"

    def _share(self, model: Model) -> float | None:
        """Of the free memory, what a model may take: as much as each other one that may be loaded
        beside it."""
        if model.spec.memory_share is not None:
            return model.spec.memory_share
        most = min(self.settings.loaded or len(self.models), len(self.models))
        return self.settings.memory_share / max(1, most - len(self.room.with_status("loaded")))

    # ---- idle sleep and the end ----

    async def run(self) -> None:
        """Load what is to be loaded at the start, and unload models that are idle for long, until
        cancelled."""
        for model in [*self.models.values()]:
            if model.spec.load_on_startup:
                self.load(model)
        while True:
            now = time.monotonic()
            limits = [_MOST_TICK]
            for model in self.models.values():
                if (limit := model.spec.idle_seconds) is not None:
                    limits.append(limit / 4)
                    if model.is_idle and now - model.used >= limit:
                        self._stop(model)
            await asyncio.sleep(max(_LEAST_TICK, min(limits)))

    async def close(self, aborts: bool) -> None:
        """End all models; those with open requests abort them, if ``aborts``."""
        for model in self.models.values():
            if model.loading is not None:
                model.loading.cancel()
        seconds = 0.0 if aborts else self.settings.end_seconds
        workers = [
            model.worker for model in self.room.with_status("loaded") if model.worker is not None
        ]
        await asyncio.gather(*(worker.end(seconds) for worker in workers))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._owners.close()

    def _begin(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # a load for which no request waits may fail
