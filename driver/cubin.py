"""Kernels of foreign machine code: cubins of Triton, CuTe, nvcc, with declared parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from urdir.driver.errors import DriverError
from urdir.driver.kernel import EXACT, Tolerance
from urdir.ptxgen.ptx.launch import LaunchShape, Param

Arrays = dict[str, np.ndarray[Any, Any]]


@dataclass(frozen=True)
class CubinKernel:
    """Entry ``name`` of a cubin, for plans, graphs and the harness as any other kernel.

    ``params`` are all parameters in order, with shapes in numbers (``Param("x", "f32", (1000,),
    Access.IN)`` of `urdir.ptxgen`), hidden ones included: loading compares offsets and sizes with
    the cubin's. Triton appends addresses of scratch memory: declare scalars of u64 and pass 0 where
    it needs none. Dependencies between launches follow from the declared access.

    ``reference`` and ``inputs`` (from a random generator) are for `check_kernel` alone.
    ``waits_for_dependencies`` says that the code has ``griddepcontrol.wait``.
    """

    cubin: bytes
    name: str
    params: Sequence[Param]
    launch_shape: LaunchShape
    reference_of: Callable[..., Arrays] | None = None
    inputs_of: Callable[[np.random.Generator], Mapping[str, Any]] | None = None
    tolerance: Tolerance = EXACT
    waits_for_dependencies: bool = False
    operations: int = 0

    def key(self, device: str, /) -> str:
        """Name and digest of the code: it is the same on every device, or does not load there."""
        digest = hashlib.sha256(self.cubin).hexdigest()[:20]
        return f"{self.name}-cubin-{digest}-{_launch_digest(self)}"

    def ptx(self, device: str, /) -> str:
        """Raise DriverError: there is no text."""
        raise DriverError(f"kernel {self.name} is a cubin, without PTX")

    def shape_of(self, param: Any) -> tuple[int, ...]:
        """The declared shape of a parameter's array."""
        return tuple(int(extent) for extent in param.shape)

    def nbytes(self, param: Any) -> int:
        """The size in bytes of a parameter's array."""
        return prod(self.shape_of(param)) * int(param.numpy_dtype.itemsize)

    def reference(self, **inputs: Any) -> Arrays:
        """``reference_of`` the inputs; DriverError without one."""
        if self.reference_of is None:
            raise DriverError(f"kernel {self.name} has no reference: give reference_of")
        return self.reference_of(**inputs)

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """``inputs_of`` the generator; DriverError without one."""
        if self.inputs_of is None:
            raise DriverError(f"kernel {self.name} has no inputs of its own: give inputs_of")
        return dict(self.inputs_of(rng))

    def bytes_moved(self) -> int:
        """The size of all arrays; of those that are also written twice."""
        return sum(self.nbytes(p) * p.passes for p in self.params)

    def flops(self) -> int:
        """The declared number of operations."""
        return self.operations


def _launch_digest(kernel: CubinKernel) -> str:
    """What loading depends on besides the code: parameters and launch shape."""
    shape = kernel.launch_shape
    parts = (
        [(p.name, p.dtype, p.is_pointer) for p in kernel.params],
        (shape.block, shape.cluster, shape.grid, shape.shared_bytes, shape.cooperative),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:12]
