"""A decode step, launch by launch: where the time goes and at what bandwidth."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from urdir.driver.execute import Timing


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """All launches of one role in a step ("blk.*.attn_q matvec"), longest first in a table.

    ``share`` is that of the read bandwidth; times include each launch's own start-up and an event.
    """

    role: str
    calls: int
    microseconds: float
    bytes_moved: int
    gb_per_s: float
    share: float


def summarise(timings: Iterable[Timing], bandwidth: float) -> Sequence[ProfileRow]:
    """Timings of a plan's operations, added up by role; ``bandwidth`` in bytes per second."""
    groups: dict[str, list[Timing]] = {}
    for timing in timings:
        role = re.sub(r"[.]\d+[.]", ".*.", timing.label) + " " + timing.what
        groups.setdefault(role, []).append(timing)
    rows = [_row(role, group, bandwidth) for role, group in groups.items()]
    return sorted(rows, key=lambda row: -row.microseconds)


def _row(role: str, group: Sequence[Timing], bandwidth: float) -> ProfileRow:
    seconds = sum(t.ms for t in group) * 1e-3
    nbytes = sum(t.bytes_moved for t in group)
    rate = nbytes / seconds if seconds else 0.0
    return ProfileRow(role, len(group), seconds * 1e6, nbytes, rate / 1e9, rate / bandwidth)
