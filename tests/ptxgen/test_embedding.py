"""The embedding gather: exact rows, and what a bad token or position gives."""

from __future__ import annotations

import numpy as np
import pytest

from urdir.driver.device import Device
from urdir.driver.harness import run_kernel
from urdir.ptxgen.formats import FORMATS, Format
from urdir.ptxgen.kernels.embedding import Embedding


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_rows_are_the_weights_to_the_bit(device: Device, fmt: Format) -> None:
    spec = Embedding(fmt, vocab=7, cols=768 if fmt.block > 1 else 45, max_len=3)
    inputs = spec.make_inputs(np.random.default_rng(1))
    inputs["tokens"][:] = (6, 0, 3)
    weights = spec.layout.unpack(inputs["weights"])
    for position, token in enumerate((6, 0, 3)):
        inputs["position"][0] = position
        y = run_kernel(device, spec, inputs)["y"]
        np.testing.assert_array_equal(y.view(np.uint32), weights[token].view(np.uint32))


@pytest.mark.parametrize("cols", [256, 45])
@pytest.mark.parametrize(("token", "position"), [(7, 1), (2**32 - 1, 1), (0, 3), (0, 2**32 - 1)])
def test_a_token_or_position_out_of_range_gives_nans(
    device: Device, token: int, position: int, cols: int
) -> None:
    spec = Embedding(FORMATS["F16"], vocab=7, cols=cols, max_len=3)
    inputs = spec.make_inputs(np.random.default_rng(2))
    inputs["tokens"][1], inputs["position"][0] = token, position
    y = run_kernel(device, spec, inputs)["y"]
    assert np.isnan(y).all()
    # The canonical NaN, where memory that nobody wrote is poisoned with another one.
    assert (y.view(np.uint32) == 0x7FFFFFFF).all()
    assert np.isnan(spec.reference(**inputs)["y"]).all()


def test_bytes_moved_are_those_of_a_row() -> None:
    spec = Embedding(FORMATS["Q4_K"], vocab=1000, cols=512, max_len=9)
    assert spec.bytes_moved() == 2 * 144 + 8 + 4 * 512
