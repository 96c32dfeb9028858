"""Explanation of a kernel's run on the emulator: coalescing, conflicts, divergence.

Available as records, as plain values and as text.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

_WARP = 32


@dataclass(frozen=True, slots=True)
class AccessRow:
    """The accesses of a line of the PTX (from 1): ``parts`` are 32-byte sectors, in shared memory
    wavefronts.

    ``requests`` counts warps, ``lanes`` the participating threads, ``fewest`` the parts that the
    same bytes would take if contiguous.
    """

    line: int
    text: str
    kind: str
    requests: int
    lanes: int
    parts: int
    fewest: int

    @property
    def per_request(self) -> float:
        """Sectors or wavefronts per request."""
        return self.parts / self.requests

    @property
    def excess(self) -> int:
        """Parts above the minimum."""
        return self.parts - self.fewest


@dataclass(frozen=True, slots=True)
class DivergenceRow:
    """Straight-line code, from ``line`` to ``last_line`` of the PTX (from 1), that ran with only
    some lanes of its warps.

    ``instructions`` are those of the code, ``warps`` how often a warp ran it, ``lanes`` the lanes
    that did, in all.
    """

    line: int
    last_line: int
    text: str
    instructions: int
    warps: int
    lanes: int

    @property
    def active(self) -> float:
        """Mean number of active lanes."""
        return self.lanes / self.warps

    @property
    def idle(self) -> int:
        """Lane slots of instructions that were idle."""
        return (self.warps * _WARP - self.lanes) * self.instructions


@dataclass(frozen=True, slots=True)
class BarrierRow:
    """A barrier: arriving ``warps``, in all (one that comes in parts counts for each), and how
    often a CTA passed it, ``per_cta``: these over its warps."""

    line: int
    text: str
    warps: int
    per_cta: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """The counts of one launch, worst lines first; ``grid`` in CTAs, ``block`` in threads.

    ``warp_instructions`` counts instructions per warp, ``active`` is the mean of their active
    lanes.
    """

    kernel: str
    target: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    warp_instructions: int
    active: float
    global_memory: tuple[AccessRow, ...]
    shared_memory: tuple[AccessRow, ...]
    divergence: tuple[DivergenceRow, ...]
    barriers: tuple[BarrierRow, ...]

    def __str__(self) -> str:
        return self.text()

    def __repr__(self) -> str:
        return f"<Explanation of {self.kernel} on {self.target}>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print the tables in a notebook."""
        printer.text(str(self))

    def text(self, top: int | None = None) -> str:
        """The counts as tables, of each kind the ``top`` worst lines (None: all)."""
        return "\n".join(_lines(self, top))

    def as_dict(self) -> dict[str, Any]:
        """Plain values for JSON; equal for two runs on equal inputs."""
        return {
            "kernel": self.kernel,
            "target": self.target,
            "grid": list(self.grid),
            "block": list(self.block),
            "warp_instructions": self.warp_instructions,
            "active_lanes": round(self.active, 3),
            "global": [_access_dict(row, "sectors") for row in self.global_memory],
            "shared": [_access_dict(row, "wavefronts") for row in self.shared_memory],
            "divergence": [
                {
                    "line": row.line,
                    "last_line": row.last_line,
                    "text": row.text,
                    "instructions": row.instructions,
                    "warps": row.warps,
                    "active_lanes": round(row.active, 3),
                }
                for row in self.divergence
            ],
            "barriers": [
                {
                    "line": row.line,
                    "text": row.text,
                    "warps": row.warps,
                    "per_cta": round(row.per_cta, 3),
                }
                for row in self.barriers
            ],
        }


def _access_dict(row: AccessRow, parts: str) -> dict[str, Any]:
    return {
        "line": row.line,
        "text": row.text,
        "kind": row.kind,
        "requests": row.requests,
        "active_lanes": round(row.lanes / row.requests, 3),
        parts: row.parts,
        "fewest": row.fewest,
        "per_request": round(row.per_request, 3),
    }


def _lines(found: Explanation, top: int | None) -> Iterator[str]:
    yield found.kernel
    yield (
        f"{found.target}, {found.grid} CTAs of {found.block} threads: "
        f"{found.warp_instructions:,} instructions of warps, {found.active:.1f} of 32 lanes active"
    )
    yield from _access_lines("global memory", "sectors", found.global_memory, top)
    yield from _access_lines("shared memory", "wavefronts", found.shared_memory, top)
    yield "\ndivergence: code that ran with a part of its warps' lanes, the most idle lanes first"
    if found.divergence:
        yield f"{'lines':>11} {'instructions':>12} {'warps':>9} {'lanes':>6}  begins with"
    for row in found.divergence[:top]:
        yield (
            f"{f'{row.line}-{row.last_line}':>11} {row.instructions:>12} {row.warps:>9,} "
            f"{row.active:>6.1f}  {row.text}"
        )
    yield from _rest(len(found.divergence), top)
    yield "\nbarriers"
    if found.barriers:
        yield f"{'line':>6} {'warps':>9} {'a CTA':>6}"
    for barrier in found.barriers[:top]:
        yield f"{barrier.line:>6} {barrier.warps:>9,} {barrier.per_cta:>6.1f}  {barrier.text}"
    yield from _rest(len(found.barriers), top)


def _access_lines(
    title: str, parts: str, rows: Sequence[AccessRow], top: int | None
) -> Iterator[str]:
    total, fewest = sum(row.parts for row in rows), sum(row.fewest for row in rows)
    yield f"\n{title}: {total:,} {parts}, {fewest:,} would do"
    if rows:
        yield f"{'line':>6} {'requests':>9} {'lanes':>6} {parts:>10} {'each':>6} {'at best':>7}"
    for row in rows[:top]:
        yield (
            f"{row.line:>6} {row.requests:>9,} {row.lanes / row.requests:>6.1f} {row.parts:>10,} "
            f"{row.per_request:>6.2f} {row.fewest / row.requests:>7.2f}  {row.text}"
        )
    yield from _rest(len(rows), top)


def _rest(count: int, top: int | None) -> Iterator[str]:
    if not count:
        yield "  none"
    elif top is not None and count > top:
        yield f"  and {count - top} more lines"
