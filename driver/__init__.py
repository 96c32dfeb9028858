"""The CUDA driver API, real or emulated: memory, modules, streams, plans and graphs.

``__all__`` is the promise, with what the modules in it document; everything else is private.
Names are imported when first used: importing the package loads neither numpy nor libcuda.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from urdir.driver import diff, execute
    from urdir.driver.bindings import emulated
    from urdir.driver.compare import Deviation, MismatchError
    from urdir.driver.device import Device, Probe, probe
    from urdir.driver.errors import (
        CudaError,
        DriverError,
        LaunchError,
        LifetimeError,
        NoDeviceError,
        NoDriverError,
        OutOfMemoryError,
    )
    from urdir.driver.explanation import Explanation, explain
    from urdir.driver.graph import RecordedGraph
    from urdir.driver.guarded import GuardedBuffer, poison
    from urdir.driver.harness import check_kernel, run_kernel, time_kernel
    from urdir.driver.kernel import Kernel
    from urdir.driver.memory import Arena, Buffer, PinnedBuffer, Slice
    from urdir.driver.module import LoadedKernel
    from urdir.driver.plan import Plan
    from urdir.driver.stream import Event, Stream

__all__ = [
    "Arena",
    "Buffer",
    "CudaError",
    "Deviation",
    "Device",
    "DriverError",
    "Event",
    "Explanation",
    "GuardedBuffer",
    "Kernel",
    "LaunchError",
    "LifetimeError",
    "LoadedKernel",
    "MismatchError",
    "NoDeviceError",
    "NoDriverError",
    "OutOfMemoryError",
    "PinnedBuffer",
    "Plan",
    "Probe",
    "RecordedGraph",
    "Slice",
    "Stream",
    "check_kernel",
    "diff",
    "emulated",
    "execute",
    "explain",
    "poison",
    "probe",
    "run_kernel",
    "time_kernel",
]

#: Module -> the names of ``__all__`` that it defines; a module without any is one itself.
_MODULES: dict[str, tuple[str, ...]] = {
    "bindings": ("emulated",),
    "compare": ("Deviation", "MismatchError"),
    "device": ("Device", "Probe", "probe"),
    "diff": (),
    "errors": (
        "CudaError",
        "DriverError",
        "LaunchError",
        "LifetimeError",
        "NoDeviceError",
        "NoDriverError",
        "OutOfMemoryError",
    ),
    "execute": (),
    "explanation": ("Explanation", "explain"),
    "graph": ("RecordedGraph",),
    "guarded": ("GuardedBuffer", "poison"),
    "harness": ("check_kernel", "run_kernel", "time_kernel"),
    "kernel": ("Kernel",),
    "memory": ("Arena", "Buffer", "PinnedBuffer", "Slice"),
    "module": ("LoadedKernel",),
    "plan": ("Plan",),
    "stream": ("Event", "Stream"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in __all__:
        module = importlib.import_module(f"{__name__}.{_HOME.get(name, name)}")
        return getattr(module, name) if name in _HOME else module
    raise AttributeError(f"module {__name__} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
