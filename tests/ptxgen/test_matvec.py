"""Matrix-vector products: shapes, choices by shape, and values on a device."""

from __future__ import annotations

import dataclasses

import gguf
import numpy as np
import pytest

from urdir.driver.device import Device
from urdir.driver.harness import check_kernel, run_kernel
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.formats import FORMATS, Format, random_blocks
from urdir.ptxgen.kernels.matvec import FULL, MAX_BATCH, Matvec, choose_rows, choose_team

Q8_0, Q4_K, Q6_K, F16, F32 = (FORMATS[n] for n in ("Q8_0", "Q4_K", "Q6_K", "F16", "F32"))


def test_a_team_is_a_power_of_two_with_few_idle_threads() -> None:
    assert [choose_team(u) for u in (1, 2, 3, 9, 28, 32)] == [1, 2, 4, 16, 32, 32]
    assert [choose_team(u) for u in (64, 72, 128, 448, 896)] == [64, 32, 128, 64, 128]
    for units in range(1, 1025):
        team = choose_team(units)
        assert team & (team - 1) == 0
        assert team <= 128
        assert -(-units // team) * team < 2 * units


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_rows_are_shared_only_by_matrices_that_fill_the_gpu(fmt: Format) -> None:
    for rows, units in ((1, 1), (2048, 64), (4096, 128), (128256, 128), (3, 10**6)):
        each = choose_rows(fmt, rows, units)
        assert each in (1, 2, 4)
        assert each == 1 or rows // each * units >= FULL
    widest = {"F32": 1, "F16": 2, "BF16": 2}.get(fmt.name, 4)
    assert choose_rows(fmt, 128256, 128) == widest
    assert [choose_rows(fmt, 128256, 128, b) for b in (1, 4, 5, 8)] == [
        min(widest, most) for most in (4, 4, 2, 2)
    ]


def test_the_launch_covers_every_row() -> None:
    for rows in (1, 2, 3, 17, 33, 1000):
        for each in (e for e in (1, 2, 4) if e <= rows):
            spec = Matvec(Q8_0, rows, 288, rows_each=each)
            covered = spec.launch_shape.grid[0] * spec.cta_teams * each
            assert rows <= covered < rows + spec.cta_teams * each


def test_impossible_specs_are_refused() -> None:
    with pytest.raises(PtxgenError, match="threads is 24"):
        Matvec(Q8_0, 3, 64, threads=24)
    with pytest.raises(PtxgenError, match="8 to 128"):
        Matvec(Q4_K, 3, 256, threads=4)
    with pytest.raises(PtxgenError, match="rows_each is 4 of 3"):
        Matvec(Q8_0, 3, 64, rows_each=4)
    for batch in (0, MAX_BATCH + 1):
        with pytest.raises(PtxgenError, match=f"batch is {batch}"):
            Matvec(Q8_0, 3, 64, batch=batch)
    with pytest.raises(PtxgenError, match="multiple of 256"):
        Matvec(Q4_K, 3, 896)


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_the_reference_is_ggufs_dequantisation(fmt: Format) -> None:
    spec = Matvec(fmt, 5, 768, bias=True)
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
    spec = Matvec(fmt, 5, 512 if fmt is not F32 else 75)
    inputs = spec.make_inputs(np.random.default_rng(6))
    weights = spec.layout.unpack(inputs["weights"])
    for col in (0, 1, 37, 46, 74, spec.cols - 1):
        x = np.zeros((1, spec.cols), np.float32)
        x[0, col] = 1.0
        y = run_kernel(device, spec, {**inputs, "x": x})["y"]
        np.testing.assert_array_equal(y[0], weights[:, col])


@pytest.mark.parametrize(
    "spec",
    [
        Matvec(Q8_0, 33, 352),
        Matvec(Q8_0, 3, 4864, threads=128),
        Matvec(Q4_K, 6, 4096, rows_each=4),
        Matvec(Q6_K, 11, 1024, threads=8, rows_each=2),
        Matvec(F16, 7, 4096, threads=64, rows_each=2, bias=True),
    ],
    ids=str,
)
def test_every_team_gives_the_product(device: Device, spec: Matvec) -> None:
    (deviation,) = check_kernel(device, spec, seed=7)
    assert deviation.ok, deviation


def test_a_row_does_not_depend_on_its_neighbours(device: Device) -> None:
    """Rows that the last team shares with another one, and one row alone, bit for bit."""
    spec = Matvec(Q4_K, 7, 512, rows_each=4)
    inputs = spec.make_inputs(np.random.default_rng(8))
    together = run_kernel(device, spec, inputs)["y"]
    alone = run_kernel(device, Matvec(Q4_K, 7, 512, rows_each=1), inputs)["y"]
    np.testing.assert_array_equal(together, alone)


@pytest.mark.parametrize(
    "spec",
    [
        Matvec(Q4_K, 7, 1280, bias=True, batch=5),
        Matvec(Q4_K, 7, 512, rows_each=4, batch=4),
        Matvec(Q6_K, 5, 768, batch=8),
        Matvec(Q8_0, 5, 4864, threads=128, batch=2),
        Matvec(F32, 6, 75, bias=True, batch=8),
        Matvec(F16, 3, 70, rows_each=2, batch=3),
    ],
    ids=str,
)
def test_a_batch_gives_each_vector_the_bits_it_gets_alone(device: Device, spec: Matvec) -> None:
    """Whatever the others are: here one of them is not finite."""
    inputs = spec.make_inputs(np.random.default_rng(9))
    inputs["x"][1] = np.inf
    y = run_kernel(device, spec, inputs)["y"]
    alone = dataclasses.replace(spec, batch=1)
    for b in (0, *range(2, spec.batch)):
        single = run_kernel(device, alone, {**inputs, "x": inputs["x"][b : b + 1]})["y"]
        np.testing.assert_array_equal(y[b], single[0])
