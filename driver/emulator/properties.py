"""Properties of the emulated device: limits and sizes of the emulated GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from urdir.ptxgen.ptx.architecture import (
    ARCHITECTURES,
    CLUSTERS_SINCE,
    FIRST_VERSION,
    MAX_BLOCK,
    MAX_GRID,
    MAX_THREADS,
    SM_REGISTERS,
    STATIC_SHARED_LIMIT,
    WARP,
    Architecture,
    number_of,
)

#: Default target: an H200, which runs sm_90 as well.
DEFAULT_TARGET = "sm_90a"

KIB = 1024
MIB = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Board:
    """A typical board of an architecture: L2 in MiB, clocks in kHz, bus width in bits."""

    l2: int
    clock: int
    memory_clock: int
    bus_width: int


_BOARDS: Mapping[int, Board] = {
    75: Board(4, 1_590_000, 5_001_000, 256),
    80: Board(40, 1_410_000, 1_593_000, 5120),
    86: Board(6, 1_695_000, 9_751_000, 384),
    87: Board(4, 1_300_000, 3_199_000, 256),
    89: Board(72, 2_520_000, 10_501_000, 384),
    90: Board(50, 1_980_000, 2_619_000, 5120),
    100: Board(126, 1_965_000, 3_996_000, 8192),
    103: Board(126, 1_965_000, 3_996_000, 8192),
    120: Board(96, 2_407_000, 14_001_000, 512),
}


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """The emulated device: native target ("sm_90a"), number of SMs, bytes of memory."""

    target: str
    sm: int
    sm_count: int
    total_memory: int
    architecture: Architecture
    board: Board

    @staticmethod
    def of(target: str, sm_count: int, total_memory: int) -> DeviceProperties:
        """Properties of an emulated ``target``; ValueError if unsupported."""
        sm = number_of(target) if target in FIRST_VERSION else 0
        if sm not in _BOARDS:
            known = ", ".join(t for t in FIRST_VERSION if number_of(t) in _BOARDS)
            raise ValueError(f"the emulator cannot pose as {target!r}: one of {known}")
        if sm_count < 1 or total_memory < MIB:
            raise ValueError("an emulated device has at least one SM and 1 MiB of memory")
        architecture = ARCHITECTURES[sm]
        return DeviceProperties(target, sm, sm_count, total_memory, architecture, _BOARDS[sm])

    @property
    def name(self) -> str:
        """Result of cuDeviceGetName."""
        return f"urdir emulator ({self.target}, {self.sm_count} SMs)"

    @property
    def has_clusters(self) -> bool:
        """Thread block clusters, griddepcontrol: sm_90 and newer."""
        return self.sm >= CLUSTERS_SINCE

    def attributes(self) -> dict[str, int]:
        """CUdevice_attribute name (without its prefix) -> value; absent ones are 0.

        Some attributes have two names in the enum: compare their numbers.
        """
        a, board = self.architecture, self.board
        has = int(self.has_clusters)
        table: dict[str, int] = {
            "MAX_THREADS_PER_BLOCK": MAX_THREADS,
            "MAX_BLOCK_DIM_X": MAX_BLOCK[0],
            "MAX_BLOCK_DIM_Y": MAX_BLOCK[1],
            "MAX_BLOCK_DIM_Z": MAX_BLOCK[2],
            "MAX_GRID_DIM_X": MAX_GRID[0],
            "MAX_GRID_DIM_Y": MAX_GRID[1],
            "MAX_GRID_DIM_Z": MAX_GRID[2],
            "MAX_SHARED_MEMORY_PER_BLOCK": STATIC_SHARED_LIMIT,
            "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": a.shared_per_cta,
            "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR": a.shared,
            "RESERVED_SHARED_MEMORY_PER_BLOCK": a.reserved,
            "TOTAL_CONSTANT_MEMORY": 64 * KIB,
            "WARP_SIZE": WARP,
            "MAX_PITCH": 2**31 - 1,
            "MAX_REGISTERS_PER_BLOCK": SM_REGISTERS,
            "MAX_REGISTERS_PER_MULTIPROCESSOR": SM_REGISTERS,
            "CLOCK_RATE": board.clock,
            "MEMORY_CLOCK_RATE": board.memory_clock,
            "GLOBAL_MEMORY_BUS_WIDTH": board.bus_width,
            "L2_CACHE_SIZE": board.l2 * MIB,
            "MAX_PERSISTING_L2_CACHE_SIZE": board.l2 * MIB * 5 // 8 if self.sm >= 80 else 0,
            "MULTIPROCESSOR_COUNT": self.sm_count,
            "MAX_THREADS_PER_MULTIPROCESSOR": a.threads,
            "MAX_BLOCKS_PER_MULTIPROCESSOR": a.ctas,
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
