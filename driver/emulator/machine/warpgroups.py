"""The warpgroups of a wave: pending wgmma, and registers passed between warpgroups.

A product is computed when issued, from the present contents of shared memory. Accumulators stay
matrices until they are waited for: only then do they return to the registers, which must not be
accessed before (see register_rules.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from urdir.driver.emulator.machine import wgmma
from urdir.driver.emulator.machine.faults import LAUNCH_FAILED, AccessFault
from urdir.driver.emulator.machine.register_pool import RegisterPool
from urdir.driver.emulator.machine.register_rules import Operands, RegisterRules, Stretch
from urdir.driver.emulator.machine.shared import SharedMemory
from urdir.driver.emulator.machine.wgmma import WARPGROUP, Descriptor

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Multiply:
    """One wgmma.mma_async of a program. Registers are numbers; ``a`` has four of them, or one that
    holds a descriptor."""

    operands: Operands
    n: int
    #: PTX types of D and of A and B.
    d_kind: str
    kind: str
    d: tuple[int, ...]
    a: tuple[int, ...]
    b: int
    #: Whether D is accumulated: a predicate and whether it is negated, or a constant.
    scale_d: int | bool
    is_negated: bool
    #: 1 or -1, a factor of the product.
    sign: int
    #: Whether K is the second dimension of A and B in memory.
    a_transposed: bool
    b_transposed: bool


class _Accumulators:
    """The matrices of one set of D's registers, for all warpgroups of a wave."""

    def __init__(self, warpgroups: int, n: int, kind: str) -> None:
        self.kind = kind
        self.matrices = np.zeros((warpgroups, wgmma.M, n), wgmma.ACCUMULATORS[kind][0])
        #: The group of the last pending wgmma; -1: none.
        self.group = np.full(warpgroups, -1, np.int64)


class Watcher(Protocol):
    """Events for a watcher, see `Watch`."""

    def operand(self, line: int, lanes: Array, groups: Array, offsets: Array) -> None:
        """Warpgroups read shared memory."""

    def wgmma_wait(self, lanes: Array, before: Array) -> None:
        """Warpgroups have waited for groups."""


class Warpgroups:
    """Warpgroups, numbered CTA by CTA, each CTA rounded up to whole warpgroups."""

    def __init__(
        self,
        registers: Mapping[int, Array],
        names: Sequence[str],
        shared: SharedMemory,
        ctas: int,
        lanes_per_cta: int,
        registers_at_start: int,
        watch: Watcher | None = None,
    ) -> None:
        self._watch = watch
        self._registers = registers
        self._shared = shared
        per_cta = -(-lanes_per_cta // WARPGROUP)
        cta, within = np.divmod(np.arange(ctas * lanes_per_cta), lanes_per_cta)
        #: The warpgroup of each lane of the wave.
        self._number = cta * per_cta + within // WARPGROUP
        self._row = np.arange(ctas * per_cta) // per_cta * shared.stride
        self._count = ctas * per_cta
        self._accumulators: dict[tuple[tuple[int, ...], str], _Accumulators] = {}
        self._rules = RegisterRules(self._count, names)
        self._pool = RegisterPool(self._count, per_cta, registers_at_start)
        self.clear()

    def clear(self) -> None:
        """New CTAs."""
        #: Number of groups that each warpgroup has committed.
        self._committed = np.zeros(self._count, np.int64)
        self._rules.clear()
        self._pool.clear()
        for accumulators in self._accumulators.values():
            accumulators.group[:] = -1

    def numbers(self, lanes: Array) -> Array:
        """The warpgroups of lanes of the wave."""
        which: Array = self._number[lanes]
        return which

    def complete(self, numbers: Array) -> Array:
        """Which warpgroups have all their threads among the given lanes."""
        complete: Array = np.bincount(numbers, minlength=self._count) == WARPGROUP
        return complete

    def incomplete(self, alive: Array) -> Array:
        """Which warpgroups lack threads, given the live lanes."""
        return ~self.complete(self._number[alive])

    # ---- called by generated code; lanes are a group's ----

    def run(self, stretch: Stretch, lanes: Array) -> None:
        """Lanes are about to run instructions that access wgmma registers."""
        numbers, first = np.unique(self._number[lanes], return_index=True)
        try:
            self._rules.run(stretch, numbers.tolist())
        except AccessFault as fault:
            fault.position = int(first[fault.position])
            raise

    def fence(self, lanes: Array) -> None:
        """wgmma.fence."""
        self._rules.fence(self._of(lanes).tolist())

    def commit(self, lanes: Array) -> None:
        """wgmma.commit_group."""
        self._committed[self._of(lanes)] += 1

    def wait(self, groups: int, lanes: Array) -> None:
        """wgmma.wait_group: all but the last ``groups`` groups are complete."""
        which = self._of(lanes)
        before = self._committed[which] - groups
        for number, limit in zip(which.tolist(), before.tolist(), strict=True):
            self._rules.wait(limit, number)
        if self._watch is not None:
            self._watch.wgmma_wait(lanes[::WARPGROUP], before)
        for (registers, _), accumulators in self._accumulators.items():
            group = accumulators.group[which]
            done = (group >= 0) & (group < before)
            if not done.any():
                continue
            accumulators.group[which[done]] = -1
            bits = wgmma.d_registers(accumulators.matrices[which[done]])
            self._write(registers, _lanes(lanes, done), bits)

    def set_registers(self, count: int, is_more: bool, line: int, lanes: Array) -> None:
        """setmaxnreg."""
        try:
            self._pool.change(self._of(lanes), count, is_more, line)
        except AccessFault as fault:
            fault.position *= WARPGROUP
            raise

    def finish(self) -> None:
        """All CTAs have ended."""
        self._pool.finish()

    def multiply(self, form: Multiply, lanes: Array) -> None:
        """wgmma.mma_async."""
        which = self._of(lanes)
        if isinstance(form.scale_d, bool):
            adds = np.full(which.size, form.scale_d)
        else:
            adds = self._same(form.scale_d, lanes, "scale-d") != form.is_negated
        for number, group in zip(which.tolist(), self._committed[which].tolist(), strict=True):
            try:
                self._rules.multiply(form.operands, group, (number,))
            except AccessFault as fault:
                fault.position = WARPGROUP * int(np.flatnonzero(which == number)[0])
                raise
        a = self._a(form, which, lanes)
        b = self._operand(form.b, form.n, form, form.b_transposed, which, lanes)
        total = wgmma.product(a, b)
        if form.sign < 0:
            np.negative(total, total)
        self._accumulate(form, which, lanes, adds, total)

    def _accumulate(
        self, form: Multiply, which: Array, lanes: Array, adds: Array, total: Array
    ) -> None:
        key = (form.d, form.d_kind)
        accumulators = self._accumulators.get(key)
        if accumulators is None:
            accumulators = _Accumulators(self._count, form.n, form.d_kind)
            self._accumulators[key] = accumulators
        fresh = adds & (accumulators.group[which] < 0)
        if fresh.any():
            bits = self._read(form.d, _lanes(lanes, fresh))
            accumulators.matrices[which[fresh]] = wgmma.d_matrices(bits, form.d_kind)
        if adds.all():
            total += accumulators.matrices[which]
        elif adds.any():
            total[adds] += accumulators.matrices[which[adds]]
        if form.d_kind == "s32":
            total = total.astype(np.int64).astype(np.int32)  # keeps the lower bits
        accumulators.matrices[which] = total
        accumulators.group[which] = self._committed[which]

    # ---- operands ----

    def _of(self, lanes: Array) -> Array:
        """The warpgroups of lanes that are whole warpgroups."""
        which: Array = self._number[lanes[::WARPGROUP]]
        return which

    def _a(self, form: Multiply, which: Array, lanes: Array) -> Array:
        if len(form.a) == 1:
            return self._operand(form.a[0], wgmma.M, form, form.a_transposed, which, lanes)
        return wgmma.a_fragments(self._read(form.a, lanes), form.kind)

    def _operand(
        self,
        register: int,
        extent: int,
        form: Multiply,
        is_transposed: bool,
        which: Array,
        lanes: Array,
    ) -> Array:
        """A matrix of each warpgroup from shared memory, (W, extent, K)."""
        found = [
            Descriptor.decode(bits).rows(extent, is_transposed).reshape(-1)
            for bits in self._same(register, lanes, "the matrix descriptor").tolist()
        ]
        address = np.concatenate(found)
        rows = np.repeat(self._row[which].astype(np.uint64), found[0].size)
        try:
            data = self._shared.load(address, 4, rows)
        except AccessFault as fault:
            fault.position = fault.position // found[0].size * WARPGROUP
            raise
        if self._watch is not None:
            offsets = (address + rows).astype(np.int64).reshape(which.size, -1)
            groups = self._committed[which]
            self._watch.operand(form.operands.line, lanes[::WARPGROUP], groups, offsets)
        return wgmma.from_rows(data, form.kind, extent, is_transposed)

    def _same(self, register: int, lanes: Array, what: str) -> Array:
        """The value that all lanes of each warpgroup have in a register."""
        values = self._registers[register][lanes].reshape(-1, WARPGROUP)
        if (differ := (values != values[:, :1])).any():
            raise AccessFault(
                int(differ.reshape(-1).argmax()), LAUNCH_FAILED,
                f"{what} is not the same in all threads of the warpgroup",
            )  # fmt: skip
        return values[:, 0]

    def _read(self, registers: Sequence[int], lanes: Array) -> Array:
        """Registers (n,) of the lanes: (n, lanes) uint32."""
        return np.stack([self._registers[r].view(np.uint32)[lanes] for r in registers])

    def _write(self, registers: Sequence[int], lanes: Array, bits: Array) -> None:
        for register, values in zip(registers, bits, strict=True):
            self._registers[register].view(np.uint32)[lanes] = values


def _lanes(lanes: Array, some: Array) -> Array:
    """The lanes of those warpgroups of a group where ``some`` holds."""
    if some.all():
        return lanes
    picked: Array = lanes.reshape(-1, WARPGROUP)[some].reshape(-1)
    return picked
