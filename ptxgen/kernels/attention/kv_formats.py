"""Formats of cached keys and values: how a token's values in one KV head are stored.

- f32, f16, bf16: rounded to nearest even; values out of range become infinity;
- q8_0: groups of 32 values q * d. d = max|x| / 127, rounded to f16, and q = x / d (d as rounded),
  rounded to nearest even into -127 ... 127;
- q4_0: groups of 32 values (q - 8) * d, as ggml rounds them. d = m / -8, m the value of largest
  magnitude (of +m and -m the negative one); q = x / d + 8.5, cut to an integer in 0 ... 15; then
  d is rounded to f16. A byte has values i and i + 4 of eight, so that two masks part them;
- fp8: a head has values e * s, e OCP's E4M3 and s an f32, the least power of two (from 2^-126 on)
  with max|x| <= 448 s. e = x / s, rounded to nearest even. A float's relative error does not depend
  on its scale: a power of two loses nothing, makes products with it exact, and one for a head keeps
  four significant bits down to 2^-15 of its maximum.

Elements (slots, head_dim) come first, then all scales (slots, scales of a head). NaN makes its
group NaN, by its scale; infinity too, or a magnitude beyond what an f16 scale reaches (q8_0: 127 *
65504, q4_0: 8 * 65504).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from urdir.ptxgen.kernels.attention.kv_types import KvDtype
from urdir.ptxgen.weights.e4m3 import e4m3

#: Values of a group of q8_0 and q4_0.
GROUP = 32

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class KvFormat:
    """One format. Its macros are in ``templates/attention/caches/``, by ``name``.

    ``operand`` is the form in which tensor cores multiply elements: "f16", "bf16", or "s8" (scales
    then belong to groups); "" if they do not. ``group`` values share a scale of type ``scale``: 0
    without scales, -1 for all of a head. Before architecture ``operands_since`` operands are 2^-8
    of the elements. From ``halves_since`` on a macro makes f16 of scaled elements directly.
    ``encode`` maps f32 (..., dim) to the bytes of elements (..., dim * bits / 8) and the scales
    (..., n), ``decode`` is the inverse, exact in f32.
    """

    name: KvDtype
    bits: int
    operand: Literal["", "f16", "bf16", "s8"]
    encode: Callable[[Floats], tuple[Array, Array | None]]
    decode: Callable[[Array, Array | None], Floats]
    group: int = 0
    scale: Literal["", "f16", "f32"] = ""
    operands_since: int = 0
    halves_since: int | None = None

    @property
    def is_scaled(self) -> bool:
        """Whether elements are multiplied with a scale."""
        return self.scale != ""

    @property
    def scales_heads(self) -> bool:
        """Whether all values of a head share a scale."""
        return self.group < 0

    @property
    def scale_nbytes(self) -> int:
        """Bytes of a scale; 0 without scales."""
        return {"": 0, "f16": 2, "f32": 4}[self.scale]

    @property
    def raw_words(self) -> int:
        """32-bit registers for eight elements as stored, and their scale."""
        return self.bits // 4 + self.is_scaled

    def makes_halves(self, sm: int) -> bool:
        """Whether f16 values are made directly on an architecture, not from f32."""
        return self.halves_since is not None and sm >= self.halves_since

    @property
    def stores_f16(self) -> bool:
        """Whether elements are stored as f16 operands."""
        return self.bits == 16 and self.operand == "f16"

    @property
    def operand_words(self) -> int:
        """32-bit registers for eight elements as tensor cores multiply them."""
        return 2 if self.operand == "s8" else 4

    @property
    def unit(self) -> int:
        """Values whose elements and scales are whole: widths are multiples of it."""
        return max(8, self.group)

    @property
    def value_unit(self) -> int:
        """Values within keys begin at a multiple of it: f16 scales are copied two at once."""
        return max(8, 2 * self.group)

    def scales_of(self, dims: int) -> int:
        """Number of scales of ``dims`` values."""
        return 1 if self.scales_heads else dims // self.group if self.group else 0

    def scale_offset(self, dim: int) -> int:
        """Bytes from the first scale of a head to that of value ``dim``."""
        return max(0, self.scale_nbytes * (dim // (self.group or 1))) if self.group > 0 else 0

    @property
    def rtol(self) -> float:
        """Largest error of a value, relative to the largest of its group (f32: 0)."""
        return {"f32": 0, "f16": 2**-11, "bf16": 2**-8, "q8_0": 0.005, "fp8": 2**-4, "q4_0": 0.13}[
            self.name
        ]


def _bytes(values: Array) -> Array:
    return np.ascontiguousarray(values).view(np.uint8)


def _encode_floats(dtype: type) -> Callable[[Floats], tuple[Array, None]]:
    def encode(x: Floats) -> tuple[Array, None]:
        with np.errstate(over="ignore"):
            return _bytes(x.astype(dtype)), None

    return encode


def _decode_floats(dtype: type) -> Callable[[Array, Array | None], Floats]:
    def decode(elements: Array, _: Array | None) -> Floats:
        return elements.view(dtype).astype(np.float32)

    return decode


def to_bf16(x: Floats) -> npt.NDArray[np.uint16]:
    """The bits of f32 values rounded to bf16, to nearest even; NaN is 0x7FFF."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)


def _decode_bf16(elements: Array, _: Array | None) -> Floats:
    return (elements.view(np.uint16).astype(np.uint32) << 16).view(np.float32)


def _groups(x: Floats) -> Floats:
    return x.reshape(*x.shape[:-1], x.shape[-1] // GROUP, GROUP)


def quantise(x: Floats) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float16]]:
    """f32 values (..., n) -> q8_0 quants (..., n) and scales (..., n / 32)."""
    groups = _groups(x)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        scales = (np.abs(groups).max(axis=-1) / np.float32(127)).astype(np.float16)
        quants = np.rint(groups / scales.astype(np.float32)[..., None])
    # Groups without a scale become 0. A subnormal scale may be far below max|x| / 127.
    quants = np.where(scales[..., None] == 0, 0.0, np.nan_to_num(quants, nan=0.0))
    quants = np.clip(quants, -127, 127).astype(np.int8)
    return quants.reshape(x.shape), scales


def _encode_q8_0(x: Floats) -> tuple[Array, Array]:
    quants, scales = quantise(x)
    return _bytes(quants), scales


def _scaled(groups: Array, scales: Array) -> Floats:
    """Elements (..., n) times scales (..., m): of n / m neighbours each."""
    with np.errstate(invalid="ignore"):  # a scale of infinity: 0 * inf is NaN
        each = groups.shape[-1] // scales.shape[-1]
        product: Floats = groups.astype(np.float32) * np.repeat(
            scales.astype(np.float32), each, axis=-1
        )
    return product


def _decode_q8_0(elements: Array, scales: Array | None) -> Floats:
    assert scales is not None
    return _scaled(elements.view(np.int8), scales)


def _encode_q4_0(x: Floats) -> tuple[Array, Array]:
    groups = _groups(x)
    bits = groups.view(np.uint32)
    # the largest magnitude by its bits, so that NaN wins; then its sign
    most = ((bits << 1) | (bits >> 31)).max(axis=-1)
    most = ((most >> 1) | (most << 31)).view(np.float32)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        steps = most * np.float32(-0.125)
        quants = groups * (np.float32(1) / steps)[..., None] + np.float32(8.5)
        scales = steps.astype(np.float16)
    quants = np.clip(np.nan_to_num(np.trunc(quants), nan=0.0), 0, 15).astype(np.uint8)
    eights = quants.reshape(*x.shape[:-1], x.shape[-1] // 8, 2, 4)
    return (eights[..., 0, :] | eights[..., 1, :] << 4).reshape(
        *x.shape[:-1], x.shape[-1] // 2
    ), scales


def _decode_q4_0(elements: Array, scales: Array | None) -> Floats:
    assert scales is not None
    *outer, nbytes = elements.shape
    words = elements.reshape(*outer, nbytes // 4, 1, 4)
    quants = np.concatenate([words & 15, words >> 4], axis=-2).astype(np.int8) - 8
    return _scaled(quants.reshape(*outer, 2 * nbytes), scales)


def _encode_fp8(x: Floats) -> tuple[Array, Array]:
    most = (x.view(np.uint32) & np.uint32(0x7FFFFFFF)).max(axis=-1, keepdims=True)
    # the exponent of the power of two that is not below max|x| / 1.75
    exponent = np.maximum((most.astype(np.int64) + 0x1FFFFF) >> 23, 9)
    inverse = ((262 - exponent).astype(np.uint32) << 23).view(np.float32)
    scales = ((exponent - 8).astype(np.uint32) << 23).view(np.float32)
    scales = np.where(most < 0x7F800000, scales, np.float32(np.nan))
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        # E4M3 are the upper bits of an f32 that is 2^-120 of the value, subnormal ones too
        bits = (x * inverse * np.float32(2.0**-120)).view(np.uint32)
    sizes = bits & np.uint32(0x7FFFFFFF)
    rounded = (sizes + np.uint32(0x7FFFF) + (sizes >> 20 & 1)) >> 20
    signs = np.where(rounded == 0, 0, bits >> 24 & 0x80)  # zeros have none
    return (rounded | signs).astype(np.uint8), scales


def _decode_fp8(elements: Array, scales: Array | None) -> Floats:
    assert scales is not None
    return _scaled(e4m3()[elements], scales)


#: All formats by name.
FORMATS: dict[KvDtype, KvFormat] = {
    fmt.name: fmt
    for fmt in (
        KvFormat("f32", 32, "", _encode_floats(np.float32), _decode_floats(np.float32)),
        KvFormat("f16", 16, "f16", _encode_floats(np.float16), _decode_floats(np.float16)),
        KvFormat("bf16", 16, "bf16", lambda x: (_bytes(to_bf16(x)), None), _decode_bf16),
        KvFormat("q8_0", 8, "s8", _encode_q8_0, _decode_q8_0, GROUP, "f16"),
        KvFormat("fp8", 8, "f16", _encode_fp8, _decode_fp8, -1, "f32", 89, 89),
        KvFormat("q4_0", 4, "s8", _encode_q4_0, _decode_q4_0, GROUP, "f16", 0, 0),
    )
}
