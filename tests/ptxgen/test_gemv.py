"""Linear kernel of one vector: its values on a device, and what they do not depend on."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import gguf
import numpy as np
import numpy.typing as npt
import pytest

from tests.ptxgen.own_types import dequantized, is_own
from tests.ptxgen.recut import recut
from urdir.driver.bindings import emulated
from urdir.driver.compare import compare
from urdir.driver.device import Device
from urdir.driver.harness import check_kernel, run_kernel
from urdir.model.verify.kernel_suite import skip_where_missing
from urdir.ptxgen.kernels.linear.cut import MAX_SLOTS
from urdir.ptxgen.kernels.linear.epilogue.activation import Gated
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.products.gemv import Gemv
from urdir.ptxgen.kernels.linear.prologue.norm import Normed
from urdir.ptxgen.kernels.linear.steps import Step
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.weights.formats import FORMATS, Bytes, Format, random_blocks
from urdir.ptxgen.weights.grids import ENTRIES, FIELDS_ENTRIES
from urdir.ptxgen.weights.layout import recoded

RMS = Norm("rms", 1e-5)
FINE_RMS = Norm("rms", 1e-6)

Q8_0, Q4_K, Q6_K, Q3_K = (FORMATS[n] for n in ("Q8_0", "Q4_K", "Q6_K", "Q3_K"))
E4M3R = FORMATS["E4M3R256"]
QUANTISED = [f for f in FORMATS.values() if f.arithmetic == "integers"]

#: What is multiplied on tensor cores.
i16 = functools.partial(Gemv.of, activations="i16")

Ints = npt.NDArray[np.int64]

#: Types without small integers: NF4's have 15 bits.
LARGE = {"IQ2_XXS", "IQ2_XS", "IQ2_S", "IQ3_XXS", "NF4G64"}

every_format = pytest.mark.parametrize("fmt", QUANTISED, ids=lambda f: f.name)


# ---- exact products ----


def write_numbers(fmt: Format, blocks: Bytes, number: str, values: Ints) -> None:
    """Writes unsigned numbers (blocks, count of a block) into blocks (blocks, bytes)."""
    for plane, part in fmt.parts(number):
        items = fmt.block_units // plane.units
        flip = 1 << (part.source.width - 1) if part.source.signed else 0
        for index in range(items * part.count):
            byte, shift = divmod(part.source.position(index), 8)
            field = (values[:, index] >> part.shift & part.source.mask) ^ flip
            blocks[:, byte] |= (field << shift).astype(np.uint8)


def small_entries(fmt: Format) -> tuple[Ints, Ints, int]:
    """Codes of a few small integers, these integers, and what `d` has to be a multiple of."""
    values, parts = np.array(fmt.table, np.int64), 2**fmt.halvings
    step = 1 if any(v and v % parts == 0 for v in fmt.table) else parts
    values = np.where(values * step % parts, 0, values * step // parts)
    codes = np.argsort(np.where(values, abs(values), 99), kind="stable")[:4]
    codes = codes[(values[codes] != 0) & (abs(values[codes]) < 14)]
    return codes, values[codes], step


def codebook_matrix(fmt: Format, count: int, rng: np.random.Generator) -> tuple[Bytes, Ints]:
    """Blocks of any indices and signs, whose scales are 1 once halved, and their weights."""
    d = (2.0**fmt.halvings * rng.choice([-1, 1], count)).astype(np.float16).view(np.uint16)
    blocks = rng.integers(0, 256, (count, fmt.nbytes), dtype=np.uint8)
    for plane in fmt.stored:
        for part in (part for part in plane.parts if part.number in ("step", "d")):
            for index in range(fmt.block_units // plane.units * part.count):
                byte, shift = divmod(part.source.position(index), 8)
                field = d >> part.target.position(index) if part.number == "d" else 0 * d
                blocks[:, byte] &= 0xFF ^ part.source.mask << shift
                blocks[:, byte] |= ((field & part.source.mask) << shift).astype(np.uint8)
    weights = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[fmt.name])
    np.testing.assert_array_equal(weights, weights.astype(np.int64))
    return blocks, weights.astype(np.int64)


def integer_matrix(fmt: Format, rows: int, cols: int, seed: int) -> tuple[Bytes, Ints, Ints]:
    """A matrix of small integers: bytes (as `expand` leaves them), weights, and magnitudes of a
    weight's terms.

    Every group has a scale and a minimum, every block factors of its own.
    """
    rng = np.random.default_rng(seed)
    count, groups = rows * cols // fmt.block, fmt.block // fmt.group
    if fmt.grid:
        blocks, weights = codebook_matrix(fmt, count, rng)
        weights = weights.reshape(rows, cols)
        return recoded(fmt, blocks), weights, abs(weights)
    blocks = np.zeros((count, fmt.nbytes), np.uint8)
    most, step = 4, 1
    if fmt.table:
        codes, entries, step = small_entries(fmt)
        chosen = rng.integers(0, len(codes), (count, fmt.block))
        write_numbers(fmt, blocks, "q", codes[chosen])
        quants, most = entries[chosen], 4 if abs(entries).max() < 4 else 2
    else:
        quants = rng.integers(0, 4, (count, fmt.block)) - min(2, fmt.offset)
        write_numbers(fmt, blocks, "q", quants + fmt.offset)
    terms = {"d": rng.choice([-2, -1, 1, 2], (count, 1)), "m": rng.choice([-2, 1, 2], (count, 1))}
    if fmt.of_rows:
        terms["d"] = np.repeat(terms["d"][:rows], cols // fmt.block, axis=0)
    if fmt.name == "NVFP4":
        terms["d"] = rng.choice([1, 2], (count, groups))
        blocks[:, :4] = 56 + 8 * terms["d"]  # E4M3: 2 and 4, of which the table has halves
    if fmt.has_exponents:
        terms["d"] = abs(terms["d"])
        blocks[:, :1] = terms["d"] + 127  # 2 ** 0 and 2 ** 1
    for number, values in terms.items() if not (fmt.has_exponents or fmt.name == "NVFP4") else ():
        for _, part in fmt.parts(number):
            at = part.source.start // 8
            times = step if number == "d" else 1
            dtype = np.float32 if fmt.has_singles else np.float16
            halves = (times * values).astype(dtype).view(np.uint8)
            blocks[:, at : at + halves.shape[1]] = halves
    scale, minimum = terms["d"], fmt.min_sign * terms["m"]
    if fmt.has("scale"):
        scales = rng.integers(1, most, (count, groups))
        write_numbers(fmt, blocks, "scale", scales + fmt.scale_offset)
        scale = scale * scales
    if fmt.has("factor"):
        doubles = rng.integers(0, 2, (count, groups))
        write_numbers(fmt, blocks, "factor", 56 + 8 * doubles)  # E4M3: 1 and 2
        scale = scale * 2**doubles
    if fmt.has("minimum"):
        minimums = rng.integers(0, 4, (count, groups if fmt.has("scale") else 1))
        minimums = np.repeat(minimums, groups // minimums.shape[1], axis=1)
        write_numbers(fmt, blocks, "minimum", minimums)
        minimum = minimum * minimums
    scale, minimum = (
        np.repeat(v, fmt.block // v.shape[1], axis=1).astype(np.int64) for v in (scale, minimum)
    )
    weights, sizes = scale * quants + minimum, abs(scale) * abs(quants) + abs(minimum)
    if is_own(fmt):
        np.testing.assert_array_equal(dequantized(fmt, blocks), weights)
    elif not fmt.recoded:
        kind = gguf.GGMLQuantizationType[fmt.name]
        np.testing.assert_array_equal(gguf.quants.dequantize(blocks, kind), weights)
    return blocks.reshape(-1), weights.reshape(rows, cols), sizes.reshape(rows, cols)


def integer_vector(cols: int, seed: int) -> Ints:
    """In each 32 columns one of magnitude 32639, so that rounding to 16 bits changes nothing, and
    any others below 2^24 / columns / 60: the sum of all products' magnitudes is an f32.
    """
    rng = np.random.default_rng(seed)
    x = rng.integers(-300, 301, cols)
    for unit in range(0, cols, 32):
        x[unit + rng.integers(32)] = 32639 * rng.choice([-1, 1])
    return x


CUTS: list[dict[str, Any]] = [
    {},
    {"split": 1, "groups": 1, "tiles_each": 3},
    {"split": 2, "groups": 3, "tiles_each": 3, "stages": 2},
    {"split": 3, "groups": 1, "tiles_each": 1, "stages": 3},
    {"split": 3, "groups": 2, "tiles_each": 4, "per_pass": 2},
    {"split": 1, "groups": 2, "tiles_each": 5, "per_pass": 4, "sms": 3},
    {"tiles_each": 1, "sms": 5},
    {"cluster": 2},
    {"cluster": 2, "split": 1, "groups": 2, "tiles_each": 4, "per_pass": 2},
]


@pytest.mark.turns(4)
@pytest.mark.parametrize(
    ("fmt", "cut"),
    [  # three cuts with every format, all of them with --full
        pytest.param(fmt, cut, id=f"{fmt.name}-{cut}", marks=[pytest.mark.full] * ((f + c) % 3 > 0))
        for f, fmt in enumerate(QUANTISED)
        for c, cut in enumerate(CUTS)
        if fmt.name not in LARGE
    ],
)
def test_products_of_integers_are_exact(device: Device, fmt: Format, cut: dict[str, Any]) -> None:
    """Whatever the cut: all partial sums are integers that f32 holds, in any order."""
    cols = 576 if fmt.block == 32 else 768
    spec = i16(fmt, 35, cols, **cut)
    skip_where_missing(spec, device.native_target)
    blocks, weights, sizes = integer_matrix(fmt, 35, cols, seed=1)
    x = integer_vector(cols, seed=2)
    assert (sizes @ abs(x)).max() < 2**24
    inputs = {"weights": spec.layout.pack_recoded(blocks), "x": x.astype(np.float32)[None]}
    y = run_kernel(device, spec, inputs)["y"]
    np.testing.assert_array_equal(y[0].astype(np.int64), weights @ x)


def test_activations_of_two_parts_have_the_bits_of_f32_ones(device: Device) -> None:
    """Large and small ones beside each other; tensor cores drop what a sum has no bits for."""
    fmt, rng = FORMATS["E4M3R256"], np.random.default_rng(6)
    spec = Gemv.of(fmt, 21, 768, activations="f16", split=2)
    skip_where_missing(spec, device.native_target)
    weights = spec.layout.pack(random_blocks(fmt, 21 * 768 // fmt.block, rng))
    x = (rng.standard_normal(768) * 10 ** rng.uniform(-3, 5, 768)).astype(np.float32)
    y = run_kernel(device, spec, {"weights": weights, "x": x[None]})["y"]
    values = spec.layout.unpack(weights).astype(np.float64)
    assert (abs(y[0] - values @ x) <= 2.0**-19 * (abs(values) @ abs(x))).all()


@pytest.mark.parametrize(
    ("rows", "steps", "options"),
    [
        (37, (Residual(),), {"tiles_each": 2, "per_pass": 1, "groups": 1}),
        (53, (Normed(RMS), Bias(), Gated()), {"tiles_each": 3}),
        (21, (Normed(RMS), Bias()), {"others": ((FORMATS["E4M3G128"], 19), (E4M3R, 35))}),
        (40, (Residual(),), {"cluster": 2}),
        (37, (Bias(), Gated()), {"fmt": FORMATS["E2M1G256"]}),
        (21, (), {"fmt": FORMATS["E2M1G64"], "others": ((Q4_K, 19), (FORMATS["E2M1G256"], 5))}),
    ],
    ids=["passes", "gated", "three matrices", "cluster", "E2M1", "with Q4_K"],
)
def test_factors_of_rows_multiply_sums(
    device: Device, rows: int, steps: tuple[Step, ...], options: dict[str, Any]
) -> None:
    """Another one in every row, from 2^-20 on."""
    fmt = (options := {"fmt": E4M3R, **options}).pop("fmt")
    rounded = "f16" if fmt.element else "i16"
    spec = Gemv.of(fmt, rows, 768, *steps, activations=rounded, **options)
    skip_where_missing(spec, device.native_target)
    inputs = spec.make_inputs(rng := np.random.default_rng(8))
    layouts = {f"weights{part.number or ''}": part.layout for part in spec.parts}
    for name in inputs.keys() & {"up", *layouts}:
        layout = layouts.get(name, spec.layout)
        if layout.format.of_rows:
            plane = layout.format.factors
            items = layout.plane_of(inputs[name], plane).view(np.float32)
            of_rows = items.reshape(layout.bands, layout.row_tiles, 16, 8 // plane.units)
            of_rows[:] = 2.0 ** rng.uniform(-20, -4, (layout.bands, 1, 16, 1))
    compare(spec, run_kernel(device, spec, inputs), spec.reference(**inputs))


def test_products_of_integers_are_exact_whatever_is_added_and_beside(device: Device) -> None:
    blocks, weights, _ = integer_matrix(Q4_K, 21, 512, seed=3)
    other_blocks, other, _ = integer_matrix(Q6_K, 5, 512, seed=4)
    spec = i16(Q4_K, 21, 512, Bias(), others=((Q6_K, 5),), tiles_each=1, sms=4)
    x = integer_vector(512, seed=5)
    bias = np.arange(26) * 3 - 30
    inputs = {
        "weights": spec.layout.pack(blocks),
        "weights1": spec.parts[1].layout.pack(other_blocks),
        "x": x.astype(np.float32)[None],
        "bias": bias[:21].astype(np.float32),
        "bias1": bias[21:].astype(np.float32),
    }
    found = run_kernel(device, spec, inputs)
    np.testing.assert_array_equal(found["y"][0].astype(np.int64), weights @ x + bias[:21])
    np.testing.assert_array_equal(found["y1"][0].astype(np.int64), other @ x + bias[21:])
    added = i16(Q4_K, 21, 512, Bias(), Residual(), split=2, groups=1)
    residual = np.arange(21) * 7
    del inputs["weights1"], inputs["bias1"]
    inputs["residual"] = residual.astype(np.float32)[None]
    y = run_kernel(device, added, inputs)["y"][0]
    np.testing.assert_array_equal(y.astype(np.int64), weights @ x + bias[:21] + residual)


@pytest.mark.turns(2)
@every_format
def test_any_weights_of_what_16_bits_hold(device: Device, fmt: Format) -> None:
    """Multiples of 2^-15 of 32639: x is its own rounding, so that only the f32 sums differ."""
    spec = i16(fmt, 22, 768)
    rng = np.random.default_rng(3)
    inputs = spec.make_inputs(rng)
    x = rng.integers(-32639, 32640, (1, 768))
    x[:, ::32] = 32639 * rng.choice([-1, 1], (1, 24))
    inputs["x"] = (x * 2.0**-15).astype(np.float32)
    y, expected = run_kernel(device, spec, inputs)["y"], spec.reference(**inputs)["y"]
    assert np.abs(y - expected).max() <= 2e-6 * np.abs(expected).max()


@pytest.mark.parametrize("fmt", [Q4_K, Q6_K, Q8_0, FORMATS["Q5_1"]], ids=lambda f: f.name)
def test_one_activation_at_a_time_gives_the_columns(device: Device, fmt: Format) -> None:
    """Each product by itself, to the roundings of its terms: a scale that is no power of two, and
    one or two sums.
    """
    spec = i16(fmt, 18, 512)
    inputs = spec.make_inputs(np.random.default_rng(6))
    weights = spec.layout.unpack(inputs["weights"]).astype(np.float64)
    for col in (0, 1, 37, 46, 255, 256, 511):
        x = np.zeros((1, spec.cols), np.float32)
        x[0, col] = -3.0
        y = run_kernel(device, spec, {**inputs, "x": x})["y"]
        largest = np.abs(weights[:, col & ~31 : col | 31]).max()
        np.testing.assert_allclose(y[0], -3.0 * weights[:, col], rtol=0, atol=2e-6 * largest)


# ---- rounded activations ----


def relative_rms(y: npt.NDArray[Any], expected: npt.NDArray[Any]) -> float:
    y, expected = y.astype(np.float64), expected.astype(np.float64)
    return float(np.sqrt(np.mean((y - expected) ** 2) / np.mean(expected**2)))


@pytest.mark.turns(2)
@every_format
def test_products_are_off_by_what_rounding_activations_makes(device: Device, fmt: Format) -> None:
    """Every one by itself, whatever cancels: six standard deviations of independent roundings,
    each within half a 32639th of its unit's largest.
    """
    spec = i16(fmt, 40, 576 if fmt.block == 32 else 768)
    inputs = spec.make_inputs(np.random.default_rng(15))
    weights = spec.layout.unpack(inputs["weights"]).astype(np.float64)
    step = np.repeat(np.abs(inputs["x"]).reshape(-1, 32).max(axis=1) / 32639, 32)
    deviation = np.sqrt(((weights * step) ** 2).sum(axis=1) / 12)
    y = run_kernel(device, spec, inputs)["y"][0]
    sums = 2.0**-22 * np.sqrt(((weights * inputs["x"]) ** 2).sum(axis=1))
    errors = np.abs(y - weights @ inputs["x"][0].astype(np.float64))
    assert (errors <= 6 * deviation + 8 * sums).all()
    assert errors.mean() < 2 * deviation.mean()


@pytest.mark.parametrize("largest", [1e-22, 1e-15, 1e-3, 1.0, 1e3, 1e15, 1e30])
def test_activations_keep_their_precision_at_every_size(device: Device, largest: float) -> None:
    """Relative to a unit's largest; a unit of zeros stays zero, a small one keeps its own."""
    spec = i16(Q4_K, 64, 512)
    inputs = spec.make_inputs(np.random.default_rng(4))
    inputs["x"][:, 32:64] = 0.0
    inputs["x"][:, 64:96] *= 1e-3
    inputs["x"] *= np.float32(largest)
    y, expected = run_kernel(device, spec, inputs)["y"], spec.reference(**inputs)["y"]
    assert relative_rms(y, expected) < 5e-5


def test_a_small_unit_beside_large_ones_keeps_its_own_precision(device: Device) -> None:
    """Seen through a matrix whose other columns are zero."""
    spec = i16(Q8_0, 20, 288)
    rng = np.random.default_rng(5)
    inputs = spec.make_inputs(rng)
    blocks = np.zeros((20, 9, 34), np.uint8)
    blocks[:, 4, :2] = np.float16(0.5).reshape(1).view(np.uint8)
    blocks[:, 4, 2:] = rng.integers(0, 256, (20, 32))
    inputs["weights"] = spec.layout.pack(blocks)
    inputs["x"] *= 1e6
    inputs["x"][:, 128:160] *= 1e-12
    y, expected = run_kernel(device, spec, inputs)["y"], spec.reference(**inputs)["y"]
    assert relative_rms(y, expected) < 5e-5


@pytest.mark.parametrize("scale", [1e-12, 1.0, 1e12])
def test_the_norm_holds_at_every_size(device: Device, scale: float) -> None:
    """The root of the mean square comes after the sums: nothing is rounded twice."""
    spec = i16(Q6_K, 40, 768, Normed(Norm("rms", 1e-30)), split=3)
    inputs = spec.make_inputs(np.random.default_rng(14))
    inputs["x"] *= np.float32(scale)
    y, expected = run_kernel(device, spec, inputs)["y"], spec.reference(**inputs)["y"]
    assert relative_rms(y, expected) < 5e-5


@pytest.mark.parametrize("value", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(
    "steps",
    [(), (Normed(RMS),), (Normed(RMS), Gated()), (Residual(),)],
    ids=str,
)
def test_what_is_not_finite_is_not_hidden(
    device: Device, value: float, steps: tuple[Step, ...]
) -> None:
    """Nowhere, at the first and the last column as well."""
    spec = i16(Q8_0, 21, 352, *steps)
    for at in (0, 77, 351):
        inputs = spec.make_inputs(np.random.default_rng(4))
        inputs["x"][0, at] = value
        assert not np.isfinite(run_kernel(device, spec, inputs)["y"]).any()


def test_an_infinite_weight_shows_in_its_row_alone(device: Device) -> None:
    spec = i16(Q8_0, 20, 288)
    inputs = spec.make_inputs(np.random.default_rng(4))
    blocks = np.zeros((20, 9, 34), np.uint8)
    blocks[:, :, 2:] = 1
    blocks[:, :, :2] = np.float16(0.5).reshape(1).view(np.uint8)
    blocks[7, 3, :2] = np.float16(np.inf).reshape(1).view(np.uint8)
    inputs["weights"] = spec.layout.pack(blocks)
    finite = np.isfinite(run_kernel(device, spec, inputs)["y"][0])
    assert np.flatnonzero(~finite).tolist() == [7]


# ---- every cut gives the product ----


@pytest.mark.turns(2)
@pytest.mark.parametrize(
    "spec",
    [
        i16(Q8_0, 33, 352),
        i16(Q8_0, 3, 4864),
        i16(Q4_K, 6, 4096, split=5, groups=1, stages=4),
        i16(Q4_K, 90, 1024, split=2, groups=2, tiles_each=6, per_pass=2, stages=3),
        i16(Q4_K, 50, 2304, Normed(RMS), Gated(), tiles_each=4, per_pass=2),
        i16(Q6_K, 11, 1024, Bias(), Residual(), split=1, groups=1),
        i16(Q3_K, 21, 768, Normed(FINE_RMS), Bias(), split=3, groups=2),
        i16(Q8_0, 18, 12288, Normed(RMS), Residual()),
        i16(Q6_K, 9, 512, Normed(RMS), others=((Q4_K, 17), (Q8_0, 5))),
        i16(Q4_K, 9, 512, Normed(RMS), Bias(), others=((Q3_K, 40),), sms=6),
        i16(Q8_0, 9, 96, Gated(), split=1, groups=4),
        i16(Q4_K, 300, 512, Normed(RMS), sms=2),  # ten tiles a CTA, groups of four
        i16(Q4_K, 17, 512, shared=20_000),
        i16(Q4_K, 17, 512, shared=200_000, least_shared=117_760),
        i16(Q6_K, 20, 256, split=1, groups=8),
    ],
    ids=str,
)
def test_every_cut_gives_the_product(device: Device, spec: Gemv) -> None:
    for deviation in check_kernel(device, spec, seed=7, sanitize=False):
        assert deviation.ok, deviation


@pytest.mark.parametrize(
    "spec",
    [
        i16(Q4_K, 40, 768, Normed(RMS), Bias()),
        i16(Q8_0, 33, 352, Residual(), sms=5, fill=True),
        i16(Q6_K, 50, 2304, Normed(RMS), Gated(), tiles_each=4, per_pass=2),
        i16(Q4_K, 9, 512, Normed(RMS), others=((Q3_K, 40), (Q8_0, 5))),
        i16(Q4_K, 48, 4096, groups=1, tiles_each=3, shared=120_000),
        i16(Q4_K, 23, 2304, Residual(), cluster=2),
        Gemv.of(FORMATS["F16"], 35, 1120, Normed(RMS)),
    ],
    ids=str,
)
def test_activations_that_come_first_give_the_same_bits(device: Device, spec: Gemv) -> None:
    """No load is then issued before them, and none of the tiles waits."""
    skip_where_missing(spec, device.native_target)
    alone = dataclasses.replace(spec, alone=True)
    head, _ = alone.ptx("sm_90").split("cp.async.c", 1)
    waiting, asking = (head.find(text) for text in ("griddepcontrol.wait;", "[%x_from+"))
    assert 0 < waiting < asking
    assert "cp.async.c" in spec.ptx("sm_90").split("[%x_from+", 1)[0]
    inputs = spec.make_inputs(np.random.default_rng(18))
    found, before = (run_kernel(device, each, inputs) for each in (alone, spec))
    for deviation in compare(alone, found, spec.reference(**inputs)):
        assert deviation.ok, deviation
    for name, outputs in before.items():
        np.testing.assert_array_equal(found[name], outputs)


@pytest.mark.parametrize("stages", range(2, MAX_SLOTS + 1))
def test_every_depth_of_the_ring_gives_the_same_bits(device: Device, stages: int) -> None:
    """Thirteen tiles of a warp and more: the ring turns, and ends anywhere."""
    fields: dict[str, Any] = {"split": 2, "groups": 1, "tiles_each": 3, "shared": 100_000}
    spec = i16(Q4_K, 48, 2304, stages=stages, **fields)
    assert spec.cut.ring.slots == stages
    inputs = spec.make_inputs(np.random.default_rng(12))
    y = run_kernel(device, spec, inputs)["y"]
    first = run_kernel(device, recut(spec, stages=5), inputs)["y"]
    np.testing.assert_array_equal(y, first)
    expected = spec.reference(**inputs)["y"]
    assert relative_rms(y, expected) < 5e-5


@pytest.mark.parametrize(
    ("names", "copies"),
    [(("IQ3_XXS",), [32]), (("IQ3_S", "IQ2_XXS"), [16, 32]), (("IQ2_XS", "IQ1_M"), [16, 1])],
)
def test_more_copies_of_a_codebook_give_the_same_bits(
    device: Device, names: tuple[str, ...], copies: list[int]
) -> None:
    """Where shared memory has room, each lane or each two have entries of their own."""
    first, *others = (FORMATS[name] for name in names)
    fields: dict[str, Any] = {"others": tuple((fmt, 18) for fmt in others)}
    fields |= {"split": 4, "groups": 1, "tiles_each": 2}
    few, many = (
        i16(first, 33, 2048, Normed(RMS), shared=shared, **fields) for shared in (60_000, 150_000)
    )
    grids = [fmt.grid for fmt in many.grids.formats if fmt.grid]
    assert [grid.copies(many.grids.entries) for grid in grids] == copies
    assert max(grid.copies(few.grids.entries) for grid in grids) <= 8
    inputs = many.make_inputs(np.random.default_rng(19))
    found, before = (run_kernel(device, each, inputs) for each in (many, few))
    for deviation in compare(many, found, many.reference(**inputs)):
        assert deviation.ok, deviation
    for name, outputs in before.items():
        np.testing.assert_array_equal(found[name], outputs)


@pytest.mark.parametrize(("name", "other", "warps"), [("IQ1_S", "IQ1_M", 8), ("IQ1_M", "IQ1_M", 3)])
def test_entries_of_two_bits_a_weight_give_the_same_bits(
    device: Device, name: str, other: str, warps: int
) -> None:
    """Of types that share a codebook, where shared memory has room. Three warps store some of the
    entries in a last, partial round."""
    fields: dict[str, Any] = {"others": ((FORMATS[other], 18),), "split": warps, "groups": 1}
    few, many = (
        i16(FORMATS[name], 33, 2304, Normed(RMS), shared=shared, **fields)
        for shared in (60_000, 150_000)
    )
    assert (few.grids.entries, many.grids.entries) == (ENTRIES, FIELDS_ENTRIES)
    inputs = many.make_inputs(np.random.default_rng(21))
    found, before = (run_kernel(device, each, inputs) for each in (many, few))
    for deviation in compare(many, found, many.reference(**inputs)):
        assert deviation.ok, deviation
    for name, outputs in before.items():
        np.testing.assert_array_equal(found[name], outputs)


def test_types_with_different_codebooks_have_entries_of_32_bits() -> None:
    """Each its own, or one has none."""
    for other in ("IQ2_XS", "Q4_K"):
        others = ((FORMATS[other], 18),)
        spec = i16(FORMATS["IQ1_S"], 33, 768, others=others, shared=150_000)
        assert spec.grids.entries < FIELDS_ENTRIES


def test_a_ring_is_filled_a_few_tiles_at_a_time(device: Device) -> None:
    """Two of eight warps' Q4_K tiles before the wait, which changes no bit."""
    fields: dict[str, Any] = {"groups": 1, "tiles_each": 3, "shared": 120_000}
    spec, pair = (i16(Q4_K, 48, 4096, stages=stages, **fields) for stages in (4, 2))
    for each, waits in ((spec, 2), (pair, 0)):
        assert (each.cut.ring.slots, each.cut.ring.pace, each.cut.warps) == (
            each.options.stages,
            2,
            8,
        )
        before, _ = each.ptx("sm_90").split("griddepcontrol.wait")
        assert before.count("cp.async.wait_group 1;") == waits
    assert i16(Q8_0, 48, 4096, **fields).cut.ring.pace == 1
    inputs = spec.make_inputs(np.random.default_rng(16))
    first, second = (run_kernel(device, each, inputs)["y"] for each in (spec, pair))
    np.testing.assert_array_equal(first, second)


@pytest.mark.turns(3)
@every_format
def test_a_ring_deeper_than_its_tiles(device: Device, fmt: Format) -> None:
    """A warp with one tile, with two slots for it."""
    spec = i16(fmt, 5, 256, split=1, groups=1)
    assert spec.cut.ring.slots == 2
    for deviation in check_kernel(device, spec, seed=8, sanitize=False):
        assert deviation.ok, deviation


@pytest.mark.turns(2)
@pytest.mark.parametrize("target", ["sm_75", "sm_80", "sm_89"])
@pytest.mark.parametrize("fmt", [Q8_0, Q4_K, Q6_K, Q3_K], ids=lambda f: f.name)
def test_older_targets_give_the_same_bits(fmt: Format, target: str) -> None:
    """Other copies, other tensor cores, the same integers and the same order of sums."""
    spec = i16(fmt, 35, 768, Normed(RMS), split=3, groups=1, tiles_each=2)
    inputs = spec.make_inputs(np.random.default_rng(13))
    outputs = []
    for name in (target, "sm_90"):
        with Device.open(f"emulator:{name}") as device:
            outputs.append(run_kernel(device, spec, inputs)["y"])
    np.testing.assert_array_equal(*outputs)


# ---- what a row's bits depend on ----


@pytest.mark.turns(2)
@pytest.mark.parametrize(
    "changes",
    [
        {"tiles_each": 1},
        {"tiles_each": 3},
        {"tiles_each": 4, "per_pass": 2, "stages": 2},
        {"groups": 3},
        {"sms": 4},
        {"sms": 7, "tiles_each": 1},
        {"shared": 200_000, "least_shared": 120_000},
    ],
    ids=str,
)
@pytest.mark.parametrize("cluster", [1, 2, 4])
def test_a_row_does_not_depend_on_its_neighbours(
    device: Device, cluster: int, changes: dict[str, Any]
) -> None:
    """However rows are cut into CTAs and passes, and the first rows without the others."""
    cols = 768 if cluster == 1 else 2304
    spec = i16(Q4_K, 52, cols, split=2, groups=1, tiles_each=2, cluster=cluster)
    skip_where_missing(spec, device.native_target)
    inputs = spec.make_inputs(np.random.default_rng(8))
    together = run_kernel(device, spec, inputs)["y"]
    other = recut(spec, **changes)
    np.testing.assert_array_equal(run_kernel(device, other, inputs)["y"], together)


def test_a_row_alone_has_the_bits_that_it_has_among_others(device: Device) -> None:
    """Also if what lies around it is not finite."""
    spec = i16(Q8_0, 20, 352, split=2)
    rng = np.random.default_rng(9)
    inputs = spec.make_inputs(rng)
    blocks = np.zeros((20, 11, 34), np.uint8)
    blocks[:, :, 2:] = rng.integers(0, 256, (20, 11, 32))
    blocks[:, :, :2] = np.float16(0.03).reshape(1).view(np.uint8)
    for row in (0, 7, 8, 16, 19):
        around = blocks.copy()
        around[[r for r in range(20) if r != row], :, :2] = 0xFF  # a NaN
        alone = dataclasses.replace(spec, rows=1)
        y = run_kernel(device, spec, {**inputs, "weights": spec.layout.pack(around)})["y"][0]
        single = {**inputs, "weights": alone.layout.pack(blocks[row : row + 1])}
        np.testing.assert_array_equal(y[row], run_kernel(device, alone, single)["y"][0, 0])
        assert np.isnan(np.delete(y, row)).all()


@pytest.mark.parametrize(("cluster", "split"), [(1, 3), (2, 1)])
def test_one_launch_for_several_matrices_gives_the_bits_of_several(
    device: Device, cluster: int, split: int
) -> None:
    fields: dict[str, Any] = {"split": split, "groups": 1, "cluster": cluster}
    spec = i16(Q4_K, 40, 768, Normed(RMS), others=((Q6_K, 20), (Q4_K, 3)), **fields, sms=8)
    skip_where_missing(spec, device.native_target)
    inputs = spec.make_inputs(np.random.default_rng(10))
    together = run_kernel(device, spec, inputs)
    for suffix, fmt, rows in (("", Q4_K, 40), ("1", Q6_K, 20), ("2", Q4_K, 3)):
        single = i16(fmt, rows, 768, Normed(RMS), **fields)
        alone = {"weights": inputs["weights" + suffix], "x": inputs["x"], "norm": inputs["norm"]}
        y = run_kernel(device, single, alone)["y"]
        np.testing.assert_array_equal(together["y" + suffix], y)


def test_a_gated_pair_gates_the_bits_of_two(device: Device) -> None:
    """Both products as they are by themselves, before silu(gate) * up."""
    fields: dict[str, Any] = {"split": 2, "groups": 1}
    spec = i16(Q4_K, 37, 512, Normed(RMS), Gated(), **fields)
    inputs = spec.make_inputs(np.random.default_rng(11))
    inputs["x"] *= 0.1
    inputs["norm"] *= 0.1
    y = run_kernel(device, spec, inputs)["y"]
    common = {"x": inputs["x"], "norm": inputs["norm"]}
    single = i16(Q4_K, 37, 512, Normed(RMS), **fields)
    gate, up = (
        run_kernel(device, single, {**common, "weights": inputs[name]})["y"].astype(np.float64)
        for name in ("weights", "up")
    )
    expected = gate / (1.0 + np.exp(-gate)) * up
    # rounding the exponent -gate * log2(e) costs |gate| roundings, the rest a few
    assert (np.abs(y - expected) <= (np.abs(gate) + 8) * 2.0**-23 * np.abs(expected)).all()


# ---- races ----


@pytest.mark.turns(8)
@pytest.mark.parametrize(
    ("name", "target"),
    [  # by turns, both with --full; sm_90: test_races has every kernel's examples
        pytest.param(name, target, marks=[pytest.mark.full] * ((at + turn) % 2))
        for at, (name, spec) in enumerate(Gemv.examples().items())
        for turn, target in enumerate(("sm_75", "sm_80"))
        if target in spec.targets
    ],
)
def test_the_sanitizer_finds_nothing(name: str, target: str) -> None:
    """No races between lanes that copy tiles and those that read them, nor between warps."""
    spec = Gemv.examples()[name]
    with Device.open(f"emulator:{target}", api=emulated(target, sanitize=True)) as device:
        for deviation in check_kernel(device, spec, sanitize=False):
            assert deviation.ok, deviation


def test_which_warps_hold_tiles() -> None:
    """The first tile is loaded before the wait; not where a warp has fewer tiles than slots, of
    which one would never be written, nor where activations come first."""
    held = i16(Q8_0, 32, 4096, groups=1, tiles_each=2, stages=2)
    uneven = i16(Q8_0, 48, 9 * 256, split=8, groups=1, tiles_each=3, stages=4, shared=160_000)
    alone = i16(Q8_0, 32, 4096, groups=1, tiles_each=2, stages=2, alone=True)
    assert uneven.cut.ring.slots > 3
    for spec, wanted in ((held, True), (uneven, False), (alone, False)):
        before, _ = spec.ptx("sm_90").split("griddepcontrol.wait")
        assert all((spec.loads.refill(part) == "held") == wanted for part in spec.parts)
        assert ("ld.shared" in before) == wanted


def test_a_slot_is_filled_late() -> None:
    """Of NVFP4 one of four slots, once activations have been asked for, and all again as soon as
    their tiles are in registers."""
    spec = i16(FORMATS["NVFP4"], 48, 4096, groups=1, tiles_each=3, stages=4, shared=120_000)
    before, after = spec.ptx("sm_90").split("griddepcontrol.wait")
    assert (spec.cut.ring.slots, before.count("cp.async.commit_group")) == (4, 3)
    asked, filled, tile = (
        after.index(text) for text in ("ld.global.v4.f32", "cp.async.commit_group", "ld.shared")
    )
    assert asked < filled < tile
    loaded = after.index("ld.shared.v4.b32 {%low0_0")
    assert after.index("cp.async.commit_group", loaded) < after.index("mma.sync", loaded)


@every_format
def test_rings_that_are_filled_again(device: Device, fmt: Format) -> None:
    """More tiles than slots, in two passes, give the product, whenever slots are filled again."""
    spec = i16(fmt, 118, 512, split=2, groups=1, tiles_each=4, per_pass=2, stages=3)
    assert spec.cut.rows.passes == 2
    for deviation in check_kernel(device, spec, seed=8):
        assert deviation.ok, deviation
