"""Test harness: runs one kernel in memory that reveals wrong accesses."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from statistics import median
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from urdir.driver.compare import Deviation, compare
from urdir.driver.errors import LaunchError, MismatchError
from urdir.driver.guarded import GUARD_BYTES, GuardedBuffer, poison
from urdir.driver.kernel import Kernel, access_of, signature
from urdir.driver.launch import launch, pack
from urdir.ptxgen.ptx.launch import Param

if TYPE_CHECKING:
    from urdir.driver.device import Device

Array = npt.NDArray[Any]


class ExampleKernel(Kernel, Protocol):
    """A kernel that can make its own inputs."""

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Random values for every IN and INOUT array and every scalar, by name."""


def check_kernel(
    device: Device, kernel: ExampleKernel, seed: int = 0, *, sanitize: bool = True
) -> tuple[Deviation, ...]:
    """Run a kernel on random inputs and compare with its reference.

    On the emulator it runs under the sanitizer, several times slower, which finds races, missing
    fences and barriers that not all threads reach; ``sanitize=False`` switches it off. On a GPU
    there is no such check: run the whole process under compute-sanitizer.

    Returns the worst element of every output; raises MismatchError beyond the tolerance, and as
    `run_kernel`: CudaError for findings of the sanitizer.
    """
    signature(kernel)  # LaunchError for a class or another object
    inputs = kernel.make_inputs(np.random.default_rng(seed))
    with device.api.sanitizing() if sanitize and device.is_emulated else nullcontext():
        outputs = run_kernel(device, kernel, inputs)
    return compare(kernel, outputs, kernel.reference(**inputs))


def run_kernel(device: Device, kernel: Kernel, inputs: Mapping[str, Any]) -> dict[str, Array]:
    """Launch a kernel once in separate memory; returns every OUT and INOUT array by name.

    ``inputs`` holds every IN and INOUT array, shaped and typed as its parameter, and every scalar;
    what has another name is left alone. OUT arrays are poisoned, which reveals unwritten elements.
    Raises MismatchError if the kernel changed an input or wrote outside an array, or an array has
    another shape or type; LaunchError for missing inputs; LaunchError and PtxLoadError for an
    unsuitable kernel; CudaError for a fault.
    """
    with _placed(device, kernel, inputs) as (args, arrays, buffers):
        loaded = device.load(kernel)
        with device.create_stream() as stream:
            launch(loaded, pack(kernel, args), stream)
            stream.synchronize()
        return _collect(kernel, buffers, arrays)


def time_kernel(
    device: Device, kernel: Kernel, inputs: Mapping[str, Any], repeats: int = 5
) -> float:
    """The median time of a launch in milliseconds, between two events on the device.

    Memory and inputs as for `run_kernel`; INOUT arrays are reset before every launch. Launch
    overhead is included, a few microseconds for a small kernel. Raises as `run_kernel`; outputs are
    not compared.
    """
    with _placed(device, kernel, inputs) as (args, arrays, buffers):
        loaded, packed = device.load(kernel), pack(kernel, args)
        changed = [p.name for p in kernel.params if access_of(p) == "inout"]
        times = []
        with device.create_stream() as stream:
            for _ in range(repeats + 1):
                for name in changed:
                    buffers[name].region.upload(arrays[name])
                start = stream.record()
                launch(loaded, packed, stream)
                times.append(stream.record().elapsed_ms_since(start))
        return median(times[1:])  # the first one loads the module


@contextmanager
def _placed(
    device: Device, kernel: Kernel, inputs: Mapping[str, Any]
) -> Iterator[tuple[dict[str, Any], dict[str, Array], dict[str, GuardedBuffer]]]:
    """Arguments for a launch in separate memory; its initial contents, and the memory."""
    takes = {p.name for p in signature(kernel).params if access_of(p) != "out"}
    if missing := takes - {*inputs}:
        raise LaunchError(
            f"kernel {kernel.name} takes {', '.join(sorted(takes))}: missing "
            f"{', '.join(sorted(missing))}"
        )
    arrays = {p.name: _initial(kernel, p, inputs) for p in kernel.params if p.is_pointer}
    with ExitStack() as owners:
        buffers: dict[str, GuardedBuffer] = {}
        args: dict[str, Any] = {}
        for p in kernel.params:
            if p.is_pointer:
                # No guards around read-only arrays: the emulator faults at the first byte beyond.
                guard = 0 if access_of(p) == "in" else GUARD_BYTES
                buffer = GuardedBuffer(device, arrays[p.name], p.name, guard=guard)
                buffers[p.name] = owners.enter_context(buffer)
                args[p.name] = buffer.region
            else:
                args[p.name] = np.asarray(inputs[p.name]).item()
        yield args, arrays, buffers


def _initial(kernel: Kernel, param: Param, inputs: Mapping[str, Any]) -> Array:
    """The initial contents of a parameter's memory."""
    shape, dtype = kernel.shape_of(param), param.numpy_dtype
    if access_of(param) == "out":
        return poison(shape, dtype, floats=param.dtype[0] in "fb")
    array = np.ascontiguousarray(inputs[param.name])
    if array.shape != shape or array.dtype != dtype:
        raise MismatchError(
            f"kernel {kernel.name}: {param.name} is {array.dtype} {array.shape}, it must be "
            f"{dtype} {shape}"
        )
    return array


def _collect(
    kernel: Kernel, buffers: Mapping[str, GuardedBuffer], arrays: Mapping[str, Array]
) -> dict[str, Array]:
    outputs = {}
    for name, buffer in buffers.items():
        found, before = buffer.download(), arrays[name]
        if not buffer.guard:
            different = found.reshape(-1).view(np.uint8) != before.reshape(-1).view(np.uint8)
            if (at := np.flatnonzero(different)).size:
                raise MismatchError(
                    f"kernel {kernel.name} changed its input {name} at byte {at[0]}"
                )
        elif (byte := buffer.first_beside()) is not None:
            raise MismatchError(
                f"kernel {kernel.name} wrote beside its output {name} {before.shape}: at byte "
                f"{byte} of {before.nbytes}"
            )
        else:
            outputs[name] = found
    return outputs
