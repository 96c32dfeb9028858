"""One user's answer: a request whose loop the caller runs, with statistics."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from threading import Event

from urdir.model.engine.requests.answer_loop import AnswerLoop
from urdir.model.engine.requests.answer_text import AnswerText
from urdir.model.engine.requests.choices import Choose
from urdir.model.engine.requests.limits import Limits
from urdir.model.engine.requests.request import Ending, Finish, Item, Piece, Request
from urdir.model.engine.session import Session
from urdir.model.text.tokenizer import Tokenizer


@dataclass(slots=True)
class Statistics:
    """What a generation did, filled while it runs; ``seed`` repeats a drawn answer.
    ``accepted_tokens`` are those of the ``drafted_tokens`` that were accepted, known at the end.

    Times are seconds of wall clock: ``prompt_seconds`` until the first token is known,
    ``generate_seconds`` from then on.
    """

    seed: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    prompt_seconds: float = 0.0
    generate_seconds: float = 0.0
    finish: Finish = Finish.INTERRUPTED

    @classmethod
    def of(cls, request: Request) -> Statistics:
        """Those of an answer that has not begun."""
        return cls(seed=request.settings.seed or 0, prompt_tokens=request.given)

    def note(self, item: Piece | Ending, seconds: float) -> None:
        """Add what came ``seconds`` after the request."""
        if isinstance(item, Piece):
            if not self.generated_tokens:
                self.prompt_seconds = seconds
            self.generate_seconds = seconds - self.prompt_seconds
            self.generated_tokens += len(item.choices)
        else:
            self.finish, self.prompt_tokens = item.finish, item.prompt_tokens
            self.cached_tokens = item.cached_tokens
            self.drafted_tokens = item.drafted_tokens
            self.accepted_tokens = item.accepted_tokens

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second after the first token; 0 without any."""
        later = self.generated_tokens - 1
        return later / self.generate_seconds if later > 0 and self.generate_seconds else 0.0


@dataclass(slots=True)
class Generation:
    """The answer to ``request``: iterate over `text` or `pieces`; this fills ``statistics`` and
    ``tokens``.

    The prompt's cached prefix is not computed again. Without a ``tokenizer`` the answer has no
    text, and no token ends it. ``choose(answer, tokens, logits)``, if given, samples on the host:
    the id of the next token, from all tokens so far, the prompt's too, and (n_vocab,) f32 logits
    after them. It is slow: a `LogitProcessor` leaves the choice to the device.
    """

    session: Session
    tokenizer: Tokenizer | None
    request: Request
    choose: Choose | None = None
    statistics: Statistics = field(init=False)
    tokens: list[int] = field(default_factory=list)
    _cancelled: Event = field(default_factory=Event, init=False, repr=False)

    def __post_init__(self) -> None:
        self.statistics = Statistics.of(self.request)

    def cancel(self) -> None:
        """End the answer after the step that runs: `text` and `pieces` end as if it were whole, and
        it is INTERRUPTED. From any thread, before it begins too; once it has ended, nothing
        happens."""
        self._cancelled.set()

    def text(self) -> Generator[str, None, None]:
        """Pieces of printable text as they become known; together they are the answer. Raises what
        `pieces` raises."""
        with closing(self.pieces()) as pieces:
            for piece in pieces:
                if piece.text:
                    yield piece.text

    def pieces(self) -> Generator[Piece, None, None]:
        """What becomes known together: tokens and the text that they complete. Closing it ends the
        answer. A second iteration answers again.

        Raises ContextFullError when the prompt does not fit, ModelError while another answer is
        open, DriverError.
        """
        start = time.perf_counter()
        self.statistics = Statistics.of(self.request)
        self.tokens.clear()
        with closing(self._turned()) as pieces:
            for piece in pieces:
                self.statistics.note(piece, time.perf_counter() - start)
                self.tokens += [choice.token for choice in piece.choices]
                yield piece

    def _turned(self) -> Generator[Piece, None, None]:
        """The pieces, as rounds bring them."""
        limits = Limits.for_one(self.session.shapes)
        with AnswerLoop(self.session, self.tokenizer, limits, choose=self.choose) as loop:
            answer = loop.answer_to(self.request)
            loop.add(answer)
            items: list[Item] = []
            take: Callable[[Item], None] = items.append
            if self.tokenizer is not None:
                stop = partial(loop.stop, answer)
                take = AnswerText(self.tokenizer, self.request, items.append, stop)
            while not self._cancelled.is_set():
                try:
                    self.session.check_open()
                    loop.turn()
                except Exception as error:
                    loop.fail(error)
                self.statistics.cached_tokens = answer.cached
                while new := loop.take_items().get(answer):  # again for the ending of a stop
                    for item in new:
                        take(item)
                for item in items:
                    if isinstance(item, Exception):
                        raise item
                    if isinstance(item, Ending):
                        self.statistics.note(item, 0.0)
                        return
                    yield item
                items.clear()
