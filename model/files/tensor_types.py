"""ggml's tensor types: numbers, names and block sizes.

The `gguf` package has the same table, but importing it takes longer than reading a file's header.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from urdir.ptxgen.weights.formats import EVERY


@dataclass(frozen=True, slots=True)
class TensorType:
    """A type in ggml's spelling ("F32", "Q4_K"), with blocks of ``block`` elements."""

    name: str
    block: int
    nbytes: int


#: By number (ggml_type), including types that no kernel reads: a file may contain them.
TENSOR_TYPES: Mapping[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    9: TensorType("Q8_1", 32, 40),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    15: TensorType("Q8_K", 256, 292),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    24: TensorType("I8", 1, 1),
    25: TensorType("I16", 1, 2),
    26: TensorType("I32", 1, 4),
    27: TensorType("I64", 1, 8),
    28: TensorType("F64", 1, 8),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
    40: TensorType("NVFP4", 64, 36),
    41: TensorType("Q1_0", 128, 18),
}

#: Types of quantised folders, which no GGUF file has: `ptxgen.weights.formats`.
OWN_TYPES: Mapping[int, TensorType] = {
    fmt.ggml_type: TensorType(fmt.name, fmt.block, fmt.nbytes)
    for fmt in EVERY.values()
    if fmt.ggml_type not in TENSOR_TYPES
}
_ALL = {**TENSOR_TYPES, **OWN_TYPES}
_NUMBERS = {kind.name: number for number, kind in _ALL.items()}


def type_number(name: str) -> int:
    """The number of a type of `TENSOR_TYPES` or `OWN_TYPES`."""
    return _NUMBERS[name]


def tensor_type(number: int) -> TensorType:
    """The type with this number."""
    return _ALL[number]
