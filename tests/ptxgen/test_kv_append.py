"""KV append: which rows it writes, and how it rounds."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from urdir.driver.device import Device
from urdir.driver.harness import run_kernel
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.kv_append import KvAppend


@pytest.mark.parametrize("dtype", ["f16", "f32"])
@pytest.mark.parametrize("position", [0, 1, 8])
def test_one_row_of_every_head_is_written(device: Device, dtype: Any, position: int) -> None:
    spec = KvAppend(kv_heads=3, head_dim=80, max_len=9, dtype=dtype)
    inputs = spec.make_inputs(np.random.default_rng(position))
    inputs["position"] = np.array([position], np.uint32)
    outputs = run_kernel(device, spec, inputs)
    for name in ("k", "v"):
        cache = outputs[f"{name}_cache"]
        np.testing.assert_array_equal(cache[:, position], inputs[name].astype(cache.dtype))
        others = [row for row in range(9) if row != position]
        np.testing.assert_array_equal(cache[:, others], inputs[f"{name}_cache"][:, others])


@pytest.mark.parametrize("position", [5, 6, 2**31, 2**32 - 1])
def test_a_position_outside_writes_nothing(device: Device, position: int) -> None:
    spec = KvAppend(kv_heads=2, head_dim=64, max_len=5, dtype="f16")
    inputs = spec.make_inputs(np.random.default_rng(1))
    inputs["position"] = np.array([position], np.uint32)
    outputs = run_kernel(device, spec, inputs)
    for name in ("k_cache", "v_cache"):
        np.testing.assert_array_equal(outputs[name], inputs[name])


def test_f16_rounds_to_even_and_overflows_to_infinity(device: Device) -> None:
    spec = KvAppend(kv_heads=1, head_dim=8, max_len=2, dtype="f16")
    inputs = spec.make_inputs(np.random.default_rng(2))
    inputs["position"] = np.array([1], np.uint32)
    # Ties between neighbours, the largest f16, the tie above it, subnormals and half of one.
    inputs["k"] = np.array(
        [[2049, 2051, 65504, 65519.996, 65520, -1e9, 2**-24, 2**-25]], np.float32
    )
    inputs["v"] = -inputs["k"]
    outputs = run_kernel(device, spec, inputs)
    wanted = [2048, 2052, 65504, 65504, np.inf, -np.inf, 2**-24, 0]
    np.testing.assert_array_equal(outputs["k_cache"][0, 1], np.array(wanted, np.float16))
    np.testing.assert_array_equal(outputs["v_cache"][0, 1], -np.array(wanted, np.float16))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "f64"}, "'f64'"),
        ({"head_dim": 12}, "head_dim 12"),
        ({"kv_heads": 0}, "kv_heads 0"),
        ({"max_len": 1 << 26}, "4 GiB"),
    ],
)
def test_caches_that_no_kernel_handles_are_refused(fields: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"kv_heads": 1, "head_dim": 64, "max_len": 4, "dtype": "f16"}
    with pytest.raises(PtxgenError, match=message):
        KvAppend(**good | fields)
