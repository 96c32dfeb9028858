"""The tensor types with codebooks, IQ1 to IQ3 and TQ1_0: `grids` says what their planes have."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from urdir.ptxgen.weights.fields import Field, Part, Plane
from urdir.ptxgen.weights.format import UNIT, Format
from urdir.ptxgen.weights.grids import Grid

# Strides of a unit's index in its block, where a unit has one, two, four or eight bytes.
_UNITS = {nbytes: (8 * nbytes, 16 * nbytes, 32 * nbytes) for nbytes in (1, 2, 4, 8)}

# Levels of the grids of IQ2; -1, 0 and 1 of IQ1's, times eight, plus or minus one.
_IQ2 = (8, 25, 43, 0, -8, -25, -43, 0)
_IQ1 = (-7, 1, 9, 0, -9, -1, 7, 0)
_TQ1 = (-1, 0, 1, 0, 0, 0, 0, 0)


def _at(byte: int, shift: int = 0) -> int:
    return 8 * byte + shift


def _part(number: str, shift: int, source: Field, start: int, strides: tuple[int, ...]) -> Part:
    return Part(number, shift, source, Field(source.width, start, strides))


def _indices(source: Field) -> Plane:
    """The lower eight bits of each index; ``source`` has all digits."""
    count = len(source.strides) - 3
    return Plane("index", 1, 1 << count, (_part("index", 0, source, 0, (8, 16, 32)[:count]),))


def _signs(start: int, group: int, unit: int, others: Sequence[Part], seven: bool) -> Plane:
    """A word of signs: those of eight weights from bit ``start`` on, side by side, ``group`` bits
    from those of the next eight; of the next unit, ``unit`` bytes further on."""

    def signs() -> Iterator[Part]:
        for first, digits in ((0, 2), (4, 1), (6, 0)) if seven else ((0, 3),):
            inner = tuple(1 << k for k in range(digits))
            source = Field(1, start + first, (group, 2 * group, *inner, *_UNITS[unit]))
            yield _part("sign", 0, source, 4 * first, (1, 2, *(4 * s for s in inner)))

    return Plane("signs", 1, 4, (*signs(), *others), running=seven)


def _step(source: Field, start: int, strides: tuple[int, ...] = ()) -> Part:
    return _part("step", 0, source, start, strides)


def _grid_type(
    name: str,
    ggml_type: int,
    nbytes: int,
    grid: Grid,
    stored: Sequence[Plane],
    *,
    d: Field,
    group: int = UNIT,
    halvings: int = 0,
) -> Format:
    """A type of 256 weights a block. ``d``: where its 16 bits are, as fields of ``d.width``."""
    digits = (16 // d.width).bit_length() - 1
    factors = Plane(
        "factors", 8, 2, (_part("d", 0, d, 0, tuple(d.width << k for k in range(digits))),)
    )
    bits = Field(8, 0, tuple(8 << k for k in range(5)))
    scales = Field(8, 0, () if group == UNIT else (8,))
    whole = Field(8, 0, (8,))
    has_steps = any(part.number == "step" for plane in stored for part in plane.parts)
    planes = (
        Plane("low", 1, 32, (Part("q", 0, bits, bits),)),
        *(Plane("scales", 1, UNIT // group, (Part("scale", 0, scales, scales),)),) * has_steps,
        Plane("factors", 8, 2, (Part("d", 0, d if d.width == 8 else whole, whole),)),
    )
    return Format(
        name, ggml_type, 256, nbytes, planes, group=group, halvings=halvings, grid=grid,
        stored=(*stored, factors), recoded=name == "TQ1_0",
    )  # fmt: skip


def _nibbles(byte: int) -> Plane:
    """A byte a unit: the steps of its two groups."""
    return Plane("steps", 1, 1, (_step(Field(4, _at(byte), (4, *_UNITS[1])), 0, (4,)),))


def _upper(byte: int, width: int, count: int) -> Plane:
    """A byte a unit: the upper bits of its ``count`` indices."""
    strides = tuple(width << k for k in range(count.bit_length() - 1))
    part = _part("index", 8, Field(width, _at(byte), (*strides, *_UNITS[1])), 0, strides)
    return Plane("upper", 1, 1, (part,))


def _three_bits(number: str, shift: int, start: int, strides: tuple[int, ...], units: int,
                to: tuple[int, ...]) -> Iterator[Part]:  # fmt: skip
    """Numbers of three bits that may cross bytes, bit by bit, the first ``units`` digits being
    those of an item."""
    for bit in range(3):
        yield _part(number, shift + bit, Field(1, start + bit, strides), bit, to[:units])


def _paired(start: int, strides: tuple[int, ...]) -> Iterator[Part]:
    """The three upper bits of indices, where `Upper.paired` says."""
    for bit, to in enumerate(((1, (4, 8)), (2, (4, 8)), (7, (-4, 8)))):
        yield _part("index", 8 + bit, Field(1, start + bit, strides), *to)


def grid_types() -> tuple[Format, ...]:
    """All of them."""
    first_d = Field(8, 0, (8,))
    above = Part("index", 8, Field(1, _at(2, 8), (16, 32, *_UNITS[8])), Field(1, 28, (1, 2)))
    iq1 = Grid("IQ1_S", 8, "below", _IQ1)
    return (
        _grid_type(
            "IQ2_XXS", 16, 66, Grid("IQ2_XXS", 8, "seven", _IQ2), d=first_d, halvings=3,
            stored=(
                _indices(Field(8, _at(2), (8, 16, *_UNITS[8]))),
                _signs(_at(6), 7, 8, [_step(Field(4, _at(6, 28), _UNITS[8]), 28)], True),
            ),
        ),
        _grid_type(
            "IQ2_XS", 17, 74, Grid("IQ2_XS", 8, "seven", _IQ2), d=first_d, halvings=3, group=16,
            stored=(
                _indices(Field(8, _at(2), (16, 32, *_UNITS[8]))),
                _signs(_at(2, 9), 16, 8, [above], True),
                _nibbles(66),
            ),
        ),
        _grid_type(
            "IQ2_S", 22, 82, Grid("IQ2_S", 8, "eight", _IQ2), d=first_d, halvings=3, group=16,
            stored=(
                _indices(Field(8, _at(2), (8, 16, *_UNITS[4]))),
                _signs(_at(34), 8, 4, [], False),
                _upper(66, 2, 4),
                _nibbles(74),
            ),
        ),
        _grid_type(
            "IQ3_XXS", 18, 98, Grid("IQ3_XXS", 4, "seven"), d=first_d, halvings=2,
            stored=(
                _indices(Field(8, _at(2), (8, 16, 32, *_UNITS[8]))),
                _signs(_at(66), 7, 4, [_step(Field(4, _at(66, 28), _UNITS[4]), 28)], True),
            ),
        ),
        _grid_type(
            "IQ3_S", 21, 110, Grid("IQ3_S", 4, "eight"), d=first_d,
            stored=(
                _indices(Field(8, _at(2), (8, 16, 32, *_UNITS[8]))),
                _signs(_at(74), 8, 4, [], False),
                _upper(66, 1, 8),
                Plane("steps", 2, 1, (_step(Field(4, _at(106), (4, 8, 16)), 0, (4,)),)),
            ),
        ),
        _grid_type(
            "IQ1_S", 19, 50, iq1, d=first_d, halvings=3,
            stored=(
                _indices(Field(8, _at(2), (8, 16, *_UNITS[4]))),
                Plane("upper", 1, 2, (
                    *_paired(_at(34), (3, 6, *_UNITS[2])),
                    _part("below", 0, Field(1, _at(34, 15), _UNITS[2]), 0, ()),
                    *(
                        _part("step", n, Field(1, _at(34, 12 + n), _UNITS[2]), 4 + 4 * n, ())
                        for n in range(3)
                    ),
                )),
            ),
        ),
        _grid_type(
            "IQ1_M", 29, 56, iq1, d=Field(4, _at(48, 12), (16, 32)), halvings=3, group=16,
            stored=(
                _indices(Field(8, 0, (8, 16, *_UNITS[4]))),
                Plane("upper", 1, 2, (
                    *_paired(_at(32), (4, 8, *_UNITS[2])),
                    _part("below", 0, Field(1, _at(32, 3), (4, 8, *_UNITS[2])), 0, (4, 8)),
                )),
                Plane("steps", 1, 1, tuple(
                    _three_bits("step", 0, _at(48), (3, 6, 16, 32), 1, (4,))
                )),
            ),
        ),
        _grid_type(
            "TQ1_0", 34, 54, Grid("TQ1_0", 8, "none", _TQ1), d=Field(8, _at(52), (8,)),
            stored=(
                _indices(Field(8, 0, (8, 16, *_UNITS[4]))),
                Plane("upper", 1, 2, (
                    _part("rest", 0, Field(4, _at(32), (4, 8, *_UNITS[2])), 0, (4, 8)),
                )),
                Plane("highest", 2, 1, (
                    _part("rest", 4, Field(1, _at(48), (1, 2, 4, 8, 16)), 0, (1, 2, 4)),
                )),
            ),
        ),
    )  # fmt: skip
