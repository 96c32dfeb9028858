"""The state of one emulated driver: device, primary context, faults; every function gets it."""

from __future__ import annotations

import contextlib
import os
import random
import threading
from collections.abc import Callable

from urdir.driver.emulator.calls import Needs, Refused
from urdir.driver.emulator.functions import Function
from urdir.driver.emulator.graph_model import Executable, Graph, Node
from urdir.driver.emulator.handles import Handles
from urdir.driver.emulator.injection import Injections
from urdir.driver.emulator.machine.watch import Watch
from urdir.driver.emulator.module_model import Link, LoadedModule
from urdir.driver.emulator.pinned import UnifiedMemory
from urdir.driver.emulator.properties import DeviceProperties
from urdir.driver.emulator.scheduler import Event, Queue, Scheduler


class Context:
    """The primary context: everything that dies with it.

    ``fault`` is the name of the error that poisoned it; only a reset or the last release ends
    it.
    """

    def __init__(self, driver: Driver) -> None:
        self.fault: str | None = None
        self.memory = UnifiedMemory(driver.properties.total_memory)
        self.scheduler = Scheduler(driver.rng)
        self.streams: Handles[Queue] = Handles("stream")
        self.thread_streams: dict[int, Queue] = {}
        self.events: Handles[Event] = Handles("event")
        self.links: Handles[Link] = Handles("link")
        self.modules: Handles[LoadedModule] = Handles("module")
        self.functions: Handles[Function] = Handles("function")
        # Bad handles of these are answered with another error.
        code = "CUDA_ERROR_INVALID_VALUE"
        self.graphs: Handles[Graph] = Handles("graph", code)
        self.nodes: Handles[Node] = Handles("graph node", code)
        self.executables: Handles[Executable] = Handles("executable graph", code)


class Driver:
    """One emulated driver with one device.

    ``last_fault`` holds the full message of the latest kernel fault, ``last_refusal`` that of the
    latest call answered with an error.
    """

    #: The handle of the primary context: the same in every life of it, as in the real driver.
    CONTEXT_HANDLE = 0x59FF_0000_0000

    def __init__(self, properties: DeviceProperties, seed: int, driver_version: int) -> None:
        self.properties = properties
        self.driver_version = driver_version
        self.rng = random.Random(seed)
        self.lock = threading.RLock()
        self.injections = Injections()
        #: Makes the watcher of a launch, from the kernel's name; None where nothing watches.
        self.new_watch: Callable[[str], Watch] | None = None
        self.last_fault = ""
        self.last_refusal = ""
        #: Calls in progress of the thread that holds the lock, and what waits for their end.
        self.depth = 0
        self.deferred: list[Callable[[], object]] = []
        self.initialised_in: int | None = None
        self.references = 0
        self._context: Context | None = None
        self._threads = threading.local()

    @property
    def ptx_version(self) -> tuple[int, int]:
        """The newest PTX ISA the driver takes: 9.0 for CUDA 13.0, 8.4 for 12.4, 8.8 for 12.9."""
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
    def context(self) -> Context:
        """The live primary context."""
        if self._context is None:
            raise Refused("CUDA_ERROR_CONTEXT_IS_DESTROYED", "the primary context is not retained")
        return self._context

    @property
    def is_active(self) -> bool:
        """True while the primary context lives."""
        return self._context is not None

    def create_context(self) -> None:
        """Begin a life of the primary context."""
        self._context = Context(self)

    def destroy_context(self) -> None:
        """End it with all that lives in it; queued work is dropped."""
        self._context = None
        self.references = 0

    def require(self, needs: Needs, name: str) -> None:
        """Refuse a call whose preconditions do not hold, with the error of the first that fails."""
        if self.initialised_in != os.getpid():
            raise Refused("CUDA_ERROR_NOT_INITIALIZED", f"{name} before cuInit in this process")
        if needs is Needs.CONTEXT:
            stack = self.current_stack
            if not stack or not stack[-1]:
                raise Refused("CUDA_ERROR_INVALID_CONTEXT", f"{name} without a current context")
            if self.context.fault:
                raise Refused(self.context.fault, self.last_fault)

    def run_deferred(self) -> None:
        """Destroy what finalisers asked for in the middle of another call; failures are dropped."""
        calls, self.deferred = self.deferred, []
        for call in calls:
            if self._context is not None and not self._context.fault:
                with contextlib.suppress(Refused):
                    call()

    def poison(self, code: str, message: str) -> None:
        """Record a kernel fault: from now on every call on the context returns it."""
        self.last_fault = message
        self.context.fault = code
