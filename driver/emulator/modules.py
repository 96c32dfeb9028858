"""Linking PTX to images, loading images and PTX, functions of modules and their attributes."""

# ruff: noqa: N802, N803  (names as in the driver API)

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import cuda.bindings.driver as cuda
import numpy as np

from urdir.driver.emulator.calls import (
    Refused,
    c_string,
    driver_call,
    expect_enum,
    host_address,
    size_t,
)
from urdir.driver.emulator.functions import REGISTERS_PER_THREAD, Function, initial_bytes
from urdir.driver.emulator.images import Image, is_text, read_input
from urdir.driver.emulator.jit import JitError, Unit, compile_ptx
from urdir.driver.emulator.logs import JitOptions
from urdir.driver.emulator.module_model import Link, LoadedModule
from urdir.driver.emulator.state import Driver
from urdir.driver.emulator.streams import wait
from urdir.ptxgen.ptx.architecture import number_of, runs_on

# ---- linking ----


@driver_call(results=1)
def cuLinkCreate(driver: Driver, numOptions: Any, options: Any, optionValues: Any) -> Any:
    """Begin a link; log buffers among the options are filled by the calls that follow."""
    link = Link(JitOptions.read(numOptions, options, optionValues))
    return cuda.CUlinkState(driver.context.links.add(link))


@driver_call()
def cuLinkAddData(
    driver: Driver,
    state: Any,
    typename: Any,
    data: Any,
    size: Any,
    name: Any,
    numOptions: Any,
    options: Any,
    optionValues: Any,
) -> None:
    """Compile PTX, or add an image of this emulator."""
    link: Link = driver.context.links[state]
    kind = expect_enum("typename", typename, cuda.CUjitInputType)
    if name is not None:
        c_string(name)
    JitOptions.read(numOptions, options, optionValues)
    found = read_input(data, host_address(data), size_t(size))
    if kind == cuda.CUjitInputType.CU_JIT_INPUT_PTX:
        link.units.append(_compile(driver, found, link.options))
    elif kind == cuda.CUjitInputType.CU_JIT_INPUT_CUBIN:
        link.units.append(_open_image(driver, Image.decode(found)))
    else:
        raise Refused("CUDA_ERROR_INVALID_VALUE", f"{kind.name} is not supported")


@driver_call(results=2)
def cuLinkComplete(driver: Driver, state: Any) -> tuple[int, int]:
    """Address and size of the image, good until cuLinkDestroy."""
    link: Link = driver.context.links[state]
    if code := driver.injections.strike("link"):
        raise Refused(code, "injected fault")
    if len(link.units) != 1:
        raise Refused("CUDA_ERROR_INVALID_IMAGE", f"{len(link.units)} inputs: link one at a time")
    image = link.units[0].image
    link.output = np.frombuffer(image.encode(), np.uint8)
    link.options.write_log("INFO", _report(link.units[0]))
    return int(link.output.ctypes.data), link.output.size


@driver_call()
def cuLinkDestroy(driver: Driver, state: Any) -> None:
    """End a link; its image is gone."""
    driver.context.links.pop(state)


# ---- loading ----


@driver_call(results=1)
def cuModuleLoadData(driver: Driver, image: Any) -> Any:
    """Load an image of this emulator, or compile and load PTX."""
    return _load(driver, image, JitOptions())


@driver_call(results=1)
def cuModuleLoadDataEx(
    driver: Driver, image: Any, numOptions: Any, options: Any, optionValues: Any
) -> Any:
    """Load an image of this emulator, or compile and load PTX, with log buffers."""
    return _load(driver, image, JitOptions.read(numOptions, options, optionValues))


@driver_call(defers=True)
def cuModuleUnload(driver: Driver, hmod: Any) -> None:
    """Unload a module; its functions are invalid, launches already queued still run."""
    context = driver.context
    module: LoadedModule = context.modules.pop(hmod)
    for number in module.functions.values():
        context.functions.pop(number)
    if module.symbols:
        wait(driver, context.scheduler.finish_all)
    for address in module.symbols.values():
        context.memory.free(address)


@driver_call(results=1)
def cuModuleGetFunction(driver: Driver, hmod: Any, name: Any) -> Any:
    """The function called ``name``; the same handle each time."""
    module: LoadedModule = driver.context.modules[hmod]
    wanted = c_string(name).decode()
    if wanted not in module.unit.programs:
        has = ", ".join(module.unit.programs) or "none"
        raise Refused("CUDA_ERROR_NOT_FOUND", f"no kernel {wanted!r}; the module has {has}")
    if wanted not in module.functions:
        unit = module.unit
        program = unit.programs[wanted]
        function = Function(
            unit.module,
            program,
            module.symbols,
            module.handle,
            driver.properties,
            unit.image.ptx,
        )
        module.functions[wanted] = driver.context.functions.add(function)
    return cuda.CUfunction(module.functions[wanted])


@driver_call(results=2)
def cuModuleGetGlobal(driver: Driver, hmod: Any, name: Any) -> tuple[Any, int]:
    """Address and size of a variable of the module."""
    module: LoadedModule = driver.context.modules[hmod]
    address = module.symbols.get(c_string(name).decode())
    if address is None:
        has = ", ".join(module.symbols) or "none"
        raise Refused("CUDA_ERROR_NOT_FOUND", f"no variable {name!r}; the module has {has}")
    found = driver.context.memory.find(address)
    return cuda.CUdeviceptr(address), found.nbytes if found else 0


@driver_call(results=1)
def cuModuleGetFunctionCount(driver: Driver, mod: Any) -> int:
    """How many kernels a module has."""
    module: LoadedModule = driver.context.modules[mod]
    return len(module.unit.module.entries)


@driver_call(results=1)
def cuModuleGetLoadingMode(driver: Driver) -> Any:
    """Eager loading: modules are loaded as a whole."""
    return cuda.CUmoduleLoadingMode.CU_MODULE_EAGER_LOADING


# ---- functions ----

# Readable function attributes; missing ones are 0.
_ATTRIBUTES: Mapping[str, Callable[[Function], int]] = {
    "MAX_THREADS_PER_BLOCK": lambda f: f.program.max_threads,
    "SHARED_SIZE_BYTES": lambda f: f.program.static_shared_bytes,
    "NUM_REGS": lambda f: REGISTERS_PER_THREAD,
    "PTX_VERSION": lambda f: f.ptx_version[0] * 10 + f.ptx_version[1],
    "BINARY_VERSION": lambda f: f.device.sm,
    "MAX_DYNAMIC_SHARED_SIZE_BYTES": lambda f: f.max_dynamic_shared,
    "PREFERRED_SHARED_MEMORY_CARVEOUT": lambda f: f.shared_carveout,
    "CLUSTER_SIZE_MUST_BE_SET": lambda f: int(f.needs_cluster),
    "REQUIRED_CLUSTER_WIDTH": lambda f: (f.required_cluster or (0, 0, 0))[0],
    "REQUIRED_CLUSTER_HEIGHT": lambda f: (f.required_cluster or (0, 0, 0))[1],
    "REQUIRED_CLUSTER_DEPTH": lambda f: (f.required_cluster or (0, 0, 0))[2],
    "NON_PORTABLE_CLUSTER_SIZE_ALLOWED": lambda f: int(f.allows_large_clusters),
}


@driver_call(results=1)
def cuFuncGetAttribute(driver: Driver, attrib: Any, hfunc: Any) -> int:
    """An attribute of a kernel; registers are a constant, local memory is 0."""
    function: Function = driver.context.functions[hfunc]
    name = expect_enum("attrib", attrib, cuda.CUfunction_attribute).name
    read = _ATTRIBUTES.get(name.removeprefix("CU_FUNC_ATTRIBUTE_"))
    return read(function) if read else 0


@driver_call()
def cuFuncSetAttribute(driver: Driver, hfunc: Any, attrib: Any, value: Any) -> None:
    """Allow more dynamic shared memory, or clusters of more than 8 CTAs; prefer a carve-out."""
    function: Function = driver.context.functions[hfunc]
    name = expect_enum("attrib", attrib, cuda.CUfunction_attribute).name
    number = int(value)
    if name == "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES":
        if not 0 <= number <= function.max_shared:
            limit = f"{number} bytes, the most is {function.max_shared}"
            raise Refused("CUDA_ERROR_INVALID_VALUE", f"{function.name}: {limit}")
        function.max_dynamic_shared = number
    elif name == "CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED":
        function.allows_large_clusters = bool(number)
    elif name == "CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT":
        if not -1 <= number <= 100:
            raise Refused("CUDA_ERROR_INVALID_VALUE", f"{function.name}: {number} percent")
        function.shared_carveout = number
    else:
        raise Refused("CUDA_ERROR_INVALID_VALUE", f"{name} cannot be set")


@driver_call(results=2)
def cuFuncGetParamInfo(driver: Driver, func: Any, paramIndex: Any) -> tuple[int, int]:
    """Offset and size of a parameter in the parameter block."""
    function: Function = driver.context.functions[func]
    index = size_t(paramIndex)
    if index >= len(function.parameters):
        has = len(function.parameters)
        raise Refused("CUDA_ERROR_INVALID_VALUE", f"{function.name} has {has} parameters")
    return function.parameters[index]


@driver_call(results=1)
def cuFuncGetParamCount(driver: Driver, func: Any) -> int:
    """How many parameters a kernel takes."""
    function: Function = driver.context.functions[func]
    return len(function.parameters)


@driver_call(results=1)
def cuFuncGetModule(driver: Driver, hfunc: Any) -> Any:
    """The module of a function."""
    function: Function = driver.context.functions[hfunc]
    return cuda.CUmodule(function.module)


@driver_call(results=1)
def cuFuncGetName(driver: Driver, hfunc: Any) -> bytes:
    """The entry name of a function."""
    function: Function = driver.context.functions[hfunc]
    return function.name.encode()


@driver_call(results=1)
def cuOccupancyMaxActiveBlocksPerMultiprocessor(
    driver: Driver, func: Any, blockSize: Any, dynamicSMemSize: Any
) -> int:
    """CTAs of one SM at once."""
    function: Function = driver.context.functions[func]
    if int(blockSize) < 1:
        raise Refused("CUDA_ERROR_INVALID_VALUE", f"a block of {int(blockSize)} threads")
    return function.blocks_per_sm(int(blockSize), size_t(dynamicSMemSize))


# ---- helpers ----


def _compile(driver: Driver, data: bytes, options: JitOptions) -> Unit:
    try:
        text = data.split(b"\0", 1)[0].decode("utf-8", errors="replace")
        target = options.target or driver.properties.target
        return compile_ptx(text, target, driver.ptx_version)
    except JitError as error:
        options.write_log("ERROR", error.log)
        raise


def _open_image(driver: Driver, image: Image) -> Unit:
    device = driver.properties.target
    if number_of(image.target) != number_of(device) or not runs_on(image.target, device):
        message = f"an image for {image.target} on {device}"
        raise Refused("CUDA_ERROR_NO_BINARY_FOR_GPU", message)
    return compile_ptx(image.ptx, device, driver.ptx_version)


def _load(driver: Driver, image: Any, options: JitOptions) -> Any:
    if code := driver.injections.strike("module_load"):
        raise Refused(code, "injected fault")
    data = read_input(image, host_address(image))
    if is_text(data):
        unit = _compile(driver, data, options)
    else:
        unit = _open_image(driver, Image.decode(data))
    module = LoadedModule(unit, _place_variables(driver, unit))
    module.handle = driver.context.modules.add(module)
    options.write_log("INFO", _report(unit))
    return cuda.CUmodule(module.handle)


def _place_variables(driver: Driver, unit: Unit) -> dict[str, int]:
    """Device memory for the module's .global and .const variables, with their first values."""
    memory = driver.context.memory
    symbols = {}
    for variable in unit.module.variables:
        if variable.space in ("global", "const"):
            symbols[variable.name] = address = memory.allocate(variable.nbytes)
            memory.fill(address, 0, variable.nbytes)
            memory.write(address, initial_bytes(variable))
    return symbols


def _report(unit: Unit) -> str:
    return "\n".join(
        f"ptxas info    : Compiling entry function '{name}' for '{unit.image.target}'"
        for name in unit.module.entries
    )
