"""What tests of blocks launch: a plan with its buffers, of one step's rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from urdir.driver.device import Device
from urdir.driver.memory import Slice
from urdir.driver.operation import Launch
from urdir.driver.plan import Plan
from urdir.model.blocks.linear import LinearLayers
from urdir.model.blocks.linear_requests import device_limits


class Workbench:
    """A plan, what appends linear layers to it, and what that works with: ``sizes`` in bytes."""

    def __init__(
        self, device: Device, rows: int, exact: bool, sizes: Mapping[str, int], seed: int
    ) -> None:
        self.device, self.rows = device, rows
        self.random = np.random.default_rng(seed)
        self.plan = Plan("layers")
        self.work = device.arena(sizes, "work")
        self.owned: list[Any] = [self.work]
        limits = device_limits(device)
        self.linear = LinearLayers(self.plan, self.work, rows, exact=exact, limits=limits)

    def place(self, values: npt.NDArray[Any]) -> Slice:
        """The values in device memory."""
        arena = self.device.arena({"a": values.nbytes}, "given")
        self.owned.append(arena)
        arena["a"].upload(values)
        return arena["a"]

    def kernels(self) -> list[str]:
        """Of each launch of the plan."""
        return [op.kernel.name for op in self.plan if isinstance(op, Launch)]

    def close(self) -> None:
        """Free everything."""
        for arena in self.owned:
            arena.close()
