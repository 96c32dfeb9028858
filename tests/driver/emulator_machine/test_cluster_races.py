"""The sanitizer on clusters: shared memory of other CTAs, and what orders its accesses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from urdir.driver.emulator.machine.async_races import Sanitizer
from urdir.driver.emulator.machine.counters import Counters
from urdir.driver.emulator.machine.execution import Status
from urdir.driver.emulator.machine.faults import KernelFault

# %slot: the thread's own word of `words`, %far: the same place in the next CTA of the cluster.
HEAD = """
    .reg .b32 %i, %rank, %size, %slot, %far, %peer, %v, %w, %x;
    .reg .b64 %at, %step;
    .reg .pred %p, %q;
    .shared .align 16 .b8 words[1024];
    mov.u32 %i, %tid.x;
    mov.u32 %rank, %cluster_ctarank;
    mov.u32 %size, %cluster_nctarank;
    mov.u32 %x, words;
    mad.lo.u32 %slot, %i, 4, %x;
    add.u32 %peer, %rank, 1;
    rem.u32 %peer, %peer, %size;
    mapa.shared::cluster.u32 %far, %slot, %peer;
    ld.param.u64 %at, [y];
    mov.u32 %x, %ctaid.x;
    mad.lo.u32 %v, %x, 64, %i;
    mul.wide.u32 %step, %v, 4;
    setp.eq.u32 %p, %rank, 0;
"""
ARRIVE, WAIT = "barrier.cluster.arrive.release;\n", "barrier.cluster.wait.acquire;\n"
SYNC = ARRIVE + WAIT

RIGHT = {
    "exchange": f"""st.shared.u32 [%slot], %v;
        {SYNC}
        ld.shared::cluster.u32 %w, [%far];
        {SYNC}""",
    "remote writes": f"""{SYNC}
        st.shared::cluster.u32 [%far], %v;
        {SYNC}
        ld.shared.u32 %w, [%slot];
        {SYNC}
        st.shared::cluster.u32 [%far], %w;
        {SYNC}""",
    "a relaxed arrival at the start": f"""barrier.cluster.arrive.relaxed;
        {WAIT}
        st.shared::cluster.u32 [%far], %v;
        {SYNC}
        ld.shared.u32 %w, [%slot];""",
    "a fence before a relaxed arrival": f"""st.shared.u32 [%slot], %v;
        fence.acq_rel.cluster;
        barrier.cluster.arrive.relaxed;
        {WAIT}
        ld.shared::cluster.u32 %w, [%far];
        {SYNC}""",
    "the own CTA": """st.shared::cluster.u32 [%slot], %v;
        bar.sync 0;
        xor.b32 %x, %slot, 128;
        ld.shared::cluster.u32 %w, [%x];""",
    "the cluster's barrier orders a CTA as well": f"""st.shared.u32 [%slot], %v;
        {SYNC}
        xor.b32 %x, %slot, 128;
        ld.shared.u32 %w, [%x];
        {SYNC}
        st.shared.u32 [%slot], %w;""",
    "work between arrival and wait": f"""st.shared.u32 [%slot], %v;
        {ARRIVE}
        st.shared.u32 [%slot+512], %v;
        {WAIT}
        ld.shared::cluster.u32 %w, [%far];
        {SYNC}""",
    "a bar.sync before one thread's reads": f"""setp.eq.u32 %q, %i, 0;
        st.shared.u32 [%slot], %v;
        {SYNC}
        @%q ld.shared::cluster.u32 %w, [%far+252];
        {SYNC}""",
    "a flag": f"""st.shared.u32 [%slot+512], 0;
        {SYNC}
        st.shared::cluster.u32 [%far], %v;
        st.release.cluster.shared::cluster.u32 [%far+512], 1;
        POLL:
        ld.acquire.cluster.shared.u32 %w, [%slot+512];
        setp.eq.u32 %q, %w, 0;
        @%q bra POLL;
        ld.shared.u32 %w, [%slot];
        {SYNC}""",
    "atomics": f"""st.shared.u32 [%slot], 0;
        {SYNC}
        mapa.shared::cluster.u32 %far, words, 0;
        red.shared::cluster.add.u32 [%far], 1;
        {SYNC}
        @%p ld.shared.u32 %w, [words];""",
    "global memory": f"""add.u64 %step, %at, %step;
        st.global.u32 [%step], %v;
        {SYNC}
        xor.b32 %v, %v, 64;
        mul.wide.u32 %step, %v, 4;
        add.u64 %step, %at, %step;
        ld.global.u32 %w, [%step];""",
}

#: A name of RIGHT, a change, what is found; the last occurrence is changed.
WRONG = {
    "a read that nothing orders": (
        "exchange", f"{SYNC}\n        ld", "bar.sync 0;\n        ld",
        r"race: .*ld.shared::cluster.* touches the shared memory of CTA \(1, 0, 0\), which may not "
        "have begun; hint: barrier.cluster.arrive and barrier.cluster.wait must come first",
    ),
    "a relaxed arrival": (
        "exchange", "arrive.release;\nbarrier.cluster.wait.acquire;\n\n        ld",
        "arrive.relaxed;\nbarrier.cluster.wait.acquire;\n\n        ld",
        r"race: PTX line \d+ \(st.shared.u32 \[%slot\], %v\) of thread \(0, 0, 0\) of CTA "
        r"\(1, 0, 0\) and PTX line \d+ \(ld.shared::cluster.u32 %w, \[%far\]\) of thread "
        r"\(0, 0, 0\) of CTA \(0, 0, 0\) touch shared address 0x0 of CTA \(1, 0, 0\), at offset 0 "
        r"of words \(1024 bytes\), with nothing to order them; hint: CTAs of a cluster are ordered "
        "by barrier.cluster.arrive",
    ),
    "an end that nobody waits for": (
        "exchange", SYNC, "",
        r"race: .*ld.shared::cluster.* of CTA \(1, 0, 0\) touches the shared memory of CTA "
        r"\(0, 0, 0\), which may have ended before; hint: let it wait with barrier.cluster",
    ),
    "an end after a relaxed arrival": (
        "exchange", ARRIVE, "barrier.cluster.arrive.relaxed;\n", "may have ended before",
    ),
    "a reader's write that comes too early": (
        "remote writes", f"{SYNC}\n        st", "st",
        r"ld.shared.u32 .* and .*st.shared::cluster.u32 \[%far\], %w.*CTAs of a cluster",
    ),
    "a write after the arrival": (
        "work between arrival and wait", "ld.shared::cluster.u32 %w, [%far]",
        "ld.shared::cluster.u32 %w, [%far+512]",
        r"st.shared.u32 \[%slot\+512\], %v.* and .*ld.shared::cluster.*of CTA \(1, 0, 0\)",
    ),
    "a relaxed arrival without a fence": (
        "a fence before a relaxed arrival", "fence.acq_rel.cluster;", "", "race: .*ld.shared",
    ),
    "no start": (
        "a relaxed arrival at the start", f"barrier.cluster.arrive.relaxed;\n        {WAIT}", "",
        "which may not have begun",
    ),
    "a flag without a release": (
        "a flag", "st.release.cluster", "st.relaxed.cluster", r"race: .*st.shared::cluster.*ld",
    ),
    "a bar.sync is not for the cluster": (
        "global memory", SYNC, "bar.sync 0;", r"st.global.* and .*ld.global.*CTAs are ordered",
    ),
    "a part of a warp": (
        "global memory", SYNC, """setp.gt.u32 %q, %i, 40;
        @%q bra ODD;
        barrier.cluster.arrive.aligned;
        bra JOIN;
        ODD:
        barrier.cluster.arrive.aligned;
        JOIN:
        barrier.cluster.wait.aligned;""",
        r"barrier of the cluster in divergent code: .*by 9 of the 32 threads of a warp",
    ),
}  # fmt: skip


def run(machine: Any, code: str, watch: Any, ctas: int = 4, size: int = 2) -> None:
    y = machine.upload(np.zeros(2048, np.uint32))
    body = HEAD + "\n".join(line.strip() for line in code.strip().splitlines())
    execution = machine.execution(
        body, {"y": y}, ctas=ctas, threads=64, cluster=(size, 1, 1), watch=watch
    )  # fmt: skip
    assert execution.run(alone=True) is Status.DONE


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("size", [2, 4])
def test_no_false_alarm(machine: Any, name: str, size: int) -> None:
    run(machine, RIGHT[name], Sanitizer(), 8, size)


@pytest.mark.parametrize("name", WRONG)
def test_a_race_is_found_and_named(machine: Any, name: str) -> None:
    origin, text, other, message = WRONG[name]
    before, found, after = RIGHT[origin].rpartition(text)
    assert found
    with pytest.raises(KernelFault, match=message):
        run(machine, before + other + after, Sanitizer())


def test_waves_begin_afresh(machine: Any) -> None:
    """In waves of one cluster the clocks go on, and CTAs are named by their place in the grid."""
    code = f"""mov.u32 %x, %clusterid.x;
        setp.eq.u32 %q, %x, 2;
        st.shared.u32 [%slot], %v;
        {SYNC}
        ld.shared::cluster.u32 %w, [%far];
        @%q st.shared.u32 [%slot], %w;
        {SYNC}"""
    y = machine.upload(np.zeros(2048, np.uint32))
    body = HEAD + "\n".join(line.strip() for line in code.splitlines())
    execution = machine.execution(
        body, {"y": y}, ctas=8, threads=64, cluster=(2, 1, 1), watch=Sanitizer(), sm_count=1,
        shared_bytes=100 << 10,
    )  # fmt: skip
    either = r"of CTA \(4, 0, 0\) and .* of CTA \(5,|of CTA \(5, 0, 0\) and .* of CTA \(4,"
    with pytest.raises(KernelFault, match=either):
        execution.run(alone=True)


def test_remote_accesses_are_counted(machine: Any) -> None:
    """Banks are those of the CTA whose memory it is: lanes that go to two CTAs take one each."""
    code = f"""st.shared.u32 [%slot], %v;
        {SYNC}
        and.b32 %peer, %i, 1;
        mapa.shared::cluster.u32 %far, words, %peer;
        ld.shared::cluster.u32 %w, [%far];
        mapa.shared::cluster.u32 %far, %slot, %peer;
        ld.shared::cluster.u32 %w, [%far];
        {SYNC}"""
    counters = Counters()
    run(machine, code, counters)
    loads = [c for c in counters.accesses.values() if c.kind == "shared load"]
    # 4 CTAs of two warps.
    assert [(c.requests, c.lanes, c.parts, c.fewest) for c in loads] == [(8, 256, 16, 16)] * 2
    assert sorted(counters.barriers.values()) == [8, 8]
