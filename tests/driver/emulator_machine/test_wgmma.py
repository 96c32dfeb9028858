"""wgmma against whole-matrix products, with the ISA's fragments and layouts in shared memory."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from urdir.driver.emulator.machine.compile import compile_entry
from urdir.driver.emulator.machine.faults import CompileError, KernelFault
from urdir.driver.emulator.machine.register_pool import registers_at_start
from urdir.ptxgen import ptx

ELEMENTS = {"f16": np.float16, "bf16": ml_dtypes.bfloat16}
LANE = np.arange(128)
WARP, GROUP, THREAD = LANE // 32, LANE % 32 // 4, LANE % 4


@pytest.fixture(autouse=True)
def hopper(machine: Any) -> None:
    machine.target = "sm_90a"


def place(i: int) -> tuple[Any, Any]:
    """Row and column of value i of each lane, of D and (up to i = 7) of A (PTX ISA 9.7.15.5.2)."""
    return 16 * WARP + GROUP + 8 * (i // 2 % 2), THREAD * 2 + i % 2 + 8 * (i // 4)


def fragments(matrices: Any) -> Any:
    """(warpgroups, 64, columns) to registers (warpgroups, 128, n) uint32."""
    count = matrices.shape[2] // 2
    values = np.stack([matrices[:, *place(i)] for i in range(count)], axis=2)
    return np.ascontiguousarray(values).view("u4")


def descriptor(start: int, leading: int = 0, stride: int = 0, base: int = 0, mode: int = 0) -> int:
    """PTX ISA 9.7.15.5.1.2; offsets in bytes."""
    return start >> 4 | leading >> 4 << 16 | stride >> 4 << 32 | base << 49 | mode << 62


START = (
    ".reg .b32 %i, %k, %cta, %size, %s, %t, %bytes; .reg .b64 %at, %to, %step, %bar, %desc, %more;"
    ".reg .pred %p, %q, %yes; setp.eq.b32 %yes, 1, 1; mov.u32 %k, %tid.x; mov.u32 %cta, %ctaid.x;"
    "mov.u32 %size, %ntid.x; mad.lo.u32 %i, %cta, %size, %k;\n"
    ".extern .shared .align 1024 .b8 tile[];\n"
)


def load(name: str, count: int, register: str = "") -> str:
    """``count`` registers of each thread from a parameter."""
    register = register or name
    code = f".reg .b32 %{register}<{count}>; ld.param.u64 %at, [{name}];"
    code += f"mul.wide.u32 %step, %i, {4 * count}; add.u64 %at, %at, %step;\n"
    return code + "".join(f"ld.global.b32 %{register}{j}, [%at+{4 * j}];" for j in range(count))


def fill(nbytes: int) -> str:
    """Each CTA's part of parameter ``b`` to shared memory, by generic stores."""
    return (
        f"ld.param.u64 %at, [b]; mul.wide.u32 %step, %cta, {nbytes}; add.u64 %at, %at, %step;"
        "mul.wide.u32 %step, %k, 4; add.u64 %at, %at, %step; mov.u32 %s, tile; mov.u32 %t, %k;"
        "shl.b32 %t, %t, 2; add.u32 %s, %s, %t; cvt.u64.u32 %step, %size; shl.b64 %step, %step, 2;"
        "shl.b32 %size, %size, 2;"
        f"FILL: setp.ge.u32 %p, %t, {nbytes}; @%p bra FILLED; ld.global.u32 %bytes, [%at];"
        "st.shared.u32 [%s], %bytes; add.u64 %at, %at, %step; add.u32 %s, %s, %size;"
        "add.u32 %t, %t, %size; bra FILL; FILLED: fence.proxy.async; bar.sync 0;\n"
    )


def save(count: int, register: str = "d") -> str:
    code = f"ld.param.u64 %to, [out]; mul.wide.u32 %step, %i, {4 * count};"
    code += "add.u64 %to, %to, %step;\n"
    return code + "".join(f"st.global.b32 [%to+{4 * j}], %{register}{j};" for j in range(count))


def listed(register: str, count: int) -> str:
    return "{" + ", ".join(f"%{register}{j}" for j in range(count)) + "}"


FENCE, COMMIT = "wgmma.fence.sync.aligned;", "wgmma.commit_group.sync.aligned;"
WAIT = "wgmma.wait_group.sync.aligned 0;"


@pytest.mark.parametrize("kind", ["f16", "bf16"])
@pytest.mark.parametrize("n", [8, 24, 256])
def test_a_in_registers(machine: Any, rng: Any, n: int, kind: str) -> None:
    """Two CTAs of three warpgroups, B without swizzle as [K/8][N][8]."""
    ctas, groups = 2, 3
    a = rng.standard_normal((ctas * groups, 64, 16)).astype(ELEMENTS[kind])
    b = rng.standard_normal((ctas, n, 16)).astype(ELEMENTS[kind])
    c = rng.standard_normal((ctas * groups, 64, n)).astype("f4")
    tiles = np.ascontiguousarray(b.reshape(ctas, n, 2, 8).swapaxes(1, 2))
    body = START + fill(32 * n) + load("a", 4) + load("c", n // 2, "d") + (
        f"mov.b64 %desc, {descriptor(0, leading=16 * n, stride=128)}; {FENCE}"
        f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.{kind}.{kind} {listed('d', n // 2)},"
        f"{listed('a', 4)}, %desc, %yes, 1, 1, 0; {COMMIT} {WAIT}\n"
    ) + save(n // 2)  # fmt: skip
    params = {"a": machine.upload(fragments(a)), "b": machine.upload(tiles)}
    params |= {"c": machine.upload(np.stack([c[:, *place(i)] for i in range(n // 2)], axis=2))}
    out = machine.upload(np.zeros((ctas * groups, 128, n // 2), "f4"))
    machine.run(body, params | {"out": out}, ctas=ctas, threads=128 * groups, shared_bytes=32 * n)
    want = a.astype("f8") @ np.repeat(b, groups, 0).astype("f8").swapaxes(1, 2) + c
    got = machine.download(out, "f4", want.size).reshape(ctas * groups, 128, n // 2)
    expected = np.stack([want[:, *place(i)] for i in range(n // 2)], axis=2).astype("f4")
    np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize("kind", ["s8", "e4m3"])
@pytest.mark.parametrize("n", [8, 24, 96, 256])
def test_bytes(machine: Any, rng: Any, n: int, kind: str) -> None:
    """Two steps of the depth, A in registers (PTX ISA 9.7.15.5.1.2, figures of .k32); sums keep
    their lower 32 bits."""
    ctas, groups, steps = 2, 2, 2
    a = rng.integers(-128, 128, (ctas * groups, 64, 64)).astype("i1")
    b = rng.integers(-128, 128, (ctas, n, 64)).astype("i1")
    c = rng.integers(-(2**31), 2**31, (ctas * groups, 64, n)).astype("i4")
    of_sums = "s32" if kind == "s8" else "f32"
    values, end = [x.astype("i8") for x in (a, b, c)], ""
    if kind == "e4m3":
        values = [rng.integers(-16, 17, x.shape).astype("i8") for x in (a, b, c)]
        a, b = (x.astype("f4").astype(ml_dtypes.float8_e4m3fn).view("i1") for x in values[:2])
        c, end = values[2].astype("f4").view("i4"), ", 1, 1"
    rows, column = 16 * WARP + GROUP, 4 * THREAD[:, None] + np.arange(4)
    registers = [
        a[:, rows[:, None] + 8 * (i % 2), 32 * step + 16 * (i // 2) + column].copy().view("u4")
        for step in range(steps) for i in range(4)
    ]  # fmt: skip
    tiles = np.ascontiguousarray(b.reshape(ctas, n, 4, 16).swapaxes(1, 2))
    body = START + fill(64 * n) + load("a", 4 * steps) + load("c", n // 2, "d") + FENCE
    for step in range(steps):
        four = "{" + ", ".join(f"%a{4 * step + i}" for i in range(4)) + "}"
        body += (
            f"mov.b64 %desc, {descriptor(32 * n * step, leading=16 * n, stride=128)};"
            f"wgmma.mma_async.sync.aligned.m64n{n}k32.{of_sums}.{kind}.{kind} "
            f"{listed('d', n // 2)}, {four}, %desc, %yes{end};\n"
        )
    body += COMMIT + WAIT + "\n" + save(n // 2)
    params = {"a": machine.upload(np.concatenate(registers, axis=2)), "b": machine.upload(tiles)}
    params |= {"c": machine.upload(np.stack([c[:, *place(i)] for i in range(n // 2)], axis=2))}
    out = machine.upload(np.zeros((ctas * groups, 128, n // 2), "i4"))
    machine.run(body, params | {"out": out}, ctas=ctas, threads=128 * groups, shared_bytes=64 * n)
    want = values[0] @ np.repeat(values[1], groups, 0).swapaxes(1, 2) + values[2]
    want = want.astype("f4").view("i4") if kind == "e4m3" else want
    got = machine.download(out, "i4", want.size).reshape(ctas * groups, 128, n // 2)
    expected = np.stack([want[:, *place(i)] for i in range(n // 2)], axis=2).astype("i4")
    np.testing.assert_array_equal(got, expected)


# N = 8, both operands zero: only the order of instructions matters.
PRODUCT = (
    "wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%d0, %d1, %d2, %d3}, {%a0, %a1, %a2, %a3},"
    " %desc, %yes, 1, 1, 0;\n"
)
BYTES = PRODUCT.replace("k16.f32.f16.f16", "k32.s32.s8.s8").replace(", 1, 1, 0;", ";")
OTHER_A = PRODUCT.replace("%a", "%e")
OTHER_D = PRODUCT.replace("%d0, %d1, %d2, %d3", "%c0, %c1, %c2, %c3")
ZERO = "".join(f"mov.b32 %{r}{j}, 0; " for r in "acde" for j in range(4)) + "\n"


def ordered(code: str) -> str:
    """A kernel of ``code``, with the registers of PRODUCT and its variants."""
    return START + (
        ".reg .b32 %a<4>, %e<4>, %c<4>, %d<4>, %x; .reg .b64 %none;"
        f"mov.b64 %desc, {descriptor(0, leading=128, stride=128)}; mov.u32 %s, tile;"
        "shl.b32 %t, %k, 2; add.u32 %s, %s, %t; mov.b32 %x, 0; setp.lt.u32 %p, %k, 64;"
        "@%p st.shared.u32 [%s], %x; fence.proxy.async; bar.sync 0;\n"
    ) + code  # fmt: skip


@pytest.mark.parametrize(
    "code",
    [
        ZERO + FENCE + PRODUCT + COMMIT + WAIT + "add.u32 %x, %d0, %d3;",
        # the same accumulators again, without a fence between
        ZERO + FENCE + PRODUCT + PRODUCT + COMMIT + PRODUCT + COMMIT + WAIT,
        # the next A is made while the first product runs
        ZERO + FENCE + PRODUCT + COMMIT + "mov.b32 %e0, 1;" + FENCE + OTHER_A + COMMIT
        + "wgmma.wait_group.sync.aligned 1; mov.b32 %a0, 1;" + FENCE + PRODUCT + COMMIT + WAIT,
        # A may be read meanwhile
        ZERO + FENCE + PRODUCT + "mov.b32 %x, %a0;" + COMMIT + WAIT,
        # a group without wgmma
        ZERO + COMMIT + WAIT + FENCE + PRODUCT + COMMIT + WAIT,
        # accumulators that are complete, while others are not
        ZERO + FENCE + PRODUCT + COMMIT + OTHER_D + COMMIT
        + "wgmma.wait_group.sync.aligned 1; mov.b32 %x, %d1;" + WAIT + "mov.b32 %x, %c1;",
    ],
)  # fmt: skip
def test_allowed_orders(machine: Any, code: str) -> None:
    machine.run(ordered(code), threads=256, shared_bytes=256)


@pytest.mark.parametrize(
    ("code", "line", "message"),
    [
        (ZERO + FENCE + PRODUCT + COMMIT + "add.u32 %x, %x, 1;\nadd.u32 %x, %d2, 1;\n" + WAIT,
         r"PTX line 13 \(add.u32 %x, %d2, 1\)", "reads %d2, an accumulator of PTX line 11"),
        (ZERO + FENCE + PRODUCT + "mov.b32 %d1, 0;" + COMMIT + WAIT, "PTX line 12",
         "writes %d1, an accumulator of PTX line 11 .*which has not been waited for"),
        # the group is waited for before it is committed
        (ZERO + FENCE + PRODUCT + WAIT + COMMIT + "mov.b32 %x, %d1;", "PTX line 12",
         "reads %d1, an accumulator"),
        (ZERO + FENCE + PRODUCT + COMMIT + "wgmma.wait_group.sync.aligned 1; mov.b32 %x, %d1;",
         "PTX line 12", "reads %d1, an accumulator"),
        (ZERO + FENCE + PRODUCT + COMMIT + "mov.b32 %a2, 1;" + WAIT, "PTX line 12",
         "writes %a2, from which PTX line 11 .* reads A, and which has not been waited for"),
        (ZERO + PRODUCT + COMMIT + WAIT, "PTX line 11", "no wgmma.fence has come before the first"),
        (ZERO + FENCE + "mov.b32 %a3, 1;\n" + PRODUCT + COMMIT + WAIT, "PTX line 12",
         r"uses %a3, which PTX line 11 \(mov.b32 %a3, 1\) has written; hint: a wgmma.fence"),
        (ZERO + FENCE + "mov.b32 %d0, 1;\n" + PRODUCT + COMMIT + WAIT, "PTX line 12",
         "uses %d0, which PTX line 11 .* has written"),
        # reading an accumulator also comes before the next wgmma only by a fence
        (ZERO + FENCE + PRODUCT + COMMIT + WAIT + "mov.b32 %x, %d0;\n" + PRODUCT, "PTX line 13",
         "uses %d0, which PTX line 12 .* has read"),
        (ZERO + FENCE + PRODUCT + PRODUCT.replace("%d0, %d1", "%c0, %c1"), "PTX line 12",
         "has some of the accumulators of PTX line 11 "),
        (ZERO + FENCE + PRODUCT + OTHER_D.replace("%a1", "%d1"), "PTX line 12",
         "reads %d1, an accumulator of PTX line 11 "),
        (ZERO + FENCE + PRODUCT + OTHER_D.replace("%c1", "%a1"), "PTX line 12",
         "writes %a1, from which PTX line 11 .* reads A"),
        # in divergent code, too
        (ZERO + FENCE + PRODUCT + COMMIT + "setp.eq.u32 %p, %k, 77;\n@!%p bra ON;\n"
         "mov.b32 %x, %d1;\nON: " + WAIT, "PTX line 14 .*, thread .77, 0, 0.", "reads %d1"),
    ],
)  # fmt: skip
def test_forbidden_orders(machine: Any, code: str, line: str, message: str) -> None:
    with pytest.raises(KernelFault, match=f"kernel k: {line}.*{message}"):
        machine.run(ordered(code), threads=256, shared_bytes=256)


def test_a_warpgroup_meets(machine: Any) -> None:
    """Its warps come one after the other; those of the other warpgroup do not come at all."""
    code = ZERO + (
        "setp.ge.u32 %p, %k, 128; @%p bra END; shr.u32 %t, %k, 5; mov.b32 %x, 0;"
        "AGAIN: setp.ge.u32 %p, %x, %t; @%p bra GO; add.u32 %x, %x, 1; bra AGAIN; GO:\n"
        f"{FENCE} {PRODUCT} {COMMIT} {WAIT} END: ret;"
    )
    machine.run(ordered(code), threads=256, shared_bytes=256)


@pytest.mark.parametrize(
    ("threads", "guard", "message"),
    [
        (96, "", r"thread \(0, 0, 0\) of CTA .* is in no warpgroup of 128 threads"),
        (160, "", r"thread \(128, 0, 0\) of CTA .* is in no warpgroup of 128 threads"),
        (128, "setp.lt.u32 %p, %k, 32; @%p ret;", "or some of them have ended"),
        (256, "setp.lt.u32 %p, %k, 160; @%p bra OFF; bra.uni ON; OFF: bar.sync 1, 256; ON:",
         r"deadlock: .*96 threads .thread .160, 0, 0. .*wait at PTX line 12 for all threads of "
         "their warpgroup"),
    ],
)  # fmt: skip
def test_a_warpgroup_that_is_not_whole(
    machine: Any, threads: int, guard: str, message: str
) -> None:
    code = ordered(ZERO + guard + "\n" + FENCE + PRODUCT + COMMIT + WAIT)
    with pytest.raises(KernelFault, match=message):
        machine.run(code, threads=threads, shared_bytes=256)


# Warpgroup 0 gives registers to the two others. An SM has 168 for each of 384 threads.
HANDED = (
    "setp.lt.u32 %p, %k, 128; @%p bra GIVES;\nsetmaxnreg.inc.sync.aligned.u32 TAKEN;\nbra END;\n"
    "GIVES: setmaxnreg.dec.sync.aligned.u32 GIVEN;\nEND: ret;"
)


@pytest.mark.parametrize(("taken", "given"), [(232, 40), (168, 168), (200, 104)])
def test_registers_are_handed_over(machine: Any, taken: int, given: int) -> None:
    code = START + HANDED.replace("TAKEN", str(taken)).replace("GIVEN", str(given))
    machine.run(code, threads=384, ctas=2)


@pytest.mark.parametrize(
    ("taken", "given", "message"),
    [
        (240, 40, r"PTX line 10 .*inc waits for ever: .* want 40, 240, 240 registers a thread, .* "
         "3 times 168"),
        (160, 40, r"PTX line 10 .*, thread .128, 0, 0. .*: setmaxnreg raises the registers of a "
         "thread to 160, from 168"),
        (232, 176, r"PTX line 12 .*, thread .0, 0, 0. .*: setmaxnreg lowers .* to 176, from 168"),
    ],
)  # fmt: skip
def test_registers_that_are_not_there(machine: Any, taken: int, given: int, message: str) -> None:
    code = START + HANDED.replace("TAKEN", str(taken)).replace("GIVEN", str(given))
    with pytest.raises(KernelFault, match=message):
        machine.run(code, threads=384)


@pytest.mark.parametrize("count", ["20", "25", "264", "%k"])
def test_numbers_of_registers_that_ptxas_refuses(machine: Any, count: str) -> None:
    with pytest.raises(CompileError, match=r"from 24 to 256|allowed here: an integer"):
        machine.compile(START + f"setmaxnreg.dec.sync.aligned.u32 {count};")


def test_what_only_hopper_has(machine: Any) -> None:
    machine.target = "sm_90"
    for code in (FENCE, "setmaxnreg.dec.sync.aligned.u32 24;"):
        with pytest.raises(CompileError, match=r"needs .target sm_.*90a.*, not sm_90"):
            machine.compile(START + code)


@pytest.mark.parametrize(
    ("directives", "registers"),
    [(".maxntid 384, 1, 1", 168), (".maxntid 384 .minnctapersm 2", 80),
     (".maxntid 384\n.maxnreg 96", 96), (".reqntid 256", 248), ("", 128)],
)  # fmt: skip
def test_registers_at_the_start(machine: Any, directives: str, registers: int) -> None:
    text = machine.module("setmaxnreg.dec.sync.aligned.u32 24;", (), directives)
    found = compile_entry(ptx.parse(text), "k", "sm_90a").directives
    assert registers_at_start(found, 512) == registers


def test_producers_and_consumers(machine: Any, rng: Any) -> None:
    """Of three warpgroups the last two multiply, in three CTAs; 32 of N and 48 of K in two groups.

    The first group of products begins anew, and only where the predicate says so.
    """
    ctas, n, steps = 3, 32, 3
    a = rng.integers(-4, 5, (ctas * 3, 64, 16 * steps)).astype("f2")
    b = rng.integers(-4, 5, (ctas, n, 16 * steps)).astype("f2")
    c = rng.integers(-9, 10, (ctas * 3, 64, n)).astype("f4")
    tiles = np.ascontiguousarray(b.reshape(ctas, n, 2 * steps, 8).swapaxes(1, 2))
    parts = np.stack([fragments(a[..., 16 * s : 16 * s + 16]) for s in range(steps)], axis=2)
    body = (
        START
        + fill(32 * n * steps)
        + load("a", 4 * steps)
        + load("c", n // 2, "d")
        + (
            f"mov.b64 %desc, {descriptor(0, leading=16 * n, stride=128)};\n"
            "setp.lt.u32 %p, %k, 128; @%p bra END; setp.ge.u32 %q, %k, 256;"
        )
    )
    for step in range(steps):
        body += FENCE + (
            f"wgmma.mma_async.sync.aligned.m64n{n}k16.f32.f16.f16 {listed('d', n // 2)}, "
            f"{{%a{4 * step}, %a{4 * step + 1}, %a{4 * step + 2}, %a{4 * step + 3}}}, %desc, "
            f"{'%q' if step == 0 else '1'}, 1, 1, 0; add.u64 %desc, %desc, {2 * n};\n"
        )  # fmt: skip
        body += COMMIT if step != 1 else ""
        body += "wgmma.wait_group.sync.aligned 1;" if step == 1 else ""
    body += WAIT + save(n // 2) + "END: ret;"
    params = {"a": machine.upload(parts), "b": machine.upload(tiles)}
    params |= {"c": machine.upload(np.stack([c[:, *place(i)] for i in range(n // 2)], axis=2))}
    out = machine.upload(np.zeros((ctas * 3, 128, n // 2), "f4"))
    machine.run(
        body, params | {"out": out}, ctas=ctas, threads=384, shared_bytes=32 * n * steps, sm_count=2
    )
    total = a.astype("f8") @ np.repeat(b, 3, 0).astype("f8").swapaxes(1, 2)
    warpgroup = np.arange(ctas * 3) % 3
    total += c * (warpgroup == 2)[:, None, None]
    want = np.stack([total[:, *place(i)] for i in range(n // 2)], axis=2)
    want[warpgroup == 0] = 0
    got = machine.download(out, "f4", want.size).reshape(want.shape)
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("or.b64 %desc, %desc, %none;", r"thread \(5, 0, 0\) .*the matrix descriptor is not the "
         "same in all threads"),
        ("setp.ne.u32 %yes, %k, 5;", r"thread \(5, 0, 0\) .*scale-d is not the same"),
        (f"mov.b64 %desc, {descriptor(128, leading=128, stride=128)};",
         "load of never-written bytes, 16 bytes at shared address 0x100"),
        (f"mov.b64 %desc, {descriptor(0, leading=512, stride=128)};", "out-of-bounds load"),
    ],
)  # fmt: skip
def test_operands_that_are_not_there(machine: Any, code: str, message: str) -> None:
    only_five = "setp.eq.u32 %q, %k, 5; selp.b64 %none, 16, 0, %q;"
    code = ordered(ZERO + only_five + code + FENCE + PRODUCT + COMMIT + WAIT)
    with pytest.raises(KernelFault, match=message):
        machine.run(code, threads=128, shared_bytes=512)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (PRODUCT.replace("n8k16", "n12k16"), "N is a multiple of 8"),
        (PRODUCT.replace("%d0, ", ""), "4 elements are needed, not 3"),
        (PRODUCT.replace("1, 1, 0;", "1, 2, 0;"), "2 is out of range; allowed here: -1 or 1"),
        (PRODUCT.replace("1, 1, 0;", "1, 1, 0, 0;"), "a vector; allowed here: .b64"),
        (
            PRODUCT.replace("%desc", "%x"),
            "%x is a .b32 register; allowed here: .b64, .u64, .s64 registers",
        ),
        (PRODUCT.replace("%yes", "%x"), "%x is a .b32 register; allowed here: a predicate"),
        (PRODUCT.replace("f16.f16 ", "f16.bf16 "), "has no form"),
        (BYTES.replace("n8k32", "n40k32"), "N is 8, 16, 24 or a multiple of 16"),
        (BYTES.replace("%yes;", "%yes, 1, 1;"), "wrong number of operands"),
        (
            "wgmma.wait_group.sync.aligned %x;",
            "%x is a .b32 register; allowed here: an integer constant",
        ),
    ],
)
def test_malformed(machine: Any, code: str, message: str) -> None:
    with pytest.raises(CompileError, match=message):
        machine.compile(ordered(ZERO + FENCE + code))


def test_accumulators_in_another_order(machine: Any) -> None:
    code = ZERO + FENCE + PRODUCT + PRODUCT.replace("%d0, %d1", "%d1, %d0")
    with pytest.raises(KernelFault, match="but not all, or in another order"):
        machine.run(ordered(code), threads=128, shared_bytes=256)
