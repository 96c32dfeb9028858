"""The GELU by the normal distribution, beside values of the C library's erfc."""

from __future__ import annotations

import math

import numpy as np

from urdir.driver import Device, run_kernel
from urdir.ptxgen.kernels.activate import Activate
from urdir.ptxgen.kernels.activation import Activation

#: Down to here results are accurate relative to themselves.
LEAST = -6.5


def test_gelu_by_the_normal_distribution_is_accurate(device: Device) -> None:
    """Exponents of up to 36 are rounded to f32, which changes results by 2^-19; beside 4.4e-7
    of the polynomial and the roundings of its eleven terms."""
    x = np.concatenate([np.linspace(-20, 9, 2900), -np.logspace(-30, 0, 99)]).astype(np.float32)
    (y,) = run_kernel(device, Activate(x.size, Activation("gelu_erf")), {"x": x}).values()
    wanted = np.array([v * 0.5 * math.erfc(-v / math.sqrt(2)) for v in x.tolist()])
    accurate = x >= LEAST
    np.testing.assert_allclose(y[accurate], wanted[accurate], rtol=5e-6)
    np.testing.assert_allclose(y[accurate & (x > -1)], wanted[accurate & (x > -1)], rtol=8e-7)
    np.testing.assert_allclose(y[~accurate], wanted[~accurate], rtol=0, atol=3e-12)
    assert (y[~accurate] <= 0).all()
