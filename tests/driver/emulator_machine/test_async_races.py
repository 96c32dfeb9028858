"""The sanitizer of asynchronous accesses: proxy fences, and how long shared memory is read."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from urdir.driver.emulator.machine.async_races import Sanitizer
from urdir.driver.emulator.machine.faults import KernelFault

# Two warpgroups. The tile holds B (8, 16) f16 for both; `words` is where bulk copies go.
HEAD = """
    .reg .b32 %i, %s, %v, %own, %a<4>, %d<4>, %t;
    .reg .b64 %x, %y, %desc, %far;
    .reg .pred %p, %q, %first, %done, %yes;
    .shared .align 1024 .b8 tile[256];
    .shared .align 128 .b8 words[256];
    .shared .align 8 .b64 full;
    .shared .align 8 .b64 empty;
    mov.u32 %i, %tid.x;
    ld.param.u64 %x, [x];
    ld.param.u64 %y, [y];
    mov.u32 %t, %ctaid.x;
    mad.wide.u32 %y, %t, 256, %y;
    mov.u32 %s, tile;
    mad.lo.u32 %own, %i, 4, %s;
    shr.u32 %t, %s, 4;
    cvt.u64.u32 %desc, %t;
    or.b64 %desc, %desc, 34360262656;
    setp.eq.b32 %yes, 1, 1;
    setp.eq.u32 %first, %i, 0;
    setp.lt.u32 %q, %i, 128;
    mov.b32 %v, 0;
""" + "".join(f"    mov.b32 %{r}{j}, 0;\n" for r in "ad" for j in range(4))  # fmt: skip
INIT = """
    @!%first bra INITED;
    mbarrier.init.shared::cta.b64 [full], 1;
    mbarrier.init.shared::cta.b64 [empty], 2;
    fence.mbarrier_init.release.cluster;
INITED:
    bar.sync 0;
"""
WRITE = """
    setp.lt.u32 %p, %i, 64;
    @!%p bra WRITTEN;
    st.shared.b32 [%own], %v;
WRITTEN:
"""
FENCE = "    fence.proxy.async.shared::cta;\n"
MEET = "    bar.sync 0;\n"
PRODUCT = """
    wgmma.fence.sync.aligned;
    wgmma.mma_async.sync.aligned.m64n8k16.f32.f16.f16 {%d0, %d1, %d2, %d3}, {%a0, %a1, %a2, %a3}, \
%desc, %yes, 1, 1, 0;
    wgmma.commit_group.sync.aligned;
"""
WAIT = "    wgmma.wait_group.sync.aligned 0;\n"
LOAD = """
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [full], 256;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [tile], [%x], 256, [full];
"""
LANDED = """
LANDED:
    mbarrier.try_wait.parity.shared::cta.b64 %done, [full], 0;
    @!%done bra LANDED;
"""
STORE = """
    @!%first bra STORED;
    cp.async.bulk.global.shared::cta.bulk_group [%y], [tile], 256;
    cp.async.bulk.commit_group;
    READ
STORED:
"""
READ = "cp.async.bulk.wait_group.read 0;"
# The first thread of each warpgroup arrives when its product has been waited for.
EMPTIED = """
    and.b32 %t, %i, 127;
    setp.eq.u32 %p, %t, TURN;
    @!%p bra ARRIVED;
    mbarrier.arrive.shared::cta.b64 _, [empty];
ARRIVED:
    @!%first bra END;
EMPTY:
    mbarrier.try_wait.parity.shared::cta.b64 %done, [empty], 0;
    @!%done bra EMPTY;
"""
LOAD_AGAIN = LOAD.replace("[%x]", "[%x+256]") + "END:\n"

RIGHT = {
    "all fence, then meet": WRITE + FENCE + MEET + PRODUCT + WAIT,
    "all meet, then fence": WRITE + MEET + FENCE + PRODUCT + WAIT,
    "the writers fence": WRITE.replace("WRITTEN:", FENCE + "WRITTEN:") + MEET + PRODUCT + WAIT,
    "one thread writes and fences": WRITE.replace("64", "1").replace("WRITTEN:", FENCE + "WRITTEN:")
    + WRITE.replace("64;", "0;").replace("WRITTEN", "OTHERS") + """
    setp.ge.u32 %p, %i, 64;
    setp.lt.and.u32 %p, %i, 127, %p;
    sub.u32 %own, %own, 252;
    @!%p bra REST;
    st.shared.b32 [%own], %v;
    fence.proxy.async;
REST:
""" + MEET + PRODUCT + WAIT,
    "a bulk copy needs no fence": INIT + "    @!%first bra LANDED;\n" + LOAD + LANDED + PRODUCT
    + WAIT,
    "overwritten after the wait": WRITE + FENCE + MEET + PRODUCT + WAIT + MEET
    + WRITE.replace("WRITTEN", "AGAIN"),
    "copied to after an arrival": INIT + "    @!%first bra LANDED;\n" + LOAD + LANDED + PRODUCT
    + WAIT + EMPTIED.replace("TURN", "0") + LOAD_AGAIN,
    "copied to after another's arrival": INIT + "    @!%first bra LANDED;\n" + LOAD + LANDED
    + PRODUCT + WAIT + EMPTIED.replace("TURN", "77") + LOAD_AGAIN,
    "a bulk copy to global memory": WRITE + FENCE + MEET + STORE.replace("READ", READ) + MEET
    + WRITE.replace("WRITTEN", "AGAIN"),
}  # fmt: skip


def run(machine: Any, code: str) -> None:
    machine.target = "sm_90a"
    x = machine.upload(np.zeros(128, "u4"))
    y = machine.upload(np.zeros(128, "u4"))
    execution = machine.execution(
        HEAD + code, {"x": x, "y": y}, threads=256, watch=Sanitizer(), ctas=2, sm_count=1
    )
    execution.run(alone=True)


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_right(machine: Any, name: str) -> None:
    run(machine, RIGHT[name])


WGMMA, ST = r"wgmma.mma_async.*", r"st.shared.b32 \[%own\], %v\)"
WRONG = {
    "no fence": (
        WRITE + MEET + PRODUCT + WAIT,
        rf"{WGMMA} of thread .* reads shared address 0x0, .* which .*{ST} of thread .* has "
        "written, with no fence.proxy.async between",
    ),
    "a fence by other threads": (
        WRITE + "    @%p bra ON;\n" + FENCE + "ON:\n" + MEET + PRODUCT + WAIT,
        "with no fence.proxy.async between",
    ),
    "a fence by one of the writers": (
        WRITE.replace("WRITTEN:", "    @!%first bra WRITTEN;\n" + FENCE + "WRITTEN:")
        + MEET + PRODUCT + WAIT,
        "with no fence.proxy.async between",
    ),
    "a fence before the write": (FENCE + WRITE + MEET + PRODUCT + WAIT, "no fence.proxy.async"),
    "one warpgroup fences after the barrier": (
        WRITE + MEET + "    @%q bra ON;\n" + FENCE + "ON:\n" + PRODUCT + WAIT,
        r"of thread \(0, 0, 0\) .* reads .* with no fence.proxy.async between",
    ),
    "no barrier": (
        WRITE + FENCE + PRODUCT + WAIT,
        rf"race: .*{ST} of thread .* and .*{WGMMA} of thread .* touch shared address .*tile.* with "
        "nothing to order them",
    ),
    "overwritten before the wait": (
        WRITE + FENCE + MEET + PRODUCT + MEET + WRITE.replace("WRITTEN", "AGAIN") + WAIT,
        rf"race: .*{ST} of thread .* writes shared address 0x0, .* which .*{WGMMA} of thread .* may"
        " still read; hint: wgmma.wait_group",
    ),
    "overwritten by others, who have not met the readers since": (
        WRITE + FENCE + MEET + PRODUCT + WAIT + WRITE.replace("WRITTEN", "AGAIN"),
        "may still read; hint: wgmma.wait_group",
    ),
    "copied to before the wait": (
        INIT + "    @!%first bra LANDED;\n" + LOAD + LANDED + PRODUCT
        + EMPTIED.replace("TURN", "0") + LOAD_AGAIN.replace("END:", "END:" + WAIT),
        rf"race: .*cp.async.bulk.* of thread \(0, 0, 0\).* writes .* which .*{WGMMA}.* may still",
    ),
    "a bulk copy after generic writes": (
        INIT + WRITE + MEET + "    @!%first bra LANDED;\n" + LOAD + LANDED,
        r"cp.async.bulk.shared.* overwrites shared .* which .*st.shared.* has written, with no "
        "fence.proxy.async",
    ),
    "a bulk copy with an mbarrier that is not fenced": (
        INIT.replace("fence.mbarrier_init.release.cluster;", "") + "    @!%first bra LANDED;\n"
        + LOAD + LANDED,
        "signals shared .* at offset 0 of full .* which .*mbarrier.init.* has written, with no",
    ),
    "an mbarrier that others do not know": (
        INIT.replace("bar.sync 0;", "") + "    @!%first bra LANDED;\n" + LOAD + LANDED,
        r"race: .*mbarrier.init.* of thread \(0, 0, 0\) .* and .*mbarrier.try_wait.* touch",
    ),
    "a relaxed arrival": (
        INIT + "    @!%first bra LANDED;\n" + LOAD + LANDED + PRODUCT + WAIT
        + EMPTIED.replace("TURN", "0").replace(
            "mbarrier.arrive.shared", "mbarrier.arrive.relaxed.cta.shared") + LOAD_AGAIN,
        "cp.async.bulk.* writes .* may still read",
    ),
    "a copy to global memory without a fence": (
        WRITE + MEET + STORE.replace("READ", READ),
        r"cp.async.bulk.global.* of thread \(0, 0, 0\).* reads .* with no fence.proxy.async",
    ),
    "a copy to global memory that is not waited for": (
        WRITE + FENCE + MEET + STORE.replace("READ", "") + MEET + WRITE.replace("WRITTEN", "AGAIN")
        + READ,
        r"race: .*st.shared.* writes .* which .*cp.async.bulk.global.* of thread \(0, 0, 0\).* may "
        "still read; hint: cp.async.bulk.wait_group.read",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong(machine: Any, name: str) -> None:
    code, message = WRONG[name]
    machine.version = "8.6"
    with pytest.raises(KernelFault, match=message):
        run(machine, code)


def test_shared_memory_must_be_read_before_the_end(machine: Any) -> None:
    """Without a sanitizer, too."""
    machine.target = "sm_90a"
    y = machine.upload(np.zeros(64, "u4"))
    code = HEAD + WRITE + FENCE + MEET + STORE.replace("READ", "")
    with pytest.raises(KernelFault, match=r"cp.async.bulk.global.* ends before its bulk"):
        machine.run(code, {"x": y, "y": y}, threads=256)


def test_a_copy_to_global_memory_is_late(machine: Any, rng: Any) -> None:
    """It reads shared memory at its wait: what is written there before then is what it copies."""
    machine.target = "sm_90a"
    y = machine.upload(np.full(64, 9, "u4"))
    late = STORE.replace("READ", "ld.global.u32 %t, [%y];\nst.shared.u32 [tile+4], %t;\n" + READ)
    code = HEAD + WRITE + FENCE + MEET + late
    machine.run(code, {"x": y, "y": y}, threads=256)
    assert (machine.download(y, "u4", 64) == np.where(np.arange(64) == 1, 9, 0)).all()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            WRITE + FENCE + MEET + "    add.u64 %desc, %desc, 4096;\n" + PRODUCT,
            "out-of-bounds load",
        ),
        (STORE.replace("[tile]", "[tile+4096]").replace("READ", READ), "out-of-bounds load"),
    ],
    ids=["wgmma", "bulk copy"],
)
def test_reads_beyond_shared_memory_are_faults(machine: Any, code: str, message: str) -> None:
    with pytest.raises(KernelFault, match=message):
        run(machine, code)
