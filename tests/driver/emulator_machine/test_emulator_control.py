"""Branches, barriers, spinning, dependencies; deadlocks and the instruction budget."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from urdir.driver.emulator.machine.execution import GridExecution, Status
from urdir.driver.emulator.machine.faults import KernelFault

N = 192
START = (
    ".reg .b32 %i, %cta, %size, %v, %n, %me; .reg .b64 %at, %to, %step, %flag;"
    ".reg .pred %p, %q; mov.u32 %me, %tid.x; mov.u32 %cta, %ctaid.x; mov.u32 %size, %ntid.x;"
    "mad.lo.u32 %i, %cta, %size, %me;\n"
)
STORE = (
    "ld.param.u64 %to, [out]; mul.wide.u32 %step, %i, 4; add.u64 %to, %to, %step;"
    "st.global.u32 [%to], %v;\n"
)


def test_trip_counts_differ_by_thread(machine: Any, rng: Any) -> None:
    """Collatz steps: every lane leaves the loop at another time, and all meet after it."""
    a = rng.integers(1, 200, N).astype("u4")

    def steps(x: int) -> int:
        count = 0
        while x != 1:
            x = 3 * x + 1 if x % 2 else x // 2
            count += 1
        return count

    code = """
    mov.u32 %d, 0; mov.u32 %x, %a;
    LOOP: setp.eq.u32 %p, %x, 1; @%p bra DONE;
    and.b32 %y, %x, 1; setp.eq.u32 %q, %y, 1; @%q bra ODD;
    shr.u32 %x, %x, 1; bra NEXT;
    ODD: mad.lo.u32 %x, %x, 3, 1;
    NEXT: add.u32 %d, %d, 1; bra LOOP;
    DONE: shfl.sync.idx.b32 %x, %d, 0, 31, 0xFFFFFFFF; add.u32 %d, %d, %x;
    """
    count = np.array([steps(x) for x in a.tolist()])
    want = count + np.repeat(count[::32], 32)
    assert (machine.evaluate(code, "u4", a) == want).all()


def test_nested_divergence(machine: Any, rng: Any) -> None:
    a = rng.integers(0, 8, N).astype("u4")
    code = """
    and.b32 %x, %a, 4; setp.ne.u32 %p, %x, 0; @%p bra HIGH;
    and.b32 %x, %a, 2; setp.ne.u32 %p, %x, 0; @!%p bra LOW;
    mov.u32 %d, 20; bra.uni JOIN;
    LOW: mov.u32 %d, 10;
    JOIN: add.u32 %d, %d, %a; bra.uni END;
    HIGH: mul.lo.u32 %d, %a, 100;
    END: add.u32 %d, %d, 1;
    """
    want = np.where(a & 4, a * 100, np.where(a & 2, 20, 10) + a) + 1
    assert (machine.evaluate(code, "u4", a) == want).all()


def test_early_exit_and_guarded_ret(machine: Any) -> None:
    out = machine.upload(np.zeros(N, "u4"))
    body = START + "mov.u32 %v, 1;" + STORE + (
        "and.b32 %n, %i, 1; setp.eq.u32 %p, %n, 0; @%p ret; mov.u32 %v, 2;" + STORE
        + "setp.lt.u32 %p, %i, 100; @!%p exit; mov.u32 %v, 3;" + STORE
    )  # fmt: skip
    machine.run(body, {"out": out}, ctas=3, threads=64)
    i = np.arange(N)
    want = np.where(i % 2 == 0, 1, np.where(i < 100, 3, 2))
    assert (machine.download(out, "u4", N) == want).all()


@pytest.mark.parametrize("block", [(5, 3, 4), (64, 1, 2), (33, 1, 1)])
def test_thread_and_cta_numbers(machine: Any, block: tuple[int, int, int]) -> None:
    grid = (3, 2, 2)
    threads = block[0] * block[1] * block[2]
    out = machine.upload(np.zeros(12 * threads * 8, "u4"))
    registers = ["%tid.x", "%tid.y", "%tid.z", "%ctaid.x", "%ctaid.y", "%ctaid.z", "%laneid",
                 "%warpid"]  # fmt: skip
    body = (
        ".reg .b32 %a, %b, %c; .reg .b64 %to, %step;"
        "mov.u32 %a, %ctaid.z; mov.u32 %b, %nctaid.y; mov.u32 %c, %ctaid.y;"
        "mad.lo.u32 %a, %a, %b, %c; mov.u32 %b, %nctaid.x; mov.u32 %c, %ctaid.x;"
        "mad.lo.u32 %a, %a, %b, %c; mov.u32 %b, %ntid.z; mov.u32 %c, %tid.z;"
        "mad.lo.u32 %a, %a, %b, %c; mov.u32 %b, %ntid.y; mov.u32 %c, %tid.y;"
        "mad.lo.u32 %a, %a, %b, %c; mov.u32 %b, %ntid.x; mov.u32 %c, %tid.x;"
        "mad.lo.u32 %a, %a, %b, %c; ld.param.u64 %to, [out]; mul.wide.u32 %step, %a, 32;"
        "add.u64 %to, %to, %step;"
    )
    for k, register in enumerate(registers):
        body += f"mov.u32 %a, {register}; st.global.u32 [%to+{4 * k}], %a;"
    machine.run(body, {"out": out}, ctas=grid, threads=block)
    got = machine.download(out, "u4", 12 * threads * 8).reshape(-1, 8)
    row = 0
    for cz in range(2):
        for cy in range(2):
            for cx in range(3):
                for t in range(threads):
                    x, y, z = t % block[0], t // block[0] % block[1], t // (block[0] * block[1])
                    assert got[row].tolist() == [x, y, z, cx, cy, cz, t % 32, t // 32]
                    row += 1


def test_barrier_between_uneven_warps(machine: Any) -> None:
    """Warps reach the barrier at different times; 96 threads, the last warp exited."""
    out = machine.upload(np.zeros(4 * 96, "u4"))
    body = START + (
        ".shared .b32 cell[96]; .reg .b32 %s, %k, %warp; shr.u32 %warp, %me, 5;"
        "setp.eq.u32 %p, %warp, 2;"
        "@%p ret; shl.b32 %s, %me, 2; mov.u32 %k, cell; add.u32 %s, %s, %k; mov.u32 %v, %me;"
        "setp.eq.u32 %p, %warp, 0; @%p bra FAST; mov.u32 %n, 0;"
        "SLOW: add.u32 %v, %v, 1; add.u32 %n, %n, 1; setp.lt.u32 %q, %n, 50; @%q bra SLOW;"
        "FAST: st.shared.u32 [%s], %v; @!%p bra OTHER; bar.sync 1; bra JOIN; OTHER: bar.sync 1;"
        "JOIN: xor.b32 %s, %me, 32; shl.b32 %s, %s, 2; add.u32 %s, %s, %k; ld.shared.u32 %v, [%s];"
    ) + STORE  # fmt: skip
    machine.run(body, {"out": out}, ctas=4, threads=96)
    got = machine.download(out, "u4", 4 * 96).reshape(4, 96)
    tid = np.arange(64)
    assert (got[:, :64] == np.where(tid < 32, tid + 32 + 50, tid - 32)).all()
    assert (got[:, 64:] == 0).all()


def test_named_barriers_of_some_warps(machine: Any) -> None:
    """Producer warps arrive, consumer warps wait, at a barrier of 64 threads each."""
    out = machine.upload(np.zeros(128, "u4"))
    body = START + (
        ".shared .b32 cell[64]; .reg .b32 %s, %k, %id; and.b32 %s, %me, 63; shl.b32 %s, %s, 2;"
        "mov.u32 %k, cell; add.u32 %s, %s, %k; shr.u32 %id, %me, 5; and.b32 %id, %id, 1;"
        "add.u32 %id, %id, 2; setp.ge.u32 %p, %me, 64; mov.u32 %v, 0; @%p bra PRODUCE;"
        "barrier.sync %id, 64; ld.shared.u32 %v, [%s]; bra.uni END;"
        "PRODUCE: add.u32 %n, %me, 7; st.shared.u32 [%s], %n; bar.arrive %id, 64; END:"
    ) + STORE  # fmt: skip
    body = body.replace(
        "barrier.sync %id, 64;",
        "setp.eq.u32 %q, %id, 2; @%q bra A; bar.sync 3, 64; bra B; A: bar.sync 2, 64; B:",
    ).replace(
        "bar.arrive %id, 64;",
        "setp.eq.u32 %q, %id, 2; @%q bra C; bar.arrive 3, 64; bra D; C: bar.arrive 2, 64; D:",
    )
    machine.run(body, {"out": out}, threads=128)
    want = np.concatenate([np.arange(64) + 64 + 7, np.zeros(64)])
    assert (machine.download(out, "u4", 128) == want).all()


SPIN = (
    "WAIT: ld.acquire.gpu.global.u32 %n, [%flag]; setp.ne.u32 %p, %n, 0; @%p bra GO; bra WAIT; GO:"
)


def test_consumer_spins_on_a_later_producer(machine: Any) -> None:
    """CTA 0 waits for a flag that CTA 1, at a higher pc, sets when its data is there."""
    flag, out = machine.upload(np.zeros(2, "u4")), machine.upload(np.zeros(64, "u4"))
    body = START + (
        "ld.param.u64 %flag, [flag]; setp.eq.u32 %q, %cta, 1; @%q bra PRODUCE;" + SPIN +
        "ld.global.u32 %v, [%flag+4];" + STORE + "ret;"
        "PRODUCE: mov.u32 %n, 0; SLOW: add.u32 %n, %n, 1; setp.lt.u32 %p, %n, 300; @%p bra SLOW;"
        "mov.u32 %v, 42; st.global.u32 [%flag+4], %v; membar.gl;"
        "st.release.gpu.global.u32 [%flag], 1;"
    )  # fmt: skip
    machine.run(body, {"flag": flag, "out": out}, ctas=2)
    assert machine.download(out, "u4", 64).tolist() == [42] * 32 + [0] * 32


@pytest.mark.parametrize("relaxed", [False, True])
def test_grid_barrier(machine: Any, relaxed: bool) -> None:
    """Every CTA's sum is seen by all after the barrier, three times over."""
    ctas = 8
    out = machine.upload(np.zeros(ctas * 64, "u4"))
    count, cells = machine.upload(np.zeros(1, "u4")), machine.upload(np.zeros(ctas, "u4"))
    load = "ld.relaxed.gpu.global.u32" if relaxed else "ld.volatile.global.u32"
    body = START + (
        ".reg .b32 %round, %goal, %k, %x; .reg .b64 %count, %cells; ld.param.u64 %count, [count];"
        "ld.param.u64 %cells, [cells]; mul.wide.u32 %step, %cta, 4; add.u64 %at, %cells, %step;"
        "mov.u32 %round, 0; mov.u32 %goal, 0; setp.eq.u32 %q, %me, 0; mov.u32 %v, 1;\n"
        "ROUND: add.u32 %x, %v, %cta; @%q st.global.u32 [%at], %x; bar.sync 0;\n"
        f"add.u32 %goal, %goal, {ctas}; @!%q bra ARRIVED; membar.gl;"
        "atom.global.add.u32 %n, [%count], 1;\n"
        f"WAIT: {load} %n, [%count]; setp.lt.u32 %p, %n, %goal; @%p bra WAIT;\n"
        "ARRIVED: bar.sync 0; mov.u32 %v, 0; mov.u64 %to, %cells; mov.u32 %k, 0;\n"
        "SUM: ld.global.u32 %n, [%to]; add.u32 %v, %v, %n; add.u64 %to, %to, 4; add.u32 %k, %k, 1;"
        f"setp.lt.u32 %p, %k, {ctas}; @%p bra SUM;\n"
        f"add.u32 %goal, %goal, {ctas}; bar.sync 0; @!%q bra LEFT;"
        "atom.global.add.u32 %n, [%count], 1;"
        f"WAIT2: {load} %n, [%count]; setp.lt.u32 %p, %n, %goal; @%p bra WAIT2;\n"
        "LEFT: bar.sync 0; add.u32 %round, %round, 1; setp.lt.u32 %p, %round, 3; @%p bra ROUND;\n"
    ) + STORE  # fmt: skip
    machine.run(body, {"out": out, "count": count, "cells": cells}, ctas=ctas, threads=64)
    value = 1
    for _ in range(3):
        value = sum(value + c for c in range(ctas))
    assert (machine.download(out, "u4", ctas * 64) == value).all()


def test_lock_by_compare_and_swap(machine: Any) -> None:
    """One thread a CTA takes a lock, bumps a plain counter, and lets go."""
    lock, out = machine.upload(np.zeros(2, "u4")), 0
    body = START + (
        "ld.param.u64 %at, [lock]; setp.ne.u32 %p, %me, 0; @%p ret;"
        "TAKE: atom.global.cas.b32 %n, [%at], 0, 1; setp.ne.u32 %p, %n, 0; @%p bra TAKE;"
        "ld.volatile.global.u32 %v, [%at+4]; add.u32 %v, %v, 1; st.volatile.global.u32 [%at+4], %v;"
        "membar.gl; atom.global.exch.b32 %n, [%at], 0;"
    )
    machine.run(body, {"lock": lock}, ctas=32, threads=32)
    assert machine.download(lock, "u4", 2).tolist() == [out, 32]


def deadlock(machine: Any, body: str, params: dict[str, int], **options: Any) -> str:
    with pytest.raises(KernelFault) as caught:
        machine.execution(START + body, params, **options).run(alone=True)
    assert caught.value.code == "CUDA_ERROR_LAUNCH_TIMEOUT"
    return caught.value.message


def test_spinning_in_vain_is_a_deadlock(machine: Any) -> None:
    flag = machine.upload(np.zeros(1, "u4"))
    message = deadlock(machine, "ld.param.u64 %flag, [flag];\n" + SPIN, {"flag": flag}, ctas=2)
    assert message == (
        "kernel k: deadlock: 64 threads spin at PTX line 9 (ld.acquire.gpu.global.u32 %n, [%flag])"
        f", address 0x{flag:x}, at offset 0 of the device allocation of 4 bytes at 0x{flag:x}"
    )


def test_spinning_yields_to_other_work(machine: Any) -> None:
    flag, out = machine.upload(np.zeros(1, "u4")), machine.upload(np.zeros(32, "u4"))
    body = START + "ld.param.u64 %flag, [flag];" + SPIN + "mov.u32 %v, 9;" + STORE
    grid = machine.execution(body, {"flag": flag, "out": out})
    assert grid.run() is Status.YIELDED
    assert "32 threads spin" in grid.waits_for()
    assert grid.run() is Status.YIELDED
    machine.memory.write(flag, np.ones(1, "u4"))
    assert grid.run() is Status.DONE
    assert (machine.download(out, "u4", 32) == 9).all()


def test_spinning_lets_others_run_where_some_wait_at_an_earlier_instruction(machine: Any) -> None:
    """Lanes 1 to 31 wait for lane 0, which waits for warp 1 to set a flag, and sets one for it."""
    flag, out = machine.upload(np.zeros(2, "u4")), machine.upload(np.zeros(64, "u4"))
    body = START + (
        "ld.param.u64 %flag, [flag]; setp.ge.u32 %p, %me, 32; @%p bra SECOND;"
        "setp.eq.u32 %p, %me, 0; @%p bra FIRST;\n"
        "TOGETHER: bar.warp.sync 0xFFFFFFFF; mov.u32 %v, 5; bra LAST;\n"
        "FIRST: " + SPIN + "st.release.gpu.global.u32 [%flag+4], 1; bra TOGETHER;\n"
        "SECOND: st.release.gpu.global.u32 [%flag], 1;\n"
        "WAIT2: ld.acquire.gpu.global.u32 %n, [%flag+4]; setp.eq.u32 %p, %n, 0; @%p bra WAIT2;\n"
        "mov.u32 %v, 6;\nLAST:" + STORE
    )  # fmt: skip
    machine.run(body, {"flag": flag, "out": out}, threads=64)
    assert machine.download(out, "u4", 64).tolist() == [5] * 32 + [6] * 32


def test_barrier_not_reached_by_all(machine: Any) -> None:
    """Half the CTA waits at barrier 0, half at barrier 1."""
    body = "setp.lt.u32 %p, %me, 32; @%p bra A;\nbar.sync 0;\nret;\nA: bar.sync 1;\n"
    message = deadlock(machine, body, {}, threads=64)
    assert "32 threads (thread (0, 0, 0) of CTA (0, 0, 0), ...) wait at barrier 1" in message
    assert "wait at barrier 0, PTX line 9 (bar.sync 0)" in message
    assert "PTX line 11 (bar.sync 1)" in message


def test_shuffle_whose_lanes_never_come(machine: Any) -> None:
    body = (
        "setp.lt.u32 %p, %me, 16; @%p bra A;\nbar.sync 0;\nret;\n"
        "A: shfl.sync.bfly.b32 %v, %i, 1, 31, 0xFFFFFFFF;\nbar.sync 0;"
    )
    message = deadlock(machine, body, {}, threads=32)
    assert "16 threads (thread (0, 0, 0) of CTA (0, 0, 0), ...) wait at PTX line 11" in message
    assert "member mask" in message


def test_budget(machine: Any) -> None:
    with pytest.raises(KernelFault, match="more than 10000 instructions") as caught:
        machine.execution(START + "LOOP: add.u32 %v, %i, 1; bra LOOP;", budget=10_000).run()
    assert caught.value.code == "CUDA_ERROR_LAUNCH_TIMEOUT"


def test_trap(machine: Any) -> None:
    body = START + "setp.eq.u32 %p, %i, 37;\n@%p trap;"
    with pytest.raises(
        KernelFault, match=r"trap at PTX line 9 .*thread \(5, 0, 0\) of CTA \(1"
    ) as e:
        machine.execution(body, ctas=2).run()
    assert e.value.code == "CUDA_ERROR_LAUNCH_FAILED"


def test_runs_up_to_its_dependencies(machine: Any) -> None:
    out = machine.upload(np.zeros(64, "u4"))
    body = START + (
        "griddepcontrol.launch_dependents; mov.u32 %v, 1;" + STORE + "griddepcontrol.wait;"
        "mov.u32 %v, 2;" + STORE
    )
    grid = machine.execution(body, {"out": out}, ctas=2, dependencies_pending=True)
    assert grid.run() is Status.DEPENDENCY_WAIT
    assert (machine.download(out, "u4", 64) == 1).all()
    assert grid.run() is Status.DEPENDENCY_WAIT
    grid.release_dependencies()
    assert grid.run() is Status.DONE
    assert (machine.download(out, "u4", 64) == 2).all()
    grid = machine.execution(body, {"out": out}, ctas=2)
    assert grid.run() is Status.DONE


def test_two_launches_of_one_program_interleave(machine: Any) -> None:
    """A suspended launch keeps its registers while another one of the same kernel runs."""
    body = (
        START + "mov.u32 %v, %i; griddepcontrol.wait; ld.param.u64 %at, [bias];"
        "ld.global.u32 %n, [%at]; add.u32 %v, %v, %n;" + STORE
    )
    program = machine.compile(body, ("out", "bias"))
    outs = [machine.upload(np.zeros(64, "u4")) for _ in range(2)]
    biases = [machine.upload(np.array([b], "u4")) for b in (100, 200)]
    grids = [
        GridExecution(
            program, (2, 1, 1), (32, 1, 1), (1, 1, 1), 0, np.array([o, b], "u8").tobytes(),
            machine.memory, 4, dependencies_pending=True,
        )
        for o, b in zip(outs, biases, strict=True)
    ]  # fmt: skip
    for grid in grids:
        assert grid.run() is Status.DEPENDENCY_WAIT
    for grid in grids:
        grid.release_dependencies()
        assert grid.run() is Status.DONE
    for out, bias in zip(outs, (100, 200), strict=True):
        assert (machine.download(out, "u4", 64) == np.arange(64) + bias).all()


def test_clock_and_nanosleep_advance(machine: Any) -> None:
    out = machine.upload(np.zeros(32, "u4"))
    body = START + (
        ".reg .b64 %t0, %t1; mov.u64 %t0, %globaltimer; nanosleep.u32 5000; "
        "mov.u64 %t1, %globaltimer; sub.u64 %t1, %t1, %t0; cvt.u32.u64 %v, %t1;"
    ) + STORE  # fmt: skip
    machine.run(body, {"out": out})
    assert (machine.download(out, "u4", 32) >= 5000).all()


def test_waves_cover_the_grid(machine: Any) -> None:
    """300 CTAs on a device that holds 8."""
    out = machine.upload(np.zeros(300 * 1024, "u4"))
    body = START + "add.u32 %v, %i, 3;" + STORE
    machine.run(body, {"out": out}, ctas=300, threads=1024)
    assert (machine.download(out, "u4", 300 * 1024) == np.arange(300 * 1024) + 3).all()
