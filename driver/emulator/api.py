"""Emulated driver: the functions of ``cuda.bindings.driver`` over an emulated GPU."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import cuda.bindings.driver as cuda

from urdir.driver.emulator import (
    contexts,
    executables,
    graphs,
    launches,
    modules,
    streams,
    transfers,
)
from urdir.driver.emulator.dispatch import bind
from urdir.driver.emulator.machine.async_races import Sanitizer
from urdir.driver.emulator.machine.peer_races import DeviceOrder
from urdir.driver.emulator.machine.watch import Watch
from urdir.driver.emulator.properties import DEFAULT_TARGET, DeviceProperties
from urdir.driver.emulator.state import Driver

_MODULES: tuple[ModuleType, ...] = (
    contexts,
    transfers,
    streams,
    modules,
    launches,
    graphs,
    executables,
)

#: Every emulated function by name.
FUNCTIONS: dict[str, Any] = {
    name: function
    for module in _MODULES
    for name, function in vars(module).items()
    if hasattr(function, "needs")
}


class Api:
    """An emulated driver with ``device_count`` equal devices; drivers share nothing.

    Functions, enums, structs and handle types have the names of ``cuda.bindings.driver``.
    ``target`` is the emulated architecture ("sm_90a"), ``total_memory`` the memory in bytes,
    ``seed`` that of every order that CUDA leaves open, ``driver_version`` the result of
    cuDriverGetVersion. With ``sanitize`` every kernel runs under the sanitizer (see
    `machine.async_races`), several times slower: a race between threads or devices, a missing proxy
    fence, or a barrier that not all threads reach together is a fault of the kernel. ``watch``
    makes a custom watcher for each launch, given the kernel's name. Raises ValueError for an
    unsupported target.
    """

    #: The first sticky error, set by the layer above.
    poisoned_by: Any = None
    #: Adds detail to its message, for the layer above.
    explain_fault: Any = None

    def __init__(
        self,
        target: str = DEFAULT_TARGET,
        sm_count: int = 4,
        total_memory: int = 8 << 30,
        seed: int = 0,
        driver_version: int = 13000,
        sanitize: bool = False,
        watch: Callable[[str], Watch] | None = None,
        device_count: int = 1,
    ) -> None:
        properties = DeviceProperties.of(target, sm_count, total_memory)
        self._driver = Driver(properties, seed, driver_version, device_count)
        self._driver.injections.functions = frozenset(FUNCTIONS)
        if sanitize and device_count > 1:
            self._driver.order = DeviceOrder(device_count)
        sanitizer = functools.partial(_new_sanitizer, self._driver.order)
        self._driver.new_watch = watch or (sanitizer if sanitize else None)
        for name, function in FUNCTIONS.items():
            setattr(self, name, bind(self._driver, function))

    def __getattr__(self, name: str) -> Any:
        value = getattr(cuda, name, None)
        if value is None or name.startswith("__"):
            raise AttributeError(f"cuda.bindings.driver has no {name}")
        if callable(value) and not isinstance(value, type):
            raise AttributeError(f"the emulator has no {name}")
        return value

    @property
    def last_fault(self) -> str:
        """The full message of the latest kernel fault: kernel, line, thread, address."""
        return self._driver.last_fault

    @property
    def last_refusal(self) -> str:
        """The reason of the latest call that returned an error."""
        return self._driver.last_refusal

    def inject(self, kind: str, nth: int = 1, code: str | None = None) -> None:
        """Make the ``nth`` event of ``kind`` from now on fail (1 is the next), with ``code``.

        Kinds: "init", "allocation", "host_allocation", "link", "module_load", "instantiate", and
        "launch": that kernel (also in a graph) faults when it runs, and poisons the context. The
        name of a function is a kind too: that call fails before it does anything.
        """
        self._driver.injections.add(kind, nth, code)

    @contextmanager
    def sanitizing(self) -> Iterator[None]:
        """Run kernels inside the context under the sanitizer, unless a watcher is set."""
        driver, before = self._driver, self._driver.new_watch
        driver.new_watch = before or functools.partial(_new_sanitizer, driver.order)
        try:
            yield
        finally:
            driver.new_watch = before

    def pending_faults(self) -> tuple[str, ...]:
        """The kinds of injected faults that have not occurred yet."""
        return self._driver.injections.pending()

    @property
    def event_counts(self) -> Mapping[str, int]:
        """Number of events of each kind; calls are counted under the function's name."""
        return self._driver.injections.counts

    def live(self) -> dict[str, int]:
        """Number of live objects of each kind on the devices."""
        living: Counter[str] = Counter()
        for context in self._driver.contexts.values():
            living["context"] += 1
            living["allocation"] += len(context.memory.allocations)
            living["stream"] += len(context.streams.values())
            living["event"] += len(context.events.values())
            living["link"] += len(context.links.values())
            living["module"] += len(context.modules.values())
            living["graph"] += len(context.graphs.values())
            living["executable graph"] += len(context.executables.values())
        return {kind: count for kind, count in living.items() if count}

    def remove(self, *names: str) -> None:
        """Remove functions: calls fail as with a driver that is too old for them."""
        for name in names:
            if name not in FUNCTIONS:
                raise ValueError(f"the emulator has no function {name!r}")
            setattr(self, name, _missing(name))


def _new_sanitizer(order: DeviceOrder | None, kernel: str) -> Watch:
    return Sanitizer(order)


def _missing(name: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        from cuda.bindings._internal.utils import FunctionNotFoundError

        raise FunctionNotFoundError(f"function {name} is not found")

    return call
