"""Kernel statistics: resources, occupancy, instructions by pipe, and the roofline bound."""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from urdir.ptxgen import ptx
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.ptx.architecture import Occupancy, occupancy
from urdir.ptxgen.spec import KernelSpec
from urdir.ptxgen.tools.assemble import Assembly, Resources
from urdir.ptxgen.tools.gpus import Gpu

#: The pipes, in the order they are shown. fma: f16, f32, f64 additions and products. special:
#: roots, reciprocals, exponentials, and conversions from, to or between floats (a fraction of the
#: rate). integer: everything else that computes, compares, selects or moves. memory: loads, stores,
#: atomics, asynchronous copies, shuffles. tensor: matrix products. control: branches, barriers,
#: fences, waits.
PIPES = ("fma", "special", "integer", "memory", "tensor", "control")

_PIPE_OF: Mapping[str, str] = {
    opcode: pipe
    for pipe, opcodes in {
        "special": "rcp rsqrt sqrt sin cos ex2 lg2 tanh div",
        "memory": "ld ldu st atom red cp ldmatrix stmatrix movmatrix shfl prefetch prefetchu "
        "discard applypriority multimem",
        "tensor": "mma wmma wgmma tcgen05",
        "control": "bra brx call ret exit trap bar barrier membar fence mbarrier griddepcontrol "
        "nanosleep setmaxnreg elect clusterlaunchcontrol brkpt pmevent",
    }.items()
    for opcode in opcodes.split()
}
_FMA = frozenset({"add", "sub", "mul", "fma", "mad"})
_FLOAT = re.compile(r"(f16|bf16|f32|f64|tf32|e4m3|e5m2)(x[24])?$")


@dataclass(frozen=True, slots=True)
class Bound:
    """The minimum time of a launch on a GPU, in seconds, and its cause.

    ``by`` is "memory" or "arithmetic"; ``intensity`` is operations a byte.
    """

    memory: float
    arithmetic: float
    intensity: float

    @property
    def seconds(self) -> float:
        """The larger of the two."""
        return max(self.memory, self.arithmetic)

    @property
    def by(self) -> str:
        """Which of the two is larger."""
        return "memory" if self.memory >= self.arithmetic else "arithmetic"


@dataclass(frozen=True, slots=True)
class KernelStats:
    """The cost of a kernel for a target; figures from the assembler are None without one.

    ``mix`` counts the instructions of the PTX text by pipe: loops count once. ``shared`` is bytes
    per CTA, static and dynamic; ``code_bytes`` the machine code; ``waves`` how often the GPU is
    filled.
    """

    spec: KernelSpec
    target: str
    mix: Mapping[str, int]
    bound: Bound
    resources: Resources | None
    code_bytes: int | None
    shared: int | None
    occupancy: Occupancy | None
    waves: float | None

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        r, o = self.resources, self.occupancy
        shape = self.spec.launch_shape
        return {
            "instructions": dict(self.mix),
            "registers": r and r.registers,
            "spill_bytes": r and r.spill_stores + r.spill_loads,
            "local_bytes": r and r.stack,
            "barriers": r and r.barriers,
            "static_shared_bytes": r and r.shared,
            "dynamic_shared_bytes": shape.shared_bytes,
            "code_bytes": self.code_bytes,
            "occupancy": o
            and {
                "ctas_per_sm": o.ctas,
                "warps_per_sm": o.warps,
                "max_warps_per_sm": o.max_warps,
                "limiter": o.limiter,
            },
            "waves": self.waves,
            "bytes_moved": self.spec.bytes_moved(),
            "flops": self.spec.flops(),
            "flops_per_byte": self.bound.intensity,
            "bound_seconds": self.bound.seconds,
            "bound_by": self.bound.by,
        }


def measure(
    spec: KernelSpec, target: str, gpu: Gpu, text: str, assembly: Assembly | None
) -> KernelStats:
    """The cost on ``gpu`` of ``spec``, whose PTX for ``target`` is ``text`` and whose machine code
    is ``assembly`` (None without an assembler). Raises PtxgenError for text that does not parse.
    """
    mix = instruction_mix(text, spec.name)
    shape = spec.launch_shape
    resources = assembly.entries.get(spec.name) if assembly else None
    held = shared = waves = None
    if resources:
        shared = resources.shared + shape.shared_bytes
        held = occupancy(target, resources.registers, shape.threads, shared)
        ctas = shape.grid[0] * shape.grid[1] * shape.grid[2]
        waves = ctas / (held.ctas * gpu.sm_count) if held.ctas else None
    code = code_bytes(assembly.cubin).get(spec.name) if assembly else None
    bound = roofline(spec, gpu, on_tensor_cores=mix["tensor"] > 0)
    return KernelStats(
        spec,
        target,
        mix,
        bound,
        resources=resources,
        code_bytes=code,
        shared=shared,
        occupancy=held,
        waves=waves,
    )


def roofline(spec: KernelSpec, gpu: Gpu, on_tensor_cores: bool) -> Bound:
    """The bound of one launch by ``gpu``'s bandwidth and arithmetic (Williams et al. 2009)."""
    nbytes, flops = spec.bytes_moved(), spec.flops()
    peak = gpu.tensor_flops if on_tensor_cores else gpu.flops
    return Bound(nbytes / gpu.bandwidth, flops / peak, flops / nbytes if nbytes else 0.0)


def instruction_mix(text: str, entry: str | None = None) -> dict[str, int]:
    """Instructions of an entry (None: of all) by pipe. Raises PtxgenError for text that does not
    parse, or that has no such entry.
    """
    try:
        entries = ptx.parse(text).entries
    except ptx.PtxSyntaxError as exc:
        raise PtxgenError(str(exc)) from exc
    if entry is not None and entry not in entries:
        raise PtxgenError(f"the PTX has no entry {entry!r}: {', '.join(entries) or 'none at all'}")
    chosen = entries.values() if entry is None else (entries[entry],)
    counts = Counter(pipe_of(i.parts) for e in chosen for i in e.instructions)
    return {pipe: counts[pipe] for pipe in PIPES}


def pipe_of(parts: tuple[str, ...]) -> str:
    """The pipe of an opcode, split at its dots; see ``PIPES``."""
    root = parts[0]
    if root in _PIPE_OF:
        return _PIPE_OF[root]
    is_float = any(_FLOAT.match(part) for part in parts[1:])
    if root in _FMA and is_float:
        return "fma"
    return "special" if root == "cvt" and is_float else "integer"


def code_bytes(cubin: bytes) -> dict[str, int]:
    """Bytes of machine code by entry: the sections ``.text.<entry>`` of a 64-bit ELF file."""
    if cubin[:5] != b"\x7fELF\x02":
        raise PtxgenError("the cubin is not a 64-bit ELF file")
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    size, count, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + size * i) for i in range(count)]
    names = headers[names_index][4]
    found = {}
    for header in headers:
        start = names + header[0]
        name = cubin[start : cubin.index(b"\0", start)].decode()
        if name.startswith(".text."):
            found[name.removeprefix(".text.")] = header[5]
    return found
