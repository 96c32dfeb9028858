"""Bulk copies, st.async and mbarriers within a cluster, on the emulator and on a GPU."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from urdir.driver.device import Device
from urdir.driver.harness import run_kernel
from urdir.ptxgen.spec import Access, LaunchShape, Param

CTAS, THREADS = 4, 64
HEAD = """\
.version 8.1
.target sm_90
.address_size 64
.visible .entry moves(.param .u64 x, .param .u64 y)
{
    .shared .align 128 .b8 tile[1024];
    .shared .align 128 .b8 other[1024];
    .shared .align 8 .b64 full;
    .shared .align 8 .b64 empty;
    .reg .b32 %i, %rank, %next, %own, %far, %far_bar, %v, %w, %t, %tile, %other, %full, %empty;
    .reg .b64 %x, %y, %from, %to, %step;
    .reg .pred %first, %done;
    mov.u32 %i, %tid.x;
    mov.u32 %rank, %cluster_ctarank;
    mov.u32 %tile, tile;
    mov.u32 %other, other;
    mov.u32 %full, full;
    mov.u32 %empty, empty;
    add.u32 %next, %rank, 1;
    and.b32 %next, %next, 3;
    ld.param.u64 %x, [x];
    ld.param.u64 %y, [y];
    mad.wide.u32 %from, %rank, 256, %x;
    mad.wide.u32 %to, %rank, 256, %y;
    mad.lo.u32 %own, %i, 4, %tile;
    setp.eq.u32 %first, %i, 0;
    @!%first bra READY;
    mbarrier.init.shared::cta.b64 [full], ARRIVALS;
    mbarrier.init.shared::cta.b64 [empty], 1;
    fence.mbarrier_init.release.cluster;
READY:
    barrier.cluster.arrive.relaxed.aligned;
    barrier.cluster.wait.acquire.aligned;
"""
WAIT = """\
WAIT:
    mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 %done, [full], 0;
    @!%done bra WAIT;
"""
# Word i of the tile to y; nobody's shared memory goes before the others have done.
TAIL = """\
    ld.shared.u32 %v, [%own];
    mad.wide.u32 %to, %i, 4, %to;
    st.global.u32 [%to], %v;
    barrier.cluster.arrive.release.aligned;
    barrier.cluster.wait.acquire.aligned;
    ret;
}
"""
LOAD = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"

MOVES = {
    # Each CTA copies a quarter of its words to all: word i comes from CTA i / 16.
    "multicast": ("""\
    @!%first bra WAIT;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [full], 256;
    mad.wide.u32 %from, %rank, 64, %from;
    mad.lo.u32 %t, %rank, 64, %tile;
    mov.b32 %w, 15;
    {
    .reg .b16 %mask;
    cvt.u16.u32 %mask, %w;
    LOAD.multicast::cluster [%t], [%from], 64, [full], %mask;
    }
""" + WAIT + TAIL, 1, lambda x: np.tile(np.concatenate([x[c, 16 * c : 16 * c + 16]
                                                        for c in range(CTAS)]), (CTAS, 1))),
    # Only to CTAs 1 and 3, from CTA 2 alone; the others keep what their own copy brings.
    "multicast to some": ("""\
    @!%first bra WAIT;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [full], 256;
    and.b32 %t, %rank, 1;
    setp.eq.u32 %done, %t, 0;
    @!%done bra SOME;
    LOAD [%tile], [%from], 256, [full];
SOME:
    setp.eq.u32 %done, %rank, 2;
    @!%done bra WAIT;
    LOAD.multicast::cluster [%tile], [%from], 256, [full], 10;
""" + WAIT + TAIL, 1, lambda x: x[[0, 2, 2, 2]]),
    # A CTA copies into the next one's shared memory.
    "a copy to another CTA": ("""\
    @!%first bra WAIT;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [full], 256;
    mapa.shared::cluster.u32 %far, %tile, %next;
    mapa.shared::cluster.u32 %far_bar, %full, %next;
    LOAD [%far], [%from], 256, [%far_bar];
""" + WAIT + TAIL, 1, lambda x: np.roll(x, 1, 0)),
    # From shared to shared memory, after the words are there.
    "a copy between CTAs": ("""\
    mad.wide.u32 %from, %i, 4, %from;
    ld.global.u32 %v, [%from];
    mad.lo.u32 %t, %i, 4, %other;
    st.shared.u32 [%t], %v;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @!%first bra WAIT;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [full], 256;
    mapa.shared::cluster.u32 %far, %tile, %next;
    mapa.shared::cluster.u32 %far_bar, %full, %next;
    cp.async.bulk.shared::cluster.shared::cta.mbarrier::complete_tx::bytes [%far], [%other], 256,
        [%far_bar];
""" + WAIT + TAIL, 1, lambda x: np.roll(x, 1, 0)),
    # Every thread stores into the next CTA; of four words each.
    "st.async": ("""\
    @!%first bra STORE;
    mbarrier.arrive.expect_tx.shared::cta.b64 _, [full], 1024;
STORE:
    mad.wide.u32 %from, %i, 4, %from;
    ld.global.u32 %v, [%from];
    mad.lo.u32 %t, %i, 16, %tile;
    mapa.shared::cluster.u32 %far, %t, %next;
    mapa.shared::cluster.u32 %far_bar, %full, %next;
    add.u32 %w, %v, 1;
    st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 [%far], {%v, %w, %v, %w},
        [%far_bar];
""" + WAIT + TAIL, 1, lambda x: np.roll(x, 1, 0)[:, :16].repeat(4, 1) + np.tile([0, 1], 32)),
    # All threads of the CTA before arrive at this one's mbarrier, after they have written here.
    "arrivals from another CTA": ("""\
    mad.wide.u32 %from, %i, 4, %from;
    ld.global.u32 %v, [%from];
    mapa.shared::cluster.u32 %far, %own, %next;
    mapa.shared::cluster.u32 %far_bar, %full, %next;
    st.shared::cluster.u32 [%far], %v;
    mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%far_bar];
""" + WAIT + TAIL, THREADS, lambda x: np.roll(x, 1, 0)),
    # From shared to global memory; the tile is used again when it has been read.
    "a copy to global memory": ("""\
    mad.wide.u32 %from, %i, 4, %from;
    ld.global.u32 %v, [%from];
    add.u32 %v, %v, 5;
    st.shared.u32 [%own], %v;
    fence.proxy.async.shared::cta;
    bar.sync 0;
    @!%first bra STORED;
    cp.async.bulk.global.shared::cta.bulk_group [%to], [%tile], 256;
    cp.async.bulk.commit_group;
    cp.async.bulk.wait_group.read 0;
STORED:
    bar.sync 0;
    mov.b32 %v, 7;
    st.shared.u32 [%own], %v;
    ret;
}
""", 1, lambda x: x + np.uint32(5)),
}  # fmt: skip


@pytest.mark.parametrize("move", MOVES)
def test_moves(device: Device, make_kernel: Callable[..., Any], move: str) -> None:
    if device.properties.max_cluster == 1:
        pytest.skip("clusters came with sm_90")
    check(device, make_kernel, move)


@pytest.mark.parametrize("move", MOVES)
def test_the_sanitizer_agrees(
    urdir_sanitizer: Device, make_kernel: Callable[..., Any], move: str
) -> None:
    check(urdir_sanitizer, make_kernel, move)


def check(device: Device, make_kernel: Callable[..., Any], move: str) -> None:
    body, arrivals, expected = MOVES[move]
    text = (HEAD + body).replace("ARRIVALS", str(arrivals)).replace("LOAD", LOAD)
    made = make_kernel(
        text=text, name="moves", spec_key=f"moves-{zlib.crc32(text.encode()):x}",
        params=(Param("x", "u32", (CTAS, THREADS), Access.IN),
                Param("y", "u32", (CTAS, THREADS), Access.OUT)),
        launch_shape=LaunchShape((CTAS, 1, 1), (THREADS, 1, 1), (CTAS, 1, 1)),
    )  # fmt: skip
    x = np.random.default_rng(3).integers(0, 1 << 30, (CTAS, THREADS)).astype(np.uint32)
    got = run_kernel(device, made, {"x": x})["y"]
    np.testing.assert_array_equal(got, expected(x))
