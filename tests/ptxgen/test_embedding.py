"""The embedding gather: exact rows, and what a bad token or position gives."""

from __future__ import annotations

import gguf
import numpy as np
import pytest

from urdir.driver.device import Device
from urdir.driver.harness import run_kernel
from urdir.ptxgen.kernels.embedding import Embedding
from urdir.ptxgen.weights.formats import FORMATS, Format


@pytest.mark.parametrize("fmt", FORMATS.values(), ids=lambda f: f.name)
def test_rows_are_the_weights_to_the_bit(device: Device, fmt: Format) -> None:
    spec = Embedding(fmt, vocab=7, cols=768 if fmt.block > 1 else 45, max_len=3)
    inputs = spec.make_inputs(np.random.default_rng(1))
    inputs["tokens"][:] = (6, 0, 3)
    weights = spec.layout.unpack(inputs["weights"])
    for position, token in enumerate((6, 0, 3)):
        inputs["position"][0] = position
        y = run_kernel(device, spec, inputs)["y"]
        np.testing.assert_array_equal(y[0].view(np.uint32), weights[token].view(np.uint32))


def test_every_exponent_of_a_factor(device: Device) -> None:
    """Each row has another one, from 2^-128 on; results below 2^-126 are exact as well."""
    exponents = np.arange(252, dtype=np.uint8)
    blocks = np.hstack([exponents[:, None], exponents[:, None] + np.arange(16, dtype=np.uint8)])
    spec = Embedding(FORMATS["MXFP4"], vocab=252, cols=32, max_len=252, rows=252)
    inputs = {
        "weights": spec.layout.pack(blocks),
        "tokens": np.arange(252, dtype=np.uint32)[None],
        "sequence": np.zeros(252, np.uint32),
        "position": np.arange(252, dtype=np.uint32),
    }
    y = run_kernel(device, spec, inputs)["y"]
    weights = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType.MXFP4)
    np.testing.assert_array_equal(y.view(np.uint32), weights.view(np.uint32))


@pytest.mark.parametrize("cols", [256, 45])
def test_each_row_has_its_sequence_and_position(device: Device, cols: int) -> None:
    spec = Embedding(FORMATS["F16"], vocab=12, cols=cols, max_len=4, rows=5, sequences=3)
    inputs = spec.make_inputs(np.random.default_rng(3))
    inputs["tokens"][:] = np.arange(12).reshape(3, 4)
    inputs["sequence"][:] = (2, 0, 1, 2, 2)
    inputs["position"][:] = (3, 1, 0, 3, 0)
    weights = spec.layout.unpack(inputs["weights"])
    y = run_kernel(device, spec, inputs)["y"]
    np.testing.assert_array_equal(y, weights[[11, 1, 4, 11, 8]])


@pytest.mark.parametrize("cols", [256, 45])
@pytest.mark.parametrize(("token", "sequence"), [(7, 1), (2**32 - 1, 1), (0, 2), (0, 2**32 - 1)])
def test_a_token_or_sequence_out_of_range_gives_nans(
    device: Device, token: int, sequence: int, cols: int
) -> None:
    spec = Embedding(FORMATS["F16"], vocab=7, cols=cols, max_len=3, rows=2, sequences=2)
    inputs = spec.make_inputs(np.random.default_rng(2))
    inputs["tokens"][1, 2] = token
    inputs["sequence"][:], inputs["position"][:] = (sequence, 0), (2, 1)
    y = run_kernel(device, spec, inputs)["y"]
    # The canonical NaN, where memory that nobody wrote is poisoned with another one.
    assert (y[0].view(np.uint32) == 0x7FFFFFFF).all()
    assert np.isnan(spec.reference(**inputs)["y"][0]).all()
    assert np.isfinite(y[1]).all()


@pytest.mark.parametrize("cols", [256, 45])
@pytest.mark.parametrize("position", [3, 2**32 - 1])
def test_an_idle_row_becomes_zeros(device: Device, position: int, cols: int) -> None:
    spec = Embedding(FORMATS["Q8_0" if cols == 256 else "F16"], 7, cols, max_len=3, rows=3)
    inputs = spec.make_inputs(np.random.default_rng(2))
    inputs["sequence"][1], inputs["position"][1] = 2**32 - 1, position  # not looked at
    y = run_kernel(device, spec, inputs)["y"]
    assert not y[1].view(np.uint32).any()
    np.testing.assert_array_equal(y, spec.reference(**inputs)["y"])


def test_bytes_moved_are_those_of_the_rows() -> None:
    spec = Embedding(FORMATS["Q4_K"], vocab=1000, cols=512, max_len=9, rows=3)
    assert spec.bytes_moved() == 3 * (2 * 144 + 12 + 4 * 512)
