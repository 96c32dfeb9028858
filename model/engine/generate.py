"""Generation: from a prompt's tokens to a stream of text, with statistics."""

from __future__ import annotations

import time
from collections import abc
from collections.abc import Callable, Generator, Iterator
from contextlib import closing
from dataclasses import dataclass, field

from urdir.model.engine.batch import Output
from urdir.model.engine.sampling import SamplingSettings, sample
from urdir.model.engine.sequence import Finish, Ids, Sequence, StopConditions
from urdir.model.engine.session import Session
from urdir.model.text.text_stream import TextStream
from urdir.model.text.tokenizer import Tokenizer


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
    """One answer: iterate over ``text()``; this fills ``statistics`` and ``tokens``.

    ``prompt`` is the whole token sequence to answer, by sequence ``slot`` of the session; what of
    its beginning that sequence has in the cache is kept (`Session.kept`). At most ``limit`` tokens
    are generated (None: until the end or a full cache); ``ignore_end`` goes on past end tokens;
    ``host_sampling`` downloads logits and chooses in numpy. ``shown`` are control
    tokens that belong to the text (`AnswerFormat.shown`). ``on_token`` is called with the id of
    each token of the answer and the text that it completes, which may be "" within a character.
    """

    session: Session
    tokenizer: Tokenizer
    prompt: Ids
    settings: SamplingSettings
    limit: int | None = None
    stops: abc.Sequence[str] = ()
    ignore_end: bool = False
    host_sampling: bool = False
    slot: int = 0
    shown: frozenset[str] = frozenset()
    on_token: Callable[[int, str], None] | None = None
    statistics: Statistics = field(default_factory=Statistics)
    tokens: list[int] = field(default_factory=list)

    def prepare(self) -> None:
        """Record the graphs of the prompt and of the first token, for a session that has processed
        nothing: its weights need not be there yet (``meanwhile`` of `Engine.open`).
        """
        self.session.prepare(len(self.prompt), self._output)

    def text(self) -> Iterator[str]:
        """Pieces of printable text as they become known; together they are the answer.

        Raises ContextFullError when the prompt does not fit, the session then being as before.
        """
        self.statistics.seed = self.settings.seed
        start = time.perf_counter()
        self._begin()
        stream = TextStream(self.tokenizer, self.sequence.stop.strings, self.shown)
        for token in self._answer():
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
    def sequence(self) -> Sequence:
        """The sequence that answers."""
        return self.session.sequences[self.slot]

    def _begin(self) -> None:
        """Process the prompt, and tell the sequence how to go on and when to stop."""
        shared = self.sequence.shared_with(self.prompt)
        self.sequence.check_room(len(self.prompt))
        keep = self.session.kept(shared, self.slot)
        self.session.truncate(keep, self.slot)
        self.session.feed(self.prompt[keep:], self.slot)
        ends = frozenset() if self.ignore_end else frozenset(self.tokenizer.end_ids)
        stop = StopConditions(self.limit, ends, tuple(self.stops))
        self.session.set_sampling(self.settings, self.slot, stop)
        self.statistics.prompt_tokens = len(self.prompt)
        self.statistics.cached_tokens = keep

    def _answer(self) -> Iterator[int]:
        """Tokens of the answer, the one that ends it excluded."""
        finish = self.sequence.finish
        with closing(self._choose()) as tokens:
            while finish is None:
                token = next(tokens)
                finish = self.sequence.finish
                if finish is Finish.END:
                    break
                self.tokens.append(token)
                self.statistics.generated_tokens += 1
                yield token
        self.statistics.finish = finish

    def _choose(self) -> Generator[int, None, None]:
        """Tokens after the prompt until the cache is full, chosen on the device or by the host."""
        if self.host_sampling:
            return self._choose_on_host()
        return self.session.stream(self._output, self.slot, most=self.limit)

    @property
    def _output(self) -> Output:
        if self.host_sampling:
            return Output.LOGITS
        return Output.of(self.settings)

    def _choose_on_host(self) -> Generator[int, None, None]:
        """The same with logits downloaded and numpy choosing: what the device must match."""
        while not self.sequence.is_full:
            logits = self.session.forward_gpu_resident((self.slot,))[0]
            token = sample(
                logits,
                self.settings,
                self.sequence.length,
                self.sequence.tokens,
                answer_at=self.sequence.answer_at,
                end_ids=self.sequence.stop.end_ids,
            )
            if self.sequence.is_full:
                self.sequence.read(token)
            else:
                self.session.feed([token], self.slot)
            yield token
