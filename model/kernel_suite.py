"""The tests that every kernel needs: `urdir.model.verify.kernel_suite` under its public name."""

from urdir.model.verify.kernel_suite import (
    EmulatorSuite,
    GpuSuite,
    KernelSuite,
    SanitizerSuite,
    TextSuite,
)

__all__ = ["EmulatorSuite", "GpuSuite", "KernelSuite", "SanitizerSuite", "TextSuite"]
