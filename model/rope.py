"""RoPE frequencies: plain, linearly scaled, YaRN, and Llama 3's frequency factors.

All forms make an angle that is linear in the position: angle(i) = position * frequency(i), so
that a model needs one table (dim / 2,) of frequencies and one factor for cos and sin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from urdir.model.errors import ConfigError, UnsupportedError
from urdir.model.metadata import Metadata

RopeStyle = Literal["interleaved", "half"]
"""Which elements turn together: (2i, 2i + 1), or (i, i + dim / 2)."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """How a model rotates queries and keys."""

    dim: int  # leading elements of a head that turn; even
    style: RopeStyle
    freq_base: float = 10000.0
    scaling: str = "none"  # "none", "linear" or "yarn"
    factor: float = 1.0  # context extension; positions count 1 / factor
    original_context: int = 0  # context before the extension, YaRN only
    ext_factor: float = 0.0  # weight of YaRN's ramp, 0 or 1 in practice
    attn_factor: float = 1.0  # further factor on cos and sin
    beta_fast: float = 32.0  # rotations over original_context: above, a frequency is kept
    beta_slow: float = 1.0  # ... below, it is scaled by 1 / factor

    @property
    def magnitude(self) -> float:
        """The factor on cos and sin (Peng et al. 2023, YaRN, eq. 22: 0.1 ln(s) + 1)."""
        if self.ext_factor == 0.0:
            return self.attn_factor
        return self.attn_factor * (1.0 + 0.1 * math.log(self.factor))

    def frequencies(self, factors: NDArray[Any] | None = None) -> NDArray[np.float64]:
        """Radians per position, (dim / 2,) f64.

        `factors` is the file's rope_freqs.weight, (dim / 2,): each frequency is divided by its own
        (ConfigError for a factor that is not a positive number).
        """
        exponents = np.arange(0, self.dim, 2, dtype=np.float64) / self.dim
        kept = self.freq_base**-exponents
        if factors is not None:
            factors = np.asarray(factors, np.float64)
            if factors.shape != kept.shape or not np.all(np.isfinite(factors) & (factors > 0)):
                raise ConfigError(f"rope_freqs.weight must be {kept.shape} positive numbers")
            kept = kept / factors
        scaled = kept / self.factor
        if self.ext_factor == 0.0:
            return scaled
        weight = self._ramp() * self.ext_factor
        return scaled * (1.0 - weight) + kept * weight

    def _ramp(self) -> NDArray[np.float64]:
        """1 where a frequency is kept, 0 where it is scaled (YaRN eq. 17-18, as ggml rounds it)."""
        low = max(0.0, math.floor(self._pair_turning(self.beta_fast)))
        high = min(self.dim - 1.0, math.ceil(self._pair_turning(self.beta_slow)))
        pairs = np.arange(self.dim // 2, dtype=np.float64)
        ramp: NDArray[np.float64] = (pairs - low) / max(0.001, high - low)
        return 1.0 - np.clip(ramp, 0.0, 1.0)

    def _pair_turning(self, rotations: float) -> float:
        """The (fractional) pair that makes `rotations` turns over the original context."""
        wavelength = self.original_context / (rotations * 2.0 * math.pi)
        return self.dim * math.log(wavelength) / (2.0 * math.log(self.freq_base))


def read_rope(
    metadata: Metadata, arch: str, style: RopeStyle, head_dim: int, context_length: int
) -> RopeConfig:
    """Read and check `{arch}.rope.*`."""
    key = f"{arch}.rope."
    dim = metadata.optional(key + "dimension_count", int, head_dim)
    if not 0 < dim <= head_dim or dim % 2:
        raise ConfigError(
            f"{key}dimension_count is {dim}, expected an even number up to {head_dim}"
        )
    scaling = _read_scaling(metadata, key)
    factor = metadata.optional(
        key + "scaling.factor", float, metadata.optional(key + "scale_linear", float, 1.0)
    )
    rope = RopeConfig(
        dim=dim,
        style=style,
        freq_base=metadata.optional(key + "freq_base", float, 10000.0),
        scaling=scaling,
        factor=1.0 if scaling == "none" or factor == 0.0 else factor,  # ggml: 0 means unscaled
        original_context=metadata.optional(
            key + "scaling.original_context_length", int, context_length
        ),
        ext_factor=_read_ext_factor(metadata, key, scaling),
        attn_factor=metadata.optional(key + "scaling.attn_factor", float, 1.0)
        * metadata.optional(key + "scaling.yarn_attn_factor", float, 1.0),
        beta_fast=metadata.optional(key + "scaling.yarn_beta_fast", float, 32.0),
        beta_slow=metadata.optional(key + "scaling.yarn_beta_slow", float, 1.0),
    )
    for name in ("factor", "original_context", "attn_factor", "beta_fast", "beta_slow"):
        if getattr(rope, name) <= 0:
            raise ConfigError(
                f"{key}*: {name} is {getattr(rope, name)}, expected a positive number"
            )
    if rope.freq_base <= 1.0:
        raise ConfigError(f"{key}freq_base is {rope.freq_base}, expected more than 1")
    return rope


def _read_scaling(metadata: Metadata, key: str) -> str:
    # ggml's default is "linear", with a factor that defaults to 1
    scaling = metadata.optional(key + "scaling.type", str, "linear")
    if scaling not in ("none", "linear", "yarn"):
        raise UnsupportedError(
            f"{key}scaling.type is {scaling!r}; none, linear and yarn are supported"
        )
    return scaling


def _read_ext_factor(metadata: Metadata, key: str, scaling: str) -> float:
    ext_factor = metadata.optional(key + "scaling.yarn_ext_factor", float, -1.0)
    if ext_factor >= 0.0:
        return ext_factor
    return 1.0 if scaling == "yarn" else 0.0
