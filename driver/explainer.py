"""Counting a kernel's accesses by running it on the emulator."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from urdir.driver.bindings import emulated
from urdir.driver.device import Device
from urdir.driver.emulator.properties import DEFAULT_TARGET
from urdir.driver.explanation import AccessRow, BarrierRow, DivergenceRow, Explanation
from urdir.driver.harness import ExampleKernel, run_kernel

if TYPE_CHECKING:
    from urdir.driver.emulator.machine.counters import AccessCount, BlockCount

_WARP = 32


def explain(kernel: ExampleKernel, target: str = DEFAULT_TARGET, seed: int = 0) -> Explanation:
    """Run a kernel once on the emulator, on its random inputs, and count its accesses.

    Raises as `harness.run_kernel`; outputs are not compared.
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
