"""Products of numbers of eight bits by mma.sync, with the kernels that make their operands."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest

from urdir.driver import Device, run_kernel
from urdir.driver.operation import Launch
from urdir.model.engine.batch import Output, StepShape
from urdir.model.engine.session import Session
from urdir.model.engine.step import build_plan
from urdir.model.families.config import Config
from urdir.model.families.synthetic import SyntheticModel
from urdir.model.measure.paper_device import paper_device
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.bytes_choice import least_rows
from urdir.ptxgen.kernels.linear.choice import Limits
from urdir.ptxgen.kernels.linear.epilogue.activation import Gated
from urdir.ptxgen.kernels.linear.epilogue.pack import PackedVectors
from urdir.ptxgen.kernels.linear.epilogue.weighted import Weighted
from urdir.ptxgen.kernels.linear.mma_choice import any_bytes_cut, choose_mma
from urdir.ptxgen.kernels.linear.pack_bytes import PackBytes
from urdir.ptxgen.kernels.linear.products.gemm_mma_bytes import GemmMmaBytes, MmaBytesCut
from urdir.ptxgen.kernels.linear.products.gemm_mma_e4m3 import GemmMmaE4m3
from urdir.ptxgen.kernels.linear.steps import Epilogue
from urdir.ptxgen.kernels.row_scales import RowScales
from urdir.ptxgen.ptx.architecture import ARCHITECTURES, number_of
from urdir.ptxgen.tools.assemble import assemble, is_available
from urdir.ptxgen.weights.formats import FORMATS, Format, random_blocks

Array = npt.NDArray[Any]
E4M3 = FORMATS["E4M3R256"]
#: Rows, columns, vectors, and a cut.
SIZES = {
    "odd": (81, 768, 67, MmaBytesCut(1, 24)),
    "one vector": (8, 256, 1, MmaBytesCut(1, 8)),
    "many": (150, 1280, 139, MmaBytesCut(2, 64, operands=2)),
    "splits": (70, 1280, 37, MmaBytesCut(1, 32, 2, x_stages=2)),
    "deep": (65, 2048, 40, MmaBytesCut(1, 16, weight_stages=3, x_stages=3, x_slices=2)),
}


def limits(target: str, sms: int = 128) -> Limits:
    holds = ARCHITECTURES[number_of(target)]
    return Limits(sms, holds.shared, holds.shared_per_cta, target=target)


def e4m3_rows(rows: int, cols: int, rng: np.random.Generator) -> Array:
    """Blocks of rows whose scales are unlike each other."""
    per_row = cols // E4M3.block
    sizes = np.exp(rng.standard_normal(rows))
    return np.concatenate([random_blocks(E4M3, per_row, rng, float(size)) for size in sizes])


@pytest.mark.parametrize("size", SIZES)
def test_products_of_e4m3_numbers(device: Device, size: str) -> None:
    """As numpy's with ml_dtypes' rounding of vectors, but for the sums of tensor cores, which the
    emulator takes in f32."""
    rows, cols, batch, cut = SIZES[size]
    rng = np.random.default_rng(rows)
    x = (rng.standard_normal((batch, cols)) * np.exp(rng.standard_normal((batch, 1)))).astype("f4")
    x[batch // 2] = 0 if batch > 1 else x[0]
    spec = GemmMmaE4m3(E4M3, rows, cols, batch, cut)
    weights = spec.layout.pack(e4m3_rows(rows, cols, rng))
    largest = np.abs(x).max(axis=1, keepdims=True)
    inverse = np.float32(448) / np.where(largest, largest, 1)
    rounded = (x * inverse).astype(ml_dtypes.float8_e4m3fn).astype("f8")
    rounded *= largest * np.float32(1 / 448)
    wanted = rounded @ spec.layout.unpack(weights).astype("f8").T
    packed = run_kernel(device, PackBytes(batch, cols, element="e4m3"), {"x": x})
    inputs = {"weights": weights, "x": packed["y"], "x_scales": packed["scales"]}
    found = run_kernel(device, spec, inputs)["y"]
    most = 2e-6 if device.is_emulated else spec.tolerance.rtol
    assert (np.abs(found - wanted).max(axis=1) <= most * np.abs(wanted).max(axis=1)).all()
    exact = x.astype("f8") @ spec.layout.unpack(weights).astype("f8").T
    assert 0 < np.linalg.norm(found - exact) < 0.05 * np.linalg.norm(exact)


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "W4G128"])
@pytest.mark.parametrize("size", ["odd", "many"])
def test_products_of_bytes(device: Device, size: str, name: str) -> None:
    """Off from those of the floats by a step / sqrt(12) of each weight and each vector's number."""
    rows, cols, batch, cut = SIZES[size]
    fmt, rng = FORMATS[name], np.random.default_rng(cols)
    spec = GemmMmaBytes(fmt, rows, cols, batch, cut)
    weights = spec.layout.pack(random_blocks(fmt, rows * cols // fmt.block, rng))
    x = rng.standard_normal((batch, cols)).astype("f4")
    exact = x.astype("f8") @ spec.layout.unpack(weights).astype("f8").T
    y, steps = through_kernels(device, spec, weights, x)
    squares = (spec.layout.unpack(weights).astype("f8") ** 2).sum(axis=1)
    expected = (x.astype("f8") ** 2).sum(axis=1)[:, None] * steps[:rows] ** 2 / 12
    expected += (np.abs(x).max(axis=1).astype("f8") / 127)[:, None] ** 2 / 12 * squares
    assert 0.6 < np.sqrt(((y - exact) ** 2).sum() / expected.sum()) < 1.1


def through_kernels(
    device: Device, spec: GemmMmaBytes, weights: Array, x: Array
) -> tuple[Array, Array]:
    """The product of a repacked matrix and activations, by three kernels, and the rows' steps."""
    of_rows = run_kernel(device, RowScales(spec.format, spec.rows, spec.cols), {"weights": weights})
    packed = run_kernel(device, PackBytes(spec.batch, spec.cols), {"x": x})
    given = {"weights": weights, "row_scales": of_rows["scales"]}
    given |= {"x": packed["y"], "x_scales": packed["scales"]}
    return run_kernel(device, spec, given)["y"], of_rows["scales"][0].astype("f8")


def test_a_vector_has_the_same_bits_among_any_others(device: Device) -> None:
    spec = GemmMmaBytes(FORMATS["Q4_K"], 70, 512, 100, MmaBytesCut(1, 32))
    rng = np.random.default_rng(3)
    weights = spec.layout.pack(random_blocks(spec.format, 140, rng))
    x = rng.standard_normal((100, 512)).astype("f4")
    first, _ = through_kernels(device, spec, weights, x)
    order = rng.permutation(100)
    moved = x[order]
    moved[1:] *= 7
    assert np.array_equal(through_kernels(device, spec, weights, moved)[0][0], first[order[0]])
    few = replace(spec, batch=9, cut=MmaBytesCut(1, 8))
    assert np.array_equal(through_kernels(device, few, weights, x[:9])[0], first[:9])


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_products_of_what_is_not_finite_are_not_either(device: Device, value: float) -> None:
    rng = np.random.default_rng(1)
    spec = GemmMmaE4m3(E4M3, 16, 256, 9, MmaBytesCut(1, 16))
    x = rng.standard_normal((9, 256)).astype("f4")
    x[3, 7] = value
    packed = run_kernel(device, PackBytes(9, 256, element="e4m3"), {"x": x})
    inputs = {"weights": spec.layout.pack(e4m3_rows(16, 256, rng)), "x": packed["y"]}
    y = run_kernel(device, spec, inputs | {"x_scales": packed["scales"]})["y"]
    assert not np.isfinite(y[3]).any()
    assert np.isfinite(np.delete(y, 3, axis=0)).all()


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_120"])
@pytest.mark.parametrize("vectors", [9, 137, 2048])
def test_every_type_has_a_cut_that_fits(target: str, vectors: int) -> None:
    held = limits(target)
    kinds: list[tuple[type[GemmMmaBytes], Format]] = [
        (GemmMmaE4m3, E4M3),
        *((GemmMmaBytes, FORMATS[name]) for name in ("Q4_K", "Q8_0", "IQ3_S")),
    ]
    for kind, fmt in kinds:
        given: tuple[tuple[int, tuple[Epilogue, ...]], ...]
        given = ((700, ()), (512, (Gated(), PackedVectors())))
        for rows, steps in given:
            product = kind.of(fmt, rows, 512, vectors, any_bytes_cut(vectors), *steps)
            chosen = choose_mma(product, held)
            assert replace(chosen, cut=product.cut) == product
            assert chosen.grids.end <= held.shared_per_cta


@pytest.mark.skipif(not is_available(), reason="needs nvJitLink")
@pytest.mark.parametrize("target", ["sm_89", "sm_120"])
@pytest.mark.parametrize("vectors", [137, 2048])
def test_what_an_8b_model_launches_does_not_spill(target: str, vectors: int) -> None:
    kinds: tuple[type[GemmMmaBytes], ...] = (GemmMmaE4m3, GemmMmaBytes)
    for kind, fmt in zip(kinds, (E4M3, FORMATS["Q4_K"]), strict=True):
        for rows, steps in ((6144, ()), (14336, (Gated(), PackedVectors()))):
            given = kind.of(fmt, rows, 4096, vectors, any_bytes_cut(vectors), *steps)
            product = choose_mma(given, limits(target))
            made = assemble(product.ptx(target), target).entries[product.name]
            assert not made.spills, f"{product.cut}: {made}"


@pytest.mark.parametrize(
    ("name", "target", "wanted"),
    [
        ("E4M3R256", "sm_89", "gemm_mma_e4m3"),
        ("E4M3R256", "sm_120", "gemm_mma_e4m3"),
        ("E4M3R256", "sm_90a", "gemm_e4m3"),
        ("E4M3R256", "sm_90", "gemm_mma"),  # mma.sync makes f16 of E4M3 there, and on sm_100
        ("E4M3R256", "sm_100", "gemm_mma"),
        ("E4M3R256", "sm_86", "gemm_mma"),
        ("E4M3G128", "sm_90a", "gemm_e4m3"),
        ("E4M3G128", "sm_89", "gemm_mma"),
    ],
)
def test_the_target_decides_what_multiplies_e4m3(name: str, target: str, wanted: str) -> None:
    """From `least_rows` on, of every product of a layer."""
    least = least_rows(FORMATS[name])
    with SyntheticModel("llama-3.2-1b", name.lower()) as model, paper_device(target, 132) as on:
        settings = SessionSettings(256, "f16", sequences=least)
        with (
            Weights(model, Config.of(model), on) as weights,
            Session(on, weights, settings) as session,
        ):
            for rows in (least - 1, least):
                shape = StepShape(rows, 256, Output.NONE, prompt=rows)
                launches = [of for of in build_plan(session.parts, shape) if isinstance(of, Launch)]
                names = {of.kernel.name for of in launches if "blk.5." in of.label}
                assert (wanted in names) == (rows == least or wanted == "gemm_mma")
                assert ("pack_bytes" in names) == (wanted != "gemm_mma" and rows == least)


def test_what_is_refused() -> None:
    for name in ("Q8_0", "E4M3G128"):
        with pytest.raises(PtxgenError, match=r"for E4M3 weights with a scale a row$"):
            GemmMmaE4m3(FORMATS[name], 64, 128, 8, MmaBytesCut(1, 8))
    with pytest.raises(PtxgenError, match="for quantised weights"):
        GemmMmaBytes(FORMATS["F16"], 64, 64, 8, MmaBytesCut(1, 8))
    with pytest.raises(PtxgenError, match="takes no weighted"):
        GemmMmaBytes.of(FORMATS["Q8_0"], 64, 64, 8, MmaBytesCut(1, 8), Weighted())
    with pytest.raises(PtxgenError, match="impossible cut"):
        MmaBytesCut(1, 8, x_slices=4)
    with pytest.raises(PtxgenError, match=r"needs sm_89|not sm_86"):
        GemmMmaE4m3(E4M3, 8, 256, 1, MmaBytesCut(1, 8)).ptx("sm_86")
