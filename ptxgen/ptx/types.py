"""The fundamental types of PTX."""

from collections.abc import Mapping

#: Bytes of a fundamental type (PTX ISA 5.2.1); predicates have no size in memory.
TYPE_BYTES: Mapping[str, int] = {
    **{f"{kind}{bits}": bits // 8 for kind in "bus" for bits in (8, 16, 32, 64)},
    **{"b128": 16, "f16": 2, "f16x2": 4, "bf16": 2, "bf16x2": 4, "f32": 4, "f64": 8},
}
