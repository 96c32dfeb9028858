"""What is kept between requests for a time: responses that later ones go on from.

Front ends are several processes, and the next request may reach another one. The engine's process,
to which each has a connection of its own, keeps it for all of them (`apart.desks`).
"""

from __future__ import annotations

import json
import time
from collections import OrderedDict
from enum import Enum
from hashlib import blake2b
from typing import Literal, Protocol

from urdir.model.serve.errors import ApiError
from urdir.model.serve.interface import Json
from urdir.model.serve.json_response import encode_json

Action = Literal["put", "append", "get", "drop"]
#: A value takes at most this part of a store's bytes, so that one does not displace all others, and
#: requests that go on from each other cannot make it ever larger.
_PART = 16
#: What an entry takes beside its value: many are of a few bytes, or of none.
ENTRY_BYTES = 256


class Store:
    """Values by name, within ``most_bytes`` and until unused for ``seconds``; the least recently
    used go first. Each takes `ENTRY_BYTES` more than it has. Not thread-safe."""

    def __init__(self, most_bytes: int, seconds: float) -> None:
        self._most_bytes = most_bytes
        self._seconds = seconds
        self._bytes = 0
        # in the order of their last use
        self._values: OrderedDict[bytes, tuple[float, bytes | bytearray]] = OrderedDict()

    def do(self, action: Action, name: bytes, value: bytes = b"", start: int = 0) -> bytes | None:
        """Put a value; append one to what is there, if that has ``start`` bytes; get what is there
        from ``start`` on; or drop it. Only "get" returns something, None if nothing is there. A
        value that is or becomes too large is not kept."""
        self._forget(time.monotonic() - self._seconds)
        known = self._take(name)
        if action == "put":
            self._keep(name, value)
        elif action == "append" and start == len(known or b""):
            known = known if isinstance(known, bytearray) else bytearray(known or b"")
            known += value
            self._keep(name, known)
        elif action != "drop" and known is not None:
            self._keep(name, known)
        return None if known is None or action != "get" else bytes(known[start:])

    def _keep(self, name: bytes, value: bytes | bytearray) -> None:
        if len(value) <= self._most_bytes // _PART:
            self._values[name] = time.monotonic(), value
            self._bytes += ENTRY_BYTES + len(value)
            self._forget(0.0)

    def _take(self, name: bytes) -> bytes | bytearray | None:
        _, value = self._values.pop(name, (0.0, None))
        if value is not None:
            self._bytes -= ENTRY_BYTES + len(value)
        return value

    def _forget(self, before: float) -> None:
        while self._values:
            name = next(iter(self._values))
            used, _ = self._values[name]
            if used > before and self._bytes <= self._most_bytes:
                break
            self._take(name)


class Keeping(Protocol):
    """A store of this process or another."""

    async def keep(
        self, action: Action, name: bytes, value: bytes = b"", start: int = 0
    ) -> bytes | None:
        """See `Store.do`."""


class KeepingHere:
    """A store of this process."""

    def __init__(self, store: Store) -> None:
        self._store = store

    async def keep(
        self, action: Action, name: bytes, value: bytes = b"", start: int = 0
    ) -> bytes | None:
        """See `Store.do`."""
        return self._store.do(action, name, value, start)


class Part(Enum):
    """What is kept of a response."""

    WHOLE = b""  # its conversation and itself, as JSON
    EVENTS = b"events"
    ALIVE = b"alive"  # when it was last being written
    ORDER = b"order"  # to stop


class Kept:
    """What was kept for a caller, the digest of an API key, who alone finds it."""

    def __init__(self, keeping: Keeping) -> None:
        self._keeping = keeping

    async def put(self, caller: bytes, name: str, value: Json) -> None:
        """Keep an object for a time."""
        await self.put_part(caller, name, Part.WHOLE, encode_json(value))

    async def get(self, caller: bytes, name: str) -> Json:
        """The object. Raises ApiError if there is none, or none any more."""
        value = await self.part(caller, name, Part.WHOLE)
        if value is None:
            raise ApiError(
                f"there is no response {name!r:.80}: it was not stored, too large, or is gone",
                status=404,
                kind="not_found_error",
                code="response_not_found",
            )
        kept: Json = json.loads(value)
        return kept

    async def put_part(self, caller: bytes, name: str, part: Part, value: bytes) -> None:
        """Keep a part."""
        await self._keeping.keep("put", _key(caller, name, part), value)

    async def append(self, caller: bytes, name: str, value: bytes, start: int) -> None:
        """Add events behind the first ``start`` bytes of them, unless these are gone."""
        await self._keeping.keep("append", _key(caller, name, Part.EVENTS), value, start)

    async def part(self, caller: bytes, name: str, part: Part, start: int = 0) -> bytes | None:
        """A part from byte ``start`` on; None if it is not there."""
        return await self._keeping.keep("get", _key(caller, name, part), b"", start)

    async def drop(self, caller: bytes, name: str, *parts: Part) -> None:
        """Keep parts no longer."""
        for part in parts:
            await self._keeping.keep("drop", _key(caller, name, part))


def _key(caller: bytes, name: str, part: Part) -> bytes:
    text = name.encode("utf-8", "surrogatepass")
    return blake2b(text, key=caller, digest_size=32, person=part.value).digest()
