"""Decode attention that turns and appends the rows' own tokens: against PrepareTokens and
attention one after another, bit for bit.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from urdir.driver import execute
from urdir.driver.compare import compare
from urdir.driver.device import Device
from urdir.driver.errors import CudaError
from urdir.driver.harness import run_kernel
from urdir.driver.plan import Plan
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.flash_decode import FlashDecode
from urdir.ptxgen.kernels.attention.incremental_attention import IncrementalAttention
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.kv_types import KV_DTYPES
from urdir.ptxgen.kernels.attention.own_token import OwnToken
from urdir.ptxgen.kernels.attention.prepare_tokens import PrepareTokens
from urdir.ptxgen.kernels.attention.random_inputs import attention_inputs
from urdir.ptxgen.kernels.attention.scores import Scores
from urdir.ptxgen.kernels.join import Join
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.normalise import Normalise
from urdir.ptxgen.kernels.rotation import Rotation
from urdir.ptxgen.tools.assemble import assemble

Inputs = dict[str, Any]
Spec = IncrementalAttention | FlashDecode

SPECS = [
    spec
    for kind in (IncrementalAttention, FlashDecode)
    for spec in kind.examples().values()
    if spec.token
]
WHOLE, PART = Rotation(128, "half"), Rotation(48, "interleaved", magnitude=1.3)


def name_of(spec: Spec) -> str:
    layout = spec.layout
    paged = " paged" if layout.is_paged else ""
    return f"{spec.name} {spec.heads} x {layout.head_dim} {layout.dtype}{paged}"


def one_after_another(device: Device, spec: Spec, inputs: Inputs) -> Inputs:
    """What two kernels write, or more where rows are normed."""
    layout, token = spec.layout, spec.token
    assert token is not None

    def run(kernel: Any, **more: Any) -> Inputs:
        given = inputs | more
        return run_kernel(
            device, kernel, {p.name: given[p.name] for p in kernel.params if p.name in given}
        )

    if token.norms_rows and token.qk_norm:
        normed = {}
        for name in "qk" if token.appends else "q":
            weights = {"weight": inputs[f"{name}_norm"].reshape(-1)} if token.weights else {}
            x = inputs[name].reshape(spec.rows, -1)
            kernel = Normalise(*x.shape, token.qk_norm)
            normed[name] = run_kernel(device, kernel, {"x": x} | weights)["y"]
            normed[name] = normed[name].reshape(inputs[name].shape)
        token = dataclasses.replace(token, qk_norm=None, qk_norm_over="head")
        inputs = inputs | normed
    if token.latent_norm:
        inputs = inputs | joined(device, spec, inputs)
        token = dataclasses.replace(token, latent_norm=None)
    prepared: Inputs = {}
    if token != OwnToken(appends=False):
        prepared = run(PrepareTokens(spec.heads, layout, spec.rows, token))
    attended = run(dataclasses.replace(spec, token=None), **inputs | prepared)
    return attended | {name: value for name, value in prepared.items() if name != "q"}


def joined(device: Device, spec: Spec, inputs: Inputs) -> Inputs:
    """q and k of the parts that latent attention has."""
    assert spec.token is not None
    first, second, heads = spec.layout.value_start, spec.value_dim, spec.rows * spec.heads
    norm = Normalise(spec.rows, second, spec.token.latent_norm)
    value = run_kernel(device, norm, {"x": inputs["latent"], "weight": inputs["latent_norm"]})["y"]
    q = (inputs[name].reshape(heads, -1) for name in ("q_rotated", "q_absorbed"))
    parts = {"q": (heads, *q), "k": (spec.rows, inputs["k_rotated"], value)}
    return {
        name: run_kernel(device, Join(rows, first, second), {"a": a, "b": b})["y"].reshape(
            spec.rows, -1, first + second
        )
        for name, (rows, a, b) in parts.items()
    }


def assert_same_bits(device: Device, spec: Spec, inputs: Inputs) -> Inputs:
    fused = run_kernel(device, spec, inputs)
    for name, wanted in one_after_another(device, spec, inputs).items():
        assert fused[name].tobytes() == wanted.tobytes(), name
    return fused


@pytest.mark.turns(5)
@pytest.mark.parametrize("spec", SPECS, ids=name_of)
def test_it_equals_separate_kernels(device: Device, spec: Spec) -> None:
    assert_same_bits(device, spec, spec.make_inputs(np.random.default_rng(11)))


# The warps of Normalise: 1, 2, 8, 12, 16, 32 and 32 with two passes; a last one with idle threads.
@pytest.mark.turns(2)
@pytest.mark.parametrize("heads", [1, 7, 31, 47, 64, 130, 300])
def test_rows_of_every_length_are_normed_as_by_normalise(device: Device, heads: int) -> None:
    """In one launch: many heads of q, a few of k; with an eps that matters."""
    token = OwnToken(Rotation(24, "half"), Norm("rms", 0.5), qk_norm_over="row")
    spec = IncrementalAttention(heads, KvLayout(1, 1, 3, 64, "f16"), token=token)
    assert_same_bits(device, spec, attention_inputs(spec, np.random.default_rng(heads), [2], [0]))


@pytest.mark.parametrize(
    ("target", "spec"),
    [  # by turns, both with --full
        pytest.param(target, spec, id=f"{name_of(spec)}-{target}", marks=[pytest.mark.full] * skips)
        for at, spec in enumerate(SPECS[::2])
        for target, skips in (("sm_75", at % 16 != 0), ("sm_80", at % 16 != 8))
        if target in spec.targets
    ],
)
def test_it_equals_separate_kernels_on_older_targets(target: str, spec: Spec) -> None:
    """No asynchronous copies, or no griddepcontrol."""
    with Device.open(f"emulator:{target}") as older:
        assert_same_bits(older, spec, spec.make_inputs(np.random.default_rng(12)))


# 128 dims: 16 keys a pass, two passes a step (one in f32), two steps in flight at first.
@pytest.mark.turns(7)
@pytest.mark.parametrize("position", [0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 95, 96, 97, 130])
@pytest.mark.parametrize("dtype", KV_DTYPES)
def test_every_place_in_a_step(device: Device, position: int, dtype: Any) -> None:
    spec = IncrementalAttention(4, KvLayout(2, 1, 131, 128, dtype), token=OwnToken(WHOLE))
    inputs = attention_inputs(spec, np.random.default_rng(position), [position], [1])
    fused = assert_same_bits(device, spec, inputs)
    for name in ("k_cache", "v_cache"):  # nothing but the token's place has changed
        before, after = (
            spec.layout.read(caches[name], 1, range(131)) for caches in (inputs, fused)
        )
        changed = (before != after).any(axis=(0, 2))
        assert changed[position]
        assert changed.sum() == 1


@pytest.mark.turns(5)
@pytest.mark.parametrize("position", [0, 15, 16, 31, 32, 47, 99])
@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("dtype", ["f16", "q8_0"])
def test_one_chunk_has_the_token(device: Device, position: int, window: int, dtype: Any) -> None:
    """Chunks end within a step, at a step's end, and where the token is the first of its chunk."""
    layout = KvLayout(1, 1, 128, 64, dtype)
    spec = FlashDecode(
        3, layout, scores=Scores(window=window), ctas=7, least=16, token=OwnToken(PART)
    )
    inputs = attention_inputs(spec, np.random.default_rng(position), [position], [0])
    assert_same_bits(device, spec, inputs)


@pytest.mark.parametrize("group", [1, 3, 4, 7])
def test_fewer_heads_a_cta_change_no_bit(device: Device, group: int) -> None:
    layout = KvLayout(1, 2, 70, 128, "f16")
    specs = [
        IncrementalAttention(2 * group, layout, token=OwnToken(WHOLE), most_heads=most)
        for most in (4, 2, 1)
    ]
    inputs = attention_inputs(specs[0], np.random.default_rng(group), [66], [0])
    first, second, single = (run_kernel(device, spec, inputs) for spec in specs)
    assert all(second[name].tobytes() == first[name].tobytes() for name in first)
    # lanes multiply where a CTA has a single head
    compare(specs[2], single, specs[2].reference(**inputs))
    assert all(single[name].tobytes() == first[name].tobytes() for name in ("k_cache", "v_cache"))


@pytest.mark.parametrize("position", [40, 2**31, 2**32 - 1])
@pytest.mark.parametrize("kind", [IncrementalAttention, FlashDecode])
def test_an_idle_row_writes_nothing(device: Device, position: int, kind: type[Spec]) -> None:
    spec = kind(4, KvLayout(2, 2, 40, 64, "q8_0"), rows=2, token=OwnToken(PART))
    inputs = attention_inputs(spec, np.random.default_rng(1), [position, position], [0, 2**31])
    outputs = run_kernel(device, spec, inputs)
    for name in ("k_cache", "v_cache"):
        assert outputs[name].tobytes() == inputs[name].tobytes()
    assert not outputs.get("out", np.zeros(1)).any()


def test_infinities_in_the_token_stay_in_its_head(device: Device) -> None:
    spec = IncrementalAttention(4, KvLayout(1, 2, 40, 128, "f16"), token=OwnToken(WHOLE))
    inputs = attention_inputs(spec, np.random.default_rng(2), [35], [0])
    inputs["v"][0, 0, 3] = 1e9
    out = assert_same_bits(device, spec, inputs)["out"]
    assert np.isposinf(out[0, :2, 3]).all()
    assert np.isfinite(np.delete(out, 3, axis=2)).all()
    assert np.isfinite(out[0, 2:]).all()


def test_a_cache_that_the_launch_before_writes_is_too_young(emulator: Device) -> None:
    """Older keys are read before the wait: the emulator sees that in a graph."""
    layout = KvLayout(1, 1, 32, 64, "f16")
    spec, append = IncrementalAttention(2, layout, token=OwnToken(PART)), PrepareTokens(1, layout)
    inputs = attention_inputs(spec, np.random.default_rng(3), [5], [0])
    sizes = {p.name: spec.nbytes(p) for p in spec.params} | {"older": 4}
    plan = Plan("too young")
    with emulator.arena(sizes, "work") as work, emulator.create_stream() as stream:
        for name, value in inputs.items():
            work[name].upload(value)
        work["older"].upload(np.array([4], np.uint32))
        given = {p.name: work[p.name] for p in append.params}
        plan.launch(append, "append", **given | {"position": work["older"]})
        plan.launch(spec, "attention", **{p.name: work[p.name] for p in spec.params})
        with execute.record(plan, emulator) as graph:
            graph.launch(stream)
            with pytest.raises(CudaError, match=r"not yet executed griddepcontrol\.wait"):
                stream.synchronize()


@pytest.mark.turns(5)
@pytest.mark.parametrize("target", ["sm_75", "sm_89", "sm_90", "sm_120"])
@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("is_paged", [False, True])
def test_no_spills(target: str, dtype: Any, is_paged: bool) -> None:
    """As without a rope, whose registers are free again before the loop over the keys."""
    pages = (64, 99) if is_paged else (0, 0)
    layout = KvLayout(64, 2, 1 << 17, 128, dtype, *pages)
    rope = Rotation(122, "half", magnitude=1.5)
    spec = IncrementalAttention(
        14, layout, rows=8, scores=Scores(window=4096, softcap=50.0), token=OwnToken(rope)
    )
    cost = assemble(spec.ptx(target), target).entries["incremental_attention"]
    assert not cost.spills
    if int(target[3:]) >= 90:
        assert cost.registers <= 128, "two CTAs an SM"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"token": OwnToken(Rotation(66, "half"))}, "rotary_dim 66 of a head_dim of 64"),
        ({"most_heads": 3}, "most_heads 3: one of"),
        (
            {"token": OwnToken(PART), "layout": KvLayout(1, 2, 1 << 25, 64, "f16")},
            r"exact below 2\^24: max_len 33554432",
        ),
    ],
)
def test_shapes_it_does_not_handle_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(PtxgenError, match=message):
        IncrementalAttention(**{"heads": 4, "layout": KvLayout(1, 2, 4, 64, "f16")} | fields)
