"""mma.sync and ldmatrix against whole-matrix products with the ISA's fragment layouts."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from urdir.driver.emulator.machine.faults import KernelFault

WARPS = 3
LANE = np.arange(32)
GROUP, THREAD = LANE // 4, LANE % 4
ELEMENTS = {
    "f16": np.float16, "bf16": ml_dtypes.bfloat16, "e4m3": ml_dtypes.float8_e4m3fn,
    "s8": np.int8, "u8": np.uint8,
}  # fmt: skip

# PTX ISA 9.7.14.5: row and column of value i of A and B, for each shape and element size.
FRAGMENTS: dict[tuple[str, int], Any] = {
    ("m16n8k16", 2): (
        (8, lambda i: (GROUP + 8 * ((i // 2) % 2), THREAD * 2 + i % 2 + 8 * (i >= 4))),
        (4, lambda i: (THREAD * 2 + i % 2 + 8 * (i >= 2), GROUP)),
    ),
    ("m16n8k8", 2): (
        (4, lambda i: (GROUP + 8 * (i >= 2), THREAD * 2 + i % 2)),
        (2, lambda i: (THREAD * 2 + i, GROUP)),
    ),
    ("m16n8k32", 1): (
        (16, lambda i: (GROUP + 8 * ((i // 4) % 2), THREAD * 4 + i % 4 + 16 * (i >= 8))),
        (8, lambda i: (THREAD * 4 + i % 4 + 16 * (i >= 4), GROUP)),
    ),
    ("m16n8k16", 1): (
        (8, lambda i: (GROUP + 8 * (i >= 4), THREAD * 4 + i % 4)),
        (4, lambda i: (THREAD * 4 + i, GROUP)),
    ),
    ("m8n8k16", 1): (
        (4, lambda i: (GROUP, THREAD * 4 + i)),
        (4, lambda i: (THREAD * 4 + i, GROUP)),
    ),
}


def fragment(matrix: Any, count: int, place: Any) -> Any:
    """(warps, rows, columns) to registers (warps, 32, n) uint32."""
    values = np.stack([matrix[:, *place(i)] for i in range(count)], axis=2)
    return np.ascontiguousarray(values).view("u4")


@pytest.mark.parametrize(
    ("shape", "kind"),
    [("m16n8k16", "f16"), ("m16n8k16", "bf16"), ("m16n8k8", "f16"), ("m16n8k8", "bf16"),
     ("m16n8k32", "s8"), ("m16n8k32", "u8"), ("m16n8k32", "e4m3"), ("m16n8k16", "s8"),
     ("m8n8k16", "s8")],
)  # fmt: skip
@pytest.mark.parametrize("divergent", [False, True])
def test_mma(machine: Any, rng: Any, shape: str, kind: str, divergent: bool) -> None:
    m, n, k = (int(x) for x in shape[1:].replace("n", " ").replace("k", " ").split())
    element = ELEMENTS[kind]
    integer = kind[1:] == "8"
    machine.version = "8.4" if kind == "e4m3" else machine.version
    if integer:
        low = -128 if kind == "s8" else 0
        a = rng.integers(low, low + 256, (WARPS, m, k)).astype(element)
        b = rng.integers(low, low + 256, (WARPS, k, n)).astype(element)
        c = rng.integers(-(2**31), 2**31, (WARPS, m, n)).astype("i4")
        total = a.astype(int) @ b.astype(int) + c
        want = total.astype("i4")
    else:
        a, b = (rng.standard_normal(s).astype(element) for s in ((WARPS, m, k), (WARPS, k, n)))
        c = rng.standard_normal((WARPS, m, n)).astype("f4")
        want = (a.astype("f8") @ b.astype("f8") + c).astype("f4")
    (na, place_a), (nb, place_b) = FRAGMENTS[shape, np.dtype(element).itemsize]
    halves = m // 8

    def place_c(i: int) -> Any:
        return GROUP + 8 * (i // 2), THREAD * 2 + i % 2

    fragments = [fragment(a, na, place_a), fragment(b, nb, place_b),
                 fragment(c, 2 * halves, place_c)]  # fmt: skip
    sizes = [f.shape[2] for f in fragments]
    addresses = {name: machine.upload(f) for name, f in zip("abc", fragments, strict=True)}
    out = machine.upload(np.zeros((WARPS, 32, sizes[2]), "u4"))
    register = "b32" if integer else "f32"
    body = ".reg .b64 %at, %step; .reg .b32 %i; .reg .pred %p; mov.u32 %i, %tid.x;"
    for name, count, kept in zip("abc", sizes, ("b32", "b32", register), strict=True):
        body += f".reg .{kept} %{name}<{count}>; ld.param.u64 %at, [{name}];"
        body += f"mul.wide.u32 %step, %i, {4 * count}; add.u64 %at, %at, %step;"
        body += "".join(f"ld.global.{kept} %{name}{j}, [%at+{4 * j}];" for j in range(count))
    a_, b_, c_ = (
        "{" + ", ".join(f"%{name}{j}" for j in range(count)) + "}"
        for name, count in zip("abc", sizes, strict=True)
    )
    kinds = f"s32.{kind}.{kind}.s32" if integer else f"f32.{kind}.{kind}.f32"
    product = f"mma.sync.aligned.{shape}.row.col.{kinds} {c_}, {a_}, {b_}, {c_};"
    if divergent:  # one warp goes alone, lanes of the others arrive at different times
        body += (
            "setp.lt.u32 %p, %i, 48; @%p bra A; add.u32 %i, %i, 0; bra B; A: add.u32 %i, %i, 0; B:"
        )
    body += product + f"ld.param.u64 %at, [out]; mul.wide.u32 %step, %i, {4 * sizes[2]};"
    body += "add.u64 %at, %at, %step;"
    body += "".join(f"st.global.{register} [%at+{4 * j}], %c{j};" for j in range(sizes[2]))
    machine.run(body, addresses | {"out": out}, threads=32 * WARPS)
    got = machine.download(out, want.dtype, WARPS * 32 * sizes[2]).reshape(WARPS, 32, -1)
    expected = fragment(want, 2 * halves, place_c).view(want.dtype)
    if integer:
        assert (got == expected).all()
    else:
        np.testing.assert_allclose(got, expected, rtol=2e-7, atol=2e-7)


@pytest.mark.parametrize("trans", ["", ".trans"])
@pytest.mark.parametrize("count", [1, 2, 4])
def test_ldmatrix(machine: Any, rng: Any, count: int, trans: str) -> None:
    """Rows of 80 bytes, so that no two matrices overlap by accident."""
    data = rng.integers(0, 1 << 16, (32, 40)).astype("u2")
    x, out = machine.upload(data), machine.upload(np.zeros((2, 32, count), "u4"))
    registers = ", ".join(f"%r{j}" for j in range(count))
    body = (
        f".shared .align 16 .b8 tile[2560]; .reg .b32 %i, %s, %t, %lane, %v, %r<{count}>;"
        ".reg .b64 %at, %step; .reg .pred %p; mov.u32 %i, %tid.x; ld.param.u64 %at, [x];"
        "mul.wide.u32 %step, %i, 4; add.u64 %at, %at, %step; mov.u32 %s, tile; shl.b32 %t, %i, 2;"
        "add.u32 %t, %t, %s;"
        + "".join(
            f"ld.global.u32 %v, [%at+{256 * j}]; st.shared.u32 [%t+{256 * j}], %v;"
            for j in range(10)
        )
        + "bar.sync 0; and.b32 %lane, %i, 31; mad.lo.u32 %s, %lane, 80, %s;"
        f"ldmatrix.sync.aligned.m8n8.x{count}{trans}.shared.b16 {{{registers}}}, [%s+16];"
        f"ld.param.u64 %at, [out]; mul.wide.u32 %step, %i, {4 * count}; add.u64 %at, %at, %step;"
        + "".join(f"st.global.u32 [%at+{4 * j}], %r{j};" for j in range(count))
    )  # fmt: skip
    machine.run(body, {"x": x, "out": out}, threads=64)
    got = machine.download(out, "u2", 2 * 32 * count * 2).reshape(2, 32, count, 2)
    for j in range(count):
        matrix = data[8 * j : 8 * j + 8, 8:16]
        if trans:
            matrix = matrix.T
        for lane in range(32):
            pair = matrix[lane // 4, 2 * (lane % 4) : 2 * (lane % 4) + 2]
            assert (got[:, lane, j] == pair).all()


def test_stmatrix_is_the_inverse_of_ldmatrix(machine: Any, rng: Any) -> None:
    data = rng.integers(0, 1 << 32, (32, 4), dtype=np.uint64).astype("u4")
    x, out = machine.upload(data), machine.upload(np.zeros_like(data))
    body = (
        ".shared .align 16 .b8 tile[512]; .reg .b32 %i, %s, %r<4>, %q<4>; .reg .b64 %at, %step;"
        "mov.u32 %i, %tid.x; ld.param.u64 %at, [x]; mul.wide.u32 %step, %i, 16;"
        "add.u64 %at, %at, %step; ld.global.v4.u32 {%r0, %r1, %r2, %r3}, [%at]; mov.u32 %s, tile;"
        "mad.lo.u32 %s, %i, 16, %s;"
        "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%s], {%r0, %r1, %r2, %r3};"
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%q0, %q1, %q2, %q3}, [%s];"
        "ld.param.u64 %at, [out]; add.u64 %at, %at, %step;"
        "st.global.v4.u32 [%at], {%q0, %q1, %q2, %q3};"
    )
    machine.run(body, {"x": x, "out": out})
    assert (machine.download(out, "u4", 128).reshape(32, 4) == data).all()


def test_ldmatrix_fault_names_the_lane(machine: Any) -> None:
    body = (
        ".shared .align 16 .b8 tile[512]; .reg .b32 %i, %s, %r<2>; mov.u32 %i, %tid.x;"
        "mad.lo.u32 %s, %i, 36, 0;\nldmatrix.sync.aligned.m8n8.x2.shared.b16 {%r0, %r1}, [%s];"
    )
    with pytest.raises(KernelFault, match=r"thread \(1, 0, 0\).*misaligned load, 16 bytes"):
        machine.run(body, threads=64)


@pytest.mark.parametrize("divergent", [False, True])
def test_movmatrix(machine: Any, rng: Any, divergent: bool) -> None:
    data = rng.integers(0, 1 << 16, (2, 8, 8)).astype("u2")
    x, out = machine.upload(data), machine.upload(np.zeros(64, "u4"))
    body = (
        ".reg .b32 %i, %r, %t; .reg .b64 %at, %step; .reg .pred %p; mov.u32 %i, %tid.x;"
        "mul.wide.u32 %step, %i, 4; ld.param.u64 %at, [x]; add.u64 %at, %at, %step;"
        "ld.global.u32 %r, [%at];"
    )
    if divergent:
        body += "and.b32 %t, %i, 1; setp.eq.u32 %p, %t, 1; @%p bra A; add.u32 %r, %r, 0; A:"
    body += (
        "movmatrix.sync.aligned.m8n8.trans.b16 %r, %r; ld.param.u64 %at, [out];"
        "add.u64 %at, %at, %step; st.global.u32 [%at], %r;"
    )
    machine.run(body, {"x": x, "out": out}, threads=64)
    got = machine.download(out, "u2", 128).reshape(2, 8, 8)
    assert (got == data.swapaxes(1, 2)).all()
