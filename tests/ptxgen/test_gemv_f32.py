"""Matrix-vector products: shapes, choices by shape, and values on a device."""

from __future__ import annotations

import dataclasses

import gguf
import numpy as np
import pytest

from tests.ptxgen.own_types import is_own
from urdir.driver.device import Device
from urdir.driver.harness import check_kernel, run_kernel
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.linear.epilogue.activation import Activated, Bounded, Gated
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.products.gemv_f32 import (
    MAX_RAW,
    PANEL_NBYTES,
    RECORD_NBYTES,
    GemvF32,
    choose_rows,
)
from urdir.ptxgen.kernels.linear.prologue.norm import Normed
from urdir.ptxgen.kernels.linear.spec import MAX_BATCH
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.tools.assemble import assemble, is_available
from urdir.ptxgen.weights.formats import FORMATS, Format, random_blocks

RMS = Norm("rms", 1e-5)
FINE_RMS = Norm("rms", 1e-6)

Q8_0, Q4_K, Q6_K, F16, F32 = (FORMATS[n] for n in ("Q8_0", "Q4_K", "Q6_K", "F16", "F32"))


# ---- how a launch is cut ----


@pytest.mark.parametrize(
    ("total", "choices", "rows"),
    [
        (4096, (1, 2, 3, 4), 2),  # 31 rows an SM: its 16 warps take two each
        (4096, (1, 4), 1),
        (6144, (1, 2, 3, 4), 3),
        (6144, (1, 2), 1),
        (128256, (1, 2, 4), 4),
        (128256, (1,), 1),
        (1024, (1, 2, 4), 1),
        (5, (1,), 1),
    ],
)
def test_rows_of_a_warp_spread_evenly(total: int, choices: tuple[int, ...], rows: int) -> None:
    assert choose_rows(total, choices) == rows


@pytest.mark.parametrize(
    ("fmt", "rows", "others", "allowed"),
    [
        (Q4_K, 48, (), {1, 2, 4, 8, 16}),
        (Q4_K, 6, (), {1, 2}),
        (Q4_K, 7, (), {1}),
        (Q4_K, 48, ((Q6_K, 6),), {1, 2}),
        (Q8_0, 32, ((F16, 5),), {1}),
        (F16, 12, (), {1, 2, 4}),
        (F16, 12, ((F32, 6),), {1, 2}),
    ],
    ids=str,
)
def test_rows_of_a_warp_lie_in_one_tile(
    fmt: Format, rows: int, others: tuple[tuple[Format, int], ...], allowed: set[int]
) -> None:
    """In every matrix of the launch."""
    for each in range(1, 18):
        if each in allowed:
            assert GemvF32(fmt, rows, 768, others=others, rows_each=each).cut.rows == each
        else:
            with pytest.raises(PtxgenError, match=f"rows_each is {each} of {rows} rows"):
                GemvF32(fmt, rows, 768, others=others, rows_each=each)
    assert GemvF32(fmt, rows, 768, others=others).cut.rows in allowed


@pytest.mark.turns(6)
@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
@pytest.mark.parametrize("batch", [1, 8])
def test_a_thread_has_registers_for_what_it_holds(fmt: Format, batch: int) -> None:
    for gated in (False, True):
        spec = GemvF32.of(fmt, 14336, 4096, Normed(RMS), *[Gated()] * gated, batch=batch)
        widest = max(p.nbytes for p in fmt.planes)
        least = 2 if gated else 1
        assert spec.cut.dots * widest <= max(MAX_RAW, least * widest)
        assert spec.cut.dots * batch <= max(16, least * batch)
        if is_available():
            cost = assemble(spec.ptx("sm_90"), "sm_90").entries["gemv_f32"]
            assert not cost.spills, gated
            assert cost.registers * 32 * spec.cut.warps * spec.cut.residents <= 65536


@pytest.mark.parametrize("rows", [1, 2, 3, 17, 33, 1000])
@pytest.mark.parametrize("passes", [1, 3])
def test_the_launch_covers_every_row(rows: int, passes: int) -> None:
    for each in (e for e in (1, 2, 4, 8) if rows % e == 0):
        spec = GemvF32(Q8_0, rows, 288, rows_each=each, passes=passes, others=((Q8_0, 2 * rows),))
        ctas = 0
        for part, count in zip(spec.parts, (rows, 2 * rows), strict=True):
            taken = spec.cut.warps * each * passes
            assert part.first_cta == ctas
            assert count <= part.ctas * taken < count + taken
            ctas += part.ctas
        assert spec.launch_shape.grid == (ctas, 1, 1)


def test_panels_of_activations_fit_shared_memory() -> None:
    for cols in (32, 4096, 14336, 28672, 53248):
        for batch in range(1, MAX_BATCH + 1):
            spec = GemvF32(Q8_0, 64, cols, batch=batch)
            assert batch * spec.panels.nbytes <= PANEL_NBYTES == 47 * 1024
            assert spec.panels.count * spec.panels.units * 32 >= cols


def test_records_of_neighbouring_lanes_lie_in_different_banks() -> None:
    assert len({RECORD_NBYTES * lane % 128 // 16 for lane in range(8)}) == 8


def test_impossible_specs_are_refused() -> None:
    with pytest.raises(PtxgenError, match="warps is 33"):
        GemvF32(Q8_0, 3, 64, warps=33)
    with pytest.raises(PtxgenError, match="rows_each is 4 of 3"):
        GemvF32(Q8_0, 3, 64, rows_each=4)
    for batch in (0, MAX_BATCH + 1):
        with pytest.raises(PtxgenError, match=f"batch is {batch}"):
            GemvF32(Q8_0, 3, 64, batch=batch)
    with pytest.raises(PtxgenError, match="multiple of 256"):
        GemvF32(Q4_K, 3, 896)
    with pytest.raises(PtxgenError, match=r"32 of 64 rows: it must divide them, and 16"):
        GemvF32(Q8_0, 64, 64, rows_each=32)
    with pytest.raises(PtxgenError, match="residual is for one matrix that is not gated"):
        GemvF32.of(Q4_K, 3, 256, Gated(), Residual())
    with pytest.raises(PtxgenError, match=r"bias is .* of 2 matrices"):
        GemvF32.of(Q4_K, 3, 256, Bias((True,)), others=((Q4_K, 3),))
    with pytest.raises(PtxgenError, match="softcap -1"):
        GemvF32.of(Q4_K, 3, 256, Bounded(softcap=-1.0))
    for activation in (Activation("swiglu_oai"), Activation("silu", limit=3.0)):
        with pytest.raises(PtxgenError, match="for gated products"):
            GemvF32.of(Q4_K, 3, 256, Activated(activation))
    with pytest.raises(PtxgenError, match="is for one"):
        GemvF32.of(Q4_K, 3, 256, Residual(), others=((Q4_K, 3),))
    with pytest.raises(PtxgenError, match="passes is 2"):
        GemvF32(F32, 3, 20000, passes=2)


# ---- values ----


@pytest.mark.parametrize(
    "fmt", [f for f in FORMATS.values() if not is_own(f)], ids=lambda f: f.name
)
def test_the_reference_is_ggufs_dequantisation(fmt: Format) -> None:
    spec = GemvF32.of(fmt, 5, 768, Bias())
    rng = np.random.default_rng(5)
    blocks = random_blocks(fmt, 5 * 768 // fmt.block, rng)
    weights = gguf.quants.dequantize(
        blocks.reshape(5, -1).view({"F32": np.float32, "F16": np.float16}.get(fmt.name, np.uint8)),
        gguf.GGMLQuantizationType[fmt.name],
    )
    x = rng.standard_normal((2, 768)).astype(np.float32)
    bias = rng.standard_normal((5,)).astype(np.float32)
    spec = dataclasses.replace(spec, batch=2)
    y = spec.reference(weights=spec.layout.pack(blocks), x=x, bias=bias)["y"]
    for got, vector in zip(y, x.astype(np.float64), strict=True):
        expected = weights.astype(np.float64) @ vector + bias
        np.testing.assert_allclose(got, expected, rtol=1e-6)


@pytest.mark.parametrize("fmt", [Q4_K, Q6_K, Q8_0, F32], ids=lambda f: f.name)
def test_one_activation_at_a_time_gives_the_columns_to_the_bit(device: Device, fmt: Format) -> None:
    """With x a unit vector every sum is exact, so that y is a column of the weights."""
    spec = GemvF32(fmt, 5, 512 if fmt is not F32 else 75)
    inputs = spec.make_inputs(np.random.default_rng(6))
    weights = spec.layout.unpack(inputs["weights"])
    for col in (0, 1, 37, 46, 74, spec.cols - 1):
        x = np.zeros((1, spec.cols), np.float32)
        x[0, col] = 1.0
        y = run_kernel(device, spec, {**inputs, "x": x})["y"]
        np.testing.assert_array_equal(y[0], weights[:, col])


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_is_not_hidden(device: Device, value: float) -> None:
    spec = GemvF32(Q8_0, 5, 352)
    inputs = spec.make_inputs(np.random.default_rng(4))
    inputs["x"][0, 77] = value
    assert not np.isfinite(run_kernel(device, spec, inputs)["y"]).any()


@pytest.mark.parametrize(
    "spec",
    [
        GemvF32(Q8_0, 33, 352),
        GemvF32(Q8_0, 3, 4864, warps=16),
        GemvF32(Q4_K, 8, 4096, rows_each=4),
        GemvF32(Q4_K, 16, 2048, rows_each=8, stages=4),
        GemvF32(Q8_0, 32, 288, rows_each=16, stages=1),
        GemvF32(Q4_K, 40, 1024, warps=2, passes=4, rows_each=2, stages=3),
        GemvF32.of(Q4_K, 21, 2304, Normed(RMS), Gated(), passes=2, warps=3),
        GemvF32.of(Q6_K, 10, 1024, Bias(), Residual(), warps=1, rows_each=2),
        GemvF32.of(F16, 6, 4096, Normed(FINE_RMS), Bias(), warps=4, rows_each=2),
        GemvF32.of(Q8_0, 2, 25600, Normed(RMS), Residual()),
        GemvF32.of(Q6_K, 9, 512, Normed(RMS), others=((Q4_K, 17), (Q8_0, 1)), batch=8),
        GemvF32.of(F32, 2, 11001, Normed(RMS), batch=3),
    ],
    ids=str,
)
def test_every_cut_gives_the_product(device: Device, spec: GemvF32) -> None:
    for deviation in check_kernel(device, spec, seed=7, sanitize=False):
        assert deviation.ok, deviation


@pytest.mark.slow
def test_a_row_does_not_depend_on_its_neighbours(device: Device) -> None:
    """Rows of a tile together, in pairs, and one row alone, bit for bit."""
    spec = GemvF32(Q4_K, 20, 512, rows_each=4)
    inputs = spec.make_inputs(np.random.default_rng(8))
    together = run_kernel(device, spec, inputs)["y"]
    for changes in ({"rows_each": 1}, {"rows_each": 1, "passes": 2, "stages": 2}, {"rows_each": 2}):
        alone = run_kernel(device, dataclasses.replace(spec, **changes), inputs)["y"]
        np.testing.assert_array_equal(together, alone)


def test_rows_that_two_warps_share_are_the_same_in_both(device: Device) -> None:
    """Warps after the last rows take these as well."""
    spec = GemvF32(F16, 12, 512, rows_each=4)
    inputs = spec.make_inputs(np.random.default_rng(8))
    together = run_kernel(device, spec, inputs)["y"]
    for changes in ({"rows_each": 1}, {"rows_each": 2, "passes": 2}, {"rows_each": 4, "warps": 1}):
        alone = run_kernel(device, dataclasses.replace(spec, **changes), inputs)["y"]
        np.testing.assert_array_equal(together, alone)


def test_one_launch_for_several_matrices_gives_the_bits_of_several(device: Device) -> None:
    """Also of a gated pair, before the gate."""
    spec = GemvF32.of(Q4_K, 9, 768, Normed(RMS), others=((Q6_K, 4), (Q4_K, 3)))
    inputs = spec.make_inputs(np.random.default_rng(10))
    together = run_kernel(device, spec, inputs)
    for suffix, fmt, rows in (("", Q4_K, 9), ("1", Q6_K, 4), ("2", Q4_K, 3)):
        single = dataclasses.replace(spec, format=fmt, rows=rows, others=())
        alone = {"weights": inputs["weights" + suffix], "x": inputs["x"], "norm": inputs["norm"]}
        y = run_kernel(device, single, alone)["y"]
        np.testing.assert_array_equal(together["y" + suffix], y)


@pytest.mark.parametrize(
    "spec",
    [
        GemvF32.of(Q4_K, 7, 1280, Bias(), batch=5),
        GemvF32(Q4_K, 8, 512, rows_each=4, batch=4),
        GemvF32(Q6_K, 5, 768, batch=8),
        GemvF32(Q8_0, 5, 4864, batch=2, stages=2),
        GemvF32(Q8_0, 5, 12288, batch=7),
        GemvF32.of(Q4_K, 6, 2560, Normed(RMS), batch=8, rows_each=2),
        GemvF32.of(Q6_K, 6, 512, Normed(RMS), Gated(), batch=3),
        GemvF32.of(F32, 6, 75, Bias(), batch=8),
        GemvF32(F16, 4, 70, rows_each=2, batch=3),
    ],
    ids=str,
)
def test_a_batch_gives_each_vector_the_bits_it_gets_alone(device: Device, spec: GemvF32) -> None:
    """Whatever the others are: here one of them is not finite."""
    inputs = spec.make_inputs(np.random.default_rng(9))
    inputs["x"][1] = np.inf
    y = run_kernel(device, spec, inputs)["y"]
    alone = dataclasses.replace(spec, batch=1, warps=spec.cut.warps)
    for b in (0, *range(2, spec.batch)):
        single = run_kernel(device, alone, {**inputs, "x": inputs["x"][b : b + 1]})["y"]
        np.testing.assert_array_equal(y[b], single[0])
