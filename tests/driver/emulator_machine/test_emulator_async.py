"""cp.async, bulk copies and mbarriers: what lands when, and what may not be read before."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from urdir.driver.emulator.machine.faults import KernelFault

START = (
    ".reg .b32 %i, %cta, %size, %v, %s, %k, %n; .reg .b64 %at, %to, %step, %state, %bar;"
    ".reg .pred %p, %q; mov.u32 %k, %tid.x; mov.u32 %cta, %ctaid.x; mov.u32 %size, %ntid.x;"
    "mad.lo.u32 %i, %cta, %size, %k;\n"
)
STORE = (
    "ld.param.u64 %to, [out]; mul.wide.u32 %step, %i, 4; add.u64 %to, %to, %step;"
    "st.global.u32 [%to], %v;\n"
)


@pytest.mark.parametrize("size", [4, 8, 16])
def test_copy_lands_at_its_wait(machine: Any, rng: Any, size: int) -> None:
    data = rng.integers(0, 1 << 32, 256 * size // 4, dtype=np.uint64).astype("u4")
    x, out = machine.upload(data), machine.upload(np.zeros(256, "u4"))
    op = "cg" if size == 16 else "ca"
    body = START + (
        f".shared .align 16 .b8 buf[{128 * size}]; ld.param.u64 %at, [x]; mov.u32 %s, buf;"
        f"mul.wide.u32 %step, %i, {size}; add.u64 %at, %at, %step; mad.lo.u32 %s, %k, {size}, %s;"
        f"cp.async.{op}.shared.global [%s], [%at], {size}; cp.async.commit_group;"
        "WAIT cp.async.wait_group 0; bar.sync 0; mov.u32 %s, buf; xor.b32 %k, %k, 1;"
        f"mad.lo.u32 %s, %k, {size}, %s; ld.shared.u32 %v, [%s+{size - 4}];"
    ) + STORE  # fmt: skip
    machine.run(body.replace("WAIT", ""), {"x": x, "out": out}, ctas=2, threads=128)
    want = data.reshape(256, -1)[np.arange(256) ^ 1, -1]
    assert (machine.download(out, "u4", 256) == want).all()
    early = body.replace("WAIT", "ld.shared.u32 %v, [%s];")
    with pytest.raises(KernelFault, match="asynchronous copy has not been waited for"):
        machine.run(early, {"x": x, "out": out}, ctas=2, threads=128)
    never = body.replace("WAIT cp.async.wait_group 0;", "cp.async.wait_group 1;")
    with pytest.raises(KernelFault, match="asynchronous copy has not been waited for"):
        machine.run(never, {"x": x, "out": out}, ctas=2, threads=128)


def test_pipeline_of_groups(machine: Any, rng: Any) -> None:
    """Three stages in flight; each wait leaves two groups under way."""
    steps = 7
    data = rng.integers(0, 1000, 64 * steps).astype("u4")
    x, out = machine.upload(data), machine.upload(np.zeros(64, "u4"))
    body = START + (
        ".shared .align 16 .b8 ring[768]; ld.param.u64 %at, [x]; mov.u32 %s, ring; mov.u32 %v, 0;"
        "shl.b32 %n, %i, 2; add.u32 %s, %s, %n; mul.wide.u32 %step, %i, 4; add.u64 %at, %at, %step;"
    )
    for step in range(steps + 2):
        if step < steps:
            body += f"cp.async.ca.shared.global [%s+{256 * (step % 3)}], [%at+{256 * step}], 4;"
        body += "cp.async.commit_group;"
        if step >= 2:
            body += f"cp.async.wait_group 2; ld.shared.u32 %n, [%s+{256 * ((step - 2) % 3)}];"
            body += "mad.lo.u32 %v, %v, 3, %n;"
    machine.run(body + STORE, {"x": x, "out": out}, threads=64)
    want = np.zeros(64, "u4")
    for row in data.reshape(steps, 64):
        want = want * np.uint32(3) + row
    assert (machine.download(out, "u4", 64) == want).all()


def test_zero_fill(machine: Any, rng: Any) -> None:
    data = rng.integers(1, 255, 64 * 16, dtype=np.uint8)
    x, out = machine.upload(data[: 63 * 16 + 5]), machine.upload(np.zeros(64 * 4, "u4"))
    size = rng.integers(0, 17, 64).astype("u4")
    size[63] = 5
    sizes = machine.upload(size)
    body = START + (
        ".shared .align 16 .b8 buf[1024]; .reg .b32 %r<4>; ld.param.u64 %at, [sizes];"
        "mul.wide.u32 %step, %i, 4; add.u64 %at, %at, %step; ld.global.u32 %n, [%at];"
        "ld.param.u64 %at, [x]; mul.wide.u32 %step, %i, 16; add.u64 %at, %at, %step;"
        "mov.u32 %s, buf; mad.lo.u32 %s, %i, 16, %s;"
        "cp.async.cg.shared.global.L2::128B [%s], [%at], 16, %n;"
        "cp.async.wait_all; ld.shared.v4.u32 {%r0, %r1, %r2, %r3}, [%s]; ld.param.u64 %to, [out];"
        "add.u64 %to, %to, %step; st.global.v4.u32 [%to], {%r0, %r1, %r2, %r3};"
    )
    machine.run(body, {"x": x, "out": out, "sizes": sizes}, threads=64)
    got = machine.download(out, "u1", 1024).reshape(64, 16)
    want = np.where(np.arange(16) < size[:, None], data.reshape(64, 16), 0)
    assert (got == want).all()


@pytest.mark.parametrize(("size", "what"), [(16, "load, 16 bytes"), (12, "load, 1 byte")])
def test_a_fault_beside_zeros_names_its_thread(machine: Any, size: int, what: str) -> None:
    """Of copies of a part and of the whole. Every third thread copies nothing."""
    x = machine.upload(np.zeros(31 * 16 + 8, "u1"))
    sizes = machine.upload(np.where(np.arange(32) % 3, size, 0).astype("u4"))
    body = START + (
        ".shared .align 16 .b8 buf[512]; ld.param.u64 %at, [sizes]; mul.wide.u32 %step, %i, 4;"
        "add.u64 %at, %at, %step; ld.global.u32 %n, [%at]; ld.param.u64 %at, [x];"
        "mul.wide.u32 %step, %i, 16; add.u64 %at, %at, %step; mov.u32 %s, buf;"
        "mad.lo.u32 %s, %i, 16, %s; cp.async.cg.shared.global [%s], [%at], 16, %n;"
        "cp.async.wait_all;"
    )
    with pytest.raises(KernelFault, match=rf"out-of-bounds {what}") as caught:
        machine.run(body, {"x": x, "sizes": sizes}, threads=32)
    assert "thread (31, 0, 0)" in str(caught.value)


def test_mbarrier_counts_phases(machine: Any) -> None:
    """64 arrivals a phase; every thread waits three times by parity, and once by state."""
    out = machine.upload(np.zeros(128, "u4"))
    body = START + (
        ".shared .align 8 .b64 bar; .shared .b32 total; setp.eq.u32 %q, %k, 0;"
        "@%q mbarrier.init.shared.b64 [bar], 64; @%q st.shared.u32 [total], 0; bar.sync 0;"
        "mov.u32 %n, 0;"
        "ROUND: atom.shared.add.u32 %v, [total], 1; mbarrier.arrive.shared.b64 %state, [bar];"
        "and.b32 %s, %n, 1; WAIT: mbarrier.try_wait.parity.shared.b64 %p, [bar], %s; @!%p bra WAIT;"
        "ld.volatile.shared.u32 %v, [total]; bar.sync 0; add.u32 %n, %n, 1;"
        "setp.lt.u32 %p, %n, 3; @%p bra ROUND;"
        "mbarrier.arrive.shared::cta.b64 %state, [bar]; "
        "LAST: mbarrier.test_wait.shared.b64 %p, [bar], %state; @!%p bra LAST;"
    ) + STORE  # fmt: skip
    machine.run(body, {"out": out}, ctas=2, threads=64)
    assert (machine.download(out, "u4", 128) == 192).all()


BULK = START + (
    ".shared .align 16 .b8 tile[512]; .shared .align 8 .b64 bar; setp.eq.u32 %q, %k, 0;"
    "@%q mbarrier.init.shared::cta.b64 [bar], 1; bar.sync 0; @!%q bra ISSUED;"
    "fence.proxy.async; mbarrier.arrive.expect_tx.release.cta.shared::cta.b64 _, [bar], EXPECTED;"
    "ld.param.u64 %at, [x]; mul.wide.u32 %step, %cta, 512; add.u64 %at, %at, %step;"
    "mov.u32 %s, tile; mov.u32 %n, bar;"
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    " [%s], [%at], 384, [%n]; add.u64 %at, %at, 384;"
    "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
    " [%s+384], [%at], 128, [bar], %step;"
    "ISSUED: EARLY "
    "WAIT: mbarrier.try_wait.parity.acquire.cta.shared::cta.b64 %p, [bar], 0, 100; @!%p bra WAIT;"
    "shl.b32 %s, %k, 2; mov.u32 %n, tile; add.u32 %s, %s, %n; ld.shared.u32 %v, [%s];"
) + STORE  # fmt: skip


def test_bulk_copy(machine: Any, rng: Any) -> None:
    data = rng.integers(0, 1 << 32, 3 * 128, dtype=np.uint64).astype("u4")
    x, out = machine.upload(data), machine.upload(np.zeros(3 * 128, "u4"))
    body = BULK.replace("EXPECTED", "512")
    params = {"x": x, "out": out}
    machine.run(body.replace("EARLY", ""), params, ctas=3, threads=128)
    assert (machine.download(out, "u4", 384) == data).all()
    with pytest.raises(KernelFault, match="asynchronous copy has not been waited for"):
        machine.run(body.replace("EARLY", "ld.shared.u32 %v, [tile];"), params, ctas=3, threads=128)


def test_bulk_copy_that_expects_more_bytes_never_ends(machine: Any, rng: Any) -> None:
    data = np.zeros(128, "u4")
    params = {"x": machine.upload(data), "out": machine.upload(data)}
    body = BULK.replace("EARLY", "").replace("EXPECTED", "528")
    with pytest.raises(
        KernelFault, match=r"deadlock: 128 threads spin at PTX line 8 .mbarrier.try"
    ):
        machine.run(body, params, threads=128)


def test_bulk_store(machine: Any, rng: Any) -> None:
    out = machine.upload(np.zeros(64, "u4"))
    body = START + (
        ".shared .align 16 .b32 tile[64]; mov.u32 %s, tile; shl.b32 %n, %k, 2; add.u32 %n, %n, %s;"
        "mad.lo.u32 %v, %k, 5, 1; st.shared.u32 [%n], %v; bar.sync 0; setp.ne.u32 %p, %k, 0;"
        "@%p ret; ld.param.u64 %to, [out];"
        "cp.async.bulk.global.shared::cta.bulk_group [%to], [%s], 256;"
        "cp.async.bulk.commit_group; cp.async.bulk.wait_group 0;"
    )
    machine.run(body, {"out": out}, threads=64)
    assert (machine.download(out, "u4", 64) == np.arange(64) * 5 + 1).all()


def test_arrival_after_copies(machine: Any, rng: Any) -> None:
    data = rng.integers(0, 1 << 32, 64, dtype=np.uint64).astype("u4")
    x, out = machine.upload(data), machine.upload(np.zeros(64, "u4"))
    body = START + (
        ".shared .align 16 .b32 tile[64]; .shared .align 8 .b64 bar; setp.eq.u32 %q, %k, 0;"
        "@%q mbarrier.init.shared.b64 [bar], 64; bar.sync 0; ld.param.u64 %at, [x];"
        "mul.wide.u32 %step, %k, 4; add.u64 %at, %at, %step; mov.u32 %s, tile; shl.b32 %n, %k, 2;"
        "add.u32 %n, %n, %s; cp.async.ca.shared.global [%n], [%at], 4;"
        "cp.async.mbarrier.arrive.noinc.shared.b64 [bar];"
        "WAIT: mbarrier.test_wait.parity.shared.b64 %p, [bar], 0; @!%p bra WAIT;"
        "xor.b32 %n, %k, 33; shl.b32 %n, %n, 2; add.u32 %n, %n, %s; ld.shared.u32 %v, [%n];"
    ) + STORE  # fmt: skip
    machine.run(body, {"x": x, "out": out}, threads=64)
    assert (machine.download(out, "u4", 64) == data[np.arange(64) ^ 33]).all()


def test_faults(machine: Any) -> None:
    x = machine.upload(np.zeros(64, "u4"))
    bar = ".shared .align 8 .b64 bar;"
    for code, message in (
        ("mbarrier.arrive.shared.b64 %state, [bar];", "is not initialised, at offset 0 of bar"),
        ("mbarrier.init.shared.b64 [bar], 3; bar.sync 0; mbarrier.arrive.shared.b64 %state, [bar];",
         "more than the 3 expected arrivals"),
        (".shared .align 16 .b8 t[64]; ld.param.u64 %at, [x]; setp.ne.u32 %p, %k, 0; @%p ret;"
         "mbarrier.init.shared.b64 [bar], 1; mov.u32 %n, 24; "
         "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [t], [%at], %n, [bar];",
         "must be multiples of 16"),
        (".shared .align 16 .b8 t[64]; ld.param.u64 %at, [x];"
         "cp.async.ca.shared.global [t], [%at+256], 16;", "out-of-bounds load, 16 bytes"),
    ):  # fmt: skip
        with pytest.raises(KernelFault, match=message):
            machine.run(START + bar + code, {"x": x}, threads=32)
