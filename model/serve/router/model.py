"""A model of a router, and where it stands."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Literal, Protocol

from urdir.model.serve.router.spec import ModelSpec
from urdir.model.serve.router.worker import Failure

Status = Literal["unloaded", "loading", "loaded", "unloading"]


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

    ``open`` requests are being answered, ``used`` is when the last one ended; ``awaited`` is how
    many wait for its load. ``cause`` says why the last load failed or the process ended. ``info``
    is what its server said of it when it was loaded last. A model that ``leaves`` gets no new
    requests until it is loaded again.
    """

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec
        self.status: Status = "unloaded"
        self.worker: AnyWorker | None = None
        self.open = self.awaited = 0
        self.used = 0.0
        self.leaves = False
        self.held = 0  # in all, by responses that are written without a connection
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
        """Whether it is loaded, without a request, also without one that it was loaded for."""
        is_wanted = self.open or (self.awaited and not self.leaves)
        return self.status == "loaded" and not is_wanted
