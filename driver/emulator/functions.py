"""Kernels of a loaded module: parameter layout, limits, occupancy."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from math import prod

from urdir.driver.emulator.calls import Refused
from urdir.driver.emulator.machine.compile import Program
from urdir.driver.emulator.properties import DeviceProperties
from urdir.ptxgen.ptx import TYPE_BYTES, Entry, Variable
from urdir.ptxgen.ptx import Module as PtxModule
from urdir.ptxgen.ptx.architecture import (
    MAX_CLUSTER,
    PORTABLE_CLUSTER,
    STATIC_SHARED_LIMIT,
    occupancy,
)
from urdir.ptxgen.ptx.flow import ENDS, blocks

Extent = tuple[int, int, int]

#: Reported register count of every kernel: the emulator allocates none.
REGISTERS_PER_THREAD = 32


class Function:
    """A kernel in a loaded module.

    ``program`` is what the machine runs, ``symbols`` the addresses of the module's variables,
    ``module`` the module's handle, ``text`` its PTX.
    """

    def __init__(
        self,
        ptx: PtxModule,
        program: Program,
        symbols: Mapping[str, int],
        module: int,
        device: DeviceProperties,
        text: str,
    ) -> None:
        self.name = program.name
        self.program = program
        self.symbols = symbols
        self.module = module
        self.text = text
        self.device = device
        self.max_dynamic_shared = max(0, STATIC_SHARED_LIMIT - program.static_shared_bytes)
        self.shared_carveout = -1  # percent; -1: no preference
        self.allows_large_clusters = False
        self.ptx_version = ptx.version
        self.required_block = _extent(program.required_threads)
        self.required_cluster = _extent(program.cluster)
        entry = ptx.entries[program.name]
        self.needs_cluster = "explicitcluster" in entry.directives
        #: Whether the kernel may let its dependents start before its own predecessors are complete.
        self.triggers_dependents = triggers_before_waiting(entry)

    @property
    def parameters(self) -> tuple[tuple[int, int], ...]:
        """Offset and size of each parameter in the parameter block, in bytes."""
        return self.program.param_layout

    @property
    def max_shared(self) -> int:
        """Maximum bytes of dynamic shared memory."""
        return self.device.architecture.shared_per_cta - self.program.static_shared_bytes

    def read_arguments(self, address: int) -> bytes:
        """The parameter block, read from the pointer array at ``address`` (kernelParams)."""
        if not self.parameters:
            return b""
        if not address:
            raise Refused(
                "CUDA_ERROR_INVALID_VALUE",
                f"kernel {self.name} takes {len(self.parameters)} parameters, kernelParams is null",
            )
        count = len(self.parameters)
        pointers = struct.unpack(f"{count}Q", ctypes.string_at(address, 8 * count))
        block = bytearray(self.program.param_bytes)
        for (offset, size), pointer in zip(self.parameters, pointers, strict=True):
            if not pointer:
                raise Refused("CUDA_ERROR_INVALID_VALUE", "a null pointer in kernelParams")
            block[offset : offset + size] = ctypes.string_at(pointer, size)
        return bytes(block)

    def blocks_per_sm(self, threads: int, dynamic_shared: int) -> int:
        """Maximum resident CTAs per SM (occupancy); 0 if not even one fits."""
        if not 0 < threads <= self.program.max_threads or dynamic_shared > self.max_shared:
            return 0
        shared = self.program.static_shared_bytes + dynamic_shared
        return occupancy(self.device.target, REGISTERS_PER_THREAD, threads, shared).ctas

    def clusters_at_once(self, cluster: Extent, threads: int, dynamic_shared: int) -> int:
        """Maximum resident clusters on the device."""
        size = prod(cluster)
        limit = MAX_CLUSTER if self.allows_large_clusters else PORTABLE_CLUSTER
        if size > limit:
            return 0
        return self.blocks_per_sm(threads, dynamic_shared) * self.device.sm_count // size


def initial_bytes(variable: Variable) -> bytes:
    """The initial bytes of a variable, from its start."""
    size = TYPE_BYTES[variable.type]
    form = {"f32": "<f", "f64": "<d"}.get(variable.type)
    if form:
        return b"".join(struct.pack(form, item.value) for item in variable.values)
    mask = (1 << 8 * size) - 1
    return b"".join((int(v.value) & mask).to_bytes(size, "little") for v in variable.values)


def _extent(values: tuple[int, ...] | None) -> Extent | None:
    if not values:
        return None
    x, y, z = (*values, 1, 1)[:3]
    return x, y, z


def triggers_before_waiting(entry: Entry) -> bool:
    """Whether a kernel that triggers its dependents may do so, or end, before it has waited for its
    own predecessors. If not, these are complete when its dependents start."""
    if not any(i.opcode == "griddepcontrol.launch_dependents" for i in entry.instructions):
        return False
    graph = blocks(entry)
    seen: set[int] = set()
    left = [0]
    while left:
        number = left.pop()
        if number in seen:
            continue
        seen.add(number)
        for i in graph[number].instructions:
            if i.opcode == "griddepcontrol.wait" and i.predicate is None:
                break
            if i.opcode == "griddepcontrol.launch_dependents" or i.opcode in ENDS:
                return True
        else:
            left.extend(graph[number].successors)
    return False
