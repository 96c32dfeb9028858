"""Summaries that a launch leaves for the norm after it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from urdir.driver.device import Device
from urdir.driver.harness import run_kernel
from urdir.model.verify.kernel_suite import skip_where_missing
from urdir.ptxgen.kernels.linear.epilogue.norm import BeginNorm
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.products.gemm_small import GemmSmall
from urdir.ptxgen.kernels.linear.prologue.norm import Normed
from urdir.ptxgen.kernels.linear.prologue.norm import begun as begun_norm
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.summary import summary
from urdir.ptxgen.weights.formats import FORMATS

RMS = Norm("rms", 1e-5)

Q8_0, Q4_K, Q6_K = (FORMATS[n] for n in ("Q8_0", "Q4_K", "Q6_K"))


@pytest.mark.parametrize(
    "spec",
    [
        GemmSmall.of(Q4_K, 48, 768, Residual(), BeginNorm(), batch=4),
        GemmSmall.of(Q8_0, 80, 2080, Residual(), BeginNorm(), tiles_each=5, batch=5),
        GemmSmall.of(Q6_K, 80, 1280, Residual(), BeginNorm(), split=1, cluster=4, batch=3),
    ],
    ids=str,
)
def test_a_summary_is_that_of_the_vectors_beside_it(device: Device, spec: GemmSmall) -> None:
    """Which are exactly those made without it, and their products with the norm's weights. What is
    not finite is found in its vector's groups only."""
    skip_where_missing(spec, device.native_target)
    inputs = spec.make_inputs(np.random.default_rng(11))
    inputs["residual"][1, 21] = np.inf
    inputs["residual"][1, 40] = np.nan
    made = run_kernel(device, spec, inputs)
    without = dataclasses.replace(spec, epilogue=spec.epilogue[:1])
    y = run_kernel(device, without, {n: v for n, v in inputs.items() if n != "next_norm"})["y"]
    np.testing.assert_array_equal(made["y"], y)
    np.testing.assert_array_equal(made["scaled"], y * inputs["next_norm"])
    with np.errstate(invalid="ignore"):
        largest, squares = summary(made["scaled"], made["y"])
    np.testing.assert_array_equal(made["y_summary"][0], largest)
    np.testing.assert_allclose(made["y_summary"][1], squares, rtol=1e-6)
    assert np.isinf(largest[1, 1])
    assert np.isnan(largest[1, 2])
    assert np.isfinite(np.delete(largest, 1, axis=0)).all()


@pytest.mark.turns(2)
@pytest.mark.parametrize("batch", [2, 4, 7])
@pytest.mark.parametrize("cols", [256, 480, 1280])
def test_a_norm_that_was_begun_gives_the_same_vectors(
    device: Device, batch: int, cols: int
) -> None:
    """Activations are rounded alike, bit for bit: only the sum of all squares is added up in
    another order."""
    spec = GemmSmall.of(Q8_0, 40, cols, Normed(RMS), batch=batch, others=((Q8_0, 7),))
    inputs = spec.make_inputs(np.random.default_rng(13))
    norm = inputs.pop("norm")
    whole = run_kernel(device, spec, {**inputs, "norm": norm})
    scaled = inputs["x"] * norm
    begun = {**inputs, "x": scaled, "x_summary": summary(scaled, inputs["x"])}
    rest = run_kernel(device, dataclasses.replace(spec, prologue=(begun_norm(RMS),)), begun)
    for name, y in whole.items():
        np.testing.assert_allclose(rest[name], y, rtol=1e-6)
