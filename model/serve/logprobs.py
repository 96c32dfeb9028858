"""Log-probabilities of tokens in the formats of OpenAI's two endpoints."""

from __future__ import annotations

from collections.abc import Sequence

from urdir.model.engine.requests.request import TokenChoice
from urdir.model.memory.scored_rows import TokenScores
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
        self.end = begin

    def pushed(self, choices: Sequence[TokenChoice]) -> list[int]:
        """Those of the next tokens."""
        found = []
        for choice in choices:
            found.append(self.end)
            self.end += len(self._stream.push(choice.token))
        return found


def text_logprobs(
    tokenizer: Tokenizer, choices: Sequence[TokenChoice], offsets: TextOffsets
) -> Json:
    """The "logprobs" of the next tokens of a completion's choice.

    If two of the likeliest tokens have the same text, the likelier one is kept. A prompt's first
    token has no log-probability.
    """
    texts = [_bytes(tokenizer, choice.token).decode("utf-8", "replace") for choice in choices]
    top: list[dict[str, float] | None] = []
    for choice in choices:
        if choice.logprob is None:
            top.append(None)
            continue
        likeliest: dict[str, float] = {}
        for token, logprob in choice.top:
            text = _bytes(tokenizer, token).decode("utf-8", "replace")
            likeliest.setdefault(text, _finite(logprob))
        top.append(likeliest)
    return {
        "tokens": texts,
        "token_logprobs": [
            None if choice.logprob is None else _finite(choice.logprob) for choice in choices
        ],
        "top_logprobs": top,
        "text_offset": offsets.pushed(choices),
    }


class ScoredPrompt:
    """The tokens of a prompt, as their log-probabilities become known: ``end`` is the character
    after those so far."""

    def __init__(self, tokenizer: Tokenizer, tokens: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self._tokens = tokens
        self._offsets = TextOffsets(tokenizer)
        self._at = 0

    @property
    def end(self) -> int:
        """Where the next token begins."""
        return self._offsets.end

    @property
    def is_whole(self) -> bool:
        """Whether all tokens are known."""
        return self._at == len(self._tokens)

    def logprobs(self, scores: Sequence[TokenScores], likely: int) -> Json:
        """`text_logprobs` of the next tokens, each with this many likely ones; before all others,
        of the first one too."""
        choices = self._choices(scores, likely)
        return text_logprobs(self._tokenizer, choices, self._offsets)

    def by_token(self, scores: Sequence[TokenScores], likely: int) -> list[Json | None]:
        """vLLM's "prompt_logprobs" of all tokens: by token id, with ranks of likely tokens."""
        self._at, found = 0, list[Json | None]()
        for choice in self._choices(scores, likely):
            if choice.logprob is None:
                found.append(None)
                continue
            entries = {str(choice.token): self._entry(choice.token, choice.logprob, None)}
            for rank, (token, logprob) in enumerate(choice.top, 1):
                entries[str(token)] = self._entry(token, logprob, rank)
            found.append(entries)
        return found

    def _entry(self, token: int, logprob: float, rank: int | None) -> Json:
        text = _bytes(self._tokenizer, token).decode("utf-8", "replace")
        return {"logprob": _finite(logprob), "rank": rank, "decoded_token": text}

    def _choices(self, scores: Sequence[TokenScores], likely: int) -> list[TokenChoice]:
        found = [] if self._at else [TokenChoice(self._tokens[0])]
        self._at = max(self._at, 1)
        for values, names in scores:
            tokens = self._tokens[self._at : self._at + len(values)]
            rows = zip(tokens, values.tolist(), names.tolist(), strict=True)
            for token, (own, *others), ids in rows:
                top = tuple(zip(ids[:likely], others[:likely], strict=True))
                found.append(TokenChoice(token, own, top))
            self._at += len(values)
        return found


def _bytes(tokenizer: Tokenizer, token: int) -> bytes:
    # padding rows of the embedding have no token
    return tokenizer.token_bytes(token) if token < tokenizer.vocab_size else b""


def _finite(logprob: float | None) -> float:
    return _NEVER if logprob is None else max(logprob, _NEVER)
