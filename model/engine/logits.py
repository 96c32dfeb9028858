"""The logits of every position of a text, by the steps that answer requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from urdir.model.engine.generate import Generation
from urdir.model.engine.requests.answer import Answer
from urdir.model.engine.requests.request import Request
from urdir.model.engine.requests.sources import whole
from urdir.model.engine.sampling import Logits
from urdir.model.engine.sampling_settings import GREEDY
from urdir.model.engine.session import Session
from urdir.model.errors import ModelError

if TYPE_CHECKING:
    from urdir.model.text.tokenizer import Tokenizer


def logits_of(
    session: Session,
    tokens: Sequence[int],
    advance: Callable[[], object] = lambda: None,
    source: Sequence[int] = (),
) -> Logits:
    """The logits after each of ``tokens``, (n_tokens, n_vocab) f32; ``advance`` is called after
    each step. An encoder-decoder reads the ``source`` first. Raises what `logits_after` raises, and
    ModelError for no tokens."""
    rows = np.empty((len(tokens), session.parts.config.vocab_size), np.float32)
    for place, row in enumerate(logits_after(session, tokens[:1], tokens[1:], source)):
        rows[place] = row
        advance()
    return rows


def decoder_logits(
    session: Session,
    tokens: Sequence[int],
    of_text: Tokenizer | None,
    decoder: Sequence[int] | None,
) -> Logits:
    """`logits_of` the tokens of an encoder-decoder's ``decoder`` (None: the start token), whose
    encoder reads ``tokens``: those of a text by its tokeniser ``of_text``, whole. Raises ModelError
    without any."""
    of = session.parts.config.source
    assert of is not None
    if not (source := whole(tokens, of_text)):
        raise ModelError("the text is empty: the encoder needs a token to read")
    return logits_of(session, [of.start] if decoder is None else decoder, source=source)


def logprobs_of(session: Session, tokens: Sequence[int]) -> npt.NDArray[np.float64]:
    """ln p of each of ``tokens`` after the first, given those before it: (n_tokens - 1,) f64.

    Raises what `logits_after` raises, ModelError for fewer than two tokens, and UnsupportedError
    for an encoder-decoder."""
    session.check_predicts_texts()
    if len(tokens) < 2:
        raise ModelError(f"{len(tokens)} tokens: the first has no probability, give two or more")
    request = Request(prompt=tuple(tokens), settings=GREEDY, limit=0, prompt_logprobs=0)
    with closing(Generation(session, None, request).pieces()) as pieces:
        found = [scores.values[:, 0] for piece in pieces for scores in piece.scores]
    return np.concatenate(found).astype(np.float64)


def logits_after(
    session: Session,
    prompt: Sequence[int],
    given: Sequence[int] = (),
    source: Sequence[int] = (),
) -> Iterator[Logits]:
    """The logits (n_vocab,) f32 after ``prompt``, then after each of the tokens ``given``.

    Each given token takes a step and replaces the token that the step would choose. Raises
    ContextFullError if they do not fit, ModelError for a token outside the vocabulary or if the
    sequences are in use, DriverError.
    """
    session.check_room(len(prompt) + len(given))
    session.check_tokens(given)
    found: list[Logits] = []
    following = iter([*given, 0])

    def note(answer: Answer, tokens: Sequence[int], logits: Logits) -> int:
        found.append(logits)
        return next(following)

    request = Request(
        prompt=tuple(prompt), settings=GREEDY, limit=len(given) + 1, source=tuple(source)
    )
    with closing(Generation(session, None, request, note).pieces()) as pieces:
        for _ in pieces:
            yield found.pop()
