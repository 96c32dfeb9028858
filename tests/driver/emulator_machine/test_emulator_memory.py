"""Loads, stores, atomics, shared memory; and every access that must be refused."""

from __future__ import annotations

import gc
import weakref
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest

from urdir.driver.emulator.machine import execution as execution_module
from urdir.driver.emulator.machine.execution import GridExecution, Status
from urdir.driver.emulator.machine.faults import CompileError, KernelFault
from urdir.driver.emulator.machine.memory import Memory, MemoryRangeError, OutOfMemory

N = 192
INDEX = (
    ".reg .b32 %i, %cta, %size; .reg .b64 %at, %to, %step; .reg .pred %p;"
    "mov.u32 %i, %tid.x; mov.u32 %cta, %ctaid.x; mov.u32 %size, %ntid.x;"
    "mad.lo.u32 %i, %cta, %size, %i;"
)


@pytest.mark.parametrize("kind", ["u8", "s8", "u16", "s16", "u32", "s32", "f32", "b64"])
@pytest.mark.parametrize("vector", [1, 2, 4])
def test_copy_of_every_type_and_vector(machine: Any, rng: Any, kind: str, vector: int) -> None:
    """A copy kernel, whole and guarded, through registers that may be wider than the element."""
    size = int(kind[1:]) // 8
    if size * vector > 16:
        with pytest.raises(CompileError, match="at most 16 bytes, not 32"):
            machine.compile(".reg .b64 %a<4>; ld.global.v4.b64 {%a0, %a1, %a2, %a3}, [%a0];")
        return
    data = rng.integers(0, 256, N * size * vector, dtype=np.uint8)
    register = kind if size >= 4 else "b32"
    names = [f"%r{j}" for j in range(vector)]
    operand = names[0] if vector == 1 else "{" + ", ".join(names) + "}"
    suffix = kind if vector == 1 else f"v{vector}.{kind}"
    for guard in ("", "@%p "):
        x, y = machine.upload(data), machine.upload(np.full(data.size, 7, "u1"))
        body = (
            INDEX + f".reg .{register} {', '.join(names)};"
            f"ld.param.u64 %at, [x]; ld.param.u64 %to, [y];"
            f"mul.wide.u32 %step, %i, {size * vector};"
            "add.u64 %at, %at, %step; add.u64 %to, %to, %step;"
            "and.b32 %size, %i, 3; setp.ne.u32 %p, %size, 0;"
            f"{guard}ld.global.{suffix} {operand}, [%at];"
            f"{guard}st.global.{suffix} [%to], {operand};"
        )
        machine.run(body, {"x": x, "y": y}, ctas=3, threads=64)
        got = machine.download(y, "u1", data.size).reshape(N, -1)
        want = data.reshape(N, -1).copy()
        if guard:
            want[::4] = 7
        assert (got == want).all()


def test_sign_extension_into_wider_registers(machine: Any, rng: Any) -> None:
    data = rng.integers(-128, 128, N).astype("i1")
    x = machine.upload(data)
    for code, out, want in (
        ("ld.global.s8 %d, [%at];", "i4", data.astype("i4")),
        ("ld.global.u8 %d, [%at];", "i4", data.view("u1").astype("i4")),
    ):
        y = machine.upload(np.zeros(N, out))
        body = (
            INDEX + ".reg .b32 %d; ld.param.u64 %at, [x]; ld.param.u64 %to, [y];"
            "cvt.u64.u32 %step, %i; add.u64 %at, %at, %step; "
            f"{code} mul.wide.u32 %step, %i, 4; add.u64 %to, %to, %step; st.global.b32 [%to], %d;"
        )
        machine.run(body, {"x": x, "y": y}, ctas=3, threads=64)
        assert (machine.download(y, out, N) == want).all()


def test_parameters(machine: Any) -> None:
    """Scalars, vectors and arrays at their offsets."""
    from urdir.driver.emulator.machine.compile import compile_entry
    from urdir.driver.emulator.machine.execution import GridExecution
    from urdir.ptxgen import ptx

    text = """.version 7.0
.target sm_80
.address_size 64
.visible .entry k(.param .u8 a, .param .f32 b, .param .align 16 .b8 c[20], .param .u64 out)
{
    .reg .b32 %a, %x, %y, %z; .reg .f32 %b; .reg .b64 %out;
    ld.param.u8 %a, [a]; ld.param.f32 %b, [b]; ld.param.v2.u32 {%x, %y}, [c+8];
    ld.param.u32 %z, [c+16]; ld.param.u64 %out, [out];
    st.global.u32 [%out], %a; st.global.f32 [%out+4], %b; st.global.v2.u32 [%out+8], {%x, %y};
    st.global.u32 [%out+16], %z;
}
"""
    program = compile_entry(ptx.parse(text), "k", "sm_90")
    assert program.param_layout == ((0, 1), (4, 4), (16, 20), (40, 8))
    assert program.param_bytes == 48
    out = machine.memory.allocate(20)
    params = bytearray(48)
    params[0] = 200
    params[4:8] = np.float32(1.5).tobytes()
    params[16:36] = np.arange(5, dtype="u4").tobytes()
    params[40:48] = int(out).to_bytes(8, "little")
    run = GridExecution(
        program, (1, 1, 1), (1, 1, 1), (1, 1, 1), 0, bytes(params), machine.memory, 1
    )
    assert run.run() is Status.DONE
    got = machine.download(out, "u4", 5)
    assert got.tolist() == [200, np.float32(1.5).view("u4"), 2, 3, 4]


def test_module_variables(machine: Any) -> None:
    """An initialised table and a counter that keeps its value from launch to launch."""
    from urdir.driver.emulator.machine.compile import compile_entry
    from urdir.driver.emulator.machine.execution import GridExecution
    from urdir.driver.emulator.machine.variables import place_variables
    from urdir.ptxgen import ptx

    text = """.version 7.0
.target sm_80
.address_size 64
.global .align 4 .f32 table[3] = {1.5, 0f40000000, -3.0};
.global .u32 counter;
.visible .entry k(.param .u64 out)
{
    .reg .b32 %n; .reg .f32 %x; .reg .b64 %out, %table;
    ld.param.u64 %out, [out]; mov.u64 %table, table; ld.global.f32 %x, [%table+8];
    st.global.f32 [%out], %x; ld.global.u32 %n, [counter]; add.u32 %n, %n, 2;
    st.global.u32 [counter], %n; st.global.u32 [%out+4], %n;
}
"""
    module = ptx.parse(text)
    program = compile_entry(module, "k", "sm_90")
    symbols = place_variables(module, machine.memory)
    out = machine.memory.allocate(8)
    for launch in (1, 2):
        grid = GridExecution(
            program, (1, 1, 1), (1, 1, 1), (1, 1, 1), 0, int(out).to_bytes(8, "little"),
            machine.memory, 1, symbols=symbols,
        )  # fmt: skip
        assert grid.run() is Status.DONE
        assert machine.download(out, "f4", 1)[0] == -3
        assert machine.download(out + 4, "u4", 1)[0] == 2 * launch
    assert machine.download(symbols["table"], "f4", 3).tolist() == [1.5, 2.0, -3.0]


def test_addresses_in_several_allocations(machine: Any) -> None:
    """Each thread follows its own pointer."""
    buffers = [machine.upload(np.full(4, i, "u4")) for i in range(64)]
    table = machine.upload(np.array(buffers, "u8"))
    out = machine.upload(np.zeros(64, "u4"))
    body = (
        INDEX + ".reg .b64 %pointer; .reg .b32 %v; ld.param.u64 %at, [table]; "
        "mul.wide.u32 %step, %i, 8; add.u64 %at, %at, %step; ld.global.u64 %pointer, [%at];"
        "ld.global.u32 %v, [%pointer+8]; add.u32 %v, %v, 1; st.global.u32 [%pointer+4], %v;"
        "ld.param.u64 %to, [out]; mul.wide.u32 %step, %i, 4; add.u64 %to, %to, %step;"
        "st.global.u32 [%to], %v;"
    )
    machine.run(body, {"table": table, "out": out}, ctas=2)
    assert (machine.download(out, "u4", 64) == np.arange(64) + 1).all()
    assert machine.download(buffers[5], "u4", 4).tolist() == [5, 6, 5, 5]


def test_shared_memory_is_per_cta(machine: Any, rng: Any) -> None:
    """Each CTA reverses its block through a static and a dynamic array, generic addresses too."""
    data = rng.integers(0, 1 << 32, 4 * 64, dtype=np.uint64).astype("u4")
    x, y = machine.upload(data), machine.upload(np.zeros_like(data))
    body = (
        INDEX + ".shared .align 16 .b8 pad[24]; .extern .shared .align 16 .b8 dynamic[];"
        ".reg .b32 %v, %lane, %slot, %base; .reg .b64 %generic;"
        "ld.param.u64 %at, [x]; ld.param.u64 %to, [y];"
        "mul.wide.u32 %step, %i, 4;"
        "add.u64 %at, %at, %step; add.u64 %to, %to, %step; ld.global.u32 %v, [%at];"
        "mov.u32 %lane, %tid.x; shl.b32 %slot, %lane, 2; mov.u32 %base, dynamic;"
        "add.u32 %slot, %slot, %base; st.shared.u32 [%slot], %v; bar.sync 0;"
        "sub.u32 %slot, 63, %lane; shl.b32 %slot, %slot, 2;"
        "cvt.u64.u32 %step, %slot; cvta.shared.u64 %generic, dynamic;"
        "add.u64 %generic, %generic, %step; ld.u32 %v, [%generic];"
        "setp.eq.u32 %p, %lane, 0; @%p st.shared.u32 [pad+20], %v; bar.sync 0;"
        "ld.shared.u32 %base, [pad+20]; add.u32 %v, %v, %base; st.global.u32 [%to], %v;"
    )
    machine.run(body, {"x": x, "y": y}, ctas=4, threads=64, shared_bytes=256)
    blocks = data.reshape(4, 64)[:, ::-1]
    assert (machine.download(y, "u4", 256).reshape(4, 64) == blocks + blocks[:, :1]).all()


ATOMICS = {
    "add.u32": lambda old, a: old + a,
    "min.u32": min,
    "max.u32": max,
    "and.b32": lambda old, a: old & a,
    "or.b32": lambda old, a: old | a,
    "xor.b32": lambda old, a: old ^ a,
    "exch.b32": lambda old, a: a,
    "inc.u32": lambda old, a: 0 if old >= a else old + 1,
    "dec.u32": lambda old, a: a if old == 0 or old > a else old - 1,
}


@pytest.mark.parametrize("name", ATOMICS)
@pytest.mark.parametrize("space", ["global", "shared"])
def test_atomics(machine: Any, rng: Any, name: str, space: str) -> None:
    """Old values and results, with colliding and distinct addresses (one CTA: lane order)."""
    n, slots = 96, 40
    where = rng.integers(0, slots, n).astype("u4")
    operand = rng.integers(0, 60, n).astype("u4")
    start = rng.integers(0, 50, slots).astype("u4")
    state = start.tolist()
    olds = []
    for slot, a in zip(where.tolist(), operand.tolist(), strict=True):
        olds.append(state[slot])
        state[slot] = ATOMICS[name](state[slot], a) % 2**32
    params = {"w": machine.upload(where), "a": machine.upload(operand),
              "m": machine.upload(start), "o": machine.upload(np.zeros(n, "u4"))}  # fmt: skip
    load = (
        INDEX + ".shared .b32 table[40]; .reg .b32 %w, %a, %old, %s; .reg .b64 %m, %o, %g;"
        "mul.wide.u32 %step, %i, 4; ld.param.u64 %at, [w]; add.u64 %at, %at, %step;"
        "ld.global.u32 %w, [%at]; ld.param.u64 %at, [a]; add.u64 %at, %at, %step;"
        "ld.global.u32 %a, [%at]; ld.param.u64 %m, [m]; ld.param.u64 %o, [o];"
        "add.u64 %o, %o, %step; mov.u32 %s, table; setp.lt.u32 %p, %i, 40;"
        "shl.b32 %size, %i, 2; add.u32 %size, %size, %s; add.u64 %g, %m, %step;"
        "@%p ld.global.u32 %old, [%g]; @%p st.shared.u32 [%size], %old; bar.sync 0;"
        "shl.b32 %w, %w, 2; add.u32 %s, %s, %w; cvt.u64.u32 %step, %w; add.u64 %at, %m, %step;"
    )
    target = "[%s]" if space == "shared" else "[%at]"
    body = (
        load + f"atom.{space}.{name} %old, {target}, %a; st.global.u32 [%o], %old; bar.sync 0;"
        "@%p ld.shared.u32 %old, [%size];"
    )
    body += "@%p st.global.u32 [%g], %old;" if space == "shared" else ""
    machine.run(body, params, threads=n)
    assert machine.download(params["o"], "u4", n).tolist() == olds
    assert machine.download(params["m"], "u4", slots).tolist() == state


def test_compare_and_swap_and_float_add(machine: Any) -> None:
    cell = machine.upload(np.array([5, 0], "u4"))
    out = machine.upload(np.zeros(64, "u4"))
    body = (
        INDEX + ".reg .b32 %old, %new; .reg .f32 %one, %was; ld.param.u64 %at, [cell];"
        "add.u32 %new, %i, 6; atom.global.cas.b32 %old, [%at], 5, %new; mov.f32 %one, 0f3F000000;"
        "setp.lt.u32 %p, %i, 3; @%p red.global.add.f32 [%at+4], %one;"
        "ld.param.u64 %to, [out]; mul.wide.u32 %step, %i, 4; add.u64 %to, %to, %step;"
        "st.global.u32 [%to], %old;"
    )
    machine.run(body, {"cell": cell, "out": out}, threads=64)
    got = machine.download(cell, "u4", 2)
    assert got[0] == 6
    assert got[1:].view("f4")[0] == 1.5
    assert machine.download(out, "u4", 64).tolist() == [5] + [6] * 63


def test_atomics_in_several_allocations(machine: Any) -> None:
    cells = [machine.upload(np.array([10 * k], "u4")) for k in range(4)]
    table = machine.upload(np.array(cells, "u8"))
    out = machine.upload(np.zeros(64, "u4"))
    body = (
        INDEX + ".reg .b32 %old, %k; and.b32 %k, %i, 3; ld.param.u64 %at, [table];"
        "mul.wide.u32 %step, %k, 8; add.u64 %at, %at, %step; ld.global.u64 %at, [%at];"
        "atom.global.add.u32 %old, [%at], %i; ld.param.u64 %to, [out];"
        "mul.wide.u32 %step, %i, 4; add.u64 %to, %to, %step; st.global.u32 [%to], %old;"
    )
    machine.run(body, {"table": table, "out": out}, threads=64)
    lanes = np.arange(64).reshape(16, 4)
    before = np.cumsum(lanes, axis=0) - lanes + 10 * np.arange(4)
    assert (machine.download(out, "u4", 64).reshape(16, 4) == before).all()
    assert [machine.download(c, "u4", 1)[0] for c in cells] == (before[-1] + lanes[-1]).tolist()


def test_grid_counts_itself(machine: Any) -> None:
    """One atomic a thread over several waves."""
    cell = machine.upload(np.zeros(1, "u8"))
    body = INDEX + "ld.param.u64 %at, [cell]; atom.global.add.u64 %to, [%at], 3;"
    machine.run(body, {"cell": cell}, ctas=70, threads=256)
    assert machine.download(cell, "u8", 1)[0] == 3 * 70 * 256


# ---- faults ----


def fault(machine: Any, body: str, params: dict[str, int], **options: Any) -> KernelFault:
    with pytest.raises(KernelFault) as caught:
        machine.execution(INDEX + body, params, **options).run(alone=True)
    return caught.value


LOAD = "ld.param.u64 %at, [x]; mul.wide.u32 %step, %i, 4; add.u64 %at, %at, %step; .reg .b32 %v;\n"


def test_out_of_bounds_names_everything(machine: Any) -> None:
    x = machine.upload(np.zeros(100, "u4"))
    error = fault(machine, LOAD + "\nld.global.u32 %v, [%at];", {"x": x}, ctas=4)
    assert error.code == "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert error.message == (
        "kernel k: PTX line 9 (ld.global.u32 %v, [%at]), thread (4, 0, 0) of CTA (3, 0, 0): "
        f"out-of-bounds load, 4 bytes at 0x{x + 400:x}, 0 bytes behind the end of the device "
        f"allocation of 400 bytes at 0x{x:x}; hint: is the tail guarded, and do index, stride and "
        "offset count elements or bytes as they should?"
    )


def test_store_to_null_and_to_freed(machine: Any) -> None:
    x = machine.upload(np.zeros(64, "u4"))
    error = fault(machine, LOAD + "st.global.u32 [%at], %i;", {"x": 0})
    assert "out-of-bounds store, 4 bytes at 0x0, a null pointer" in error.message
    machine.memory.free(x)
    error = fault(machine, LOAD + "st.global.u32 [%at+4], %i;", {"x": x})
    assert error.code == "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert f"at offset 4 of the freed device allocation of 256 bytes at 0x{x:x}" in error.message


def test_misaligned(machine: Any) -> None:
    x = machine.upload(np.zeros(64, "u4"))
    error = fault(machine, LOAD + "ld.global.u32 %v, [%at+2];", {"x": x})
    assert error.code == "CUDA_ERROR_MISALIGNED_ADDRESS"
    assert "misaligned load, 4 bytes" in error.message
    vector = "ld.global.v4.u32 {%v, %v, %v, %v}, [%at];"
    error = fault(machine, LOAD + vector, {"x": x})
    assert error.code == "CUDA_ERROR_MISALIGNED_ADDRESS"
    assert "thread (1, 0, 0)" in error.message


def test_never_written(machine: Any) -> None:
    """Bytes of a fresh allocation, but for those that someone wrote."""
    x = machine.memory.allocate(4 * 64)
    machine.memory.write(x, np.zeros(40, "u4"))
    error = fault(machine, LOAD + "ld.global.u32 %v, [%at];", {"x": x}, ctas=2)
    assert error.code == "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert "load of never-written bytes" in error.message
    assert "thread (8, 0, 0) of CTA (1, 0, 0)" in error.message
    machine.run(
        INDEX + LOAD + "st.global.u32 [%at], %i; ld.global.u32 %v, [%at];", {"x": x}, ctas=2
    )
    machine.run(INDEX + LOAD + "ld.global.u32 %v, [%at];", {"x": x}, ctas=2)


def test_guarded_fault_names_the_lane(machine: Any) -> None:
    x = machine.upload(np.zeros(10, "u4"))
    body = LOAD + "setp.gt.u32 %p, %i, 19; @%p ld.global.u32 %v, [%at];"
    error = fault(machine, body, {"x": x}, threads=64)
    assert "thread (20, 0, 0)" in error.message
    assert "40 bytes behind the end" in error.message


def test_fault_in_a_scattered_group(machine: Any) -> None:
    x = machine.upload(np.zeros(10, "u4"))
    body = (
        LOAD + "and.b32 %size, %i, 1; setp.eq.u32 %p, %size, 0; @%p bra END;\n"
        "ld.global.u32 %v, [%at];\nEND:\n"
    )
    error = fault(machine, body, {"x": x}, threads=(32, 1, 1))
    assert "thread (11, 0, 0)" in error.message
    assert "(ld.global.u32 %v, [%at])" in error.message


SHARED = ".shared .b32 a[8]; .shared .b32 b[8]; .reg .b32 %v, %s; shl.b32 %s, %i, 2;"


def test_shared_faults(machine: Any) -> None:
    error = fault(machine, SHARED + "st.shared.u32 [%s], %i;", {}, threads=32)
    assert error.code == "CUDA_ERROR_ILLEGAL_ADDRESS"
    assert "thread (16, 0, 0)" in error.message
    assert "the CTA has 64 bytes of shared memory" in error.message
    error = fault(machine, SHARED + "st.shared.u32 [%s+1], %i;", {}, threads=4)
    assert error.code == "CUDA_ERROR_MISALIGNED_ADDRESS"
    assert "at offset 1 of a (32 bytes)" in error.message
    error = fault(machine, SHARED + "ld.shared.u32 %v, [b+4];", {}, threads=32)
    assert "never-written bytes, 4 bytes at shared address 0x24, at offset 4 of b" in error.message


def test_shared_memory_of_the_next_wave_is_fresh(machine: Any) -> None:
    """CTA 0 writes; CTA 200 runs in a later wave on the same row."""
    body = (
        SHARED + "setp.eq.u32 %p, %cta, 0; @%p st.shared.u32 [a], %i; @!%p ld.shared.u32 %v, [a];"
    )
    error = fault(machine, body, {}, ctas=200, threads=32, sm_count=1)
    assert "CTA (1, 0, 0)" in error.message
    body = (
        SHARED + "setp.lt.u32 %p, %cta, 32; @%p st.shared.u32 [a], %i; @!%p ld.shared.u32 %v, [a];"
    )
    error = fault(machine, body, {}, ctas=200, threads=32, sm_count=1)
    assert "CTA (32, 0, 0)" in error.message


# ---- the host's side ----


def test_host_accesses_are_checked() -> None:
    memory = Memory(1 << 20)
    x = memory.allocate(1000)
    assert x % 512 == 0
    y = memory.allocate(10)
    assert y >= x + 1000 + 512
    with pytest.raises(MemoryRangeError, match=r"1001 bytes at 0x7a0000000000 are not inside"):
        memory.read(x, 1001)
    with pytest.raises(MemoryRangeError, match="is not the start of a live allocation"):
        memory.free(x + 512)
    with pytest.raises(MemoryRangeError, match="behind the end"):
        memory.write(x + 1000, b"a")
    memory.free(x)
    with pytest.raises(MemoryRangeError, match="freed"):
        memory.read(x, 1)
    assert memory.allocate(1000) > y
    with pytest.raises(OutOfMemory, match="bytes asked for"):
        memory.allocate(1 << 20)
    with pytest.raises(ValueError, match="at least one byte"):
        memory.allocate(0)


def test_fill_copy_and_their_shadow(machine: Any) -> None:
    memory = machine.memory
    x, y = memory.allocate(256), memory.allocate(256)
    memory.fill(x, 0x01020304, 16, 4)
    memory.copy(y + 128, x, 128)
    assert memory.read(y + 128, 8) == bytes([4, 3, 2, 1]) * 2
    body = INDEX + LOAD + "ld.global.u32 %v, [%at];"
    machine.run(body, {"x": y + 128}, threads=16)
    with pytest.raises(KernelFault, match="never-written"):
        machine.run(body, {"x": y + 192}, threads=16)
    memory.fill(x, 7, 256)
    memory.copy(x + 1, x, 255)
    assert memory.read(x, 256) == b"\7" * 256


def test_pinned_memory_is_shared_with_the_host(machine: Any) -> None:
    x = machine.memory.allocate(256, "host")
    view = machine.memory.view(x, 256).view("u4")
    view[:] = np.arange(64)
    body = LOAD + "ld.global.u32 %v, [%at]; add.u32 %v, %v, 1; st.global.u32 [%at], %v;"
    machine.run(INDEX + body, {"x": x}, threads=64)
    assert (view == np.arange(64) + 1).all()


def test_huge_allocations_cost_nothing_until_touched() -> None:
    memory = Memory(8 << 30)
    x = memory.allocate(6 << 30)
    memory.write(x + (5 << 30), b"here")
    assert memory.read(x + (5 << 30), 4) == b"here"
    assert memory.used == 6 << 30


def test_a_program_remembers_no_memory(machine: Any) -> None:
    """Programs live as long as the process; what they ran on may be gone."""
    x = machine.upload(np.zeros(1, np.uint32))
    execution = machine.execution(".reg .b64 %at; ld.param.u64 %at, [x];", {"x": x})
    assert execution.run(alone=True) is Status.DONE
    program, memory = execution.program, weakref.ref(machine.memory)
    machine.memory = Memory()
    del execution
    gc.collect()
    assert program.idle
    assert memory() is None


def test_programs_that_ran_long_ago_keep_no_register_files(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution_module, "KEPT_WAVES", 2)
    monkeypatch.setattr(execution_module, "_recent", OrderedDict())
    runs = [machine.execution(f".reg .b32 %a; mov.u32 %a, {i};") for i in range(3)]
    for run in runs:
        assert run.run(alone=True) is Status.DONE
    assert [bool(run.program.idle) for run in runs] == [False, True, True]
    one = (1, 1, 1)
    for which, kept in (
        (0, [True, False, True]),
        (2, [True, False, True]),
        (1, [False, True, True]),
    ):
        program = runs[which].program
        again = GridExecution(program, one, (32, 1, 1), one, 0, b"", machine.memory, 4)
        assert again.run(alone=True) is Status.DONE
        assert [bool(run.program.idle) for run in runs] == kept


def test_what_is_forgotten_needs_no_collection(
    machine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Functions and their globals refer to each other: a server would hold all until a full one."""
    monkeypatch.setattr(execution_module, "KEPT_WAVES", 1)
    monkeypatch.setattr(execution_module, "_recent", OrderedDict())
    gc.disable()
    try:
        waves = []
        for i in range(2):
            text = f".reg .b32 %a, %b; mov.u32 %b, %tid.x; add.u32 %a, %b, {i};"
            execution = machine.execution(text)
            assert execution.run(alone=True) is Status.DONE
            waves.append(weakref.ref(*next(iter(execution.program.idle.values()))))
            del execution
        assert [wave() is None for wave in waves] == [True, False]
    finally:
        gc.enable()


def test_functions_of_many_groups_of_lanes_are_not_all_kept(machine: Any) -> None:
    execution = machine.execution(".reg .b32 %a; mov.u32 %a, 1;", threads=1024)
    assert execution.run(alone=True) is Status.DONE
    ((wave,),) = execution.program.idle.values()
    groups = [(i, j) for i in range(32, 1024, 32) for j in range(i + 32, 1025, 32)][:200]
    gc.collect()
    gc.disable()  # they are freed at once
    try:
        lanes = [weakref.ref(wave.bind(*group)[0].args[1]["L"]) for group in groups]
    finally:
        gc.enable()
    assert sum(each() is not None for each in lanes) <= 65
