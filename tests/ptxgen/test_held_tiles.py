"""Products of one vector that hold the next tile in registers: types with a codebook."""

from __future__ import annotations

import dataclasses
import functools
import re

import numpy as np
import pytest

from urdir.driver.device import Device
from urdir.driver.harness import check_kernel, run_kernel
from urdir.model.verify.kernel_suite import skip_where_missing
from urdir.ptxgen.kernels.linear.epilogue.activation import Gated
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.products.gemv import Gemv
from urdir.ptxgen.kernels.linear.prologue.norm import Normed
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.weights.formats import FORMATS

RMS = Norm("rms", 1e-5)
IQ1_S, IQ1_M, IQ2_XXS, IQ2_XS = (FORMATS[name] for name in ("IQ1_S", "IQ1_M", "IQ2_XXS", "IQ2_XS"))
IQ3_XXS, IQ3_S, TQ1_0, Q4_K = (FORMATS[name] for name in ("IQ3_XXS", "IQ3_S", "TQ1_0", "Q4_K"))

i16 = functools.partial(Gemv.of, activations="i16")

#: Room for many copies of entries.
MUCH = {"shared": 150_000}
#: Products, and whether warps hold the next tile of each matrix. Last rows are odd.
CASES = [
    # a tile or two of each warp; of the last blocks only some warps have one
    (i16(IQ2_XXS, 17, 256, Bias(), **MUCH), "-"),
    (i16(IQ3_XXS, 18, 512, Residual(), split=1, groups=1, **MUCH), "h"),
    (
        i16(IQ2_XXS, 35, 768, Residual(), split=2, groups=1, tiles_each=3, stages=2, **MUCH),
        "h",
    ),
    (
        i16(IQ3_XXS, 33, 2304, Residual(), split=4, groups=1, tiles_each=2, stages=3, **MUCH),
        "h",
    ),
    # several blocks of several tiles
    (i16(IQ2_XXS, 70, 1280, split=1, groups=1, tiles_each=3, **MUCH), "h"),
    (
        i16(IQ2_XXS, 90, 1024, Normed(RMS), split=2, groups=2, tiles_each=6, stages=2, **MUCH),
        "h",
    ),
    (i16(IQ3_XXS, 50, 2304, Normed(RMS), split=8, groups=1, tiles_each=4, **MUCH), "h"),
    # pairs
    (i16(IQ3_XXS, 21, 512, Normed(RMS), Gated(), split=2, **MUCH), "h"),
    (
        i16(IQ2_XXS, 50, 2304, Normed(RMS), Gated(), split=4, groups=1, tiles_each=4, **MUCH),
        "h",
    ),
    # in clusters, and beside other types
    (i16(IQ2_XXS, 23, 2304, Residual(), cluster=2, split=2, **MUCH), "-"),
    (i16(IQ3_XXS, 9, 512, Normed(RMS), others=((Q4_K, 40), (IQ1_M, 5)), **MUCH), "---"),
    (i16(Q4_K, 40, 512, Normed(RMS), others=((IQ2_XXS, 9), (IQ3_XXS, 5)), **MUCH), "---"),
    # several passes; too many activations
    (i16(IQ2_XXS, 90, 1024, split=2, groups=2, tiles_each=6, per_pass=2, **MUCH), "h"),
    (
        i16(IQ3_XXS, 70, 512, Gated(), split=1, groups=2, tiles_each=6, per_pass=2, **MUCH),
        "h",
    ),
    (i16(IQ2_XXS, 3, 21504, split=8, groups=1, shared=200_000), "h"),
    # few copies, no signs
    (i16(IQ2_XS, 17, 512, Bias(), **MUCH), "-"),
    (i16(IQ3_S, 33, 2304, Normed(RMS), Gated(), split=4, groups=1, tiles_each=2, **MUCH), "h"),
    (i16(IQ3_XXS, 50, 2304, split=4, groups=1, tiles_each=2, shared=60_000), "h"),
    (i16(IQ1_S, 33, 768, Normed(RMS), split=3, groups=1, **MUCH), "-"),
    (i16(TQ1_0, 19, 1024, split=2, groups=2, **MUCH), "-"),
]


@pytest.mark.parametrize(("spec", "held"), CASES, ids=str)
def test_held_tiles_give_the_product(device: Device, spec: Gemv, held: str) -> None:
    """And the same bits as in a launch that runs alone, which holds none."""
    skip_where_missing(spec, device.native_target)
    assert "".join("-h"[spec.loads.refill(part) == "held"] for part in spec.parts) == held
    alone = dataclasses.replace(spec, alone=True)
    assert all(alone.loads.refill(part) == "multiplied" for part in alone.parts)
    for deviation in check_kernel(device, spec, seed=3):
        assert deviation.ok, deviation
    inputs = spec.make_inputs(np.random.default_rng(5))
    found, others = (run_kernel(device, each, inputs) for each in (spec, alone))
    for name, outputs in others.items():
        np.testing.assert_array_equal(found[name], outputs)


@pytest.mark.parametrize(
    ("spec", "products", "moves"),
    [
        (i16(IQ2_XXS, 17, 256, **MUCH), 16, 0),  # 32 copies, an entry for eight weights
        (i16(IQ3_XXS, 18, 512, split=1, groups=1, **MUCH), 32, 0),  # for four
        (i16(IQ2_XS, 17, 512, **MUCH), 0, 16),  # 16 copies
        (i16(IQ3_XXS, 50, 2304, split=4, groups=1, tiles_each=2, shared=60_000), 0, 32),  # 8
    ],
    ids=str,
)
def test_one_dot_product_is_the_address_of_one_of_32_copies(
    spec: Gemv, products: int, moves: int
) -> None:
    text = spec.ptx("sm_90")
    assert spec.layout.format.grid is not None
    assert text.count("dp4a.u32.u32 %index") == products
    assert len(re.findall(r"mad\.lo\.u32 %index, %index, \d+, %entries", text)) == moves
