"""Rotary position embedding on the host: frequencies, context extension, the device table.

RoPE (Su et al. 2021, arXiv 2104.09864) turns pair i of a head by the angle position * f[i], with
f[i] = base^(-2i / rotary_dim). Context extension changes f (and, for YaRN, the magnitude); the
definitions are those of ggml's ``rope_yarn``, so that a GGUF file means the same here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from urdir.ptxgen.errors import PtxgenError

Float64s = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """How a model's context is extended; make one with ``none``, ``linear`` or ``yarn``.

    One definition holds all three: linear scaling is YaRN that extrapolates nothing
    (``ext_factor`` 0), no scaling is linear by 1.
    """

    factor: float = 1.0
    attn_factor: float = 1.0
    ext_factor: float = 0.0
    original_context: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self) -> None:
        if not self.factor > 0:
            raise PtxgenError(f"RoPE scaling factor {self.factor} must be positive")
        if self.ext_factor and self.original_context < 1:
            raise PtxgenError("YaRN scaling needs the original context length")

    @classmethod
    def none(cls, attn_factor: float = 1.0) -> RopeScaling:
        """Trained positions as they are (``attn_factor`` still scales: LongRoPE sets it)."""
        return cls(attn_factor=attn_factor)

    @classmethod
    def linear(cls, factor: float, attn_factor: float = 1.0) -> RopeScaling:
        """Position interpolation (Chen et al. 2023, arXiv 2306.15595): positions / factor."""
        return cls(factor, attn_factor)

    @classmethod
    def yarn(
        cls,
        factor: float,
        original_context: int,
        *,
        ext_factor: float = 1.0,
        attn_factor: float = 1.0,
        beta_fast: float = 32.0,
        beta_slow: float = 1.0,
    ) -> RopeScaling:
        """YaRN (Peng et al. 2023, arXiv 2309.00071): fast pairs kept, slow pairs interpolated."""
        return cls(factor, attn_factor, ext_factor, original_context, beta_fast, beta_slow)

    @property
    def magnitude(self) -> float:
        """What sine and cosine are multiplied by: sqrt(1/t) of YaRN, section 3.4, eq. 22."""
        if not self.ext_factor:
            return self.attn_factor
        return self.attn_factor * (1.0 + 0.1 * math.log(self.factor))


def frequencies(
    rotary_dim: int,
    base: float,
    scaling: RopeScaling | None = None,
    factors: npt.ArrayLike | None = None,
) -> tuple[Float64s, float]:
    """Radians a position turns each pair, (rotary_dim / 2,) f64, and the magnitude scale.

    ``factors`` (rotary_dim / 2,) divides the frequencies (the tensor ``rope_freqs.weight``, or
    LongRoPE's short and long factors). Raises PtxgenError for an odd ``rotary_dim``, a base not
    above 1, or factors of another length.
    """
    scaling = scaling or RopeScaling.none()
    if rotary_dim < 2 or rotary_dim % 2:
        raise PtxgenError(f"rotary_dim {rotary_dim} must be even and at least 2")
    if not base > 1:
        raise PtxgenError(f"RoPE base {base} must be above 1")
    pairs = rotary_dim // 2
    extrapolated = base ** (-2.0 * np.arange(pairs, dtype=np.float64) / rotary_dim)
    if factors is not None:
        divisors = np.asarray(factors, dtype=np.float64)
        if divisors.shape != (pairs,):
            raise PtxgenError(
                f"RoPE factors are {divisors.shape}, rotary_dim {rotary_dim} needs ({pairs},)"
            )
        extrapolated = extrapolated / divisors
    interpolated = extrapolated / scaling.factor
    if not scaling.ext_factor:
        return interpolated, scaling.magnitude
    kept = scaling.ext_factor * _extrapolated_share(rotary_dim, base, scaling)
    return interpolated * (1.0 - kept) + extrapolated * kept, scaling.magnitude


def _extrapolated_share(rotary_dim: int, base: float, scaling: RopeScaling) -> Float64s:
    """1 for pairs that turn fast, 0 for slow ones, a ramp between: 1 - gamma of YaRN, eq. 18.

    As in YaRN's own code and ggml, the ramp is linear in the pair's index, between the pairs that
    turn ``beta_fast`` and ``beta_slow`` times over the original context.
    """

    def pair_turning(rotations: float) -> float:
        wavelength = scaling.original_context / (rotations * 2.0 * math.pi)
        return rotary_dim * math.log(wavelength) / (2.0 * math.log(base))

    low = max(0.0, math.floor(pair_turning(scaling.beta_fast)))
    high = min(rotary_dim - 1.0, math.ceil(pair_turning(scaling.beta_slow)))
    index = np.arange(rotary_dim // 2, dtype=np.float64)
    return 1.0 - np.clip((index - low) / max(0.001, high - low), 0.0, 1.0)


def turns_table(radians: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """Frequencies (pairs,) in radians -> the device table (pairs, 2) f32 of turns: high, low.

    high + low is frequency / 2 pi to about 48 bits, so that position * frequency can be reduced
    to one turn in f32: only whole turns cancel, and those are exact.
    """
    turns = np.asarray(radians, dtype=np.float64) / (2.0 * math.pi)
    high = turns.astype(np.float32)
    low = (turns - high).astype(np.float32)
    return np.stack([high, low], axis=-1)
