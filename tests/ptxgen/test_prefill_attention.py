"""Causal attention over prompt chunks: borders, equal bits where they are promised, odd inputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from tests.ptxgen.prompt_chunks import IDLE, Inputs, check_chunks, chunk, prefill_of, run
from urdir.driver.compare import compare
from urdir.driver.device import Device
from urdir.driver.launch import launch, pack
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.prefill_attention import PrefillAttention
from urdir.ptxgen.kernels.attention.random_inputs import attention_inputs
from urdir.ptxgen.kernels.attention.scores import Scores
from urdir.ptxgen.tools.assemble import assemble, is_available


def prefill(heads: int = 2, rows: int = 20, **fields: Any) -> PrefillAttention:
    """A small spec; ``fields`` are the layout's or the scores'."""
    made: PrefillAttention
    made = prefill_of(PrefillAttention, heads, rows, {"max_len": 200, "head_dim": 32, **fields})
    return made


# ---- borders ----


# 20 rows of 2 heads: a tile of 64 queries; keys come in tiles of 64.
@pytest.mark.parametrize("start", [0, 1, 43, 44, 45, 63, 64, 65, 108, 127, 128, 180])
def test_chunks_around_the_borders_of_key_tiles(device: Device, start: int) -> None:
    spec = prefill()
    run(device, spec, chunk(spec, start))


@pytest.mark.parametrize("rows", [1, 2, 5, 6, 10, 11, 21, 22, 23, 43, 64, 150])
def test_rows_around_the_borders_of_query_tiles(device: Device, rows: int) -> None:
    """Three heads a KV head: a tile's border lies within a row."""
    spec = prefill(heads=6, kv_heads=2, rows=rows)
    run(device, spec, chunk(spec, 37))


def test_scores_far_beyond_the_softcap_become_the_cap(device: Device) -> None:
    """Also where its exponential overflows, or vanishes."""
    spec = prefill(softcap=1.5)
    inputs = chunk(spec, 90)
    inputs["q"][:] = 300
    signs = np.random.default_rng(8).choice([-1, 1], (110, 1))
    inputs["k_cache"][0, 0, :110] = signs
    run(device, spec, inputs)


def test_rows_may_have_any_positions(device: Device) -> None:
    spec = prefill()
    positions = np.random.default_rng(3).integers(0, 200, spec.rows).tolist()
    positions[4] = IDLE
    run(device, spec, attention_inputs(spec, np.random.default_rng(4), positions, [0] * spec.rows))


def test_ctas_of_a_launch_see_different_numbers_of_keys(device: Device) -> None:
    """The middle one of three has one tile of keys, the others four."""
    spec = prefill(heads=1, rows=3 * 64)
    positions = [*range(136, 200), *range(64), *range(136, 200)]
    run(device, spec, attention_inputs(spec, np.random.default_rng(5), positions, [0] * spec.rows))


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
    check_chunks(device, whole, 100, ((1, 1), (16, 16), (40, 33), (40, 40)))


# ---- memory ----


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


@pytest.mark.turns(4)
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
