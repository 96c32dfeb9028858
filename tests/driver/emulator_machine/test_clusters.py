"""Thread block clusters: numbers, distributed shared memory, the barrier of a cluster."""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import pytest

from urdir.driver.emulator.machine.faults import CompileError, KernelFault

Extent = tuple[int, int, int]

# %i: the thread's number in its CTA, %rank: that of the CTA, %flat: the CTA's in the grid (x
# fastest), %slot: the thread's word of `words`, %to: its word of the output.
HEAD = """
    .reg .b32 %i, %rank, %size, %flat, %slot, %far, %peer, %v, %w, %n, %x, %y, %a<4>;
    .reg .f32 %f;
    .reg .b64 %to, %step, %at;
    .reg .pred %p, %q;
    .shared .align 16 .b8 words[4096];
    mov.u32 %i, %tid.x;
    mov.u32 %rank, %cluster_ctarank;
    mov.u32 %size, %cluster_nctarank;
    mov.u32 %flat, %ctaid.z;
    mov.u32 %x, %nctaid.y;
    mov.u32 %y, %ctaid.y;
    mad.lo.u32 %flat, %flat, %x, %y;
    mov.u32 %x, %nctaid.x;
    mov.u32 %y, %ctaid.x;
    mad.lo.u32 %flat, %flat, %x, %y;
    mov.u32 %x, words;
    mad.lo.u32 %slot, %i, 4, %x;
    mov.u32 %x, %ntid.x;
    mad.lo.u32 %v, %flat, %x, %i;
    ld.param.u64 %to, [out];
    mul.wide.u32 %step, %v, 4;
    add.u64 %to, %to, %step;
"""
SYNC = "barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;\n"
#: %peer: the next rank, the last one's is the first.
NEXT = "add.u32 %peer, %rank, 1;\nrem.u32 %peer, %peer, %size;\n"
STORE = "st.global.u32 [%to], %w;\n"


def lines(code: str) -> str:
    """One statement a line."""
    return HEAD + "\n".join(line.strip() for line in code.strip().splitlines())


def run(
    machine: Any, code: str, grid: Extent, cluster: Extent, threads: int = 32, **options: Any
) -> Any:
    """The output, one row a CTA (x fastest)."""
    count = prod(grid) * threads
    out = machine.upload(np.zeros(count, np.uint32))
    machine.run(
        lines(code), {"out": out}, ctas=grid, threads=threads, cluster=cluster, **options
    )  # fmt: skip
    return machine.download(out, np.uint32, count).reshape(-1, threads)


def ranks(grid: Extent, cluster: Extent) -> tuple[Any, Any]:
    """Of each CTA of the grid, x fastest: the number of its cluster, and its rank."""
    z, y, x = np.indices(grid[::-1]).reshape(3, -1)
    cx, cy, cz = cluster
    across, down = grid[0] // cx, grid[1] // cy
    which = x // cx + across * (y // cy + down * (z // cz))
    return which, x % cx + cx * (y % cy + cy * (z % cz))


SHAPES = [
    ((6, 1, 1), (2, 1, 1), 33),
    ((12, 1, 1), (4, 1, 1), 96),
    ((24, 1, 1), (8, 1, 1), 17),
    ((3, 4, 2), (1, 2, 2), 45),
    ((4, 6, 2), (2, 2, 1), 64),
    ((5, 1, 1), (1, 1, 1), 32),
]


@pytest.mark.parametrize(("grid", "cluster", "threads"), SHAPES)
@pytest.mark.parametrize("sm_count", [1, 4])
def test_exchange(machine: Any, grid: Extent, cluster: Extent, threads: int, sm_count: int) -> None:
    """Every thread takes the word of its neighbour in the next CTA of its cluster."""
    code = f"""mad.lo.u32 %v, %v, 7, 3;
        st.shared.u32 [%slot], %v;
        {SYNC}
        {NEXT}
        mapa.shared::cluster.u32 %far, %slot, %peer;
        ld.shared::cluster.u32 %w, [%far];
        {SYNC}
        {STORE}"""
    got = run(machine, code, grid, cluster, threads, sm_count=sm_count)
    which, rank = ranks(grid, cluster)
    cta_of = {(int(c), int(r)): k for k, (c, r) in enumerate(zip(which, rank, strict=True))}
    values = np.arange(got.size, dtype=np.uint32).reshape(got.shape) * 7 + 3
    peer = [cta_of[int(c), int(r + 1) % prod(cluster)] for c, r in zip(which, rank, strict=True)]
    assert np.array_equal(got, values[peer])


#: Shared memory of which an SM holds two CTAs, or one: few CTAs make a wave.
HALF, WHOLE = 100 << 10, 200 << 10


@pytest.mark.parametrize(
    ("grid", "cluster", "sm_count", "shared_bytes"),
    [
        ((24, 1, 1), (2, 1, 1), 3, HALF),  # waves of six CTAs
        ((24, 1, 1), (4, 1, 1), 3, HALF),  # six fit, but only one cluster of four
        ((16, 1, 1), (8, 1, 1), 2, WHOLE),  # a cluster that does not fit
        ((6, 4, 1), (2, 4, 1), 1, WHOLE),
    ],
)
def test_more_clusters_than_a_wave_holds(
    machine: Any, grid: Extent, cluster: Extent, sm_count: int, shared_bytes: int
) -> None:
    """The sum over a cluster of what each of its CTAs has written."""
    code = f"""st.shared.u32 [%slot], %v;
        {SYNC}
        mov.u32 %w, 0;
        mov.u32 %peer, 0;
        NEXT:
        mapa.shared::cluster.u32 %far, %slot, %peer;
        ld.shared::cluster.u32 %n, [%far];
        add.u32 %w, %w, %n;
        add.u32 %peer, %peer, 1;
        setp.lt.u32 %p, %peer, %size;
        @%p bra NEXT;
        {SYNC}
        {STORE}"""
    got = run(machine, code, grid, cluster, 40, sm_count=sm_count, shared_bytes=shared_bytes)
    which, _ = ranks(grid, cluster)
    values = np.arange(got.size, dtype=np.uint32).reshape(got.shape)
    want = np.array([values[which == c].sum(axis=0) for c in which])
    assert np.array_equal(got, want)


@pytest.mark.parametrize(("grid", "cluster", "threads"), SHAPES[:5])
def test_numbers(machine: Any, grid: Extent, cluster: Extent, threads: int) -> None:
    """Special registers of a cluster, thread k of a CTA having the k-th of them."""
    registers = [f"%{name}.{axis}" for name in ("clusterid", "nclusterid", "cluster_ctaid",
                 "cluster_nctaid") for axis in "xyz"]  # fmt: skip
    registers += ["%cluster_ctarank", "%cluster_nctarank"]
    code = "mov.u32 %w, 0;\n"
    for k, register in enumerate(registers):
        code += f"setp.eq.u32 %p, %i, {k};\nmov.u32 %n, {register};\n@%p mov.u32 %w, %n;\n"
    got = run(machine, code + STORE, grid, cluster, threads)
    z, y, x = np.indices(grid[::-1]).reshape(3, -1)
    for row, at in zip(got, zip(x, y, z, strict=True), strict=True):
        want = [n // c for n, c in zip(at, cluster, strict=True)]
        want += [n // c for n, c in zip(grid, cluster, strict=True)]
        inside = [n % c for n, c in zip(at, cluster, strict=True)]
        want += [*inside, *cluster]
        want += [inside[0] + cluster[0] * (inside[1] + cluster[1] * inside[2]), prod(cluster)]
        assert row[: len(want)].tolist() == want


@pytest.mark.parametrize(
    ("load", "store", "width"),
    [
        ("ld.shared::cluster.u32 %a0, [%far]", "st.shared::cluster.u32 [%far], %a0", 4),
        ("ld.shared::cluster.f32 %f, [%far]", "st.shared::cluster.f32 [%far], %f", 4),
        ("ld.shared::cluster.v2.b32 {%a0, %a1}, [%far]",
         "st.shared::cluster.v2.b32 [%far], {%a0, %a1}", 8),
        ("ld.volatile.shared::cluster.v4.b32 {%a0, %a1, %a2, %a3}, [%far]",
         "st.weak.shared::cluster.v4.b32 [%far], {%a0, %a1, %a2, %a3}", 16),
        ("ld.acquire.cluster.shared::cluster.b32 %a0, [%far]",
         "st.release.cluster.shared::cluster.b32 [%far], %a0", 4),
    ],
)  # fmt: skip
@pytest.mark.parametrize("guard", ["", "@%q "])
def test_widths(machine: Any, load: str, store: str, width: int, guard: str) -> None:
    """Each CTA copies one vector a thread from the next CTA to the one after that."""
    code = f"""mad.lo.u32 %v, %v, 40503, 9;
        {
        "".join(
            f'''add.u32 %w, %v, {k};
        st.shared.u32 [%slot+{k * 128}], %w;
        '''
            for k in range(4)
        )
    }
        mul.lo.u32 %x, %i, {width};
        mov.u32 %n, words;
        add.u32 %slot, %n, %x;
        setp.lt.u32 %q, %i, 13;
        {SYNC}
        {NEXT}
        mapa.shared::cluster.u32 %far, %slot, %peer;
        {guard}{load};
        {NEXT.replace("%rank", "%peer")}
        mapa.shared::cluster.u32 %far, words, %peer;
        add.u32 %far, %far, 2048;
        add.u32 %far, %far, %x;
        {guard}{store};
        {SYNC}
        mov.u32 %w, 0;
        {guard}ld.shared.u32 %w, [%slot+2048];
        {STORE}"""
    got = run(machine, code, (10, 1, 1), (5, 1, 1))
    base = np.arange(got.size, dtype=np.uint32).reshape(got.shape) * 40503 + 9
    words = np.concatenate([base + k for k in range(4)], axis=1)
    cta = np.arange(10)
    # The one before the one before wrote here what it had read from the one before.
    source = cta // 5 * 5 + (cta % 5 - 1) % 5
    want = words[source][:, np.arange(32) * width // 4]
    assert np.array_equal(got, np.where(np.arange(32) < 13, want, 0) if guard else want)


def test_plain_addresses_mean_the_own_cta(machine: Any) -> None:
    code = f"""st.shared::cluster.u32 [%slot], %v;
        mapa.shared::cluster.u32 %far, %slot, %rank;
        ld.shared::cluster.u32 %n, [%far];
        ld.shared.u32 %w, [%slot];
        add.u32 %w, %w, %n;
        ld.shared::cluster.u32 %n, [words+4];
        add.u32 %w, %w, %n;
        {STORE}"""
    got = run(machine, code, (6, 1, 1), (3, 1, 1))
    values = np.arange(6 * 32, dtype=np.uint32).reshape(6, 32)
    assert np.array_equal(got, 2 * values + values[:, 1:2])


def test_lanes_with_different_peers(machine: Any) -> None:
    """A warp whose lanes read from all CTAs of the cluster in one instruction."""
    code = f"""st.shared.u32 [%slot], %v;
        rem.u32 %peer, %i, %size;
        {SYNC}
        mapa.shared::cluster.u32 %far, %slot, %peer;
        ld.shared::cluster.u32 %w, [%far];
        {SYNC}
        {STORE}"""
    got = run(machine, code, (16, 1, 1), (8, 1, 1), 50)
    cta, i = np.indices(got.shape)
    assert np.array_equal(got, (cta // 8 * 8 + i % 8) * 50 + i)


def test_atomics(machine: Any) -> None:
    """All threads of the cluster count in the CTA of rank 0."""
    code = f"""st.shared.u32 [%slot], 0;
        {SYNC}
        mov.u32 %peer, 0;
        mapa.shared::cluster.u32 %far, words, %peer;
        red.shared::cluster.add.u32 [%far], 2;
        atom.relaxed.cluster.shared::cluster.add.u32 %w, [%far], 1;
        {SYNC}
        ld.shared::cluster.u32 %w, [%far];
        {SYNC}
        {STORE}"""
    got = run(machine, code, (8, 1, 1), (4, 1, 1), 33)
    assert (got == 4 * 33 * 3).all()


# ---- the barrier ----


def test_arrive_does_not_wait(machine: Any) -> None:
    """Rank 0 goes on after it has arrived: the others only arrive once it has set a flag."""
    code = f"""sub.u64 %at, %to, %step;
        setp.eq.u32 %p, %rank, 0;
        st.shared.u32 [%slot], 0;
        {SYNC}
        mov.u32 %peer, 0;
        mapa.shared::cluster.u32 %far, %slot, %peer;
        @!%p bra POLL;
        barrier.cluster.arrive;
        st.release.cluster.shared::cluster.u32 [%far], 5;
        bra JOIN;
        POLL:
        ld.acquire.cluster.shared::cluster.u32 %w, [%far];
        setp.eq.u32 %q, %w, 0;
        @%q bra POLL;
        barrier.cluster.arrive;
        JOIN:
        barrier.cluster.wait;
        ld.shared.u32 %n, [%slot];
        add.u32 %w, %rank, %n;
        {STORE}"""
    got = run(machine, code, (6, 1, 1), (3, 1, 1), 70)
    assert got.tolist() == [[5] * 70, [1] * 70, [2] * 70] * 2


def test_threads_that_have_ended_are_not_awaited(machine: Any) -> None:
    """Warps end before the barrier, one after its arrival; a whole CTA ends too."""
    code = f"""shr.u32 %x, %i, 5;
        setp.eq.u32 %p, %x, 0;
        @%p ret;
        setp.eq.u32 %p, %rank, 2;
        @%p ret;
        barrier.cluster.arrive;
        setp.eq.u32 %p, %x, 1;
        @%p ret;
        barrier.cluster.wait;
        {SYNC}
        mov.u32 %w, 7;
        {STORE}"""
    got = run(machine, code, (4, 1, 1), (4, 1, 1), 96)
    want = np.zeros((4, 96), np.uint32)
    want[[0, 1, 3], 64:] = 7
    assert np.array_equal(got, want)


def test_clusters_do_not_wait_for_each_other(machine: Any) -> None:
    """The second cluster waits for the barrier of the first, which it learns of by a flag."""
    code = f"""mov.u32 %x, %clusterid.x;
        setp.eq.u32 %p, %x, 0;
        sub.u64 %at, %to, %step;
        @%p bra FIRST;
        POLL:
        ld.acquire.gpu.global.u32 %w, [%at];
        setp.eq.u32 %q, %w, 0;
        @%q bra POLL;
        {SYNC}
        bra END;
        FIRST:
        {SYNC}
        mov.u32 %w, 9;
        st.release.gpu.global.u32 [%at], 9;
        END:
        {STORE}"""
    assert (run(machine, code, (4, 1, 1), (2, 1, 1)) == 9).all()


def test_a_cluster_of_one(machine: Any) -> None:
    """Without a cluster in the launch each CTA is one."""
    code = f"""st.shared.u32 [%slot], %v;
        {SYNC}
        mapa.shared::cluster.u32 %far, %slot, %rank;
        ld.shared::cluster.u32 %w, [%far];
        add.u32 %w, %w, %size;
        {STORE}"""
    got = run(machine, code, (3, 1, 1), (1, 1, 1), 48)
    assert np.array_equal(got.ravel(), np.arange(3 * 48) + 1)


# ---- faults ----

FAULTS = {
    "rank": (
        f"""st.shared.u32 [%slot], %v;
        {SYNC}
        mapa.shared::cluster.u32 %far, %slot, 2;
        ld.shared::cluster.u32 %w, [%far];""",
        r"PTX line \d+ \(ld.shared::cluster.u32 %w, \[%far\]\), thread \(0, 0, 0\) of CTA "
        r"\(0, 0, 0\): access beyond the cluster of 2 CTAs, shared::cluster address 0x3000000, of "
        r"the CTA of rank 2; hint: is the kernel launched with the cluster",
    ),
    "rank of one lane": (
        f"""st.shared.u32 [%slot], %v;
        setp.gt.u32 %p, %i, 20;
        mov.u32 %peer, 1;
        @%p mov.u32 %peer, 0xFFFFFFFF;
        {SYNC}
        mapa.shared::cluster.u32 %far, %slot, %peer;
        setp.gt.u32 %q, %i, 25;
        @%q st.shared::cluster.u32 [%far], %w;""",
        r"thread \(26, 0, 0\).*beyond the cluster",
    ),
    "no rank at all": (
        "ld.shared::cluster.u32 %w, [words+0x7F000000];",
        "beyond the cluster of 2 CTAs, shared::cluster address 0x7f000000",
    ),
    "bounds": (
        """mapa.shared::cluster.u32 %far, %slot, 1;
        st.shared::cluster.u32 [%far+4000], %v;""",
        r"thread \(24, 0, 0\) of CTA \(0, 0, 0\): out-of-bounds store, 4 bytes at shared address "
        r"0x1000, the CTA has 4096 bytes of shared memory, of the CTA of rank 1; hint",
    ),
    "before the beginning": (
        """mapa.shared::cluster.u32 %far, words, 1;
        st.shared::cluster.u32 [%far+-4], %v;""",
        "out-of-bounds store, 4 bytes at shared address 0xfffffc, .*of rank 0",
    ),
    "alignment": (
        """mapa.shared::cluster.u32 %far, %slot, 1;
        st.shared::cluster.v2.u32 [%far], {%v, %v};""",
        r"thread \(1, 0, 0\) .*misaligned store, 8 bytes at shared address 0x4, at offset 4 of "
        "words .*, of the CTA of rank 1",
    ),
    "never written": (
        f"""setp.eq.u32 %p, %rank, 0;
        @%p st.shared.u32 [%slot], %v;
        {SYNC}
        mapa.shared::cluster.u32 %far, %slot, 1;
        ld.shared::cluster.u32 %w, [%far];""",
        "load of never-written bytes, 4 bytes .*, of the CTA of rank 1; hint: ",
    ),
    "atomic": (
        """mapa.shared::cluster.u32 %far, %slot, 1;
        red.shared::cluster.add.u32 [%far], 1;""",
        "load of never-written bytes, .*, of the CTA of rank 1",
    ),
    "a peer that has ended": (
        f"""st.shared.u32 [%slot], %v;
        setp.eq.u32 %p, %rank, 1;
        {SYNC}
        @%p ret;
        mapa.shared::cluster.u32 %far, %slot, 1;
        ld.shared::cluster.u32 %w, [%far];""",
        r"of CTA \(0, 0, 0\): access to a CTA that has ended, shared::cluster address 0x2000000, "
        "of the CTA of rank 1; hint: barrier.cluster.arrive and barrier.cluster.wait at the end",
    ),
    "a window of the cluster is none of the CTA": (
        """mapa.shared::cluster.u32 %far, %slot, %rank;
        st.shared.u32 [%far], %v;""",
        "out-of-bounds store, 4 bytes at shared address 0x1000000",
    ),
    "arrives twice": (
        "barrier.cluster.arrive;\nbarrier.cluster.arrive;",
        r"PTX line \d+ \(barrier.cluster.arrive\): thread \(0, 0, 0\) of CTA \(0, 0, 0\) arrives "
        "again before it has waited; hint: barrier.cluster.arrive and .* must alternate",
    ),
    "waits without arriving": (
        """barrier.cluster.arrive;
        barrier.cluster.wait;
        setp.gt.u32 %p, %i, 9;
        @%p barrier.cluster.arrive;
        barrier.cluster.wait;""",
        r"\(barrier.cluster.wait\): thread \(0, 0, 0\) of CTA \(0, 0, 0\) waits without",
    ),
    "a CTA that does not come": (
        """st.shared.u32 [%slot], 0;
        setp.eq.u32 %p, %rank, 1;
        @%p bra POLL;
        barrier.cluster.arrive;
        barrier.cluster.wait;
        ret;
        POLL:
        ld.volatile.shared.u32 %w, [%slot];
        setp.eq.u32 %q, %w, 0;
        @%q bra POLL;
        barrier.cluster.arrive;""",
        r"deadlock: 64 threads spin at .*; 64 threads \(thread \(0, 0, 0\) of CTA \(0, 0, 0\), "
        r"...\) wait at the barrier of the cluster, PTX line \d+ \(barrier.cluster.wait\)",
    ),
    "a thread that does not come": (
        """setp.eq.u32 %p, %i, 40;
        @%p bar.sync 1, 64;
        barrier.cluster.arrive;
        barrier.cluster.wait;""",
        r"deadlock: .*wait at barrier 1.*wait at the barrier of the cluster",
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_named(machine: Any, name: str) -> None:
    code, message = FAULTS[name]
    with pytest.raises(KernelFault, match=message) as found:
        run(machine, code, (2, 1, 1), (2, 1, 1), 64)
    codes = {"deadlock": "TIMEOUT", "out-of-": "ILLEGAL", "load of": "ILLEGAL", "misalig": "MISAL"}
    want = next((code for start, code in codes.items() if start in found.value.message), "FAILED")
    assert want in found.value.code


@pytest.mark.parametrize(
    ("code", "target", "version", "message"),
    [
        ("barrier.cluster.arrive;", "sm_89", "8.0", "needs .target sm_90 or higher"),
        ("mapa.shared::cluster.u32 %far, %slot, 0;", "sm_89", "8.0", "sm_90 or higher"),
        ("ld.shared::cluster.u32 %w, [%slot];", "sm_89", "8.0", "sm_90 or higher"),
        ("barrier.cluster.wait.acquire;", "sm_90", "7.8", "needs PTX ISA .version 8.0 or later"),
        ("barrier.cluster.arrive.acquire;", "sm_90", "8.0", "has no form|unknown instruction"),
        ("barrier.cluster.wait 1;", "sm_90", "8.0", "wrong number of operands: 1"),
        ("mapa.shared::cluster.u16 %far, %slot, 0;", "sm_90", "8.0", "mapa has no form"),
    ],
)
def test_who_has_clusters(machine: Any, code: str, target: str, version: str, message: str) -> None:
    machine.target, machine.version = target, version
    body = lines(code).replace("%cluster_ctarank", "0").replace("%cluster_nctarank", "1")
    with pytest.raises(CompileError, match=message):
        machine.compile(body, ["out"])
