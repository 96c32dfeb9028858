"""What the emulated device says about itself: limits and sizes of the GPU it poses as."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

KIB = 1024
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Generation:
    """Per-SM limits of a compute capability (CUDA C++ Programming Guide, "Technical
    Specifications per Compute Capability") and, for the rest, a typical board of it.

    Shared memory in KiB, L2 in MiB, clocks in kHz, bus width in bits.
    """

    threads_per_sm: int
    blocks_per_sm: int
    shared_per_sm: int
    shared_per_block: int
    l2: int
    clock: int
    memory_clock: int
    bus_width: int


_GENERATIONS: Mapping[int, Generation] = {
    75: Generation(1024, 16, 64, 64, 4, 1_590_000, 5_001_000, 256),
    80: Generation(2048, 32, 164, 163, 40, 1_410_000, 1_593_000, 5120),
    86: Generation(1536, 16, 100, 99, 6, 1_695_000, 9_751_000, 384),
    87: Generation(1536, 16, 164, 163, 4, 1_300_000, 3_199_000, 256),
    89: Generation(1536, 24, 100, 99, 72, 2_520_000, 10_501_000, 384),
    90: Generation(2048, 32, 228, 227, 50, 1_980_000, 2_619_000, 5120),
    100: Generation(2048, 32, 228, 227, 126, 1_965_000, 3_996_000, 8192),
    103: Generation(2048, 32, 228, 227, 126, 1_965_000, 3_996_000, 8192),
    120: Generation(1536, 24, 100, 99, 96, 2_407_000, 14_001_000, 512),
}

#: Shared memory of a CTA without opting in to more, and what the system reserves of each CTA.
DEFAULT_SHARED = 48 * KIB
RESERVED_SHARED = 1 * KIB
MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_BLOCK = (1024, 1024, 64)
MAX_THREADS = 1024
REGISTERS = 65536
#: CTAs of a cluster that every device with clusters takes, and the most with the opt-in.
PORTABLE_CLUSTER = 8
MAX_CLUSTER = 16


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """The posed device: target ("sm_90"), number of SMs, bytes of memory."""

    target: str
    sm: int
    sm_count: int
    total_memory: int
    generation: Generation

    @staticmethod
    def of(target: str, sm_count: int, total_memory: int) -> DeviceProperties:
        """Properties of an emulated ``target``; raises ValueError for one it cannot pose as."""
        match = re.fullmatch(r"sm_(\d+)[af]?", target)
        sm = int(match[1]) if match else 0
        if sm not in _GENERATIONS:
            known = ", ".join(f"sm_{n}" for n in _GENERATIONS)
            raise ValueError(f"the emulator cannot pose as {target!r}: one of {known}")
        if sm_count < 1 or total_memory < MIB:
            raise ValueError("an emulated device has at least one SM and 1 MiB of memory")
        return DeviceProperties(target, sm, sm_count, total_memory, _GENERATIONS[sm])

    @property
    def name(self) -> str:
        """What cuDeviceGetName says."""
        return f"urdir emulator ({self.target}, {self.sm_count} SMs)"

    @property
    def has_clusters(self) -> bool:
        """Thread block clusters, griddepcontrol: sm_90 and newer."""
        return self.sm >= 90

    @property
    def shared_per_block(self) -> int:
        """Bytes of shared memory a CTA can opt in to."""
        return self.generation.shared_per_block * KIB

    def attributes(self) -> dict[str, int]:
        """CUdevice_attribute name (without its prefix) -> value; what is absent is 0.

        Some attributes have two names in the enum: compare their numbers.
        """
        g = self.generation
        has = int(self.has_clusters)
        table: dict[str, int] = {
            "MAX_THREADS_PER_BLOCK": MAX_THREADS,
            "MAX_BLOCK_DIM_X": MAX_BLOCK[0],
            "MAX_BLOCK_DIM_Y": MAX_BLOCK[1],
            "MAX_BLOCK_DIM_Z": MAX_BLOCK[2],
            "MAX_GRID_DIM_X": MAX_GRID[0],
            "MAX_GRID_DIM_Y": MAX_GRID[1],
            "MAX_GRID_DIM_Z": MAX_GRID[2],
            "MAX_SHARED_MEMORY_PER_BLOCK": DEFAULT_SHARED,
            "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": self.shared_per_block,
            "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": g.shared_per_sm * KIB,
            "RESERVED_SHARED_MEMORY_PER_BLOCK": RESERVED_SHARED if self.sm >= 80 else 0,
            "TOTAL_CONSTANT_MEMORY": 64 * KIB,
            "WARP_SIZE": 32,
            "MAX_PITCH": 2**31 - 1,
            "MAX_REGISTERS_PER_BLOCK": REGISTERS,
            "MAX_REGISTERS_PER_MULTIPROCESSOR": REGISTERS,
            "CLOCK_RATE": g.clock,
            "MEMORY_CLOCK_RATE": g.memory_clock,
            "GLOBAL_MEMORY_BUS_WIDTH": g.bus_width,
            "L2_CACHE_SIZE": g.l2 * MIB,
            "MAX_PERSISTING_L2_CACHE_SIZE": g.l2 * MIB * 5 // 8 if self.sm >= 80 else 0,
            "MULTIPROCESSOR_COUNT": self.sm_count,
            "MAX_THREADS_PER_MULTIPROCESSOR": g.threads_per_sm,
            "MAX_BLOCKS_PER_MULTIPROCESSOR": g.blocks_per_sm,
            "COMPUTE_CAPABILITY_MAJOR": self.sm // 10,
            "COMPUTE_CAPABILITY_MINOR": self.sm % 10,
            "TEXTURE_ALIGNMENT": 512,
            "TEXTURE_PITCH_ALIGNMENT": 32,
            "ASYNC_ENGINE_COUNT": 2,
            "GPU_OVERLAP": 1,
            "CAN_MAP_HOST_MEMORY": 1,
            "CONCURRENT_KERNELS": 1,
            "UNIFIED_ADDRESSING": 1,
            "STREAM_PRIORITIES_SUPPORTED": 1,
            "GLOBAL_L1_CACHE_SUPPORTED": 1,
            "LOCAL_L1_CACHE_SUPPORTED": 1,
            "COOPERATIVE_LAUNCH": 1,
            "CLUSTER_LAUNCH": has,
            "MEMORY_POOLS_SUPPORTED": 1,
            "COMPUTE_PREEMPTION_SUPPORTED": 1,
            "CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM": 1,
            "SINGLE_TO_DOUBLE_PRECISION_PERF_RATIO": 2 if self.sm in (80, 90, 100) else 32,
            "PCI_BUS_ID": 0,
        }
        return table
