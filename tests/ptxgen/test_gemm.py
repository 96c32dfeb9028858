"""Linear kernel of many rows: tiles, rounding, edges."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from urdir.driver.device import Device
from urdir.driver.harness import check_kernel, run_kernel
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.experts.gemm import TILES
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.products.gemm import Gemm
from urdir.ptxgen.kernels.linear.products.gemm_tile import TILE, CtaTile
from urdir.ptxgen.kernels.linear.products.gemv_f32 import GemvF32
from urdir.ptxgen.tools.assemble import assemble, is_available
from urdir.ptxgen.weights.formats import FORMATS, Format

Q8_0, Q4_K, F16, BF16 = (FORMATS[n] for n in ("Q8_0", "Q4_K", "F16", "BF16"))


# ---- tiles ----


@pytest.mark.parametrize("tile", [TILE, *TILES], ids=lambda t: f"{t.batch}x{t.rows}")
def test_bank_conflicts(tile: CtaTile) -> None:
    """The eight 16-byte rows of a matrix lie in different banks, and eight threads' stores in
    different or, with four units, in every other one."""
    rows = {tile.stride * row % 128 // 16 for row in range(8)}
    stores = {
        (tile.stride * (thread // tile.units) + 64 * (thread % tile.units)) % 128 // 16
        for thread in range(8)
    }
    assert len(rows) == 8
    assert len(stores) == (4 if tile.units == 4 else 8)


def test_impossible_specs_are_refused() -> None:
    for tile in ((128, 64, 1, 2), (24, 64, 2, 1), (128, 64, 2, 2), (64, 128, 1, 2, 2)):
        with pytest.raises(PtxgenError, match="does not divide"):
            CtaTile(*tile)
    with pytest.raises(PtxgenError, match="batch is 0"):
        Gemm(Q8_0, 3, 64, batch=0)
    with pytest.raises(PtxgenError, match="exceed 4 GiB"):
        Gemm(Q8_0, 3, 2**20, batch=1024)
    with pytest.raises(PtxgenError, match="more than 65535 tiles"):
        Gemm(Q8_0, 2**23, 32, batch=9)
    with pytest.raises(PtxgenError, match="multiple of 256"):
        Gemm(Q4_K, 3, 96, batch=9)


@pytest.mark.skipif(not is_available(), reason="nvJitLink is not installed")
@pytest.mark.parametrize("name", ["Q8_0", "Q2_K", "Q5_K", "F32", "NVFP4"])
@pytest.mark.parametrize("target", ["sm_75", "sm_90"])
def test_the_tile_has_registers_for_every_type(name: str, target: str) -> None:
    spec = Gemm.of(FORMATS[name], 4097, 4096, Bias(), batch=129)
    cost = assemble(spec.ptx(target), target).entries["gemm"]
    assert not cost.spills


# ---- values ----


@pytest.mark.parametrize("cols", [32, 96, 352])
def test_rows_that_do_not_fill_a_tile_give_the_product(device: Device, cols: int) -> None:
    """A row and a batch row too many, or too few; few steps."""
    for rows, batch in ((TILE.rows + 1, TILE.batch - 1), (TILE.rows - 1, TILE.batch + 1)):
        spec = Gemm.of(Q8_0, rows, cols, Bias(), batch=batch)
        (deviation,) = check_kernel(device, spec, seed=1, sanitize=False)
        assert deviation.ok, deviation


@pytest.mark.turns(2)
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_one_activation_at_a_time_gives_the_weights_rounded(device: Device, fmt: Format) -> None:
    """With x rows of the unit matrix every sum is exact: y is W in f16, within a rounding."""
    spec = Gemm(fmt, 7, 256 if fmt.block > 1 else 45, batch=45)
    inputs = spec.make_inputs(np.random.default_rng(2))
    inputs["x"] = np.eye(spec.batch, spec.cols, spec.cols - spec.batch, dtype=np.float32)
    weights = spec.layout.unpack(inputs["weights"])[:, -spec.batch :].T
    y = run_kernel(device, spec, inputs)["y"]
    # a * q + b is one fused rounding here, two in the reference: it may fall to the other side.
    np.testing.assert_allclose(y, weights, rtol=2**-11 * 1.001, atol=1e-5)
    np.testing.assert_array_equal(y, y.astype(np.float16))
    if fmt.is_float:
        np.testing.assert_array_equal(y, weights.astype(np.float16))


@pytest.mark.parametrize(
    "fmt",
    [
        f
        for f in FORMATS.values()
        if not (f.has("scale") or f.has("factor") or f.name == "NF4G64")  # numbers of 15 bits
    ],
    ids=lambda f: f.name,
)
def test_operands_that_f16_holds_give_exact_products(device: Device, fmt: Format) -> None:
    """Small multiples of a power of two: no product and no sum is rounded."""
    rng = np.random.default_rng(3)
    spec = Gemm(fmt, 40, 256, batch=20)
    inputs = spec.make_inputs(rng)
    if fmt.is_float:
        values = rng.integers(-9, 9, (40, 256)).astype(np.float32)
        halves = {"f16": values.astype(np.float16), "bf16": values.view(np.uint16)[:, 1::2]}
        inputs["weights"] = spec.layout.pack(halves.get(str(fmt.element), values))
    elif fmt.has_exponents:
        spec.layout.plane_of(inputs["weights"], fmt.factors)[:] = 120
    else:
        dtype = np.float32 if fmt.has_singles else np.float16
        spec.layout.plane_of(inputs["weights"], fmt.factors).view(dtype)[:] = 2.0**-8
    inputs["x"] = rng.integers(-3, 4, inputs["x"].shape).astype(np.float32)
    y = run_kernel(device, spec, inputs)["y"]
    np.testing.assert_array_equal(y, spec.reference(**inputs)["y"])


def test_what_f16_does_not_hold(device: Device) -> None:
    """Beyond 65504: infinite. Down to 6e-5: to 11 bits; below: to a multiple of 6e-8."""
    values = np.array([7e4, 65504, 1e-3, 6.2e-5, 1e-6, 2e-8], np.float32)
    spec = Gemm(BF16, values.size, 128, batch=9)
    bits = (values.view(np.uint32) >> 16).astype(np.uint16)
    values = (bits.astype(np.uint32) << 16).view(np.float32)
    weights = np.zeros((values.size, 128), np.uint16)
    weights[:, 0] = bits
    x = np.zeros((9, 128), np.float32)
    x[:, 0] = 1.0
    y = run_kernel(device, spec, {"weights": spec.layout.pack(weights), "x": x})["y"]
    assert np.isposinf(y[:, 0]).all()
    np.testing.assert_array_equal(y[:, 2:4], np.broadcast_to(values[2:4], (9, 2)))
    np.testing.assert_allclose(y[:, 4:], np.broadcast_to(values[4:], (9, 2)), atol=3e-8, rtol=0)
    assert not y[:, 5].any()


@pytest.mark.slow
@pytest.mark.parametrize("fmt", [Q4_K, F16], ids=lambda f: f.name)
def test_a_batch_row_has_the_same_bits_in_every_batch(device: Device, fmt: Format) -> None:
    """Whatever the other rows are: here one of them is not finite."""
    spec = Gemm.of(fmt, 45, 512, Bias(), batch=40)
    inputs = spec.make_inputs(np.random.default_rng(4))
    inputs["x"][1] = np.nan
    y = run_kernel(device, spec, inputs)["y"]
    for first, count in ((0, 1), (5, 9), (23, 17)):
        part = dataclasses.replace(spec, batch=count)
        x = inputs["x"][first : first + count]
        found = run_kernel(device, part, {**inputs, "x": x})["y"]
        np.testing.assert_array_equal(found, y[first : first + count])


def test_it_agrees_with_the_exact_product(device: Device) -> None:
    gemm, gemv_f32 = Gemm(Q4_K, 24, 768, batch=8), GemvF32(Q4_K, 24, 768, batch=8)
    inputs = gemm.make_inputs(np.random.default_rng(5))
    exact = run_kernel(device, gemv_f32, inputs)["y"]
    rounded = run_kernel(device, gemm, inputs)["y"]
    bound = gemm.tolerance.rtol * np.abs(exact).max()
    assert 0 < np.abs(rounded - exact).max() < bound
