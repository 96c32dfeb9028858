"""Products on Hopper's tensor cores: how exact they are, and what does not change their bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from urdir.driver import Device, run_kernel
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.epilogue.heads import HeadPlaces, Heads
from urdir.ptxgen.kernels.linear.epilogue.pack import PackedVectors
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.epilogue.weighted import Weighted
from urdir.ptxgen.kernels.linear.packed_parts import Mixture
from urdir.ptxgen.kernels.linear.products.gemm_wgmma import GemmWgmma, WgmmaCut
from urdir.ptxgen.kernels.linear.steps import Epilogue
from urdir.ptxgen.kernels.linear.wgmma_choice import any_cut, choose_wgmma
from urdir.ptxgen.kernels.pairs import NO_PAIR, grouped, random_choice
from urdir.ptxgen.spec import Tolerance
from urdir.ptxgen.weights.formats import FORMATS, Format, random_blocks
from urdir.ptxgen.weights.packed import pack, unpack

Array = npt.NDArray[Any]

TYPES = [fmt for fmt in FORMATS.values() if fmt.element != "f32"]
#: What rounding to f16 changes at most.
UNIT = 2.0**-11
#: RMS errors of products of f16 weights; of weights that are rounded to f16 as their groups' scales
#: are before, sqrt(2 / 3) of a unit; where a minimum, rounded too, outweighs the sum; and where a
#: row has one scale, whose error, up to a unit, all of it has: sqrt(1 + 1 / 3).
PLAIN, ROUNDED, SCALED, OF_ROWS = 1e-6, 0.82 * UNIT, 1.8 * UNIT, 1.16 * UNIT


def allowed(fmt: Format) -> float:
    if fmt.element == "f16":
        return PLAIN
    if fmt.of_rows and not fmt.has("factor"):
        return OF_ROWS
    return SCALED if fmt.has_minimums else ROUNDED


def product(fmt: Format, rows: int, cols: int, vectors: int) -> GemmWgmma:
    return choose_wgmma(GemmWgmma(fmt, rows, cols, vectors, any_cut(vectors)), 132)


def row_errors(spec: GemmWgmma, inputs: dict[str, Array], y: Array) -> Array:
    """RMS error of each row of weights, as a part of the RMS of its products."""
    x = unpack(inputs["x"], spec.batch, spec.cols)
    exact = x @ spec.layout.unpack(inputs["weights"]).astype(np.float64).T
    size = np.sqrt((exact**2).mean(axis=0))
    errors: Array = np.sqrt(((y - exact) ** 2).mean(axis=0)) / np.maximum(size, 1e-30)
    return errors


@pytest.mark.parametrize(
    ("cut", "registers", "hands_over"),
    [
        (WgmmaCut(2, 128), 168, False),
        (WgmmaCut(2, 176), 168, False),
        (WgmmaCut(2, 184), 232, True),
        (WgmmaCut(2, 256), 232, True),
        (WgmmaCut(1, 256), 248, False),
        (WgmmaCut(3, 160), 152, True),
        (WgmmaCut(4, 64, x_slices=4), 96, False),
    ],
)
def test_tiles_of_many_vectors_have_registers_of_the_warps_that_copy(
    cut: WgmmaCut, registers: int, hands_over: bool
) -> None:
    assert (cut.registers, cut.hands_over) == (registers, hands_over)
    held = cut.registers * cut.warpgroups + (cut.copy_registers if hands_over else cut.registers)
    assert held <= cut.first_registers * (cut.warpgroups + 1)


#: Odd numbers of vectors; the default run takes each type with one of them.
VECTORS = (9, 17, 63, 65, 200)
CASES = [(fmt, VECTORS[(i + j) % 5], j) for i, fmt in enumerate(TYPES) for j in range(5)]


@pytest.mark.turns(2)
@pytest.mark.parametrize(
    ("fmt", "vectors"),
    [
        pytest.param(
            fmt, vectors, marks=[pytest.mark.full] if turn else [], id=f"{fmt.name} {vectors}"
        )
        for fmt, vectors, turn in CASES
    ],
)
def test_errors_are_those_of_f16(device: Device, fmt: Format, vectors: int) -> None:
    """Odd rows and columns, too."""
    seed = TYPES.index(fmt) + vectors
    rows = (65, 81, 131)[seed % 3]
    cols = 70 if fmt.is_float else max(fmt.block, 544 // fmt.block * fmt.block)
    spec = product(fmt, rows, cols, vectors)
    inputs = spec.make_inputs(np.random.default_rng(seed))
    y = run_kernel(device, spec, inputs)["y"]
    assert np.sqrt((row_errors(spec, inputs, y) ** 2).mean()) < allowed(fmt)


#: Types of every kind of scale; the default run takes these alone.
SCALES = ("Q4_K", "Q6_K", "Q8_0", "Q4_1", "MXFP4", "BF16")


@pytest.mark.parametrize(
    "fmt",
    [
        pytest.param(fmt, marks=[] if fmt.name in SCALES else [pytest.mark.full], id=fmt.name)
        for fmt in TYPES
    ],
)
def test_rows_of_any_scale_are_as_exact(device: Device, fmt: Format) -> None:
    """Each row has a power of its own: neither overflows beside the other, or vanishes."""
    rng = np.random.default_rng(5)
    rows, cols = 48, 512
    scales = [1e-4, 1.0, 30.0] if fmt.element else [1e-3, 0.05, 1.0, 30.0]
    blocks = [
        random_blocks(fmt, cols // fmt.block, rng, scales[row % len(scales)]).reshape(-1)
        for row in range(rows)
    ]
    spec = product(fmt, rows, cols, 11)
    x = pack(rng.standard_normal((11, cols)) * np.exp(rng.standard_normal((11, cols))))
    weights = spec.layout.pack(np.concatenate([row.view(np.uint8) for row in blocks]))
    inputs = {"weights": weights, "x": x}
    errors = row_errors(spec, inputs, run_kernel(device, spec, inputs)["y"])
    assert errors.max() < 3 * allowed(fmt)


def test_large_activations_do_not_overflow(device: Device) -> None:
    """Up to a million; beyond they are cut off."""
    spec = product(FORMATS["Q8_0"], 16, 64, 9)
    inputs = spec.make_inputs(np.random.default_rng(1))
    values = np.random.default_rng(2).standard_normal((9, 64))
    values[:, 3] = 900_000.0
    inputs["x"] = pack(values)
    # one weight of each row decides
    assert row_errors(spec, inputs, run_kernel(device, spec, inputs)["y"]).max() < 1.01 * UNIT
    values[:, 3] = 1e9
    assert unpack(pack(values), 9, 64).max() == 16 * 65504


@pytest.mark.parametrize("vectors", [24, 200])
def test_a_vector_has_the_same_bits_among_any_others(device: Device, vectors: int) -> None:
    """At whatever place."""
    spec = product(FORMATS["Q4_K"], 64, 1280, vectors)
    rng = np.random.default_rng(3)
    inputs = spec.make_inputs(rng)
    x = rng.standard_normal((vectors, spec.cols))
    first = run_kernel(device, spec, inputs | {"x": pack(x)})["y"]
    order = rng.permutation(vectors)
    moved = x[order]
    moved[1:] *= 7
    second = run_kernel(device, spec, inputs | {"x": pack(moved)})["y"]
    assert np.array_equal(second[0], first[order[0]])
    again = run_kernel(device, spec, inputs | {"x": pack(x)})["y"]
    assert np.array_equal(again, first)


def test_sums_of_splits_and_clusters_differ_by_rounding_alone(device: Device) -> None:
    whole = GemmWgmma(FORMATS["Q5_K"], 70, 1280, 16, WgmmaCut(1, 16, x_slices=4, x_stages=2))
    inputs = whole.make_inputs(np.random.default_rng(4))
    y = run_kernel(device, whole, inputs)["y"]
    cut = WgmmaCut(1, 16, splits=2, cluster=2, x_slices=4, x_stages=2)
    parts = run_kernel(device, replace(whole, cut=cut), inputs)["y"]
    assert not np.array_equal(parts, y)
    allowed = Tolerance.of_sum("f32", whole.cols).rtol
    assert np.abs(parts - y).max() < allowed * np.abs(y).max()


def test_more_stages_of_weights_change_nothing(device: Device) -> None:
    """Fewer than the tiles of a CTA, or more."""
    cut = WgmmaCut(1, 72, cluster=2, weight_stages=3, x_stages=4)
    few = GemmWgmma(FORMATS["Q4_K"], 70, 2304, 65, cut)
    inputs = few.make_inputs(np.random.default_rng(8))
    y = run_kernel(device, few, inputs)["y"]
    deeper = replace(few, cut=replace(cut, weight_stages=8))
    assert np.array_equal(run_kernel(device, deeper, inputs)["y"], y)


def test_a_pair_has_the_same_bits_among_any_others(device: Device) -> None:
    """Whatever the other rows choose: its tile, its place and its neighbours are others."""
    rows, mixture = 23, Mixture(5, 2, 16)
    cut = WgmmaCut(1, 16, 2, 1, 2, 1, 4)
    spec = GemmWgmma.of(FORMATS["Q4_K"], 32, 768, rows, cut, Weighted(), mixture=mixture)
    rng = np.random.default_rng(6)
    inputs = spec.make_inputs(rng)
    values = rng.standard_normal((spec.tiling.products, spec.cols))
    choice = random_choice(rng, rows, 5, 2)
    found = []
    for factor in (1.0, 7.0):
        lists = grouped(choice, 5, 16, 8)
        x = np.zeros((spec.vectors, spec.cols))
        taken = lists["pair"] != NO_PAIR
        x[taken] = values[lists["pair"][taken]]
        found.append(run_kernel(device, spec, inputs | lists | {"x": pack(x)})["y"])
        choice[2:] = random_choice(rng, rows - 2, 5, 2)
        values[4:] *= 7 * factor
    assert np.array_equal(found[0][:4], found[1][:4])
    assert not np.array_equal(found[0][4:], found[1][4:])


def test_a_pair_has_the_same_bits_in_a_tile_of_any_width(device: Device) -> None:
    """The loops of 8, 16 and 32 vectors, of the last with a group of vectors that no copy fills."""
    rows, cut = 40, WgmmaCut(2, 32, weight_stages=2, x_stages=2, x_slices=2)
    mixture = Mixture(3, 1, 32)
    assert mixture.widths == (32, 16, 8)
    spec = GemmWgmma.of(FORMATS["Q6_K"], 32, 768, rows, cut, Weighted(), mixture=mixture)
    rng = np.random.default_rng(6)
    inputs = spec.make_inputs(rng)
    values = rng.standard_normal((rows, spec.cols))
    found = []
    for together in (5, 13, 21, 31):
        choice = np.where(np.arange(rows) < together, 1, np.arange(rows) % 2 * 2)
        lists = grouped(choice[:, None].astype(np.uint32), 3, 32, 8)
        x = np.zeros((spec.vectors, spec.cols))
        taken = lists["pair"] != NO_PAIR
        x[taken] = values[lists["pair"][taken]]
        found.append(run_kernel(device, spec, inputs | lists | {"x": pack(x)})["y"])
    for y in found[1:]:
        assert np.array_equal(y[:5], found[0][:5])
        assert not np.array_equal(y[5:], found[0][5:])


def test_an_example_has_tiles_of_every_width() -> None:
    """As the tests of examples make its inputs."""
    spec = GemmWgmma.examples()["experts of every width"]
    tiles = spec.make_inputs(np.random.default_rng(7))["tile_of"][:, 2]
    assert {-(-int(pairs) // 8) for pairs in tiles} == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"mixture": Mixture(3, 2, 32)}, "tiles of 32 vectors"),
        ({"mixture": Mixture(3, 4, 16)}, "without residual"),
        ({"mixture": Mixture(3, 2, 16), "epilogue": (Residual(),)}, "without residual"),
        ({"mixture": Mixture(3, 2, 16), "rows": 40}, "a multiple of 16"),
        (
            {"mixture": Mixture(3, 2, 16), "epilogue": (Weighted(), PackedVectors())},
            "one product, without weights",
        ),
        ({"epilogue": (Weighted(),)}, "only products of experts have weights"),
        ({"mixture": Mixture(3, 2, 16), "batch": 600_000}, "more than 65535"),
    ],
)
def test_mixtures_that_are_refused(fields: dict[str, Any], message: str) -> None:
    shape: dict[str, Any] = {"rows": 32, "cols": 64, "batch": 9, "cut": WgmmaCut(1, 16)}
    with pytest.raises(PtxgenError, match=message):
        GemmWgmma(FORMATS["Q8_0"], **(shape | fields))


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (Heads((HeadPlaces(16, 0, 16, 16),) * 2), "of 1 plain matrices"),
        (PackedVectors(), "plain matrices"),
        (Residual(), "plain matrices"),
        (Heads((HeadPlaces(24, 0, 24, 16),)), "32 rows of 16 vectors"),
        (Heads((HeadPlaces(16, 8, 16, 16),)), "32 rows of 16 vectors"),
        (Heads((HeadPlaces(16, 0, 16, 15),)), "of 16 vectors do not fill"),
    ],
)
def test_heads_that_are_refused(step: Epilogue, message: str) -> None:
    steps = [step] if isinstance(step, Heads) else [step, Heads((HeadPlaces(16, 0, 16, 16),))]
    with pytest.raises(PtxgenError, match=message):
        GemmWgmma.of(FORMATS["Q8_0"], 32, 64, 16, WgmmaCut(1, 16), *steps)
