"""State of an emulated driver: devices, primary contexts, faults."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Callable
from typing import Any

from urdir.driver.emulator.calls import Needs, Refused
from urdir.driver.emulator.functions import Function
from urdir.driver.emulator.graph_model import Executable, Graph, Node
from urdir.driver.emulator.handles import Handles
from urdir.driver.emulator.injection import Injections
from urdir.driver.emulator.machine.peer_races import DeviceOrder
from urdir.driver.emulator.machine.watch import Watch
from urdir.driver.emulator.module_model import Link, LoadedModule
from urdir.driver.emulator.pinned import UnifiedMemory
from urdir.driver.emulator.properties import DeviceProperties
from urdir.driver.emulator.scheduler import Event, Queue, Scheduler


class Context:
    """The primary context of device ``ordinal``, and everything that is destroyed with it.

    ``fault`` is the name of the error that poisoned it, ``fault_message`` the details; only a reset
    or the last release ends it.
    """

    def __init__(self, driver: Driver, ordinal: int) -> None:
        self.ordinal = ordinal
        self.handle = driver.handle_of(ordinal)
        self.references = 0
        self.fault: str | None = None
        self.fault_message = ""
        total = driver.properties.total_memory
        self.memory = UnifiedMemory(total, ordinal, driver.memories)
        self.scheduler = Scheduler(driver.rng, driver.schedulers, self.poison)
        if driver.order is not None:
            self.scheduler.watch_order(driver.order, ordinal)
        self._driver = driver
        self.streams: Handles[Queue] = Handles("stream")
        self.thread_streams: dict[int, Queue] = {}
        self.events: Handles[Event] = Handles("event")
        self.links: Handles[Link] = Handles("link")
        self.modules: Handles[LoadedModule] = Handles("module")
        self.functions: Handles[Function] = Handles("function")
        # Invalid handles of these get a different error.
        code = "CUDA_ERROR_INVALID_VALUE"
        self.graphs: Handles[Graph] = Handles("graph", code)
        self.nodes: Handles[Node] = Handles("graph node", code)
        self.executables: Handles[Executable] = Handles("executable graph", code)

    def poison(self, code: str, message: str) -> None:
        """Record a kernel fault: every later call on the context returns it, and queued work never
        runs."""
        self._driver.last_fault = self.fault_message = message
        self.fault = code
        self.scheduler.drop()


class Driver:
    """One emulated driver with ``device_count`` equal devices.

    ``last_fault`` is the full message of the latest kernel fault, ``last_refusal`` that of the
    latest call that returned an error.
    """

    #: The handle of the first primary context, the same after recreation, as in the real driver.
    CONTEXT_HANDLE = 0x59FF_0000_0000
    _HANDLE_STRIDE = 0x100

    def __init__(
        self, properties: DeviceProperties, seed: int, driver_version: int, device_count: int = 1
    ) -> None:
        self.properties = properties
        self.driver_version = driver_version
        self.device_count = device_count
        self.rng = random.Random(seed)
        self.lock = threading.RLock()
        self.injections = Injections()
        #: Makes the watcher of a launch, from the kernel's name; None: not watched.
        self.new_watch: Callable[[str], Watch] | None = None
        #: Order of the devices' work; None if not watched, or for one device.
        self.order: DeviceOrder | None = None
        self.last_fault = ""
        self.last_refusal = ""
        #: Calls in progress of the thread that holds the lock, and calls deferred until their end.
        self.depth = 0
        self.deferred: list[tuple[int, Callable[[], object]]] = []
        self.initialised_in: int | None = None
        #: Live primary contexts by device ordinal.
        self.contexts: dict[int, Context] = {}
        self.memories: dict[int, UnifiedMemory] = {}
        self.schedulers: list[Scheduler] = []
        self._threads = threading.local()

    @property
    def ptx_version(self) -> tuple[int, int]:
        """The newest PTX ISA of the driver: 9.0 for CUDA 13.0, 8.4 for 12.4, 8.8 for 12.9."""
        major, minor = divmod(self.driver_version // 10, 100)
        return major - 4, minor - (major == 12 and minor > 5)

    @property
    def current_stack(self) -> list[int]:
        """The calling thread's stack of context handles, the current one last; 0 is none."""
        stack: list[int] | None = getattr(self._threads, "stack", None)
        if stack is None:
            stack = self._threads.stack = []
        return stack

    @property
    def current_handle(self) -> int:
        """The handle of the calling thread's context, 0 for none."""
        stack = self.current_stack
        return stack[-1] if stack else 0

    @property
    def context(self) -> Context:
        """The calling thread's context."""
        return self.context_of(self.current_handle)

    def handle_of(self, ordinal: int) -> int:
        """The handle of a device's primary context."""
        return self.CONTEXT_HANDLE + ordinal * self._HANDLE_STRIDE

    def context_of(self, number: int) -> Context:
        """The live context with a handle."""
        ordinal, odd = divmod(number - self.CONTEXT_HANDLE, self._HANDLE_STRIDE)
        if odd or not 0 <= ordinal < self.device_count:
            raise Refused("CUDA_ERROR_INVALID_CONTEXT", f"no context {number:#x}")
        if ordinal not in self.contexts:
            raise Refused("CUDA_ERROR_CONTEXT_IS_DESTROYED", "the primary context is not retained")
        return self.contexts[ordinal]

    def create_context(self, ordinal: int) -> None:
        """Create a device's primary context."""
        context = self.contexts[ordinal] = Context(self, ordinal)
        self.memories[ordinal] = context.memory
        self.schedulers.append(context.scheduler)

    def destroy_context(self, ordinal: int) -> None:
        """Destroy a context with everything in it; queued work is dropped."""
        context = self.contexts.pop(ordinal, None)
        if context is None:
            return
        context.scheduler.drop()
        self.schedulers.remove(context.scheduler)
        del self.memories[ordinal]
        for memory in self.memories.values():
            memory.peers.discard(ordinal)

    def event(self, hEvent: Any) -> Event:  # noqa: N803
        """An event, which may be another device's."""
        for context in self.contexts.values():
            if hEvent in context.events:
                return context.events[hEvent]
        return self.context.events[hEvent]

    def require(self, needs: Needs, name: str) -> None:
        """Refuse a call whose preconditions do not hold, with the error of the first violated
        one."""
        if self.initialised_in != os.getpid():
            raise Refused("CUDA_ERROR_NOT_INITIALIZED", f"{name} before cuInit in this process")
        if needs is Needs.CONTEXT:
            if not self.current_handle:
                raise Refused("CUDA_ERROR_INVALID_CONTEXT", f"{name} without a current context")
            context = self.context
            if context.fault:
                raise Refused(context.fault, context.fault_message)

    def defer(self, call: Callable[[], object]) -> None:
        """Defer a call until this thread's call in progress has ended."""
        self.deferred.append((self.current_handle, call))

    def run_deferred(self) -> None:
        """Run deferred destructions of finalisers; failures are ignored."""
        calls, self.deferred = self.deferred, []
        for current, call in calls:
            self.current_stack.append(current)
            try:
                with contextlib.suppress(Refused):
                    if not self.context.fault:
                        call()
            finally:
                self.current_stack.pop()
