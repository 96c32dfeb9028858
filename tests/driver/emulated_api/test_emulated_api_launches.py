"""Arguments are copied at the call; limits are refused with the driver's errors."""

from __future__ import annotations

import ctypes
import struct
from typing import Any

import cuda.bindings.driver as cuda
import numpy as np
import pytest


def test_every_size_of_parameter_arrives(bench: Any) -> None:
    out = bench.upload(np.zeros(5, np.uint64))
    values = (
        ctypes.c_uint8(0xA1),
        ctypes.c_uint64(out),
        ctypes.c_uint16(0xB2B3),
        ctypes.c_float(1.5),
        ctypes.c_double(-2.25),
        ctypes.c_uint8(0xC4),
    )
    bench.ok(bench.launch("parameters", bench.arguments(*values), block=(1, 1, 1)))
    found = bench.download(out, np.zeros(5, np.uint64)).tolist()
    (single,) = struct.unpack("<I", struct.pack("<f", 1.5))
    (double,) = struct.unpack("<Q", struct.pack("<d", -2.25))
    assert found == [0xA1, 0xB2B3, single, double, 0xC4]


def test_arguments_are_copied_at_the_call(bench: Any) -> None:
    x = bench.upload(np.zeros(4, np.uint32))
    value = ctypes.c_uint32(1)
    arguments = bench.arguments(x, x, ctypes.c_uint32(4), value)
    bench.ok(bench.launch("add", arguments))
    value.value = 100
    assert bench.download(x, np.zeros(4, np.uint32)).tolist() == [1] * 4


def test_many_ctas(bench: Any) -> None:
    x = np.arange(1000, dtype=np.uint32)
    at = bench.upload(x)
    bench.ok(bench.launch("add", bench.add(at, at, 1000, 5), grid=(8, 1, 1), block=(128, 1, 1)))
    assert (bench.download(at, x) == x + 5).all()


@pytest.mark.parametrize(
    ("grid", "block", "shared", "error"),
    [
        ((0, 1, 1), (1, 1, 1), 0, "INVALID_VALUE"),
        ((1, 0, 1), (1, 1, 1), 0, "INVALID_VALUE"),
        ((1, 65536, 1), (1, 1, 1), 0, "INVALID_VALUE"),
        ((1, 1, 1), (0, 1, 1), 0, "INVALID_VALUE"),
        ((1, 1, 1), (1025, 1, 1), 0, "INVALID_VALUE"),
        ((1, 1, 1), (1, 1, 65), 0, "INVALID_VALUE"),
        ((1, 1, 1), (32, 33, 1), 0, "INVALID_VALUE"),
        ((1, 1, 1), (65, 1, 1), 0, "LAUNCH_OUT_OF_RESOURCES"),
        ((1, 1, 1), (64, 1, 1), 47 * 1024 + 1, "INVALID_VALUE"),
    ],
)
def test_limits(bench: Any, grid: Any, block: Any, shared: int, error: str) -> None:
    out = bench.arguments(bench.upload(np.zeros(4, np.uint32)))
    bench.fails(bench.launch("shared_1k", out, 0, grid, block, shared), error)
    assert "shared_1k" in bench.api.last_refusal
    bench.ok(bench.launch("shared_1k", out, 0, (1, 1, 1), (64, 1, 1), 47 * 1024))
    bench.ok(bench.api.cuCtxSynchronize())


def test_missing_arguments_and_bad_handles(bench: Any) -> None:
    bench.fails(bench.launch("add", 0), "INVALID_VALUE")
    bench.fails(bench.launch("add", bench.arguments(0, 0, 0, 0), stream=99), "INVALID_HANDLE")
    bad = bench.api.cuLaunchKernel(5, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)
    bench.fails(bad, "INVALID_HANDLE")
    function = bench.function("add")
    result = bench.api.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, 0, 77)
    bench.fails(result, "NOT_SUPPORTED")


def test_cooperative_launches_must_fit(bench: Any) -> None:
    """4 SMs of 2048 threads hold 8 CTAs of 1024."""
    x = bench.upload(np.zeros(8192, np.uint32))
    arguments, block = bench.add(x, x, 8192, 1), (1024, 1, 1)
    bench.ok(bench.launch_ex("add", arguments, 0, (8, 1, 1), block, cooperative=1))
    too_large = bench.launch_ex("add", arguments, 0, (9, 1, 1), block, cooperative=1)
    bench.fails(too_large, "COOPERATIVE_LAUNCH_TOO_LARGE")
    bench.ok(bench.launch_ex("add", arguments, 0, (9, 1, 1), block, cooperative=0))
    function, extents = bench.function("add"), (8, 1, 1, 1024, 1, 1)
    bench.ok(bench.api.cuLaunchCooperativeKernel(function, *extents, 0, 0, arguments))
    assert (bench.download(x, np.zeros(8192, np.uint32)) == 3).all()


def test_cluster_limits(bench: Any, make_bench: Any) -> None:
    x = bench.upload(np.zeros(64, np.uint32))
    arguments = bench.add(x, x, 64, 1)
    bench.ok(bench.launch_ex("add", arguments, 0, (4, 1, 1), cluster=(2, 1, 1)))
    for grid, cluster in (
        ((3, 1, 1), (2, 1, 1)),
        ((16, 1, 1), (16, 1, 1)),
        ((32, 1, 1), (32, 1, 1)),
    ):
        result = bench.launch_ex("add", arguments, 0, grid, cluster=cluster)
        bench.fails(result, "INVALID_CLUSTER_SIZE")
    large = cuda.CUfunction_attribute.CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED
    bench.ok(bench.api.cuFuncSetAttribute(bench.function("add"), large, 1))
    bench.ok(bench.launch_ex("add", arguments, 0, (16, 1, 1), cluster=(16, 1, 1)))
    config = cuda.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = 4, 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = 1024, 1, 1
    attribute = cuda.CUlaunchAttribute()
    attribute.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    dim = attribute.value.clusterDim
    dim.x, dim.y, dim.z = 2, 1, 1
    config.attrs, config.numAttrs = [attribute], 1
    function = bench.function("add")
    assert bench.ok(bench.api.cuOccupancyMaxActiveClusters(function, config)) == 4


def test_number_of_attributes_is_believed(bench: Any) -> None:
    """Assigning ``attrs`` leaves ``numAttrs`` at 0, and then there are none."""
    config = cuda.CUlaunchConfig()
    config.gridDimX = config.gridDimY = config.gridDimZ = 1
    config.blockDimX = config.blockDimY = config.blockDimZ = 1
    attribute = cuda.CUlaunchAttribute()
    attribute.id = cuda.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    dim = attribute.value.clusterDim
    dim.x, dim.y, dim.z = 2, 1, 1
    config.attrs = [attribute]
    x = bench.upload(np.zeros(1, np.uint32))
    arguments, function = bench.add(x, x, 1, 1), bench.function("add")
    bench.ok(bench.api.cuLaunchKernelEx(config, function, arguments, 0))
    config.numAttrs = 1
    result = bench.api.cuLaunchKernelEx(config, function, arguments, 0)
    bench.fails(result, "INVALID_CLUSTER_SIZE")
