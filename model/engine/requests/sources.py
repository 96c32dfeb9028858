"""Sources of requests: what the encoder of an encoder-decoder reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from urdir.model.engine.requests.request import Request
from urdir.model.errors import SettingsError

if TYPE_CHECKING:
    from urdir.model.engine.session import Session
    from urdir.model.text.tokenizer import Tokenizer


def with_source(session: Session, tokenizer: Tokenizer | None, request: Request) -> Request:
    """A request to a model as its scheduler takes it. If an encoder-decoder's request has no
    source, its prompt becomes that, with the token that ends texts; the decoder's text begins with
    the model's start token. Raises SettingsError for a source that no encoder reads, ModelError
    for a token outside the vocabulary, ContextFullError."""
    source = session.parts.config.source
    if source is None:
        if request.source:
            raise SettingsError("a source is for encoder-decoders: the model has no encoder")
        return request
    given = request.source
    if not given:
        given = whole(request.prompt, tokenizer)
        request = replace(request, prompt=(source.start,), source=given)
    session.check_tokens(given)
    session.check_room(len(given))
    return request


def whole(tokens: Sequence[int], tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """The tokens of a text, and the one that the model wants at its end, unless they have it."""
    end = None if tokenizer is None else tokenizer.ends_texts_with
    return (*tokens, *([end] if end is not None and end not in tokens[-1:] else []))
