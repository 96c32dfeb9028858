"""RoPE settings as the metadata spells them; the mathematics is tested in tests/ptxgen."""

from __future__ import annotations

import math

import numpy as np
import pytest

from urdir.model.errors import ConfigError
from urdir.model.families.reader import Reader
from urdir.model.families.rope import RopeConfig, read_rope
from urdir.model.files.metadata import Metadata
from urdir.ptxgen.kernels.rotation import RopeScaling


@pytest.mark.parametrize(
    "factors", [np.array([1, 1, 0, 1]), np.array([1, 1, np.nan, 1]), -np.ones(4)]
)
def test_bad_factors_are_refused(factors: np.ndarray) -> None:
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight"):
        RopeConfig(8, "interleaved", 1e4, RopeScaling()).frequencies(factors)


def _read(**values: bool | float | str) -> RopeConfig:
    keys = {f"llama.rope.{name.replace('__', '.')}": value for name, value in values.items()}
    file = Reader(Metadata(keys), "llama", {}, 1)
    return read_rope(file, "interleaved", head_dim=64, context_length=4096, has_factors=False)


def test_defaults() -> None:
    rope = _read()
    assert (rope.dim, rope.freq_base) == (64, 10000.0)
    assert (rope.scaling.factor, rope.scaling.magnitude) == (1.0, 1.0)
    np.testing.assert_allclose(rope.frequencies(), 10000.0 ** (-np.arange(32) / 32), rtol=1e-14)


def test_scaling_from_metadata() -> None:
    assert _read(scaling__factor=8.0).scaling.factor == 8.0  # linear unless said otherwise
    assert _read(scale_linear=2.0).scaling.factor == 2.0  # files of 2023
    assert _read(scaling__type="none", scaling__factor=8.0).scaling.factor == 1.0
    assert _read(scaling__factor=0.0).scaling.factor == 1.0
    assert _read(scaling__factor=4).scaling.factor == 4.0
    yarn = _read(
        scaling__type="yarn", scaling__factor=4.0, scaling__original_context_length=1024,
        scaling__attn_factor=0.5, scaling__yarn_beta_fast=16.0, scaling__yarn_beta_slow=2.0,
    ).scaling  # fmt: skip
    assert (yarn.ext_factor, yarn.original_context, yarn.beta_fast, yarn.beta_slow) == (
        1.0,
        1024,
        16.0,
        2.0,
    )
    assert yarn.magnitude == pytest.approx(0.5 * (1.0 + 0.1 * math.log(4.0)))
    assert _read(scaling__type="yarn", scaling__factor=4.0).scaling.original_context == 4096
