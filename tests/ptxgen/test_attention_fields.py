"""What every attention kernel does, against the definition: the softmax, windows, soft caps, sinks,
ALiBi, chunks, rings, heads of every width. The rows' new tokens are in test_own_token.py."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np
import pytest

from urdir.driver.compare import compare
from urdir.driver.device import Device
from urdir.driver.harness import run_kernel
from urdir.ptxgen.kernels.attention.flash_decode import FlashDecode
from urdir.ptxgen.kernels.attention.incremental_attention import IncrementalAttention
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.own_token import OwnToken
from urdir.ptxgen.kernels.attention.prefill_attention import PrefillAttention
from urdir.ptxgen.kernels.attention.prepare_tokens import PrepareTokens
from urdir.ptxgen.kernels.attention.random_inputs import attention_inputs
from urdir.ptxgen.kernels.attention.scores import Scores
from urdir.ptxgen.kernels.attention.spec import AttentionSpec
from urdir.ptxgen.kernels.rotation import Rotation

Inputs = dict[str, Any]
KINDS = {
    "incremental": (IncrementalAttention, {}),
    "flash": (FlashDecode, {"ctas": 3, "least": 16, "most": 16}),
    "prefill": (PrefillAttention, {}),
}
every_kind = pytest.mark.parametrize("kind", KINDS)


def made(kind: str, heads: int, layout: KvLayout, rows: int, scores: Scores, **more: Any) -> Any:
    spec, fields = KINDS[kind]
    return spec(heads, layout, rows, scores, **fields, **more)


def attend(device: Device, spec: AttentionSpec, inputs: Inputs) -> Any:
    given = {p.name: inputs[p.name] for p in spec.params if p.name in inputs}
    return run_kernel(device, spec, given)["out"]


def inputs_at(spec: Any, positions: list[int], seed: int = 0) -> Inputs:
    """Rows of sequence 0."""
    rng = np.random.default_rng(seed)
    inputs: Inputs = attention_inputs(spec, rng, positions, [0] * len(positions))
    if spec.scores.sinks:
        inputs["sinks"] = rng.normal(0, 3, spec.heads).astype(np.float32)
    return inputs


def ggml_slope(head: int, heads: int, max_bias: float) -> float:
    """As ggml_compute_forward_soft_max finds it."""
    n = 2 ** math.floor(math.log2(heads))
    m0, m1 = 2.0 ** (-max_bias / n), 2.0 ** (-(max_bias / 2.0) / n)
    return m0 ** (head + 1) if head < n else m1 ** (2 * (head - n) + 1)


def by_definition(spec: AttentionSpec, inputs: Inputs) -> Any:
    """One row and head after another, key by key."""
    scores, layout = spec.scores, spec.layout
    out = np.zeros((spec.rows, spec.heads, spec.value_dim))
    for row, position in enumerate(inputs["position"].tolist()):
        if position >= layout.max_len:
            continue
        seen = [
            key
            for key in range(position + 1)
            if not (scores.window and key <= position - scores.window)
            and not (scores.chunk and key < position // scores.chunk * scores.chunk)
        ]
        keys, values = (
            cache.read(inputs[name], 0, seen, inputs.get("block_table")).astype(float)
            for name, cache in layout.caches.items()
        )
        for head in range(spec.heads):
            logits = keys[head // spec.group] @ inputs["q"][row, head].astype(float)
            logits *= scores.scale or spec.head_dim**-0.5
            if scores.softcap:
                logits = scores.softcap * np.tanh(logits / scores.softcap)
            if scores.max_bias:
                slope = ggml_slope(head, spec.heads, scores.max_bias)
                logits = logits + slope * (np.array(seen) - position)
            if scores.sinks:
                logits = np.append(logits, inputs["sinks"][head])
            weights = np.exp(logits - logits.max())
            weights /= weights.sum()
            out[row, head] = weights[: len(seen)] @ values[head // spec.group]
    return out


def check(device: Device, spec: Any, inputs: Inputs) -> Any:
    out, wanted = attend(device, spec, inputs), by_definition(spec, inputs)
    atol = 2 * spec.tolerance.rtol * np.abs(wanted).max()
    np.testing.assert_allclose(out, wanted, rtol=0, atol=atol)
    wanted = spec.reference(**inputs)["out"]
    np.testing.assert_allclose(out, wanted, rtol=0, atol=atol)
    return out


# ---- the softmax ----


@pytest.mark.turns(5)
@every_kind
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0"])
def test_one_key_gives_its_value(device: Device, kind: str, dtype: Any) -> None:
    """Exactly, if it is one of f16."""
    spec = made(kind, 5, KvLayout(1, 1, 80, 128, dtype), 3, Scores(window=1))
    inputs = inputs_at(spec, [0, 50, 79])
    if dtype != "f16":
        check(device, spec, inputs)
        return
    values = spec.layout.read(inputs["v_cache"], 0, [0, 50, 79])[0]
    out = attend(device, spec, inputs)
    np.testing.assert_array_equal(out, np.broadcast_to(values[:, None], (3, 5, 128)))


@every_kind
@pytest.mark.parametrize("winner", [0, 50, 63, 64, 76])
def test_a_dominant_key_wins_wherever_it_is(device: Device, kind: str, winner: int) -> None:
    """Scores of thousands neither overflow nor let an early maximum stick."""
    spec = made(kind, 1, KvLayout(1, 1, 77, 64, "f16"), 1, Scores())
    inputs = inputs_at(spec, [76])
    inputs["q"] *= 1000
    inputs["k_cache"][0, 0, winner] = inputs["q"][0, 0] / 100
    value = inputs["v_cache"][0, 0, winner].astype(np.float32)
    np.testing.assert_array_equal(attend(device, spec, inputs)[0, 0], value)


@every_kind
def test_very_negative_scores_still_average(device: Device, kind: str) -> None:
    """Every score is about -10^6: a maximum that starts at zero would give 0 / 0."""
    spec = made(kind, 1, KvLayout(1, 1, 102, 16, "f32"), 2, Scores())
    inputs = inputs_at(spec, [100, 101])
    inputs["q"][:] = -1000
    inputs["k_cache"][:] = 1000
    check(device, spec, inputs)


@every_kind
@pytest.mark.parametrize("size", [0.01, 1.0, 30.0])
def test_softcap(device: Device, kind: str, size: float) -> None:
    """Small scores are hardly changed, large ones end at the cap on both sides."""
    spec = made(kind, 4, KvLayout(1, 1, 60, 128, "f32"), 2, Scores(softcap=20.0))
    inputs = inputs_at(spec, [31, 59])
    inputs["q"] *= np.float32(size)
    check(device, spec, inputs)


@every_kind
def test_all_of_it_at_once(device: Device, kind: str) -> None:
    layout = KvLayout(2, 2, 192, 96, "q8_0", 32, 12)
    spec = made(kind, 10, layout, 33, Scores(scale=0.2, window=77, softcap=4.0))
    check(device, spec, inputs_at(spec, [*range(101, 131), 999, 192, 1 << 31]))


@every_kind
def test_idle_rows_read_nothing(device: Device, kind: str) -> None:
    """Neither q, nor the caches, nor the table: here all are NaN or out of range."""
    spec = made(kind, 2, KvLayout(1, 1, 64, 32, "f16", 16, 4), 4, Scores())
    inputs: Inputs = {
        **inputs_at(spec, [64, 65, (1 << 32) - 1, 1 << 31]),
        "q": np.full((4, 2, 32), np.nan, np.float32),
        "k_cache": spec.layout.empty(),
        "v_cache": spec.layout.empty(),
        "block_table": np.full((1, 4), 1 << 20, np.uint32),
        "sequence": np.full(4, 1 << 20, np.uint32),
    }
    np.testing.assert_array_equal(attend(device, spec, inputs), 0)


# ---- which keys ----


@pytest.mark.turns(5)
@every_kind
@pytest.mark.parametrize("window", [1, 20, 32, 33, 63, 64, 65, 1000])
def test_windows(device: Device, kind: str, window: int) -> None:
    """Keys that no row looks back on are NaN."""
    positions = [40, 63, 64, 65, 99, 127, 128, 131]
    spec = made(kind, 4, KvLayout(1, 2, 132, 64, "f16"), len(positions), Scores(window=window))
    inputs = inputs_at(spec, positions)
    for name in ("k_cache", "v_cache"):
        inputs[name][:, :, : max(0, 41 - window)] = np.nan
    check(device, spec, inputs)


@every_kind
@pytest.mark.parametrize("fields", [{"chunk": 32}, {"chunk": 37}, {"chunk": 48, "window": 20}])
def test_chunks(device: Device, kind: str, fields: dict[str, int]) -> None:
    """Rows on both sides of every border, and an idle one."""
    positions = [0, 30, 31, 32, 36, 37, 38, 47, 48, 49, 73, 74, 95, 96, 97, 999]
    layout = KvLayout(1, 1, 100, 32, "f16")
    spec = made(kind, 3, layout, len(positions), Scores(**fields))
    inputs = inputs_at(spec, positions)
    check(device, spec, inputs)


@every_kind
def test_keys_of_earlier_chunks_are_not_read(device: Device, kind: str) -> None:
    layout = KvLayout(1, 1, 100, 32, "f32")
    spec = made(kind, 2, layout, 5, Scores(chunk=24))
    inputs = inputs_at(spec, [72, 73, 80, 81, 94])
    for name in ("k_cache", "v_cache"):
        inputs[name][:, :, :72] = np.nan
    check(device, spec, inputs)


# ---- sinks, ALiBi ----


@every_kind
@pytest.mark.parametrize("fields", [{}, {"window": 12}, {"softcap": 5.0, "scale": 0.3}])
def test_sinks(device: Device, kind: str, fields: dict[str, Any]) -> None:
    spec = made(kind, 5, KvLayout(1, 1, 90, 64, "f16"), 6, Scores(sinks=True, **fields))
    inputs = inputs_at(spec, [0, 1, 40, 63, 64, 999], seed=3)
    check(device, spec, inputs)


@every_kind
def test_sinks_from_nothing_to_everything(device: Device, kind: str) -> None:
    """A sink far below all scores changes nothing, one far above takes all weight."""
    layout = KvLayout(1, 1, 90, 64, "f32")
    spec = made(kind, 3, layout, 2, Scores(sinks=True))
    plain = dataclasses.replace(spec, scores=Scores())
    inputs = inputs_at(spec, [70, 71])
    inputs["sinks"][:] = (-1e30, 0.0, 200.0)
    out, without = attend(device, spec, inputs), attend(device, plain, inputs)
    np.testing.assert_array_equal(out[:, 0], without[:, 0])
    assert (np.abs(out[:, 1]) < np.abs(without[:, 1])).all()
    assert np.abs(out[:, 2]).max() < 1e-30


@every_kind
@pytest.mark.parametrize("heads", [1, 4, 6, 71])
def test_alibi(device: Device, kind: str, heads: int) -> None:
    """Heads beyond the last power of two have slopes between those of the others."""
    spec = made(kind, heads, KvLayout(1, 1, 90, 32, "f16"), 4, Scores(max_bias=8.0))
    check(device, spec, inputs_at(spec, [0, 33, 85, 999], seed=heads))


@every_kind
def test_bias_comes_after_scale_and_softcap(device: Device, kind: str) -> None:
    scores = Scores(scale=0.5, softcap=3.0, max_bias=2.0, window=30, sinks=True)
    spec = made(kind, 2, KvLayout(1, 2, 90, 64, "f16"), 3, scores)
    check(device, spec, inputs_at(spec, [5, 62, 88]))


def test_slopes_are_those_of_ggml() -> None:
    for heads in (1, 2, 7, 12, 32, 71):
        wanted = [ggml_slope(head, heads, 8.0) for head in range(heads)]
        np.testing.assert_allclose(Scores(max_bias=8.0).slopes(heads), wanted, rtol=1e-12)


# ---- rings ----


def as_ring(spec: Any, ring: Any, inputs: Inputs, oldest: int, end: int) -> Inputs:
    """The same tokens from ``oldest`` to ``end`` in a ring; NaN elsewhere."""
    others = dict(inputs)
    table = None
    if ring.layout.is_paged:
        blocks = np.random.default_rng(1).permutation(ring.layout.pages)[: ring.layout.blocks]
        table = others["block_table"] = blocks[None].astype(np.uint32)
    tokens = np.arange(oldest, end)
    for name, layout in ring.layout.caches.items():
        others[name] = layout.empty()
        layout.write(others[name], 0, tokens, spec.layout.read(inputs[name], 0, tokens), table)
    return others


@pytest.mark.turns(5)
@every_kind
@pytest.mark.parametrize("pages", [(0, 0), (16, 7)])
@pytest.mark.parametrize("end", [20, 63, 64, 65, 90, 128, 130, 200])
def test_a_ring_is_a_whole_cache_bit_for_bit(
    device: Device, kind: str, pages: tuple[int, int], end: int
) -> None:
    """The last rows before ``end``, in a ring of 64 that has room for their windows and no more."""
    whole = KvLayout(1, 1, 208, 32, "f16")
    ring = KvLayout(1, 1, 208, 32, "f16", *pages, capacity=64)
    rows = 15
    spec = made(kind, 2, whole, rows, Scores(window=50))
    positions = list(range(end - rows, end))
    inputs = inputs_at(spec, positions, seed=end)
    other = dataclasses.replace(spec, layout=ring)
    others = as_ring(spec, other, inputs, max(0, end - 64), end)
    assert attend(device, other, others).tobytes() == check(device, spec, inputs).tobytes()


@pytest.mark.parametrize("pages", [(0, 0), (16, 5)])
@pytest.mark.parametrize("position", [31, 32, 33, 63, 64, 95])
def test_a_decoded_token_takes_the_place_of_the_oldest(
    device: Device, position: int, pages: tuple[int, int]
) -> None:
    layout = KvLayout(1, 1, 112, 32, "f32", *pages, capacity=32)
    token = OwnToken(Rotation(32, "half"))
    spec = IncrementalAttention(2, layout, scores=Scores(window=32), token=token)
    inputs = attention_inputs(spec, np.random.default_rng(position), [position], [0])
    outputs = run_kernel(device, spec, inputs)
    compare(spec, outputs, spec.reference(**inputs))
    table = inputs.get("block_table")
    for name in ("k_cache", "v_cache"):
        before, after = (layout.elements(caches[name]) for caches in (inputs, outputs))
        (changed,) = np.flatnonzero((before != after).any(axis=1))
        assert changed == layout.slots_of(0, [position % 32], table)[0, 0]


def test_a_prompt_wraps_around_a_ring(device: Device) -> None:
    """Chunk after chunk appended and attended to: a window and a chunk fit exactly."""
    rows, window, capacity, dim = 24, 41, 64, 32
    ring = KvLayout(1, 1, 160, dim, "f16", capacity=capacity)
    whole = dataclasses.replace(ring, capacity=0)
    rng = np.random.default_rng(2)
    caches = {layout: {n: layout.empty() for n in layout.caches} for layout in (ring, whole)}
    for start in range(0, 6 * rows, rows):
        given = {n: rng.standard_normal((rows, 1, dim)).astype(np.float32) for n in "qkv"}
        given["sequence"] = np.zeros(rows, np.uint32)
        given["position"] = np.arange(start, start + rows, dtype=np.uint32)
        outs = []
        for layout, held in caches.items():
            append = PrepareTokens(1, layout, rows)
            attention = PrefillAttention(1, layout, rows, Scores(window=window))
            tokens = {n: given[n] for n in ("k", "v", "sequence", "position")}
            held.update(run_kernel(device, append, tokens | held))
            queries = {n: given[n] for n in ("q", "sequence", "position")}
            outs.append(run_kernel(device, attention, queries | held)["out"])
        assert np.isfinite(outs[0]).all()
        assert outs[0].tobytes() == outs[1].tobytes()


# ---- widths ----


@pytest.mark.turns(5)
@every_kind
@pytest.mark.parametrize("dims", [(192, 128), (128, 192), (72, 24), (512, 256), (64, 512), (8, 16)])
def test_values_of_another_width(device: Device, kind: str, dims: tuple[int, int]) -> None:
    layout = KvLayout(1, 2, 40, dims[0], "f16", value_dim=dims[1])
    spec = made(kind, 6, layout, 3, Scores())
    check(device, spec, inputs_at(spec, [0, 20, 37]))


@pytest.mark.turns(7)
@every_kind
@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "q8_0"])
@pytest.mark.parametrize("dim", [8, 24, 64, 72, 80, 96, 128, 160, 192, 256, 264, 320, 512])
def test_head_dims_and_types(device: Device, kind: str, dim: int, dtype: Any) -> None:
    if dtype == "q8_0" and dim % 32:
        pytest.skip("q8_0 has groups of 32 values")
    spec = made(kind, 6, KvLayout(1, 2, 40, dim, dtype), 2, Scores())
    check(device, spec, inputs_at(spec, [17, 37]))


@pytest.mark.turns(4)
@every_kind
@pytest.mark.parametrize(
    ("group", "dim"),
    [*((n, 64) for n in (1, 2, 3, 4, 5, 7, 8, 12, 71, 128)), (3, 16), (3, 256), (12, 256)],
)
def test_group_sizes(device: Device, kind: str, group: int, dim: int) -> None:
    """Every query head meets its own KV head, in whole and in ragged tiles."""
    spec = made(kind, 2 * group, KvLayout(1, 2, 24, dim, "f16"), 2, Scores())
    check(device, spec, inputs_at(spec, [9, 22]))


@pytest.mark.turns(5)
@pytest.mark.parametrize("target", ["sm_75", "sm_80"])
@pytest.mark.parametrize("dims", [(512, 512), (192, 128)])
@every_kind
def test_wide_heads_on_older_targets(target: str, kind: str, dims: tuple[int, int]) -> None:
    layout = KvLayout(1, 1, 40, dims[0], "f16", value_dim=dims[1])
    spec = made(kind, 2, layout, 3, Scores(softcap=9.0))
    with Device.open(f"emulator:{target}") as older:
        check(older, spec, inputs_at(spec, [0, 20, 37]))
