"""Requests and their results: plain data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from urdir.model.engine.adapter_pool import is_scaled
from urdir.model.engine.logit_processor import LogitProcessor
from urdir.model.engine.sampling_settings import DEFAULTS, Bounds, SamplingSettings
from urdir.model.errors import ModelError, SettingsError
from urdir.model.text.constraints import Constraint
from urdir.model.text.thought_limit import ThoughtLimit
from urdir.ptxgen.kernels.sampling_limits import MOST_LIKELY

if TYPE_CHECKING:
    from urdir.model.memory.scored_rows import TokenScores

_LIMIT = Bounds(0, math.inf, "0 or more", is_whole=True)
_LIKELY = Bounds(0, MOST_LIKELY, f"0 to {MOST_LIKELY}", is_whole=True)


class Finish(Enum):
    """Why a generation ended: END, an end token; STOP, a stop string; LENGTH, the requested number
    of tokens; FULL, no room left in the KV cache; INTERRUPTED, cancelled or closed."""

    END = "end"
    STOP = "stop"
    LENGTH = "length"
    FULL = "full"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One answer that is wanted to ``prompt``, its token ids.

    It ends after ``limit`` tokens (None: when the context is full; 0: once the prompt is computed,
    of which later ones find their beginning), at an end token of the model (never with
    ``ignore_end``), or where its text has one of ``stops``. The text has those control
    tokens that are ``shown``. A ``constraint`` says which tokens may come next, from those before:
    each step waits for the token of the last one then. With a limit of ``thoughts`` steps do so
    while the reasoning is ended. Settings without a seed get a new one here:
    ``settings.seed`` repeats the answer. What is known of the prompt's beginning is shared with
    requests of the same ``scope`` alone, a name of some bytes that is no secret. Without ``drafts``
    every step takes one token of it; ``draft_p_min`` is its own `DraftSettings.p_min`. ``adapters``
    are names of LoRA adapters that are loaded, with their scales (None: those of the engine).
    ``processors`` change the logits, one after the other: each step waits for the token of the last
    one, and has no drafts. Of an encoder-decoder the ``source`` is what its encoder reads, and the
    prompt begins the decoder's text; without a source the prompt is that (`sources.with_source`).
    With ``prompt_logprobs`` pieces have the log-probabilities of the prompt's tokens after the
    first one and of as many of the likeliest ones (20 at most), of the model's own distribution:
    all of the prompt is computed then. Raises ModelError for an empty prompt, SettingsError.
    """

    prompt: tuple[int, ...]
    settings: SamplingSettings = DEFAULTS
    limit: int | None = None
    stops: tuple[str, ...] = ()
    ignore_end: bool = False
    constraint: Constraint | None = None
    thoughts: ThoughtLimit | None = None
    shown: frozenset[str] = frozenset()
    scope: bytes = b""
    drafts: bool = True
    draft_p_min: float | None = None
    adapters: tuple[tuple[str, float], ...] | None = None
    processors: tuple[LogitProcessor, ...] = ()
    source: tuple[int, ...] = ()
    prompt_logprobs: int | None = None

    @property
    def given(self) -> int:
        """Number of tokens that are given: of the source, if there is one, else of the prompt."""
        return len(self.source or self.prompt)

    @property
    def positions(self) -> int:
        """Positions of the cache that it takes before its answer."""
        return max(len(self.prompt), len(self.source))

    def __post_init__(self) -> None:
        self._check_kinds()
        if not self.prompt:
            raise ModelError("the prompt is empty: the model needs a token to go on from")
        if self.limit is not None and not _LIMIT.allow(self.limit):
            raise SettingsError(f"a limit of {self.limit!r} tokens: expected {_LIMIT.words}")
        likely = self.prompt_logprobs
        if likely is not None and not _LIKELY.allow(likely):
            raise SettingsError(f"prompt_logprobs {likely!r}: expected {_LIKELY.words}")
        if self.draft_p_min is not None and not 0 <= self.draft_p_min <= 1:
            raise SettingsError(f"drafts as likely as {self.draft_p_min!r}: expected 0 to 1")
        if self.settings.seed is None:
            object.__setattr__(self, "settings", self.settings.with_seed())
        least = self.settings.min_tokens
        if self.limit is not None and least > self.limit:
            raise SettingsError(f"at least {least} tokens of {self.limit} that are wanted")

    def _check_kinds(self) -> None:
        """Raise SettingsError for objects of other kinds."""
        if isinstance(self.prompt, str):
            raise SettingsError(
                f"a prompt is {self.prompt!r:.40}: expected token ids, see Engine.tokenize"
            )
        if not isinstance(self.settings, SamplingSettings):
            raise SettingsError(
                f"settings are {self.settings!r:.80}: expected SamplingSettings(temperature=0.0)"
            )
        if not isinstance(self.stops, tuple) or not all(map(_is_stop, self.stops)):
            raise SettingsError(f"stops are {self.stops!r:.80}: expected texts, none empty")
        if not all(is_scaled(each, str) for each in self.adapters or ()):
            given = f"{self.adapters!r:.80}"
            raise SettingsError(f"adapters are {given}: expected names, or pairs with a scale")
        if not all(isinstance(each, LogitProcessor) for each in self.processors):
            raise SettingsError(
                f"logit processors are {self.processors!r:.80}: expected objects of classes that "
                "derive from urdir.model.LogitProcessor"
            )


def _is_stop(text: object) -> bool:
    return isinstance(text, str) and bool(text)


class TokenChoice(NamedTuple):
    """One token of an answer, its ``logprob`` (natural logarithm; None unless the settings have
    ``logprobs``), the likeliest tokens with theirs (``top``, likeliest first), and the ``text``
    that it completes: none within a character, or while a stop string may have begun."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    text: str = ""


class Piece(NamedTuple):
    """Text that became known at once (perhaps ""), and the tokens that did, in order; and, where
    they are wanted, the ``scores`` of the prompt's next tokens, the first of all being those of
    its second token."""

    text: str
    choices: tuple[TokenChoice, ...]
    scores: tuple[TokenScores, ...] = ()

    def then(self, later: Piece) -> Piece:
        """This one and the next as one."""
        text, choices = self.text + later.text, self.choices + later.choices
        return Piece(text, choices, self.scores + later.scores)


@dataclass(frozen=True, slots=True)
class Ending:
    """Why an answer ended, and the tokens it took: of the prompt, of that found in the cache, and
    of the answer, an end token not counted. ``stopped_by`` is the stop string. ``accepted_tokens``
    are those of the ``drafted_tokens`` that stood. The request waited for ``queue_seconds``."""

    finish: Finish
    prompt_tokens: int
    cached_tokens: int
    generated_tokens: int
    stopped_by: str | None = None
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    queue_seconds: float = field(default=0.0, compare=False)


#: What comes out of a request: pieces, and last an ending or what went wrong.
Item = Piece | Ending | Exception
