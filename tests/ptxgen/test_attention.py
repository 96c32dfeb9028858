"""Incremental attention: edge positions, grouped queries, properties of the softmax."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from urdir.driver.compare import compare
from urdir.driver.device import Device
from urdir.driver.harness import run_kernel
from urdir.driver.launch import launch, pack
from urdir.ptxgen.assemble import assemble
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention import Attention

Inputs = dict[str, Any]


def inputs_at(spec: Attention, position: int, seed: int = 0) -> Inputs:
    """Random queries and caches; rows beyond ``position`` are NaN."""
    rng = np.random.default_rng(seed)
    inputs: Inputs = {"position": np.array([position], np.uint32)}
    inputs["q"] = rng.standard_normal((spec.heads, spec.head_dim)).astype(np.float32)
    for name in ("k_cache", "v_cache"):
        param = spec.param(name)
        cache = rng.standard_normal(spec.shape_of(param)).astype(param.numpy_dtype)
        cache[:, position + 1 :] = np.nan
        inputs[name] = cache
    return inputs


def plain_attention(spec: Attention, inputs: Inputs, position: int) -> Any:
    """One query head after another, softmax by its definition."""
    out = np.empty((spec.heads, spec.head_dim))
    for head in range(spec.heads):
        keys = inputs["k_cache"][head // spec.group, : position + 1].astype(np.float64)
        values = inputs["v_cache"][head // spec.group, : position + 1].astype(np.float64)
        scores = np.exp(keys @ inputs["q"][head].astype(np.float64) / np.sqrt(spec.head_dim))
        out[head] = scores @ values / scores.sum()
    return out


# 64 dims: 32 keys a pass, 2 passes a step at tile 4, 4 at tile 2.
@pytest.mark.parametrize("position", [0, 1, 31, 32, 63, 64, 101, 127, 128, 129])
@pytest.mark.parametrize(("heads", "dtype"), [(2, "f16"), (4, "f32")])
def test_edge_positions(device: Device, position: int, heads: int, dtype: Any) -> None:
    spec = Attention(heads=heads, kv_heads=1, head_dim=64, max_len=130, dtype=dtype)
    inputs = inputs_at(spec, position, seed=position)
    outputs = run_kernel(device, spec, inputs)
    compare(spec, outputs, spec.reference(**inputs))
    wanted = plain_attention(spec, inputs, position)
    np.testing.assert_allclose(outputs["out"], wanted, rtol=0, atol=5e-6 * np.abs(wanted).max())


@pytest.mark.parametrize("head_dim", [64, 72, 80, 96, 112, 128, 256])
@pytest.mark.parametrize("dtype", ["f16", "f32"])
def test_head_dims(device: Device, head_dim: int, dtype: Any) -> None:
    spec = Attention(heads=6, kv_heads=2, head_dim=head_dim, max_len=40, dtype=dtype)
    inputs = inputs_at(spec, 37)
    compare(spec, run_kernel(device, spec, inputs), spec.reference(**inputs))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 12, 71])
def test_group_sizes(device: Device, group: int) -> None:
    """Every query head meets its own KV head, in whole and in ragged tiles."""
    spec = Attention(heads=2 * group, kv_heads=2, head_dim=64, max_len=20, dtype="f16")
    inputs = inputs_at(spec, 18)
    outputs = run_kernel(device, spec, inputs)
    wanted = plain_attention(spec, inputs, 18)
    np.testing.assert_allclose(outputs["out"], wanted, rtol=0, atol=5e-6 * np.abs(wanted).max())


def test_equal_keys_give_the_mean_of_the_values(device: Device) -> None:
    spec = Attention(heads=3, kv_heads=1, head_dim=80, max_len=150, dtype="f16")
    inputs = inputs_at(spec, 140)
    inputs["k_cache"][:, :141] = inputs["k_cache"][:, :1]
    mean = inputs["v_cache"][0, :141].astype(np.float64).mean(axis=0)
    outputs = run_kernel(device, spec, inputs)
    np.testing.assert_allclose(outputs["out"], np.broadcast_to(mean, (3, 80)), atol=1e-6)


def test_one_key_gives_its_value_exactly(device: Device) -> None:
    spec = Attention(heads=5, kv_heads=1, head_dim=128, max_len=3, dtype="f16")
    inputs = inputs_at(spec, 0)
    outputs = run_kernel(device, spec, inputs)
    value = inputs["v_cache"][0, 0].astype(np.float32)
    np.testing.assert_array_equal(outputs["out"], np.broadcast_to(value, (5, 128)))


@pytest.mark.parametrize("winner", [0, 50, 76])
def test_a_dominant_key_wins_wherever_it_is(device: Device, winner: int) -> None:
    """Scores of thousands neither overflow nor let an early maximum stick."""
    spec = Attention(heads=2, kv_heads=1, head_dim=64, max_len=77, dtype="f32")
    inputs = inputs_at(spec, 76)
    inputs["q"] *= 1000
    inputs["k_cache"][0, winner] = inputs["q"][0] / 100
    outputs = run_kernel(device, spec, inputs)
    np.testing.assert_array_equal(outputs["out"][0], inputs["v_cache"][0, winner])
    assert np.isfinite(outputs["out"]).all()


def test_very_negative_scores_still_average(device: Device) -> None:
    """Every score is about -10^6: a maximum that starts at zero would give 0 / 0."""
    spec = Attention(heads=1, kv_heads=1, head_dim=8, max_len=9, dtype="f32")
    inputs = inputs_at(spec, 8)
    inputs["q"][:] = -1000
    inputs["k_cache"][:] = 1000
    mean = inputs["v_cache"][0].astype(np.float64).mean(axis=0)
    outputs = run_kernel(device, spec, inputs)
    np.testing.assert_allclose(outputs["out"][0], mean, atol=1e-6)


def test_infinities_out_of_reach_do_not_matter(device: Device) -> None:
    """0 * infinity must not appear, for rows beyond the position, other heads and idle lanes."""
    spec = Attention(heads=2, kv_heads=2, head_dim=96, max_len=33, dtype="f16")
    clean = inputs_at(spec, 5)
    dirty = dict(clean)
    for name in ("k_cache", "v_cache"):
        dirty[name] = clean[name].copy()
        dirty[name][:, 6:] = np.inf
        dirty[name][1] = np.inf
    expected = run_kernel(device, spec, clean)
    np.testing.assert_array_equal(run_kernel(device, spec, dirty)["out"][0], expected["out"][0])


@pytest.mark.parametrize("position", [33, 2**32 - 1])
def test_a_position_outside_means_the_whole_cache(device: Device, position: int) -> None:
    spec = Attention(heads=2, kv_heads=1, head_dim=64, max_len=33, dtype="f16")
    inputs = inputs_at(spec, 32)
    expected = run_kernel(device, spec, inputs)
    beyond = inputs | {"position": np.array([position], np.uint32)}
    np.testing.assert_array_equal(run_kernel(device, spec, beyond)["out"], expected["out"])


def test_scale_replaces_the_default(device: Device) -> None:
    default = Attention(heads=2, kv_heads=1, head_dim=64, max_len=10, dtype="f32")
    doubled = Attention(heads=2, kv_heads=1, head_dim=64, max_len=10, dtype="f32", scale=0.25)
    inputs = inputs_at(default, 9)
    expected = run_kernel(device, default, inputs | {"q": inputs["q"] * 2})
    np.testing.assert_array_equal(run_kernel(device, doubled, inputs)["out"], expected["out"])


def test_rows_never_written_are_never_read(emulator: Device) -> None:
    """The emulator faults where a kernel reads memory that nothing has written."""
    spec = Attention(heads=4, kv_heads=2, head_dim=80, max_len=64, dtype="f16")
    position = 20
    inputs = inputs_at(spec, position)
    args: dict[str, Any] = {}
    for p in spec.params:
        args[p.name] = buffer = emulator.allocate(spec.nbytes(p), p.name)
        if p.name.endswith("_cache"):
            for head in range(spec.kv_heads):
                offset = head * spec.max_len * spec.head_dim * 2
                buffer.upload(inputs[p.name][head, : position + 1], offset)
        elif p.name in inputs:
            buffer.upload(inputs[p.name])
    with emulator.create_stream() as stream:
        launch(emulator.load(spec), pack(spec, args), stream)
        stream.synchronize()
    out = args["out"].download(np.float32, (spec.heads, spec.head_dim))
    compare(spec, {"out": out}, spec.reference(**inputs))


@pytest.mark.parametrize("target", ["sm_75", "sm_89", "sm_90"])
@pytest.mark.parametrize(("group", "dtype"), [(1, "f32"), (2, "f32"), (8, "f16"), (8, "f32")])
@pytest.mark.parametrize("head_dim", [80, 256])
def test_no_spills(target: str, group: int, dtype: Any, head_dim: int) -> None:
    """At the widest tiles and heads, also where shuffles are calls that clobber registers."""
    spec = Attention(heads=group, kv_heads=1, head_dim=head_dim, max_len=1 << 17, dtype=dtype)
    assert not assemble(spec.ptx(target), target).entries["attention"].spills


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"heads": 3}, "3 query heads are not a multiple of 2"),
        ({"heads": 0}, "0 query heads"),
        ({"head_dim": 264}, "head_dim up to 256: 264"),
        ({"head_dim": 20}, "head_dim 20"),
        ({"dtype": "q8_0"}, "'q8_0'"),
    ],
)
def test_shapes_it_does_not_handle_are_refused(fields: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 64, "max_len": 4, "dtype": "f16"}
    with pytest.raises(PtxgenError, match=message):
        Attention(**good | fields)
