"""Products of a small batch on tensor cores: cuts, values, and what they do not depend on."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from urdir.driver.device import Device
from urdir.driver.harness import check_kernel, run_kernel
from urdir.model.verify.kernel_suite import skip_where_missing
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.choice import Limits, batch_cluster, vector_product
from urdir.ptxgen.kernels.linear.gemm_small import GemmSmall
from urdir.ptxgen.kernels.linear.gemv import Gemv
from urdir.ptxgen.kernels.linear.gemv_f32 import GemvF32
from urdir.ptxgen.kernels.linear.product import MAX_BATCH
from urdir.ptxgen.tools.assemble import assemble, is_available
from urdir.ptxgen.weights.formats import FORMATS, Format
from urdir.ptxgen.weights.layout import Layout
from urdir.ptxgen.weights.tiles import Quads, Tile

QUANTISED = [f for f in FORMATS.values() if not f.is_float]
Q8_0, Q4_K, Q6_K, F16 = (FORMATS[n] for n in ("Q8_0", "Q4_K", "Q6_K", "F16"))
H200 = Limits(132, 228 << 10, 227 << 10, 8)
RTX5090 = Limits(170, 100 << 10, 99 << 10, 8)
T4 = Limits(40, 64 << 10, 64 << 10)

#: Columns that share a scale when activations are rounded, and what the largest of them becomes.
BLOCK, LARGEST = 256, 32639
#: (rows, cols, more fields) of an 8B and a 1B model.
SHAPES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "8B qkv": (4096, 4096, {"eps": 1e-5, "others": ((Q4_K, 1024), (Q6_K, 1024))}),
    "8B gate_up": (14336, 4096, {"eps": 1e-5, "gated": True}),
    "8B down": (4096, 14336, {"residual": True}),
    "8B out": (128256, 4096, {"eps": 1e-5}),
    "1B down": (2048, 8192, {"residual": True}),
}


# ---- how a launch is cut ----


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("fmt", QUANTISED, ids=lambda f: f.name)
def test_real_shapes_fit_a_multiprocessor(shape: str, fmt: Format) -> None:
    rows, cols, more = SHAPES[shape]
    for batch in (2, MAX_BATCH):
        for limits in (H200, T4):
            spec = vector_product(limits, False, fmt, rows, cols, batch=batch, **more)
            assert isinstance(spec, GemmSmall)
            least, most = limits.shared(larger="residual" not in more)
            if dataclasses.replace(spec, shared=most).passes > 1:
                least, most = 0, limits.shared_per_cta
            assert spec.shared == most
            assert least <= spec.launch_shape.shared_bytes <= most
        spec = vector_product(H200, False, fmt, rows, cols, batch=batch, **more)
        if is_available() and fmt in (Q4_K, Q6_K):
            cost = assemble(spec.ptx("sm_90"), "sm_90").entries["gemm_small"]
            assert not cost.spills
            assert cost.registers <= 128


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
def test_what_lanes_read_at_a_time_lies_in_different_banks(fmt: Format) -> None:
    """Every other unit of two rows, a piece a lane; of a unit the words that 32 lanes read."""
    for run in (r for r in Tile(Layout(fmt, 16, 256 * 8)).runs if r.chunks):
        pieces = run.row_nbytes // 16
        for row in range(16):
            assert sorted(run.place(p, row) for p in range(pieces)) == list(range(pieces))
        for row in range(0, 16, 2):
            for q in range(run.chunks):
                units = [2 * run.chunks * t for t in range(4)]
                read = [run.place(unit + q, row + r) for unit in units for r in (0, 1)]
                assert len({place % 8 for place in read}) == 8
        for unit in range(8):
            for row in range(0, 16, 8 // run.chunks):
                read = [
                    run.place(run.chunks * unit + q, row + r)
                    for q in range(run.chunks)
                    for r in range(8 // run.chunks)
                ]
                assert len({place % 8 for place in read}) == 8


def test_the_order_of_the_sums_does_not_depend_on_the_batch() -> None:
    for rows, cols, more in SHAPES.values():
        for limits in (H200, T4):
            cuts = set()
            for batch in range(2, MAX_BATCH + 1):
                spec = vector_product(limits, False, Q4_K, rows, cols, batch=batch, **more)
                assert isinstance(spec, GemmSmall)
                cuts.add((spec.k_warps, spec.row_warps, spec.cluster, spec.sharers))
            assert len(cuts) == 1


@pytest.mark.parametrize("limits", [H200, RTX5090], ids=["H200", "RTX 5090"])
@pytest.mark.parametrize("cols", [256, 512, 1024, 2048, 4096, 14336])
@pytest.mark.parametrize("gated", [False, True])
def test_a_batch_s_cluster_does_not_depend_on_its_size(
    limits: Limits, cols: int, gated: bool
) -> None:
    """Nor do the parts of the columns: whatever the rows, about where clusters end as well."""
    for fmt in (Q8_0, Q4_K, Q6_K):
        for tiles in (1, 2, 3, 4, 5, 6, 7, 12, 14):
            cuts = set()
            for batch in range(2, MAX_BATCH + 1):
                rows = 16 * limits.sms * tiles
                spec = vector_product(limits, False, fmt, rows, cols, batch=batch, gated=gated)
                assert isinstance(spec, GemmSmall)
                cuts.add((spec.k_warps, spec.cluster))
            assert len(cuts) == 1, (fmt.name, tiles)


def test_real_shapes_have_pairs_of_ctas_where_tiles_are_few() -> None:
    """Gate and up of an 8B model are 14 tiles of an SM, its vocabulary more still."""
    found = {}
    for shape, (rows, cols, more) in SHAPES.items():
        for batch in (2, 5, MAX_BATCH):
            spec = vector_product(H200, False, Q4_K, rows, cols, batch=batch, **more)
            assert isinstance(spec, GemmSmall)
            cluster = found.setdefault(shape, spec.cluster)
            assert spec.launch_shape.cluster == (cluster, 1, 1)
            clusters = 0
            for part in spec.parts:
                assert part.first_cta == clusters
                tiles = spec.cta_rows_of(part.number) // 16
                assert part.layout.bands <= part.ctas * tiles < part.layout.bands + tiles
                clusters += part.ctas
            assert spec.launch_shape.grid == (cluster * clusters, 1, 1)
            assert spec.launch_shape.grid[0] <= 132
    wanted = {"8B qkv": 2, "8B gate_up": 1, "8B down": 2, "8B out": 1, "1B down": 2}
    assert found == wanted


def test_ctas_of_larger_tiles_take_fewer() -> None:
    """Of an 8B model's queries, keys and values, on 66 pairs of SMs; alike, all take six."""
    for types, wanted in (((Q4_K, Q6_K), (7, 5, 4)), ((Q4_K, Q4_K), (6, 6, 6))):
        others = tuple((fmt, 1024) for fmt in types)
        spec = vector_product(H200, False, Q4_K, 4096, 4096, batch=8, eps=1e-5, others=others)
        assert isinstance(spec, GemmSmall)
        assert tuple(m.pass_tiles for m in spec.matrices) == wanted
        assert tuple(m.warp_tiles for m in spec.matrices) == wanted
    several = dataclasses.replace(spec, others=((Q6_K, 1024),) * 2, per_pass=2)
    assert {m.pass_tiles for m in several.matrices} == {several.pass_tiles}


def test_warps_share_the_blocks_that_are_left_over() -> None:
    """28 of a CTA's 8 warps, of an 8B model's longest rows; not where each adds up squares."""
    rows, cols, more = SHAPES["8B down"]
    for batch in range(2, MAX_BATCH + 1):
        spec = vector_product(H200, False, Q6_K, rows, cols, batch=batch, **more)
        assert isinstance(spec, GemmSmall)
        assert (spec.cta_blocks, spec.k_warps, spec.warp_tiles, spec.sharers) == (28, 8, 4, 2)
    shared = GemmSmall(Q4_K, 64, 1536, split=4, groups=1, tiles_each=4)
    assert shared.sharers == 2
    for changes in (
        {"eps": 1e-5},
        {"tiles_each": 3},
        {"per_pass": 2},
        {"cols": 2048},
        {"cols": 1792},
        {"cols": 512, "split": 2},
        {"cluster": 4, "split": 1},
    ):
        assert dataclasses.replace(shared, **changes).sharers == 1, changes


def test_what_gets_no_cluster() -> None:
    """A single vector, a row of one block, and what runs on a device that has no clusters."""
    assert batch_cluster(H200, tiles=6, blocks=2) == 2
    assert batch_cluster(H200, tiles=7, blocks=2) == 1
    assert batch_cluster(H200, tiles=1, blocks=1) == 1
    default = Limits(132, 228 << 10, 227 << 10)
    for limits in (default, T4):
        assert batch_cluster(limits, tiles=1, blocks=16) == 1
    for rows, cols, more in SHAPES.values():
        single = vector_product(H200, False, Q4_K, rows, cols, **more)
        assert isinstance(single, Gemv)
        assert single.launch_shape.cluster == (1, 1, 1)
        for limits in (default, T4):
            spec = vector_product(limits, False, Q4_K, rows, cols, batch=4, **more)
            assert spec.launch_shape.cluster == (1, 1, 1)
            assert "sm_75" in spec.targets
    one_block = vector_product(H200, False, Q4_K, 4096, 256, batch=4)
    assert one_block.launch_shape.cluster == (1, 1, 1)


def test_a_product_that_runs_alone_is_one_of_one_vector() -> None:
    """It changes nothing else of the launch; a batch has no such kernel."""
    alone, usual = (vector_product(H200, False, Q4_K, 64, 512, alone=a) for a in (True, False))
    assert isinstance(alone, Gemv)
    assert alone.alone
    assert dataclasses.replace(alone, alone=False) == usual
    assert alone.launch_shape == usual.launch_shape
    batch = vector_product(H200, False, Q4_K, 64, 512, alone=True, batch=2)
    assert batch == vector_product(H200, False, Q4_K, 64, 512, batch=2)


def test_impossible_specs_are_refused() -> None:
    for batch in (0, MAX_BATCH + 1):
        with pytest.raises(PtxgenError, match=f"batch is {batch}"):
            GemmSmall(Q8_0, 32, 64, batch=batch)
    with pytest.raises(PtxgenError, match="quantised"):
        GemmSmall(Q8_0, 32, 64, others=((F16, 32),))
    with pytest.raises(PtxgenError, match="multiple of 256"):
        GemmSmall(Q4_K, 32, 896)
    with pytest.raises(PtxgenError, match="without bias"):
        GemmSmall(Q4_K, 32, 256, gated=True, bias=True)
    with pytest.raises(PtxgenError, match="split is 3 of 2 blocks"):
        GemmSmall(Q4_K, 32, 512, split=3)
    with pytest.raises(PtxgenError, match="bytes of shared memory"):
        GemmSmall(Q8_0, 32, 4096, split=16)
    with pytest.raises(PtxgenError, match="for a norm"):
        GemmSmall(Q8_0, 32, 64, summarised=True)
    with pytest.raises(PtxgenError, match="what has a residual"):
        GemmSmall(Q8_0, 32, 64, summarises=True, gated=True)
    with pytest.raises(PtxgenError, match="a summary of 40 rows"):
        GemmSmall(Q8_0, 40, 64, summarises=True, residual=True)


def test_the_choice_between_the_kernels_of_few_vectors() -> None:
    assert isinstance(vector_product(H200, False, Q4_K, 64, 512), Gemv)
    assert isinstance(vector_product(T4, False, Q4_K, 64, 512, batch=2), GemmSmall)
    for exact, fmt in ((True, Q4_K), (False, F16)):
        assert isinstance(vector_product(H200, exact, fmt, 64, 512), Gemv)
        assert isinstance(vector_product(H200, exact, fmt, 64, 512, batch=2), GemvF32)
    mixed = vector_product(H200, False, Q4_K, 64, 512, batch=2, others=((F16, 3),))
    assert isinstance(mixed, GemvF32)


@pytest.mark.parametrize("fmt", QUANTISED, ids=lambda f: f.name)
def test_a_block_s_sums_are_integers_of_32_bits(fmt: Format) -> None:
    """256 columns of the largest quants and scales, and of bytes of activations up to 255."""

    def largest(number: str) -> int:
        return sum(part.source.mask << part.shift for _, part in fmt.parts(number))

    scale = max(largest("scale") - fmt.scale_offset, fmt.scale_offset)
    if scale > 0:
        assert BLOCK * largest("q") * scale * 255 < 2**31
    else:
        assert fmt.group * largest("q") * 255 < 2**22


# ---- values ----


@pytest.mark.parametrize(
    ("spec", "target"),
    [
        (spec, target)
        for spec in GemmSmall.examples().values()
        for target in ("sm_75", "sm_80")
        if target in spec.targets
    ],
    ids=str,
)
def test_examples_run_on_older_targets(spec: GemmSmall, target: str) -> None:
    with Device.open(f"emulator:{target}") as device:
        for deviation in check_kernel(device, spec, seed=1):
            assert deviation.ok, deviation


@pytest.mark.parametrize("cols", [1024, 1280])
@pytest.mark.parametrize("fmt", QUANTISED, ids=lambda f: f.name)
def test_activations_become_the_nearest_of_65279_steps_of_their_block(
    device: Device, fmt: Format, cols: int
) -> None:
    """Integers, one of 32639 in each block, the rest of any size, and up to 0.48 added: only the
    f32 sums differ from the product with the integers, much less than what was added does."""
    spec = GemmSmall(fmt, 35, cols if fmt.block > 32 else cols - 96, batch=3)
    rng = np.random.default_rng(3)
    inputs = spec.make_inputs(rng)
    shape, sizes = inputs["x"].shape, LARGEST * 10.0 ** rng.uniform(-2, 0, spec.row_units)
    steps = np.rint(rng.uniform(-1, 1, shape) * np.repeat(sizes, 32))
    added = rng.uniform(-0.48, 0.48, shape)
    steps[:, 77::BLOCK] = LARGEST * rng.choice([-1, 1], steps[:, 77::BLOCK].shape)
    added[:, 77::BLOCK] = 0.0
    rounded, x = (v.astype(np.float32) * np.float32(2**-15) for v in (steps, steps + added))
    y = run_kernel(device, spec, {**inputs, "x": x})["y"]
    wanted, unrounded = (spec.reference(**{**inputs, "x": v})["y"] for v in (rounded, x))
    largest = np.abs(wanted).max()
    assert np.abs(y - wanted).max() <= 2e-6 * largest
    assert np.abs(y - unrounded).max() >= 1e-5 * largest


@pytest.mark.parametrize("largest", [1e-15, 1e-3, 1e3, 1e15])
def test_activations_keep_their_precision_at_every_size(device: Device, largest: float) -> None:
    """Relative to a block's largest; a block of zeros stays zero."""
    spec = GemmSmall(Q4_K, 64, 1024, batch=2)
    inputs = spec.make_inputs(np.random.default_rng(4))
    inputs["x"][:, 256:512] = 0.0
    inputs["x"][:, 512:768] *= 1e-3
    inputs["x"] *= np.float32(largest)
    y, expected = run_kernel(device, spec, inputs)["y"], spec.reference(**inputs)["y"]
    error = np.sqrt(np.mean((y - expected) ** 2.0) / np.mean(expected**2.0))
    assert error < 5e-5


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("eps", [None, 1e-5])
def test_what_is_not_finite_stays_in_its_vector(
    device: Device, value: float, eps: float | None
) -> None:
    spec = GemmSmall(Q8_0, 21, 352, batch=3, eps=eps)
    inputs = spec.make_inputs(np.random.default_rng(4))
    inputs["x"][1, 77] = value
    y = run_kernel(device, spec, inputs)["y"]
    assert not np.isfinite(y[1]).any()
    assert np.isfinite(y[[0, 2]]).all()


@pytest.mark.parametrize(
    "changes",
    [
        {"tiles_each": 1},
        {"tiles_each": 4, "per_pass": 2, "stages": 2},
        {"groups": 2, "tiles_each": 4, "stages": 3},
        {"sms": 2, "fill": True},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "spec",
    [
        GemmSmall(Q4_K, 85, 1536, batch=4, split=2, groups=1, bias=True, eps=1e-5),
        GemmSmall(Q6_K, 50, 768, batch=8, gated=True, eps=1e-5, split=3, groups=1),
        GemmSmall(FORMATS["Q5_1"], 40, 1888, batch=5, residual=True, split=4, groups=1),
        GemmSmall(Q4_K, 85, 2304, batch=4, split=2, groups=1, bias=True, eps=1e-5, cluster=4),
        GemmSmall(Q6_K, 50, 1280, batch=3, gated=True, split=2, groups=1, cluster=2),
    ],
    ids=str,
)
def test_every_cut_gives_the_same_bits(
    device: Device, spec: GemmSmall, changes: dict[str, int]
) -> None:
    """But for those of the columns, which are those of the sums."""
    skip_where_missing(spec, device.native_target)
    inputs = spec.make_inputs(np.random.default_rng(8))
    other = dataclasses.replace(spec, **changes)
    first, second = (run_kernel(device, s, inputs)["y"] for s in (spec, other))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("split", [1, 2, 4])
def test_every_cut_of_the_columns_gives_the_product(device: Device, split: int) -> None:
    more = {"others": ((Q6_K, 17), (Q8_0, 5)), "eps": 1e-5, "split": split}
    for deviation in check_kernel(device, GemmSmall(Q4_K, 49, 1024, **more), seed=9):
        assert deviation.ok, deviation


@pytest.mark.parametrize(
    "spec",
    [
        GemmSmall(Q4_K, 39, 1280, bias=True, batch=5),
        GemmSmall(Q6_K, 20, 768, batch=8, eps=1e-5, tiles_each=2),
        GemmSmall(Q8_0, 33, 4864, batch=2, residual=True),
        GemmSmall(Q6_K, 22, 512, batch=3, gated=True, eps=1e-5),
        GemmSmall(FORMATS["Q5_0"], 32, 1504, batch=7),
        GemmSmall(Q4_K, 39, 2304, bias=True, eps=1e-5, batch=8, cluster=2),
        GemmSmall(Q6_K, 22, 1280, batch=3, gated=True, eps=1e-5, cluster=4),
        GemmSmall(Q8_0, 33, 2080, batch=5, residual=True, tiles_each=4, per_pass=2, cluster=2),
        GemmSmall(Q4_K, 39, 1536, batch=5, split=4, groups=1, tiles_each=2),
        GemmSmall(Q4_K, 39, 768, batch=3, eps=1e-5, summarised=True),
        GemmSmall(Q8_0, 48, 480, batch=7, eps=1e-5, gated=True, summarised=True),
    ],
    ids=str,
)
def test_a_batch_gives_each_vector_the_bits_it_gets_alone(device: Device, spec: GemmSmall) -> None:
    """Whatever the others are: here one of them is not finite."""
    skip_where_missing(spec, device.native_target)
    inputs = spec.make_inputs(np.random.default_rng(9))
    inputs["x"][1] = np.inf
    y = run_kernel(device, spec, inputs)["y"]
    alone = dataclasses.replace(spec, batch=1)
    for b in (0, *range(2, spec.batch)):
        one = {name: inputs[name][b : b + 1] for name in ("x", "residual") if name in inputs}
        if spec.summarised:
            one["x_summary"] = inputs["x_summary"][:, b : b + 1]
        single = run_kernel(device, alone, {**inputs, **one})["y"]
        np.testing.assert_array_equal(y[b], single[0])


@pytest.mark.parametrize(("cluster", "split"), [(1, 3), (2, 1)])
def test_one_launch_for_several_matrices_gives_the_bits_of_several(
    device: Device, cluster: int, split: int
) -> None:
    others = ((Q6_K, 24), (Q4_K, 16))
    spec = GemmSmall(Q4_K, 49, 768, eps=1e-5, others=others, split=split, cluster=cluster)
    skip_where_missing(spec, device.native_target)
    inputs = spec.make_inputs(np.random.default_rng(10))
    together = run_kernel(device, spec, inputs)
    for suffix, fmt, rows in (("", Q4_K, 49), ("1", Q6_K, 24), ("2", Q4_K, 16)):
        single = dataclasses.replace(spec, format=fmt, rows=rows, others=())
        alone = {"weights": inputs["weights" + suffix], "x": inputs["x"], "norm": inputs["norm"]}
        y = run_kernel(device, single, alone)["y"]
        np.testing.assert_array_equal(together["y" + suffix], y)
