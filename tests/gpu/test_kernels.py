"""Every kernel of the catalog on the GPU: against its reference, and against the emulator."""

from __future__ import annotations

from typing import Any

import pytest

from urdir.driver.pytest_plugin import find_gpu
from urdir.model.kernel_suite import GpuSuite
from urdir.ptxgen.catalog import kernels
from urdir.ptxgen.spec import smallest_example


class TestCatalog(GpuSuite):
    """compute-sanitizer slows a kernel down a hundredfold: it sees the smallest example of each,
    and the first one whose CTAs work in clusters."""

    kernels = tuple(kernels().values())

    @classmethod
    def examples(cls) -> list[Any]:
        found = super().examples()
        if find_gpu().is_absent:  # one says that all are skipped
            return found[:1]
        smallest = [smallest_example(kind) for kind in cls.kernels]
        clustered = [p for p in found if p.values[0].launch_shape.cluster != (1, 1, 1)]
        first = {p.values[0].name: p.id for p in reversed(clustered)}
        return [
            pytest.param(
                *p.values,
                id=p.id,
                marks=[pytest.mark.sanitizer] * (p.values[0] in smallest or p.id in first.values()),
            )
            for p in found
        ]
