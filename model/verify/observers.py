"""Looking at a step launch by launch: time by phase, summaries of tensors layer by layer.

Both run the very plan that is otherwise replayed as a graph, launch by launch; turned off, they
cost nothing.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from urdir.driver.execute import BoundPlan, queue, read
from urdir.driver.operation import Launch, Operation

if TYPE_CHECKING:
    from urdir.driver.stream import Stream

# First pattern that a launch's label matches -> phase.
_PHASES = (
    (re.compile(r"token_embd"), "embedding"),
    (re.compile(r"blk\.\d+\.(attn|attention)"), "attention"),
    (re.compile(r"blk\.\d+\.ffn"), "feed-forward"),
    (re.compile(r"output"), "head"),
    (re.compile(r""), "choice"),
)


# Launches that add to the residual stream: a product itself, or a launch after one of many rows.
_SUMS = (".attn_output", ".ffn_down", ".residual")


def phase_of(label: str) -> str:
    """The phase of a step that a launch belongs to, by its label."""
    return next(phase for pattern, phase in _PHASES if pattern.match(label))


class PhaseTimer:
    """One line on stderr for every step: microseconds by phase (DECODE_TIMING=1).

    Times are between events on the device; launched one by one, a step takes longer than its graph.
    """

    def run(self, bound: BoundPlan, stream: Stream) -> None:
        """Run the step and print its times."""
        totals: dict[str, float] = {}
        phase, started = "", stream.record()
        spans = []
        for operation, loaded in bound.steps():
            if (next_phase := phase_of(operation.label)) != phase:
                event = stream.record()
                spans.append((phase, started, event))
                phase, started = next_phase, event
            queue(operation, loaded, stream)
        spans.append((phase, started, stream.record()))
        stream.synchronize()
        for name, start, end in spans:
            if name:
                totals[name] = totals.get(name, 0.0) + 1e3 * end.elapsed_ms_since(start)
        parts = [f"{name} {micros:.0f} us" for name, micros in totals.items()]
        total = sum(totals.values())
        print(f"{bound.plan.name}: {', '.join(parts)}, total {total:.0f} us", file=sys.stderr)


class TensorSummaries:
    """A line on stderr for what every layer and the head have written (GPU_DEBUG=1)."""

    def run(self, bound: BoundPlan, stream: Stream) -> None:
        """Run the step, stopping to look after each layer."""
        for operation, loaded in bound.steps():
            queue(operation, loaded, stream)
            if isinstance(operation, Launch) and _is_worth_a_look(operation.label):
                stream.synchronize()
                for line in _summaries(operation):
                    print(line, file=sys.stderr)


def _is_worth_a_look(label: str) -> bool:
    return label in ("token_embd", "output") or label.endswith(_SUMS)


def _summaries(operation: Operation) -> Iterable[str]:
    assert isinstance(operation, Launch)
    kernel = operation.kernel
    for param in kernel.params:
        if param.access is None or param.access.value == "in":
            continue
        memory = operation.packed.regions[param.name]
        values = read(memory, param.numpy_dtype, kernel.shape_of(param)).astype(np.float64)
        finite = values[np.isfinite(values)]
        bad = values.size - finite.size
        if not finite.size:
            yield f"{operation.label} {param.name}: nothing finite"
            continue
        yield (
            f"{operation.label} {param.name} {values.shape}: "
            f"mean {finite.mean():+.4e}, rms {np.sqrt(np.mean(finite**2)):.4e}, "
            f"min {finite.min():+.4e}, max {finite.max():+.4e}, not finite {bad}"
        )
