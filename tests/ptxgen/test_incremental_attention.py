"""Incremental attention: edge positions, grouped queries, rows, pages, windows, softmax."""

from __future__ import annotations

import math
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
from urdir.ptxgen.kernels.attention.incremental_attention import IncrementalAttention
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.random_inputs import attention_inputs
from urdir.ptxgen.kernels.attention.scores import Scores
from urdir.ptxgen.tools.assemble import assemble

Inputs = dict[str, Any]


def one(heads: int, kv_heads: int, head_dim: int, max_len: int, dtype: Any, **more: Any) -> Any:
    return IncrementalAttention(heads, KvLayout(1, kv_heads, max_len, head_dim, dtype), **more)


def inputs_at(spec: IncrementalAttention, position: int, seed: int = 0) -> Inputs:
    """One row's random queries and caches; keys beyond ``position`` are NaN."""
    return attention_inputs(spec, np.random.default_rng(seed), [position], [0])


def check(device: Device, spec: IncrementalAttention, inputs: Inputs) -> Any:
    out = run_kernel(device, spec, inputs)
    compare(spec, out, spec.reference(**inputs))
    return out["out"]


# 64 dims: 64 keys a pass, 32 where a pass has two heads' lanes; two passes a step.
@pytest.mark.parametrize("position", [0, 1, 31, 32, 63, 64, 101, 127, 128, 129, 192])
@pytest.mark.parametrize(("heads", "dtype"), [(2, "f16"), (4, "f32"), (1, "q8_0")])
def test_edge_positions(device: Device, position: int, heads: int, dtype: Any) -> None:
    spec = one(heads, 1, 64, 193, dtype)
    check(device, spec, inputs_at(spec, position, seed=position))


def test_equal_keys_give_the_mean_of_the_values(device: Device) -> None:
    spec = one(3, 1, 80, 150, "f16")
    inputs = inputs_at(spec, 140)
    inputs["k_cache"][0, :, :141] = inputs["k_cache"][0, :, :1]
    mean = inputs["v_cache"][0, 0, :141].astype(np.float64).mean(axis=0)
    outputs = run_kernel(device, spec, inputs)
    np.testing.assert_allclose(outputs["out"][0], np.broadcast_to(mean, (3, 80)), atol=1e-6)


@pytest.mark.parametrize("size", [1e-3, 0.1, 100.0, 4000.0])
def test_values_of_q8_0_may_be_small_and_large(device: Device, size: float) -> None:
    spec = one(3, 1, 128, 150, "q8_0")
    inputs = inputs_at(spec, 140, seed=1)
    scales = spec.layout.values.scales(inputs["v_cache"])
    scales[:] = scales.astype(np.float32) * size
    check(device, spec, inputs)


@pytest.mark.parametrize("growth", [0.125, 0.5, 5.0])
def test_maxima_that_keep_growing(device: Device, growth: float) -> None:
    """Below and above what the running maximum may lag behind, key after key.

    The scale makes exponents q . k, which are exact: growth times the key's number.
    """
    spec = one(4, 1, 64, 400, "f32", scores=Scores(scale=math.log(2)))
    inputs = inputs_at(spec, 399)
    inputs["q"][0] = np.array([[1], [-1], [0.5], [0.25]])
    inputs["k_cache"][0, 0] = growth / 64 * np.arange(400, dtype=np.float32)[:, None]
    out = run_kernel(device, spec, inputs)
    compare(spec, out, spec.reference(**inputs))


def test_infinities_out_of_reach_do_not_matter(device: Device) -> None:
    """0 * infinity must not appear: keys out of reach, other heads, sequences and idle lanes."""
    spec = IncrementalAttention(2, KvLayout(2, 2, 33, 96, "f16"), scores=Scores(window=3))
    clean = attention_inputs(spec, np.random.default_rng(0), [5], [1])
    dirty = dict(clean)
    for name in ("k_cache", "v_cache"):
        dirty[name] = np.full_like(clean[name], np.inf)
        dirty[name][1, 0, 3:6] = clean[name][1, 0, 3:6]
    expected = run_kernel(device, spec, clean)
    np.testing.assert_array_equal(
        run_kernel(device, spec, dirty)["out"][0, 0], expected["out"][0, 0]
    )


def test_scale_replaces_the_default(device: Device) -> None:
    default, doubled = one(2, 1, 64, 10, "f32"), one(2, 1, 64, 10, "f32", scores=Scores(scale=0.25))
    inputs = inputs_at(default, 9)
    expected = run_kernel(device, default, inputs | {"q": inputs["q"] * 2})
    np.testing.assert_array_equal(run_kernel(device, doubled, inputs)["out"], expected["out"])


def test_rows_never_written_are_never_read(emulator: Device) -> None:
    """The emulator faults where a kernel reads memory that nothing has written."""
    spec = one(4, 2, 80, 64, "f16")
    position = 20
    inputs = inputs_at(spec, position)
    args: dict[str, Any] = {}
    for p in spec.params:
        args[p.name] = buffer = emulator.allocate(spec.nbytes(p), p.name)
        if p.name.endswith("_cache"):
            for head in range(2):
                offset = head * 64 * 80 * 2
                buffer.upload(inputs[p.name][0, head, : position + 1], offset)
        elif p.name in inputs:
            buffer.upload(inputs[p.name])
    with emulator.create_stream() as stream:
        launch(emulator.load(spec), pack(spec, args), stream)
        stream.synchronize()
    out = args["out"].download(np.float32, (1, spec.heads, spec.head_dim))
    compare(spec, {"out": out}, spec.reference(**inputs))


# ---- rows, pages: bit for bit ----

#: Contiguous layouts of three sequences, with how many pages of 16 tokens their twin has.
TWINS = (
    (IncrementalAttention(4, KvLayout(3, 2, 64, 64, "f16"), rows=4), 14),
    (IncrementalAttention(3, KvLayout(3, 1, 48, 96, "q8_0"), rows=4), 9),
    (
        IncrementalAttention(4, KvLayout(3, 1, 96, 128, "bf16"), rows=4, scores=Scores(window=20)),
        20,
    ),
)


def paged(spec: IncrementalAttention, pages: int) -> IncrementalAttention:
    c = spec.layout
    layout = KvLayout(c.sequences, c.kv_heads, c.max_len, c.head_dim, c.dtype, 16, pages)
    return IncrementalAttention(spec.heads, layout, spec.rows, spec.scores)


def gathered(spec: IncrementalAttention, twin: IncrementalAttention, inputs: Inputs) -> Inputs:
    """Inputs of a paged spec as those of its contiguous twin: every token that is not NaN."""
    contiguous = dict(inputs)
    table = contiguous.pop("block_table")
    positions = range(spec.layout.max_len)
    for name in ("k_cache", "v_cache"):
        rows = twin.layout.elements(inputs[name])  # raw, so that nothing is rounded
        contiguous[name] = cache = spec.layout.empty()
        for s in range(spec.layout.sequences):
            from_slots = twin.layout.slots_of(s, positions, table)
            to_slots = spec.layout.slots_of(s, positions)
            spec.layout.elements(cache)[to_slots] = rows[from_slots]
            if spec.layout.dtype == "q8_0":
                scales = twin.layout.scales(inputs[name])
                spec.layout.scales(cache)[to_slots] = scales[from_slots]
    return contiguous


@pytest.mark.slow
@pytest.mark.parametrize(("spec", "pages"), TWINS)
@settings(max_examples=3, deadline=None, derandomize=True)
@given(data=st.data())
def test_paged_equals_contiguous_and_rows_equal_single_rows(
    spec: IncrementalAttention, pages: int, data: st.DataObject
) -> None:
    """Any table: permuted, with shared pages; rows of any lengths, the same sequence twice."""
    twin, layout = paged(spec, pages), spec.layout
    single = IncrementalAttention(spec.heads, layout, 1, spec.scores)
    positions = data.draw(
        st.lists(st.integers(0, layout.max_len), min_size=spec.rows, max_size=spec.rows)
    )
    sequences = data.draw(
        st.lists(st.integers(0, layout.sequences - 1), min_size=spec.rows, max_size=spec.rows)
    )
    entries = layout.sequences * (layout.max_len // 16)
    pages_of = st.lists(st.integers(0, pages - 1), min_size=entries, max_size=entries)
    table = np.array(data.draw(pages_of), np.uint32).reshape(layout.sequences, -1)
    rng = np.random.default_rng(data.draw(st.integers(0, 99)))
    inputs = attention_inputs(twin, rng, positions, sequences, table)
    with Device.open("emulator") as emulator:
        out = run_kernel(emulator, twin, inputs)["out"]
        contiguous = gathered(spec, twin, inputs)
        assert run_kernel(emulator, spec, contiguous)["out"].tobytes() == out.tobytes()
        for row in range(spec.rows):
            alone = contiguous | {
                name: contiguous[name][row : row + 1] for name in ("q", "sequence", "position")
            }
            assert run_kernel(emulator, single, alone)["out"].tobytes() == out[row].tobytes()
    compare(twin, {"out": out}, twin.reference(**inputs))


# ---- cost ----


@pytest.mark.turns(7)
@pytest.mark.parametrize("target", ["sm_75", "sm_89", "sm_90", "sm_120"])
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0"])
@pytest.mark.parametrize("head_dim", [96, 256])
@pytest.mark.parametrize("is_paged", [False, True])
def test_no_spills(target: str, dtype: Any, head_dim: int, is_paged: bool) -> None:
    """At the widest tiles and heads, also where shuffles are calls that clobber registers. Quants
    and their scales take more: one CTA an SM, or loads without copies."""
    pages = (64, 99) if is_paged else (0, 0)
    layout = KvLayout(64, 2, 1 << 17, head_dim, dtype, *pages)
    spec = IncrementalAttention(14, layout, rows=8, scores=Scores(window=4096, softcap=50.0))
    cost = assemble(spec.ptx(target), target).entries["incremental_attention"]
    assert not cost.spills
    if int(target[3:]) >= 90 and dtype != "q8_0":
        assert cost.registers <= 128, "two CTAs an SM"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": 3}, "3 query heads are not a multiple of 2"),
        ({"heads": 0}, "0 query heads"),
        ({"layout": KvLayout(1, 2, 4, 584, "f16")}, "up to 576 values: head_dim 584"),
        ({"rows": 0}, "attention of 0 rows"),
        (
            {"layout": KvLayout(1, 2, 64, 64, "f16", capacity=16)},
            "back on all keys, in a ring of 16",
        ),
    ],
)
def test_shapes_it_does_not_handle_are_refused(fields: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"heads": 4, "layout": KvLayout(1, 2, 4, 64, "f16")}
    with pytest.raises(PtxgenError, match=message):
        IncrementalAttention(**good | fields)
