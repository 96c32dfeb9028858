"""Bindings of the CUDA driver API: real, or emulated.

Both provide the functions (``cuMemAlloc`` ...), enums and structs of ``cuda.bindings.driver`` under
their names, and are passed around as ``api``; code above cannot tell them apart. One api object
belongs to one opened device, or to the devices of one group.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

from urdir.driver.emulator.properties import DEFAULT_TARGET
from urdir.driver.errors import CudaError, DriverError, DriverTooOldError, NoDriverError

#: The first driver line that implements CUDA 13, and its version in cuDriverGetVersion's form.
MINIMUM_DRIVER = 580
MINIMUM_VERSION = 13000

_NO_DRIVER = (
    "no NVIDIA driver on this machine (libcuda was not found); install the driver, "
    'or open the device "emulator"'
)


class GuardedApi:
    """Bindings that raise typed errors for missing parts; ``cuda.bindings.driver`` by default.

    The import happens at first use. A call raises NoDriverError without libcuda and
    DriverTooOldError if the driver lacks the function.
    """

    #: The first sticky error of a call, see `urdir.driver.errors.check`.
    poisoned_by: CudaError | None = None
    #: Adds detail to the message of the first sticky error.
    explain_fault: Callable[[], str] | None = None

    def __init__(self, bindings: Any = None) -> None:
        self._bindings = bindings

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if self._bindings is None:
            self._bindings = _import_bindings()
        value = getattr(self._bindings, name)
        if name.startswith("cu"):
            value = self._guard(value)
            setattr(self, name, value)
        return value

    def _guard(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except RuntimeError as exc:
                raise self._explain(exc) from exc

        return call

    def _explain(self, exc: RuntimeError) -> Exception:
        """The typed error for an exception of the bindings (driver errors are returned, not
        raised)."""
        if type(exc).__name__.startswith("DynamicLib"):
            return NoDriverError(_NO_DRIVER)
        if "not found" in str(exc):
            return too_old(self, str(exc))
        return exc


def real() -> GuardedApi:
    """A new api object over ``cuda.bindings.driver``; loads nothing yet."""
    return GuardedApi()


def driver_loader() -> Callable[[], None]:
    """A function that loads the driver (cuInit) and ignores failure: opening a device reports it.
    The bindings are imported at once.

    On an H200 loading takes 0.1 s, during which other threads may import what a device needs.
    """
    api = real()

    def load() -> None:
        with contextlib.suppress(DriverError):
            api.cuInit(0)

    with contextlib.suppress(DriverError):
        _ = api.CUresult
    return load


def emulated(target: str = DEFAULT_TARGET, **options: Any) -> Any:
    """A new emulated driver whose device poses as ``target``, for ``Device.open(api=...)``.

    ``options`` are those of `emulator.api.Api`: ``sanitize`` (races, too), ``sm_count`` (4),
    ``total_memory`` in bytes (8 GiB), ``device_count`` (1), ``seed`` of what CUDA leaves open (0),
    ``driver_version`` (13000), ``watch``. Raises ValueError for an unknown target.
    """
    _import_bindings()  # the emulator needs its enums and structs; raises if missing
    from urdir.driver.emulator.api import Api

    return Api(target=target, **options)


def too_old(api: Any, lacking: str = "") -> DriverTooOldError:
    """The error for a driver below the minimum, with its version."""
    status, version = api.cuDriverGetVersion()
    has = "an unknown version"
    if not int(status):
        has = f"CUDA {version // 1000}.{version % 1000 // 10}"
    return DriverTooOldError(
        f"the NVIDIA driver is too old: it has {has}, needs >= {MINIMUM_DRIVER} "
        f"(CUDA {MINIMUM_VERSION // 1000})" + (f"; {lacking}" if lacking else "")
    )


def _import_bindings() -> Any:
    try:
        import cuda.bindings.driver as bindings
    except ImportError as exc:
        raise NoDriverError(
            f"the Python package cuda-python is missing or has no wheel for this system: {exc}"
        ) from exc
    return bindings
