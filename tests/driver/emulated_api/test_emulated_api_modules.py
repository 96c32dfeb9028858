"""Linking, images, loading, errors of the JIT compiler, functions."""

from __future__ import annotations

import ctypes
from typing import Any

import cuda.bindings.driver as cuda
import numpy as np
import pytest

from urdir.driver.emulator.images import MAGIC

J = cuda.CUjit_option
PTX_INPUT = cuda.CUjitInputType.CU_JIT_INPUT_PTX
EMPTY = ".version 7.0\n.target sm_75\n.address_size 64\n.visible .entry empty()\n{\n    ret;\n}\n"


class Link:
    """A link with both log buffers."""

    def __init__(self, bench: Any, size: int = 500) -> None:
        self.bench = bench
        self.info, self.error = bytearray(size), bytearray(size)
        options = {
            J.CU_JIT_INFO_LOG_BUFFER: self.info,
            J.CU_JIT_INFO_LOG_BUFFER_SIZE_BYTES: size,
            J.CU_JIT_ERROR_LOG_BUFFER: self.error,
            J.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES: size,
        }
        arguments = len(options), list(options), list(options.values())
        self.state = bench.ok(bench.api.cuLinkCreate(*arguments))

    def add(self, text: str) -> Any:
        data = text.encode() + b"\0"
        return self.bench.api.cuLinkAddData(
            self.state, PTX_INPUT, data, len(data), b"name.ptx", 0, [], []
        )

    def image(self) -> bytes:
        address, size = self.bench.ok(self.bench.api.cuLinkComplete(self.state))
        return ctypes.string_at(address, size)

    def log(self, which: str = "error") -> str:
        data: bytearray = getattr(self, which)
        return bytes(data).split(b"\0", 1)[0].decode()


def link(bench: Any, text: str) -> bytes:
    made = Link(bench)
    bench.ok(made.add(text))
    image = made.image()
    assert "empty" in made.log("info")
    assert made.log("error") == ""
    bench.ok(bench.api.cuLinkDestroy(made.state))
    bench.fails(bench.api.cuLinkComplete(made.state), "INVALID_HANDLE")
    return image


def test_link_and_load(bench: Any, make_bench: Any) -> None:
    image = link(bench, EMPTY)
    assert image.startswith(MAGIC)
    assert image == link(make_bench(), EMPTY)
    api = bench.api
    copies = [image, bytearray(image), np.frombuffer(image, np.uint8)]
    copies.append(np.frombuffer(image + b"tail", np.uint8).ctypes.data)
    keep = np.frombuffer(image + b"tail", np.uint8)
    copies[-1] = keep.ctypes.data
    for source in copies:
        module = bench.ok(api.cuModuleLoadData(source))
        function = bench.ok(api.cuModuleGetFunction(module, b"empty"))
        assert function == bench.ok(api.cuModuleGetFunction(module, b"empty"))
        assert bench.ok(api.cuFuncGetModule(function)) == module
        assert bench.ok(api.cuFuncGetName(function)) == b"empty"
        bench.fails(api.cuModuleGetFunction(module, b"full"), "NOT_FOUND")
        bench.ok(api.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0))
        bench.ok(api.cuModuleUnload(module))
        bench.fails(api.cuModuleUnload(module), "INVALID_HANDLE")
        bench.fails(api.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0), "INVALID_HANDLE")
    bench.ok(api.cuCtxSynchronize())


def test_foreign_and_damaged_images(bench: Any, make_bench: Any) -> None:
    image, load = link(bench, EMPTY), bench.api.cuModuleLoadData
    other = make_bench(target="sm_80")
    other.fails(other.api.cuModuleLoadData(image), "NO_BINARY_FOR_GPU")
    bench.fails(load(b"\x7fELF" + bytes(100)), "NO_BINARY_FOR_GPU")
    bench.fails(load(image[:-3]), "INVALID_IMAGE")
    bench.fails(load(image[:20]), "INVALID_IMAGE")
    bench.fails(load(image[:-3] + b"xyz"), "INVALID_IMAGE")
    bench.fails(load(b""), "INVALID_IMAGE")
    bench.fails(load(b"what is this"), "INVALID_IMAGE")
    bench.fails(load(0), "INVALID_VALUE")


SPECIFIC = EMPTY.replace("7.0", "8.0").replace("sm_75", "sm_90a")


def test_code_for_one_architecture_alone(make_bench: Any) -> None:
    hopper, portable = make_bench(target="sm_90a"), make_bench(target="sm_90")
    for text in (SPECIFIC, EMPTY, EMPTY.replace("7.0", "7.8").replace("sm_75", "sm_90")):
        hopper.ok(hopper.api.cuModuleLoadData(text.encode()))
    for target in ("sm_90", "sm_100", "sm_100a"):
        other = make_bench(target=target)
        other.fails(other.api.cuModuleLoadData(SPECIFIC.encode()), "INVALID_PTX")
        made = Link(other)
        other.fails(made.add(SPECIFIC), "INVALID_PTX")
        assert f"the module is for sm_90a, which the device ({target}) is not" in made.log()
    hopper.ok(hopper.api.cuModuleLoadData(link(portable, EMPTY)))
    portable.fails(portable.api.cuModuleLoadData(link(hopper, EMPTY)), "NO_BINARY_FOR_GPU")


BROKEN = EMPTY.replace("    ret;\n", "    mov.u32 %r, 1;\n    ret;\n")


@pytest.mark.parametrize(
    ("text", "error", "log"),
    [
        (BROKEN, "INVALID_PTX", "line 6; error"),
        (EMPTY.replace("ret;", "fly.away;"), "INVALID_PTX", "line 6; error"),
        (EMPTY.replace("7.0", "9.9"), "UNSUPPORTED_PTX_VERSION", "current version is '9.0'"),
        (EMPTY.replace("sm_75", "sm_100"), "INVALID_PTX", "sm_100"),
        (EMPTY.replace("sm_75", "sm_80a"), "INVALID_PTX", "sm_80a"),
        ("ret;", "INVALID_PTX", ".version"),
        (EMPTY.replace("}", ""), "INVALID_PTX", "line"),
    ],
)
def test_ptx_that_does_not_compile(bench: Any, text: str, error: str, log: str) -> None:
    made = Link(bench)
    bench.fails(made.add(text), error)
    assert made.log().startswith("ptxas ")
    assert log in made.log()
    assert made.log("info") == ""
    if ".version" in text:
        bench.fails(bench.api.cuModuleLoadData(text.encode()), error)
        buffer = bytearray(300)
        options = [J.CU_JIT_ERROR_LOG_BUFFER, J.CU_JIT_ERROR_LOG_BUFFER_SIZE_BYTES]
        result = bench.api.cuModuleLoadDataEx(text.encode(), 2, options, [buffer, 300])
        bench.fails(result, error)
        assert log in buffer.decode()


def test_log_is_cut_to_its_buffer(bench: Any) -> None:
    made = Link(bench, size=12)
    bench.fails(made.add(BROKEN), "INVALID_PTX")
    assert made.log() == "ptxas appli"


@pytest.mark.parametrize(
    ("driver_version", "newest"), [(13000, "9.0"), (12040, "8.4"), (12090, "8.8")]
)
def test_driver_and_ptx_versions(make_bench: Any, driver_version: int, newest: str) -> None:
    bench = make_bench(driver_version=driver_version)
    bench.ok(bench.api.cuModuleLoadData(EMPTY.replace("7.0", newest).encode()))
    newer = f"{newest[:-1]}{int(newest[-1]) + 1}"
    result = bench.api.cuModuleLoadData(EMPTY.replace("7.0", newer).encode())
    bench.fails(result, "UNSUPPORTED_PTX_VERSION")


def test_linking_for_another_target(bench: Any, make_bench: Any) -> None:
    options = [J.CU_JIT_TARGET], [cuda.CUjit_target.CU_TARGET_COMPUTE_80]
    state = bench.ok(bench.api.cuLinkCreate(1, *options))
    data = EMPTY.encode()
    bench.ok(bench.api.cuLinkAddData(state, PTX_INPUT, data, len(data), b"x", 0, None, None))
    image = ctypes.string_at(*bench.ok(bench.api.cuLinkComplete(state)))
    bench.fails(bench.api.cuModuleLoadData(image), "NO_BINARY_FOR_GPU")
    other = make_bench(target="sm_80")
    other.ok(other.api.cuModuleLoadData(image))


def test_injected_failures(bench: Any) -> None:
    bench.api.inject("module_load", nth=2)
    bench.ok(bench.api.cuModuleLoadData(EMPTY.encode()))
    bench.fails(bench.api.cuModuleLoadData(EMPTY.encode()), "INVALID_IMAGE")
    bench.ok(bench.api.cuModuleLoadData(EMPTY.encode()))
    bench.api.inject("link")
    made = Link(bench)
    bench.ok(made.add(EMPTY))
    bench.fails(bench.api.cuLinkComplete(made.state), "OUT_OF_MEMORY")


def test_parameter_layout(bench: Any) -> None:
    function = bench.function("parameters")
    info = [bench.ok(bench.api.cuFuncGetParamInfo(function, i)) for i in range(6)]
    # .u8 a, .u64 out, .u16 b, .f32 c, .f64 d, .u8 e
    assert info == [(0, 1), (8, 8), (16, 2), (20, 4), (24, 8), (32, 1)]
    bench.fails(bench.api.cuFuncGetParamInfo(function, 6), "INVALID_VALUE")
    assert bench.ok(bench.api.cuFuncGetParamCount(function)) == 6


def test_function_attributes(bench: Any) -> None:
    api, attribute = bench.api, cuda.CUfunction_attribute
    function = bench.function("shared_1k")

    def get(name: str) -> int:
        return int(
            bench.ok(
                api.cuFuncGetAttribute(getattr(attribute, f"CU_FUNC_ATTRIBUTE_{name}"), function)
            )
        )

    assert get("SHARED_SIZE_BYTES") == 1024
    assert get("MAX_THREADS_PER_BLOCK") == 64
    assert get("MAX_DYNAMIC_SHARED_SIZE_BYTES") == 48 * 1024 - 1024
    assert get("PTX_VERSION") == 78
    assert get("BINARY_VERSION") == 90
    assert get("NUM_REGS") > 0
    assert get("LOCAL_SIZE_BYTES") == 0
    dynamic = attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    most = 227 * 1024 - 1024
    bench.fails(api.cuFuncSetAttribute(function, dynamic, most + 1), "INVALID_VALUE")
    bench.ok(api.cuFuncSetAttribute(function, dynamic, most))
    assert get("MAX_DYNAMIC_SHARED_SIZE_BYTES") == most
    assert get("PREFERRED_SHARED_MEMORY_CARVEOUT") == -1
    split = attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
    for percent in (100, 0, -1):
        bench.ok(api.cuFuncSetAttribute(function, split, percent))
        assert get("PREFERRED_SHARED_MEMORY_CARVEOUT") == percent
    for percent in (-2, 101):
        bench.fails(api.cuFuncSetAttribute(function, split, percent), "INVALID_VALUE")
    registers = attribute.CU_FUNC_ATTRIBUTE_NUM_REGS
    bench.fails(api.cuFuncSetAttribute(function, registers, 3), "INVALID_VALUE")


def test_occupancy(bench: Any) -> None:
    occupancy = bench.api.cuOccupancyMaxActiveBlocksPerMultiprocessor
    add, shared = bench.function("add"), bench.function("shared_1k")
    assert bench.ok(occupancy(add, 1024, 0)) == 2
    assert bench.ok(occupancy(add, 33, 0)) == 32
    assert bench.ok(occupancy(add, 256, 100 * 1024)) == 2
    assert bench.ok(occupancy(add, 256, 227 * 1024)) == 1
    assert bench.ok(occupancy(add, 256, 228 * 1024)) == 0
    assert bench.ok(occupancy(shared, 65, 0)) == 0
    bench.fails(occupancy(add, 0, 0), "INVALID_VALUE")


VARIABLES = """.version 7.0
.target sm_75
.address_size 64
.global .align 4 .u32 counter = 41;
.const .align 4 .f32 table[3] = {1.5, 2.5, 3.5};
.visible .entry count()
{
    .reg .b32 %a;
    ld.global.u32 %a, [counter];
    add.u32 %a, %a, 1;
    st.global.u32 [counter], %a;
    ret;
}
"""


def test_variables_of_a_module(bench: Any) -> None:
    api = bench.api
    free = bench.ok(api.cuMemGetInfo())[0]
    one, two = (bench.ok(api.cuModuleLoadData(VARIABLES.encode())) for _ in range(2))
    function = bench.ok(api.cuModuleGetFunction(one, b"count"))
    bench.ok(api.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0))
    values = []
    for module in (one, two):
        address, size = bench.ok(api.cuModuleGetGlobal(module, b"counter"))
        assert size == 4
        values.append(int(bench.download(int(address), np.zeros(1, np.uint32))[0]))
    assert values == [42, 41]
    address, size = bench.ok(api.cuModuleGetGlobal(one, b"table"))
    assert size == 12
    table = bench.download(int(address), np.zeros(3, np.float32))
    assert table.tolist() == [1.5, 2.5, 3.5]
    bench.fails(api.cuModuleGetGlobal(one, b"nothing"), "NOT_FOUND")
    bench.ok(api.cuModuleUnload(one))
    bench.ok(api.cuModuleUnload(two))
    assert bench.ok(api.cuMemGetInfo())[0] == free
