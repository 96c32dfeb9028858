"""Launching: arguments checked and packed into owned storage, one driver call."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from urdir.driver.errors import LaunchError, LifetimeError, error_of
from urdir.driver.kernel import SCALAR_FORMATS, Kernel, Signature, signature
from urdir.driver.memory import Buffer, Region
from urdir.driver.pinned import PinnedBuffer
from urdir.ptxgen.ptx.launch import Param

if TYPE_CHECKING:
    from urdir.driver.module import LoadedKernel
    from urdir.driver.stream import Stream

Argument = Region | PinnedBuffer | int | float

#: Alignment of every pointer argument in bytes, assumed by the kernels' vector loads.
POINTER_ALIGNMENT = 16


class PackedArguments:
    """The arguments of one launch: their bytes, the pointer array to them, and their memory.

    ``address`` is the value for a driver call's ``kernelParams`` (0 without parameters), valid
    while this object lives; ``regions`` are the memory of the pointers, by parameter name, and
    ``places`` their device addresses, in the same order; ``data``
    is the parameter block in PTX layout; ``node`` is what `add_kernel_node` has made of them.
    """

    __slots__ = (
        "_attributes",
        "_bound",
        "_config",
        "_pointers",
        "_storage",
        "address",
        "kernel",
        "node",
        "places",
        "regions",
    )

    def __init__(
        self,
        kernel: Kernel,
        storage: Any,
        pointers: Any,
        regions: dict[str, Region | PinnedBuffer],
        places: tuple[int, ...],
    ) -> None:
        self.kernel = kernel
        self.regions, self.places = regions, places
        self.address = ctypes.addressof(pointers) if len(pointers) else 0
        self._storage = storage
        self._pointers = pointers
        self._bound: tuple[LoadedKernel, Stream] | None = None
        self._config: Any = None
        self._attributes: list[Any] = []
        self.node: tuple[LoadedKernel, Any, Sequence[tuple[Any, Any]]] | None = None

    @property
    def data(self) -> bytes:
        """The parameter block as the kernel sees it."""
        return bytes(self._storage)

    def bind(self, loaded: LoadedKernel, stream: Stream) -> Any:
        """The CUlaunchConfig for a launch of ``loaded`` on ``stream``, created once for the pair.

        Raises LifetimeError if a buffer was closed meanwhile, LaunchError if ``loaded`` is another
        kernel or something belongs to another device.
        """
        for owner in map(_owner, self.regions.values()):
            if owner.closed:
                raise LifetimeError(
                    f"kernel {self.kernel.name}: {owner.kind} {owner.name!r} is closed"
                )
        bound = self._bound
        if bound is None or bound[0] is not loaded or bound[1] is not stream:
            self._check_match(loaded, stream)
            self._config, self._attributes = _make_config(loaded.device.api, self.kernel, stream)
            self._bound = loaded, stream
        return self._config

    def _check_match(self, loaded: LoadedKernel, stream: Stream) -> None:
        target = loaded.device.native_target
        if loaded.kernel is not self.kernel and loaded.kernel.key(target) != self.kernel.key(
            target
        ):
            raise LaunchError(
                f"arguments packed for kernel {self.kernel.key(target)} cannot launch "
                f"{loaded.kernel.key(target)}"
            )
        reaches = loaded.device.context.reaches
        for owner in (*map(_owner, self.regions.values()), stream):
            is_near = owner.device is loaded.device
            if not is_near and (owner is stream or not reaches(owner.device.context)):
                raise LaunchError(
                    f"kernel {self.kernel.name} is loaded on {loaded.device.name}, "
                    f"{owner.kind} {owner.name!r} belongs to another device, {owner.device.name}"
                )


def pack(kernel: Kernel, args: Mapping[str, Any], label: str = "") -> PackedArguments:
    """Check and pack the arguments of ``kernel``, given by parameter name.

    A pointer takes an open `Buffer`, `Slice` or `PinnedBuffer` of at least ``kernel.nbytes(param)``
    bytes whose address is a multiple of 16; a scalar takes an int or a float in its type's range.
    Raises LaunchError, which names ``label``, kernel, parameter, and sizes or values.
    """
    declared = signature(kernel)
    if args.keys() != declared.names:
        raise _wrong_names(declared, args, _where(kernel, label))
    regions: dict[str, Region | PinnedBuffer] = {}
    values: list[Any] = []
    places: list[int] = []
    for param, needed in zip(declared.params, declared.nbytes, strict=True):
        value = args[param.name]
        if needed is not None:
            regions[param.name] = value
            value = _address(kernel, param, needed, value, label)
            places.append(value)
        values.append(value)
    try:
        block = declared.block.pack(*values)
    except (struct.error, OverflowError, TypeError) as exc:
        raise _wrong_scalar(declared, args, _where(kernel, label)) from exc
    storage = (ctypes.c_uint8 * len(block)).from_buffer_copy(block)
    base = ctypes.addressof(storage)
    pointers = (ctypes.c_void_p * len(values))(*[base + at for at, _ in declared.layout])
    return PackedArguments(kernel, storage, pointers, regions, tuple(places))


def launch(loaded: LoadedKernel, packed: PackedArguments, stream: Stream) -> None:
    """Queue one launch on ``stream``. Raises CudaError, LifetimeError, LaunchError."""
    _ = stream.handle, loaded.handle
    config = packed.bind(loaded, stream)
    device = loaded.device
    device.context.make_current()
    api = device.api
    status = api.cuLaunchKernelEx(config, loaded.function, packed.address, 0)[0]
    if status:
        shape = signature(packed.kernel).shape
        what = f"cuLaunchKernelEx {packed.kernel.name}, grid {shape.grid}, block {shape.block}"
        raise error_of(api, status, what)


def _where(kernel: Kernel, label: str) -> str:
    return f"{label}: kernel {kernel.name}" if label else f"kernel {kernel.name}"


def _wrong_names(declared: Signature, args: Mapping[str, Any], where: str) -> LaunchError:
    wanted = [param.name for param in declared.params]
    missing = [name for name in wanted if name not in args]
    unexpected = [name for name in args if name not in wanted]
    parts = (("missing", missing), ("unexpected", unexpected))
    wrong = "; ".join(f"{what} {', '.join(names)}" for what, names in parts if names)
    return LaunchError(f"{where} takes ({', '.join(wanted)}): {wrong}")


def _address(kernel: Kernel, param: Param, needed: int, value: Any, label: str) -> int:
    """The address of a pointer argument."""
    try:
        address = value.address if isinstance(value, (Region, PinnedBuffer)) else None
    except LifetimeError:
        address = None
    if address is not None and value.nbytes >= needed and not address % POINTER_ALIGNMENT:
        return address
    what = f"{_where(kernel, label)}, argument {param.name!r}"
    if not isinstance(value, Region | PinnedBuffer):
        null = value is None or (isinstance(value, int) and value == 0)
        given = "null" if null else f"{type(value).__name__} {value!r:.40}"
        raise LaunchError(f"{what}: a buffer or slice is needed, not {given}")
    if _owner(value).closed:
        raise LaunchError(f"{what}: {value.name!r} is closed")
    if value.nbytes < needed:
        raise LaunchError(
            f"{what}: {param.dtype} {kernel.shape_of(param)} needs {needed:,} bytes, "
            f"{value.name!r} has {value.nbytes:,}"
        )
    raise LaunchError(
        f"{what}: {value.name!r} at {value.address:#x} is not {POINTER_ALIGNMENT}-byte aligned"
    )


def _wrong_scalar(declared: Signature, args: Mapping[str, Any], where: str) -> LaunchError:
    """The error for the first scalar whose type cannot hold its value."""
    for param in declared.params:
        if param.is_pointer:
            continue
        value, what = args[param.name], f"{where}, argument {param.name!r}"
        if isinstance(value, Region | PinnedBuffer):
            return LaunchError(f"{what}: a number ({param.dtype}) is needed, not {value!r}")
        try:
            struct.pack("<" + SCALAR_FORMATS[param.dtype], value)
        except (struct.error, OverflowError, TypeError) as exc:
            return LaunchError(f"{what}: {value!r} is not a valid {param.dtype}: {exc}")
    raise AssertionError("each scalar can be packed separately")


def _owner(region: Region | PinnedBuffer) -> Buffer | PinnedBuffer:
    return region.buffer if isinstance(region, Region) else region


def _make_config(api: Any, kernel: Kernel, stream: Stream) -> tuple[Any, list[Any]]:
    """A CUlaunchConfig, and its attributes, which must live as long as it does."""
    shape = signature(kernel).shape
    config = api.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = shape.grid
    config.blockDimX, config.blockDimY, config.blockDimZ = shape.block
    config.sharedMemBytes = shape.shared_bytes
    config.hStream = stream.handle
    attributes = []
    if shape.cooperative:
        attribute = api.CUlaunchAttribute()
        attribute.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
        attribute.value.cooperative = 1
        attributes.append(attribute)
    if shape.cluster != (1, 1, 1):
        attribute = api.CUlaunchAttribute()
        attribute.id = api.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        dim = attribute.value.clusterDim
        dim.x, dim.y, dim.z = shape.cluster
        attributes.append(attribute)
    if attributes:
        config.attrs = attributes
        config.numAttrs = len(attributes)  # assigning attrs leaves it at 0
    return config, attributes
