"""Products of types with codebooks: a unit's are summed up as integers of 32 bits."""

from __future__ import annotations

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from urdir.driver.device import Device
from urdir.driver.harness import run_kernel
from urdir.model.verify.kernel_suite import skip_where_missing
from urdir.ptxgen.kernels.linear.products.gemv import Gemv
from urdir.ptxgen.weights.formats import FORMATS, Bytes, Format
from urdir.ptxgen.weights.layout import recoded

#: The largest activation of a unit, as an integer.
MOST = 32639
WITH_STEPS = [f for f in FORMATS.values() if f.grid and f.has("scale")]


def write(fmt: Format, blocks: Bytes, number: str, value: int) -> None:
    """Every number of that name in blocks (count, bytes) becomes ``value``."""
    for plane in fmt.stored:
        for part in (part for part in plane.parts if part.number == number):
            for index in range(fmt.block_units // plane.units * part.count):
                byte, shift = divmod(part.source.position(index), 8)
                down = part.target.position(index) if number == "d" else 0
                field = value >> part.shift >> down & part.source.mask
                blocks[:, byte] &= 0xFF ^ part.source.mask << shift
                blocks[:, byte] |= field << shift


def largest(fmt: Format, count: int, rng: np.random.Generator) -> Bytes:
    """Blocks (count, bytes) of the entry whose weights are largest, any signs, the largest steps,
    and d = 1."""
    assert fmt.grid is not None
    width = 32 // fmt.grid.weights
    words = np.array(fmt.grid.words, np.uint32)[:, None] >> np.arange(0, 32, width, dtype=np.uint32)
    levels = words & np.uint32((1 << width) - 1)
    if fmt.grid.values:
        levels = abs(np.array(fmt.grid.values))[levels]
    blocks = rng.integers(0, 256, (count, fmt.nbytes), dtype=np.uint8)
    for number, value in (
        ("index", int(levels.sum(axis=1).argmax())),
        ("step", 0xFFFF),
        ("d", int(np.float16(1).view(np.uint16))),
    ):
        write(fmt, blocks, number, value)
    return blocks


def exact(fmt: Format, blocks: Bytes, cols: int) -> npt.NDArray[np.float64]:
    """Weights (rows, cols)."""
    values = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[fmt.name])
    return values.reshape(-1, cols).astype(np.float64)


@pytest.mark.parametrize("fmt", WITH_STEPS, ids=lambda fmt: fmt.name)
def test_the_largest_sums_of_a_unit_do_not_overflow(device: Device, fmt: Format) -> None:
    """Rows 0 and 20 have all products positive and all negative, as large as they can be; others
    agree with them in half of the signs."""
    rows, cols, rng = 21, 768, np.random.default_rng(4)
    spec = Gemv.of(fmt, rows, cols, activations="i16")
    skip_where_missing(spec, device.native_target)
    blocks = largest(fmt, rows * cols // fmt.block, rng)
    weights = exact(fmt, blocks, cols)
    x = MOST * np.where(weights[0] < 0, -1, 1)
    blocks = blocks.reshape(rows, -1)
    blocks[20] = blocks[0]
    each = blocks.reshape(-1, fmt.nbytes)
    write(fmt, each[-(cols // fmt.block) :], "d", int(np.float16(-1).view(np.uint16)))
    weights = exact(fmt, each, cols)
    y = run_kernel(
        device,
        spec,
        {"weights": spec.layout.pack_recoded(recoded(fmt, each)), "x": x.astype(np.float32)[None]},
    )["y"]
    sums = weights @ x
    assert sums[0] == -sums[20] == (abs(weights[0]) * MOST).sum()
    np.testing.assert_allclose(y[0], sums, rtol=0, atol=2.0**-21 * sums[0])


def test_iq3_xxs_has_nearly_all_bits() -> None:
    """Sizes of 62 with a step of 31 would be 93 % of what 31 bits hold."""
    fmt = FORMATS["IQ3_XXS"]
    assert fmt.grid is not None
    sizes = np.array(fmt.grid.words, np.uint32).view(np.uint8)
    assert 0.9 * 2**31 < 32 * MOST * int(sizes.max()) * 31 < 2**31
