"""Running one kernel by itself, with memory that shows what it should not have done."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from urdir.driver.compare import Deviation, MismatchError, compare
from urdir.driver.kernel import Kernel, Param
from urdir.driver.launch import launch, pack
from urdir.driver.memory import Buffer, Region
from urdir.driver.operation import access_of

if TYPE_CHECKING:
    from urdir.driver.device import Device

Array = npt.NDArray[Any]

#: Bytes before and after every written array; keeps its alignment.
GUARD_BYTES = 256
GUARD = 0xA5
#: What an array to be written holds before: NaN in every float type, and for integers an odd value.
POISON_FLOAT, POISON_INTEGER = 0xFF, 0xA5


class ExampleKernel(Kernel, Protocol):
    """A kernel that can make inputs for itself."""

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Random values for every IN and INOUT array and every scalar, by name."""


def check_kernel(device: Device, kernel: ExampleKernel, seed: int = 0) -> tuple[Deviation, ...]:
    """Run a kernel on random inputs and compare with its reference.

    Returns the worst element of every output; raises MismatchError beyond the tolerance, and
    whatever `run_kernel` raises.
    """
    inputs = kernel.make_inputs(np.random.default_rng(seed))
    outputs = run_kernel(device, kernel, inputs)
    return compare(kernel, outputs, kernel.reference(**inputs))


def run_kernel(device: Device, kernel: Kernel, inputs: Mapping[str, Any]) -> dict[str, Array]:
    """Launch a kernel once on memory of its own; returns every OUT and INOUT array by name.

    ``inputs`` holds every IN and INOUT array, shaped and typed as its parameter, and every scalar.
    OUT arrays are poisoned, so that elements that are not written show. Raises MismatchError when
    the kernel changed an input or wrote beside an array, LaunchError and PtxLoadError for a kernel
    that does not fit, CudaError for a fault.
    """
    loaded = device.load(kernel)
    arrays = {p.name: _initial(kernel, p, inputs) for p in kernel.params if p.is_pointer}
    buffers: dict[str, Buffer] = {}
    try:
        args: dict[str, Any] = {}
        for p in kernel.params:
            if p.is_pointer:
                buffers[p.name], args[p.name] = _place(device, p, arrays[p.name])
            else:
                args[p.name] = np.asarray(inputs[p.name]).item()
        with device.create_stream() as stream:
            launch(loaded, pack(kernel, args), stream)
            stream.synchronize()
        return _collect(kernel, buffers, arrays)
    finally:
        for buffer in buffers.values():
            buffer.close()


def _initial(kernel: Kernel, param: Param, inputs: Mapping[str, Any]) -> Array:
    """What a parameter's memory holds before the launch."""
    shape, dtype = kernel.shape_of(param), param.numpy_dtype
    if access_of(param) == "out":
        poison = POISON_FLOAT if param.dtype[0] in "fb" else POISON_INTEGER
        return np.full(kernel.nbytes(param), poison, np.uint8).view(dtype).reshape(shape)
    array = np.ascontiguousarray(inputs[param.name])
    if array.shape != shape or array.dtype != dtype:
        raise MismatchError(
            f"kernel {kernel.name}: {param.name} is {array.dtype} {array.shape}, it must be "
            f"{dtype} {shape}"
        )
    return array


def _place(device: Device, param: Param, array: Array) -> tuple[Buffer, Region]:
    """A buffer with ``array`` in it (a written one between guards), and where it lies.

    Arrays that are only read have no guards: there the emulator faults at the first byte beyond.
    """
    guard = 0 if access_of(param) == "in" else GUARD_BYTES
    content = np.full(array.nbytes + 2 * guard, GUARD, np.uint8)
    content[guard : guard + array.nbytes] = array.reshape(-1).view(np.uint8)
    buffer = device.allocate(content.nbytes, param.name)
    buffer.upload(content)
    return buffer, buffer.slice(guard, array.nbytes)


def _collect(
    kernel: Kernel, buffers: Mapping[str, Buffer], arrays: Mapping[str, Array]
) -> dict[str, Array]:
    outputs = {}
    for p in kernel.params:
        if not p.is_pointer:
            continue
        content = buffers[p.name].download(np.uint8)
        before = arrays[p.name]
        if access_of(p) == "in":
            if (at := np.flatnonzero(content != before.reshape(-1).view(np.uint8))).size:
                raise MismatchError(
                    f"kernel {kernel.name} changed its input {p.name} at byte {at[0]}"
                )
            continue
        inside = content[GUARD_BYTES : GUARD_BYTES + before.nbytes]
        outside = np.concatenate([content[:GUARD_BYTES], content[GUARD_BYTES + before.nbytes :]])
        if (at := np.flatnonzero(outside != GUARD)).size:
            byte = int(at[0]) - GUARD_BYTES + (before.nbytes if at[0] >= GUARD_BYTES else 0)
            raise MismatchError(
                f"kernel {kernel.name} wrote beside its output {p.name} {before.shape}: at byte "
                f"{byte} of {before.nbytes}"
            )
        outputs[p.name] = inside.view(p.numpy_dtype).reshape(before.shape).copy()
    return outputs
