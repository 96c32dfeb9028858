"""RoPE: frequencies against ggml's formulas written out, the kernel against float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from urdir.driver.device import Device
from urdir.driver.harness import run_kernel
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.own_token import OwnToken
from urdir.ptxgen.kernels.attention.prepare_tokens import PrepareTokens
from urdir.ptxgen.kernels.rotation import (
    MAX_POSITIONS,
    RopeScaling,
    Rotation,
    frequencies,
    turns_table,
)

POSITIONS = (0, 1, 511, 131071, 1000003)


def ggml_yarn(
    rotary_dim: int, base: float, factor: float, context: int, fast: float, slow: float
) -> list[float]:
    """rope_yarn and rope_yarn_corr_dims at position 1, one pair after another."""

    def corr_dim(rotations: float) -> float:
        return rotary_dim * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(base))

    low, high = max(0, math.floor(corr_dim(fast))), min(rotary_dim - 1, math.ceil(corr_dim(slow)))
    thetas = []
    theta = 1.0
    for i0 in range(0, rotary_dim, 2):
        y = (i0 // 2 - low) / max(0.001, high - low)
        ramp_mix = 1 - min(1, max(0, y))
        thetas.append(theta / factor * (1 - ramp_mix) + theta * ramp_mix)
        theta *= base ** (-2.0 / rotary_dim)
    return thetas


def test_plain_frequencies_are_powers_of_the_base() -> None:
    radians, magnitude = frequencies(8, 10000.0)
    np.testing.assert_allclose(radians, [1, 0.1, 0.01, 0.001], rtol=1e-15)
    assert magnitude == 1.0


def test_linear_scaling_divides_every_frequency() -> None:
    radians, magnitude = frequencies(8, 10000.0, RopeScaling.linear(4.0))
    np.testing.assert_allclose(radians, [0.25, 0.025, 0.0025, 0.00025], rtol=1e-15)
    assert magnitude == 1.0


@pytest.mark.parametrize(
    ("rotary_dim", "base", "factor", "context", "fast", "slow"),
    [
        (128, 10000.0, 16.0, 4096, 32.0, 1.0),
        (128, 1e6, 4.0, 32768, 32.0, 1.0),
        (64, 150000.0, 32.0, 4096, 32.0, 1.0),
        (96, 5e5, 8.0, 8192, 24.0, 2.0),
    ],
)
def test_yarn_is_what_ggml_computes(
    rotary_dim: int, base: float, factor: float, context: int, fast: float, slow: float
) -> None:
    scaling = RopeScaling.yarn(factor, context, beta_fast=fast, beta_slow=slow)
    radians, magnitude = frequencies(rotary_dim, base, scaling)
    wanted = ggml_yarn(rotary_dim, base, factor, context, fast, slow)
    np.testing.assert_allclose(radians, wanted, rtol=1e-12)
    assert magnitude == pytest.approx(1 + 0.1 * math.log(factor), rel=1e-15)


def test_yarn_keeps_fast_pairs_and_interpolates_slow_ones() -> None:
    plain, _ = frequencies(128, 10000.0)
    radians, _ = frequencies(128, 10000.0, RopeScaling.yarn(16.0, 4096))
    rotations = 4096 * plain / (2 * math.pi)
    np.testing.assert_array_equal(radians[rotations > 40], plain[rotations > 40])
    np.testing.assert_array_equal(radians[rotations < 0.8], plain[rotations < 0.8] / 16)
    assert np.all(np.diff(plain / radians) >= 0)


def test_ext_factor_mixes_and_attn_factor_scales() -> None:
    half = RopeScaling.yarn(8.0, 2048, ext_factor=0.5, attn_factor=0.9)
    radians, magnitude = frequencies(64, 10000.0, half)
    plain, _ = frequencies(64, 10000.0)
    full, _ = frequencies(64, 10000.0, RopeScaling.yarn(8.0, 2048))
    np.testing.assert_allclose(radians, (full + plain / 8.0) / 2, rtol=1e-14)
    assert magnitude == pytest.approx(0.9 * (1 + 0.1 * math.log(8.0)))
    assert frequencies(64, 10000.0, RopeScaling.none(attn_factor=1.19))[1] == 1.19


def test_factors_divide_the_extrapolated_frequencies() -> None:
    factors = np.linspace(1, 8, 32)
    plain, _ = frequencies(64, 5e5)
    np.testing.assert_allclose(frequencies(64, 5e5, None, factors)[0], plain / factors, rtol=1e-15)


def turning(
    heads: int, head_dim: int, rotary_dim: int, style: Any, magnitude: float = 1.0, **fields: int
) -> PrepareTokens:
    """Heads turned in place."""
    layout = KvLayout(1, 1, fields.get("max_len", MAX_POSITIONS), head_dim, "f32")
    token = OwnToken(Rotation(rotary_dim, style, magnitude), appends=False)
    return PrepareTokens(heads, layout, fields.get("rows", 1), token)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: frequencies(7, 1e4), "rotary_dim 7"),
        (lambda: frequencies(8, 1.0), "base 1.0"),
        (lambda: frequencies(8, 1e4, None, [1.0, 2.0]), r"\(2,\).*needs \(4,\)"),
        (lambda: RopeScaling.linear(0.0), "factor 0.0"),
        (lambda: RopeScaling.yarn(2.0, 0), "original context"),
        (lambda: turning(0, 8, 8, "half"), "neither prepared nor appended"),
        (lambda: turning(-1, 8, 8, "half"), "heads is -1"),
        (lambda: turning(1, 8, 10, "half"), "rotary_dim 10"),
        (lambda: turning(1, 8, 5, "half"), "even"),
        (lambda: turning(1, 8, 8, "spiral"), "'spiral'"),
    ],
)
def test_bad_parameters_are_refused(call: Any, message: str) -> None:
    with pytest.raises(PtxgenError, match=message):
        call()


def test_turns_table_holds_48_bits() -> None:
    radians, _ = frequencies(128, 5e5)
    table = turns_table(radians)
    assert table.shape == (64, 2)
    assert table.dtype == np.float32
    restored = table.astype(np.float64).sum(axis=1) * 2 * np.pi
    np.testing.assert_allclose(restored, radians, rtol=2**-47)


def inputs_at(spec: PrepareTokens, position: int, radians: Any, seed: int = 0) -> dict[str, Any]:
    inputs = spec.make_inputs(np.random.default_rng(seed))
    return inputs | {
        "position": np.array([position], np.uint32),
        "frequencies": turns_table(radians),
    }


@pytest.mark.parametrize("position", POSITIONS)
def test_cosine_and_sine_are_good_at_any_position(device: Device, position: int) -> None:
    """The unit vector (1, 0) turns into (cos, sin): absolute error below 1e-6."""
    spec = turning(2, 128, 128, "half")
    radians, _ = frequencies(128, 10000.0)
    inputs = inputs_at(spec, position, radians)
    units = np.array([[[1, 0], [0, 1]]], np.float32)
    inputs["q"] = np.repeat(units, 64, axis=2)
    (turned,) = run_kernel(device, spec, inputs)["q"]
    cos, sin = np.cos(position * radians), np.sin(position * radians)
    np.testing.assert_allclose(turned[0], np.concatenate([cos, sin]), rtol=0, atol=1e-6)
    np.testing.assert_allclose(turned[1], np.concatenate([-sin, cos]), rtol=0, atol=1e-6)


def test_position_zero_only_scales(device: Device) -> None:
    spec = turning(3, 64, 48, "interleaved", 1.25)
    inputs = inputs_at(spec, 0, frequencies(48, 1e4)[0])
    q = run_kernel(device, spec, inputs)["q"]
    np.testing.assert_array_equal(q[..., :48], inputs["q"][..., :48] * 1.25)
    np.testing.assert_array_equal(q[..., 48:], inputs["q"][..., 48:])


@pytest.mark.parametrize("style", ["interleaved", "half"])
@pytest.mark.parametrize("rotary_dim", [32, 42])
def test_norms_are_kept_and_the_rest_is_untouched(
    device: Device, style: Any, rotary_dim: int
) -> None:
    """Whole groups of eight values, and not."""
    spec = turning(5, 80, rotary_dim, style)
    inputs = inputs_at(spec, 70001, frequencies(rotary_dim, 1e4)[0])
    inputs["q"][..., rotary_dim:] = np.inf  # nothing of it may reach the others
    q = run_kernel(device, spec, inputs)["q"]
    turned, given = q[..., :rotary_dim], inputs["q"][..., :rotary_dim]
    before, after = (np.linalg.norm(x.astype(np.float64), axis=-1) for x in (given, turned))
    np.testing.assert_allclose(after, before, rtol=1e-6)
    assert np.abs(turned - given).max() > 0.1
    np.testing.assert_array_equal(q[..., rotary_dim:], inputs["q"][..., rotary_dim:])


def test_scores_depend_on_the_distance_only(device: Device) -> None:
    spec = turning(4, 64, 64, "half")
    radians, _ = frequencies(64, 1e4)
    scores = []
    for query_at, key_at in ((17, 4), (117, 104), (90013, 90000)):
        q = run_kernel(device, spec, inputs_at(spec, query_at, radians))["q"]
        k = run_kernel(device, spec, inputs_at(spec, key_at, radians, seed=1))["q"]
        scores.append(np.einsum("hd,hd->h", q[0].astype(np.float64), k[0]))
    np.testing.assert_allclose(scores[1], scores[0], atol=5e-5)
    np.testing.assert_allclose(scores[2], scores[0], atol=5e-5)


def test_the_styles_differ_by_a_permutation(device: Device) -> None:
    radians, _ = frequencies(48, 1e4)
    interleaved, half = (turning(3, 64, 48, style, 1.1) for style in ("interleaved", "half"))
    inputs = inputs_at(interleaved, 4097, radians)
    order = np.concatenate([np.arange(0, 48, 2), np.arange(1, 48, 2), np.arange(48, 64)])
    expected = run_kernel(device, interleaved, inputs)["q"]
    found = run_kernel(device, half, inputs | {"q": inputs["q"][..., order]})["q"]
    np.testing.assert_array_equal(found, expected[..., order])


@pytest.mark.parametrize("style", ["interleaved", "half"])
def test_rows_are_those_of_single_rows_and_idle_ones_are_untouched(
    device: Device, style: Any
) -> None:
    spec = turning(5, 80, 32, style, 1.1, rows=5, max_len=4000)
    inputs = spec.make_inputs(np.random.default_rng(5))
    inputs["position"] = np.array([17, 4000, 0, 3999, 2**32 - 1], np.uint32)
    q = run_kernel(device, spec, inputs)["q"]
    single = turning(5, 80, 32, style, 1.1)
    for row in (0, 2, 3):
        alone = {name: inputs[name][row : row + 1] for name in ("q", "position")}
        assert q[row].tobytes() == run_kernel(device, single, inputs | alone)["q"][0].tobytes()
    for row in (1, 4):
        assert q[row].tobytes() == inputs["q"][row].tobytes()
