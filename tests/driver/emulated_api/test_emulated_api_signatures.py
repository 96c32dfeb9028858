"""The emulated functions are called like the real ones, and none that the layer uses is missing."""

from __future__ import annotations

import ctypes
import inspect
import re
from pathlib import Path
from typing import Any

import cuda.bindings.driver as cuda
import numpy as np
import pytest

import urdir.driver
from urdir.driver.emulator.api import FUNCTIONS, Api


@pytest.mark.parametrize("name", sorted(FUNCTIONS))
def test_parameters_are_those_of_the_bindings(name: str) -> None:
    real = inspect.signature(getattr(cuda, name)).parameters.values()
    ours = inspect.signature(getattr(Api(), name)).parameters.values()
    assert [(p.name, p.default, p.kind) for p in ours] == [
        (p.name, p.default, p.kind) for p in real
    ]


def test_every_function_that_the_driver_layer_names_is_emulated() -> None:
    assert urdir.driver.__file__ is not None
    used = set()
    for file in Path(urdir.driver.__file__).parent.glob("*.py"):
        used |= set(re.findall(r"\bcu[A-Z]\w*", file.read_text(encoding="utf-8")))
    functions = {name for name in used if inspect.isroutine(getattr(cuda, name, None))}
    assert len(functions) > 30
    assert functions - FUNCTIONS.keys() == set()


@pytest.mark.parametrize("name", ["cuMemcpyAtoA", "cuCtxCreate", "cuNoSuchThing", "__wrapped__"])
def test_what_is_not_emulated_is_an_attribute_error(name: str) -> None:
    assert not hasattr(Api(), name)


@pytest.mark.parametrize(
    "name", ["CUresult", "CUdeviceptr", "CUlaunchConfig", "CUgraphEdgeData", "CU_STREAM_LEGACY"]
)
def test_types_are_those_of_the_bindings(name: str) -> None:
    assert getattr(Api(), name) is getattr(cuda, name)


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("cuMemAlloc", ("a",)),
        ("cuMemAlloc", ()),
        ("cuMemFree", ("x",)),
        ("cuMemcpyHtoD", (0, [1], 4)),
        ("cuMemcpyHtoD", (0, "text", 4)),
        ("cuModuleGetFunction", (1, "name")),
        ("cuModuleLoadData", ("text",)),
        ("cuLaunchKernel", (1, 1, 1, 1, 1, 1, 1, 0, 0, [], 0)),
        ("cuLaunchKernel", (1, 1, 1, 1, 1, 1, 1, 0, 0, 0, None)),
        ("cuLaunchKernel", (1, 1, 1, 1, 1, 1, 1, 0, 0, 0, [])),
        ("cuLinkCreate", (1, ["x"], [5])),
        ("cuLinkCreate", (1, [cuda.CUjit_option.CU_JIT_ERROR_LOG_BUFFER], [5])),
        ("cuGraphAddKernelNode", (1, [3], 1, None)),
        ("cuGraphDebugDotPrint", (1, "path", 0)),
    ],
)
def test_wrong_types_raise_as_in_the_bindings(bench: Any, name: str, args: Any) -> None:
    """The bindings refuse these before they look for libcuda, so that both can be asked."""
    with pytest.raises(TypeError):
        getattr(cuda, name)(*args)
    function = bench.function("add")
    module = bench.ok(bench.api.cuFuncGetModule(function))
    graph = bench.ok(bench.api.cuGraphCreate(0))
    valid = {"cuLaunchKernel": function, "cuModuleGetFunction": module}
    valid |= {"cuGraphAddKernelNode": graph, "cuGraphDebugDotPrint": graph}
    if name in valid:
        args = (valid[name], *args[1:])
    with pytest.raises(TypeError):
        getattr(bench.api, name)(*args)


@pytest.mark.parametrize(
    ("name", "args", "error"),
    [
        ("cuMemAlloc", (-1,), OverflowError),
        ("cuMemsetD8", (0, 300, 1), OverflowError),
        ("cuMemsetD8", (0, -1, 1), OverflowError),
        ("cuEventCreate", (-1,), OverflowError),
        ("cuLinkCreate", (1, [], []), RuntimeError),
        ("cuGraphAddKernelNode", (1, [], 3, None), RuntimeError),
    ],
)
def test_wrong_values_raise_as_in_the_bindings(
    bench: Any, name: str, args: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        getattr(cuda, name)(*args)
    with pytest.raises(error):
        getattr(bench.api, name)(*args)


def test_host_memory_is_a_buffer_or_an_address(bench: Any) -> None:
    address = bench.upload(np.zeros(4, np.uint8))
    array = np.array([1, 2, 3, 4], np.uint8)
    sources = [array, array.tobytes(), bytearray(array), memoryview(array), array.ctypes.data]
    sources.append((ctypes.c_uint8 * 4)(*array))
    for source in sources:
        bench.ok(bench.api.cuMemsetD8(address, 0, 4))
        bench.ok(bench.api.cuMemcpyHtoD(address, source, 4))
        assert bench.download(address, array).tolist() == [1, 2, 3, 4]
    # The bindings would take the value of a one-element array for the address.
    with pytest.raises(TypeError, match="array"):
        bench.api.cuMemcpyHtoD(address, array[:1], 1)


def test_keywords_are_taken(bench: Any) -> None:
    address = bench.ok(bench.api.cuMemAlloc(bytesize=16))
    bench.ok(bench.api.cuMemsetD8(dstDevice=address, uc=7, N=16))
    assert bench.download(int(address), np.empty(16, np.uint8)).tolist() == [7] * 16
