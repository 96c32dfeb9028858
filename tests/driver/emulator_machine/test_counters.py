"""Counts of sectors, wavefronts, lanes and barriers, against what the access patterns imply."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from urdir.driver import explain
from urdir.driver.emulator.machine.counters import Counters
from urdir.driver.emulator.machine.execution import Status
from urdir.driver.harness import run_kernel
from urdir.ptxgen.catalog import kernels
from urdir.ptxgen.kernels.add import Add
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.normalise import Normalise
from urdir.ptxgen.spec import KernelSpec, smallest_example

HEAD = """
.reg .b32 %i, %v<4>, %slot, %base;
.reg .b64 %at, %wide;
.reg .pred %p;
.shared .align 16 .b8 words[16384];
mov.u32 %i, %tid.x;
mov.u32 %base, words;
ld.param.u64 %at, [x];
mov.u32 %v0, 0;
mov.u32 %v1, 0;
mov.u32 %v2, 0;
mov.u32 %v3, 0;
"""


def count(machine: Any, code: str, threads: int = 32, ctas: int = 1) -> Counters:
    x = machine.upload(np.zeros(1 << 14, np.uint8))
    counters = Counters()
    execution = machine.execution(HEAD + code, {"x": x}, ctas=ctas, threads=threads, watch=counters)
    assert execution.run(alone=True) is Status.DONE
    return counters


def only(counters: Counters, kind: str) -> tuple[int, int, int, int]:
    """(requests, lanes, parts, fewest) of the one line of a kind."""
    (found,) = (c for c in counters.accesses.values() if c.kind == kind)
    return found.requests, found.lanes, found.parts, found.fewest


@pytest.mark.parametrize(
    ("stride", "offset", "load", "parts", "fewest"),
    [
        (4, 0, "ld.global.u32 %v0", 4, 4),  # side by side: 128 bytes
        (4, 4, "ld.global.u32 %v0", 5, 4),  # one word further on
        (8, 0, "ld.global.u32 %v0", 8, 4),
        (32, 0, "ld.global.u32 %v0", 32, 4),
        (128, 0, "ld.global.u32 %v0", 32, 4),
        (0, 0, "ld.global.u32 %v0", 1, 1),  # all of one word
        (1, 0, "ld.global.u8 %v0", 1, 1),
        (16, 0, "ld.global.v4.u32 {%v0, %v1, %v2, %v3}", 16, 16),
        (32, 0, "ld.global.v4.u32 {%v0, %v1, %v2, %v3}", 32, 16),
    ],
)
def test_sectors_of_a_load(
    machine: Any, stride: int, offset: int, load: str, parts: int, fewest: int
) -> None:
    code = f"mul.wide.u32 %wide, %i, {stride};\nadd.u64 %at, %at, %wide;\n{load}, [%at+{offset}];"
    found = count(machine, code, threads=64, ctas=3)
    # The second warp begins 32 strides further on, at a sector's start as the first does.
    assert only(found, "global load") == (6, 192, 6 * parts, 6 * fewest)


@pytest.mark.parametrize(
    ("stride", "store", "parts", "fewest"),
    [
        (4, "st.shared.u32 [%slot], %v0;", 1, 1),
        (8, "st.shared.u32 [%slot], %v0;", 2, 1),  # two words a bank
        (12, "st.shared.u32 [%slot], %v0;", 1, 1),  # an odd stride meets every bank
        (128, "st.shared.u32 [%slot], %v0;", 32, 1),
        (132, "st.shared.u32 [%slot], %v0;", 1, 1),
        (0, "st.shared.u32 [%slot], %v0;", 1, 1),  # one word is no conflict
        (2, "st.shared.u16 [%slot], %v0;", 1, 1),  # two lanes a word
        (8, "st.shared.v2.u32 [%slot], {%v0, %v1};", 2, 2),
        (16, "st.shared.v4.u32 [%slot], {%v0, %v1, %v2, %v3};", 4, 4),
        (32, "st.shared.v4.u32 [%slot], {%v0, %v1, %v2, %v3};", 8, 4),
    ],
)
def test_wavefronts_of_a_store(
    machine: Any, stride: int, store: str, parts: int, fewest: int
) -> None:
    code = f".reg .b16 %h;\nmad.lo.u32 %slot, %i, {stride}, %base;\n{store}"
    assert only(count(machine, code), "shared store") == (1, 32, parts, fewest)


def test_guarded_lanes_do_not_count(machine: Any) -> None:
    code = (
        "setp.lt.u32 %p, %i, 40;\nmul.wide.u32 %wide, %i, 4;\nadd.u64 %at, %at, %wide;\n"
        "@%p st.global.u32 [%at], %v0;"
    )
    assert only(count(machine, code, threads=96), "global store") == (2, 40, 5, 5)


def test_ldmatrix_is_a_wavefront_a_matrix_where_rows_do_not_collide(machine: Any) -> None:
    for stride, each in ((16, 1), (128, 8), (144, 1)):
        code = (
            f"mad.lo.u32 %slot, %i, {stride}, %base;\n"
            "st.shared.v4.u32 [%slot], {%v0, %v1, %v2, %v3};\n"
            "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%v0, %v1, %v2, %v3}, [%slot];"
        )
        assert only(count(machine, code), "shared load") == (1, 32, 4 * each, 4)


def test_divergence_and_barriers(machine: Any) -> None:
    """Of each warp one lane takes the branch; all meet at the barrier, twice."""
    code = (
        "and.b32 %v0, %i, 31;\nsetp.ne.u32 %p, %v0, 0;\n@%p bra PASS;\nadd.u32 %v1, %v1, 1;\n"
        "add.u32 %v1, %v1, 2;\nPASS:\nbar.sync 0;\nbar.sync 0;"
    )
    found = count(machine, code, threads=64, ctas=3)
    assert sorted(found.barriers.values()) == [6, 6]
    (partial,) = (b for b in found.blocks.values() if b.lanes < 32 * b.warps)
    assert (partial.warps, partial.lanes, partial.instructions) == (6, 6, 2)
    assert "add.u32 %v1, %v1, 1" in found.texts[partial.line]


def test_explain_a_norm() -> None:
    """Two rows of 257 columns: the second begins in the middle of a sector."""
    found = explain(Normalise(rows=2, cols=257, norm=Norm("rms", 1e-5)))
    assert (found.kernel, found.target, found.grid, found.block) == (
        "normalise", "sm_90a", (2, 1, 1), (64, 1, 1),
    )  # fmt: skip
    first, *others = found.global_memory
    assert (first.kind, first.requests, first.lanes, first.parts, first.fewest) == (
        "global load", 4, 128, 18, 16,
    )  # fmt: skip
    assert all(first.excess >= row.excess for row in others)
    assert [row.parts for row in found.shared_memory] == [4, 4, 4]
    assert [(row.text, row.warps, row.per_cta) for row in found.barriers] == [("bar.sync 0", 4, 1)]
    assert found.divergence == ()
    assert found.active == 32


@pytest.mark.slow
def test_explain_says_the_same_every_time() -> None:
    spec = kernels()["flash_decode"].examples()["f32 rows"]
    assert explain(spec).as_dict() == explain(spec).as_dict()
    assert explain(spec, "sm_75").as_dict() != explain(spec, "sm_80").as_dict()


def test_counting_does_not_change_what_is_computed() -> None:
    from urdir.driver.bindings import emulated
    from urdir.driver.device import Device

    spec: KernelSpec = Add(515)
    inputs = spec.make_inputs(np.random.default_rng(1))
    api = emulated(watch=lambda name: Counters())
    with Device.open("emulator") as plain, Device.open("emulator", api=api) as watched:
        wanted, found = (run_kernel(device, spec, inputs)["y"] for device in (plain, watched))
    assert np.array_equal(wanted, found)
    assert found.size == 515


SMALLEST = [
    pytest.param(smallest_example(kind), id=name, marks=[pytest.mark.full] * (at % 2))
    for at, (name, kind) in enumerate(kernels().items())
]


@pytest.mark.parametrize("spec", SMALLEST)
def test_every_kernel_can_be_explained(spec: KernelSpec) -> None:
    found = explain(spec)
    assert found.warp_instructions > 0
    assert 0 < found.active <= 32
    assert found.global_memory
    for row in (*found.global_memory, *found.shared_memory):
        assert row.text, row
        assert 1 <= row.fewest <= row.parts, row
        assert row.requests <= row.lanes <= 32 * row.requests, row


def test_a_bulk_copy_is_a_request_of_one_lane(machine: Any) -> None:
    """Two lanes copy 336 bytes each: to rows of 128 bytes, from the middle of a sector."""
    code = """
    .reg .b32 %i, %to; .reg .b64 %x; .reg .pred %p;
    .shared .align 128 .b8 tile[1024]; .shared .align 8 .b64 full;
    mov.u32 %i, %tid.x; ld.param.u64 %x, [x]; mov.u32 %to, tile;
    mad.lo.u32 %to, %i, 512, %to;
    setp.ge.u32 %p, %i, 2;
    mbarrier.init.shared.b64 [full], 1;
    @%p bra END;
    cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%to], [%x+16], 336, [full];
    END: ret;"""
    counters = Counters()
    x = machine.upload(np.zeros(512, "u1"))
    machine.execution(code, {"x": x}, watch=counters).run(alone=True)
    found = {row.kind: row for row in counters.accesses.values() if row.lanes == 2}
    assert found.keys() == {"global load", "shared copy"}
    for kind, parts, fewest in (("global load", 11, 11), ("shared copy", 3, 3)):
        row = found[kind]
        assert (row.requests, row.parts, row.fewest) == (2, 2 * parts, 2 * fewest)
