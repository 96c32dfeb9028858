"""Blocks of Q4_K, Q5_K and Q6_K: scales are searched as llama.cpp does without an importance
matrix, by fewer steps.

Source: `make_qkx2_quants` and `make_qx_quants` of ggml (`ggml-quants.c`); block layouts as in
`ptxgen.weights.formats`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Floats = NDArray[np.float32]

#: Scales that are tried for a group, relative to the one that covers its range: further down for
#: types with minimums, both ways for Q6_K.
_STEPS, _SIX_STEPS = (-0.4, -0.2, 0.0, 0.2, 0.4), (-0.4, -0.2, 0.2, 0.4)
_LEAST = np.float32(1e-30)


def _groups_with_minimums(x: Floats, most: int) -> tuple[Floats, Floats]:
    """Scales and minimums (both from 0) of groups (n, 32): x is about scale * q - minimum, q from 0
    to ``most``, with squared errors weighted by sqrt(mean x^2) + |x|."""
    weights = np.sqrt(np.mean(x * x, axis=1, keepdims=True)) + np.abs(x)
    low = np.minimum(x.min(axis=1, keepdims=True), 0)
    span = np.maximum(x.max(axis=1, keepdims=True) - low, _LEAST)
    total, total_x = weights.sum(axis=1), (weights * x).sum(axis=1)
    best_scale, best_low = (span / most)[:, 0], low[:, 0]
    q = np.clip(np.rint((x - low) * (most / span)), 0, most)
    best = (weights * (best_scale[:, None] * q + low - x) ** 2).sum(axis=1)
    for step in _STEPS:
        q = np.clip(np.rint((x - low) * ((most + step) / span)), 0, most)
        wq = weights * q
        sum_q, sum_qq, sum_qx = wq.sum(axis=1), (wq * q).sum(axis=1), (wq * x).sum(axis=1)
        spread = total * sum_qq - sum_q * sum_q
        with np.errstate(divide="ignore", invalid="ignore"):
            scale = (total * sum_qx - total_x * sum_q) / spread
            least = (sum_qq * total_x - sum_q * sum_qx) / spread
            scale = np.where(least > 0, sum_qx / sum_qq, scale)
        least = np.minimum(least, 0)
        error = (weights * (scale[:, None] * q + least[:, None] - x) ** 2).sum(axis=1)
        better = (error < best) & (scale > 0)
        best = np.where(better, error, best)
        best_scale = np.where(better, scale, best_scale)
        best_low = np.where(better, least, best_low)
    return best_scale, -best_low


def _with_minimums(rows: Floats, bits: int) -> Bytes:
    most, count = (1 << bits) - 1, rows.size // 256
    x = rows.reshape(count, 8, 32)
    scales, minimums = (v.reshape(count, 8) for v in _groups_with_minimums(x.reshape(-1, 32), most))
    d, m = (v.max(axis=1, keepdims=True) / np.float32(63) for v in (scales, minimums))
    halves = np.concatenate([d, m], axis=1).astype(np.float16)
    d, m = (halves[:, i : i + 1].astype(np.float32) for i in range(2))
    of_scale, of_minimum = (
        np.clip(np.rint(np.divide(v, f, out=np.zeros_like(v), where=f > 0)), 0, 63).astype(np.uint8)
        for v, f in ((scales, d), (minimums, m))
    )
    scale, minimum = (d * of_scale)[..., None], (m * of_minimum)[..., None]
    quants = np.divide(x + minimum, scale, out=np.zeros_like(x), where=scale > 0)
    q = np.clip(np.rint(quants), 0, most).astype(np.uint8)
    numbers = np.concatenate(
        [
            of_scale[:, :4] | of_scale[:, 4:] >> 4 << 6,
            of_minimum[:, :4] | of_minimum[:, 4:] >> 4 << 6,
            of_scale[:, 4:] & 15 | (of_minimum[:, 4:] & 15) << 4,
        ],
        axis=1,
    )
    pairs = q.reshape(count, 4, 2, 32) & 15
    parts = [halves.view(np.uint8), numbers]
    if bits == 5:
        parts.append(
            ((q >> 4) << np.arange(8, dtype=np.uint8)[:, None]).sum(axis=1, dtype=np.uint8)
        )
    parts.append((pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(count, 128))
    return np.concatenate(parts, axis=1).reshape(len(rows), -1)


def _q6_k(rows: Floats) -> Bytes:
    """Groups of 16 with a scale of eight bits, of blocks of 256."""
    count = rows.size // 256
    x = rows.reshape(-1, 16)
    at = np.abs(x).argmax(axis=1)[:, None]
    peak = np.take_along_axis(x, at, axis=1)
    peak = np.where(np.abs(peak) < _LEAST, _LEAST, peak)
    weights = x * x
    best_scale, best = np.zeros(len(x), np.float32), np.full(len(x), -1.0, np.float32)
    for step in (0.0, *_SIX_STEPS):
        q = np.clip(np.rint(x * (-(32 + step) / peak)), -32, 31)
        wq = weights * q
        sum_qx, sum_qq = (wq * x).sum(axis=1), (wq * q).sum(axis=1)
        gain = np.divide(sum_qx * sum_qx, sum_qq, out=np.zeros_like(sum_qq), where=sum_qq > 0)
        scale = np.divide(sum_qx, sum_qq, out=np.zeros_like(sum_qq), where=sum_qq > 0)
        best_scale, best = np.where(gain > best, scale, best_scale), np.maximum(gain, best)
    scales = best_scale.reshape(count, 16)
    at = np.abs(scales).argmax(axis=1)[:, None]
    d = (np.take_along_axis(scales, at, axis=1) / np.float32(-128)).astype(np.float16)
    wide = d.astype(np.float32)
    ratios = np.divide(scales, wide, out=np.zeros_like(scales), where=wide != 0)
    of_scale = np.clip(np.rint(ratios), -128, 127)
    scale = (wide * of_scale)[..., None]
    blocks = rows.reshape(count, 16, 16)
    quants = np.divide(blocks, scale, out=np.zeros_like(blocks), where=scale != 0)
    q = (np.clip(np.rint(quants), -32, 31) + 32).astype(np.uint8).reshape(count, 2, 4, 32)
    low = (q[:, :, :2] & 15) | (q[:, :, 2:] & 15) << 4
    high = (q >> 4 << np.array([0, 2, 4, 6], np.uint8)[:, None]).sum(axis=2, dtype=np.uint8)
    parts = [
        low.reshape(count, 128),
        high.reshape(count, 64),
        of_scale.astype(np.int8).view(np.uint8),
    ]
    return np.concatenate([*parts, d.view(np.uint8)], axis=1).reshape(len(rows), -1)


#: What makes blocks of rows (rows, width) f32 -> (rows, bytes), by type.
K_QUANTS: Mapping[str, Callable[[Floats], Bytes]] = {
    "Q4_K": lambda rows: _with_minimums(rows, 4),
    "Q5_K": lambda rows: _with_minimums(rows, 5),
    "Q6_K": _q6_k,
}
