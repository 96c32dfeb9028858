"""The register file of one wave of CTAs, and the functions of a program bound to parts of it."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from urdir.driver.emulator.machine import arithmetic, formats, integers
from urdir.driver.emulator.machine.arena import Carver, free_arena
from urdir.driver.emulator.machine.asynchronous import Asynchronous
from urdir.driver.emulator.machine.bulk import BulkCopies
from urdir.driver.emulator.machine.cluster_space import ClusterSpace, map_rank
from urdir.driver.emulator.machine.compile import Program
from urdir.driver.emulator.machine.groups import Lanes, cta_index
from urdir.driver.emulator.machine.layout import SPECIALS
from urdir.driver.emulator.machine.matrix import ldmatrix, mma, movmatrix, stmatrix
from urdir.driver.emulator.machine.mbarriers import MBarriers
from urdir.driver.emulator.machine.memory import Memory
from urdir.driver.emulator.machine.register_pool import registers_at_start
from urdir.driver.emulator.machine.shared import SharedMemory
from urdir.driver.emulator.machine.spaces import (
    Changes,
    GenericSpace,
    GlobalSpace,
    SharedSpace,
    pick,
)
from urdir.driver.emulator.machine.warpgroups import Warpgroups
from urdir.driver.emulator.machine.warps import ScatteredWarps, WholeWarps

Array = npt.NDArray[Any]
Extent = tuple[int, int, int]

_TYPES = {
    "u1": np.uint8, "i1": np.int8, "u2": np.uint16, "i2": np.int16, "f2": np.float16,
    "u4": np.uint32, "i4": np.int32, "f4": np.float32, "u8": np.uint64, "i8": np.int64,
    "f8": np.float64, "c16": np.complex128, "b1": np.bool_,
}  # fmt: skip

_NUMPY_NAMES = (
    "absolute", "add", "bitwise_and", "bitwise_count", "bitwise_or", "bitwise_xor", "ceil",
    "clip", "copysign", "copyto", "cos", "count_nonzero", "divide", "empty", "equal", "exp2",
    "floor", "floor_divide", "fmod", "greater", "greater_equal", "invert", "isfinite",
    "isinf", "isnan", "left_shift", "less", "less_equal", "log2", "logical_not", "logical_or",
    "maximum", "minimum", "multiply", "negative", "not_equal", "right_shift", "rint", "sin",
    "sqrt", "subtract", "tanh", "trunc", "where",
)  # fmt: skip

_ARITHMETIC = {
    name: value
    for module in (arithmetic, formats, integers)
    for name, value in vars(module).items()
    if isinstance(value, types.FunctionType) and not name.startswith("_")
}

#: Functions by pc; None where a scattered one must run.
Functions = list[Callable[..., Any] | None]


class Wave:
    """Registers, special registers and shared memory of ``ctas`` CTAs of one program.

    Lanes are numbered CTA by CTA, each rounded up to whole warps (``lanes_per_cta``); the CTAs of a
    cluster are always in one wave. ``watch`` is the object that generated code calls ``watch``: a
    `Watch` in the watched translation, None otherwise.
    """

    def __init__(
        self,
        program: Program,
        ctas: int,
        block: Extent,
        cluster: Extent,
        shared_bytes: int,
        watch: Any = None,
    ) -> None:
        self.program = program
        self.ctas = ctas
        self.block = block
        self.cluster = cluster
        self.cluster_size = cluster[0] * cluster[1] * cluster[2]
        self.threads = block[0] * block[1] * block[2]
        self.lanes_per_cta = -(-self.threads // 32) * 32
        self.lanes = ctas * self.lanes_per_cta
        self.numbers = np.arange(self.lanes)
        self.changes = Changes()
        self.time = 0
        layout = program.layout
        self.shared = SharedMemory(ctas, shared_bytes, layout.shared)
        self.memory = GlobalSpace(self.changes)
        self.cluster_space = ClusterSpace(self.shared, self.changes, self.cluster_size, ctas)
        self.asynchronous: Asynchronous | None = None
        self.bulk: BulkCopies | None = None
        self.mbarriers: MBarriers | None = None
        if program.uses_asynchronous:
            self.mbarriers = MBarriers(self.shared, self.changes)
            self.asynchronous = Asynchronous(self.lanes, self.mbarriers, self.memory)
            self.bulk = BulkCopies(self.lanes, self.mbarriers, self.memory, self.cluster_space)
        self.registers, self._temps = self._carve_arrays()
        self.warpgroups: Warpgroups | None = None
        if program.uses_warpgroups:
            self.warpgroups = Warpgroups(
                self.registers, tuple(layout.numbers), self.shared, ctas, self.lanes_per_cta,
                registers_at_start(program.directives, self.threads), watch,
            )  # fmt: skip
        self.params = np.zeros(-(-max(1, layout.param_bytes) // 16) * 16, np.uint8)
        self._bases: dict[str, Array] = {}
        self._placed: object = None
        self.specials = {name: self._special(name) for name in program.specials}
        self._set_thread_numbers()
        self.common = self._names(watch)
        #: Functions and their globals, by the lanes.
        self._bound: dict[tuple[int, int], tuple[Functions, dict[str, Any]]] = {}
        self._scattered: dict[int, Callable[..., Any]] = {}
        self._gathered: dict[str, Any] = {}

    def _carve_arrays(self) -> tuple[dict[int, Array], dict[str, Array]]:
        """Registers by number and temporaries by name, of all lanes, in one arena."""
        widths = self.program.layout.widths
        shapes = {name: self._temp_shape(name) for name in sorted(self.program.temps)}
        total = sum(64 + self.lanes * max(1, width) for width in widths)
        total += sum(64 + 16 * int(np.prod(shape)) for shape, _ in shapes.values())
        self.arena = free_arena(total)
        carver = Carver(self.arena)
        registers = {
            number: carver.array((self.lanes,), f"u{width}" if width else np.bool_)
            for number, width in enumerate(widths)
        }
        return registers, {name: carver.array(*shape) for name, shape in shapes.items()}

    def _names(self, watch: Any) -> dict[str, Any]:
        """Names that generated code may use in any block."""
        layout, shared = self.program.layout, SharedSpace(self.shared, self.changes)
        return {
            **_TYPES,
            **{name: getattr(np, name) for name in _NUMPY_NAMES},
            **_ARITHMETIC,
            **layout.constant_arrays,
            **layout.kept,
            **{f"pc{pc}": pc for pc in range(len(self.program.blocks) + 1)},
            **{f"P_{e}": self.params.view(t) for e, t in _TYPES.items() if e[0] != "c"},
            "memory": self.memory,
            "shared": shared,
            "cluster": self.cluster_space,
            "map_rank": map_rank,
            "generic": GenericSpace(self.memory, shared),
            "machine": self,
            "watch": watch,
            "pick": pick,
            "scatter_warps": ScatteredWarps,
            "asynchronous": self.asynchronous,
            "bulk": self.bulk,
            "mbarriers": self.mbarriers,
            "warpgroups": self.warpgroups,
            "mma": mma,
            "ldmatrix": ldmatrix,
            "stmatrix": stmatrix,
            "movmatrix": movmatrix,
        }

    # ---- special registers ----

    def _special(self, name: str) -> Array:
        stem, element = name.rsplit("_", 1)
        if stem not in self._bases:
            known = next((s for s in SPECIALS.values() if s.name == stem), None)
            uniform = known is None or known.uniform
            size = 1 if uniform else self.lanes
            self._bases[stem] = np.zeros(size, f"u{known.width if known else 8}")
        return self._bases[stem].view(_TYPES[element])

    def set_special(self, stem: str, value: Array | int) -> None:
        """Set a special register of all lanes, where the program reads it."""
        array = self._bases.get(stem)
        if array is not None:
            array[...] = value

    def _set_thread_numbers(self) -> None:
        within = self.numbers % self.lanes_per_cta
        x, y, _ = self.block
        self.set_special("s_tid_x", within % x)
        self.set_special("s_tid_y", within // x % y)
        self.set_special("s_tid_z", within // (x * y))
        for axis, extent, clusters in zip("xyz", self.block, self.cluster, strict=True):
            self.set_special(f"s_ntid_{axis}", extent)
            self.set_special(f"s_cluster_nctaid_{axis}", clusters)
        self.set_special("s_cluster_nctarank", self.cluster_size)
        lane = within % 32
        self.set_special("s_laneid", lane)
        self.set_special("s_warpid", within // 32)
        self.set_special("s_nwarpid", self.lanes_per_cta // 32)
        self.set_special("s_row", self.numbers // self.lanes_per_cta * self.shared.stride)
        bit = np.uint64(1) << lane.astype(np.uint64)
        below = bit - np.uint64(1)
        every = np.uint64(0xFFFFFFFF)
        for relation, mask in (
            ("eq", bit), ("lt", below), ("le", bit | below),
            ("gt", every ^ (bit | below)), ("ge", every ^ below),
        ):  # fmt: skip
            self.set_special(f"s_lanemask_{relation}", mask)

    def set_ctas(self, first: int, grid: Extent, sm_count: int) -> None:
        """The wave holds CTAs ``first``, ``first + 1``, ... of the grid, see ``cta_index``."""
        if self._placed == (first, grid, sm_count):
            return
        self._placed = (first, grid, sm_count)
        cta = first + np.arange(self.ctas)
        index = cta_index(cta, grid, self.cluster)
        for axis, at, extent, clusters in zip("xyz", index, grid, self.cluster, strict=True):
            self._set_per_cta(f"s_ctaid_{axis}", at)
            self.set_special(f"s_nctaid_{axis}", extent)
            self._set_per_cta(f"s_clusterid_{axis}", at // clusters)
            self.set_special(f"s_nclusterid_{axis}", extent // clusters)
            self._set_per_cta(f"s_cluster_ctaid_{axis}", at % clusters)
        self._set_per_cta("s_cluster_ctarank", cta % self.cluster_size)
        self._set_per_cta("s_smid", cta % sm_count)
        self.set_special("s_nsmid", sm_count)

    def _set_per_cta(self, stem: str, values: Array) -> None:
        array = self._bases.get(stem)
        if array is not None:
            array.reshape(self.ctas, -1)[...] = values[:, None]

    def begin(self, memory: Memory, params: bytes, symbols: Mapping[str, int]) -> None:
        """Prepare for new CTAs: parameters, addresses of variables, fresh shared memory."""
        self.memory.memory = memory
        self.params[: len(params)] = np.frombuffer(params, np.uint8)
        for name, address in symbols.items():
            self.set_special(f"g_{name}", address)
        self.shared.clear()
        for owner in (self.asynchronous, self.bulk, self.mbarriers, self.warpgroups):
            if owner is not None:
                owner.clear()

    def end(self) -> None:
        """The CTAs are complete: drop the reference to memory, which may be freed before the
        next."""
        del self.memory.memory
        self.arena.release()

    def all_flags(self) -> Array:
        """Which lanes are threads (all except the rest of a partial last warp), (lanes,) bool."""
        flags: Array = self.numbers % self.lanes_per_cta < self.threads
        return flags

    def all_lanes(self) -> Lanes:
        """The lanes that are threads."""
        if self.threads == self.lanes_per_cta:
            return Lanes(0, self.lanes)
        return Lanes.of(np.flatnonzero(self.all_flags()))

    # ---- time ----

    def tick(self) -> None:
        """Bring the clocks up to date; called before one is read."""
        self.time += 1
        cycles, low = 2 * self.time, 0xFFFFFFFF
        for stem, value in (
            ("s_clock", cycles & low), ("s_clock_hi", cycles >> 32), ("s_clock64", cycles),
            ("s_globaltimer_lo", self.time & low), ("s_globaltimer_hi", self.time >> 32),
            ("s_globaltimer", self.time),
        ):  # fmt: skip
            self.set_special(stem, value)

    def sleep(self, nanoseconds: Array) -> None:
        """nanosleep: advance the emulated clock."""
        self.time += int(nanoseconds.max())

    # ---- functions ----

    def bind(self, start: int, stop: int) -> Functions:
        """The functions for lanes start..stop, which are whole warps."""
        key = (start, stop)
        if key not in self._bound:
            if len(self._bound) > 64:
                self._unbind()
            self._bound[key] = self._bind(start, stop)
        return self._bound[key][0]

    def _bind(self, start: int, stop: int) -> tuple[Functions, dict[str, Any]]:
        n = stop - start
        space = dict(self.common, n=n, W=WholeWarps(), L=self.numbers[start:stop])
        for number, elements in self.program.views.items():
            base = self.registers[number][start:stop]
            for element in elements:
                view: Array = base.view(_TYPES[element])
                step = view.size // n
                space[f"r{number}_{element}"] = view[::step] if step > 1 else view
        for temp in self.program.temps:
            space[temp] = self._temps[temp][:n]
        for name, array in self.specials.items():
            space[name] = array if array.size == 1 else array[start:stop]
        functions: Functions = [None] * len(self.program.blocks)
        for pc in self.program.whole:
            functions[pc] = partial(self._define, functions, space, pc)
        return functions, space

    def forget(self) -> None:
        """Free the functions, and with them the registers: functions and their globals refer to
        each other, so that they would stay until the next full collection. It runs no more."""
        self._unbind()
        self._gathered.clear()
        self.common.clear()
        self._scattered.clear()

    def _unbind(self) -> None:
        """Free the functions of whole warps, none of which runs."""
        for functions, space in self._bound.values():
            functions.clear()
            space.clear()
        self._bound.clear()

    def _define(self, functions: Functions, space: dict[str, Any], pc: int) -> Any:
        """Define a block's function, and call it for the first time."""
        function = functions[pc] = types.FunctionType(self.program.whole[pc].code, space)
        return function()

    def _temp_shape(self, name: str) -> tuple[tuple[int, ...], type[Any]]:
        element, _, count = name.split("_", 1)[1].partition("x")
        shape = (self.lanes, int(count)) if count else (self.lanes,)
        return shape, _TYPES[element]

    def scattered(self, pc: int) -> Callable[..., Any]:
        """A block's function that takes the lane numbers of any group."""
        if pc not in self._scattered:
            if not self._gathered:
                self._gathered = dict(self.common)
                self._gathered |= {f"R{number}": a for number, a in self.registers.items()}
                self._gathered |= {f"S_{name}": a for name, a in self.specials.items()}
            code = self.program.scattered(pc)  # it may register more objects
            self._gathered |= self.program.layout.kept
            self._scattered[pc] = types.FunctionType(code, self._gathered)
        return self._scattered[pc]
