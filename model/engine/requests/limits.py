"""Limits of a scheduler: how much a step takes, how many may wait and how long."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

from urdir.model.engine.batch import ShapeBuckets
from urdir.model.errors import SettingsError
from urdir.model.memory.buckets import first_rows
from urdir.model.memory.cache_shape import RESERVED
from urdir.model.memory.walk import Walk

#: Rows of prompts beside answers, where these are waited for.
SOME_ROWS = 512


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a scheduler allows.

    A step takes up to ``prompt_rows`` rows of prompts, ``mixed_rows`` beside answers: fewer, so
    that these go on at an even pace. Of a prompt alone it takes what leaves little padding to the
    next of the ``chunks``, if any are given. A segment takes a multiple of ``alignment`` rows, the
    last of them idle. Where prompts ``walk`` over what is cached, those of a step do so over no
    more than one sequence may have: graphs stay few. Answers reserve room for ``ahead`` tokens at
    once. ``queue`` requests may wait, for ``wait_seconds`` at most. Without ``share_prefixes``
    every prompt is computed from its first token on. Raises SettingsError.
    """

    prompt_rows: int = 2048
    mixed_rows: int = 512
    chunks: tuple[int, ...] = ()
    alignment: int = 16
    ahead: int = RESERVED
    queue: int = 1024
    wait_seconds: float = 60.0
    share_prefixes: bool = True
    walk: Walk | None = None

    def __post_init__(self) -> None:
        for name in ("prompt_rows", "mixed_rows"):
            rows = getattr(self, name)
            if rows < 1 or rows % self.alignment:
                raise SettingsError(f"{name} {rows}: expected a multiple of {self.alignment}")
        for name in ("ahead", "queue"):
            if getattr(self, name) < 1:
                raise SettingsError(f"{name} {getattr(self, name)}: expected 1 or more")

    def aligned(self, rows: int) -> int:
        """The rows that a segment of ``rows`` tokens takes."""
        return -(-rows // self.alignment) * self.alignment

    def first(self, rows: int) -> int:
        """How many of the ``rows`` that a prompt alone has left its next step takes."""
        return first_rows(rows, self.chunks) if self.chunks else rows

    def fit(self, ends: Sequence[int]) -> bool:
        """Whether a step may have prompts, several of them, to these ends."""
        return self.walk is None or self.walk.fits(ends)

    @classmethod
    def for_latency(cls, shapes: ShapeBuckets, *, share_prefixes: bool = True) -> Self:
        """For users who read along: tokens come at an even pace, whatever arrives, and a request
        that waits too long gets an error. Steps are of ``shapes``."""
        return replace(cls._of(shapes, SOME_ROWS), share_prefixes=share_prefixes)

    @classmethod
    def for_one(cls, shapes: ShapeBuckets) -> Self:
        """For one user at a time, who waits as long as it takes. Room is reserved token by token,
        so that rings lose no more than they must."""
        whole = cls._of(shapes, shapes.chunks[-1])
        return replace(whole, ahead=1, queue=1, wait_seconds=float("inf"))

    @classmethod
    def for_throughput(cls, shapes: ShapeBuckets, requests: int) -> Self:
        """For ``requests`` that are known at once and have no deadline: prompts take all the
        rows of a step of ``shapes``, also beside answers."""
        whole = cls._of(shapes, shapes.chunks[-1])
        return replace(whole, queue=max(1, requests), wait_seconds=float("inf"))

    @classmethod
    def _of(cls, shapes: ShapeBuckets, beside: int) -> Self:
        """Steps of ``shapes``, with up to ``beside`` rows of prompts beside answers."""
        whole = _aligned(shapes, shapes.chunks[-1])
        return cls(
            prompt_rows=whole,
            mixed_rows=min(whole, _aligned(shapes, beside)),
            chunks=shapes.chunks,
            alignment=_alignment(shapes),
            walk=shapes.walk,
        )


def _alignment(shapes: ShapeBuckets) -> int:
    """Rows that a segment takes a multiple of. Small chunks have room for one segment only."""
    return min(shapes.alignment, shapes.chunks[-1])


def _aligned(shapes: ShapeBuckets, rows: int) -> int:
    """Whole segments of up to ``rows`` rows, one at least."""
    alignment = _alignment(shapes)
    return max(1, rows // alignment) * alignment
