"""Causal attention over prompt chunks: borders, equal bits where they are promised, odd inputs."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from urdir.driver.compare import compare
from urdir.driver.device import Device
from urdir.driver.harness import run_kernel
from urdir.driver.launch import launch, pack
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.incremental_attention import IncrementalAttention
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.prefill_attention import PrefillAttention
from urdir.ptxgen.kernels.attention.scores import Scores
from urdir.ptxgen.tools.assemble import assemble, is_available

Inputs = dict[str, Any]
IDLE = 0xFFFFFFFF


def prefill(heads: int = 2, rows: int = 20, **fields: Any) -> PrefillAttention:
    """A small spec; ``fields`` are the layout's or the scores'."""
    layout: dict[str, Any] = {
        "sequences": 1, "kv_heads": 1, "max_len": 200, "head_dim": 32, "dtype": "f16",
        "page_len": 0, "pages": 0, "value_dim": 0, "capacity": 0,
    }  # fmt: skip
    layout.update({name: fields.pop(name) for name in list(fields) if name in layout})
    return PrefillAttention(heads, KvLayout(**layout), rows, Scores(**fields))


def chunk(spec: PrefillAttention, start: int, seed: int = 0, live: int | None = None) -> Inputs:
    """Inputs of a chunk from position ``start`` on, its rows after ``live`` idle."""
    live = spec.rows if live is None else live
    positions = [start + r if r < live else IDLE for r in range(spec.rows)]
    return spec.inputs_at(np.random.default_rng(seed), positions, [0] * spec.rows)


def by_definition(spec: PrefillAttention, inputs: Inputs) -> Any:
    """One row and head after another, the softmax by its definition."""
    out = np.zeros((spec.rows, spec.heads, spec.head_dim))
    scale = spec.head_dim**-0.5 if spec.scores.scale is None else spec.scores.scale
    for row, position in enumerate(inputs["position"].tolist()):
        if position >= spec.layout.max_len:
            continue
        first = max(0, position + 1 - (spec.scores.window or position + 1))
        sequence, seen = int(inputs["sequence"][0]), np.arange(first, position + 1)
        keys, values = (
            spec.layout.read(inputs[n], sequence, seen, inputs.get("block_table")).astype(float)
            for n in ("k_cache", "v_cache")
        )
        for head in range(spec.heads):
            scores = keys[head // spec.group] @ inputs["q"][row, head].astype(float) * scale
            if spec.scores.softcap:
                scores = spec.scores.softcap * np.tanh(scores / spec.scores.softcap)
            weights = np.exp(scores - scores.max())
            out[row, head] = weights @ values[head // spec.group] / weights.sum()
    return out


def run(device: Device, spec: PrefillAttention, inputs: Inputs) -> Any:
    """The output, which is checked."""
    outputs = run_kernel(device, spec, inputs)
    compare(spec, outputs, {"out": by_definition(spec, inputs).astype(np.float32)})
    compare(spec, outputs, spec.reference(**inputs))
    return outputs["out"]


# ---- borders ----


# 20 rows of 2 heads: a tile of 64 queries; keys come in tiles of 64.
@pytest.mark.parametrize("start", [0, 1, 43, 44, 45, 63, 64, 65, 108, 127, 128, 180])
def test_chunks_around_the_borders_of_key_tiles(device: Device, start: int) -> None:
    spec = prefill()
    run(device, spec, chunk(spec, start, seed=start))


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 10, 11, 21, 22, 23, 43, 64, 150])
def test_rows_around_the_borders_of_query_tiles(device: Device, rows: int) -> None:
    """Three heads a KV head: a tile's border lies within a row."""
    spec = prefill(heads=6, kv_heads=2, rows=rows)
    run(device, spec, chunk(spec, 37))


@pytest.mark.parametrize("head_dim", [8, 16, 40, 64, 72, 80, 96, 112, 128, 136, 192, 256, 320, 512])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0"])
def test_head_dims_and_types(device: Device, head_dim: int, dtype: str) -> None:
    if dtype == "q8_0" and head_dim % 32:
        pytest.skip("q8_0 has groups of 32 values")
    spec = prefill(heads=4, kv_heads=2, max_len=80, head_dim=head_dim, dtype=dtype)
    run(device, spec, chunk(spec, 55))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 12, 71])
def test_group_sizes(device: Device, group: int) -> None:
    spec = prefill(heads=2 * group, kv_heads=2, max_len=24, rows=9)
    run(device, spec, chunk(spec, 12))


@pytest.mark.parametrize("window", [1, 2, 20, 63, 64, 65, 100, 500])
def test_windows(device: Device, window: int) -> None:
    spec = prefill(rows=70, window=window)
    for start in (0, 60, 130):
        run(device, spec, chunk(spec, start))


@pytest.mark.parametrize("softcap", [0.2, 2.0, 50.0])
def test_softcap(device: Device, softcap: float) -> None:
    spec = prefill(softcap=softcap)
    run(device, spec, chunk(spec, 90))


def test_scores_far_beyond_the_softcap_become_the_cap(device: Device) -> None:
    """Also where its exponential overflows, or vanishes."""
    spec = prefill(softcap=1.5)
    inputs = chunk(spec, 90)
    inputs["q"][:] = 300
    signs = np.random.default_rng(8).choice([-1, 1], (110, 1))
    inputs["k_cache"][0, 0, :110] = signs
    run(device, spec, inputs)


def test_all_of_it_at_once(device: Device) -> None:
    spec = prefill(
        heads=10, kv_heads=2, head_dim=96, dtype="q8_0", sequences=2, max_len=192, page_len=32,
        pages=12, rows=37, scale=0.2, window=77, softcap=4.0,
    )  # fmt: skip
    run(device, spec, chunk(spec, 101, live=30))


def test_rows_may_have_any_positions(device: Device) -> None:
    spec = prefill()
    positions = np.random.default_rng(3).integers(0, 200, spec.rows).tolist()
    positions[4] = IDLE
    run(device, spec, spec.inputs_at(np.random.default_rng(4), positions, [0] * spec.rows))


def test_ctas_of_a_launch_see_different_numbers_of_keys(device: Device) -> None:
    """The middle one of three has one tile of keys, the others four."""
    spec = prefill(heads=1, rows=3 * 64)
    positions = [*range(136, 200), *range(64), *range(136, 200)]
    run(device, spec, spec.inputs_at(np.random.default_rng(5), positions, [0] * spec.rows))


# ---- equal bits ----


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0"])
@pytest.mark.parametrize("page_len", [16, 128])
def test_paged_is_contiguous_bit_for_bit(device: Device, dtype: str, page_len: int) -> None:
    fields: dict[str, Any] = {"max_len": 256, "sequences": 2, "dtype": dtype, "window": 120}
    contiguous = prefill(**fields)
    paged = prefill(**fields, page_len=page_len, pages=600 // page_len)
    rng = np.random.default_rng(1)
    table = rng.permutation(paged.layout.pages)[: 2 * paged.layout.blocks].astype(np.uint32)
    table = table.reshape(2, -1)
    start, live = 150, 17
    position = np.array([start + r if r < live else IDLE for r in range(20)], np.uint32)
    inputs: Inputs = {
        "q": rng.standard_normal((20, 2, 32)).astype(np.float32),
        "sequence": np.ones(20, np.uint32),
        "position": position,
    }
    scattered: Inputs = {**inputs, "block_table": table}
    for name in ("k_cache", "v_cache"):
        values = rng.standard_normal((1, start + live, 32)).astype(np.float32)
        seen = np.arange(start + live)
        inputs[name], scattered[name] = contiguous.layout.empty(), paged.layout.empty()
        contiguous.layout.write(inputs[name], 1, seen, values)
        paged.layout.write(scattered[name], 1, seen, values, table)
    np.testing.assert_array_equal(run(device, paged, scattered), run(device, contiguous, inputs))


def test_later_keys_do_not_matter_bit_for_bit(device: Device) -> None:
    spec = prefill(rows=70)
    inputs = chunk(spec, 30)
    expected = run(device, spec, inputs)
    for row in (0, 20, 40, 68):
        changed = dict(inputs)
        for name in ("k_cache", "v_cache"):
            changed[name] = inputs[name].copy()
            changed[name][:, :, 30 + row + 1 : 100] *= -3
        out = run(device, spec, changed)
        np.testing.assert_array_equal(out[: row + 1], expected[: row + 1])
        assert (out[row + 1 :] != expected[row + 1 :]).any(axis=(1, 2)).all()


@pytest.mark.parametrize("fields", [{}, {"window": 50}, {"heads": 5, "head_dim": 256}])
def test_a_row_has_the_same_bits_in_every_chunk(device: Device, fields: dict[str, Any]) -> None:
    whole = prefill(rows=90, **fields)
    inputs = chunk(whole, 100)
    expected = run(device, whole, inputs)
    at = 0
    for rows, live in ((1, 1), (16, 16), (40, 33), (40, 40)):
        part = dataclasses.replace(whole, rows=rows)
        position = np.full(rows, IDLE, np.uint32)
        position[:live] = inputs["position"][at : at + live]
        some = {
            **inputs,
            "q": np.resize(inputs["q"][at : at + live], (rows, *inputs["q"].shape[1:])),
            "sequence": inputs["sequence"][:rows],
            "position": position,
        }
        out = run(device, part, some)
        np.testing.assert_array_equal(out[:live], expected[at : at + live])
        at += live
    assert at == whole.rows


# ---- beside incremental attention ----


@pytest.mark.parametrize("dtype", ["f16", "q8_0"])
def test_it_agrees_with_incremental_attention(device: Device, dtype: str) -> None:
    spec = prefill(heads=6, kv_heads=2, head_dim=64, dtype=dtype, rows=30, window=90, softcap=20.0)
    inputs = chunk(spec, 110, live=28)
    one_by_one = IncrementalAttention(6, spec.layout, 30, spec.scores)
    expected = run_kernel(device, one_by_one, inputs)
    compare(spec, {"out": run(device, spec, inputs)}, expected)


# ---- what the softmax promises ----


def test_one_key_gives_its_value_exactly(device: Device) -> None:
    spec = prefill(heads=5, head_dim=128, rows=30, window=1)
    inputs = chunk(spec, 50)
    values = inputs["v_cache"][0, 0, 50:80].astype(np.float32)
    expected = np.broadcast_to(values[:, None], (30, 5, 128))
    np.testing.assert_array_equal(run(device, spec, inputs), expected)


@pytest.mark.parametrize("winner", [0, 63, 64, 130])
def test_a_dominant_key_wins_wherever_it_is(device: Device, winner: int) -> None:
    """Scores of thousands neither overflow nor let an early maximum stick."""
    spec = prefill(heads=1, head_dim=64, rows=3)
    inputs = chunk(spec, 130)
    inputs["q"][:] = inputs["q"][0] * 1000
    inputs["k_cache"][0, 0, winner] = inputs["q"][0, 0] / 100
    value = inputs["v_cache"][0, 0, winner].astype(np.float32)
    out = run(device, spec, inputs)
    np.testing.assert_array_equal(out, np.broadcast_to(value, out.shape))


def test_very_negative_scores_still_average(device: Device) -> None:
    """Every score is about -10^6: a maximum that starts at zero would give 0 / 0."""
    spec = prefill(heads=1, head_dim=16, rows=2)
    inputs = chunk(spec, 100)
    inputs["q"][:] = -1000
    inputs["k_cache"][0, 0, :102] = 1000
    run(device, spec, inputs)


# ---- memory ----


def test_idle_rows_read_nothing(device: Device) -> None:
    """Neither q, nor the caches, nor the table: here all are NaN or out of range."""
    spec = prefill(dtype="f16", page_len=16, max_len=64, pages=4)
    inputs: Inputs = {
        "q": np.full((20, 2, 32), np.nan, np.float32),
        "k_cache": spec.layout.empty(),
        "v_cache": spec.layout.empty(),
        "block_table": np.full((1, 4), 1 << 20, np.uint32),
        "sequence": np.full(20, 1 << 20, np.uint32),
        "position": np.array([64, 65, IDLE, 1 << 31] * 5, np.uint32),
    }
    np.testing.assert_array_equal(run(device, spec, inputs), 0)


@pytest.mark.parametrize("window", [0, 40])
@pytest.mark.parametrize("target", ["sm_75", "sm_90"])
def test_rows_never_written_are_never_read(target: str, window: int) -> None:
    """The emulator faults where a kernel reads memory that nothing has written."""
    spec = prefill(heads=4, kv_heads=2, rows=30, window=window)
    start, live = 100, 25
    first = start - window + 1 if window else 0
    inputs = chunk(spec, start, live=live)
    with Device.open(f"emulator:{target}") as emulator:
        args: dict[str, Any] = {}
        for p in spec.params:
            args[p.name] = buffer = emulator.allocate(spec.nbytes(p), p.name)
            if p.name.endswith("_cache"):
                for head in range(2):
                    rows = np.ascontiguousarray(inputs[p.name][0, head, first : start + live])
                    buffer.upload(rows, (head * spec.layout.max_len + first) * 64)
            elif p.name == "q":
                buffer.upload(np.ascontiguousarray(inputs["q"][:live]))
            elif p.name == "sequence":
                buffer.upload(inputs["sequence"][:1])
            elif p.name in inputs:
                buffer.upload(inputs[p.name])
        with emulator.create_stream() as stream:
            launch(emulator.load(spec), pack(spec, args), stream)
            stream.synchronize()
        out = args["out"].download(np.float32, (spec.rows, spec.heads, spec.head_dim))
    compare(spec, {"out": out}, spec.reference(**inputs))


# ---- cost ----


@pytest.mark.skipif(not is_available(), reason="nvJitLink is not installed")
@pytest.mark.parametrize("target", ["sm_75", "sm_90", "sm_120"])
@pytest.mark.parametrize("dtype", ["f16", "f32", "q8_0"])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_no_spills_and_two_ctas_an_sm(target: str, head_dim: int, dtype: Any) -> None:
    """With everything that takes registers, at the widest heads of either kind."""
    layout = KvLayout(4, 8, 1 << 17, head_dim, dtype, page_len=16, pages=1 << 15)
    spec = PrefillAttention(32, layout, 512, Scores(window=4096, softcap=30.0))
    cost = assemble(spec.ptx(target), target).entries["prefill_attention"]
    assert not cost.spills
    assert 2 * 128 * cost.registers <= 65536
    assert cost.shared <= 48 * 1024


# ---- refusals ----


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": 3, "kv_heads": 2}, "3 query heads are not a multiple of 2"),
        ({"heads": 0}, "0 query heads"),
        ({"head_dim": 100}, "head_dim 100 of a KV cache must be a multiple of 8"),
        ({"head_dim": 584}, "up to 576 values: head_dim 584"),
        ({"value_dim": 584}, "value_dim 584"),
        ({"window": 100, "capacity": 64}, "back on 100 keys, in a ring of 64"),
        ({"capacity": 64}, "back on all keys, in a ring of 64"),
        ({"capacity": 96}, "capacity 96 is not a power of two"),
        ({"chunk": -1}, "chunk -1"),
        ({"max_bias": -1.0}, "max_bias -1.0"),
        ({"rows": 0}, "0 rows"),
        ({"window": -1}, "window -1"),
        ({"softcap": -1.0}, "softcap -1.0"),
        ({"softcap": float("nan")}, "softcap nan"),
    ],
)
def test_shapes_it_does_not_handle_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PtxgenError, match=message):
        prefill(**fields)
