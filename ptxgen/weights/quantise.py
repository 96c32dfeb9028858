"""Rows of floats to blocks of Q4_K, Q5_K, Q6_K, Q8_0 and E4M3, in numpy.

Scales of K-quants are searched as llama.cpp does without an importance matrix, by other steps (see
`STEPS`). All arithmetic is f32, rounded after each operation, and sums are added by halves
(`_sum`): the kernels `Quantise` and `QuantiseRows` write the same bytes.

Source: `make_qkx2_quants`, `make_qx_quants` and `quantize_row_q8_0_ref` of ggml (`ggml-quants.c`);
block layouts as in `formats`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from urdir.ptxgen.weights.e4m3 import MOST, to_e4m3

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

#: The scales that are tried for a group: codes more, or less, than cover its range. llama.cpp tries
#: 21 (Q4_K), 16 (Q5_K) and 19 (Q6_K), from -1, -0.5 and -0.9 to 1, 1 and 0.9. Its root mean square
#: errors of normal, Laplace and t weights are 0.1 to 1.4 % larger, since the best scale often cuts
#: the range.
STEPS = (-2.0, -1.8, -1.6, -1.4, -1.2, -1.0, -0.8, -0.6, -0.4, -0.2, 0.0, 0.2, 0.4, 0.6, 0.8, 1.0,
         1.2)  # fmt: skip
#: The least span of a group, or size of its largest value, by which scales divide.
LEAST = np.float32(1e-30)


def _sum(x: Floats) -> Floats:
    """Sums over the first axis, whose length is a power of two: halves are added until one is
    left."""
    while len(x) > 1:
        x = x[: len(x) // 2] + x[len(x) // 2 :]
    return np.asarray(x[0])


def _quotient(a: Floats, b: Floats) -> Floats:
    """a / b where b is positive, else 0."""
    return _ratio(a, b, b > 0)


def _groups(rows: Floats, width: int) -> Floats:
    """Groups of ``width`` neighbouring values as columns, (width, groups)."""
    return np.ascontiguousarray(rows.reshape(-1, width).T)


def _scales_with_minimums(x: Floats, most: int) -> tuple[Floats, Floats]:
    """Scales and minimums (both from 0) of groups (32, n): x is about scale * q - minimum, q from 0
    to ``most``, with squared errors weighted by sqrt(mean x^2) + |x|."""
    weights = np.sqrt(_sum(x * x) * np.float32(1 / 32)) + np.abs(x)
    low = np.minimum(x.min(axis=0), np.float32(0))
    span = np.maximum(x.max(axis=0) - low, LEAST)
    total, total_x = _sum(weights), _sum(weights * x)
    best_scale, best_low = span / np.float32(most), low
    q = np.clip(np.rint((x - low) * (np.float32(most) / span)), 0, most)
    best = _sum(weights * np.square(best_scale * q + low - x))
    for step in STEPS:
        q = np.clip(np.rint((x - low) * (np.float32(most + step) / span)), 0, most)
        wq = weights * q
        sum_q, sum_qq, sum_qx = _sum(wq), _sum(wq * q), _sum(wq * x)
        spread = total * sum_qq - sum_q * sum_q
        with np.errstate(divide="ignore", invalid="ignore"):
            scale = (total * sum_qx - total_x * sum_q) / spread
            least = (sum_qq * total_x - sum_q * sum_qx) / spread
            scale = np.where(least > 0, sum_qx / sum_qq, scale)
            least = np.minimum(least, np.float32(0))
            error = _sum(weights * np.square(scale * q + least - x))
        better = (error < best) & (scale > 0)
        best = np.where(better, error, best)
        best_scale = np.where(better, scale, best_scale)
        best_low = np.where(better, least, best_low)
    return best_scale, np.float32(0) - best_low


def _with_minimums(rows: Floats, bits: int) -> Bytes:
    """Blocks of Q4_K or Q5_K."""
    most, count = (1 << bits) - 1, rows.size // 256
    x = _groups(rows, 32)
    found = [values.reshape(count, 8) for values in _scales_with_minimums(x, most)]
    halves = np.stack([v.max(axis=1) / np.float32(63) for v in found], axis=1).astype(np.float16)
    steps = [halves[:, i : i + 1].astype(np.float32) for i in range(2)]
    codes = [
        np.clip(np.rint(_quotient(values, step)), 0, 63).astype(np.uint8)
        for values, step in zip(found, steps, strict=True)
    ]
    scale, minimum = ((step * of).reshape(-1) for step, of in zip(steps, codes, strict=True))
    q = np.clip(np.rint(_quotient(x + minimum, scale)), 0, most).astype(np.uint8)
    q = q.T.reshape(count, 4, 2, 32)
    of_scale, of_minimum = codes
    numbers = [
        of_scale[:, :4] | of_scale[:, 4:] >> 4 << 6,
        of_minimum[:, :4] | of_minimum[:, 4:] >> 4 << 6,
        of_scale[:, 4:] & 15 | (of_minimum[:, 4:] & 15) << 4,
    ]
    parts = [halves.view(np.uint8), *numbers]
    if bits == 5:
        of_groups = (q >> 4).reshape(count, 8, 32) << np.arange(8, dtype=np.uint8)[:, None]
        parts.append(of_groups.sum(axis=1, dtype=np.uint8))
    pairs = q & 15
    parts.append((pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(count, 128))
    return np.concatenate(parts, axis=1).reshape(len(rows), -1)


def _q6_k(rows: Floats) -> Bytes:
    """Groups of 16 with a scale of eight bits, of blocks of 256."""
    count = rows.size // 256
    x = _groups(rows, 16)
    peak = _farthest(x)
    peak = np.where(np.abs(peak) < LEAST, LEAST, peak)
    weights = x * x
    best_scale, best = np.zeros_like(peak), np.full_like(peak, -1)
    for step in STEPS:
        q = np.clip(np.rint(x * (np.float32(-32 - step) / peak)), -32, 31)
        wq = weights * q
        sum_qx, sum_qq = _sum(wq * x), _sum(wq * q)
        gain = _quotient(sum_qx * sum_qx, sum_qq)
        best_scale = np.where(gain > best, _quotient(sum_qx, sum_qq), best_scale)
        best = np.maximum(gain, best)
    scales = best_scale.reshape(count, 16)
    d = (_farthest(scales.T)[:, None] / np.float32(-128)).astype(np.float16)
    wide = d.astype(np.float32)
    of_scale = np.clip(np.rint(_ratio(scales, wide, wide != 0)), -128, 127)
    scale = (wide * of_scale).reshape(-1)
    codes = (np.clip(np.rint(_ratio(x, scale, scale != 0)), -32, 31) + 32).astype(np.uint8)
    q = codes.T.reshape(count, 2, 4, 32)
    low = (q[:, :, :2] & 15) | (q[:, :, 2:] & 15) << 4
    high = (q >> 4 << np.array([0, 2, 4, 6], np.uint8)[:, None]).sum(axis=2, dtype=np.uint8)
    parts = [low.reshape(count, 128), high.reshape(count, 64), of_scale.astype(np.int8)]
    return np.concatenate([*(p.view(np.uint8) for p in (*parts, d))], axis=1).reshape(len(rows), -1)


def _farthest(x: Floats) -> Floats:
    """The value of each column (n, columns) that is farthest from 0, the first of equals."""
    found: Floats = np.take_along_axis(x, np.abs(x).argmax(axis=0)[None], axis=0)[0]
    return found


def _ratio(a: Floats, b: Floats, where: NDArray[np.bool_]) -> Floats:
    """a / b, both of which broadcast; 0 elsewhere."""
    out = np.zeros(np.broadcast_shapes(a.shape, b.shape), np.float32)
    return np.divide(a, b, out=out, where=where)


def _q8_0(rows: Floats) -> Bytes:
    """Groups of 32 with a factor that brings the largest to 127; halves are rounded away from 0."""
    x = rows.reshape(-1, 32)
    d = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    size = np.abs(x * _quotient(np.ones_like(d), d))
    whole = np.floor(size)
    q = np.copysign(whole + np.floor(2 * (size - whole)), x).astype(np.int8)
    parts = [d.astype(np.float16).view(np.uint8), q.view(np.uint8)]
    return np.concatenate(parts, axis=1).reshape(len(rows), -1)


def _e4m3(rows: Floats, block: int) -> Bytes:
    """Blocks of E4M3 numbers with one scale for each row, so that its largest is the largest."""
    scales = np.abs(rows).max(axis=1, keepdims=True) / np.float32(MOST)
    scales[scales == 0] = 1
    quants = to_e4m3(rows / scales).reshape(len(rows), -1, block)
    each = np.broadcast_to(scales[:, None], (*quants.shape[:2], 1)).astype(np.float32)
    blocks = np.concatenate([np.ascontiguousarray(each).view(np.uint8), quants], axis=2)
    return blocks.reshape(len(rows), -1)


#: What makes blocks of rows (rows, width) f32 -> (rows, bytes), by type.
QUANTISERS: Mapping[str, Callable[[Floats], Bytes]] = {
    "Q4_K": lambda rows: _with_minimums(rows, 4),
    "Q5_K": lambda rows: _with_minimums(rows, 5),
    "Q6_K": _q6_k,
    "Q8_0": _q8_0,
    "E4M3R256": lambda rows: _e4m3(rows, 256),
    "E4M3G128": lambda rows: _e4m3(rows, 128),
    "E4M3G32": lambda rows: _e4m3(rows, 32),
}
