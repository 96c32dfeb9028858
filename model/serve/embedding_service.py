"""A service of embeddings and scores: requests that wait together share steps."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NoReturn

from urdir.driver.errors import loses_device
from urdir.model.engine.adapters import AdapterScale
from urdir.model.engine.encoding.encoder import Floats
from urdir.model.engine.encoding.texts import normalized, pair_tokens
from urdir.model.engine.engine import Engine
from urdir.model.engine.requests.device_lost import DeviceLostError
from urdir.model.engine.requests.metrics import Metrics
from urdir.model.engine.requests.request import Ending, Piece, Request
from urdir.model.engine.requests.slots import SlotAction, SlotDone
from urdir.model.errors import BusyError, SettingsError
from urdir.model.families.pooling import Pooling
from urdir.model.serve.embeddings import Embeds
from urdir.model.serve.errors import ApiError
from urdir.model.serve.interface import ServedModel
from urdir.model.text.constraints import Constraint

#: Requests that wait at most.
QUEUE = 1024


@dataclass(slots=True, eq=False)  # two may be alike
class _Job:
    """Texts of a request, as tokens, and its result."""

    texts: list[Sequence[int]]
    result: Future[Floats] = field(default_factory=Future)


class EmbeddingService:
    """`AsyncService` of a model that makes embeddings. A thread runs the steps; it takes the texts
    of all requests that wait, as many as fit a step."""

    def __init__(self, engine: Engine, model: ServedModel, pooling: Pooling | None = None) -> None:
        self.model = model
        self.lost: Exception | None = None
        self._engine = engine
        self._pooling = engine.encoder.chosen_pooling(pooling)
        if self._pooling == "none":
            raise SettingsError(
                "the pooling none gives a vector for each token: serve embeddings with another one"
            )
        engine.encoder.check_pooling(self._pooling)
        self._waiting: deque[_Job] = deque()
        self._changed = threading.Condition()
        self._ends = False
        self._running = 0
        self._tokens = self._steps = 0
        self._thread = threading.Thread(target=self._run, name="embeddings", daemon=True)
        self._thread.start()

    async def embed(self, asked: Embeds) -> tuple[Floats, int]:
        """The embeddings or scores that a request wants, and its number of tokens. Raises ApiError
        for scores of a model without them, ContextFullError, BusyError, what `lost` has."""
        ranks = self._pooling == "rank"
        if asked.pairs and not ranks:
            raise ApiError(
                "the model makes embeddings, no scores: /v1/embeddings", code="no_scores"
            )
        if not asked.pairs and ranks:
            raise ApiError(
                "the model makes scores, no embeddings: /v1/rerank", code="no_embeddings"
            )
        texts = await asyncio.to_thread(self._tokenized, asked)
        job = _Job(texts)
        self._add(job)
        try:
            rows = await asyncio.wrap_future(job.result)
        finally:
            if job.result.cancel():
                self._remove(job)
        return rows, sum(map(len, texts))

    def _tokenized(self, asked: Embeds) -> list[Sequence[int]]:
        engine, made = self._engine, list[Sequence[int]]()
        for text in asked.texts:
            made.append(engine.tokenizer.encode_whole(text) if isinstance(text, str) else text)
        for first, second in asked.pairs:
            made += pair_tokens(engine.tokenizer, engine.file.metadata, first, [second])
        if asked.truncates:
            most = engine.encoder.context
            made = [text if len(text) <= most else [*text[: most - 1], text[-1]] for text in made]
        engine.encoder.check_texts(made)
        return made

    def _add(self, job: _Job) -> None:
        with self._changed:
            if self.lost is not None:
                raise self.lost
            if len(self._waiting) >= QUEUE:
                raise BusyError(f"{QUEUE} requests wait already", retry_after=1.0)
            self._waiting.append(job)
            self._changed.notify_all()

    def _remove(self, job: _Job) -> None:
        """Remove a cancelled job."""
        with self._changed:
            if job in self._waiting:
                self._waiting.remove(job)
            self._changed.notify_all()

    # ---- the thread of steps ----

    def _run(self) -> None:
        while (jobs := self._next()) is not None:
            texts = [text for job in jobs for text in job.texts]
            try:
                rows = self._engine.encoder.encode(texts, self._pooling)
                if self._pooling != "rank":
                    rows = normalized(rows)
            except Exception as error:
                self._fail(jobs, error)
                continue
            start = 0
            for job in jobs:
                end = start + len(job.texts)
                if job.result.set_running_or_notify_cancel():
                    job.result.set_result(rows[start:end])
                start = end
            with self._changed:
                self._running, self._steps = 0, self._steps + 1
                self._tokens += sum(map(len, texts))
                self._changed.notify_all()

    def _next(self) -> list[_Job] | None:
        """The requests of the next step, at least one; None at the end."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._ends)
            if not self._waiting:
                return None
            most = self._engine.encoder.settings.rows
            jobs = [self._waiting.popleft()]
            rows = sum(map(len, jobs[0].texts))
            while self._waiting:
                more = sum(map(len, self._waiting[0].texts))
                if rows + more > most:
                    break
                jobs.append(self._waiting.popleft())
                rows += more
            self._running = len(jobs)
            return jobs

    def _fail(self, jobs: Sequence[_Job], error: Exception) -> None:
        """Give all requests of a step its error; after one of the driver nothing more is done."""
        with self._changed:
            self._running = 0
            failed = list(jobs)
            if loses_device(error):
                error = DeviceLostError(f"the device is lost, open the model again: {error}")
                self.lost = error
                failed += self._waiting
                self._waiting.clear()
            self._changed.notify_all()
        for job in failed:
            if job.result.set_running_or_notify_cancel():
                job.result.set_exception(error)

    # ---- the rest of a service ----

    def refuse(self) -> NoReturn:
        """There are no answers. Raises ApiError."""
        raise ApiError(
            "the model makes embeddings or scores, no answers: /v1/embeddings, /v1/rerank",
            code="no_answers",
        )

    async def generate(self, request: Request) -> AsyncGenerator[Piece | Ending, None]:
        """There are no answers. Raises ApiError."""
        self.refuse()
        yield Piece("", ())

    async def check(self, constraint: Constraint) -> None:
        """There are no answers. Raises ApiError."""
        self.refuse()

    async def act_on_slot(self, action: SlotAction) -> SlotDone:
        """There are no slots. Raises ApiError."""
        self.refuse()

    async def adapters(self, scales: Mapping[int, float] | None) -> tuple[AdapterScale, ...]:
        """There are none."""
        return ()

    async def metrics(self) -> Metrics:
        """Counts of now. Raises what `lost` has."""
        if self.lost is not None:
            raise self.lost
        with self._changed:
            return Metrics(
                queued=len(self._waiting),
                running=self._running,
                prompt_tokens=self._tokens,
                steps=self._steps,
            )

    async def drain(self) -> None:
        """Wait until all open requests are answered."""

        def wait() -> None:
            with self._changed:
                self._changed.wait_for(lambda: not (self._waiting or self._running))

        await asyncio.to_thread(wait)

    async def close(self) -> None:
        """End the thread, free the device. Idempotent."""

        def end() -> None:
            with self._changed:
                self._ends = True
                self._changed.notify_all()
            self._thread.join()
            self._engine.close()

        await asyncio.to_thread(end)
