"""Known GPUs by their data sheets: bandwidth and arithmetic rates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from urdir.ptxgen.errors import SettingError
from urdir.ptxgen.ptx.architecture import specific_target
from urdir.ptxgen.target import Target


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

    @property
    def native_target(self) -> str:
        """The most specific target whose code it runs, as `Device.native_target`."""
        return specific_target(Target.parse(self.target).sm) or self.target


#: Known GPUs by name; the first of a target represents it. SMs are those that drivers report (an L4
#: has 58 of its chip's 60). Tensor figures are without sparsity, half of what newer data sheets
#: print, and for sums in f32, which GeForce cards compute at half the rate of sums in f16. The B200
#: is that of the HGX board, an eighth of its figures: 7.7 TB/s also follows from its driver's bus
#: width and clock (7,680 bits at 3,996 MHz), where other papers say 8.
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


def choose_gpu(name: str | None, target: str | None) -> Gpu:
    """The GPU called ``name``; without one, the representative of ``target`` (default sm_90).

    Raises SettingError for an unknown name or target, and if the two do not match.
    """
    if name is None:
        wanted = Target.parse(target or GPUS[DEFAULT_GPU].target).portable
        found = next((g for g in GPUS.values() if g.target == wanted), None)
        if found is None:
            raise SettingError(f"no known GPU is an {target}: one of {_targets()}")
        return found
    key = name.lower().replace(" ", "")
    if key not in GPUS:
        raise SettingError(f"unknown GPU {name!r}: one of {', '.join(GPUS)}")
    if target is not None and Target.parse(target).portable != GPUS[key].target:
        raise SettingError(f"{GPUS[key].title} is an {GPUS[key].target}, not an {target}")
    return GPUS[key]


def _targets() -> str:
    return ", ".join(dict.fromkeys(g.target for g in GPUS.values()))
