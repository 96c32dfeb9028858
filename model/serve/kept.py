"""What is kept between requests for a time: responses that later ones go on from.

Front ends are several processes, and the next request may reach another one. The engine's process,
to which each has a connection of its own, keeps it for all of them (`apart.desks`).
"""

from __future__ import annotations

import json
import time
from hashlib import blake2b
from typing import Literal, Protocol

from urdir.model.serve.errors import ApiError
from urdir.model.serve.interface import Json
from urdir.model.serve.json_response import encode_json

Action = Literal["put", "get", "drop"]
#: A value takes at most this part of a store's bytes, so that one does not displace all others, and
#: requests that go on from each other cannot make it ever larger.
_PART = 16


class Store:
    """Values by name, within ``most_bytes`` and until unused for ``seconds``; those used last
    longest ago go first. Not thread-safe."""

    def __init__(self, most_bytes: int, seconds: float) -> None:
        self._most_bytes = most_bytes
        self._seconds = seconds
        self._bytes = 0
        self._values: dict[bytes, tuple[float, bytes]] = {}  # in the order of their last use

    def do(self, action: Action, name: bytes, value: bytes = b"") -> bytes | None:
        """Put a value, or get or drop one; the value that was there. One that is too large is not
        put."""
        self._forget(time.monotonic() - self._seconds)
        known = self._take(name)
        kept = {"put": value, "get": known, "drop": None}[action]
        if kept is not None and len(kept) <= self._most_bytes // _PART:
            self._values[name] = time.monotonic(), kept
            self._bytes += len(kept)
            self._forget(0.0)
        return known

    def _take(self, name: bytes) -> bytes | None:
        _, value = self._values.pop(name, (0.0, None))
        if value is not None:
            self._bytes -= len(value)
        return value

    def _forget(self, before: float) -> None:
        for name, (used, _) in list(self._values.items()):
            if used > before and self._bytes <= self._most_bytes:
                break
            self._take(name)


class Keeping(Protocol):
    """A store of this process or another."""

    async def keep(self, action: Action, name: bytes, value: bytes = b"") -> bytes | None:
        """See `Store.do`."""


class KeepingHere:
    """A store of this process."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def keep(self, action: Action, name: bytes, value: bytes = b"") -> bytes | None:
        """See `Store.do`."""
        return self._store.do(action, name, value)


class Kept:
    """JSON objects that were kept for a caller, the digest of an API key, who alone finds them."""

    def __init__(self, keeping: Keeping) -> None:
        self._keeping = keeping

    async def put(self, caller: bytes, name: str, value: Json) -> None:
        """Keep an object for a time."""
        await self._keeping.keep("put", _key(caller, name), encode_json(value))

    async def get(self, caller: bytes, name: str) -> Json:
        """What was kept. Raises ApiError if that is nothing, or nothing any more."""
        value = await self._keeping.keep("get", _key(caller, name))
        if value is None:
            raise ApiError(
                f"there is no response {name!r:.80}: it was not stored, too large, or is gone",
                status=404,
                kind="not_found_error",
                code="response_not_found",
            )
        kept: Json = json.loads(value)
        return kept

    async def drop(self, caller: bytes, name: str) -> None:
        """Keep something no longer."""
        await self._keeping.keep("drop", _key(caller, name))


def _key(caller: bytes, name: str) -> bytes:
    return blake2b(name.encode("utf-8", "surrogatepass"), key=caller, digest_size=32).digest()
