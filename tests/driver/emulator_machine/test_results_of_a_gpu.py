"""Results of a GPU and of the emulator: every exact instruction on random and edge values.

The instructions come from the emulator's table. NaNs are equal: their payloads are not emulated.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from tests.driver.emulator_machine.ptx_forms import TYPES, Line, right_lines
from urdir.driver import Device, run_kernel
from urdir.driver.emulator.machine import ops_compare, ops_convert, ops_float, ops_integer
from urdir.ptxgen.ptx.launch import Access, LaunchShape, Param

Array = np.ndarray[Any, Any]
#: Lanes, and operands of an instruction, counted from its result.
N, OPERANDS = 2048, 5
MODULES = (ops_integer, ops_float, ops_convert, ops_compare)
#: Instructions of one kernel.
MOST = 200


def is_exact(line: Line) -> bool:
    """Without approximations, addresses, and what depends on an earlier instruction."""
    handler = line.operation.handler
    return (
        any(handler.__module__ == module.__name__ for module in MODULES)
        and not re.search(r"\.approx|\.full|cvta|\.cc\.|(add|sub)c\.", line.text)
        and "|" not in line.text
        # an H200 rounds subnormals instead of flushing them, against the PTX ISA
        and not re.match(r"cvt\.r[mp]\.ftz(\.sat)?\.f16\.f32", line.text)
    )


def words(bits: int, seed: int) -> Array:
    """(OPERANDS, N) words: random, edges, small numbers, and floats of usual size."""
    rng = np.random.default_rng(seed)
    kind = f"u{bits // 8}"
    x = rng.integers(0, 1 << bits, (OPERANDS, N), dtype=np.uint64).astype(kind)
    choice = rng.integers(0, 6, (OPERANDS, N))
    edges = [0, 1, 2, 1 << bits - 1, (1 << bits) - 1, (1 << bits - 1) - 1, (1 << bits - 1) + 1]
    if bits > 8:
        with np.errstate(all="ignore"):
            usual = (rng.standard_normal((OPERANDS, N)) * 2.0 ** rng.integers(-3, 9, N)).astype(
                f"f{bits // 8}"
            )
        special = np.array(
            [0.0, -0.0, 1.0, -1.0, 0.5, 1.5, 2.5, -2.5, np.inf, -np.inf, np.nan, 255.5, -128.5],
            usual.dtype,
        )
        info = np.finfo(usual.dtype)
        limits = [info.max, -info.max, info.tiny, -info.tiny, info.smallest_subnormal]
        special = np.append(special, np.array(limits, usual.dtype))
        edges += special.view(kind).tolist()
        x = np.where(choice == 1, usual.view(kind), x)
        subnormal = x & ((1 << info.nmant) - 1 | 1 << bits - 1)
        x = np.where(choice == 2, subnormal, x).astype(kind)
    x = np.where(choice == 3, np.array(edges, kind)[rng.integers(0, len(edges), N)], x)
    return np.where(choice == 4, rng.integers(0, 80, (OPERANDS, N)).astype(kind), x)


def kernel_of(lines: list[Line]) -> str:
    """PTX that stores the result of each line, as 64 bits, of each thread's operands."""
    declared = " ".join(f".reg .{kind} %{kind}_<9>;" for kind in TYPES)
    body = [
        f".reg .b32 %i, %word; .reg .b64 %at, %out, %wide; {declared}",
        "mov.u32 %i, %tid.x; mov.u32 %word, %ctaid.x; mad.lo.u32 %i, %word, 256, %i;",
    ]
    for bits in (8, 16, 32, 64):
        body.append(f"ld.param.u64 %at, [x{bits}]; mul.wide.u32 %wide, %i, {bits // 8};")
        body.append("add.u64 %at, %at, %wide;")
        for number in range(1, OPERANDS):
            address = f"[%at+{number * N * bits // 8}]"
            for kind in (k for k in TYPES if re.fullmatch(rf"[bus]{bits}", k)):
                body.append(f"ld.global.{kind} %{kind}_{number}, {address};")
    for number in range(1, OPERANDS):
        for kind, of in (("f16", "b16"), ("f32", "b32"), ("f16x2", "b32"), ("f64", "b64")):
            body.append(f"mov.{of} %{kind}_{number}, %{of}_{number};")
        body.append(f"and.b32 %word, %b32_{number}, 1; setp.ne.u32 %pred_{number}, %word, 0;")
    body.append("ld.param.u64 %out, [y]; mul.wide.u32 %wide, %i, 8; add.u64 %out, %out, %wide;")
    for at, line in enumerate(lines):
        kind = result_type(line)
        to_word = {"pred": "selp.b64 %wide, 1, 0, %pred_0;", "f16": "mov.b16 %b16_0, %f16_0;",
                   "f32": "mov.b32 %b32_0, %f32_0;", "f16x2": "mov.b32 %b32_0, %f16x2_0;",
                   "f64": "mov.b64 %wide, %f64_0;"}.get(kind, "")  # fmt: skip
        bits = {"f16": "16", "f32": "32", "f16x2": "32"}.get(kind, kind.lstrip("bus"))
        if kind not in ("pred", "f64"):
            source = f"%b{bits}_0" if to_word else f"%{kind}_0"
            to_word += f" cvt.u64.u{bits} %wide, {source};"
        body.append(f"{line.text} {to_word} st.global.u64 [%out+{8 * at * N}], %wide;")
    params = ", ".join(f".param .u64 {name}" for name in ("x8", "x16", "x32", "x64", "y"))
    text = "\n".join(body)
    return (
        ".version 8.6\n.target sm_90\n.address_size 64\n"
        f".visible .entry results({params})\n{{\n{text}\nret;\n}}\n"
    )


def result_type(line: Line) -> str:
    found = re.search(r"%(\w+)_0", line.text)
    assert found, line.text
    return found[1]


def differences(line: Line, got: Array, wanted: Array, operands: dict[int, Array]) -> Array:
    """The lanes whose results differ."""
    kind = result_type(line)
    different = got != wanted
    float_of = re.search(r"\.(f16x2|bf16x2|f16|bf16|f32|f64)$", line.text.split(" ")[0])
    stem = line.text.partition(".")[0]
    of = float_of[1] if float_of else kind
    if stem == "cvt":
        of = re.findall(r"\.(f16x2|bf16x2|f16|bf16|f32|f64|[us]\d+)", line.text.split(" ")[0])[0]
    if of in ("f16", "bf16", "f32", "f64", "f16x2", "bf16x2") and kind not in (
        "pred",
        "u32",
        "s32",
    ):
        different &= ~both_nan(got, wanted, of)
    if stem in ("div", "rem") and of[0] in "us":  # division by zero is not defined
        different &= operands[int(of[1:])][2] != 0
    if stem in ("bfe", "bfi"):  # positions and lengths are below 256
        different &= (operands[32][2 + (stem == "bfi") :][:2] < 256).all(axis=0)
    return np.flatnonzero(different)


def both_nan(got: Array, wanted: Array, kind: str) -> Array:
    """Where both are NaNs, or halves that are NaNs while the others agree."""
    if kind == "f64":
        return np.isnan(got.view("f8")) & np.isnan(wanted.view("f8"))
    if kind == "f32":
        return np.isnan(got.astype("u4").view("f4")) & np.isnan(wanted.astype("u4").view("f4"))
    halves = [x.astype("u4").view("u2").reshape(-1, 2) for x in (got, wanted)]
    exponent = 0x7C00 if kind.startswith("f16") else 0x7F80
    nans = [(half & 0x7FFF) > exponent for half in halves]
    agrees: Array = ((halves[0] == halves[1]) | (nans[0] & nans[1])).all(axis=1)
    return agrees


LINES = [line for line in right_lines(seed=2026, most=24) if is_exact(line)]


@pytest.mark.urdir_gpu
@pytest.mark.parametrize("part", range(-(-len(LINES) // MOST)))
def test_results(
    urdir_gpu: Device, urdir_emulator: Device, make_kernel: Callable[..., Any], part: int
) -> None:
    lines = LINES[part * MOST : (part + 1) * MOST]
    text = kernel_of(lines)
    operands = {bits: words(bits, 7 * part + bits) for bits in (8, 16, 32, 64)}
    inputs = {f"x{bits}": x for bits, x in operands.items()}
    params = [Param(f"x{bits}", f"u{bits}", (OPERANDS, N), Access.IN) for bits in operands]
    kernel = make_kernel(
        text=text, name="results", params=(*params, Param("y", "u64", (len(lines), N), Access.OUT)),
        launch_shape=LaunchShape((N // 256, 1, 1), (256, 1, 1)),
        spec_key=hashlib.sha256(text.encode()).hexdigest(),
    )  # fmt: skip
    wanted, got = (run_kernel(d, kernel, inputs)["y"] for d in (urdir_gpu, urdir_emulator))
    found = []
    for at, line in enumerate(lines):
        lanes = differences(line, got[at], wanted[at], operands)
        if lanes.size:
            lane = lanes[0]
            values = {bits: [hex(v) for v in x[1:, lane]] for bits, x in operands.items()}
            found.append(f"{line.text} {lanes.size} lanes, {values}: emulator "
                         f"{got[at][lane]:#x}, GPU {wanted[at][lane]:#x}")  # fmt: skip
    assert not found, "\n" + "\n".join(found)
