"""Kernels of a loaded module: parameter layout, limits, occupancy."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from math import prod
from typing import Any

from urdir.driver.emulator.calls import Refused
from urdir.driver.emulator.properties import (
    DEFAULT_SHARED,
    MAX_CLUSTER,
    MAX_THREADS,
    PORTABLE_CLUSTER,
    REGISTERS,
    RESERVED_SHARED,
    DeviceProperties,
)
from urdir.ptxgen.ptx import Entry
from urdir.ptxgen.ptx import Module as PtxModule

Extent = tuple[int, int, int]

#: What every kernel is said to need: the emulator allocates no registers.
REGISTERS_PER_THREAD = 32
_ALLOCATION_UNIT = 128


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter in the parameter block, in bytes (PTX ISA 5.1.6.1: naturally aligned)."""

    offset: int
    size: int


def parameter_layout(entry: Entry) -> tuple[Slot, ...]:
    """Where each parameter of a kernel lies."""
    slots, end = [], 0
    for parameter in entry.parameters:
        offset = -(-end // parameter.align) * parameter.align
        slots.append(Slot(offset, parameter.size))
        end = offset + parameter.size
    return tuple(slots)


def static_shared_bytes(module: PtxModule, entry: Entry) -> int:
    """Bytes of shared variables that the kernel declares (or can see in its module)."""
    end = 0
    for variable in (*module.variables, *entry.variables):
        if variable.space == "shared" and not variable.extern:
            end = -(-end // variable.align) * variable.align + variable.nbytes
    return end


class Function:
    """A kernel in a loaded module; ``program`` is what the machine runs."""

    def __init__(
        self, ptx: PtxModule, entry: Entry, program: Any, module: int, device: DeviceProperties
    ) -> None:
        self.name = entry.name
        self.entry = entry
        self.program = program
        self.module = module
        self.device = device
        self.slots = parameter_layout(entry)
        self.static_shared = static_shared_bytes(ptx, entry)
        self.max_dynamic_shared = max(0, DEFAULT_SHARED - self.static_shared)
        self.allows_large_clusters = False
        directives = entry.directives
        self.required_block = _extent(directives.get("reqntid"))
        self.max_threads = prod(
            self.required_block or _extent(directives.get("maxntid")) or (MAX_THREADS,)
        )
        self.required_cluster = _extent(directives.get("reqnctapercluster"))
        self.needs_cluster = "explicitcluster" in directives
        opcodes = {i.opcode for i in entry.instructions}
        self.triggers_dependents = "griddepcontrol.launch_dependents" in opcodes
        self.ptx_version = ptx.version

    @property
    def max_shared(self) -> int:
        """Bytes of dynamic shared memory it can be made to take."""
        return self.device.shared_per_block - self.static_shared

    def read_arguments(self, address: int) -> bytes:
        """The parameter block, read from the pointer array at ``address`` (kernelParams)."""
        if not self.slots:
            return b""
        if not address:
            raise Refused(
                "CUDA_ERROR_INVALID_VALUE",
                f"kernel {self.name} takes {len(self.slots)} parameters, kernelParams is null",
            )
        pointers = (ctypes.c_uint64 * len(self.slots)).from_address(address)
        block = bytearray(self.slots[-1].offset + self.slots[-1].size)
        for slot, pointer in zip(self.slots, pointers, strict=True):
            if not pointer:
                raise Refused("CUDA_ERROR_INVALID_VALUE", "a null pointer in kernelParams")
            block[slot.offset : slot.offset + slot.size] = ctypes.string_at(pointer, slot.size)
        return bytes(block)

    def blocks_per_sm(self, threads: int, dynamic_shared: int) -> int:
        """CTAs of one SM at once (occupancy), 0 when not even one fits."""
        g = self.device.generation
        if not 0 < threads <= self.max_threads or dynamic_shared > self.max_shared:
            return 0
        rounded = -(-threads // 32) * 32
        shared = self.static_shared + dynamic_shared + RESERVED_SHARED
        shared = -(-shared // _ALLOCATION_UNIT) * _ALLOCATION_UNIT
        return min(
            g.blocks_per_sm,
            g.threads_per_sm // rounded,
            REGISTERS // (rounded * REGISTERS_PER_THREAD),
            g.shared_per_sm * 1024 // shared,
        )

    def clusters_at_once(self, cluster: Extent, threads: int, dynamic_shared: int) -> int:
        """Clusters that the device holds at once."""
        size = prod(cluster)
        limit = MAX_CLUSTER if self.allows_large_clusters else PORTABLE_CLUSTER
        if size > limit:
            return 0
        return self.blocks_per_sm(threads, dynamic_shared) * self.device.sm_count // size


def _extent(values: tuple[int, ...] | None) -> Extent | None:
    if not values:
        return None
    x, y, z = (*values, 1, 1)[:3]
    return x, y, z
