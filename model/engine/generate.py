"""One user's answer: a request whose loop the caller runs, with statistics."""

from __future__ import annotations

import time
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial

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
    text, and no token ends it. If ``choose`` is given, the host samples tokens from logits with
    it.
    """

    session: Session
    tokenizer: Tokenizer | None
    request: Request
    choose: Choose | None = None
    statistics: Statistics = field(default_factory=Statistics)
    tokens: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.statistics.seed = self.request.settings.seed or 0

    def text(self) -> Generator[str, None, None]:
        """Pieces of printable text as they become known; together they are the answer. Raises what
        `pieces` raises."""
        with closing(self.pieces()) as pieces:
            for piece in pieces:
                if piece.text:
                    yield piece.text

    def pieces(self) -> Generator[Piece, None, None]:
        """What becomes known together: tokens and the text that they complete. Closing it ends the
        answer.

        Raises ContextFullError when the prompt does not fit, ModelError while another answer is
        open, DriverError.
        """
        statistics = self.statistics
        statistics.prompt_tokens = len(self.request.prompt)
        start = time.perf_counter()
        with closing(self._turned()) as pieces:
            for piece in pieces:
                now = time.perf_counter()
                if not self.tokens:
                    statistics.prompt_seconds, start = now - start, now
                statistics.generate_seconds = now - start
                self.tokens += [choice.token for choice in piece.choices]
                statistics.generated_tokens = len(self.tokens)
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
            while True:
                try:
                    loop.turn()
                except Exception as error:
                    loop.fail(error)
                self.statistics.cached_tokens = answer.cached
                while told := loop.take_items().get(answer):  # again for the ending of a stop
                    for item in told:
                        take(item)
                for item in items:
                    if isinstance(item, Exception):
                        raise item
                    if isinstance(item, Ending):
                        self.statistics.finish = item.finish
                        self.statistics.drafted_tokens = item.drafted_tokens
                        self.statistics.accepted_tokens = item.accepted_tokens
                        return
                    yield item
                items.clear()
