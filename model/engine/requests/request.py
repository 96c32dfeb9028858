"""What a user asks, and what comes out: plain data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from urdir.model.engine.sampling import GREEDY, SamplingSettings
from urdir.model.errors import ModelError, SettingsError
from urdir.model.text.constraints import Constraint


class Finish(Enum):
    """Why a generation ended."""

    END = "end"  # the model said so
    STOP = "stop"  # a stop string was found
    LENGTH = "length"  # as many tokens as were asked for
    FULL = "full"  # no room left in the KV cache
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One answer that is wanted to ``prompt``, its token ids.

    It ends after ``limit`` tokens (None: when the context is full), at an end token of the model
    (never with ``ignore_end``), or where its text has one of ``stops``. The text has those control
    tokens that are ``shown``. A ``constraint`` says which tokens may come next, from those before:
    each step waits for the token of the last one then. Raises ModelError for an empty prompt,
    SettingsError.
    """

    prompt: tuple[int, ...]
    settings: SamplingSettings = GREEDY
    limit: int | None = None
    stops: tuple[str, ...] = ()
    ignore_end: bool = False
    constraint: Constraint | None = None
    shown: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if not self.prompt:
            raise ModelError("the prompt is empty: the model needs a token to go on from")
        if self.limit is not None and self.limit < 1:
            raise SettingsError(f"a limit of {self.limit} tokens: expected 1 or more")
        least = self.settings.min_tokens
        if self.limit is not None and least > self.limit:
            raise SettingsError(f"at least {least} tokens of {self.limit} that are wanted")


class TokenChoice(NamedTuple):
    """One token of an answer, its log-probability, the most likely tokens with theirs, and the
    text that it completes: none within a character, or while a stop string may have begun."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    text: str = ""


class Piece(NamedTuple):
    """Text that became known, and the tokens that did."""

    text: str
    choices: tuple[TokenChoice, ...]


@dataclass(frozen=True, slots=True)
class Ending:
    """Why an answer ended, and the tokens it took: of the prompt, of that found in the cache, and
    of the answer, an end token not counted. ``stopped_by`` is the stop string."""

    finish: Finish
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    stopped_by: str | None = None
