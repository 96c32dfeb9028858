"""Counts of all processes that serve HTTP, in memory that they share."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from http import HTTPStatus

import numpy as np
from numpy.typing import NDArray

from urdir.model.engine.requests.request import Finish

#: Bucket bounds in seconds, at most a factor of two apart.
FIRST_TOKEN = (0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.25, 0.5, 1, 2, 4, 8, 15, 30, 60)
NEXT_TOKEN = (0.001, 0.002, 0.004, 0.006, 0.008, 0.01, 0.015, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2)
WHOLE = (0.05, 0.1, 0.2, 0.4, 0.8, 1.5, 3, 6, 12, 25, 50, 100, 200, 400, 800)
#: Why answers end: as `Finish` has it, by an error, or because the client is gone.
ENDINGS = (*(finish.value for finish in Finish), "error", "cancelled")
#: Paths whose responses are counted by name; all others are "other".
ROUTES = (
    *("/", "/health", "/metrics", "/v1/models", "/v1/completions", "/v1/embeddings"),
    *("/v1/rerank", "/v1/score", "/api/embed"),
    *("/v1/chat/completions", "/v1/messages", "/v1/messages/count_tokens", "/v1/responses"),
    *("/models", "/models/load", "/models/unload"),
    *("/completion", "/infill", "/api/chat", "/api/generate", "/tokenize", "/detokenize", "other"),
)
_STATUSES = tuple(int(status) for status in HTTPStatus)
#: What is open now: requests, connections, bytes of large bodies, responses without connections.
_GAUGES = ("requests", "connections", "body_bytes", "background")
_TIMES = (FIRST_TOKEN, NEXT_TOKEN, WHOLE)
_SIZE = (
    len(_GAUGES)
    + sum(len(bounds) + 2 for bounds in _TIMES)
    + len(ENDINGS)
    + len(ROUTES) * len(_STATUSES)
)


class Counts:
    """The counts of one process, row ``own`` of a table; sums are over all rows.

    ``table`` is (processes, `Counts.WIDTH`) f64, by default of this process alone. A process writes
    its own row, so nothing is locked. One that replaces another goes on with its counters.
    """

    WIDTH = _SIZE

    def __init__(self, table: NDArray[np.float64] | None = None, own: int = 0) -> None:
        self._table = np.zeros((1, _SIZE)) if table is None else table
        self._own = self._table[own]
        self._own[: len(_GAUGES)] = 0
        at = len(_GAUGES)
        times = []
        for bounds in _TIMES:
            times.append(Times(self, at, bounds))
            at += len(bounds) + 2
        self.first_token, self.next_token, self.whole = times
        self._endings = at
        self._responses = at + len(ENDINGS)

    def add(self, gauge: str, change: float) -> None:
        """Change what this process has open of `_GAUGES`."""
        self._own[_GAUGES.index(gauge)] += change

    def open(self, gauge: str) -> int:
        """What all processes have open."""
        return int(sum(self._table[:, _GAUGES.index(gauge)].tolist()))

    def count_response(self, route: str, status: int) -> None:
        """Count a response."""
        known = status if status in _STATUSES else int(HTTPStatus.INTERNAL_SERVER_ERROR)
        row = ROUTES.index(route) * len(_STATUSES) + _STATUSES.index(known)
        self._own[self._responses + row] += 1

    def count_ending(self, reason: str) -> None:
        """Count the end of an answer, by one of `ENDINGS`."""
        self._own[self._endings + ENDINGS.index(reason)] += 1

    def endings(self) -> Iterator[tuple[str, float]]:
        """Each of `ENDINGS` and how many answers of all processes ended so."""
        return zip(ENDINGS, self.sums(self._endings, len(ENDINGS)).tolist(), strict=True)

    def responses(self) -> Iterator[tuple[str, int, float]]:
        """Route, status and number of the responses of all processes."""
        sums = self._table[:, self._responses :].sum(0).reshape(len(ROUTES), -1)
        for route, status in np.argwhere(sums):
            yield ROUTES[route], _STATUSES[status], float(sums[route, status])

    def change(self, column: int, by: float) -> None:
        """Change a value of this process."""
        self._own[column] += by

    def sums(self, first: int, count: int) -> NDArray[np.float64]:
        """Sums of some columns over all processes, (count,) f64."""
        sums: NDArray[np.float64] = self._table[:, first : first + count].sum(0)
        return sums


class Times:
    """A histogram of seconds; ``bounds`` are the upper ends of its buckets."""

    def __init__(self, counts: Counts, first: int, bounds: tuple[float, ...]) -> None:
        self._counts = counts
        self._first = first
        self._bounds = bounds

    def observe(self, seconds: float, times: int = 1) -> None:
        """Add a time, as often as said."""
        self._counts.change(self._first + bisect_left(self._bounds, seconds), times)
        self._counts.change(self._first + len(self._bounds) + 1, seconds * times)

    def buckets(self) -> tuple[list[tuple[str, float]], float]:
        """How many times are at most each bound, "+Inf" last, and the sum of all."""
        *numbers, total = self._counts.sums(self._first, len(self._bounds) + 2).tolist()
        names = [*(str(float(bound)) for bound in self._bounds), "+Inf"]
        return list(zip(names, np.cumsum(numbers).tolist(), strict=True)), total
