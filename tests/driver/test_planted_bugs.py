"""Kernels and plans with one bug each: every one is found, and called what it is.

Most are our own kernels with one edit of their PTX. They run under the emulator's sanitizer, the
harness compares their outputs; some bugs are found before anything runs.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from urdir.driver.bindings import emulated
from urdir.driver.compare import compare
from urdir.driver.device import Device
from urdir.driver.errors import CudaError, LaunchError, LifetimeError, MismatchError, check
from urdir.driver.execute import record, run
from urdir.driver.graph import Graph
from urdir.driver.harness import check_kernel
from urdir.driver.operation import Launch
from urdir.driver.plan import Plan
from urdir.ptxgen.catalog import kernels
from urdir.ptxgen.kernels.add import Add
from urdir.ptxgen.kernels.linear.products.gemv import Gemv
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.normalise import Normalise
from urdir.ptxgen.spec import Access, LaunchShape, Param, Tolerance
from urdir.ptxgen.tools.lint import lint
from urdir.ptxgen.weights.formats import FORMATS


class Mutant:
    """A kernel whose PTX has been edited: (old, new) texts, each replaced once."""

    def __init__(self, spec: Any, *edits: tuple[str, str], waits: bool = False) -> None:
        self.spec = spec
        self.edits = edits
        self.waits_for_dependencies = waits

    def __getattr__(self, name: str) -> Any:
        return getattr(self.spec, name)

    def key(self, target: str) -> str:
        return f"{self.spec.key(target)}-{self.edits}"

    def ptx(self, target: str) -> str:
        text: str = self.spec.ptx(target)
        for old, new in self.edits:
            assert old in text, f"{self.spec} has no {old!r} any more: plant the bug elsewhere"
            text = text.replace(old, new, 1)
        return text


@functools.cache
def examples(kernel: str) -> Any:
    return kernels()[kernel].examples()


def example(kernel: str, name: str) -> Any:
    return examples(kernel)[name]


def sanitized() -> Device:
    return Device.open("emulator", api=emulated(sanitize=True))


GIVE_BACK = "@%frees mbarrier.arrive.release.cta.shared::cta.b64 _, [%x_before+32];"
PUBLISH = "fence.release.sync_restrict::shared::cta.cluster;"
ARRIVE, WAIT = "barrier.cluster.arrive.relaxed.aligned;", "barrier.cluster.wait.acquire.aligned;"
NORM = Normalise(rows=3, cols=64, norm=Norm("rms", 1e-6))
WIDE_NORM = Normalise(rows=2, cols=257, norm=Norm("rms", 1e-5))

# Name -> kernel, edits, error, what its message says.
BUGS: dict[str, tuple[Any, list[tuple[str, str]], type[Exception], str]] = {
    # ---- missing synchronisation in a CTA ----
    "no barrier in a reduction": (
        WIDE_NORM,
        [("bar.sync 0;", "")],
        CudaError,
        r"kernel normalise: race: PTX line \d+ \(@%first_lane st.shared.f32 .*\) of thread .* and "
        r"PTX line \d+ \(ld.shared.f32 .*\) of thread .* touch shared address .* of partial",
    ),
    "no barrier between warps": (
        example("argmax", "one slice"),
        [("bar.sync 0;", "")],
        CudaError,
        r"race: .*st.shared.u64.* of thread \(32, 0, 0\).*ld.shared.u64.* of bests .*"
        r"hint: put a bar.sync between the two",
    ),
    "no barrier before shared memory is used for something else": (
        example("incremental_attention", "head_dim 80"),
        [("cp.async.wait_all;\n    bar.sync 0;", "cp.async.wait_all;")],
        CudaError,
        r"race: .*cp.async.cg.shared.global.*st.shared.v2.f32.* of scratch",
    ),
    "no barrier between two stages of a matrix product": (
        example("gemm", "BF16"),
        [("bar.sync 0;", "")],
        CudaError,
        r"kernel gemm: race: .*st.shared.*ldmatrix.*of stages",
    ),
    "no barrier before a ring's slot is filled again": (
        example("prefill_attention", "head_dim 64"),
        [("bar.sync 0;\n\n    mov.u32 %tile_key", "mov.u32 %tile_key")],
        CudaError,
        r"race: .*ldmatrix.* and .*cp.async.* of tiles .*bar.sync between",
    ),
    "no barrier after a copy that others read": (
        example("prefill_attention", "head_dim 64"),
        [("bar.sync 0;\n    add.u32 %key, %tile_key", "add.u32 %key, %tile_key")],
        CudaError,
        r"race: .*cp.async.*ldmatrix.*hint: cp.async.wait_group is for the thread that copied",
    ),
    "no wait for cp.async": (
        example("incremental_attention", "head_dim 80"),
        [("cp.async.wait_group 2;", "")],
        CudaError,
        r"ld.shared.v4.b32.*load of bytes whose asynchronous copy has not been waited for.*"
        r"hint: cp.async.wait_group",
    ),
    "a wait for one group too few": (
        example("incremental_attention", "head_dim 80"),
        [("cp.async.wait_group 2;", "cp.async.wait_group 3;")],
        CudaError,
        "load of bytes whose asynchronous copy has not been waited for",
    ),
    "no wait for a tile of weights": (
        example("gemv", "split residual Q3_K"),
        [("cp.async.wait_group 5;", "")],
        CudaError,
        r"kernel gemv: .*\(ld.shared.*load of bytes whose asynchronous copy has not been "
        r"waited for.*hint: cp.async.wait_group",
    ),
    "a wait for a tile too few, in a ring": (
        example("gemv", "split residual Q3_K"),
        [("cp.async.wait_group 5;", "cp.async.wait_group 6;")],
        CudaError,
        r"kernel gemv: .*load of bytes whose asynchronous copy has not been waited for",
    ),
    "no barrier between lanes that copy a tile and those that read it": (
        example("gemv", "split residual Q3_K"),
        [("cp.async.wait_group 5;\n    bar.warp.sync 0xFFFFFFFF;", "cp.async.wait_group 5;")],
        CudaError,
        r"kernel gemv: race: .*cp.async.*ld.shared.*"
        r"hint: cp.async.wait_group is for the thread that copied",
    ),
    "no barrier between lanes that read a tile and those that copy the next to its place": (
        example("gemv", "split residual Q3_K"),
        [("bar.warp.sync 0xFFFFFFFF;\n    mov.u32 %write, %read;", "mov.u32 %write, %read;")],
        CudaError,
        r"kernel gemv: race: .*ld.shared.*cp.async",
    ),
    "no barrier between the lanes that round activations and those that multiply": (
        example("gemv", "split residual Q3_K"),
        [("bar.warp.sync 0xFFFFFFFF;", "")],
        CudaError,
        r"kernel gemv: race: .*st.shared.b32.*ld.shared.v4",
    ),
    "no barrier before the partial sums of all warps meet": (
        example("gemv", "gated norm"),
        [("bar.sync 0;\n    {\n    .reg .b32 %parts", "{\n    .reg .b32 %parts")],
        CudaError,
        r"kernel gemv: race: .*st.shared.f32.*ld.shared.f32",
    ),
    "no barrier before the next pass has sums of its own": (
        example("gemv", "norm, groups and passes"),
        [("bar.sync 0;\n    add.u32 %pass_row", "add.u32 %pass_row")],
        CudaError,
        r"kernel gemv: race: .*ld.shared.f32.*st.shared.f32",
    ),
    "the norm's weights in the next block's place before all lanes have read": (
        example("gemm_small", "norm Q6_K"),
        [("selp.b32 %next_block, %k_warp, %next_block, %over;\n    bar.warp.sync 0xFFFFFFFF;",
          "selp.b32 %next_block, %k_warp, %next_block, %over;")],
        CudaError,
        r"kernel gemm_small: race: .*ld.shared.v4.f32 \{%n0.* and .*cp.async.*%from_norm.*"
        r"hint: order the lanes of a warp by bar.warp.sync",
    ),
    # ---- missing synchronisation in a cluster ----
    "no barrier of the cluster before the others' sums are read": (
        example("gemv", "cluster of 2"),
        [(ARRIVE, ""), (WAIT, "bar.sync 0;")],
        CudaError,
        r"kernel gemv: race: .*\(ld.shared::cluster.f32 .* touches the shared memory of CTA "
        r"\([01], 0, 0\), which may not have begun; hint: barrier.cluster.arrive and",
    ),
    "none in a batch": (
        example("gemm_small", "cluster residual"),
        [(ARRIVE, ""), (WAIT, "bar.sync 0;")],
        CudaError,
        r"kernel gemm_small: race: .*\(ld.shared::cluster.v4.f32 .* touches the shared memory of "
        r"CTA .*, which may not have begun",
    ),
    "a barrier of the cluster that publishes no sums": (
        example("gemv", "cluster of 2"),
        [(PUBLISH, "")],
        CudaError,
        r"kernel gemv: race: .*st.shared.f32.* and .*ld.shared::cluster.f32.* touch shared "
        r"address .*of dynamic_shared",
    ),
    "no barrier before a CTA ends whose sums others read": (
        example("gemv", "cluster of 2"),
        [("barrier.cluster.wait.acquire;", "")],
        CudaError,
        r"kernel gemv: race: .*\(ld.shared::cluster.f32 .* touches the shared memory of CTA "
        r".*, which may have ended before; hint: let it wait with barrier.cluster.arrive",
    ),
    "none at the end of a batch's": (
        example("gemm_small", "cluster residual"),
        [("barrier.cluster.wait.acquire;", "")],
        CudaError,
        r"kernel gemm_small: race: .*\(ld.shared::cluster.* which may have ended before",
    ),
    "no barrier of the cluster before the next pass has sums of its own": (
        example("gemm_small", "cluster of 4 norm in passes"),
        [("barrier.cluster.arrive.release;", ""), ("barrier.cluster.wait.acquire;", "")],
        CudaError,
        r"kernel gemm_small: race: .*ld.shared::cluster.v4.f32.* and .*st.shared.v4.f32.* touch "
        r"shared address .* of CTA .*hint: CTAs of a cluster are ordered by barrier.cluster.arrive",
    ),
    "an end of a CTA that does not wait for what it has read": (
        example("gemm_small", "cluster residual"),
        [("fence.acq_rel.cta;", "")],
        CudaError,
        r"kernel gemm_small: race: .*\(ld.shared::cluster.* which may have ended before",
    ),
    "a wait of the cluster without an arrival": (
        example("gemv", "cluster of 2"),
        [("barrier.cluster.arrive.relaxed;", "")],
        CudaError,
        r"\(barrier.cluster.wait.acquire\): thread \(0, 0, 0\) of CTA .* waits without having "
        r"arrived",
    ),
    # ---- barriers that not all reach ----
    "a barrier in divergent code": (
        example("argmax", "one slice"),
        [("bar.sync 0;", "@%first bra A;\n bar.sync 0;\n bra B;\nA:\n bar.sync 0;\nB:")],
        CudaError,
        r"kernel argmax: barrier 0 in divergent code: PTX line \d+ \(bar.sync 0\) is reached by 31 "
        r"of the 32 threads of a warp, by thread .* but not by thread \(0, 0, 0\)",
    ),
    "threads that leave before a barrier": (
        example("argmax", "one slice"),
        [("bar.sync 0;", "setp.ge.u32 %absent, %thread, 32;\n@%absent bra DONE;\nbar.sync 0;")],
        CudaError,
        r"barrier 0 is not reached by all threads: .*32 of the 256 threads .*\(32, 0, 0\) of CTA "
        r"\(0, 0, 0\) has ended before",
    ),
    "a barrier that counts too many": (
        WIDE_NORM,
        [("bar.sync 0;", "bar.sync 0, 96;")],
        CudaError,
        r"deadlock: 128 threads .* wait at barrier 0, PTX line \d+ \(bar.sync 0, 96\), and no",
    ),
    # ---- memory ----
    "off by one": (
        Add(n=515),
        [("setp.ge.u32 %outside, %group, 128", "setp.gt.u32 %outside, %group, 128")],
        CudaError,
        r"ld.global.v4.f32.*, thread \(0, 0, 0\) of CTA \(1, 0, 0\): out-of-bounds load, 16 bytes.*"
        r"at offset 2048 of the device allocation of 2060 bytes.*hint: is the tail guarded",
    ),
    "a tail that is not guarded": (
        WIDE_NORM,
        [("@%inside ld.global.f32 %v4", "ld.global.f32 %v4")],
        CudaError,
        r"\(ld.global.f32 %v4.* out-of-bounds load, 4 bytes .* 0 bytes behind the end",
    ),
    "a tail's store that is not guarded": (
        Normalise(rows=1, cols=7, norm=Norm("rms", 1e-5)),
        [("@%inside st.global", "st.global")],
        MismatchError,
        r"kernel normalise wrote beside its output y \(1, 7\): at byte 28 of 28",
    ),
    "a tail that is not stored": (
        Add(n=515),
        [("st.global.f32 [%y+8], %y2;", "")],
        MismatchError,
        r"kernel add: y\[514\] is nan.*1 of 515 wrong",
    ),
    "a vector that is not aligned": (
        NORM,
        [("add.u64 %x, %x, %offset;", "add.u64 %x, %x, %offset;\nadd.u64 %x, %x, 4;")],
        CudaError,
        r"\(@%inside ld.global.v4.f32 .*misaligned load, 16 bytes .*hint: an access of n bytes",
    ),
    "a shared vector that is not aligned": (
        example("argmax", "one slice"),
        [("shl.b32 %slot, %slot, 3;", "mul.lo.u32 %slot, %slot, 12;")],
        CudaError,
        r"st.shared.u64.*misaligned store, 8 bytes at shared address 0xc, at offset 12 of bests",
    ),
    "a slot beyond shared memory": (
        example("argmax", "one slice"),
        [("shl.b32 %slot, %slot, 3;", "shl.b32 %slot, %slot, 8;")],
        CudaError,
        r"out-of-bounds store, 8 bytes at shared address 0x100, the CTA has 64 bytes",
    ),
    "shared memory that nobody wrote": (
        WIDE_NORM,
        [("@%first_lane st.shared.f32 [%slot], %scale;", "")],
        CudaError,
        r"ld.shared.f32.*load of never-written bytes.*at offset 0 of partial \(8 bytes\)",
    ),
    # ---- rows and CTAs ----
    "a wrong stride of a batched row": (
        WIDE_NORM,
        [("mad.wide.u32 %offset, %row, 1028", "mad.wide.u32 %offset, %row, 1024")],
        CudaError,
        r"race: .*st.global.f32.* of CTA \(1, 0, 0\) and .* of CTA \(0, 0, 0\) touch global "
        r"address .*, y\+1024, .*hint: CTAs are ordered only by a release",
    ),
    "a wrong stride of an input's row": (
        NORM,
        [("add.u64 %x, %x, %offset;", "mad.wide.s32 %offset, %row, 16, %offset;\n"
          "add.u64 %x, %x, %offset;\nmad.wide.s32 %offset, %row, -16, %offset;")],
        CudaError,
        r"ld.global.v4.f32.* of CTA \(2, 0, 0\): out-of-bounds load, 16 bytes",
    ),
    "row 0's data for all rows": (
        NORM,
        [("add.u64 %x, %x, %offset;", "mul.wide.u32 %offset, %thread, 16;\n"
          "add.u64 %x, %x, %offset;\nmad.wide.u32 %offset, %row, 256, %offset;")],
        MismatchError,
        r"kernel normalise: y\[\d, \d+\] is .*128 of 192 wrong",
    ),
    "row 0's activations for another row of a batch": (
        example("gemv_f32", "batch of 8"),
        [("[%x_from+2048]", "[%x_from+0]")],
        MismatchError,
        r"kernel gemv_f32: y\[1, \d\] is .*5 of 40 wrong",
    ),
    "a tile of other rows": (
        example("gemv", "norm, groups and passes"),
        [("mad.lo.u32 %tile_number, %tile_number, 3, %ahead_block;",
          "mad.lo.u32 %tile_number, %tile_number, 2, %ahead_block;")],
        MismatchError,
        r"kernel gemv: y\[0, \d+\] is .*\d+ of 40 wrong",
    ),
    "tiles beyond the last": (
        Gemv.of(FORMATS["Q4_K"], 5, 512, activations="i16", tiles_each=2, groups=1),
        [("min.u32 %tile_number, %ahead_band, 0;", "mov.u32 %tile_number, %ahead_band;")] * 3,
        CudaError,
        r"\(@%rest_has cp.async.cg.shared.global.*out-of-bounds load, 16 bytes.*"
        r"hint: is the tail guarded",
    ),
    "rows beyond the last": (
        Gemv(FORMATS["Q8_0"], 19, 288, activations="i16"),
        [("or.pred %beyond, %beyond, %outside;", "")],
        MismatchError,
        r"kernel gemv wrote beside its output y \(1, 19\): at byte 76 of 76",
    ),
    "a swizzle that readers do not know": (
        example("gemv", "Q4_K i16"),
        [("xor.b32 %low_copy0, %low_copy0, %digit;", "mov.u32 %low_copy0, %lane;")],
        MismatchError,
        r"kernel gemv: y\[0, \d+\] is .*\d+ of 17 wrong",
    ),
    "a swizzle of the wrong pieces": (
        example("gemv", "Q4_K i16"),
        [("xor.b32 %low_copy1, %low_copy0, 4;", "xor.b32 %low_copy1, %low_copy0, 1;")],
        MismatchError,
        r"kernel gemv: y\[0, \d+\] is .*\d+ of 17 wrong",
    ),
    "activations of one unit in every column": (
        example("gemv", "Q4_K i16"),
        [("setp.eq.u32 %diagonal, %from, %t;", "setp.ge.u32 %diagonal, %from, %t;")],
        MismatchError,
        r"kernel gemv: y\[0, \d+\] is .*17 of 17 wrong",
    ),
    "a rank's sums left out": (
        example("gemv", "cluster of 2"),
        [("    mapa.shared::cluster.u32 %found, %parts, 1;\n    ld.shared::cluster.f32 %other, "
          "[%found+0];\n    add.f32 %sum0, %sum0, %other;\n", "")],
        MismatchError,
        r"kernel gemv: y\[0, \d+\] is .*40 of 40 wrong",
    ),
    "sums of the wrong rank": (
        example("gemv", "cluster of 2"),
        [("mapa.shared::cluster.u32 %found, %parts, 1;",
          "mapa.shared::cluster.u32 %found, %parts, 0;")],
        MismatchError,
        r"kernel gemv: y\[0, \d+\] is .*40 of 40 wrong",
    ),
    "sums of the wrong rank in a batch": (
        example("gemm_small", "cluster residual"),
        [("mapa.shared::cluster.u32 %found, %parts, 1;",
          "mapa.shared::cluster.u32 %found, %parts, 0;")],
        MismatchError,
        r"kernel gemm_small: y\[\d, \d+\] is .*320 of 320 wrong",
    ),
    "squares of the wrong rank": (
        example("gemv", "cluster of 4 norm"),
        [("mapa.shared::cluster.u32 %found, %squares_at, 3;",
          "mapa.shared::cluster.u32 %found, %squares_at, 2;")],
        MismatchError,
        r"kernel gemv: y\[0, \d+\] is .*\d+ of 50 wrong",
    ),
    "a rank beyond the cluster": (
        example("gemv", "cluster of 2"),
        [("mapa.shared::cluster.u32 %found, %parts, 1;",
          "mapa.shared::cluster.u32 %found, %parts, 2;")],
        CudaError,
        r"\(ld.shared::cluster.f32 .*access beyond the cluster of 2 CTAs, .* of the CTA of rank 2",
    ),
    "activations of the wrong rank's columns": (
        example("gemv", "cluster of 2"),
        [("mad.lo.u32 %unit, %warp, 2, %rank;", "mul.lo.u32 %unit, %warp, 2;")],
        MismatchError,
        r"kernel gemv: y\[0, \d+\] is .*40 of 40 wrong",
    ),
    "two ranks that finish the same rows": (
        example("gemm_small", "cluster residual"),
        [("mad.lo.u32 %item, %rank, 32, %item;", "")],
        MismatchError,
        r"kernel gemm_small: y\[\d, \d+\] is nan.*\d+ of 320 wrong",
    ),
    "one part of a shared block's tiles added to the sums of the other": (
        example("gemm_small", "split in 4"),
        [("@!%none mad.lo.u32 %partial_at, %share, 512, %partial_at;", "")],
        MismatchError,
        r"kernel gemm_small: y\[\d, \d+\] is .*\d+ of 200 wrong",
    ),
    "activations of the block that a warp would have if it shared none": (
        example("gemm_small", "split in 4"),
        [("mad.lo.u32 %x_at, %moved, 256, %x_at;", "")],
        CudaError,
        r"kernel gemm_small: .*ld.global.v4.f32",
    ),
    "rows of a CTA of one matrix, counted in those of another": (
        example("gemm_small", "balanced matrices"),
        [("mul.lo.u32 %pass_row, %pass_row, 16;", "mul.lo.u32 %pass_row, %pass_row, 48;")],
        MismatchError,
        r"kernel gemm_small: y\d\[\d, \d+\] is .*wrong",
    ),
    "a summary of half of the rows": (
        example("gemm_small", "summarises"),
        [("shfl.sync.bfly.b32 %other_largest, %largest0, 4, 31, 0xFFFFFFFF;", "")],
        MismatchError,
        r"kernel gemm_small: y_summary\[0, \d, \d+\] is .*\d+ of 30 wrong",
    ),
    "squares of what is scaled": (
        example("gemm_small", "summarises"),
        [("mul.f32 %square0, %sum0, %sum0;", "mul.f32 %square0, %scaled0, %scaled0;")],
        MismatchError,
        r"kernel gemm_small: y_summary\[1, \d, \d+\] is .*\d+ of 30 wrong",
    ),
    "all rows' results in one place": (
        example("argmax", "aligned rows"),
        [("add.u64 %ranks, %ranks, %from;\n    mul.lo", "mul.lo")],
        CudaError,
        r"race: .*\(st.global.u64 \[%ranks\], %rank\) of .* touch global address .*, ranks\+0",
    ),
    # ---- arithmetic ----
    "a register overwritten before its second use, in the online softmax": (
        example("incremental_attention", "head_dim 96 f32"),
        [("sub.rn.f32 %rescale, %max, %top;\n    ex2.approx.ftz.f32 %rescale, %rescale;\n"
          "    mov.f32 %max, %top;",
          "mov.f32 %max, %top;\n    sub.rn.f32 %rescale, %max, %top;\n"
          "    ex2.approx.ftz.f32 %rescale, %rescale;")],
        MismatchError,
        r"kernel incremental_attention: out\[0, 2, \d+\] is .*\d+ of 288 wrong",
    ),
    "the same in a chunk of a split cache": (
        example("flash_decode", "f32 rows"),
        [("mul.rn.f32 %sum, %sum, %rescale;", "")],
        MismatchError,
        r"kernel flash_decode: .*softmax\[\d, \d+, \d, 1\] is ",
    ),
    "a reduction that skips half of the lanes": (
        WIDE_NORM,
        [("shfl.sync.bfly.b32 %other, %scale, 16, 31, 0xFFFFFFFF;",
          "mov.f32 %other, 0f00000000;")],
        MismatchError,
        r"kernel normalise: y\[\d, \d+\] is .*wrong\)",
    ),
    # ---- products of warpgroups ----
    "sums read before they are waited for": (
        example("gemm_wgmma", "smallest"),
        [("wgmma.wait_group.sync.aligned 0;", "")],
        CudaError,
        r"kernel gemm_wgmma: .* (reads|writes) %\w+, (an accumulator of|from which) PTX line \d+ "
        r"\(wgmma.mma_async.* has not been waited for",
    ),
    "no fence before the first product": (
        example("gemm_wgmma", "smallest"),
        [("wgmma.fence.sync.aligned;", "")],
        CudaError,
        r"kernel gemm_wgmma: .*wgmma.mma_async.* no wgmma.fence has come before the first wgmma",
    ),
    "weights written after the fence": (
        example("gemm_wgmma", "smallest"),
        [("wgmma.fence.sync.aligned;", "wgmma.fence.sync.aligned;\n    add.u32 %a2, %a2, 0;")],
        CudaError,
        r"uses %a2, which PTX line \d+ \(add.u32 %a2, %a2, 0\) has written; hint: a wgmma.fence",
    ),
    "a place of activations given back too early": (
        example("gemm_wgmma", "Q4_K"),
        [(f"wgmma.wait_group.sync.aligned 1;\n    {GIVE_BACK}",
          f"{GIVE_BACK}\n    wgmma.wait_group.sync.aligned 1;")] * 4,
        CudaError,
        r"race: .*cp.async.bulk.* writes .* which .*wgmma.mma_async.* may still read; hint: "
        "wgmma.wait_group",
    ),
    "no proxy fence after copies by threads": (
        example("prefill_wgmma", "one tile"),
        [("is for wgmma, too\n    fence.proxy.async.shared::cta;", "is for wgmma, too")],
        CudaError,
        r"kernel prefill_wgmma: .*wgmma.mma_async.* reads .* which .*cp.async.cg.* has written, "
        "with no fence.proxy.async between",
    ),
    "queries not fenced before they are multiplied": (
        example("prefill_wgmma", "bf16"),
        [("fence.proxy.async.shared::cta;", "")],
        CudaError,
        r"kernel prefill_wgmma: .*wgmma.mma_async.* reads .* which .*st.shared.* has written, with "
        "no fence.proxy.async between",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_found_and_named(name: str) -> None:
    spec, edits, error, message = BUGS[name]
    with sanitized() as device, pytest.raises(error, match=message):
        check_kernel(device, Mutant(spec, *edits))


@pytest.mark.slow
def test_the_kernels_are_right_without_the_bugs() -> None:
    for spec in {spec for spec, *_ in BUGS.values()}:
        with sanitized() as device:
            assert all(found.ok for found in check_kernel(device, Mutant(spec)))


@pytest.mark.parametrize(
    ("edit", "rule", "message"),
    [
        (("mov.f32 %best, 0fFF800000;", ""), "read-before-write", "%best"),
        (("bar.sync 0;", "@!%first bra SKIP;\nbar.sync 0;\nSKIP:"), "divergent-barrier", "bar"),
        ((".reg .b32 %lane,", ".reg .b32 %laneid,"), "syntax", "%laneid"),
    ],
)
def test_what_the_lint_finds(edit: tuple[str, str], rule: str, message: str) -> None:
    text = Mutant(example("argmax", "one slice"), edit).ptx("sm_90")
    assert any(f.rule == rule and message in str(f) for f in lint(text)), lint(text)


# ---- a copy that an mbarrier announces ----

STAGE = """\
.version 8.0
.target sm_90
.address_size 64
.visible .entry stage(.param .u64 x, .param .u64 y)
.maxntid 64, 1, 1
{
    .reg .pred %first, %done;
    .reg .b32 %i, %from, %value;
    .reg .b64 %x, %y, %offset;
    .shared .align 16 .b8 words[256];
    .shared .align 8 .b64 full;
    ld.param.u64 %x, [x];
    ld.param.u64 %y, [y];
    mov.u32 %i, %tid.x;
    setp.eq.u32 %first, %i, 0;
    @!%first bra READY;
    mbarrier.init.shared.b64 [full], 1;
    fence.mbarrier_init.release.cluster;
    mbarrier.arrive.expect_tx.shared.b64 _, [full], 256;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [words], [%x], 256, [full];
READY:
    bar.sync 0;
WAIT:
    mbarrier.try_wait.parity.shared.b64 %done, [full], 0;
    @!%done bra WAIT;
    mov.u32 %from, words;
    sub.u32 %i, 63, %i;
    mad.lo.u32 %from, %i, 4, %from;
    sub.u32 %i, 63, %i;
    ld.shared.b32 %value, [%from];
    mul.wide.u32 %offset, %i, 4;
    add.u64 %y, %y, %offset;
    st.global.b32 [%y], %value;
    ret;
}
"""


@dataclass(frozen=True)
class Stage:
    """y is x from the end on, by way of shared memory."""

    name = "stage"
    params = (Param("x", "f32", (64,), Access.IN), Param("y", "f32", (64,), Access.OUT))
    launch_shape = LaunchShape((1, 1, 1), (64, 1, 1))
    tolerance = Tolerance()

    def key(self, target: str) -> str:
        return f"stage-{target}"

    def ptx(self, target: str) -> str:
        return STAGE

    def shape_of(self, param: Param) -> tuple[int, ...]:
        return (64,)

    def nbytes(self, param: Param) -> int:
        return 256

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        return {"x": rng.standard_normal(64).astype(np.float32)}

    def reference(self, **inputs: Any) -> dict[str, Any]:
        return {"y": inputs["x"][::-1].copy()}

    def bytes_moved(self) -> int:
        return 512

    def flops(self) -> int:
        return 0


def test_a_missing_wait_for_an_mbarrier() -> None:
    with sanitized() as device:
        check_kernel(device, Mutant(Stage()))
    no_wait = Mutant(Stage(), ("@!%done bra WAIT;", ""), ("mbarrier.try_wait", "// "))
    message = r"kernel stage: .*ld.shared.b32.*load of bytes whose asynchronous copy has not been"
    with sanitized() as device, pytest.raises(CudaError, match=message):
        check_kernel(device, no_wait)
    one_waits = Mutant(Stage(), ("WAIT:\n", "@!%first bra READ;\nWAIT:\n"),
                       ("@!%done bra WAIT;", "@!%done bra WAIT;\nREAD:"))  # fmt: skip
    message = r"race: .*cp.async.bulk.* of thread \(0, 0, 0\).* and .*ld.shared.b32.* of thread"
    with sanitized() as device, pytest.raises(CudaError, match=message):
        check_kernel(device, one_waits)


def test_a_missing_fence_after_the_first_state_of_an_mbarrier() -> None:
    message = r"cp.async.bulk.* signals .* which .*mbarrier.init.* has written, with no fence.proxy"
    with sanitized() as device, pytest.raises(CudaError, match=message):
        check_kernel(device, Mutant(Stage(), ("fence.mbarrier_init.release.cluster;", "")))


# ---- graphs and the host ----

N = 300


@pytest.fixture
def device() -> Any:
    with sanitized() as opened:
        yield opened


def chain(device: Device, kernel: Any) -> tuple[Any, Plan]:
    """b = a + a, c = b + b."""
    arena = device.arena(dict.fromkeys("abc", 4 * N), "work")
    for piece in arena.values():
        piece.upload(np.ones(N, np.float32))
    plan = Plan("chain")
    plan.launch(kernel, "first", a=arena["a"], b=arena["a"], y=arena["b"])
    plan.launch(kernel, "second", a=arena["b"], b=arena["b"], y=arena["c"])
    return arena, plan


def test_a_kernel_that_does_not_wait_for_the_one_before(device: Device) -> None:
    """It says that it executes griddepcontrol.wait, and gets a programmatic edge for it."""
    arena, plan = chain(device, Add(N))
    with record(plan, device) as recorded, device.create_stream() as stream:
        recorded.launch(stream)
        stream.synchronize()
        assert (arena["c"].download(np.float32, (N,)) == 4).all()
    arena, plan = chain(device, Mutant(Add(N), ("griddepcontrol.wait;", ""), waits=True))
    message = (
        r"race in a graph: node 0 \(kernel add\) and node 1 \(kernel add\) overlap: node 1 has not "
        r"yet executed griddepcontrol.wait, and both touch"
    )
    with record(plan, device) as recorded, device.create_stream() as stream:
        recorded.launch(stream)
        with pytest.raises(CudaError, match=message):
            stream.synchronize()


@pytest.mark.parametrize(
    ("alone", "edit"),
    [
        (False, ("griddepcontrol.wait;", "")),
        (False, ("cp.async.commit_group;", "ld.global.f32 %v0, [%x];\n    cp.async.commit_group;")),
        (True, ("griddepcontrol.wait;", "")),
        (True, ("griddepcontrol.wait;", "ld.global.f32 %v0, [%x];\n    griddepcontrol.wait;")),
    ],
    ids=["no wait", "activations before the wait", "alone: no wait", "alone: before the wait"],
)
def test_a_product_that_does_not_wait_for_its_activations(
    device: Device, alone: bool, edit: tuple[str, str]
) -> None:
    """Its weights may come early, what other kernels write or read may not."""
    cut: dict[str, Any] = {"split": 1, "groups": 2, "tiles_each": 8, "alone": alone}
    spec = Gemv.of(FORMATS["Q8_0"], 256, 256, activations="i16", **cut)
    weights = device.allocate(spec.layout.nbytes, "weights")
    weights.upload(spec.make_inputs(np.random.default_rng(0))["weights"])
    arena = device.arena(dict.fromkeys("abc", 4 * 256), "work")
    for piece in arena.values():
        piece.upload(np.ones(256, np.float32))
    for kernel in (Mutant(spec, waits=True), Mutant(spec, edit, waits=True)):
        plan = Plan("products")
        plan.launch(kernel, "first", weights=weights, x=arena["a"], y=arena["b"])
        plan.launch(kernel, "second", weights=weights, x=arena["b"], y=arena["c"])
        with record(plan, device) as recorded, device.create_stream() as stream:
            recorded.launch(stream)
            if not kernel.edits:
                stream.synchronize()
                continue
            message = (
                r"race in a graph: node 0 \(kernel gemv\) and node 1 \(kernel gemv\) "
                r"overlap: node 1 has not yet executed griddepcontrol.wait, and both touch"
            )
            with pytest.raises(CudaError, match=message):
                stream.synchronize()


def test_a_missing_edge_of_a_graph(device: Device) -> None:
    """Refused when it is made; and found by the emulator, should the refusal be passed by."""
    _, plan = chain(device, Add(N))
    graph = Graph(device, "chain")
    for operation in plan:
        assert isinstance(operation, Launch)
        graph.add(operation, device.load(operation.kernel))
    with pytest.raises(LaunchError, match=r"no path leads.*read after write"):
        graph.instantiate()
    api = device.api
    executable = check(api, api.cuGraphInstantiate(graph.handle, 0), "instantiate")
    with device.create_stream() as stream:
        api.cuGraphLaunch(executable, stream.handle)
        message = r"node 0 \(kernel add\) and node 1 \(kernel add\) are not ordered by edges"
        with pytest.raises(CudaError, match=message):
            stream.synchronize()


def test_a_host_read_before_the_synchronisation(device: Device) -> None:
    """The emulator works as late as it may: what the host reads early is what was there before."""
    arena, plan = chain(device, Add(N))
    pinned = device.pinned(4 * N, "result")
    result = pinned.view(np.float32, N)
    result[:] = np.nan
    expected = {"y": np.full(N, 4, np.float32)}
    with device.create_stream() as stream:
        run(plan, device, stream)
        arena["c"].download_async(pinned, 4 * N, 0, stream)
        with pytest.raises(MismatchError, match=r"kernel add: y\[0\] is nan.*300 of 300 wrong"):
            compare(Add(N), {"y": result.copy()}, expected)
        stream.synchronize()
        compare(Add(N), {"y": result}, expected)


def test_a_buffer_freed_while_a_graph_needs_it(device: Device) -> None:
    """Refused by name; below the library, the emulator names the freed allocation."""
    buffers = {name: device.allocate(4 * N, name) for name in "xy"}
    buffers["x"].upload(np.ones(N, np.float32))
    plan = Plan("held")
    plan.launch(Add(N), "sum", a=buffers["x"], b=buffers["x"], y=buffers["y"])
    with record(plan, device) as recorded, device.create_stream() as stream:
        with pytest.raises(LifetimeError, match=r"buffer 'x'.*held by"):
            buffers["x"].close()
        check(device.api, device.api.cuMemFree(buffers["x"].address), "cuMemFree")
        recorded.launch(stream)
        with pytest.raises(CudaError, match=r"out-of-bounds load.*of the freed device allocation"):
            stream.synchronize()
