"""A picture of what kernels cost: registers, occupancy and bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from urdir.model.measure.plot import check_can_plot, save

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from urdir.ptxgen.tools.stats import KernelStats

#: Inches: of a kernel, of what is above and below all of them, of the whole width.
_ROW, _REST, _WIDTH = 0.22, 1.6, 12
#: Registers that a thread can have.
MAX_REGISTERS = 255
_COLOURS = {"memory": "tab:blue", "arithmetic": "tab:red"}


@dataclass(frozen=True, slots=True)
class KernelBar:
    """A kernel in the picture, and how many launches of it a step has."""

    label: str
    launches: int
    stats: KernelStats


def plot_kernels(bars: Sequence[KernelBar], title: str, path: Path) -> None:
    """Draw a row for each kernel, from the top: registers of a thread (red where some are spilt),
    the share of an SM's warps, and the shortest time of its launches in a step, by what bounds it.

    What the assembler did not say has no bar. The format follows the suffix of ``path``. Raises
    ModelError without matplotlib, or when the file cannot be written.
    """
    check_can_plot()
    from matplotlib.figure import Figure

    figure = Figure(figsize=(_WIDTH, _ROW * len(bars) + _REST), layout="constrained")
    registers, occupancy, bound = figure.subplots(1, 3, sharey=True)
    figure.suptitle(title)
    places = range(len(bars))
    registers.set_yticks(places, [bar.label for bar in bars], fontsize=7)
    registers.invert_yaxis()
    _draw_registers(registers, bars)
    _draw_occupancy(occupancy, bars)
    _draw_bound(bound, bars)
    for axes in (registers, occupancy, bound):
        axes.grid(axis="x", alpha=0.3)
    save(figure, path)


def _draw_registers(axes: Axes, bars: Sequence[KernelBar]) -> None:
    axes.set_xlabel("registers of a thread")
    axes.set_xlim(0, MAX_REGISTERS)
    for place, bar in enumerate(bars):
        if used := bar.stats.resources:
            spills = used.spill_stores + used.spill_loads > 0
            axes.barh(place, used.registers, color="tab:red" if spills else "tab:green")


def _draw_occupancy(axes: Axes, bars: Sequence[KernelBar]) -> None:
    axes.set_xlabel("warps of an SM, limited by")
    axes.set_xlim(0, 100)
    axes.xaxis.set_major_formatter("{x:.0f} %")
    for place, bar in enumerate(bars):
        if held := bar.stats.occupancy:
            axes.barh(place, 100 * held.share, color="lightgray")
            axes.annotate(f" {held.limiter}", (0, place), va="center", fontsize=6)


def _draw_bound(axes: Axes, bars: Sequence[KernelBar]) -> None:
    axes.set_xlabel("us of all launches of a step, at least")
    axes.set_xscale("log")
    for by, colour in _COLOURS.items():
        found = [(n, bar) for n, bar in enumerate(bars) if bar.stats.bound.by == by]
        times = [bar.launches * bar.stats.bound.seconds * 1e6 for _, bar in found]
        if found:
            axes.barh([n for n, _ in found], times, color=colour, label=f"bound by {by}")
    axes.legend(fontsize=7)
