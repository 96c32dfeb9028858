"""Rotary position embedding on the host: frequencies, context extension, the device table.

RoPE (Su et al. 2021, arXiv 2104.09864) turns pair i of a head by the angle position * f[i], with
f[i] = base^(-2i / rotary_dim). Context extension changes f (and, for YaRN, the magnitude); the
definitions are those of ggml's ``rope_yarn``, so that a GGUF file means the same here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.spec import Access, Param

Float64s = npt.NDArray[np.float64]

#: Positions below this are exact as f32, and so are whole turns.
MAX_POSITIONS = 1 << 24

#: Pairs of values that rotate together: 2i and 2i + 1, or i and i + rotary_dim / 2.
RopeStyle = Literal["interleaved", "half"]


@dataclass(frozen=True)
class Rotation:
    """The rotation of a head: its first ``rotary_dim`` values rotate in pairs, and are multiplied
    by ``magnitude``. Raises PtxgenError for unsupported rotations.
    """

    rotary_dim: int
    style: RopeStyle
    magnitude: float = 1.0

    def __post_init__(self) -> None:
        if self.style not in ("interleaved", "half"):
            raise PtxgenError(f"RoPE style {self.style!r} is neither 'interleaved' nor 'half'")
        if self.rotary_dim % 2 or not 2 <= self.rotary_dim <= 2048:
            raise PtxgenError(f"rotary_dim {self.rotary_dim} must be an even number in 2..2048")

    @property
    def pairs(self) -> int:
        """Pairs of a head."""
        return self.rotary_dim // 2

    @property
    def param(self) -> Param:
        """The parameter of rotating kernels: a `turns_table`."""
        return Param("frequencies", "f32", (self.pairs, 2), Access.IN)

    def turn(
        self, x: npt.ArrayLike, positions: npt.ArrayLike, table: npt.ArrayLike, sign: int = 1
    ) -> Float64s:
        """Rotate heads x (rows, heads, head_dim) at positions (rows,), by a `turns_table` (pairs,
        2), in float64. ``sign`` -1 inverts."""
        y = np.array(x, np.float64)
        turns = np.outer(np.asarray(positions), np.asarray(table, np.float64).sum(axis=1)) % 1.0
        angle = sign * 2.0 * np.pi * turns[:, None]
        scale = self.magnitude**sign
        cos, sin = scale * np.cos(angle), scale * np.sin(angle)
        first, second = self._pair_slices()
        a, b = y[..., first].copy(), y[..., second].copy()
        y[..., first] = a * cos - b * sin
        y[..., second] = a * sin + b * cos
        return y

    def _pair_slices(self) -> tuple[slice, slice]:
        if self.style == "interleaved":
            return slice(0, self.rotary_dim, 2), slice(1, self.rotary_dim, 2)
        return slice(0, self.pairs), slice(self.pairs, self.rotary_dim)


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """Context extension of a model, created by ``none``, ``linear`` or ``yarn``.

    One definition covers all three: linear scaling is YaRN without extrapolation (``ext_factor``
    0), no scaling is linear by 1.
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
        """Trained positions (``attn_factor`` still scales: LongRoPE sets it)."""
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
        """Factor of sine and cosine: sqrt(1/t) of YaRN, section 3.4, eq. 22."""
        if not self.ext_factor:
            return self.attn_factor
        return self.attn_factor * (1.0 + 0.1 * math.log(self.factor))


def frequencies(
    rotary_dim: int,
    base: float,
    scaling: RopeScaling | None = None,
    factors: npt.ArrayLike | None = None,
) -> tuple[Float64s, float]:
    """Radians per position of each pair, (rotary_dim / 2,) f64, and the magnitude.

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
    """1 for pairs that rotate fast, 0 for slow ones, a ramp in between: 1 - gamma of YaRN, eq. 18.

    As in YaRN's own code and ggml, the ramp is linear in the pair's index, between the pairs that
    rotate ``beta_fast`` and ``beta_slow`` times over the original context.
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

    high + low is frequency / 2 pi to about 48 bits, so that position * frequency can be reduced to
    one turn in f32: only whole turns cancel, and those are exact.
    """
    turns = np.asarray(radians, dtype=np.float64) / (2.0 * math.pi)
    high = turns.astype(np.float32)
    low = (turns - high).astype(np.float32)
    return np.stack([high, low], axis=-1)
