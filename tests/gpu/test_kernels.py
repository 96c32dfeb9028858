"""Every kernel of the catalog on the GPU: against its reference, and against the emulator."""

from __future__ import annotations

from typing import Any

import pytest

from urdir.model.kernel_suite import GpuSuite
from urdir.ptxgen.catalog import kernels


class TestCatalog(GpuSuite):
    """compute-sanitizer slows a kernel down a hundredfold: it sees the smallest example of each."""

    kernels = tuple(kernels().values())

    @classmethod
    def examples(cls) -> list[Any]:
        return [
            pytest.param(*p.values, id=p.id, marks=[pytest.mark.sanitizer] * p.id.endswith("-0"))
            for p in super().examples()
        ]
