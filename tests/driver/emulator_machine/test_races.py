"""The sanitizer on kernels of a few lines: what it must find, and what it must leave alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from urdir.driver.bindings import emulated
from urdir.driver.device import Device
from urdir.driver.emulator.machine.async_races import Sanitizer
from urdir.driver.emulator.machine.execution import Status
from urdir.driver.emulator.machine.faults import KernelFault
from urdir.driver.harness import check_kernel
from urdir.ptxgen.catalog import kernels
from urdir.ptxgen.spec import KernelSpec, smallest_example

# %i: the thread's number in its CTA, %cta, %at: y, %slot: the thread's own word of `words`,
# %other: that of the thread 32 further on (of the CTA's 64), %v: its number.
HEAD = """
    .reg .b32 %i, %cta, %slot, %other, %v, %w, %base, %n;
    .reg .b64 %at, %own, %far, %wide, %flag, %state;
    .reg .pred %p, %q, %done;
    .shared .align 16 .b8 words[1024];
    .shared .align 8 .b64 bar;
    mov.u32 %i, %tid.x;
    mov.u32 %cta, %ctaid.x;
    mov.u32 %base, words;
    mad.lo.u32 %slot, %i, 4, %base;
    xor.b32 %other, %i, 32;
    mad.lo.u32 %other, %other, 4, %base;
    mov.u32 %v, %i;
    ld.param.u64 %at, [y];
    mul.wide.u32 %wide, %i, 4;
    add.u64 %own, %at, %wide;
    add.u64 %flag, %at, 4096;
    setp.eq.u32 %p, %i, 0;
    setp.lt.u32 %q, %i, 32;
"""


def run(machine: Any, code: str, threads: int = 64, ctas: int = 1) -> None:
    """Run ``code`` under the sanitizer; statements, one a line."""
    y = machine.upload(np.zeros(2048, np.uint32))
    body = HEAD + "\n".join(line.strip() for line in code.strip().splitlines())
    execution = machine.execution(body, {"y": y}, ctas=ctas, threads=threads, watch=Sanitizer())
    assert execution.run(alone=True) is Status.DONE


RACES = {
    "shared write then read": (
        """st.shared.u32 [%slot], %v;
        ld.shared.u32 %w, [%other];""",
        r"race: PTX line \d+ \(st.shared.u32 \[%slot\], %v\) of thread \(32, 0, 0\) of CTA "
        r"\(0, 0, 0\) and PTX line \d+ \(ld.shared.u32 %w, \[%other\]\) of thread \(0, 0, 0\) of "
        r"CTA \(0, 0, 0\) touch shared address 0x80, at offset 128 of words \(1024 bytes\), with "
        r"nothing to order them; hint: put a bar.sync between the two",
    ),
    "shared read then write": (
        """st.shared.u32 [%slot], %v;
        bar.sync 0;
        ld.shared.u32 %w, [%other];
        st.shared.u32 [%slot], %w;""",
        r"ld.shared.u32 %w.* of thread \(32, 0, 0\).* and .*st.shared.u32 \[%slot\], %w.* of "
        r"thread \(0, 0, 0\).*bar.sync",
    ),
    "global write then read": (
        """st.global.u32 [%own], %v;
        xor.b32 %n, %i, 32;
        mul.wide.u32 %wide, %n, 4;
        add.u64 %far, %at, %wide;
        ld.global.u32 %w, [%far];""",
        r"touch global address 0x[0-9a-f]+, y\+128, at offset 128 of the device allocation.*bar",
    ),
    "different values to one word": (
        "st.shared.u32 [words], %v;",
        r"\(st.shared.u32 \[words\], %v\) of thread \(0, 0, 0\).* of thread \(63, 0, 0\).*words",
    ),
    "different values by a warp": (
        "@%q st.shared.u32 [words], %v;",
        "hint: give each thread an address of its own",
    ),
    "lockstep": (
        """st.shared.u32 [%slot], %v;
        xor.b32 %n, %i, 1;
        mad.lo.u32 %other, %n, 4, %base;
        ld.shared.u32 %w, [%other];""",
        r"thread \(1, 0, 0\).*thread \(0, 0, 0\).*hint: order the lanes of a warp by bar.warp.sync",
    ),
    "a shuffle orders no memory": (
        """st.shared.u32 [%slot], %v;
        shfl.sync.bfly.b32 %w, %v, 1, 31, 0xFFFFFFFF;
        xor.b32 %n, %i, 1;
        mad.lo.u32 %other, %n, 4, %base;
        ld.shared.u32 %w, [%other];""",
        "bar.warp.sync",
    ),
    "bar.warp.sync orders one warp only": (
        """st.shared.u32 [%slot], %v;
        bar.warp.sync 0xFFFFFFFF;
        ld.shared.u32 %w, [%other];""",
        "hint: put a bar.sync between",
    ),
    "atomic and plain": (
        """@%p st.shared.u32 [words], 0;
        bar.sync 0;
        atom.shared.add.u32 %w, [words], 1;
        ld.shared.u32 %w, [words];""",
        r"atom.shared.add.*ld.shared",
    ),
    "one byte of a word": (
        """add.u32 %slot, %i, %base;
        st.shared.u8 [%slot], %v;
        and.b32 %n, %i, 60;
        add.u32 %other, %n, %base;
        ld.shared.u32 %w, [%other];""",
        "st.shared.u8.*ld.shared.u32",
    ),
    "generic addresses": (
        """cvta.shared.u64 %far, %wide;
        st.u32 [%far], %v;
        ld.shared.u32 %w, [%other];""",
        "touch shared address 0x80",
    ),
    "CTAs": (
        "@%p st.global.u32 [%at], %cta;",
        r"of CTA \(0, 0, 0\).*of CTA \(1, 0, 0\).*hint: CTAs are ordered only by a release",
    ),
    "a flag without a release": (
        """@!%p bra END;
        setp.eq.u32 %done, %cta, 0;
        @!%done bra WAIT;
        st.global.u32 [%at+64], %i;
        st.relaxed.gpu.global.u32 [%flag], 1;
        bra END;
        WAIT:
        ld.acquire.gpu.global.u32 %w, [%flag];
        setp.eq.u32 %q, %w, 0;
        @%q bra WAIT;
        ld.global.u32 %w, [%at+64];
        END:""",
        "hint: CTAs are ordered",
    ),
    "a release after which nobody acquires": (
        """setp.eq.u32 %done, %cta, 0;
        @!%done bra WAIT;
        st.global.u32 [%at], 7;
        st.release.gpu.global.u32 [%flag], 1;
        bra END;
        WAIT:
        ld.relaxed.gpu.global.u32 %w, [%flag];
        setp.eq.u32 %q, %w, 0;
        @%q bra WAIT;
        ld.global.u32 %w, [%at];
        END:""",
        "hint: CTAs are ordered",
    ),
    "the wrong half waits": (
        """st.shared.u32 [%slot], %v;
        bar.sync 0;
        @%q bra FIRST;
        bar.arrive 1, 64;
        ld.shared.u32 %w, [%other];
        bra END;
        FIRST:
        st.shared.u32 [%slot], %w;
        bar.sync 1, 64;
        END:""",
        r"ld.shared.* of thread \(32, 0, 0\).* and .*st.shared.* of thread \(0, 0, 0\)",
    ),
    "a copy is its own thread's": (
        """@%q cp.async.ca.shared.global [%slot], [%own], 4;
        cp.async.wait_all;
        ld.shared.u32 %w, [words];""",
        "hint: cp.async.wait_group is for the thread that copied",
    ),
    "a copy over what others still read": (
        """st.shared.u32 [%slot], %v;
        bar.sync 0;
        ld.shared.u32 %w, [%other];
        cp.async.ca.shared.global [%slot], [%own], 4;""",
        r"ld.shared.u32 .* and .*cp.async.ca.shared.global",
    ),
    "barrier by a part of a warp": (
        """rem.u32 %n, %i, 2;
        setp.eq.u32 %done, %n, 0;
        @%done bra EVEN;
        bar.sync 0;
        bra END;
        EVEN:
        bar.sync 0;
        END:""",
        r"barrier 0 in divergent code: PTX line \d+ \(bar.sync 0\) is reached by 16 of the 32 "
        r"threads of a warp, by thread \(\d, 0, 0\) of CTA \(0, 0, 0\) but not by thread",
    ),
    "more threads than a barrier counts": (
        "bar.sync 1, 32;",
        r"barrier 1 counts too few: PTX line \d+ \(bar.sync 1, 32\) is for 32 threads of a CTA, "
        r"and 64 arrive, such as thread \(0, 0, 0\) of CTA \(0, 0, 0\); hint: ",
    ),
    "threads that ended": (
        """@!%q ret;
        bar.sync 0;""",
        r"barrier 0 is not reached by all threads: PTX line \d+ \(bar.sync 0\) is reached by 32 of "
        r"the 64 threads of the CTA, by thread \(0, 0, 0\) of CTA \(0, 0, 0\) but thread "
        r"\(32, 0, 0\) of CTA \(0, 0, 0\) has ended before; hint: let threads without work go on",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RACES)
def test_a_race_is_found_and_named(machine: Any, name: str) -> None:
    code, message = RACES[name]
    with pytest.raises(KernelFault, match=message) as found:
        run(machine, code, ctas=2 if "CTA" in message or "release" in name else 1)
    assert found.value.message.startswith("kernel k: ")
    assert "hint: " in found.value.message


GRID_BARRIER = """
    st.global.u32 [%own], %cta;
    {all_before}
    bar.sync 0;
    @!%p bra PASS;
    {arrive}
POLL:
    {poll}
    setp.lt.u32 %done, %w, 3;
    @%done bra POLL;
    {after}
PASS:
    bar.sync 0;
    {all_after}
"""

RIGHT = {
    "a barrier between": (
        """st.shared.u32 [%slot], %v;
        bar.sync 0;
        ld.shared.u32 %w, [%other];
        bar.sync 0;
        st.shared.u32 [%slot], %w;""",
    ),
    "the same value": ("st.shared.u32 [words], 5;\nst.global.u32 [%at], %cta;",),
    "neighbouring bytes": (
        """add.u32 %slot, %i, %base;
        st.shared.u8 [%slot], %v;
        ld.shared.u8 %w, [%slot];""",
    ),
    "bar.warp.sync": (
        """st.shared.u32 [%slot], %v;
        bar.warp.sync 0xFFFFFFFF;
        xor.b32 %n, %i, 1;
        mad.lo.u32 %other, %n, 4, %base;
        ld.shared.u32 %w, [%other];
        bar.warp.sync 0xFFFFFFFF;
        st.shared.u32 [%slot], %w;""",
    ),
    "shuffles alone": ("shfl.sync.bfly.b32 %w, %v, 1, 31, 0xFFFFFFFF;",),
    "atomics": (
        """@%p st.shared.u32 [words], 0;
        bar.sync 0;
        red.shared.add.u32 [words], 1;
        red.global.add.u32 [%at], 1;
        bar.sync 0;
        ld.shared.u32 %w, [words];""",
    ),
    "a loop of atomics that threads of a warp leave at different times": (
        """@%p st.shared.u32 [words], 0;
        bar.sync 0;
        mov.u32 %n, %i;
        NEXT:
        setp.ge.u32 %done, %n, 100;
        @%done bra DONE;
        atom.shared.add.u32 %w, [words], 1;
        add.u32 %n, %n, 64;
        bra NEXT;
        DONE:
        bar.sync 0;
        ld.shared.u32 %w, [words];""",
    ),
    "halves that meet at a counted barrier": (
        """@%q bra FIRST;
        st.shared.u32 [%slot], %v;
        bar.arrive 1, 64;
        bra END;
        FIRST:
        bar.sync 1, 64;
        ld.shared.u32 %w, [%other];
        END:""",
    ),
    "barriers of one warp each": (
        """@%q bra FIRST;
        bar.sync 2, 32;
        bra END;
        FIRST:
        bar.sync 1, 32;
        END:
        bar.sync 0;""",
    ),
    "barrier.sync may be divergent": (
        """rem.u32 %n, %i, 2;
        setp.eq.u32 %done, %n, 0;
        @%done bra EVEN;
        barrier.sync 0;
        bra END;
        EVEN:
        barrier.sync 0;
        END:""",
    ),
    "copies and a barrier": (
        """cp.async.ca.shared.global [%slot], [%own], 4;
        cp.async.commit_group;
        cp.async.wait_group 0;
        ld.shared.u32 %w, [%slot];
        bar.sync 0;
        ld.shared.u32 %w, [%other];
        bar.sync 0;
        cp.async.ca.shared.global [%slot], [%own], 4;
        cp.async.wait_all;""",
    ),
    "an mbarrier": (
        """@!%p bra READY;
        mbarrier.init.shared.b64 [bar], 64;
        READY:
        bar.sync 0;
        st.shared.u32 [%slot], %v;
        mbarrier.arrive.shared.b64 %state, [bar];
        POLL:
        mbarrier.test_wait.shared.b64 %done, [bar], %state;
        @!%done bra POLL;
        ld.shared.u32 %w, [%other];""",
    ),
    "a bulk copy": (
        """@!%p bra READY;
        mbarrier.init.shared.b64 [bar], 1;
        fence.mbarrier_init.release.cluster;
        mbarrier.arrive.expect_tx.shared.b64 _, [bar], 256;
        BULK [words], [%at], 256, [bar];
        READY:
        bar.sync 0;
        POLL:
        mbarrier.test_wait.parity.shared.b64 %done, [bar], 0;
        @!%done bra POLL;
        ld.shared.u32 %w, [%other];""",
    ),
    "copies that arrive at an mbarrier": (
        """@!%p bra READY;
        mbarrier.init.shared.b64 [bar], 64;
        READY:
        bar.sync 0;
        cp.async.ca.shared.global [%slot], [%own], 4;
        cp.async.mbarrier.arrive.noinc.shared.b64 [bar];
        POLL:
        mbarrier.test_wait.parity.shared.b64 %done, [bar], 0;
        @!%done bra POLL;
        ld.shared.u32 %w, [%other];""",
    ),
    "copies that arrive at an mbarrier, and are waited for as well": (
        """@!%p bra READY;
        mbarrier.init.shared.b64 [bar], 64;
        READY:
        bar.sync 0;
        cp.async.ca.shared.global [%slot], [%own], 4;
        cp.async.mbarrier.arrive.noinc.shared.b64 [bar];
        cp.async.wait_all;
        POLL:
        mbarrier.test_wait.parity.shared.b64 %done, [bar], 0;
        @!%done bra POLL;
        ld.shared.u32 %w, [%other];""",
    ),
    "data that carries its own flag": (
        """@!%p bra END;
        setp.eq.u32 %done, %cta, 0;
        @!%done bra WAIT;
        st.relaxed.gpu.global.v2.u32 [%flag], {%v, 1};
        bra END;
        WAIT:
        ld.relaxed.gpu.global.v2.u32 {%n, %w}, [%flag];
        setp.eq.u32 %q, %w, 0;
        @%q bra WAIT;
        END:""",
        3,
    ),
    "release and acquire": (
        """@!%p bra END;
        setp.eq.u32 %done, %cta, 0;
        @!%done bra WAIT;
        st.global.u32 [%at], 7;
        st.release.gpu.global.u32 [%flag], 1;
        bra END;
        WAIT:
        ld.acquire.gpu.global.u32 %w, [%flag];
        setp.eq.u32 %q, %w, 0;
        @%q bra WAIT;
        ld.global.u32 %w, [%at];
        END:""",
        3,
    ),
    "fences around volatile flags": (
        """@!%p bra END;
        setp.eq.u32 %done, %cta, 0;
        @!%done bra WAIT;
        st.global.u32 [%at], 7;
        membar.gl;
        st.volatile.global.u32 [%flag], 1;
        bra END;
        WAIT:
        ld.volatile.global.u32 %w, [%flag];
        setp.eq.u32 %q, %w, 0;
        @%q bra WAIT;
        membar.gl;
        ld.global.u32 %w, [%at];
        END:""",
        3,
    ),
}  # fmt: skip

BULK = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"

#: What thread 0 of each CTA does; and all threads, where that is not left to it.
BARRIERS = {
    "acq_rel": {
        "arrive": "atom.acq_rel.gpu.global.add.u32 %w, [%flag], 1;",
        "poll": "ld.acquire.gpu.global.u32 %w, [%flag];",
    },
    "red and acquire": {
        "arrive": "red.release.gpu.global.add.u32 [%flag], 1;",
        "poll": "ld.acquire.gpu.global.u32 %w, [%flag];",
    },
    "fences": {
        "arrive": "fence.acq_rel.gpu;\nred.relaxed.gpu.global.add.u32 [%flag], 1;",
        "poll": "ld.relaxed.gpu.global.u32 %w, [%flag];",
        "after": "fence.acq_rel.gpu;",
    },
    "fences of all threads": {
        "all_before": "membar.gl;",
        "arrive": "red.global.add.u32 [%flag], 1;",
        "poll": "ld.volatile.global.u32 %w, [%flag];",
        "all_after": "membar.gl;",
    },
}
#: What a grid barrier cannot do without, and what it becomes.
WEAKENED = {
    "bar.sync 0;": "",
    "membar.gl;": "",
    "fence.acq_rel.gpu;": "",
    "atom.acq_rel": "atom.relaxed",
    "red.release": "red.relaxed",
    "ld.acquire": "ld.relaxed",
}
NOTHING = {"all_before": "", "after": "", "all_after": ""}


@pytest.mark.parametrize("name", RIGHT)
def test_what_is_ordered_is_no_race(machine: Any, name: str) -> None:
    code, *ctas = RIGHT[name]
    run(machine, code.replace("BULK", BULK), ctas=int(ctas[0]) if ctas else 1)


@pytest.mark.parametrize("name", BARRIERS)
def test_a_grid_barrier_orders_all_ctas(machine: Any, name: str) -> None:
    """Each CTA's threads write their words of y; after the barrier they read the next CTA's."""
    code = f"""mad.lo.u32 %n, %cta, 64, %i;
        mul.wide.u32 %wide, %n, 4;
        add.u64 %own, %at, %wide;
        {GRID_BARRIER.format(**{**NOTHING, **BARRIERS[name]})}
        add.u32 %n, %cta, 1;
        rem.u32 %n, %n, 3;
        mad.lo.u32 %n, %n, 64, %i;
        mul.wide.u32 %wide, %n, 4;
        add.u64 %far, %at, %wide;
        ld.global.u32 %w, [%far];"""
    run(machine, code, ctas=3)
    for right, wrong in WEAKENED.items():
        if right in code:
            with pytest.raises(KernelFault, match=r"race: .* of CTA \(\d, 0, 0\) and .*y\+\d+"):
                run(machine, code.replace(right, wrong), ctas=3)


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("st.global.u32 [%at+1028], %v;", "out-of-bounds store, 4 bytes"),
        ("st.global.u32 [%at+1026], %v;", "misaligned store, 4 bytes"),
        ("ld.global.u32 %w, [%at+1032];", "out-of-bounds load, 4 bytes"),
        ("st.shared.u32 [words+1200], %v;", "out-of-bounds store, 4 bytes at shared address"),
        ("st.shared.u32 [words+2], %v;", "misaligned store, 4 bytes at shared address"),
    ],
)
def test_accesses_outside_are_named_as_ever(machine: Any, code: str, message: str) -> None:
    """An allocation of 1030 bytes, and an access that is a fault of its own."""
    y = machine.upload(np.zeros(1030, np.uint8))
    with pytest.raises(KernelFault, match=message + ".*; hint: "):
        machine.execution(HEAD + code, {"y": y}, watch=Sanitizer()).run(alone=True)


def test_a_launch_without_a_watcher_runs_the_plain_translation(machine: Any) -> None:
    y = machine.upload(np.zeros(2048, np.uint32))
    body = HEAD + "st.shared.u32 [%slot], %v; ld.shared.u32 %w, [%other];"
    execution = machine.execution(body, {"y": y}, threads=64)
    assert execution.run(alone=True) is Status.DONE
    assert execution.program._watched is None
    for function in execution.program.whole.values():
        assert not any("watch" in line for line in function.parts)


EXAMPLES = [
    pytest.param(spec, id=f"{kind.name}-{name}")
    for kind in kernels().values()
    for name, spec in kind.examples().items()
]
SECOND = [
    pytest.param([*kind.examples().values()][1], id=kind.name, marks=[pytest.mark.full] * (at % 2))
    for at, kind in enumerate(kernels().values())
    if "sm_75" in smallest_example(kind).targets
]


def check_sanitized(spec: KernelSpec, target: str) -> None:
    with Device.open(f"emulator:{target}", api=emulated(target, sanitize=True)) as device:
        assert all(found.ok for found in check_kernel(device, spec))


@pytest.mark.turns(32)
@pytest.mark.parametrize("spec", EXAMPLES)
def test_no_false_alarm(spec: KernelSpec) -> None:
    """Without the sanitizer, test_kernels.py runs a twelfth of the others."""
    check_sanitized(spec, "sm_90a")


@pytest.mark.parametrize("spec", SECOND)
def test_no_false_alarm_without_asynchronous_copies(spec: KernelSpec) -> None:
    """An example of every kernel on the oldest architecture, of every second one by default."""
    check_sanitized(spec, "sm_75")
