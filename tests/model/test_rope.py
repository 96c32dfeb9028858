"""RoPE frequencies against formulas written out element by element."""

from __future__ import annotations

import math

import numpy as np
import pytest

from urdir.model.errors import ConfigError
from urdir.model.metadata import Metadata
from urdir.model.rope import RopeConfig, read_rope


def test_plain_frequencies() -> None:
    rope = RopeConfig(dim=6, style="half", freq_base=100.0)
    expected = [1.0, 100.0 ** (-2 / 6), 100.0 ** (-4 / 6)]
    np.testing.assert_allclose(rope.frequencies(), expected, rtol=1e-15)
    assert rope.magnitude == 1.0


def test_linear_scaling_slows_every_frequency() -> None:
    plain = RopeConfig(dim=64, style="interleaved")
    scaled = RopeConfig(dim=64, style="interleaved", scaling="linear", factor=4.0)
    np.testing.assert_allclose(scaled.frequencies() * 4.0, plain.frequencies(), rtol=1e-15)
    assert scaled.magnitude == 1.0


def test_factors_divide() -> None:
    rope = RopeConfig(dim=8, style="interleaved", freq_base=500000.0)
    factors = np.array([1.0, 2.0, 4.0, 8.0], np.float32)
    np.testing.assert_allclose(rope.frequencies(factors) * factors, rope.frequencies(), rtol=1e-15)


@pytest.mark.parametrize(
    "factors", [np.ones(3), np.array([1, 1, 0, 1]), np.array([1, 1, np.nan, 1]), -np.ones(4)]
)
def test_bad_factors_are_refused(factors: np.ndarray) -> None:
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight"):
        RopeConfig(dim=8, style="interleaved").frequencies(factors)


def _yarn(rope: RopeConfig, pair: int) -> float:
    """Peng et al. 2023, section 3.4, for one pair, with the ramp's ends rounded outwards."""
    frequency = rope.freq_base ** (-2.0 * pair / rope.dim)

    def pair_with(rotations: float) -> float:
        # the pair whose wavelength fits `rotations` times into the original context
        wavelength = rope.original_context / rotations
        return rope.dim * math.log(wavelength / (2 * math.pi)) / (2 * math.log(rope.freq_base))

    low = max(math.floor(pair_with(rope.beta_fast)), 0)
    high = min(math.ceil(pair_with(rope.beta_slow)), rope.dim - 1)
    if pair <= low:
        return frequency
    if pair >= high:
        return frequency / rope.factor
    share = (pair - low) / (high - low)
    return frequency / rope.factor * share + frequency * (1 - share)


@pytest.mark.parametrize(("dim", "factor", "context"), [(128, 4.0, 8192), (64, 40.0, 4096)])
def test_yarn(dim: int, factor: float, context: int) -> None:
    rope = RopeConfig(
        dim=dim, style="half", scaling="yarn", factor=factor, original_context=context,
        ext_factor=1.0,
    )  # fmt: skip
    expected = [_yarn(rope, pair) for pair in range(dim // 2)]
    np.testing.assert_allclose(rope.frequencies(), expected, rtol=1e-13)
    assert rope.frequencies()[0] == 1.0  # fast: kept
    assert rope.frequencies()[-1] == pytest.approx(10000.0 ** -(1 - 2 / dim) / factor)  # slow
    assert rope.magnitude == pytest.approx(1.0 + 0.1 * math.log(factor))


def _read(**values: bool | float | str) -> RopeConfig:
    keys = {f"llama.rope.{name.replace('__', '.')}": value for name, value in values.items()}
    return read_rope(Metadata(keys), "llama", "interleaved", head_dim=64, context_length=4096)


def test_defaults() -> None:
    rope = _read()
    assert (rope.dim, rope.freq_base, rope.factor, rope.magnitude) == (64, 10000.0, 1.0, 1.0)
    np.testing.assert_array_equal(
        rope.frequencies(), RopeConfig(dim=64, style="interleaved").frequencies()
    )


def test_scaling_from_metadata() -> None:
    assert _read(scaling__factor=8.0).factor == 8.0  # linear unless said otherwise
    assert _read(scale_linear=2.0).factor == 2.0  # files of 2023
    assert _read(scaling__type="none", scaling__factor=8.0).factor == 1.0
    assert _read(scaling__factor=0.0).factor == 1.0
    assert _read(scaling__factor=4).factor == 4.0
    yarn = _read(
        scaling__type="yarn", scaling__factor=4.0, scaling__original_context_length=1024,
        scaling__attn_factor=0.5, scaling__yarn_beta_fast=16.0, scaling__yarn_beta_slow=2.0,
    )  # fmt: skip
    assert (yarn.ext_factor, yarn.original_context, yarn.beta_fast, yarn.beta_slow) == (
        1.0,
        1024,
        16.0,
        2.0,
    )
    assert yarn.magnitude == pytest.approx(0.5 * (1.0 + 0.1 * math.log(4.0)))
    assert _read(scaling__type="yarn", scaling__factor=4.0).original_context == 4096
