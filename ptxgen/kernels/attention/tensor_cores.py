"""Which caches and scores tensor cores take in decode attention."""

from __future__ import annotations

from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.scores import Scores

#: Keys that a warp multiplies at once on tensor cores: the rows of an mma.
TILE_KEYS = 16
#: Values of a head whose sums fit registers, and with quants, whose scales also take registers.
MAX_VALUES, MAX_QUANTS_DIM = 512, 256


def tensor_cores_take(layout: KvLayout, scores: Scores) -> bool:
    """Whether tensor cores multiply from sm_80 on: 16-bit operands, sums that fit registers, a ring
    no shorter than a tile of keys; two f16 scales are copied at once, and must belong to the same
    slot, as do 16 bytes of elements."""
    if 0 < layout.capacity < TILE_KEYS or layout.values_per_head > MAX_VALUES:
        return False
    if scores.texts:  # of exact arithmetic alone
        return False
    if scores.relative:  # a load for each score
        return False
    if layout.is_chosen:  # a tile of keys is copied as neighbours
        return False
    formats = (layout.format, layout.values.format)
    widths = (layout.head_dim, layout.values_per_head)
    for of, width in zip(formats, widths, strict=True):
        whole = {"": 0, "s8": 64}.get(of.operand, 128 // of.bits)
        if not whole or width % whole or layout.value_start % whole:
            return False
    return max(widths) <= MAX_QUANTS_DIM or not any(of.operand == "s8" for of in formats)
