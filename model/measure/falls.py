"""Where more sequences give fewer tokens/s than fewer sequences."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from urdir.model.measure.bench import BenchRow

#: A smaller share of the tokens/s is noise: runs of one process differ by as much.
NOISE = 0.01


@dataclass(frozen=True, slots=True)
class Fall:
    """``more`` has more sequences than ``fewer``, and fewer tokens/s."""

    fewer: BenchRow
    more: BenchRow

    @property
    def share(self) -> float:
        """The tokens/s that are lost, of those of fewer sequences."""
        return 1 - self.more.median / self.fewer.median

    def __str__(self) -> str:
        more, fewer = (f"{r.test}: {r.median:,.0f} tokens/s" for r in (self.more, self.fewer))
        return f"{more}, {self.share:.1%} less than {fewer}"


def falls(rows: Iterable[BenchRow], noise: float = NOISE) -> list[Fall]:
    """Of tests that differ in their number of sequences alone, those whose median tokens/s are
    below those of the next smaller number, by a share of more than ``noise``."""
    tests: dict[str, dict[int, BenchRow]] = {}
    for row in rows:
        alone = row.test.replace(f" x {row.sequences}", "")
        tests.setdefault(alone, {})[row.sequences] = row
    steps = (
        Fall(of[fewer], of[more]) for of in tests.values() for fewer, more in pairwise(sorted(of))
    )
    return [fall for fall in steps if fall.share > noise]
