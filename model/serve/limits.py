"""Limits on requests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits on the work that clients can cause; sizes in bytes, times in seconds."""

    head: int = 64 << 10  # headers, beside the part in which they begin
    body: int = 4 << 20
    #: Smaller bodies are parsed in the event loop: switching to the text thread costs 40 us on a VM
    #: of two cores, parsing 16 KiB of JSON 65 to 140. Larger ones use the thread and count in
    #: `bodies`.
    small_body: int = 16 << 10
    bodies: int = 64 << 20  # all clients together, until tokenised
    body_seconds: float = 30.0
    depth: int = 64  # of JSON nesting
    parts: int = 1 << 17  # lists, objects and strings (including names) of JSON: 45 ms there, 20 MB
    items: int = 1 << 20  # all JSON values: about as many token ids as fit a body
    stops: int = 16
    answers: int = 128  # prompts per request times n
    biases: int = 300
    scores: int = 1 << 19  # log-probabilities of a request's prompts: 30 bytes of JSON, 4 us each
    tools: int = 128
    salt: int = 256  # characters; also of a text that has a bias
    schema: int = 64 << 10  # for a JSON schema, pattern or grammar
    open_requests: int = 2048  # all clients together
    background: int = 1024  # responses that are being written without a connection, likewise
    connections: int = 4096  # fewer if the system's limit of open files is lower
    stalled_seconds: float = 30.0  # a client that reads nothing for this time is disconnected
    # likewise one that sends no complete request for once or twice this time
    silent_seconds: float = 30.0
    pulse_seconds: float = 15.0  # of silence, after which a stream gets a comment
    kept_bytes: int = 64 << 20  # of responses, for those that go on from them
    kept_seconds: float = 3600.0  # without use
