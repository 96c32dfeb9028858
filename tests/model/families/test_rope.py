"""RoPE settings as the metadata spells them; the mathematics is tested in tests/ptxgen."""

from __future__ import annotations

import math

import numpy as np
import pytest

from urdir.model.errors import ConfigError
from urdir.model.families.reader import Reader
from urdir.model.families.rope import RopeConfig, read_rope, windowed_rope, with_sections
from urdir.model.families.stored import StoredVector
from urdir.model.files.metadata import Metadata
from urdir.ptxgen.kernels.rotation import RopeScaling


@pytest.mark.parametrize(
    "factors", [np.array([1, 1, 0, 1]), np.array([1, 1, np.nan, 1]), -np.ones(4)]
)
def test_bad_factors_are_refused(factors: np.ndarray) -> None:
    stored = StoredVector.whole("rope_freqs.weight", 4)
    with pytest.raises(ConfigError, match=r"rope_freqs\.weight"):
        RopeConfig(8, "interleaved", 1e4, RopeScaling(), stored).frequencies(factors)


def _read(**values: bool | float | str) -> RopeConfig:
    keys = {f"llama.rope.{name.replace('__', '.')}": value for name, value in values.items()}
    file = Reader(Metadata({"llama.context_length": 4096, **keys}), "llama", {}, 1)
    return read_rope(file, "interleaved", head_dim=64)


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


def test_longrope_has_long_factors_beyond_the_original_context() -> None:
    stored = {"rope_factors_short.weight": (32,), "rope_factors_long.weight": (32,)}
    keys = {"phi3.context_length": 4096, "phi3.rope.scaling.original_context_length": 1024}
    rope = read_rope(Reader(Metadata(keys), "phi3", stored, 1), "half", 64)
    names = [rope.at_context(context).factors for context in (1024, 1025)]
    assert [factors and factors.name for factors in names] == list(stored)


def test_windowed_layers_have_a_base_of_their_own_and_no_extension() -> None:
    keys = {
        "gemma3.context_length": 4096,
        "gemma3.rope.freq_base": 1e6,
        "gemma3.rope.scaling.factor": 8.0,
        "gemma3.rope.dimension_count_swa": 32,
    }
    file = Reader(Metadata(keys), "gemma3", {}, 1)
    rope = read_rope(file, "half", 64)
    local = windowed_rope(file, rope, 64, scaled=False, base=1e4)
    assert (local.dim, local.freq_base, local.scaling) == (32, 1e4, RopeScaling.none())
    assert windowed_rope(file, rope, 64, scaled=True).scaling == rope.scaling
    assert windowed_rope(file, rope, 64, scaled=True).freq_base == 1e6


def _still(sizes: list[int], *, interleaved: bool, dim: int = 128) -> tuple[int, ...]:
    keys = {"vl.context_length": 4096, "vl.rope.dimension_sections": np.array(sizes, np.int32)}
    file = Reader(Metadata(keys), "vl", {}, 1)
    return with_sections(file, read_rope(file, "half", dim), interleaved=interleaved).still


def test_pairs_of_the_fourth_axis_stand_still() -> None:
    """By the loop of ggml's ggml_mrope_cache_init, done by hand for Qwen 2 VL and Qwen 3 VL."""
    assert _still([16, 24, 24, 0], interleaved=False) == ()
    assert _still([24, 20, 20, 0], interleaved=True) == (61, 62)
    assert _still([8, 8, 8, 8], interleaved=False, dim=64) == tuple(range(24, 32))
    assert _still([2, 1, 1, 1], interleaved=False, dim=16) == (4,)
    for wrong in ([0, 0, 0, 0], [1, 2, 3], [-1, 2, 3, 4]):
        with pytest.raises(ConfigError, match="dimension_sections"):
            _still(wrong, interleaved=False)


def test_what_stands_still_has_no_frequency() -> None:
    rope = RopeConfig(8, "half", 1e4, RopeScaling(), still=(1, 3))
    np.testing.assert_allclose(rope.frequencies(), [1.0, 0.0, 1e-2, 0.0])
