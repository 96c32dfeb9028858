"""ollama's "keep_alive": 0, by which its clients unload a model."""

from __future__ import annotations

import re
from typing import Any

import msgspec

CHAT, GENERATE = "/api/chat", "/api/generate"
_PATHS = (CHAT, GENERATE, "/api/embed", "/api/embeddings")
_EMPTY = re.compile(rb'\s*(null|\[\s*\]|"")?\s*')
_NO_TIME = re.compile(r"[+-]?(0+(\.0*)?(ns|us|µs|ms|s|m|h)?)+", re.ASCII)


class _Asked(msgspec.Struct):
    """A body, of which the rest is skipped."""

    keep_alive: Any = None
    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()


_decoder = msgspec.json.Decoder(_Asked)


class KeepAlive:
    """What a request to ``path`` says: whether its model is unloaded after it (``ends``), and
    whether it wants nothing but that (``is_empty``)."""

    def __init__(self, path: str, body: bytes | bytearray) -> None:
        self.ends = self.is_empty = False
        if path not in _PATHS or b"keep_alive" not in body:
            return
        try:
            asked = _decoder.decode(body)
        except (msgspec.DecodeError, RecursionError):  # the model's server says what is wrong
            return
        self.ends = _is_zero(asked.keep_alive)
        text = {CHAT: asked.messages, GENERATE: asked.prompt}.get(path)
        self.is_empty = text is not None and _EMPTY.fullmatch(text) is not None


def _is_zero(value: Any) -> bool:
    """Whether it is 0 seconds, or a text such as "0s"."""
    if isinstance(value, str):
        return _NO_TIME.fullmatch(value) is not None
    return isinstance(value, int | float) and not isinstance(value, bool) and value == 0
