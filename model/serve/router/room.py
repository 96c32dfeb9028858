"""Making room for a model: which of those that are loaded is unloaded."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from urdir.model.serve.errors import ApiError
from urdir.model.serve.router.changes import Changes
from urdir.model.serve.router.model import Model, Status
from urdir.model.serve.router.spec import RouterSettings


class Room:
    """The places of loaded models; ``stop`` begins to unload one."""

    def __init__(
        self,
        models: Mapping[str, Model],
        settings: RouterSettings,
        changes: Changes,
        stop: Callable[[Model], None],
    ) -> None:
        self.evictions = 0
        self._models = models
        self._settings = settings
        self._changes = changes
        self._stop = stop

    async def make_place(self, model: Model) -> None:
        """Evict models until one more may be loaded. Raises ApiError after a while."""
        others = [other for other in self._models.values() if other is not model]
        while self._settings.loaded:
            held = [other for other in others if other.status in ("loaded", "unloading")]
            if len(held) < self._settings.loaded:
                return
            await self.evict()

    async def evict(self) -> bool:
        """Unload the idle model that was used longest ago, or wait for one that is unloaded; False
        if there is none. If none is idle for a while, the one used longest ago gets no new
        requests, so that it becomes idle. Raises ApiError if that takes too long."""
        if not self.with_status("unloading"):
            if not self.with_status("loaded"):
                return False
            await self._evict_one()
        await self._changes.until(lambda: not self.with_status("unloading"))
        return True

    async def _evict_one(self) -> None:
        """See `evict`."""

        def is_over() -> bool:
            return self._idlest() is not None or not self.with_status("loaded")

        patience, most = self._settings.patience_seconds, self._settings.room_seconds
        if await self._changes.until(is_over, patience):
            self._stop_idlest()
            return
        leaving = min(self.with_status("loaded"), key=lambda model: model.used)
        leaving.leaves = True
        try:
            if not await self._changes.until(is_over, max(0.0, most - patience)):
                raise busy(
                    "all models that are loaded have open requests: there is no room for another "
                    "one yet"
                )
            self._stop_idlest()
        finally:
            leaving.leaves = False
            self._changes.notify()

    def _idlest(self) -> Model | None:
        """The idle model that was used longest ago."""
        idle = [model for model in self._models.values() if model.is_idle]
        return min(idle, key=lambda model: model.used, default=None)

    def _stop_idlest(self) -> None:
        """Begin to unload it, unless all are gone meanwhile."""
        if (idle := self._idlest()) is not None:
            self.evictions += 1
            self._stop(idle)

    def with_status(self, status: Status) -> list[Model]:
        """The models of a status."""
        return [model for model in self._models.values() if model.status == status]


def busy(why: str) -> ApiError:
    """The error for a router that has no room now."""
    return ApiError(
        why,
        status=503,
        kind="unavailable_error",
        code="no_room",
        headers={"Retry-After": "5"},
    )
