"""Flash decoding: chunks and their merging, against incremental attention."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from urdir.driver.compare import compare
from urdir.driver.device import Device
from urdir.driver.harness import run_kernel
from urdir.driver.launch import launch, pack
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.flash_decode import FlashDecodeChunk
from urdir.ptxgen.kernels.attention.flash_decode_reduce import MAX_CHUNKS, FlashDecodeReduce
from urdir.ptxgen.kernels.attention.incremental_attention import IncrementalAttention
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.scores import Scores
from urdir.ptxgen.tools.assemble import assemble

Inputs = dict[str, Any]


def flash_decode(device: Device, spec: FlashDecodeChunk, inputs: Inputs) -> Any:
    """Both kernels; partial sums that no chunk writes are NaN."""
    partial = np.full_like(inputs["partial"], np.nan)
    parts = run_kernel(device, spec, inputs | {"partial": partial})
    return run_kernel(device, spec.reduce, parts)["out"]


def incremental(spec: FlashDecodeChunk) -> IncrementalAttention:
    return IncrementalAttention(spec.heads, spec.layout, spec.rows, spec.scores)


def assert_close(spec: FlashDecodeChunk, out: Any, wanted: Any) -> None:
    np.testing.assert_allclose(out, wanted, rtol=0, atol=2 * spec.rtol * np.abs(wanted).max())


# Chunks of 32 keys; a bucket of 100 keys ends within the fourth chunk; a window of 50.
LAYOUT = KvLayout(1, 2, 200, 64, "f16")
BORDERS = (0, 1, 30, 31, 32, 33, 49, 50, 51, 63, 64, 65, 81, 82, 95, 96, 97, 98, 99)
SPECS = {
    "plain": FlashDecodeChunk(4, LAYOUT, max_keys=100, chunk=32),
    "window": FlashDecodeChunk(4, LAYOUT, scores=Scores(window=50), max_keys=100, chunk=32),
    "window of chunks": FlashDecodeChunk(
        4, LAYOUT, scores=Scores(window=33), max_keys=100, chunk=32
    ),
    "softcap": FlashDecodeChunk(4, LAYOUT, scores=Scores(softcap=20.0), max_keys=100, chunk=32),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_it_equals_incremental_at_every_border(emulator: Device, spec: FlashDecodeChunk) -> None:
    """Within tolerance, at lengths around every chunk, bucket and window border."""
    rows = dataclasses.replace(spec, rows=len(BORDERS))
    inputs = rows.inputs_at(np.random.default_rng(0), list(BORDERS), [0] * len(BORDERS))
    out = flash_decode(emulator, rows, inputs)
    others = {name: value for name, value in inputs.items() if name != "partial"}
    assert_close(spec, out, run_kernel(emulator, incremental(rows), others)["out"])
    assert_close(spec, out, rows.attend(inputs))


@pytest.mark.parametrize("position", [0, 31, 32, 99])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0"])
def test_types_and_positions(device: Device, position: int, dtype: Any) -> None:
    """One row at a time, with only its own keys there; on the GPU too."""
    layout = KvLayout(2, 1, 100, 128, dtype)
    spec = FlashDecodeChunk(3, layout, chunk=32)
    inputs = spec.inputs_at(np.random.default_rng(position), [position], [1])
    compare(spec, run_kernel(device, spec, inputs), spec.reference(**inputs))
    assert_close(spec, flash_decode(device, spec, inputs), spec.attend(inputs))


def test_the_bucket_does_not_change_a_bit(device: Device) -> None:
    specs = [dataclasses.replace(SPECS["plain"], max_keys=keys) for keys in (60, 64, 100, 200)]
    inputs = specs[0].inputs_at(np.random.default_rng(1), [59], [0])
    outs = []
    for spec in specs:
        partial = np.zeros(spec.shape_of(spec.param("partial")), np.float32)
        outs.append(flash_decode(device, spec, inputs | {"partial": partial}))
    assert all(out.tobytes() == outs[0].tobytes() for out in outs)


def test_idle_rows_are_zero_and_rows_beyond_the_bucket_nan(device: Device) -> None:
    spec = dataclasses.replace(SPECS["plain"], rows=4)
    inputs = spec.inputs_at(np.random.default_rng(2), [99, 200, 100, 2**32 - 1], [0] * 4)
    inputs["q"][[1, 3]] = np.nan
    out = flash_decode(device, spec, inputs)
    assert np.isfinite(out[0]).all()
    assert not out[[1, 3]].any()
    assert np.isnan(out[2]).all()


def test_a_windowed_row_launches_only_the_chunks_it_touches() -> None:
    def chunks(window: int) -> int:
        return FlashDecodeChunk(
            4, KvLayout(1, 2, 4096, 64, "f16"), scores=Scores(window=window), chunk=32
        ).chunks

    counts = [chunks(window) for window in (1, 2, 33, 34, 65, 66, 5000)]
    assert counts == [1, 2, 2, 3, 3, 4, 128]
    for window in (1, 2, 33, 34):
        spec = FlashDecodeChunk(
            4, KvLayout(1, 2, 200, 64, "f16"), scores=Scores(window=window), chunk=32
        )
        for position in range(200):
            keys = [k for i in range(spec.chunks) for k in spec.chunk_keys(position, i)]
            assert keys == list(range(max(0, position - window + 1), position + 1))


def test_huge_and_tiny_chunks_merge(device: Device) -> None:
    """One chunk's scores are far above another's, wherever it stands; some are empty."""
    spec = FlashDecodeReduce(heads=2, head_dim=64, chunks=21)
    inputs = spec.make_inputs(np.random.default_rng(3))
    inputs["softmax"][0, :, :, 0] = -1e6
    inputs["softmax"][0, :, 17, 0] = 1e6
    inputs["softmax"][0, :, ::5] = (-np.inf, 0)
    inputs["partial"][:] = np.nan_to_num(inputs["partial"], nan=1.0)
    inputs["partial"][0, :, ::5] = np.nan
    out = run_kernel(device, spec, inputs)
    winner = inputs["partial"][0, :, 17] / inputs["softmax"][0, :, 17, 1:]
    np.testing.assert_allclose(out["out"][0], winner, rtol=1e-6)


PAGED = (
    FlashDecodeChunk(4, KvLayout(3, 2, 96, 64, "f16", 16, 20), rows=3, chunk=32),
    FlashDecodeChunk(
        2, KvLayout(3, 1, 96, 96, "q8_0", 16, 13), rows=3, scores=Scores(window=40), chunk=16
    ),
    FlashDecodeChunk(3, KvLayout(2, 1, 64, 128, "bf16", 32, 3), rows=3, max_keys=50, chunk=16),
)


@pytest.mark.slow
@pytest.mark.parametrize("spec", PAGED)
@settings(max_examples=5, deadline=None, derandomize=True)
@given(data=st.data())
def test_paged_equals_contiguous_and_rows_equal_single_rows(
    spec: FlashDecodeChunk, data: st.DataObject
) -> None:
    """Bit for bit, for any table and any lengths; and within tolerance of incremental."""
    paged = spec.layout
    lengths = st.one_of(st.integers(0, spec.keys - 1), st.just(paged.max_len))
    positions = data.draw(st.lists(lengths, min_size=3, max_size=3))
    of = st.integers(0, paged.sequences - 1)
    sequences = data.draw(st.lists(of, min_size=3, max_size=3))
    entries = paged.sequences * paged.blocks
    pages_of = st.lists(st.integers(0, paged.pages - 1), min_size=entries, max_size=entries)
    table = np.array(data.draw(pages_of), np.uint32).reshape(paged.sequences, -1)
    inputs = spec.inputs_at(np.random.default_rng(4), positions, sequences, table)

    layout = dataclasses.replace(paged, page_len=0, pages=0)
    twin = dataclasses.replace(spec, layout=layout)
    single = dataclasses.replace(twin, rows=1)
    contiguous = dict(inputs)
    del contiguous["block_table"]
    for name in ("k_cache", "v_cache"):
        contiguous[name] = as_contiguous(paged, layout, inputs[name], table)
    with Device.open("emulator") as emulator:
        out = flash_decode(emulator, spec, inputs)
        assert flash_decode(emulator, twin, contiguous).tobytes() == out.tobytes()
        for row in range(spec.rows):
            names = ("q", "sequence", "position", "partial")
            alone = contiguous | {name: contiguous[name][row : row + 1] for name in names}
            assert flash_decode(emulator, single, alone)[0].tobytes() == out[row].tobytes()
        others = {name: value for name, value in inputs.items() if name != "partial"}
        assert_close(spec, out, run_kernel(emulator, incremental(spec), others)["out"])


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
    entries, partial sums of empty chunks, idle rows."""
    layout = KvLayout(2, 2, 128, 64, dtype, 16, 9)
    spec = FlashDecodeChunk(4, layout, rows=2, scores=Scores(window=40), max_keys=120, chunk=16)
    inputs = spec.inputs_at(np.random.default_rng(5), [70, 128], [0, 1])
    table, seen = inputs["block_table"], np.arange(31, 71)
    slots = np.unique(layout.slots_of(0, seen, table))
    with Device.open(f"emulator:{target}") as emulator, emulator.create_stream() as stream:
        params = dict.fromkeys((*spec.params, *spec.reduce.params))
        args: dict[str, Any] = {p.name: emulator.allocate(spec.nbytes(p), p.name) for p in params}
        args["q"].upload(inputs["q"][0])
        args["sequence"].upload(inputs["sequence"])
        args["position"].upload(inputs["position"])
        args["block_table"].upload(table[0, 1:5], 4)
        for name in ("k_cache", "v_cache"):
            for slot in slots.tolist():
                row = layout.elements(inputs[name])[slot]
                args[name].upload(row, slot * layout.row_nbytes)
                if dtype == "q8_0":
                    offset = layout.scales_offset + slot * layout.scale_row_nbytes
                    args[name].upload(layout.scales(inputs[name])[slot], offset)
        for kernel in (spec, spec.reduce):
            own = {p.name: args[p.name] for p in kernel.params}
            launch(emulator.load(kernel), pack(kernel, own), stream)
        stream.synchronize()
        out = args["out"].download(np.float32, (2, 4, 64))
    assert_close(spec, out, spec.attend(inputs))


@pytest.mark.parametrize("target", ["sm_75", "sm_89", "sm_90", "sm_120"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0"])
@pytest.mark.parametrize("is_paged", [False, True])
def test_no_spills(target: str, dtype: Any, is_paged: bool) -> None:
    """And from sm_90 on, two CTAs fit an SM."""
    pages = (64, 99) if is_paged else (0, 0)
    layout = KvLayout(64, 8, 1 << 17, 128, dtype, *pages)
    spec = FlashDecodeChunk(
        56, layout, rows=8, scores=Scores(window=1 << 14, softcap=30.0), max_keys=1 << 15
    )
    cost = assemble(spec.ptx(target), target).entries["flash_decode_chunk"]
    assert not cost.spills
    if int(target[3:]) >= 90:
        assert cost.registers <= 128


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_keys": 201}, "max_keys 201"),
        ({"chunk": 8}, "chunk 8"),
        ({"chunk": 48}, "chunk 48"),
        ({"heads": 3}, "3 query heads"),
        ({"layout": KvLayout(1, 2, 1 << 17, 64, "f16"), "chunk": 32}, "4096 chunks of 32"),
    ],
)
def test_shapes_it_does_not_handle_are_refused(fields: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"heads": 4, "layout": LAYOUT}
    with pytest.raises(PtxgenError, match=message):
        FlashDecodeChunk(**good | fields)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"chunks": 0}, "0 chunks"),
        ({"chunks": MAX_CHUNKS + 1}, f"{MAX_CHUNKS + 1} chunks"),
        ({"head_dim": 520}, "head_dim 520"),
        ({"rows": 0}, "0 rows"),
    ],
)
def test_reductions_it_does_not_handle_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PtxgenError, match=message):
        FlashDecodeReduce(**{"heads": 4, "head_dim": 64, "chunks": 4} | fields)
