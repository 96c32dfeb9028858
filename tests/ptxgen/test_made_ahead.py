"""Products of one vector whose weights are made a tile ahead: types with a codebook."""

from __future__ import annotations

import dataclasses
import functools

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
#: Products; whether weights of each matrix are made ahead; and before activations are there. Last
#: rows are odd.
CASES = [
    # a tile or two of each warp; of the last blocks only some warps have one
    (i16(IQ2_XXS, 17, 256, Bias(), **MUCH), "a", "f"),
    (i16(IQ3_XXS, 18, 512, Residual(), split=1, groups=1, **MUCH), "a", "f"),
    (
        i16(IQ2_XXS, 35, 768, Residual(), split=2, groups=1, tiles_each=3, stages=2, **MUCH),
        "a",
        "f",
    ),
    (
        i16(IQ3_XXS, 33, 2304, Residual(), split=4, groups=1, tiles_each=2, stages=3, **MUCH),
        "a",
        "f",
    ),
    # several blocks of several tiles
    (i16(IQ2_XXS, 70, 1280, split=1, groups=1, tiles_each=3, **MUCH), "a", "f"),
    (
        i16(IQ2_XXS, 90, 1024, Normed(RMS), split=2, groups=2, tiles_each=6, stages=2, **MUCH),
        *("a", "f"),
    ),
    (i16(IQ3_XXS, 50, 2304, Normed(RMS), split=8, groups=1, tiles_each=4, **MUCH), "a", "f"),
    # pairs
    (i16(IQ3_XXS, 21, 512, Normed(RMS), Gated(), split=2, **MUCH), "a", "f"),
    (
        i16(IQ2_XXS, 50, 2304, Normed(RMS), Gated(), split=4, groups=1, tiles_each=4, **MUCH),
        *("a", "f"),
    ),
    # in clusters, and beside other types
    (i16(IQ2_XXS, 23, 2304, Residual(), cluster=2, split=2, **MUCH), "a", "f"),
    (i16(IQ3_XXS, 9, 512, Normed(RMS), others=((Q4_K, 40), (IQ1_M, 5)), **MUCH), "a--", "f--"),
    (i16(Q4_K, 40, 512, Normed(RMS), others=((IQ2_XXS, 9), (IQ3_XXS, 5)), **MUCH), "-aa", "-ff"),
    # several passes; too many activations
    (i16(IQ2_XXS, 90, 1024, split=2, groups=2, tiles_each=6, per_pass=2, **MUCH), "a", "-"),
    (
        i16(IQ3_XXS, 70, 512, Gated(), split=1, groups=2, tiles_each=6, per_pass=2, **MUCH),
        *("a", "-"),
    ),
    (i16(IQ2_XXS, 3, 21504, split=8, groups=1, shared=200_000), "a", "-"),
    # few copies, no signs
    (i16(IQ2_XS, 17, 512, Bias(), **MUCH), "-", "-"),
    (i16(IQ3_S, 33, 2304, Normed(RMS), Gated(), split=4, groups=1, tiles_each=2, **MUCH), "-", "-"),
    (i16(IQ3_XXS, 50, 2304, split=4, groups=1, tiles_each=2, shared=60_000), "-", "-"),
    (i16(IQ1_S, 33, 768, Normed(RMS), split=3, groups=1, **MUCH), "-", "-"),
    (i16(TQ1_0, 19, 1024, split=2, groups=2, **MUCH), "-", "-"),
]


@pytest.mark.parametrize(("spec", "ahead", "first"), CASES, ids=str)
def test_weights_made_ahead_give_the_product(
    device: Device, spec: Gemv, ahead: str, first: str
) -> None:
    """And the same bits as in a launch that runs alone, which makes none before activations are
    there."""
    skip_where_missing(spec, device.native_target)
    assert "".join("-a"[spec.loads.makes_ahead(part)] for part in spec.parts) == ahead
    assert "".join("-f"[spec.loads.makes_first(part)] for part in spec.parts) == first
    alone = dataclasses.replace(spec, alone=True)
    assert not any(alone.loads.makes_first(part) for part in alone.parts)
    for deviation in check_kernel(device, spec, seed=3):
        assert deviation.ok, deviation
    inputs = spec.make_inputs(np.random.default_rng(5))
    found, others = (run_kernel(device, each, inputs) for each in (spec, alone))
    for name, outputs in others.items():
        np.testing.assert_array_equal(found[name], outputs)


@pytest.mark.parametrize(("spec", "ahead", "first"), [CASES[0], CASES[8], CASES[14]], ids=str)
def test_entries_are_looked_up_before_the_wait(spec: Gemv, ahead: str, first: str) -> None:
    """Those of a tile; after it of a tile of each matrix, in the loop."""
    assert ahead == "a"
    before, after = spec.ptx("sm_90").split("griddepcontrol.wait;")
    grid, early = spec.layout.format.grid, first == "f"
    assert grid is not None
    found = [text.count("[%index];") * grid.weights for text in (before, after)]
    assert found == [128 * early, 128 * (spec.steps.pair + (not early))]
