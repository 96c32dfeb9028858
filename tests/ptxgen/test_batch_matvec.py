"""Products of a small batch on tensor cores: cuts, values, and what they do not depend on."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from urdir.driver.device import Device
from urdir.driver.harness import check_kernel, run_kernel
from urdir.ptxgen.assemble import assemble, is_available
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.formats import FORMATS, Format
from urdir.ptxgen.kernels._batch_matrix import Quads
from urdir.ptxgen.kernels.batch_matvec import (
    MAX_BATCH,
    MAX_SHARED,
    BatchMatvec,
)
from urdir.ptxgen.kernels.matvec import Matvec
from urdir.ptxgen.kernels.product import can_take, matvec_of, scratch_nbytes

QUANTISED = [f for f in FORMATS.values() if not f.is_float]
Q8_0, Q4_K, Q6_K, F16 = (FORMATS[n] for n in ("Q8_0", "Q4_K", "Q6_K", "F16"))

#: (rows, cols, more fields) of an 8B and a 1B model.
SHAPES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "8B qkv": (4096, 4096, {"eps": 1e-5, "others": ((Q4_K, 1024), (Q6_K, 1024))}),
    "8B o": (4096, 4096, {"residual": True}),
    "8B gate_up": (14336, 4096, {"eps": 1e-5, "gated": True}),
    "8B down": (4096, 14336, {"residual": True}),
    "8B out": (128256, 4096, {"eps": 1e-5}),
    "1B kv": (512, 2048, {"eps": 1e-5}),
    "1B down": (2048, 8192, {"residual": True}),
}


# ---- how a launch is cut ----


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fmt", QUANTISED, ids=lambda f: f.name)
def test_real_shapes_fit_a_multiprocessor(shape: str, fmt: Format) -> None:
    rows, cols, more = SHAPES[shape]
    spec = BatchMatvec(fmt, rows, cols, **more)
    assert spec.shared_bytes <= MAX_SHARED
    assert 132 <= spec.launch_shape.grid[0] <= 132 * spec.residents
    if is_available() and fmt in (Q4_K, Q6_K):
        cost = assemble(spec.ptx("sm_90"), "sm_90").entries["batch_matvec"]
        assert not cost.spills
        assert cost.registers * 32 * spec.cta_warps * spec.residents <= 65536


@pytest.mark.parametrize("rows", [16, 17, 100, 1000, 5000])
@pytest.mark.parametrize("slices", [0, 1, 3, 18])
def test_the_launch_covers_every_tile_and_column(rows: int, slices: int) -> None:
    more = {"others": ((Q8_0, 2 * rows), (Q8_0, 16)), "slices": slices}
    spec = BatchMatvec(Q8_0, rows, 2016, **more)
    assert (spec.share_count - 1) * spec.share_units * 32 < 2016
    assert spec.share_count * spec.share_units * 32 >= 2016
    tiles = groups = 0
    for m in spec.matrices:
        assert (m.first_tile, m.first_group) == (tiles, groups)
        assert 16 * (m.tiles - 1) < m.rows <= 16 * m.tiles
        assert (m.groups - 1) * m.each < m.tiles <= m.groups * m.each
        tiles, groups = tiles + m.tiles, groups + m.groups
    assert spec.launch_shape.grid == (groups * spec.share_count, 1, 1)


@pytest.mark.parametrize("fmt", QUANTISED, ids=lambda f: f.name)
def test_four_lanes_take_every_quad_of_a_unit_once(fmt: Format) -> None:
    for quads in Quads.of(fmt):
        taken = []
        for t in range(4):
            at = (t & 1) * quads.lane_bytes[0] + (t >> 1) * quads.lane_bytes[1]
            shift = (t & 1) * quads.lane_shifts[0] + (t >> 1) * quads.lane_shifts[1]
            taken += [8 * at + shift + e * quads.stride for e in range(2)]
        order = [4 * e + t if fmt.unit_groups == 2 else 2 * t + e for t in range(4) for e in (0, 1)]
        assert taken == [quads.part.target.position(4 * j) for j in order]


@pytest.mark.parametrize("fmt", QUANTISED, ids=lambda f: f.name)
@pytest.mark.parametrize("blocks", [1, 2])
def test_words_of_eight_rows_lie_in_different_banks(fmt: Format, blocks: int) -> None:
    (matrix,) = BatchMatvec(fmt, 64, 2048, blocks=blocks).matrices
    for copy in matrix.copies:
        assert 128 % copy.quads.span == 0
        rows = 128 // copy.quads.span
        assert len({copy.pitch * row % 128 // copy.quads.span for row in range(rows)}) == rows
        assert copy.pitch >= copy.pieces * copy.piece
    assert len({matrix.scale_pitch * row % 128 for row in range(8)}) == 8


def test_the_cut_of_the_columns_does_not_depend_on_the_batch() -> None:
    for rows, cols, more in SHAPES.values():
        cuts = {
            BatchMatvec(Q4_K, rows, cols, batch=batch, **more).share_steps
            for batch in range(1, MAX_BATCH + 1)
        }
        assert len(cuts) == 1


def test_scratch_is_enough_for_every_type() -> None:
    for rows, cols, more in SHAPES.values():
        all_rows = [rows, *(r for _, r in more.get("others", ()))]
        partials, arrived = scratch_nbytes(all_rows, cols, more.get("gated", False))
        for fmt in QUANTISED:
            spec = BatchMatvec(fmt, rows, cols, **more)
            if spec.share_count > 1:
                assert spec.nbytes(spec.param("partials")) <= partials
                assert spec.nbytes(spec.param("arrived")) <= arrived
    assert scratch_nbytes([15], 4096) == scratch_nbytes([64], 37) == (0, 0)


def test_impossible_specs_are_refused() -> None:
    for batch in (0, MAX_BATCH + 1):
        with pytest.raises(PtxgenError, match=f"batch is {batch}"):
            BatchMatvec(Q8_0, 32, 64, batch=batch)
    with pytest.raises(PtxgenError, match="quantised"):
        BatchMatvec(Q8_0, 32, 64, others=((F16, 32),))
    with pytest.raises(PtxgenError, match="15 rows, a matrix must have 16"):
        BatchMatvec(Q8_0, 32, 64, others=((Q8_0, 15),))
    with pytest.raises(PtxgenError, match="31 rows, a matrix must have 32"):
        BatchMatvec(Q8_0, 31, 64, blocks=2)
    with pytest.raises(PtxgenError, match="blocks is 1"):
        BatchMatvec(Q8_0, 32, 64, blocks=1, gated=True)
    with pytest.raises(PtxgenError, match="multiple of 256"):
        BatchMatvec(Q4_K, 32, 896)
    with pytest.raises(PtxgenError, match="without bias"):
        BatchMatvec(Q4_K, 32, 256, gated=True, bias=True)
    with pytest.raises(PtxgenError, match=r"33 \(up to 32\), stages 2"):
        BatchMatvec(Q4_K, 32, 256, warps=33, stages=2)
    with pytest.raises(PtxgenError, match="14336 columns need at least 7"):
        BatchMatvec(Q4_K, 32, 14336, slices=3)


def test_the_choice_between_the_kernels_of_few_vectors() -> None:
    shapes = [(Q4_K, 64), (Q6_K, 32)]
    chosen = matvec_of(shapes, 512, 4, False, 90, eps=1e-5)
    assert chosen == BatchMatvec(Q4_K, 64, 512, batch=4, eps=1e-5, others=((Q6_K, 32),))
    for batch, exact, sm in ((1, False, 90), (4, True, 90), (4, False, 75)):
        matvec = matvec_of(shapes, 512, batch, exact, sm)
        assert isinstance(matvec, Matvec)
        assert matvec.activations == ("f32" if exact else "i16")
    assert isinstance(matvec_of([(F16, 64)], 512, 4, False, 90), Matvec)
    assert not can_take([Q4_K], [15], 90)


# ---- values ----


@pytest.mark.parametrize("spec", BatchMatvec.examples(), ids=str)
def test_examples_run_on_sm_80(spec: BatchMatvec) -> None:
    with Device.open("emulator:sm_80") as device:
        for deviation in check_kernel(device, spec, seed=1):
            assert deviation.ok, deviation


@pytest.mark.parametrize("fmt", QUANTISED, ids=lambda f: f.name)
@pytest.mark.parametrize("blocks", [1, 2])
def test_integer_activations_that_16_bits_hold_give_exact_products(
    device: Device, fmt: Format, blocks: int
) -> None:
    """Multiples of 2^-15 of 32767: x is its own rounding, so that only the f32 sums differ."""
    spec = BatchMatvec(fmt, 35, 1024, batch=3, blocks=blocks, slices=2)
    rng = np.random.default_rng(3)
    inputs = spec.make_inputs(rng)
    x = rng.integers(-32767, 32768, (3, 1024))
    x[:, ::32] = 32767 * rng.choice([-1, 1], (3, 32))
    inputs["x"] = (x * 2.0**-15).astype(np.float32)
    y, expected = run_kernel(device, spec, inputs)["y"], spec.reference(**inputs)["y"]
    assert np.abs(y - expected).max() <= 2e-6 * np.abs(expected).max()


@pytest.mark.parametrize("largest", [1e-15, 1e-3, 1e3, 1e15])
def test_activations_keep_their_precision_at_every_size(device: Device, largest: float) -> None:
    """Relative to a unit's largest; a unit of zeros stays zero."""
    spec = BatchMatvec(Q4_K, 64, 512, batch=2)
    inputs = spec.make_inputs(np.random.default_rng(4))
    inputs["x"][:, 32:64] = 0.0
    inputs["x"][:, 64:96] *= 1e-3
    inputs["x"] *= np.float32(largest)
    y, expected = run_kernel(device, spec, inputs)["y"], spec.reference(**inputs)["y"]
    error = np.sqrt(np.mean((y - expected) ** 2.0) / np.mean(expected**2.0))
    assert error < 5e-5


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("eps", [None, 1e-5])
def test_what_is_not_finite_stays_in_its_vector(
    device: Device, value: float, eps: float | None
) -> None:
    spec = BatchMatvec(Q8_0, 21, 352, batch=3, eps=eps)
    inputs = spec.make_inputs(np.random.default_rng(4))
    inputs["x"][1, 77] = value
    y = run_kernel(device, spec, inputs)["y"]
    assert not np.isfinite(y[1]).any()
    assert np.isfinite(y[[0, 2]]).all()


@pytest.mark.parametrize(
    "changes",
    [
        {"warps": 1},
        {"warps": 3, "stages": 1},
        {"warps": 16, "stages": 1, "resident": 1},
        {"stages": 5, "resident": 4, "warps": 4},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "spec",
    [
        BatchMatvec(Q4_K, 165, 1536, batch=4, slices=2, bias=True, eps=1e-5),
        BatchMatvec(Q6_K, 50, 768, batch=8, gated=True, eps=1e-5, slices=3),
        BatchMatvec(FORMATS["Q5_1"], 40, 1888, batch=5, blocks=2, residual=True),
    ],
    ids=str,
)
def test_every_cut_gives_the_same_bits(
    device: Device, spec: BatchMatvec, changes: dict[str, int]
) -> None:
    """But for those of the columns, which are those of the sums."""
    for deviation in check_kernel(device, spec, seed=7):
        assert deviation.ok, deviation
    inputs = spec.make_inputs(np.random.default_rng(8))
    other = dataclasses.replace(spec, **changes)
    assert other.launch_shape != spec.launch_shape
    first, second = (run_kernel(device, s, inputs)["y"] for s in (spec, other))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("slices", [1, 2, 4])
def test_every_cut_of_the_columns_gives_the_product(device: Device, slices: int) -> None:
    more = {"others": ((Q6_K, 17), (Q8_0, 16)), "eps": 1e-5, "slices": slices}
    for deviation in check_kernel(device, BatchMatvec(Q4_K, 49, 1024, **more), seed=9):
        assert deviation.ok, deviation


@pytest.mark.parametrize(
    "spec",
    [
        BatchMatvec(Q4_K, 39, 1280, bias=True, batch=5),
        BatchMatvec(Q6_K, 20, 768, batch=8, eps=1e-5, slices=3),
        BatchMatvec(Q8_0, 33, 4864, batch=2, residual=True),
        BatchMatvec(Q6_K, 22, 512, batch=3, gated=True, eps=1e-5),
        BatchMatvec(FORMATS["Q5_0"], 32, 1504, batch=7, blocks=2),
    ],
    ids=str,
)
def test_a_batch_gives_each_vector_the_bits_it_gets_alone(
    device: Device, spec: BatchMatvec
) -> None:
    """Whatever the others are: here one of them is not finite."""
    inputs = spec.make_inputs(np.random.default_rng(9))
    inputs["x"][1] = np.inf
    y = run_kernel(device, spec, inputs)["y"]
    alone = dataclasses.replace(spec, batch=1)
    for b in (0, *range(2, spec.batch)):
        one = {name: inputs[name][b : b + 1] for name in ("x", "residual") if name in inputs}
        single = run_kernel(device, alone, {**inputs, **one})["y"]
        np.testing.assert_array_equal(y[b], single[0])


def test_one_launch_for_several_matrices_gives_the_bits_of_several(device: Device) -> None:
    spec = BatchMatvec(Q4_K, 49, 768, eps=1e-5, others=((Q6_K, 24), (Q4_K, 16)), slices=3)
    inputs = spec.make_inputs(np.random.default_rng(10))
    together = run_kernel(device, spec, inputs)
    for suffix, fmt, rows in (("", Q4_K, 49), ("1", Q6_K, 24), ("2", Q4_K, 16)):
        single = dataclasses.replace(spec, format=fmt, rows=rows, others=())
        alone = {**single.make_inputs(np.random.default_rng(0)), "x": inputs["x"]}
        alone |= {"weights": inputs["weights" + suffix], "norm": inputs["norm"]}
        y = run_kernel(device, single, alone)["y"]
        np.testing.assert_array_equal(together["y" + suffix], y)


def test_activations_are_rounded_as_matvec_does(device: Device) -> None:
    """Both differ from the reference by far more than from each other."""
    spec = BatchMatvec(Q8_0, 64, 2048, batch=2)
    inputs = spec.make_inputs(np.random.default_rng(11))
    y = run_kernel(device, spec, inputs)["y"]
    inputs = {p.name: inputs[p.name] for p in spec.product.params if p.name in inputs}
    matvec = run_kernel(device, spec.product, inputs)["y"]
    rounding = np.abs(matvec - spec.product.reference(**inputs)["y"]).max()
    assert np.abs(y - matvec).max() < rounding / 10
