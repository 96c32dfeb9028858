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
from typing import Any, Literal, Protocol

from urdir.model.errors import ModelError
from urdir.model.serve.errors import ApiError
from urdir.model.serve.router.spec import ModelSpec, RouterSettings
from urdir.model.serve.router.upstream import GoneError
from urdir.model.serve.router.worker import Failure, LoadError, Worker

log = logging.getLogger("urdir.serve")

Status = Literal["unloaded", "loading", "loaded", "unloading"]
#: Seconds between looks whether models are idle.
_LEAST_TICK, _MOST_TICK = 0.05, 1.0


class AnyWorker(Protocol):
    """What a fleet needs of a `Worker`."""

    path: Path
    ended: asyncio.Future[Failure | None]

    def start(self) -> None:
        """Start the process."""

    async def ready(self) -> None:
        """Wait until it answers. Raises LoadError."""

    async def end(self, seconds: float) -> None:
        """End it, within so long."""


class Model:
    """A model and where it stands.

    ``open`` requests are being answered, ``used`` is when the last one ended. ``cause`` says why
    the last load failed or the process ended. ``info`` is what its server said of it when it was
    loaded last. A model that ``leaves`` gets no new requests until it is loaded again.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.status: Status = "unloaded"
        self.worker: AnyWorker | None = None
        self.open = 0
        self.used = 0.0
        self.leaves = False
        self.cause: str | None = None
        self.failed_at = -float("inf")
        self.info: dict[str, Any] = {}
        self.loading: asyncio.Task[None] | None = None
        self.loads = self.failures = 0

    @property
    def name(self) -> str:
        """Its name in answers."""
        return self.spec.name

    @property
    def is_idle(self) -> bool:
        """Whether it is loaded, without a request."""
        return self.status == "loaded" and not self.open


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
        self.evictions = 0
        self._find = find
        self._launch = launch
        self._describe = describe
        self._by_name: dict[str, Model] = {}
        self._turn = asyncio.Lock()  # of loads
        self._change = asyncio.Event()  # a new one after each
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

    def get(self, name: str) -> Model | None:
        """The model of a name."""
        return self._by_name.get(name)

    # ---- use ----

    @contextlib.asynccontextmanager
    async def use(self, model: Model, loads: bool | None = None) -> AsyncGenerator[AnyWorker, None]:
        """A worker of a model, for one request; it is not unloaded meanwhile.

        A model that is not loaded is, unless ``loads`` (by default `RouterSettings.autoload`) is
        False. Raises ApiError: 400 if it is not loaded then, 503 if it cannot be, or too many
        requests wait.
        """
        while model.status != "loaded" or model.leaves:
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
            model.used = time.monotonic()
            self._changed()

    async def _wait_until_loaded(self, model: Model) -> None:
        """Wait for a load, which goes on if this is cancelled. Raises ApiError."""
        if self.waiting >= self.settings.waiting:
            raise busy(f"{self.waiting} requests wait for models to be loaded, which is the limit")
        age = time.monotonic() - model.failed_at
        if not model.loading and model.cause and age < self.settings.retry_seconds:
            raise self._not_loaded(model)
        task = self.load(model)
        self.waiting += 1
        try:
            await asyncio.wait((task,))
        finally:
            self.waiting -= 1
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
        return model.loading

    async def unload(self, model: Model) -> None:
        """Unload a model once its open requests are answered; one that is loading is stopped. It
        goes on if this is cancelled."""
        await asyncio.wait((self._begin(self._unload(model)),))

    async def _unload(self, model: Model) -> None:
        if model.loading is not None and not model.leaves:
            model.loading.cancel()
            await asyncio.wait((model.loading,))
        if model.status == "loaded":
            model.leaves = True
            await self._until(lambda: model.status != "loaded" or not model.open)
        if model.status == "loaded":
            self._stop(model)
        await self._until(lambda: model.status != "unloading")

    async def _load(self, model: Model) -> None:
        """Load a model once it may, and there is room. Raises LoadError, ModelError, and ApiError
        where it waited too long."""

        def is_settled() -> bool:
            return model.status != "unloading" and not model.leaves

        try:
            await self._until(is_settled)
            async with self._turn:
                await self._until(is_settled)
                if model.status == "unloaded":
                    await self._load_now(model)
        finally:
            model.loading = None
            self._changed()

    async def _load_now(self, model: Model) -> None:
        """See `_load`."""
        model.status = "loading"
        try:
            await asyncio.to_thread(model.spec.check)
            await self._make_place(model)
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
            if error.is_memory and await self._evict():
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
        self._changed()

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
        return self.settings.memory_share / max(1, most - len(self._with("loaded")))

    # ---- room ----

    async def _make_place(self, model: Model) -> None:
        """Evict models until one more may be loaded. Raises ApiError after a while."""
        others = [other for other in self.models.values() if other is not model]
        while self.settings.loaded:
            held = [other for other in others if other.status in ("loaded", "unloading")]
            if len(held) < self.settings.loaded:
                return
            await self._evict()

    async def _evict(self) -> bool:
        """Unload the idle model that was used longest ago, or wait for one that is unloaded; False
        if there is none. If none is idle for a while, the one used longest ago gets no new
        requests, so that it becomes idle. Raises ApiError if that takes too long."""
        if not self._with("unloading"):
            if not self._with("loaded"):
                return False
            if (idle := await self._idlest()) is not None:
                self.evictions += 1
                self._stop(idle)
        await self._until(lambda: not self._with("unloading"))
        return True

    async def _idlest(self) -> Model | None:
        """The idle model that was used longest ago, once there is one; None if all are gone
        meanwhile. See `_evict`."""

        def find() -> Model | None:
            return min(
                (model for model in self._with("loaded") if not model.open),
                key=lambda model: model.used,
                default=None,
            )

        def is_over() -> bool:
            return find() is not None or not self._with("loaded")

        patience, most = self.settings.patience_seconds, self.settings.room_seconds
        if not await self._until(is_over, patience):
            leaving = min(self._with("loaded"), key=lambda model: model.used)
            leaving.leaves = True
            try:
                if not await self._until(is_over, max(0.0, most - patience)):
                    raise busy(
                        "all models that are loaded have open requests: there is no room "
                        "for another one yet"
                    )
            finally:
                leaving.leaves = False
                self._changed()
        return find()

    def _with(self, status: Status) -> list[Model]:
        """The models of a status."""
        return [model for model in self.models.values() if model.status == status]

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
        workers = [model.worker for model in self._with("loaded") if model.worker is not None]
        await asyncio.gather(*(worker.end(seconds) for worker in workers))
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._owners.close()

    # ---- waiting ----

    def _begin(self, work: Any) -> asyncio.Task[Any]:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return task

    def _done(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # a load for which no request waits may fail

    def _changed(self) -> None:
        """Wake what waits for a change."""
        self._change.set()
        self._change = asyncio.Event()

    async def _until(self, condition: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait until a condition holds; whether it does within so many seconds."""
        try:
            async with asyncio.timeout(seconds):
                while not condition():
                    await self._change.wait()
        except TimeoutError:
            return False
        return True


def busy(why: str) -> ApiError:
    """The error for a router that has no room now."""
    return ApiError(
        why,
        status=503,
        kind="unavailable_error",
        code="no_room",
        headers={"Retry-After": "5"},
    )
