"""Beside a product in its launch: gates, gains, and steps of kernels with states."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from urdir.driver import Device, run_kernel
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.advance import IDLE
from urdir.ptxgen.kernels.linear.choice import Limits, LinearRequest, choose_linear
from urdir.ptxgen.kernels.linear.cut import CutOptions
from urdir.ptxgen.kernels.linear.epilogue.activation import SigmoidScaled
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.epilogue.then import PREFIX, TAKES, Continued, Then
from urdir.ptxgen.kernels.linear.products.gemv import Gemv
from urdir.ptxgen.kernels.linear.prologue.gate import Gate
from urdir.ptxgen.kernels.linear.steps import Step
from urdir.ptxgen.kernels.recurrent.causal_conv import CausalConv
from urdir.ptxgen.kernels.recurrent.prefill_conv import PrefillConv
from urdir.ptxgen.kernels.recurrent.selective_scan import SelectiveScan
from urdir.ptxgen.weights.formats import FORMATS

SILU = Activation("silu")
Q4_K = FORMATS["Q4_K"]
CONV = CausalConv(1, 3, 64, 0, channels=52, taps=4, bias=True, activation=SILU)
SCAN = SelectiveScan(1, 3, 64, 0, channels=52, size=16)
PRODUCT = Gemv.of(Q4_K, 52, 768, sms=2, activations="i16")
LIMITS = Limits(132, 233472, 232448, 8, "sm_90a")
REQUEST = LinearRequest(LIMITS, ((Q4_K, 52),), 768)


def joined(then: Then, inputs: dict[str, Any]) -> dict[str, Any]:
    """The inputs of a product and of the step after it, as one launch takes them."""
    return {PREFIX + name: value for name, value in inputs.items() if name != TAKES[type(then)]}


@pytest.mark.parametrize(
    "then", [CONV, replace(CONV, most=3), SCAN], ids=["convolution", "convolution, ring", "scan"]
)
@pytest.mark.parametrize("position", [0, 5, 64, IDLE], ids=["first", "later", "beyond", "idle"])
def test_a_step_after_a_product_has_the_bits_of_a_launch_of_its_own(
    then: Then, position: int, device: Device
) -> None:
    rng = np.random.default_rng(4)
    of_product, of_step = PRODUCT.make_inputs(rng), then.make_inputs(rng)
    of_step["sequence"] = np.array([1], np.uint32)
    of_step["position"] = np.array([position], np.uint32)
    product = run_kernel(device, PRODUCT, of_product)["y"]
    apart = run_kernel(device, then, of_step | {TAKES[type(then)]: product})
    together = run_kernel(
        device, replace(PRODUCT, epilogue=(Continued(then),)), of_product | joined(then, of_step)
    )
    state = "tail" if isinstance(then, CausalConv) else "state"
    np.testing.assert_array_equal(together["y"], apart["y"])
    np.testing.assert_array_equal(together[PREFIX + state], apart[state])
    moved = not np.array_equal(apart[state][1], of_step[state][1])
    assert moved == (position < then.max_len)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"epilogue": (Continued(replace(CONV, channels=51)),)}, "51 channels"),
        ({"epilogue": (Continued(replace(CONV, rows=2)),)}, "2 rows"),
        ({"epilogue": (Continued(PrefillConv(1, 3, 64, 1, channels=52, taps=4)),)}, "1 segments"),
        ({"epilogue": (Continued(replace(CONV, gated=True)),)}, "gated convolution"),
        ({"epilogue": (Continued(replace(CONV, most=1, drafted=True)),)}, "drafts more rows"),
        ({"epilogue": (Continued(replace(SCAN, size=32)),)}, "more than 16 values"),
        ({"epilogue": (Residual(), Continued(CONV))}, "gate or residual"),
        (
            {
                "epilogue": (Continued(CONV),),
                "options": CutOptions(tiles_each=4, per_pass=1, split=3, groups=1),
            },
            "in passes",
        ),
        ({"epilogue": (SigmoidScaled(), Bias())}, "sigmoid_scaled goes without bias"),
        ({"prologue": (Gate(SILU, 256),), "cols": 640, "format": FORMATS["Q8_0"]}, "heads of 256"),
    ],
)
def test_what_does_not_fit_a_product_is_refused(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(PtxgenError, match=text):
        replace(PRODUCT, **fields)


@pytest.mark.parametrize("head", [4, 24, 512])
def test_heads_that_no_lanes_of_a_warp_have_are_refused(head: int) -> None:
    assert not Gate.serves(head)
    with pytest.raises(PtxgenError, match=f"heads of {head}"):
        Gate(SILU, head)


def test_a_step_goes_where_one_pass_finishes_all_rows() -> None:
    request = REQUEST.plus(Continued(CONV))
    assert request.continues
    kernel = choose_linear(request)
    assert isinstance(kernel, Gemv)
    assert kernel.epilogue == (Continued(CONV),)
    many = replace(CONV, channels=200_000)
    wide = replace(REQUEST, matrices=((Q4_K, 200_000),))
    assert not wide.plus(Continued(many)).continues
    assert not REQUEST.plus(Continued(replace(SCAN, size=32))).continues
    assert not REQUEST.continues


@pytest.mark.parametrize("step", [Gate(SILU), SigmoidScaled(), Continued(CONV)])
def test_several_vectors_have_launches_of_their_own(step: Step) -> None:
    request = REQUEST.plus(step)
    assert isinstance(choose_linear(request), Gemv)
    with pytest.raises(PtxgenError, match="takes no"):
        choose_linear(replace(request, batch=2))
