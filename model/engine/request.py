"""What a user asks of the engine, and what comes out of it."""

from __future__ import annotations

from dataclasses import dataclass

from urdir.model.engine.sampling import SamplingSettings
from urdir.model.engine.sequence import GREEDY, Finish


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One answer that is asked for."""

    prompt: tuple[int, ...]
    settings: SamplingSettings = GREEDY
    limit: int | None = None  # most tokens of the answer
    min_tokens: int = 0  # no end id before that many
    stops: tuple[str, ...] = ()
    ignore_end: bool = False
    constraint: object | None = None  # model/text/constraints.py


@dataclass(frozen=True, slots=True)
class TokenChoice:
    """One token of an answer."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()  # the most likely tokens and their log-probabilities


@dataclass(frozen=True, slots=True)
class Piece:
    """Text that became known, and the tokens that did."""

    text: str
    choices: tuple[TokenChoice, ...]


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of an answer."""

    finish: Finish
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    stopped_by: str | None = None
