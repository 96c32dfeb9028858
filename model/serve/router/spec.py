"""What a router serves, and how."""

from __future__ import annotations

import socket
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

Greet = Callable[[], None]
"""Called in any process of a model's, once it answers."""


class Serve(Protocol):
    """Serves one model until SIGTERM; picklable."""

    def __call__(self, listener: socket.socket, greet: Greet, memory_share: float | None) -> None:
        """Answer at ``listener``. The cache takes up to a ``memory_share`` of what the device has
        free; None: as the model's own flags say. Raises ModelError, DriverError."""


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """A model that may be loaded.

    ``names`` are listed, the first one is its own; ``others`` are names that requests may use, too.
    ``check`` raises ModelError for files that cannot be loaded, before another model makes room.
    ``idle_seconds`` without a request free its device memory (None: never). ``stamp`` changes with
    the files.
    """

    names: tuple[str, ...]
    serve: Serve
    check: Callable[[], object] = lambda: None
    others: tuple[str, ...] = ()
    nbytes: int = 0
    modified: float = 0.0
    idle_seconds: float | None = None
    load_on_startup: bool = False
    memory_share: float | None = None  # of its own; None: an equal part of what is free
    any_name: bool = False  # requests may have any name: its server says which are its own
    folder: str = ""  # of its files, of which clients are not to read

    @property
    def name(self) -> str:
        """The name in answers."""
        return self.names[0]


@dataclass(frozen=True, slots=True)
class RouterSettings:
    """Limits of a router; times in seconds."""

    loaded: int = 4  # most models at once; 0: as many as the device takes
    autoload: bool = True  # models are loaded for requests
    waiting: int = 256  # requests for models that are not loaded yet
    room_seconds: float = 120.0  # for other models to have no open request
    patience_seconds: float = 5.0  # of that, before the one used longest ago gets no new ones
    retry_seconds: float = 5.0  # before a model that failed is tried again for a request
    end_seconds: float = 30.0  # for a model's processes to end
    memory_share: float = 0.9  # of free memory, for all models together
