"""Parameter list, lint, assembly for every target, emulator, sanitizer, GPU where there is one."""

from __future__ import annotations

from scaled_sum.kernel import ScaledSum

from urdir.model.kernel_suite import KernelSuite


class TestScaledSum(KernelSuite):
    kernels = (ScaledSum,)
