"""The model that a request names, and whether it is written without a connection."""

from __future__ import annotations

import msgspec

from urdir.model.serve.bodies import parse_body
from urdir.model.serve.fields import Fields
from urdir.model.serve.limits import Limits


class _Named(msgspec.Struct):
    """A body, of which the rest is skipped."""

    model: str | None = None
    name: str | None = None


class _Background(msgspec.Struct):
    background: bool = False


_decoder = msgspec.json.Decoder(_Named)


def model_field(body: bytes | bytearray, limits: Limits) -> str | None:
    """The name in a body: "model", or "name", as older clients of ollama have it for /api/show.
    None without one. Raises ApiError for a body that is not a JSON object, or a name that is not a
    text.

    The server of the model reads the body again, within its limits.
    """
    try:
        named = _decoder.decode(body)
    except (msgspec.DecodeError, RecursionError):
        fields = Fields(parse_body(body, limits))
        return fields.text("model") or fields.text("name") or None
    return named.model or named.name or None


def is_background(body: bytes | bytearray) -> bool:
    """Whether a request to /v1/responses wants its response written without a connection."""
    try:
        return msgspec.json.decode(body, type=_Background).background
    except (msgspec.DecodeError, RecursionError):
        return False
