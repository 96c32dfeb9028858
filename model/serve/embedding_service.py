"""A service of embeddings and scores: requests that wait together share steps."""

from __future__ import annotations

import asyncio
import threading
from collections import deque
from collections.abc import AsyncGenerator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import NoReturn

import numpy as np

from urdir.driver.errors import loses_device
from urdir.model.engine.adapters import AdapterScale
from urdir.model.engine.encoding.encoder import Floats
from urdir.model.engine.encoding.texts import normalized, pair_tokens, tokens_of
from urdir.model.engine.engine import Engine
from urdir.model.engine.requests.device_lost import DeviceLostError
from urdir.model.engine.requests.metrics import Metrics
from urdir.model.engine.requests.request import Ending, Piece, Request
from urdir.model.engine.requests.slots import SlotAction, SlotDone
from urdir.model.engine.text_steps import MOST_TEXTS
from urdir.model.errors import BusyError, SettingsError
from urdir.model.families.pooling import Pooling
from urdir.model.serve.embeddings import Embeds
from urdir.model.serve.errors import ApiError
from urdir.model.serve.interface import ServedModel
from urdir.model.text.constraints import Constraint
from urdir.model.text.pair import Pair

#: Requests that wait at most.
QUEUE = 1024


@dataclass(slots=True)
class _Job:
    """Texts of a request, as tokens; ``made`` of the first ``begun`` of them so far, and the result
    of all."""

    texts: Sequence[Sequence[int]]
    made: list[Floats] = field(default_factory=list)
    begun: int = 0
    result: Future[Floats] = field(default_factory=Future)

    def take(self, rows: int, most: int) -> Sequence[Sequence[int]]:
        """The next texts that fit ``rows`` rows, ``most`` at most."""
        end = self.begun
        while end < min(len(self.texts), self.begun + most) and len(self.texts[end]) <= rows:
            rows -= len(self.texts[end])
            end += 1
        taken = self.texts[self.begun : end]
        self.begun = end
        return taken


_Step = list[tuple[_Job, Sequence[Sequence[int]]]]


def _cut(text: Sequence[int], most: int, ends: int) -> Sequence[int]:
    """The first tokens of a text, and its last ``ends`` ones."""
    if isinstance(text, Pair):
        return text.cut(most, ends)
    return [*text[: most - ends], *text[len(text) - ends :]]


class EmbeddingService:
    """`AsyncService` of a model that makes embeddings. A thread runs the steps: each takes texts of
    the requests that wait, as many as fit. A request with more goes behind the others after its
    step, and one that is cancelled is dropped."""

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
        self._running = self._tokens = self._steps = 0
        self._thread = threading.Thread(target=self._run, name="embeddings", daemon=True)
        self._thread.start()

    async def embed(self, asked: Embeds) -> tuple[Floats, int]:
        """The embeddings or scores that a request wants, and its number of tokens. Scores of a
        model for embeddings are cosines, as vLLM has them. Raises ApiError for embeddings of a
        model for scores, ContextFullError, BusyError, what `lost` has."""
        ranks = self._pooling == "rank"
        if not asked.pairs and ranks:
            raise ApiError(
                "the model makes scores, no embeddings: /v1/rerank", code="no_embeddings"
            )
        most = self._engine.encoder.check_pooling(self._pooling)
        if asked.dimensions is not None and asked.dimensions > most:
            raise ApiError(
                f"'dimensions' must be from 1 to {most}", param="dimensions", code="invalid_value"
            )
        if asked.pairs and not ranks:
            return await self._cosines(asked)
        texts = await asyncio.to_thread(self._tokenized, asked)
        job = _Job(texts)
        self._add(job)
        try:
            rows = await asyncio.wrap_future(job.result)
        finally:
            job.result.cancel()
        return rows, sum(map(len, texts))

    async def _cosines(self, asked: Embeds) -> tuple[Floats, int]:
        """The cosine of the embeddings of each pair, (pairs, 1); a text is embedded once."""
        texts = {text: place for place, text in enumerate(dict.fromkeys(chain(*asked.pairs)))}
        rows, tokens = await self.embed(replace(asked, texts=tuple(texts), pairs=()))
        first, second = np.array([(texts[a], texts[b]) for a, b in asked.pairs]).T
        return np.einsum("ij,ij->i", rows[first], rows[second])[:, None], tokens

    def _tokenized(self, asked: Embeds) -> list[Sequence[int]]:
        engine = self._engine
        made = [*tokens_of(lambda: engine.tokenizer, asked.texts)]
        made += pair_tokens(engine.tokenizer, engine.file.metadata, asked.pairs)
        if asked.truncates:
            most, ends = engine.encoder.context, int(engine.tokenizer.adds_eos)
            made = [text if len(text) <= most else _cut(text, most, ends) for text in made]
        engine.encoder.check_texts(made)
        return made

    def _add(self, job: _Job) -> None:
        with self._changed:
            if self.lost is not None:
                raise self.lost
            if self._ends:
                raise _closed()
            if len(self._waiting) >= QUEUE:
                raise BusyError(f"{QUEUE} requests wait already", retry_after=1.0)
            self._waiting.append(job)
            self._changed.notify_all()

    # ---- the thread of steps ----

    def _run(self) -> None:
        while (step := self._next()) is not None:
            texts = [text for _, taken in step for text in taken]
            try:
                rows = self._engine.encoder.encode(texts, self._pooling)
                if self._pooling != "rank":
                    rows = normalized(rows)
            except Exception as error:
                self._fail([job for job, _ in step], error)
                continue
            self._give(step, rows)
        self._fail((), _closed())

    def _next(self) -> _Step | None:
        """Texts of the next step, at least one; None at the end."""
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._waiting or self._ends)
                if self._ends:
                    return None
                if step := self._taken():
                    self._running = len(step)
                    return step
                self._changed.notify_all()  # all were cancelled

    def _taken(self) -> _Step:
        """Take texts of the requests that wait, in turn."""
        rows, most, step = self._engine.encoder.settings.rows, MOST_TEXTS, _Step()
        while self._waiting:
            job = self._waiting[0]
            taken = () if job.result.cancelled() else job.take(rows, most)
            if not (taken or job.result.cancelled()):
                break
            self._waiting.popleft()
            if taken:
                step.append((job, taken))
                rows, most = rows - sum(map(len, taken)), most - len(taken)
        return step

    def _give(self, step: _Step, rows: Floats) -> None:
        """Give the requests of a step what was made of their texts."""
        start = 0
        with self._changed:
            for job, taken in step:
                job.made.append(rows[start : start + len(taken)])
                start += len(taken)
                if job.begun < len(job.texts):
                    self._waiting.append(job)
                elif job.result.set_running_or_notify_cancel():
                    job.result.set_result(np.concatenate(job.made))
            self._running, self._steps = 0, self._steps + 1
            self._tokens += sum(len(text) for _, taken in step for text in taken)
            self._changed.notify_all()

    def _fail(self, jobs: Sequence[_Job], error: Exception) -> None:
        """Give all requests of a step its error; once the device is lost or the service is closed,
        all that wait as well."""
        with self._changed:
            self._running = 0
            failed = list(jobs)
            if loses_device(error):
                error = DeviceLostError(f"the device is lost, open the model again: {error}")
                self.lost = error
            if self.lost is not None or self._ends:
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
        """No LoRA adapters."""
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


def _closed() -> BusyError:
    return BusyError("the server ends: try again in 1 s", 1.0)
