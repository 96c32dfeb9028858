"""Comparison of the device with the numpy references, launch by launch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from urdir.driver.compare import Deviation, deviations, written_params
from urdir.driver.execute import BoundPlan, bind, queue, read, reference
from urdir.driver.operation import Launch
from urdir.driver.plan import Plan, StopAfter

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.stream import Stream


@dataclass(frozen=True, slots=True)
class Difference:
    """One output of one launch, on the device and by its reference."""

    index: int
    label: str
    kernel: str
    deviation: Deviation

    def __str__(self) -> str:
        return f"operation {self.index} {self.label} ({self.kernel}): {self.deviation}"


def trace(
    plan: Plan | BoundPlan, device: Device, stream: Stream, stop_after: StopAfter = None
) -> Iterator[Difference]:
    """Run a plan step by step; after each launch, compare every output with the reference. Copies,
    fills and work of the host have none.

    Each reference reads the device's memory before the launch, and the device continues with its
    own results: each launch is judged separately, and errors do not accumulate. Inexact results
    stored as f16 or bf16 may round either way: one step of that type is allowed in addition. Memory
    ends as `run` would leave it. Raises as `execute.bind` and `execute.run`, and MismatchError for
    a reference that is not of its parameter.
    """
    bound = bind(plan, device)
    for index, (operation, loaded) in enumerate(bound.steps(stop_after)):
        if not isinstance(operation, Launch) or operation.is_on_host:
            queue(operation, loaded, stream)
            continue
        kernel, regions = operation.kernel, operation.packed.regions
        expected = reference(operation)
        queue(operation, loaded, stream)
        stream.synchronize()
        outputs = {
            p.name: read(regions[p.name], p.numpy_dtype, kernel.shape_of(p))
            for p in written_params(kernel)
        }
        for deviation in deviations(kernel, outputs, expected, ties=True):
            yield Difference(index, operation.label, kernel.name, deviation)


def diff(
    plan: Plan | BoundPlan, device: Device, stream: Stream, stop_after: StopAfter = None
) -> Difference | None:
    """The first output beyond its kernel's tolerance, or None. Stops there. Raises as `trace`."""
    return next((d for d in trace(plan, device, stream, stop_after) if not d.deviation.ok), None)
