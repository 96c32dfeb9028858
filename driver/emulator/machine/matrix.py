"""Matrix instructions of a warp: mma.sync, ldmatrix, stmatrix, movmatrix (PTX ISA 9.7.14).

Products are exact; sums are taken in float64 and rounded once to float32 (hardware rounds or
truncates in between, in an undocumented order); integers are exact and wrap.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from urdir.driver.emulator.machine.faults import AccessFault
from urdir.driver.emulator.machine.formats import bf16_to_f32, e4m3_to_f32
from urdir.driver.emulator.machine.shared import SharedMemory
from urdir.driver.emulator.machine.warps import WholeWarps

Array = npt.NDArray[Any]

_LANE = np.arange(32)
_GROUP, _THREAD = _LANE >> 2, _LANE & 3

Place = Callable[[int], tuple[Array, Array]]


@dataclass(frozen=True, slots=True, eq=False)
class Shape:
    """m, n, k and where value i of each lane's fragments lies: (row, column) of all lanes."""

    m: int
    n: int
    k: int
    a: tuple[tuple[Array, Array], ...]
    b: tuple[tuple[Array, Array], ...]
    c: tuple[tuple[Array, Array], ...]


def _shape(m: int, n: int, k: int, packed: int) -> Shape:
    """The fragments of a shape whose registers hold ``packed`` values of A and B.

    A lane holds runs of ``packed`` neighbours along k; runs go down by 8 rows first, then along k.
    """
    halves = m // 8
    a = [
        (_GROUP + 8 * (run % halves), _THREAD * packed + i + 4 * packed * (run // halves))
        for run in range(m * k // 32 // packed)
        for i in range(packed)
    ]
    b = [
        (_THREAD * packed + i + 4 * packed * run, _GROUP)
        for run in range(n * k // 32 // packed)
        for i in range(packed)
    ]
    c = [(_GROUP + 8 * half, _THREAD * 2 + i) for half in range(halves) for i in range(2)]
    return Shape(m, n, k, tuple(a), tuple(b), tuple(c))


SHAPES = {
    ("m16n8k16", 2): _shape(16, 8, 16, 2),
    ("m16n8k8", 2): _shape(16, 8, 8, 2),
    ("m16n8k32", 4): _shape(16, 8, 32, 4),
    ("m16n8k16", 4): _shape(16, 8, 16, 4),
    ("m8n8k16", 4): _shape(8, 8, 16, 4),
}

#: Element types of numpy; bf16 and e4m3 are bits.
_ELEMENTS = {
    "f16": "f2", "bf16": "u2", "e4m3": "u1", "s8": "i1", "u8": "u1", "f32": "f4", "s32": "i4"
}  # fmt: skip
#: Those that are bits, to f32.
_WIDENED = {"bf16": bf16_to_f32, "e4m3": e4m3_to_f32}


def per_register(kind: str) -> int:
    """Values of A or B in a register."""
    return 4 // np.dtype(_ELEMENTS[kind]).itemsize


@functools.lru_cache(maxsize=256)
def _gather(s: Shape, which: str, packed: int, warps: int) -> Array:
    """For each element of the matrices (warps, rows, columns) A, B or C, its position among the
    values of (registers, warps, lanes), of which a register holds ``packed``."""
    rows, columns = {"a": (s.m, s.k), "b": (s.k, s.n), "c": (s.m, s.n)}[which]
    order = np.empty((warps, rows, columns), np.int64)
    warp = np.arange(warps)[:, None]
    for at, (row, column) in enumerate(getattr(s, which)):
        register, value = divmod(at, packed)
        order[:, row, column] = ((register * warps + warp) * 32 + _LANE) * packed + value
    return order


@functools.lru_cache(maxsize=64)
def _scatter(s: Shape, packed: int, warps: int) -> Array:
    """The inverse for D: the element of each value of (registers, warps, lanes)."""
    order = _gather(s, "c", packed, warps).reshape(-1)
    found = np.empty_like(order)
    found[order] = np.arange(order.size)
    return found.reshape(-1, warps, 32 * packed)


def _matrices(warps: WholeWarps, registers: Sequence[Array], kind: str, place: Array) -> Array:
    """Fragments to (warps, rows, columns) float64."""
    bits = np.concatenate([warps.spread(r) for r in registers], axis=None)
    values: Array = bits.view(_ELEMENTS[kind]).take(place)
    if kind in _WIDENED:
        values = _WIDENED[kind](values)
    return values.astype(np.float64)


def mma(
    warps: WholeWarps,
    shape: str,
    kinds: tuple[str, str, str],
    saturate: bool,
    a: Sequence[Array],
    b: Sequence[Array],
    c: Sequence[Array],
) -> list[Array]:
    """D = A B + C of every warp: D's registers (n,) as float32 or int32 bits (uint32)."""
    packed, narrow = per_register(kinds[0]), 2 if kinds[2] == "f16" else 1
    s, count = SHAPES[shape, packed], warps.count(a[0])
    left = _matrices(warps, a, kinds[0], _gather(s, "a", packed, count))
    right = _matrices(warps, b, kinds[1], _gather(s, "b", packed, count))
    total = np.matmul(left, right)
    total += _matrices(warps, c, kinds[2], _gather(s, "c", narrow, count))
    values = total.take(_scatter(s, narrow, count))
    if kinds[2][0] == "f":
        bits = values.astype(_ELEMENTS[kinds[2]]).view(np.uint32)
    else:
        exact = values.astype(np.int64)
        if saturate:
            exact = exact.clip(-(2**31), 2**31 - 1)
        bits = exact.astype(np.uint32)
    return [warps.collect(register) for register in bits]


def ldmatrix(
    warps: WholeWarps, memory: SharedMemory, address: Array, rows: Array, count: int, trans: bool
) -> list[Array]:
    """``count`` 8x8 matrices of 16-bit elements: one register (n,) uint32 each."""
    n = address.size
    address = np.ascontiguousarray(warps.spread(address)[:, : 8 * count])
    rows = np.ascontiguousarray(warps.spread(rows)[:, : 8 * count])
    try:
        data = memory.load(address.reshape(-1), 4, rows.reshape(-1)).view(np.uint16)
    except AccessFault as fault:
        fault.position = _position(warps, n, fault.position, 8 * count)
        raise
    matrices = data.reshape(-1, count, 8, 8)
    if trans:
        matrices = np.ascontiguousarray(matrices.transpose(0, 1, 3, 2))
    words = matrices.reshape(-1, count, 64).view(np.uint32)
    return [warps.collect(np.ascontiguousarray(words[:, i])) for i in range(count)]


def stmatrix(
    warps: WholeWarps,
    memory: SharedMemory,
    address: Array,
    rows: Array,
    registers: Sequence[Array],
    trans: bool,
) -> None:
    """The inverse of ``ldmatrix``."""
    count, n = len(registers), address.size
    address = np.ascontiguousarray(warps.spread(address)[:, : 8 * count])
    rows = np.ascontiguousarray(warps.spread(rows)[:, : 8 * count])
    words = np.stack([warps.spread(r) for r in registers], axis=1)
    matrices = words.view(np.uint16).reshape(-1, count, 8, 8)
    if trans:
        matrices = matrices.transpose(0, 1, 3, 2)
    data = np.ascontiguousarray(matrices).reshape(-1).view(np.complex128)
    try:
        memory.store(address.reshape(-1), data, 4, rows.reshape(-1))
    except AccessFault as fault:
        fault.position = _position(warps, n, fault.position, 8 * count)
        raise


def movmatrix(warps: WholeWarps, register: Array) -> Array:
    """An 8x8 matrix of 16-bit elements, transposed; (n,) uint32."""
    matrix = np.ascontiguousarray(warps.spread(register)).view(np.uint16).reshape(-1, 8, 8)
    words = np.ascontiguousarray(matrix.swapaxes(1, 2)).reshape(-1, 64).view(np.uint32)
    return warps.collect(words)


def _position(warps: WholeWarps, n: int, row: int, rows_per_warp: int) -> int:
    """The lane (of the group) that gave the address of a matrix row."""
    lanes = warps.spread(np.arange(n))[:, :rows_per_warp]
    return int(lanes.reshape(-1)[row])
