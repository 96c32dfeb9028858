"""The planes of quantised types, made of the fields of their blocks."""

from __future__ import annotations

from collections.abc import Sequence

from urdir.ptxgen.weights.fields import Field, Part, Plane
from urdir.ptxgen.weights.format import UNIT

#: Bits ``shift`` and up of the groups' "scale" or "minimum", and where a block has them.
Numbers = tuple[str, int, Field]


def _digits(count: int) -> int:
    return count.bit_length() - 1


def quant_plane(name: str, shift: int, source: Field, group: int) -> Plane:
    """32 fields: weight 4j + b in byte b of a 32-bit word, 8 / width values of j to a word.

    A shift and a mask then give four neighbouring weights, one a byte. The values of j in a word
    follow each other. Where a word has two and a unit has two groups, they are of both groups: each
    of the four lanes that share a row then finds its quads of both in a word of its own.
    """
    width, inside = source.width, _digits(8 // source.width)
    strides = [width << k for k in range(inside)] + [32 << k for k in range(3 - inside)]
    if inside == 1 and group < UNIT:
        strides = [*strides[1:], strides[0]]
    if inside == 2 and group == UNIT:  # neighbouring quads, of one lane, in different words
        strides = [strides[2], *strides[:2]]
    target = Field(width, 0, (8, 16, *strides))
    return Plane(name, 1, 4 * width, (Part("q", shift, source, target),))


#: Of quants that are looked up, by their width: what a quad's place is further on for each digit of
#: its lane, and for the second one of a lane.
_CODE_STRIDES = {4: (32, 64, 16), 2: (16, 2, 32), 1: (1, 2, 16)}


def code_plane(name: str, shift: int, source: Field, group: int) -> Plane:
    """32 fields: quant 4j + b begins 4b bits further on than 4j.

    Bits of a quad (j) from several planes then make four half-bytes of 16 bits: a selector for
    ``prmt``, which looks four quants up at a time.
    """
    low, high, other = _CODE_STRIDES[source.width]
    strides = (low, high, other) if group < UNIT else (other, low, high)
    target = Field(source.width, 0, (4, 8, *strides))
    return Plane(name, 1, 4 * source.width, (Part("q", shift, source, target),))


def scale_plane(name: str, group: int, fields: Sequence[Numbers]) -> Plane:
    """Fields of each group side by side; half-bytes of two units share a byte."""
    group_bits = sum(source.width for _, _, source in fields)
    unit_bits = group_bits * (UNIT // group)
    units = max(1, 8 // unit_bits)
    strides = tuple(group_bits << k for k in range(_digits(units * UNIT // group)))
    parts, at = [], 0
    for number, shift, source in fields:
        parts.append(Part(number, shift, source, Field(source.width, at, strides)))
        at += source.width
    return Plane(name, units, max(1, unit_bits // 8), tuple(parts))
