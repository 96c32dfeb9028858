"""Products of eight bits: how exact they are, and what does not change their bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from urdir.driver import Device, run_kernel
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.bytes_choice import any_cut, choose_bytes
from urdir.ptxgen.kernels.linear.epilogue.activation import Gated
from urdir.ptxgen.kernels.linear.epilogue.adapted import Adapted
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.epilogue.pack import PackedVectors
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.epilogue.weighted import Weighted
from urdir.ptxgen.kernels.linear.pack_bytes import PackBytes
from urdir.ptxgen.kernels.linear.products.gemm_bytes import BytesCut, GemmBytes
from urdir.ptxgen.kernels.linear.products.gemm_e4m3 import GemmE4m3
from urdir.ptxgen.kernels.row_scales import RowScales
from urdir.ptxgen.tools.assemble import assemble, is_available
from urdir.ptxgen.weights import eights
from urdir.ptxgen.weights.e4m3 import e4m3
from urdir.ptxgen.weights.formats import FORMATS, Format, random_blocks
from urdir.ptxgen.weights.layout import Layout

Array = npt.NDArray[Any]
TYPES = [fmt for fmt in FORMATS.values() if eights.can_be_bytes(fmt)]


@pytest.fixture(autouse=True)
def hopper(device: Device) -> None:
    if device.native_target != "sm_90a":
        pytest.skip("products of bytes are for sm_90a")


def through_kernels(device: Device, spec: GemmBytes, weights: Array, x: Array) -> Array:
    """The product of a repacked matrix and activations, by the three kernels."""
    scales = run_kernel(device, RowScales(spec.format, spec.rows, spec.cols), {"weights": weights})
    packed = run_kernel(device, PackBytes(spec.batch, spec.cols), {"x": x})
    inputs = {"weights": weights, "row_scales": scales["scales"]}
    y: Array = run_kernel(device, spec, inputs | {"x": packed["y"], "x_scales": packed["scales"]})[
        "y"
    ]
    return y


def as_e4m3(device: Device, x: Array) -> dict[str, Array]:
    """Activations as E4M3 numbers, by the kernel."""
    packed = run_kernel(device, PackBytes(*x.shape, element="e4m3"), {"x": x})
    return {"x": packed["y"], "x_scales": packed["scales"]}


def product_of_blocks(rows: int, cols: int, batch: int) -> GemmBytes:
    """Of E4M3 numbers with a scale for each 128 columns."""
    given = GemmE4m3(FORMATS["E4M3G128"], rows, cols, batch, any_cut(batch))
    return choose_bytes(given, 132)


def product(fmt: Format, rows: int, cols: int, batch: int) -> GemmBytes:
    return choose_bytes(GemmBytes(fmt, rows, cols, batch, any_cut(batch)), 132)


@pytest.mark.turns(2)
@pytest.mark.parametrize(
    "fmt",
    [
        pytest.param(fmt, marks=[pytest.mark.full] if i % 4 else [], id=fmt.name)
        for i, fmt in enumerate(TYPES)
    ],
)
def test_errors_are_those_of_rounding_to_bytes(device: Device, fmt: Format) -> None:
    """Of weights and of activations: a step / sqrt(12) of each, independent of each other."""
    rng = np.random.default_rng(TYPES.index(fmt))
    rows, batch = 81, 67
    cols = max(fmt.block, 544 // fmt.block * fmt.block)
    spec = product(fmt, rows, cols, batch)
    count = rows * cols // fmt.block
    weights = spec.layout.pack(random_blocks(fmt, count, rng))
    x = rng.standard_normal((batch, cols)).astype(np.float32)
    x[5] = 0
    matrix = spec.layout.unpack(weights).astype(np.float64)
    exact = x.astype(np.float64) @ matrix.T
    y = through_kernels(device, spec, weights, x)
    assert not y[5].any()
    of_rows = eights.row_scales(spec.layout, weights)[0, :rows].astype(np.float64) ** 2 / 12
    of_vectors = (np.abs(x).max(axis=1).astype(np.float64) / 127) ** 2 / 12
    expected = (x.astype(np.float64) ** 2).sum(axis=1)[:, None] * of_rows
    expected += of_vectors[:, None] * (matrix**2).sum(axis=1)
    error = np.sqrt(((y - exact) ** 2).sum() / expected.sum())
    assert 0.6 < error < 1.1


@pytest.mark.parametrize("fmt", TYPES, ids=lambda fmt: fmt.name)
def test_bytes_of_weights_are_the_nearest(fmt: Format) -> None:
    """But for roundings to f16, which move a few to the next one; of rows of all sizes."""
    rng = np.random.default_rng(1)
    layout = Layout(fmt, 20, 2 * fmt.block if fmt.block > 64 else 320)
    sizes = (1e-3, 1.0, 30.0)
    per_row = layout.cols // fmt.block
    blocks = [random_blocks(fmt, per_row, rng, sizes[row % 3]) for row in range(layout.rows)]
    packed = layout.pack(np.concatenate(blocks))
    scales = eights.row_scales(layout, packed)
    found = eights.weight_bytes(layout, packed, scales)
    wanted = layout.unpack(packed) / scales[0, : layout.rows, None].astype(np.float64)
    nearest = np.rint(wanted)
    assert np.abs(found - wanted).max() < 0.7
    assert ((found - wanted) ** 2).sum() < 1.03**2 * ((nearest - wanted) ** 2).sum()
    assert np.abs(found).max() <= eights.MOST


def test_a_vector_has_the_same_bits_among_any_others(device: Device) -> None:
    spec = product(FORMATS["Q4_K"], 70, 512, 100)
    rng = np.random.default_rng(3)
    weights = spec.layout.pack(random_blocks(spec.format, 140, rng))
    x = rng.standard_normal((100, 512)).astype(np.float32)
    first = through_kernels(device, spec, weights, x)
    order = rng.permutation(100)
    moved = x[order]
    moved[1:] *= 7
    assert np.array_equal(through_kernels(device, spec, weights, moved)[0], first[order[0]])
    few = through_kernels(device, product(spec.format, 70, 512, 9), weights, x[:9])
    assert np.array_equal(few, first[:9])


def test_scales_of_columns_may_be_of_any_size(device: Device) -> None:
    """Also 0, as of a block of zeros, and of any sign, one after the other in a row."""
    rng, fmt, rows, cols, batch = np.random.default_rng(4), FORMATS["E4M3G128"], 70, 1408, 19
    spec = GemmE4m3(fmt, rows, cols, batch, BytesCut(2, 24, 2, 3, sets=2))
    x = rng.standard_normal((batch, cols)).astype(np.float32)
    inputs = as_e4m3(device, x)
    numbers = e4m3()[eights.unplace_bytes(inputs["x"].view(np.int8), batch, cols).view(np.uint8)]
    vectors = numbers * inputs["x_scales"][:batch, None].astype(np.float64)
    sizes = np.array([0, 1e-38, -1e-25, 1e-9, 1e-4, -0.02, 1, 30], np.float32)
    blocks = random_blocks(fmt, rows * cols // 128, rng)
    blocks[:, :4] = rng.choice(sizes, len(blocks))[:, None].view(np.uint8)
    blocks[: 2 * cols // 128, :4] = 0
    inputs["weights"] = spec.layout.pack(blocks)
    matrix = spec.layout.unpack(inputs["weights"]).astype(np.float64)
    y = run_kernel(device, spec, inputs)["y"]
    most = np.abs(vectors) @ np.abs(matrix).T
    assert np.abs(y[:, :2]).max() < 1e-25
    assert (np.abs(y - vectors @ matrix.T) <= 2.0**-13 * cols / 32 * most + 1e-25).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_what_is_not_finite_spoils_its_row_or_vector_alone(device: Device, value: float) -> None:
    spec = product_of_blocks(20, 512, 9)
    rng = np.random.default_rng(1)
    blocks = random_blocks(spec.format, 80, rng)
    blocks[13, :4] = np.array([value], np.float32).view(np.uint8)  # row 3, the second of four
    x = rng.standard_normal((9, 512)).astype(np.float32)
    inputs = {"weights": spec.layout.pack(blocks)}
    y = run_kernel(device, spec, inputs | as_e4m3(device, x))["y"]
    assert not np.isfinite(y[:, 3]).any()
    assert np.isfinite(np.delete(y, 3, axis=1)).all()
    x[5, 200] = value
    blocks[13, :4] = blocks[12, :4]
    inputs = {"weights": spec.layout.pack(blocks)}
    y = run_kernel(device, spec, inputs | as_e4m3(device, x))["y"]
    assert not np.isfinite(y[5]).any()
    assert np.isfinite(np.delete(y, 5, axis=0)).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_products_of_what_is_not_finite_are_not_either(device: Device, value: float) -> None:
    spec = product(FORMATS["Q8_0"], 16, 64, 9)
    rng = np.random.default_rng(1)
    weights = spec.layout.pack(random_blocks(spec.format, 32, rng))
    x = rng.standard_normal((9, 64)).astype(np.float32)
    x[3, 7] = value
    y = through_kernels(device, spec, weights, x)
    assert not np.isfinite(y[3]).any()
    assert np.isfinite(np.delete(y, 3, axis=0)).all()


def test_a_normalised_vector_is_within_half_a_step(device: Device) -> None:
    spec = PackBytes.examples()["rms of odd rows"]
    assert spec.norm is not None
    inputs = spec.make_inputs(np.random.default_rng(2))
    found = run_kernel(device, spec, inputs)
    exact = spec.norm(inputs["x"], inputs["weight"], None)
    scales = found["scales"][: spec.rows, None].astype(np.float64)
    rounded = eights.unplace_bytes(found["y"], spec.rows, spec.cols) * scales
    assert np.abs(rounded - exact).max() <= 0.501 * scales.max()
    np.testing.assert_allclose(scales[:, 0], np.abs(exact).max(axis=1) / 127, rtol=1e-5)


@pytest.mark.parametrize("vectors", [9, 65, 300, 2048])
@pytest.mark.parametrize("fmt", [FORMATS[n] for n in ("Q4_K", "Q8_0", "IQ3_S")], ids=str)
def test_every_type_has_a_cut_that_fits(fmt: Format, vectors: int) -> None:
    for steps in ((), (Gated(),), (Residual(),)):
        given = GemmBytes.of(fmt, 1000, 512, vectors, any_cut(vectors), *steps)
        chosen = choose_bytes(given, 132)
        assert replace(chosen, cut=given.cut) == given
        assert chosen.grids.end <= 227 << 10


@pytest.mark.skipif(not is_available(), reason="needs nvJitLink")
@pytest.mark.parametrize("vectors", [137, 200, 2048])
def test_scales_of_columns_do_not_spill(vectors: int) -> None:
    """Of what an 8B model launches: scales of columns take more registers than those of rows."""
    fmt, adapted = FORMATS["E4M3G128"], Adapted(2, 8, places=(0, 1), count=2)
    for rows, cols, steps, others in (
        (4096, 4096, (Bias(),), ((fmt, 1024), (fmt, 1024))),
        (4096, 14336, (Residual(),), ()),
        (14336, 4096, (adapted, Gated(), PackedVectors()), ()),
    ):
        given = GemmE4m3.of(fmt, rows, cols, vectors, any_cut(vectors), *steps, others=others)
        chosen = choose_bytes(given, 132)
        made = assemble(chosen.ptx("sm_90a"), "sm_90a").entries[chosen.name]
        assert not made.spills, f"{chosen.cut}: {made}"


def test_what_is_refused() -> None:
    q8 = FORMATS["Q8_0"]
    with pytest.raises(PtxgenError, match="for quantised weights"):
        GemmBytes(FORMATS["F16"], 64, 64, 8, BytesCut(1, 8))
    with pytest.raises(PtxgenError, match="133248 columns: up to 133144"):
        GemmBytes(q8, 64, 133248, 8, BytesCut(1, 8))
    with pytest.raises(PtxgenError, match="takes no weighted"):
        GemmBytes.of(q8, 64, 64, 8, BytesCut(1, 8), Weighted())
    with pytest.raises(PtxgenError, match="with a scale a row or for each 128 columns"):
        GemmE4m3(FORMATS["E4M3G32"], 64, 64, 8, BytesCut(1, 8))
    with pytest.raises(PtxgenError, match="1 tiles of rows, 1 of columns in"):
        GemmBytes(q8, 64, 64, 16, BytesCut(2, 16, sharers=2))
    with pytest.raises(PtxgenError, match="40 vectors: instructions take bytes by 16"):
        GemmBytes(q8, 64, 64, 40, BytesCut(1, 40))
    with pytest.raises(PtxgenError, match="impossible cut"):
        BytesCut(1, 44)
    with pytest.raises(PtxgenError, match="rows of 16388: up to 16384 columns"):
        PackBytes(1, 16388)
    with pytest.raises(PtxgenError, match="row_scales: not of BF16 weights"):
        RowScales(FORMATS["BF16"], 16, 64)
