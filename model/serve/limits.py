"""What requests may be at most."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what clients can have the server do; sizes are in bytes, times in seconds."""

    body: int = 4 << 20
    #: Parsed in the event loop, for the thread's turn costs as much: 40 us on a VM of two cores,
    #: where 16 KiB of JSON take 65 to 140. Larger ones are the thread's, and count in `bodies`.
    small_body: int = 16 << 10
    bodies: int = 64 << 20  # of all clients together, until they have become tokens
    body_seconds: float = 30.0
    depth: int = 64  # of nested JSON
    parts: int = 1 << 17  # lists, objects and strings (names, too) of JSON: 45 ms there, 20 MB
    items: int = 1 << 20  # all values of JSON: as many token ids as fit a body, but for short ones
    stops: int = 16
    answers: int = 128  # prompts of a request, times n
    biases: int = 300
    tools: int = 128
    salt: int = 256  # characters
    schema: int = 64 << 10  # of a JSON schema, pattern or grammar
    open_requests: int = 2048  # of all clients together
    connections: int = 4096  # as far as the system allows so many open files
    stalled_seconds: float = 30.0  # a client that reads nothing for so long is cut off
    silent_seconds: float = 30.0  # as is one that sends no whole request for that, or twice that
