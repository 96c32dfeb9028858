"""Known GPUs: what bounds a kernel on them, and how many of its CTAs an SM holds at once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from urdir.ptxgen.errors import PtxgenError

WARP = 32
#: 32-bit registers of an SM, the same on every target here; a warp gets them in pieces of so many,
#: and warps come in groups of four, one a scheduler (CUDA occupancy calculator).
SM_REGISTERS, REGISTER_UNIT, WARP_GROUP = 65536, 256, 4


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU by its data sheet: ``bandwidth`` in bytes/s, ``flops`` (f32, outside tensor cores) and
    ``tensor_flops`` (f16 with f32 sums, dense) in operations/s; ``source`` says where from.
    """

    name: str
    title: str
    target: str
    sm_count: int
    bandwidth: float
    flops: float
    tensor_flops: float
    source: str


#: Known GPUs by name; the first of a target stands for it. SMs are those that drivers report (an L4
#: has 58 of its chip's 60). Tensor figures are without sparsity, half of what newer data sheets
#: print, and for sums in f32, which GeForce cards make at half the rate of sums in f16. The B200 is
#: that of the HGX board, an eighth of its figures: 7.7 TB/s is also what its driver's bus width and
#: clock give (7,680 bits at 3,996 MHz), where other papers say 8.
GPUS: Mapping[str, Gpu] = {
    name: Gpu(name, title, target, sms, gb * 1e9, f32 * 1e12, tensor * 1e12, source)
    for name, title, target, sms, gb, f32, tensor, source in (
        ("t4", "Tesla T4", "sm_75", 40, 320, 8.1, 65, "NVIDIA T4 data sheet"),
        ("a100", "A100 SXM 80 GB", "sm_80", 108, 2039, 19.5, 312, "NVIDIA A100 data sheet"),
        ("a100-40", "A100 SXM 40 GB", "sm_80", 108, 1555, 19.5, 312, "NVIDIA A100 data sheet"),
        ("a10", "A10", "sm_86", 72, 600, 31.2, 125, "NVIDIA A10 data sheet"),
        ("rtx3090", "RTX 3090", "sm_86", 82, 936, 35.6, 71, "NVIDIA GA102 white paper"),
        ("l4", "L4", "sm_89", 58, 300, 30.3, 121, "NVIDIA L4 data sheet"),
        ("l40s", "L40S", "sm_89", 142, 864, 91.6, 362, "NVIDIA L40S data sheet"),
        ("rtx4090", "RTX 4090", "sm_89", 128, 1008, 82.6, 165.2, "NVIDIA Ada white paper"),
        ("h100", "H100 SXM", "sm_90", 132, 3350, 67, 989, "NVIDIA H100 data sheet"),
        ("h100-pcie", "H100 PCIe", "sm_90", 114, 2000, 51, 756, "NVIDIA H100 data sheet"),
        ("h200", "H200 SXM", "sm_90", 132, 4800, 67, 989, "NVIDIA H200 data sheet"),
        ("b200", "B200 (HGX)", "sm_100", 148, 7700, 75, 2250, "NVIDIA HGX B200 data sheet"),
        ("rtx5090", "RTX 5090", "sm_120", 170, 1792, 104.8, 209.5, "NVIDIA RTX Blackwell white "
         "paper"),
    )
}  # fmt: skip

DEFAULT_GPU = "h100"


@dataclass(frozen=True, slots=True)
class SmLimits:
    """What an SM holds at once: warps, CTAs, bytes of shared memory, of which every CTA costs
    ``reserved`` beside its own, in units of ``unit``.
    """

    warps: int
    ctas: int
    shared: int
    reserved: int = 1024
    unit: int = 128


#: Limits by target (CUDA C++ Programming Guide, "Technical Specifications per Compute Capability";
#: libcu++'s cuda/__device/arch_traits.h has the same warps, CTAs and bytes); architecture-specific
#: targets have those of their architecture.
SM_LIMITS: Mapping[str, SmLimits] = {
    "sm_75": SmLimits(32, 16, 64 << 10, reserved=0, unit=256),
    "sm_80": SmLimits(64, 32, 164 << 10),
    "sm_86": SmLimits(48, 16, 100 << 10),
    "sm_87": SmLimits(48, 16, 164 << 10),
    "sm_88": SmLimits(48, 16, 100 << 10),
    "sm_89": SmLimits(48, 24, 100 << 10),
    "sm_90": SmLimits(64, 32, 228 << 10),
    "sm_100": SmLimits(64, 32, 228 << 10),
    "sm_103": SmLimits(64, 32, 228 << 10),
    "sm_110": SmLimits(48, 24, 228 << 10),
    "sm_120": SmLimits(48, 24, 100 << 10),
    "sm_121": SmLimits(48, 24, 100 << 10),
}


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How full an SM gets: CTAs and warps at once, of ``max_warps``, and which limit stops there
    ("threads", "registers", "shared memory" or "CTAs").
    """

    ctas: int
    warps: int
    max_warps: int
    limiter: str

    @property
    def share(self) -> float:
        """Warps of those possible, 0 to 1."""
        return self.warps / self.max_warps


def choose_gpu(name: str | None, target: str | None) -> Gpu:
    """The GPU called ``name``; without one, the one that stands for ``target`` (default sm_90).

    Raises PtxgenError for an unknown name or target, and where the two do not belong together.
    """
    if name is None:
        wanted = (target or GPUS[DEFAULT_GPU].target).rstrip("af")
        found = next((g for g in GPUS.values() if g.target == wanted), None)
        if found is None:
            raise PtxgenError(f"no known GPU is an {target}: one of {_targets()}")
        return found
    key = name.lower().replace(" ", "")
    if key not in GPUS:
        raise PtxgenError(f"unknown GPU {name!r}: one of {', '.join(GPUS)}")
    if target is not None and target.rstrip("af") != GPUS[key].target:
        raise PtxgenError(f"{GPUS[key].title} is an {GPUS[key].target}, not an {target}")
    return GPUS[key]


def occupancy(target: str, registers: int, threads: int, shared: int) -> Occupancy | None:
    """CTAs of one SM at once, for ``registers`` a thread, ``threads`` and bytes of ``shared``
    memory (static and dynamic) a CTA; None for a target whose limits are not known.
    """
    limits = SM_LIMITS.get(target.rstrip("af"))
    if limits is None:
        return None
    warps = -(-threads // WARP)
    of_warp = -(-max(registers, 1) * WARP // REGISTER_UNIT) * REGISTER_UNIT
    by_registers = SM_REGISTERS // of_warp // WARP_GROUP * WARP_GROUP // warps
    taken = -(-(shared + limits.reserved) // limits.unit) * limits.unit
    bounds = {
        "threads": limits.warps // warps,
        "registers": by_registers,
        "shared memory": limits.shared // taken if taken else limits.ctas,
        "CTAs": limits.ctas,
    }
    limiter = min(bounds, key=lambda name: bounds[name])
    return Occupancy(bounds[limiter], bounds[limiter] * warps, limits.warps, limiter)


def _targets() -> str:
    return ", ".join(dict.fromkeys(g.target for g in GPUS.values()))
