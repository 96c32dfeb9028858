"""What the emulator saw when it ran a kernel's example: coalescing, conflicts, divergence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from urdir.driver.bindings import emulated
from urdir.driver.device import Device
from urdir.driver.emulator.properties import DEFAULT_TARGET
from urdir.driver.harness import ExampleKernel, run_kernel

if TYPE_CHECKING:
    from urdir.driver.emulator.machine.counters import AccessCount, BlockCount

_WARP = 32


@dataclass(frozen=True, slots=True)
class AccessRow:
    """A line's accesses: ``parts`` are 32-byte sectors, in shared memory wavefronts.

    ``requests`` counts warps, ``lanes`` the threads that took part, ``fewest`` the parts that the
    same bytes would take if they lay side by side.
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
        """Sectors or wavefronts of a request."""
        return self.parts / self.requests

    @property
    def excess(self) -> int:
        """Parts above the fewest."""
        return self.parts - self.fewest


@dataclass(frozen=True, slots=True)
class DivergenceRow:
    """Straight-line code that ran with some lanes of its warps only."""

    line: int
    last_line: int
    text: str
    instructions: int
    warps: int
    lanes: int

    @property
    def active(self) -> float:
        """Lanes of a warp that ran it, on average."""
        return self.lanes / self.warps

    @property
    def idle(self) -> int:
        """Lane slots of instructions that did nothing."""
        return (self.warps * _WARP - self.lanes) * self.instructions


@dataclass(frozen=True, slots=True)
class BarrierRow:
    """A barrier: how many warps arrived, and how often that is for each CTA."""

    line: int
    text: str
    warps: int
    per_cta: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """The counts of one launch, in each tuple the worst line first.

    ``warp_instructions`` counts instructions by warps, ``active`` is the mean of their active
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

    def as_dict(self) -> dict[str, Any]:
        """For JSON; equal for two runs on equal inputs."""
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


def explain(kernel: ExampleKernel, target: str = DEFAULT_TARGET, seed: int = 0) -> Explanation:
    """Run a kernel once on the emulator, on its random inputs, and count what it does.

    Raises what `harness.run_kernel` raises; outputs are not compared.
    """
    from urdir.driver.emulator.machine.counters import Counters

    counters = Counters()
    inputs = kernel.make_inputs(np.random.default_rng(seed))
    api = emulated(target, watch=lambda name: counters)
    with Device.open(f"emulator:{target}", api=api) as device:
        run_kernel(device, kernel, inputs)
    shape = kernel.launch_shape
    blocks = counters.blocks.values()
    issued = sum(b.warps * b.instructions for b in blocks)
    ctas = shape.grid[0] * shape.grid[1] * shape.grid[2]
    warps = -(-shape.block[0] * shape.block[1] * shape.block[2] // _WARP)
    texts = counters.texts
    accesses = [_access_row(count, texts) for count in counters.accesses.values()]
    accesses.sort(key=lambda row: (-row.excess, -row.parts, row.line, row.kind))
    partial = [_divergence_row(b, texts) for b in blocks if b.lanes < b.warps * _WARP]
    return Explanation(
        kernel.name,
        target,
        shape.grid,
        shape.block,
        issued,
        sum(b.lanes * b.instructions for b in blocks) / issued,
        tuple(row for row in accesses if row.kind.startswith("global")),
        tuple(row for row in accesses if row.kind.startswith("shared")),
        tuple(sorted(partial, key=lambda row: (-row.idle, row.line))),
        tuple(
            BarrierRow(line, texts[line], count, count / (ctas * warps))
            for line, count in sorted(counters.barriers.items(), key=lambda item: (-item[1], item))
        ),
    )


def _access_row(count: AccessCount, texts: dict[int, str]) -> AccessRow:
    return AccessRow(
        count.line,
        texts.get(count.line, ""),
        count.kind,
        count.requests,
        count.lanes,
        count.parts,
        count.fewest,
    )


def _divergence_row(count: BlockCount, texts: dict[int, str]) -> DivergenceRow:
    return DivergenceRow(
        count.line,
        count.last_line,
        texts.get(count.line, ""),
        count.instructions,
        count.warps,
        count.lanes,
    )


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
