"""A decode step, launch by launch: where the time goes and at what bandwidth."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from urdir.driver.execute import Timing
from urdir.driver.operation import Launch
from urdir.driver.plan import Plan
from urdir.model.errors import ModelError
from urdir.model.measure.plot import check_can_plot, save


@dataclass(frozen=True, slots=True)
class ProfileRow:
    """All launches of one role in a step of some ``sequences`` ("blk.*.attn_q gemv"), longest
    first in a table.

    ``share`` is that of the read bandwidth; times include each launch's own start-up and an event.
    """

    sequences: int
    role: str
    calls: int
    microseconds: float
    bytes_moved: int
    flops: int
    gb_per_s: float
    share: float

    @property
    def intensity(self) -> float:
        """Arithmetic operations per byte moved."""
        return self.flops / self.bytes_moved if self.bytes_moved else 0.0

    @property
    def gflops(self) -> float:
        """10^9 arithmetic operations per second."""
        return self.flops / self.microseconds / 1e3 if self.microseconds else 0.0


def summarise(
    plan: Plan, timings: Iterable[Timing], bandwidth: float, sequences: int
) -> Sequence[ProfileRow]:
    """Timings of the operations of a plan for this many sequences, added up by role; ``bandwidth``
    in bytes per second.
    """
    groups: dict[str, list[Timing]] = {}
    for timing in timings:
        role = re.sub(r"[.]\d+[.]", ".*.", timing.label) + " " + timing.what
        groups.setdefault(role, []).append(timing)
    rows = [_row(plan, sequences, role, group, bandwidth) for role, group in groups.items()]
    return sorted(rows, key=lambda row: -row.microseconds)


def _row(
    plan: Plan, sequences: int, role: str, group: Sequence[Timing], bandwidth: float
) -> ProfileRow:
    seconds = sum(t.ms for t in group) * 1e-3
    nbytes = sum(t.bytes_moved for t in group)
    launches = (op for op in (plan[t.index] for t in group) if isinstance(op, Launch))
    flops = sum(launch.kernel.flops() for launch in launches)
    rate = nbytes / seconds if seconds else 0.0
    return ProfileRow(
        sequences=sequences,
        role=role,
        calls=len(group),
        microseconds=seconds * 1e6,
        bytes_moved=nbytes,
        flops=flops,
        gb_per_s=rate / 1e9,
        share=rate / bandwidth,
    )


def plot_roofline(rows: Iterable[ProfileRow], bandwidth: float, title: str, path: Path) -> None:
    """Draw each role's speed over its arithmetic intensity, below the roof that ``bandwidth``
    (bytes per second) makes; roles that calculate nothing are left out.

    The format follows the suffix of ``path``. Raises ModelError without matplotlib, or when the
    file cannot be written.
    """
    check_can_plot()
    from matplotlib.figure import Figure

    shown = [row for row in rows if row.flops and row.microseconds]
    if not shown:
        raise ModelError(f"nothing to draw in {path}: no kernel of the step calculates anything")
    figure = Figure(figsize=(9, 6), layout="constrained")
    axes = figure.add_subplot()
    axes.set_xscale("log")
    axes.set_yscale("log")
    ends = [min(r.intensity for r in shown) / 2, max(r.intensity for r in shown) * 2]
    axes.plot(ends, [bandwidth * x / 1e9 for x in ends], label=f"{bandwidth / 1e9:,.0f} GB/s read")
    for row in shown:
        axes.scatter([row.intensity], [row.gflops], s=12 + row.microseconds**0.5)
        several = f" x {row.sequences}" if row.sequences > 1 else ""
        label = f"{row.role}{several} ({row.share:.0%})"
        axes.annotate(label, (row.intensity, row.gflops), fontsize=7)
    axes.set_xlabel("operations per byte moved")
    axes.set_ylabel("GFLOP/s")
    axes.set_title(title)
    axes.legend()
    save(figure, path)
