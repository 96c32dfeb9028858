"""What the processes of a server are started with; all of it is picklable."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from urdir.model.serve.logs import LogSettings

if TYPE_CHECKING:
    from urdir.model.engine.engine import Engine
    from urdir.model.engine.requests.service import Service
    from urdir.model.serve.access import Access
    from urdir.model.serve.interface import Defaults
    from urdir.model.serve.limits import Limits
    from urdir.model.serve.served_model import NamedTexts

#: Exit code of a front end that another one in its place would have, too.
CANNOT_SERVE = 3


@dataclass(frozen=True, slots=True)
class Front:
    """What a front end serves; picklable. ``names`` are those of the model, given the one in its
    file, and ``defaults`` those of requests, given the file's metadata. ``adapters`` are those of
    `ServedModel`."""

    open_texts: Callable[[], AbstractContextManager[NamedTexts]]
    names: Callable[[str], list[str]]
    defaults: Callable[[Mapping[str, Any]], Defaults]
    access: Access
    limits: Limits
    adapters: tuple[tuple[str, float], ...] = ()
    logs: LogSettings = field(default_factory=LogSettings)


Post = Callable[[Callable[[], None]], None]


class Opens(Protocol):
    """Opens an engine with its service, whose items it hands to a `Post`."""

    def __call__(self, post: Post) -> tuple[Engine, Service]:
        """Raises ModelError, DriverError."""


@dataclass(frozen=True, slots=True)
class Settings:
    """What the processes need; picklable. ``greet`` gets the model's name and context. Answers have
    ``drain_seconds`` to end once the server is to stop (None: as long as they take)."""

    open_engine: Opens
    front: Front
    workers: int
    greet: Callable[[str, int], None]
    exit_on_device_loss: bool = False
    drain_seconds: float | None = None
