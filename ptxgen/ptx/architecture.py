"""GPU architectures: PTX targets, code compatibility, and SM resources.

Each fact is stated once. The module is in this package, not beside ``ptxgen/target.py``, because
the emulator uses these architectures, and may import only this package.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass

Version = tuple[int, int]

#: Target -> first PTX ISA version that supports it (PTX ISA, "Release Notes", table of targets).
#: Targets older than sm_75 are included because their PTX runs on newer devices.
FIRST_VERSION: Mapping[str, Version] = {
    "sm_50": (4, 0),
    "sm_52": (4, 1),
    "sm_53": (4, 2),
    "sm_60": (5, 0),
    "sm_61": (5, 0),
    "sm_62": (5, 0),
    "sm_70": (6, 0),
    "sm_72": (6, 1),
    "sm_75": (6, 3),
    "sm_80": (7, 0),
    "sm_86": (7, 1),
    "sm_87": (7, 4),
    "sm_88": (9, 0),
    "sm_89": (7, 8),
    "sm_90": (7, 8),
    "sm_90a": (8, 0),
    "sm_100": (8, 6),
    "sm_100a": (8, 6),
    "sm_101": (8, 6),
    "sm_103": (8, 8),
    "sm_103a": (8, 8),
    "sm_110": (9, 0),
    "sm_120": (8, 7),
    "sm_120a": (8, 7),
    "sm_121": (8, 8),
}

#: Threads per warp (PTX ISA 2.2.1).
WARP = 32
#: Limits of a launch, the same on every architecture here (CUDA C++ Programming Guide, "Technical
#: Specifications per Compute Capability"): CTAs along x, y, z; threads along x, y, z; threads.
MAX_GRID = (2**31 - 1, 65535, 65535)
MAX_BLOCK = (1024, 1024, 64)
MAX_THREADS = 1024
#: Shared memory in bytes that a CTA may have without opting in to more (same table).
STATIC_SHARED_LIMIT = 48 * 1024
#: 32-bit registers per SM, and maximum per CTA (same table).
SM_REGISTERS = 65536
#: Allocation unit of a warp's registers, and of warps: one per scheduler (CUDA occupancy
#: calculator).
REGISTER_UNIT, WARP_GROUP = 256, 4
#: The first architecture with clusters and programmatic launches (PTX ISA 2.2.2, griddepcontrol).
CLUSTERS_SINCE = 90
#: Cluster size that every device with clusters supports, and the maximum with opt-in (CUDA C++
#: Programming Guide, "Thread Block Clusters"; H100 tuning guide).
PORTABLE_CLUSTER, MAX_CLUSTER = 8, 16


@dataclass(frozen=True, slots=True)
class Architecture:
    """Capacity of an SM: warps, CTAs, bytes of shared memory.

    Every CTA takes ``reserved`` bytes in addition, in units of ``unit`` bytes.
    """

    warps: int
    ctas: int
    shared: int
    reserved: int = 1024
    unit: int = 128

    @property
    def shared_per_cta(self) -> int:
        """Bytes of shared memory that a CTA can opt in to."""
        return self.shared - self.reserved

    @property
    def threads(self) -> int:
        """Maximum resident threads per SM."""
        return self.warps * WARP


#: Supported architectures by number (CUDA C++ Programming Guide, "Technical Specifications per
#: Compute Capability"; libcu++'s cuda/__device/arch_traits.h has the same warps, CTAs and bytes).
#: "sm_90a" is another target of the same architecture.
ARCHITECTURES: Mapping[int, Architecture] = {
    75: Architecture(32, 16, 64 << 10, reserved=0, unit=256),
    80: Architecture(64, 32, 164 << 10),
    86: Architecture(48, 16, 100 << 10),
    87: Architecture(48, 16, 164 << 10),
    88: Architecture(48, 16, 100 << 10),
    89: Architecture(48, 24, 100 << 10),
    90: Architecture(64, 32, 228 << 10),
    100: Architecture(64, 32, 228 << 10),
    103: Architecture(64, 32, 228 << 10),
    110: Architecture(48, 24, 228 << 10),
    120: Architecture(48, 24, 100 << 10),
    121: Architecture(48, 24, 100 << 10),
}

#: Architectures whose devices can be opened, real or emulated. Other devices count as the newest of
#: these that is not newer and of the same generation (87 for 88).
OPENED = (75, 80, 86, 87, 89, 90, 100, 103, 120)


def number_of(target: str) -> int:
    """90 for "sm_90" and "sm_90a"; ValueError if it is not a target."""
    found = re.fullmatch(r"sm_(\d+)a?", target)
    if found is None or target not in FIRST_VERSION:
        raise ValueError(f"unknown target {target!r}")
    return int(found[1])


def is_specific(target: str) -> bool:
    """Whether a target such as "sm_90a" runs only on its own architecture."""
    return target.endswith("a")


def specific_target(number: int) -> str | None:
    """The architecture-specific target: "sm_90a" for 90; None for 86."""
    name = f"sm_{number}a"
    return name if name in FIRST_VERSION else None


def runs_on(target: str, device: str) -> bool:
    """Whether PTX for ``target`` runs on a device with native target ``device``.

    PTX runs on its own architecture and newer ones, "sm_90a" only on its own (PTX ISA, ".target").
    An H200 is "sm_90a". A device that is "sm_90" only exists in the emulator, to test portable
    code. Raises ValueError for an invalid target.
    """
    if is_specific(target):
        return target == device
    return number_of(target) <= number_of(device)


@dataclass(frozen=True, slots=True)
class Occupancy:
    """Occupancy of an SM: resident CTAs and warps, ``max_warps``, and the limiting resource
    ("threads", "registers", "shared memory" or "CTAs").
    """

    ctas: int
    warps: int
    max_warps: int
    limiter: str

    @property
    def share(self) -> float:
        """Fraction of the possible warps."""
        return self.warps / self.max_warps


@functools.lru_cache(maxsize=1024)  # the emulator asks at each launch
def occupancy(target: str, registers: int, threads: int, shared: int) -> Occupancy:
    """Resident CTAs per SM, by the CUDA occupancy calculator's rules.

    ``registers`` per thread; ``threads`` and bytes of ``shared`` memory (static and dynamic) per
    CTA. Raises ValueError for a target of an unlisted architecture.
    """
    if (architecture := ARCHITECTURES.get(number_of(target))) is None:
        raise ValueError(f"the SM resources of {target} are unknown")
    warps = -(-threads // WARP)
    of_warp = -(-max(registers, 1) * WARP // REGISTER_UNIT) * REGISTER_UNIT
    by_registers = SM_REGISTERS // of_warp // WARP_GROUP * WARP_GROUP // warps
    taken = -(-(shared + architecture.reserved) // architecture.unit) * architecture.unit
    bounds = {
        "threads": architecture.warps // warps,
        "registers": by_registers,
        "CTAs": architecture.ctas,
        "shared memory": architecture.shared // taken if taken else architecture.ctas,
    }
    limiter = min(bounds, key=lambda name: bounds[name])
    return Occupancy(bounds[limiter], bounds[limiter] * warps, architecture.warps, limiter)
