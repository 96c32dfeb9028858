"""Generation: from a prompt's tokens to a stream of text, with statistics."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

from urdir.model.blocks.rows import Ending
from urdir.model.engine.sampling import SamplingSettings, sample
from urdir.model.engine.session import Session
from urdir.model.text.text_stream import TextStream
from urdir.model.text.tokenizer import Tokenizer


class Finish(Enum):
    """Why a generation ended."""

    END = "end"  # the model said so
    STOP = "stop"  # a stop string was found
    LENGTH = "length"  # as many tokens as were asked for
    FULL = "full"  # no room left in the KV cache
    INTERRUPTED = "interrupted"


@dataclass(slots=True)
class Statistics:
    """What a generation did, filled while it runs. Times are seconds of wall clock:
    ``prompt_seconds`` until the first token is known, ``generate_seconds`` from then on.
    """

    seed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    prompt_seconds: float = 0.0
    generate_seconds: float = 0.0
    finish: Finish = Finish.INTERRUPTED

    @property
    def tokens_per_second(self) -> float:
        """Tokens after the first one per second of making them; 0 where there are none."""
        later = self.generated_tokens - 1
        return later / self.generate_seconds if later > 0 and self.generate_seconds else 0.0


@dataclass(slots=True)
class Generation:
    """One answer: iterate over ``text()``; ``statistics`` and ``tokens`` fill up meanwhile.

    ``prompt`` is the whole token sequence to answer; what of it the session has processed already
    is kept, up to the longest common prefix with ``cached``. At most ``limit`` tokens are generated
    (None: until the end or a full cache); ``ignore_end`` goes on past end tokens;
    ``host_sampling`` downloads logits and chooses in numpy. ``on_token`` is called with the id of
    each token of the answer and the text that it completes, which may be "" within a character.
    """

    session: Session
    tokenizer: Tokenizer
    prompt: Sequence[int]
    settings: SamplingSettings
    limit: int | None = None
    stops: Sequence[str] = ()
    ignore_end: bool = False
    host_sampling: bool = False
    cached: Sequence[int] = ()
    on_token: Callable[[int, str], None] | None = None
    statistics: Statistics = field(default_factory=Statistics)
    tokens: list[int] = field(default_factory=list)

    def text(self) -> Iterator[str]:
        """Pieces of printable text as they become known; together they are the answer.

        Raises ContextFullError when the prompt does not fit, the session then being as before.
        """
        self.statistics.seed = self.settings.seed
        start = time.perf_counter()
        self._process_prompt()
        stream = TextStream(self.tokenizer, self.stops)
        for token in self._sample():
            now = time.perf_counter()
            if len(self.tokens) == 1:
                self.statistics.prompt_seconds, start = now - start, now
            self.statistics.generate_seconds = now - start
            piece = stream.push(token)
            if self.on_token is not None:
                self.on_token(token, piece)
            if piece:
                yield piece
            if stream.stopped_by is not None:
                self.statistics.finish = Finish.STOP
                break
        if rest := stream.finish():
            yield rest

    @property
    def sequence(self) -> list[int]:
        """Prompt and answer together."""
        return [*self.prompt, *self.tokens]

    def _process_prompt(self) -> None:
        keep = common_prefix(self.cached[: self.session.length], self.prompt[:-1])
        self.session.check_room(len(self.prompt))
        self.session.truncate(keep)
        self.session.feed(self.prompt[keep:])
        self.statistics.prompt_tokens = len(self.prompt)
        self.statistics.cached_tokens = keep

    def _sample(self) -> Iterator[int]:
        """Tokens of the answer, the one that ends it excluded."""
        if self.limit == 0:
            self.statistics.finish = Finish.LENGTH
            return
        for token in self._choose():
            if not self.ignore_end and token in self.tokenizer.end_ids:
                self.statistics.finish = Finish.END
                return
            self.tokens.append(token)
            self.statistics.generated_tokens += 1
            yield token
            if self.limit is not None and len(self.tokens) >= self.limit:
                self.statistics.finish = Finish.LENGTH
                return
        self.statistics.finish = Finish.FULL

    def _choose(self) -> Iterator[int]:
        """Tokens after the prompt until the cache is full, chosen on the device or by the host."""
        if not self.host_sampling:
            self.session.set_sampling(self.settings)
            ending = Ending.GREEDY if self.settings.is_greedy else Ending.SAMPLE
            yield from self.session.stream(ending, most=self.limit)
        else:
            yield from self._choose_on_host()

    def _choose_on_host(self) -> Iterator[int]:
        """The same with logits downloaded and numpy choosing: what the device must match."""
        while not self.session.is_full:
            logits = self.session.logits_step()
            token = sample(logits, self.settings, self.session.length, self.sequence)
            if not self.session.is_full:
                self.session.feed([token])
            yield token


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens two sequences share."""
    count = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        count += 1
    return count
