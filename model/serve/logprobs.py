"""Log-probabilities of tokens in the formats of OpenAI's two endpoints."""

from __future__ import annotations

from collections.abc import Sequence

from urdir.model.engine.requests.request import TokenChoice
from urdir.model.serve.interface import Json
from urdir.model.text.text_stream import TextStream
from urdir.model.text.tokenizer import Tokenizer

_NEVER = -9999.0  # JSON has no minus infinity; OpenAI writes this


def chat_logprobs(tokenizer: Tokenizer, choices: Sequence[TokenChoice]) -> list[Json]:
    """The list "content" of a chat choice's "logprobs"."""
    return [
        _token(tokenizer, choice.token, choice.logprob)
        | {"top_logprobs": [_token(tokenizer, *pair) for pair in choice.top]}
        for choice in choices
    ]


def _token(tokenizer: Tokenizer, token: int, logprob: float | None) -> Json:
    content = _bytes(tokenizer, token)
    return {
        "token": content.decode("utf-8", "replace"),
        "logprob": _finite(logprob),
        "bytes": list(content),
    }


class TextOffsets:
    """Where tokens of a completion begin in its text, the first one at character ``begin``; one
    within a character, where that does."""

    def __init__(self, tokenizer: Tokenizer, begin: int = 0) -> None:
        self._stream = TextStream(tokenizer)
        self._end = begin

    def pushed(self, choices: Sequence[TokenChoice]) -> list[int]:
        """Those of the next tokens."""
        found = []
        for choice in choices:
            found.append(self._end)
            self._end += len(self._stream.push(choice.token))
        return found


def text_logprobs(
    tokenizer: Tokenizer, choices: Sequence[TokenChoice], offsets: TextOffsets
) -> Json:
    """The "logprobs" of the next tokens of a completion's choice.

    If two of the likeliest tokens have the same text, the likelier one is kept.
    """
    texts = [_bytes(tokenizer, choice.token).decode("utf-8", "replace") for choice in choices]
    top: list[dict[str, float]] = []
    for choice in choices:
        likeliest: dict[str, float] = {}
        for token, logprob in choice.top:
            text = _bytes(tokenizer, token).decode("utf-8", "replace")
            likeliest.setdefault(text, _finite(logprob))
        top.append(likeliest)
    return {
        "tokens": texts,
        "token_logprobs": [_finite(choice.logprob) for choice in choices],
        "top_logprobs": top,
        "text_offset": offsets.pushed(choices),
    }


def _bytes(tokenizer: Tokenizer, token: int) -> bytes:
    # padding rows of the embedding have no token
    return tokenizer.token_bytes(token) if token < tokenizer.vocab_size else b""


def _finite(logprob: float | None) -> float:
    return _NEVER if logprob is None else max(logprob, _NEVER)
