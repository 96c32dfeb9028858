"""Row powers, from their definition: the layout's own, and the kernel's."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from urdir.driver.device import Device
from urdir.driver.harness import run_kernel
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.row_powers import RowPowers
from urdir.ptxgen.weights.e4m3 import e4m3
from urdir.ptxgen.weights.formats import FORMATS, Bytes, Format, random_blocks
from urdir.ptxgen.weights.layout import Layout, recoded

TYPES = [f for f in FORMATS.values() if f.name != "F16"]
#: The largest |scale - offset| that a type's bits express, and the largest minimum; others: 1.
LARGEST = {
    "Q2_K": (15, 15), "Q3_K": (32, 0), "Q4_K": (63, 63), "Q5_K": (63, 63), "Q6_K": (128, 0),
    "IQ4_XS": (32, 0), "IQ2_XXS": (255, 0), "IQ2_XS": (255, 0), "IQ2_S": (255, 0),
    "IQ3_XXS": (255, 0), "IQ3_S": (255, 0), "IQ1_S": (255, 0), "IQ1_M": (255, 0),
    "Q4_1": (1, 1), "Q5_1": (1, 1), "W4G128": (1, 15), "W3G64": (1, 15), "W8G32": (1, 255),
    "E2M1G256": (448, 0), "E2M1G64": (448, 0),
}  # fmt: skip
HUGE, TINY = 65504.0, 2.0**-24

every_type = pytest.mark.parametrize("fmt", TYPES, ids=lambda f: f.name)


def _factors(fmt: Format, blocks: Bytes, number: str) -> npt.NDArray[np.float64]:
    """The factors of expanded blocks (rows, blocks, bytes), (rows, factors) f64."""
    found = []
    for _, part in fmt.parts(number):
        if fmt.name == "NVFP4":
            return 0.5 * e4m3()[blocks[:, :, :4].reshape(len(blocks), -1)].astype(np.float64)
        at = part.source.start // 8
        if fmt.has_exponents:
            found.append(2.0 ** (blocks[:, :, at].astype(np.float64) - 128))
        elif fmt.has_singles:
            singles = np.ascontiguousarray(blocks[:, :, at : at + 4]).view(np.float32)
            found.append(singles[:, :, 0].astype(np.float64))
        elif fmt.name == "IQ1_M":  # half a byte in every other one
            bits = (blocks[:, :, 49::2] >> 4).astype(np.uint16) << np.array([0, 4, 8, 12])
            found.append(bits.sum(axis=2, dtype=np.uint16).view(np.float16).astype(np.float64))
        else:
            halves = np.ascontiguousarray(blocks[:, :, at : at + 2]).view(np.float16)
            found.append(halves[:, :, 0].astype(np.float64))
    return np.concatenate(found, axis=1)


def _power(bound: float) -> float:
    """The one of f32's normal powers of two that brings ``bound`` between 2^14 and 2^15."""
    if not np.isfinite(bound) or bound == 0:
        return 1.0
    found = [p for p in range(-126, 128) if 2.0**14 <= bound * 2.0**p < 2.0**15]
    return 2.0 ** (found[0] if found else 127)


def _expected(bounds: npt.NDArray[np.float64], padded: int) -> list[float]:
    return [_power(float(bound)) for bound in bounds] + [1.0] * (padded - len(bounds))


def _bounds(fmt: Format, blocks: Bytes) -> npt.NDArray[np.float64]:
    scale, minimum = LARGEST.get(fmt.name, (1, 0))
    bounds: npt.NDArray[np.float64] = scale * abs(_factors(fmt, blocks, "d")).max(axis=1)
    if minimum:
        bounds = np.maximum(bounds, minimum * abs(_factors(fmt, blocks, "m")).max(axis=1))
    return bounds


def _adversarial(fmt: Format, layout: Layout) -> Bytes:
    """Expanded blocks: a row of zeros, then factors that are huge, subnormal, infinite, NaN."""
    count = layout.rows * layout.cols // fmt.block
    blocks = recoded(fmt, random_blocks(fmt, count, np.random.default_rng(5)))
    rows = blocks.reshape(layout.rows, -1, fmt.nbytes).copy()
    rows[0] = 0
    places = [part.source.start // 8 for number in ("d", "m") for _, part in fmt.parts(number)]
    if fmt.has_exponents:
        for row, exponent in enumerate((0, 1, 14, 15, 254, 255)):
            rows[row, :, places[0]] = exponent
        return rows
    if fmt.name == "NVFP4":
        for row, byte in enumerate((0, 1, 2, 0x7E)):
            rows[row, :, :4] = byte
        return rows
    values = (0.0, HUGE, -HUGE, TINY, -3 * TINY, np.inf, -np.inf, np.nan)
    dtype = np.dtype(np.float32 if fmt.has_singles else np.float16)
    size = dtype.itemsize
    for row, value in enumerate(values):
        half = np.array([value], dtype).view(np.uint8)
        if fmt.name == "IQ1_M":
            last = rows[row, slice(None) if row in (3, 4) else slice(-1, None)]
            last[:, 49::2] = (
                last[:, 49::2] & 15 | np.array([half & 15, half >> 4]).T.reshape(-1) << 4
            )
            continue
        for place in places:
            if row in (3, 4):  # all are as small
                rows[row, :, place : place + size] = half
        place = places[row % len(places)]
        if row:
            rows[row, -1, place : place + size] = half
    return rows


def _floats(fmt: Format, rows: int, cols: int) -> npt.NDArray[np.float32]:
    """Weights that the type can hold, from subnormal ones to the largest, infinity and NaN."""
    rng = np.random.default_rng(6)
    values = rng.standard_normal((rows, cols)).astype(np.float32)
    values[0] = 0
    values[1, -1] = 3e38
    values[2] = 1e-40
    values[3] *= np.float32(2.0**-126)
    values[4, 5], values[5, 0], values[6, -1] = np.inf, -np.inf, np.nan
    values[7] *= np.float32(2.0**-100)
    values[8] = -1
    if fmt.element == "bf16":
        values = (values.view(np.uint32) & 0xFFFF0000).view(np.float32)
    return values


def _matrix(fmt: Format, layout: Layout) -> tuple[Bytes, npt.NDArray[np.float64]]:
    """A repacked matrix, and its rows' bounds."""
    if fmt.is_float:
        values = _floats(fmt, layout.rows, layout.cols)
        bits = values.view(np.uint32)
        source = (bits >> 16).astype(np.uint16) if fmt.element == "bf16" else bits
        return layout.pack(source), abs(values.astype(np.float64)).max(axis=1)
    blocks = _adversarial(fmt, layout)
    return layout.pack_recoded(blocks.reshape(-1)), _bounds(fmt, blocks)


@every_type
def test_powers_are_those_of_the_definition(fmt: Format) -> None:
    layout = Layout(fmt, 19, 75 if fmt.is_float else 3 * fmt.block)
    packed, bounds = _matrix(fmt, layout)
    powers = layout.powers_of(packed)
    assert powers.dtype == np.float32
    assert (layout.tiles_nbytes % 16, len(powers)) == (0, 32)
    assert powers.tolist() == _expected(bounds, 32)
    assert len(set(powers.tolist())) > 4


@pytest.mark.parametrize("name", ["Q8_0", "Q4_1", "Q2_K", "Q3_K", "Q4_K", "Q6_K", "IQ4_XS"])
def test_powers_of_random_rows(name: str) -> None:
    """Of any sizes, those of d and m apart from each other."""
    fmt, rng = FORMATS[name], np.random.default_rng(8)
    layout = Layout(fmt, 40, 2 * fmt.block)
    blocks = random_blocks(fmt, 80, rng).reshape(40, 2, -1)
    for number in ("d", "m"):
        for _, part in fmt.parts(number):
            sizes = 2.0 ** rng.integers(-14, 12, (40, 1))
            halves = (sizes * rng.standard_normal((40, 2))).astype(np.float16)
            at = part.source.start // 8
            blocks[:, :, at : at + 2] = halves.view(np.uint8).reshape(40, 2, 2)
    packed = layout.pack(blocks)
    assert layout.powers_of(packed).tolist() == _expected(_bounds(fmt, blocks), 48)


@every_type
def test_the_kernel_makes_the_layouts_powers(device: Device, fmt: Format) -> None:
    layout = Layout(fmt, 19, 75 if fmt.is_float else 3 * fmt.block)
    packed, _ = _matrix(fmt, layout)
    spec = RowPowers(fmt, layout.rows, layout.cols)
    before = packed.copy()
    layout.powers_of(before)[:] = np.nan
    after = run_kernel(device, spec, {"weights": before})["weights"]
    np.testing.assert_array_equal(after, packed)


def test_f16_has_no_powers() -> None:
    layout = Layout(FORMATS["F16"], 19, 75)
    packed = layout.pack(np.ones((19, 75), np.float16))
    assert layout.nbytes == layout.tiles_nbytes == 2 * 32 * 256
    assert layout.powers_of(packed).size == 0
    with pytest.raises(PtxgenError, match="row_powers: F16 has none"):
        RowPowers(FORMATS["F16"], 19, 75)
