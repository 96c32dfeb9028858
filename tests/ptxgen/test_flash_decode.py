"""Flash decoding: rows split among CTAs and merged, against incremental attention."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from urdir.driver import explain
from urdir.driver.compare import compare
from urdir.driver.device import Device
from urdir.driver.harness import run_kernel
from urdir.driver.launch import launch, pack
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.chunk_reference import chunks_of
from urdir.ptxgen.kernels.attention.flash_decode import FlashDecode
from urdir.ptxgen.kernels.attention.incremental_attention import IncrementalAttention
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.random_inputs import attention_inputs
from urdir.ptxgen.kernels.attention.reference import attend
from urdir.ptxgen.kernels.attention.scores import Scores
from urdir.ptxgen.tools.assemble import assemble

Inputs = dict[str, Any]


def flash_decode(device: Device, spec: FlashDecode, inputs: Inputs) -> Any:
    return run_kernel(device, spec, inputs)["out"]


def incremental(device: Device, spec: FlashDecode, inputs: Inputs) -> Any:
    whole = IncrementalAttention(spec.heads, spec.layout, spec.rows, spec.scores)
    given = {p.name: inputs[p.name] for p in whole.params if p.name in inputs}
    return run_kernel(device, whole, given)["out"]


def assert_close(spec: FlashDecode, out: Any, wanted: Any) -> None:
    np.testing.assert_allclose(
        out, wanted, rtol=0, atol=2 * spec.tolerance.rtol * np.abs(wanted).max()
    )


# Rows of 100 keys are four chunks, of 32 keys or, dealt out, of at most 32; a window of 50.
LAYOUT = KvLayout(1, 2, 200, 64, "f16")
BORDERS = (0, 1, 30, 31, 32, 33, 49, 50, 51, 63, 64, 65, 81, 82, 95, 96, 97, 98, 99, 127, 128, 199)
SPECS = {
    "plain": FlashDecode(4, LAYOUT, ctas=4, least=32),
    "dealt": FlashDecode(4, LAYOUT, ctas=3, least=16, most=32),
    "window": FlashDecode(4, LAYOUT, scores=Scores(window=50), ctas=4, least=16),
    "window dealt": FlashDecode(4, LAYOUT, scores=Scores(window=33), ctas=1, least=16, most=16),
    "softcap": FlashDecode(4, LAYOUT, scores=Scores(softcap=20.0), ctas=7, least=16),
    "cluster": FlashDecode(4, LAYOUT, cluster=8, ctas=1, least=16),
    "clusters": FlashDecode(4, LAYOUT, cluster=2, ctas=3, least=16, most=16),
    "cluster window": FlashDecode(4, LAYOUT, scores=Scores(window=33), cluster=2, ctas=1, least=16),
}


@pytest.mark.turns(8, which=(3, 4, 6, 7))  # with what the others have
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_it_equals_incremental_at_every_border(emulator: Device, spec: FlashDecode) -> None:
    """Within tolerance, at lengths around every border of a chunk and a window."""
    count = len(BORDERS)
    rows = dataclasses.replace(spec, rows=count, ctas=spec.ctas * (1 if spec.most else count))
    inputs = attention_inputs(rows, np.random.default_rng(0), list(BORDERS), [0] * count)
    out = flash_decode(emulator, rows, inputs)
    assert_close(spec, out, incremental(emulator, rows, inputs))
    assert_close(spec, out, attend(rows, inputs))


@pytest.mark.parametrize("position", [0, 31, 32, 99])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0"])
def test_types_and_positions(device: Device, position: int, dtype: Any) -> None:
    """One row at a time, with only its own keys there; on the GPU too."""
    spec = FlashDecode(3, KvLayout(2, 1, 100, 128, dtype), ctas=4, least=16)
    inputs = attention_inputs(spec, np.random.default_rng(position), [position], [1])
    compare(spec, run_kernel(device, spec, inputs), spec.reference(**inputs))


@pytest.mark.parametrize(
    "fields",
    [
        {"ctas": 12},
        {"ctas": 5, "most": 32},
        {"ctas": 3, "cluster": 4},
        {"ctas": 2, "cluster": 2, "most": 16},
    ],
)
def test_other_rows_do_not_change_a_bit(device: Device, fields: dict[str, int]) -> None:
    """Long ones, short ones and idle ones: what a CTA gets beside the row's chunks differs."""
    layout = dataclasses.replace(LAYOUT, sequences=3)
    spec = FlashDecode(4, layout, rows=3, least=16, **fields)
    inputs = attention_inputs(spec, np.random.default_rng(1), [199, 120, 199], [0, 1, 2])
    outs = []
    for others in (199, 3, 200):
        inputs["position"][[0, 2]] = others
        outs.append(flash_decode(device, spec, inputs)[1])
    assert all(out.tobytes() == outs[0].tobytes() for out in outs)


@pytest.mark.parametrize("name", ["dealt", "cluster", "clusters"])
def test_idle_rows_are_zero(device: Device, name: str) -> None:
    spec = dataclasses.replace(SPECS[name], rows=4)
    inputs = attention_inputs(spec, np.random.default_rng(2), [99, 200, 100, 2**32 - 1], [0] * 4)
    out = flash_decode(device, spec, inputs)
    assert np.isfinite(out[[0, 2]]).all()
    assert not out[[1, 3]].any()


@pytest.mark.parametrize(
    ("rows", "ctas", "least", "most", "keys", "chunk", "chunks"),
    [
        (1, 33, 32, 0, 1, 32, 1),
        (1, 33, 32, 0, 33, 32, 2),
        (1, 33, 32, 0, 1056, 32, 33),
        (1, 33, 32, 0, 1057, 48, 23),
        (1, 33, 32, 0, 32768, 1008, 33),
        (8, 33, 32, 1024, 8192, 2048, 4),
        (8, 33, 32, 1024, 8193, 688, 12),
        (8, 33, 32, 1024, 32768, 1024, 32),
        (8, 33, 32, 1024, 128, 32, 4),
        (40, 33, 32, 2048, 128, 128, 1),
        (40, 33, 32, 2048, 4096, 4096, 1),
        (40, 33, 32, 2048, 4097, 1376, 3),
    ],
)
def test_chunks(
    rows: int, ctas: int, least: int, most: int, keys: int, chunk: int, chunks: int
) -> None:
    layout = KvLayout(rows, 8, 1 << 15, 128, "f16")
    spec = FlashDecode(32, layout, rows, ctas=ctas, least=least, most=most)
    assert (spec.split.cut.size(keys), spec.split.cut.count(keys)) == (chunk, chunks)
    assert max(map(spec.split.cut.count, range(1, (1 << 15) + 1))) <= spec.split.chunks
    assert spec.split.takers == min(ctas, rows * spec.split.chunks)


def test_chunks_of_clusters() -> None:
    """They have as many times the keys as there are CTAs."""
    spec = FlashDecode(4, LAYOUT, cluster=4, ctas=2, least=16, most=16)
    chunks = {1: 64, 64: 64, 65: 64, 128: 64, 129: 80, 199: 112}
    assert {keys: spec.split.cut.size(keys) for keys in chunks} == chunks
    assert spec.launch_shape.grid == (2, 8, 1)
    whole = dataclasses.replace(spec, ctas=1, most=0)
    assert whole.split.cut.size(200) == 208
    assert not {"partial", "softmax", "arrived"} & {p.name for p in whole.params}


def test_chunks_are_all_of_a_rows_keys() -> None:
    for scores in (Scores(), Scores(window=50), Scores(chunk=64), Scores(chunk=64, window=17)):
        for most in (0, 32):
            spec = FlashDecode(4, LAYOUT, scores=scores, ctas=3, least=16, most=most)
            for position in range(200):
                keys = [key for chunk in chunks_of(spec, spec.split.cut, position) for key in chunk]
                seen = list(range(scores.first_key(position), position + 1))
                assert keys == seen or (not keys and len(seen) <= spec.split.cut.size(len(seen)))


@pytest.mark.parametrize("capacity", [8, 16])
def test_rings_as_short_as_a_tile_of_keys(device: Device, capacity: int) -> None:
    layout = KvLayout(2, 2, 64, 64, "f16", capacity=capacity)
    spec = FlashDecode(4, layout, rows=2, scores=Scores(window=capacity - 1), ctas=2, least=16)
    inputs = attention_inputs(spec, np.random.default_rng(7), [capacity + 5, 50], [0, 1])
    assert_close(spec, flash_decode(device, spec, inputs), attend(spec, inputs))


def test_huge_and_tiny_chunks_merge(device: Device) -> None:
    """One chunk's scores are far above the others', wherever it stands."""
    layout = KvLayout(1, 1, 160, 64, "f32")
    spec = FlashDecode(2, layout, ctas=10, least=16)
    for chunk in (0, 4, 9):
        inputs = attention_inputs(spec, np.random.default_rng(3), [159], [0])
        inputs["q"][:] = 100.0
        inputs["k_cache"][:] = -100.0
        inputs["k_cache"][0, 0, 16 * chunk + 5] = 100.0
        out = flash_decode(device, spec, inputs)[0]
        np.testing.assert_allclose(out[0], inputs["v_cache"][0, 0, 16 * chunk + 5], rtol=1e-6)


@pytest.mark.parametrize("factor", [0.0, 1e-30, 1e30])
def test_quants_meet_queries_of_any_size(device: Device, factor: float) -> None:
    """They are integers times scales there: none is too large or too small."""
    spec = FlashDecode(4, KvLayout(1, 1, 100, 128, "q8_0"), ctas=2, least=16)
    inputs = attention_inputs(spec, np.random.default_rng(8), [90], [0])
    inputs["q"] *= np.float32(factor)
    assert_close(spec, flash_decode(device, spec, inputs), attend(spec, inputs))


def test_a_launch_leaves_room_for_the_next(device: Device) -> None:
    """The same buffers again and again, with a row of another length each time."""
    layout = dataclasses.replace(LAYOUT, sequences=2)
    spec = FlashDecode(4, layout, rows=2, ctas=8, least=16)
    kept: Inputs = {}
    for positions in ([199, 20], [30, 199], [15, 64], [199, 199]):
        inputs = attention_inputs(spec, np.random.default_rng(positions[0]), positions, [0, 1])
        outputs = run_kernel(device, spec, inputs | kept)
        assert_close(spec, outputs["out"], attend(spec, inputs))
        kept = {name: outputs[name] for name in ("partial", "softmax", "arrived")}
        assert not kept["arrived"].any()


PAGED = (
    FlashDecode(4, KvLayout(3, 2, 96, 64, "f16", 16, 20), rows=3, ctas=12, least=16),
    FlashDecode(
        2,
        KvLayout(3, 1, 96, 96, "q8_0", 16, 13),
        rows=3,
        scores=Scores(window=40),
        ctas=4,
        least=16,
        most=16,
    ),
    FlashDecode(3, KvLayout(2, 1, 64, 128, "bf16", 32, 3), rows=3, ctas=4, least=16, most=32),
)


@pytest.mark.slow
@pytest.mark.parametrize("spec", PAGED)
@settings(max_examples=3, deadline=None, derandomize=True)
@given(data=st.data())
def test_paged_equals_contiguous(spec: FlashDecode, data: st.DataObject) -> None:
    """Bit for bit, for any table and any lengths; and within tolerance of incremental."""
    paged = spec.layout
    lengths = st.one_of(st.integers(0, paged.max_len - 1), st.just(paged.max_len))
    positions = data.draw(st.lists(lengths, min_size=3, max_size=3))
    of = st.integers(0, paged.sequences - 1)
    sequences = data.draw(st.lists(of, min_size=3, max_size=3))
    entries = paged.sequences * paged.blocks
    pages_of = st.lists(st.integers(0, paged.pages - 1), min_size=entries, max_size=entries)
    table = np.array(data.draw(pages_of), np.uint32).reshape(paged.sequences, -1)
    inputs = attention_inputs(spec, np.random.default_rng(4), positions, sequences, table)

    layout = dataclasses.replace(paged, page_len=0, pages=0)
    twin = dataclasses.replace(spec, layout=layout)
    contiguous = dict(inputs)
    del contiguous["block_table"]
    for name in ("k_cache", "v_cache"):
        contiguous[name] = as_contiguous(paged, layout, inputs[name], table)
    with Device.open("emulator") as emulator:
        out = flash_decode(emulator, spec, inputs)
        assert flash_decode(emulator, twin, contiguous).tobytes() == out.tobytes()
        assert_close(spec, out, incremental(emulator, spec, inputs))


def as_contiguous(paged: KvLayout, layout: KvLayout, cache: Any, table: Any) -> Any:
    """The same tokens in a contiguous cache, not rounded again."""
    copy = layout.empty()
    parts = ("elements", "scales") if layout.dtype == "q8_0" else ("elements",)
    tokens = range(layout.max_len)
    for s in range(layout.sequences):
        to, origin = layout.slots_of(s, tokens), paged.slots_of(s, tokens, table)
        for part in parts:
            getattr(layout, part)(copy)[to] = getattr(paged, part)(cache)[origin]
    return copy


@pytest.mark.parametrize("target", ["sm_75", "sm_90"])
@pytest.mark.parametrize("dtype", ["f16", "q8_0"])
def test_nothing_that_was_never_written_is_read(target: str, dtype: Any) -> None:
    """The emulator faults at such a read: keys outside the window and the position, their table
    entries, sums of chunks that a row has not, idle rows."""
    layout = KvLayout(2, 2, 128, 64, dtype, 16, 9)
    scores = Scores(window=40)
    spec = FlashDecode(4, layout, rows=2, scores=scores, ctas=3, least=16, most=16)
    inputs = attention_inputs(spec, np.random.default_rng(5), [70, 128], [0, 1])
    table, seen = inputs["block_table"], np.arange(31, 71)
    slots = np.unique(layout.slots_of(0, seen, table))
    with Device.open(f"emulator:{target}") as emulator, emulator.create_stream() as stream:
        args: dict[str, Any] = {
            p.name: emulator.allocate(spec.nbytes(p), p.name) for p in spec.params
        }
        args["q"].upload(inputs["q"][0])
        for name in ("sequence", "position", "arrived"):
            args[name].upload(inputs[name])
        args["block_table"].upload(table[0, 1:5], 4)
        for name in ("k_cache", "v_cache"):
            for slot in slots.tolist():
                row = layout.elements(inputs[name])[slot]
                args[name].upload(row, slot * layout.row_nbytes)
                if dtype == "q8_0":
                    offset = layout.scales_offset + slot * layout.scale_row_nbytes
                    args[name].upload(layout.scales(inputs[name])[slot], offset)
        launch(emulator.load(spec), pack(spec, args), stream)
        stream.synchronize()
        out = args["out"].download(np.float32, (2, 4, 64))
    assert_close(spec, out, attend(spec, inputs))


@pytest.mark.parametrize(
    ("dtype", "head_dim", "value_dim", "ring"),
    [
        ("f16", 128, 128, 0),
        ("f16", 64, 64, 0),
        ("bf16", 192, 128, 0),
        ("f16", 80, 80, 0),
        ("q8_0", 128, 128, 0),
        ("q8_0", 128, 128, 68 << 10),
        ("f16", 512, 512, 112 << 10),
    ],
)
def test_whole_rows_are_copied_and_no_bank_is_met_twice(
    dtype: Any, head_dim: int, value_dim: int, ring: int
) -> None:
    """Copies of 64 bytes of each row took a third more time at 4,096 keys on an H200."""
    layout = KvLayout(1, 1, 64, head_dim, dtype, value_dim=value_dim)
    seen = explain(FlashDecode(4, layout, ring=ring), "sm_90")
    copies = [row for row in seen.global_memory if "cp.async.cg" in row.text]
    loads = [row for row in seen.shared_memory if re.search(r"cp\.async|%raw|%fragment", row.text)]
    assert copies
    assert loads
    assert not any(row.excess for row in (*copies, *loads))


@pytest.mark.turns(5)
@pytest.mark.parametrize("target", ["sm_75", "sm_89", "sm_90", "sm_120"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0"])
@pytest.mark.parametrize("is_paged", [False, True])
def test_no_spills(target: str, dtype: Any, is_paged: bool) -> None:
    """And from sm_90 on, two CTAs fit an SM."""
    pages = (64, 99) if is_paged else (0, 0)
    layout = KvLayout(64, 8, 1 << 17, 128, dtype, *pages)
    scores = Scores(window=1 << 14, softcap=30.0)
    spec = FlashDecode(56, layout, rows=8, scores=scores, ctas=16, least=32, most=1024)
    cost = assemble(spec.ptx(target), target).entries["flash_decode"]
    assert not cost.spills
    if int(target[3:]) >= 90:
        assert cost.registers <= 128


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"least": 24}, "chunks of 24 to 0 keys: multiples of 16"),
        ({"most": 40}, "chunks of 64 to 40 keys: multiples"),
        ({"most": 32}, "at least 64 and at most 32"),
        ({"ctas": 0}, "0 CTAs"),
        ({"ring": 1 << 14}, "a ring of 16384 bytes: 0, or at least 49152"),
        ({"cluster": 3}, "clusters of 3 CTAs: 1, 2, 4 or 8"),
        ({"heads": 3}, "3 query heads"),
    ],
)
def test_shapes_it_does_not_handle_are_refused(fields: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"heads": 4, "layout": LAYOUT}
    with pytest.raises(PtxgenError, match=message):
        FlashDecode(**good | fields)
