"""Read-only stream: measures the memory bandwidth to which other kernels are compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.limits import limited, up_to
from urdir.ptxgen.ptx.architecture import MAX_THREADS
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param

#: Maximum vectors in flight per thread, limited by registers.
MAX_UNROLL = 16


@dataclass(frozen=True)
class ReadStream(KernelSpec):
    """Reads every word once and keeps the exclusive-or of what each thread saw.

    A thread reads 16-byte vectors, ``unroll`` of them in flight; the grid strides over the input
    ``passes`` times.
    """

    ctas: int
    passes: int
    threads: int = 512
    unroll: int = 8

    name = "read_stream"
    limits = limited(
        ctas=up_to(1 << 30),
        passes=up_to(1 << 30),
        threads=up_to(MAX_THREADS),
        unroll=up_to(MAX_UNROLL),
    )
    params = (
        Param("data", "u32", ("words",), Access.IN),
        Param("seen", "u32", ("lanes",), Access.OUT),
    )

    @property
    def lanes(self) -> int:
        """Threads of the grid."""
        return self.ctas * self.threads

    @property
    def words(self) -> int:
        """32-bit words read."""
        return self.passes * self.unroll * self.lanes * 4

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(self.ctas, 1, 1), block=(self.threads, 1, 1))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        vectors = inputs["data"].reshape(self.passes * self.unroll, self.lanes, 4)
        return {"seen": np.bitwise_xor.reduce(vectors, axis=(0, 2))}

    @classmethod
    def examples(cls) -> dict[str, ReadStream]:
        return {
            "one pass": cls(ctas=2, passes=1, threads=32),
            "three passes": cls(ctas=3, passes=3, threads=64, unroll=4),
        }

    def flops(self) -> int:
        return self.words

    @classmethod
    def covering(cls, nbytes: int, sm_count: int) -> ReadStream:
        """The spec that reads at least about ``nbytes`` with four CTAs per multiprocessor."""
        one_pass = cls(ctas=4 * sm_count, passes=1)
        return cls(ctas=4 * sm_count, passes=-(-nbytes // (4 * one_pass.words)))
