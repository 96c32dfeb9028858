"""Linear kernel of 2 to 8 vectors: its values, and what they do not depend on."""

from __future__ import annotations

import dataclasses
from typing import get_args

import numpy as np
import pytest

from tests.ptxgen.recut import recut
from urdir.driver.compare import compare
from urdir.driver.device import Device
from urdir.driver.harness import check_kernel, run_kernel
from urdir.model.verify.kernel_suite import skip_where_missing
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.epilogue.activation import Gated
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.epilogue.norm import BeginNorm
from urdir.ptxgen.kernels.linear.epilogue.pack import PackedOutput
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.products.gemm_small import GemmSmall
from urdir.ptxgen.kernels.linear.prologue.norm import BegunNorm, Normed, begun
from urdir.ptxgen.kernels.linear.prologue.packed import PackedInput
from urdir.ptxgen.kernels.linear.spec import MAX_BATCH
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.weights.formats import FORMATS, Format
from urdir.ptxgen.weights.packed import GROUP
from urdir.ptxgen.weights.packed_few import Order, pack_few, unpack_few

RMS = Norm("rms", 1e-5)

QUANTISED = [f for f in FORMATS.values() if f.arithmetic == "integers"]
Q8_0, Q4_K, Q6_K, F16, BF16 = (FORMATS[n] for n in ("Q8_0", "Q4_K", "Q6_K", "F16", "BF16"))

#: Columns that share a scale when activations are rounded, and what the largest of them becomes.
BLOCK, LARGEST = 256, 32639


# ---- what is refused ----


def test_impossible_specs_are_refused() -> None:
    for batch in (0, MAX_BATCH + 1):
        with pytest.raises(PtxgenError, match=f"batch is {batch}"):
            GemmSmall(Q8_0, 32, 64, batch=batch)
    for fmt, cols, others in ((Q8_0, 64, ((F16, 32),)), (F16, 72, ()), (FORMATS["F32"], 64, ())):
        with pytest.raises(PtxgenError, match="must be quantised, or BF16 and F16"):
            GemmSmall(fmt, 32, cols, others=others)
    with pytest.raises(PtxgenError, match="packed_input is for quantised weights"):
        GemmSmall.of(F16, 32, 256, prologue=(PackedInput(),))
    with pytest.raises(PtxgenError, match="multiple of 256"):
        GemmSmall(Q4_K, 32, 896)
    with pytest.raises(PtxgenError, match="residual is for one matrix that is not gated"):
        GemmSmall.of(Q4_K, 32, 256, Gated(), Residual())
    layer, biased = Norm("layer", 1e-5), Norm("rms", 1e-5, bias=True)
    for norm in (layer, biased):
        with pytest.raises(PtxgenError, match="must be a launch of its own"):
            GemmSmall.of(Q8_0, 32, 64, Normed(norm))
    with pytest.raises(PtxgenError, match="must be a launch of its own"):
        GemmSmall.of(Q8_0, 32, 64, begun(Norm("rms", 1e-5, weight=False)))
    with pytest.raises(PtxgenError, match="split is 3 of 2 blocks"):
        GemmSmall.of(Q4_K, 32, 512, split=3)
    with pytest.raises(PtxgenError, match="bytes of shared memory"):
        GemmSmall.of(Q8_0, 32, 4096, split=16)
    with pytest.raises(PtxgenError, match="begin_norm is for what has a residual"):
        GemmSmall.of(Q8_0, 32, 64, Gated(), BeginNorm())
    with pytest.raises(PtxgenError, match="go without a norm"):
        GemmSmall.of(Q4_K, 32, 256, PackedInput(), Normed(RMS))
    with pytest.raises(PtxgenError, match="multiples of 256 rows of one product"):
        GemmSmall.of(Q4_K, 256, 256, Residual(), PackedOutput("units"))
    with pytest.raises(PtxgenError, match="multiples of 256 rows"):
        GemmSmall.of(Q4_K, 320, 256, PackedOutput("units"))
    with pytest.raises(PtxgenError, match="begin_norm of 40 rows"):
        GemmSmall.of(Q8_0, 40, 64, Residual(), BeginNorm())


@pytest.mark.parametrize("fmt", QUANTISED, ids=lambda f: f.name)
def test_a_block_s_sums_are_integers_of_32_bits(fmt: Format) -> None:
    """256 columns of the largest quants and scales, and of bytes of activations up to 255.
    Digits of a table have sums of their own."""

    def largest(number: str) -> int:
        if number == "q" and fmt.table:
            return max(abs(value) for n in range(fmt.digits) for value in fmt.digit(n))
        if number == "q" and fmt.grid:
            levels = np.array(fmt.grid.words, np.uint32).view(np.uint8)
            return max(map(abs, fmt.grid.values or levels.tolist()))
        return sum(part.source.mask << part.shift for _, part in fmt.parts(number))

    scale = max(largest("scale") - fmt.scale_offset, fmt.scale_offset)
    if scale > 0:
        assert BLOCK * largest("q") * scale * 255 < 2**31
    else:
        assert fmt.group * largest("q") * 255 < 2**22


# ---- values ----


@pytest.mark.parametrize(
    ("spec", "target"),
    [  # every eighth one on one of the two, both with --full
        pytest.param(spec, target, marks=[pytest.mark.full] * (at % 16 != 8 * turn))
        for at, spec in enumerate(GemmSmall.examples().values())
        for turn, target in enumerate(("sm_75", "sm_80"))
        if target in spec.targets
    ],
    ids=str,
)
def test_examples_run_on_older_targets(spec: GemmSmall, target: str) -> None:
    with Device.open(f"emulator:{target}") as device:
        for deviation in check_kernel(device, spec, seed=1, sanitize=False):
            assert deviation.ok, deviation


@pytest.mark.turns(3)
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
    shape, sizes = inputs["x"].shape, LARGEST * 10.0 ** rng.uniform(-2, 0, spec.layout.row_units)
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


@pytest.mark.parametrize("fmt", [F16, BF16], ids=lambda f: f.name)
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e3])
def test_float_weights_are_multiplied_as_they_are(device: Device, fmt: Format, size: float) -> None:
    """With activations of 16 bits: the error of a sum is that of its terms' roundings."""
    spec = GemmSmall.of(fmt, 35, 1312, batch=8)
    inputs = spec.make_inputs(np.random.default_rng(11))
    inputs["x"] *= np.float32(size)
    y, expected = run_kernel(device, spec, inputs)["y"], spec.reference(**inputs)["y"]
    error = np.sqrt(np.mean((y - expected) ** 2.0) / np.mean(expected**2.0))
    assert error < 5e-6


def test_f16_activations_beyond_its_range_become_the_largest(device: Device) -> None:
    spec = GemmSmall.of(F16, 18, 64, batch=2)
    inputs = spec.make_inputs(np.random.default_rng(12))
    inputs["x"][0, 5], inputs["x"][1, 40] = 3e38, -np.inf
    y = run_kernel(device, spec, inputs)["y"]
    inputs["x"] = np.clip(inputs["x"], -16 * 65504, 16 * 65504)
    compare(spec, {"y": y}, spec.reference(**inputs))


@pytest.mark.parametrize("fmt", [Q8_0, BF16], ids=lambda f: f.name)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("steps", [(), (Normed(RMS),)])
def test_what_is_not_finite_stays_in_its_vector(
    device: Device, fmt: Format, value: float, steps: tuple[Normed, ...]
) -> None:
    spec = GemmSmall.of(fmt, 21, 352, *steps, batch=3)
    skip_where_missing(spec, device.native_target)
    inputs = spec.make_inputs(np.random.default_rng(4))
    inputs["x"][1, 77] = value
    y = run_kernel(device, spec, inputs)["y"]
    assert not np.isfinite(y[1]).any()
    assert np.isfinite(y[[0, 2]]).all()


@pytest.mark.turns(3)
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
        GemmSmall.of(Q4_K, 85, 1536, Normed(RMS), Bias(), split=2, groups=1, batch=4),
        GemmSmall.of(Q6_K, 50, 768, Normed(RMS), Gated(), split=3, groups=1, batch=8),
        GemmSmall.of(FORMATS["Q5_1"], 40, 1888, Residual(), split=4, groups=1, batch=5),
        GemmSmall.of(Q4_K, 85, 2304, Normed(RMS), Bias(), split=2, groups=1, cluster=4, batch=4),
        GemmSmall.of(Q6_K, 50, 1280, Gated(), split=2, groups=1, cluster=2, batch=3),
        GemmSmall.of(Q4_K, 85, 1536, PackedInput(), Residual(), split=2, groups=1, batch=7),
        GemmSmall.of(BF16, 50, 1312, Normed(RMS), split=2, groups=1, shared=1 << 17, batch=5),
    ],
    ids=str,
)
def test_every_cut_gives_the_same_bits(
    device: Device, spec: GemmSmall, changes: dict[str, int]
) -> None:
    """But for those of the columns, which are those of the sums."""
    skip_where_missing(spec, device.native_target)
    inputs = spec.make_inputs(np.random.default_rng(8))
    other = recut(spec, **changes)
    first, second = (run_kernel(device, s, inputs)["y"] for s in (spec, other))
    np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize(
    "spec",
    [
        GemmSmall.of(Q4_K, 39, 1280, PackedInput(), Bias(), batch=5),
        GemmSmall.of(Q6_K, 32, 1536, PackedInput(), Residual(), split=4, groups=1, batch=3),
        GemmSmall.of(FORMATS["MXFP4"], 22, 608, PackedInput(), batch=8),
        GemmSmall.of(Q4_K, 23, 1024, PackedInput(), begun(RMS), split=2, batch=6),
    ],
    ids=str,
)
def test_packed_vectors_get_the_same_bits_whatever_the_others_are(
    device: Device, spec: GemmSmall
) -> None:
    """The others are NaN, also those beyond the batch."""
    rng = np.random.default_rng(5)
    x = rng.standard_normal((GROUP, spec.cols))
    inputs = {**spec.make_inputs(rng), "x": pack_few(x, spec.order)}
    y, own = run_kernel(device, spec, inputs)["y"], spec.batch - 1
    x[np.arange(GROUP) != own] = np.nan
    alone = run_kernel(device, spec, {**inputs, "x": pack_few(x, spec.order)})["y"]
    np.testing.assert_array_equal(alone[own], y[own])
    assert np.isnan(alone[:own]).all()


@pytest.mark.parametrize(
    "spec",
    [
        GemmSmall.of(Q4_K, 256, 512, Normed(RMS), Gated(), PackedOutput("lanes"), batch=8),
        GemmSmall.of(Q8_0, 512, 96, PackedOutput("units"), tiles_each=5, batch=3),
        GemmSmall.of(Q4_K, 256, 512, Residual(), BeginNorm(), PackedOutput("units"), batch=5),
    ],
    ids=str,
)
def test_what_is_packed_are_the_sums_rounded_once(device: Device, spec: GemmSmall) -> None:
    """Or these times the weights of the norm that follows."""
    name = "scaled" if spec.steps.has(BeginNorm) else "y"
    inputs = spec.make_inputs(np.random.default_rng(6))
    packed = run_kernel(device, spec, inputs)[name]
    whole = dataclasses.replace(spec, epilogue=spec.epilogue[:-1])
    made = run_kernel(device, whole, {k: v for k, v in inputs.items() if k != name})[name]
    output = spec.steps.find(PackedOutput)
    assert output is not None
    expected = unpack_few(inputs[name], GROUP, spec.rows, output.order)
    expected[: spec.batch] = made
    np.testing.assert_array_equal(packed, pack_few(expected, output.order))


@pytest.mark.parametrize("fmt", [Q4_K, Q6_K], ids=lambda f: f.name)
@pytest.mark.parametrize("size", [1e-3, 1e9], ids=["small", "beyond what is packed"])
def test_packed_vectors_of_any_size_are_multiplied(
    device: Device, fmt: Format, size: float
) -> None:
    """The largest values have one sign, so that sums of whole units are as large as any."""
    spec = GemmSmall.of(fmt, 16, 512, PackedInput(), batch=8)
    inputs = spec.make_inputs(np.random.default_rng(7))
    x = size * np.abs(np.random.default_rng(8).standard_normal((GROUP, spec.cols)))
    inputs["x"] = pack_few(x, spec.order)
    compare(spec, run_kernel(device, spec, inputs), spec.reference(**inputs))


@pytest.mark.parametrize("name", ["NVFP4", "E2M1G256", "E2M1G64"])
def test_floats_of_four_bits_are_exact_with_every_factor(device: Device, name: str) -> None:
    """E4M3 numbers from the smallest to the largest, beside each other."""
    check_every_factor(device, FORMATS[name])


def test_floats_of_four_bits_are_exact_on_older_targets() -> None:
    """Which have no instruction that converts factors."""
    with Device.open("emulator:sm_80") as device:
        check_every_factor(device, FORMATS["NVFP4"])


def check_every_factor(device: Device, fmt: Format) -> None:
    spec = GemmSmall.of(fmt, 19, 768, PackedInput(), batch=7)
    assert spec.tolerance.rtol == 2.0**-14
    inputs = spec.make_inputs(np.random.default_rng(9))
    layout = spec.layout
    plane, _ = next(fmt.parts("factor" if fmt.has("factor") else "d"))
    factors = layout.plane_of(inputs["weights"], plane)
    factors[:] = np.arange(factors.size, dtype=np.uint32).reshape(factors.shape) * 37 % 127
    if fmt.has_singles:  # the same in a row of all tiles
        singles = layout.plane_of(inputs["weights"], fmt.factors).view(np.float32)
        of_rows = np.geomspace(1e-6, 1e3, layout.bands * 16).reshape(-1, 1, 16, 1)
        singles.reshape(layout.bands, layout.row_tiles, 16, -1)[:] = of_rows
    compare(spec, run_kernel(device, spec, inputs), spec.reference(**inputs))


def test_a_lane_s_packed_values_lie_together() -> None:
    """Column 32u + 8p + 4e + b, by units of lane p, else of lane u % 4: its place, in halves."""
    x = np.arange(1.0, 3 * 512 + 1).reshape(3, 512)
    for order in get_args(Order):
        few = pack_few(x, order).ravel()
        for vector, column in ((0, 0), (2, 37), (1, 254), (2, 511), (0, 256 + 96 + 22)):
            (unit, pair), (e, b) = divmod(column // 8, 4), divmod(column % 8, 4)
            if order == "lanes":
                unit, pair = unit // 4 * 4 + pair, unit % 4
            at = 256 * unit + 32 * vector + 8 * pair + 4 * e + 2 * (b % 2) + b // 2
            assert few[at] * 16 ** (1 + e) == x[vector, column]
        np.testing.assert_array_equal(unpack_few(pack_few(x, order), 3, 512, order), x)


@pytest.mark.slow
@pytest.mark.parametrize("split", [1, 2, 4])
def test_every_cut_of_the_columns_gives_the_product(device: Device, split: int) -> None:
    more = {"others": ((Q6_K, 17), (Q8_0, 5)), "split": split}
    for deviation in check_kernel(
        device, GemmSmall.of(Q4_K, 49, 1024, Normed(RMS), **more), seed=9
    ):
        assert deviation.ok, deviation


@pytest.mark.turns(3)
@pytest.mark.parametrize(
    "spec",
    [
        GemmSmall.of(Q4_K, 39, 1280, Bias(), batch=5),
        GemmSmall.of(Q6_K, 20, 768, Normed(RMS), tiles_each=2, batch=8),
        GemmSmall.of(Q8_0, 33, 4864, Residual(), batch=2),
        GemmSmall.of(Q6_K, 22, 512, Normed(RMS), Gated(), batch=3),
        GemmSmall(FORMATS["Q5_0"], 32, 1504, batch=7),
        GemmSmall.of(Q4_K, 39, 2304, Normed(RMS), Bias(), cluster=2, batch=8),
        GemmSmall.of(Q6_K, 22, 1280, Normed(RMS), Gated(), cluster=4, batch=3),
        GemmSmall.of(Q8_0, 33, 2080, Residual(), tiles_each=4, per_pass=2, cluster=2, batch=5),
        GemmSmall.of(Q4_K, 39, 1536, split=4, groups=1, tiles_each=2, batch=5),
        GemmSmall.of(Q4_K, 39, 768, begun(RMS), batch=3),
        GemmSmall.of(F16, 39, 800, Normed(RMS), Bias(), batch=5),
        GemmSmall.of(BF16, 33, 544, begun(RMS), Residual(), batch=8),
        GemmSmall.of(Q8_0, 48, 480, begun(RMS), Gated(), batch=7),
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
        if spec.steps.has(BegunNorm):
            one["x_summary"] = inputs["x_summary"][:, b : b + 1]
        single = run_kernel(device, alone, {**inputs, **one})["y"]
        np.testing.assert_array_equal(y[b], single[0])


@pytest.mark.slow
@pytest.mark.parametrize(("cluster", "split"), [(1, 3), (2, 1)])
def test_one_launch_for_several_matrices_gives_the_bits_of_several(
    device: Device, cluster: int, split: int
) -> None:
    others = ((Q6_K, 24), (Q4_K, 16))
    spec = GemmSmall.of(Q4_K, 49, 768, Normed(RMS), split=split, cluster=cluster, others=others)
    skip_where_missing(spec, device.native_target)
    inputs = spec.make_inputs(np.random.default_rng(10))
    together = run_kernel(device, spec, inputs)
    for suffix, fmt, rows in (("", Q4_K, 49), ("1", Q6_K, 24), ("2", Q4_K, 16)):
        single = dataclasses.replace(spec, format=fmt, rows=rows, others=())
        alone = {"weights": inputs["weights" + suffix], "x": inputs["x"], "norm": inputs["norm"]}
        y = run_kernel(device, single, alone)["y"]
        np.testing.assert_array_equal(together["y" + suffix], y)
