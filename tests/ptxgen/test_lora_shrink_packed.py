"""Adapters of few columns."""

from __future__ import annotations

import numpy as np

from urdir.driver.compare import compare
from urdir.driver.device import Device
from urdir.driver.harness import run_kernel
from urdir.ptxgen.kernels.linear.lora_shrink_packed import LoraShrinkPacked


def test_values_behind_a_short_row_are_not_read(device: Device) -> None:
    kernel = LoraShrinkPacked(2, 64, 1, 2, 8, 2)
    inputs = kernel.make_inputs(np.random.default_rng(0))
    inputs["sequence"][:] = 0
    inputs["adapter"][:] = 1
    inputs["lora_a"][1] = np.nan
    compare(kernel, run_kernel(device, kernel, inputs), kernel.reference(**inputs))
