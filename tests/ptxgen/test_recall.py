"""Streams recalled by their scores: what the choice comes to at its ends, and what is refused."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from urdir.driver import Device, run_kernel
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.recall import Recall

SPEC = Recall(3, 132, 4, 1e-6)


def test_without_weights_the_sum_is_the_mean(device: Device) -> None:
    inputs = SPEC.make_inputs(np.random.default_rng(0))
    inputs["weight"] = np.zeros_like(inputs["weight"])
    y = run_kernel(device, SPEC, inputs)["y"]
    streams = np.concatenate([inputs["bank"], inputs["x"][None]]).astype(np.float64)
    np.testing.assert_allclose(y, streams.mean(axis=0), rtol=1e-5, atol=1e-6)


def test_a_stream_along_the_weights_is_all_of_the_sum(device: Device) -> None:
    """However long it is: scores are of the stream divided by its length."""
    inputs = SPEC.make_inputs(np.random.default_rng(1))
    inputs["weight"] = np.full_like(inputs["weight"], 30.0)
    for length in (1e-2, 1e4):
        inputs["bank"][2] = length
        y = run_kernel(device, SPEC, inputs)["y"]
        np.testing.assert_allclose(y, inputs["bank"][2], rtol=1e-5)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"cols": 6}, "multiples of 4"),
        ({"cols": 16388}, "up to 16384"),
    ],
)
def test_what_it_refuses(fields: dict[str, int], text: str) -> None:
    with pytest.raises(PtxgenError, match=text):
        replace(SPEC, **fields)
