"""Kernel launches: arguments copied at the call, and execution as a task."""

# ruff: noqa: N802, N803  (names as in the driver API)

from __future__ import annotations

from math import prod
from typing import Any

import cuda.bindings.driver as cuda

from urdir.driver.emulator.calls import Refused, driver_call, handle, kernel_params, size_t, uint
from urdir.driver.emulator.functions import Extent, Function
from urdir.driver.emulator.launch_model import NO_CLUSTER, Launch
from urdir.driver.emulator.machine.execution import GridExecution, Status
from urdir.driver.emulator.machine.faults import KernelFault
from urdir.driver.emulator.machine.memory import Memory
from urdir.driver.emulator.scheduler import Task
from urdir.driver.emulator.state import Driver
from urdir.driver.emulator.streams import enqueue, stream_of
from urdir.ptxgen.ptx.origin import with_origins

_ATTRIBUTE = cuda.CUlaunchAttributeID


class KernelRun:
    """One execution of a launch."""

    def __init__(self, driver: Driver, launch: Launch, memory: Memory) -> None:
        self._driver = driver
        self._launch = launch
        self._memory = memory
        self._grid: GridExecution | None = None
        self.done = False

    def begin_early(self) -> None:
        """Run until the kernel waits for its predecessors, or ends."""
        if self._grid is None and not self.done:
            self._grid = self._create(dependencies_pending=True)
            self._run(self._grid)

    def advance(self) -> bool:
        """Run with predecessors complete; False if the kernel spins."""
        if not self.done:
            if self._grid is None:
                self._grid = self._create(dependencies_pending=False)
            self._grid.release_dependencies()
            self._run(self._grid)
        return self.done

    def _run(self, grid: GridExecution) -> None:
        try:
            status = grid.run()
        except KernelFault as fault:
            message = with_origins(fault.message, self._launch.function.text)
            raise KernelFault(fault.code, message) from fault
        if status is Status.DONE:
            self.done = True
            self._grid = None

    def describe(self) -> str:
        """The kernel, and what it waits for."""
        waits = self._grid.waits_for() if self._grid is not None else "not begun"
        waits = with_origins(waits, self._launch.function.text)
        return f"kernel {self._launch.name}: {waits}"

    def _create(self, dependencies_pending: bool) -> GridExecution:
        launch = self._launch
        if code := self._driver.injections.strike("launch"):
            raise KernelFault(code, f"kernel {launch.name}: injected fault")
        return GridExecution(
            launch.function.program,
            launch.grid,
            launch.block,
            launch.cluster,
            launch.shared_bytes,
            launch.params,
            self._memory,
            self._driver.properties.sm_count,
            symbols=launch.function.symbols,
            dependencies_pending=dependencies_pending,
            watch=self._driver.new_watch(launch.name) if self._driver.new_watch else None,
        )


class KernelTask(Task):
    """A launch in a stream."""

    is_kernel = True

    def __init__(self, run: KernelRun, launch: Launch, is_programmatic: bool) -> None:
        super().__init__()
        self._run = run
        self.is_programmatic = is_programmatic
        self.triggers_dependents = launch.function.triggers_dependents

    def begin_early(self) -> None:
        """Run to the kernel's griddepcontrol.wait."""
        self._run.begin_early()

    def advance(self) -> bool:
        """Run to the end."""
        return self._run.advance()

    def describe(self) -> str:
        """The kernel, and what it waits for."""
        return self._run.describe()


# ---- driver functions ----


@driver_call()
def cuLaunchKernel(
    driver: Driver,
    f: Any,
    gridDimX: Any,
    gridDimY: Any,
    gridDimZ: Any,
    blockDimX: Any,
    blockDimY: Any,
    blockDimZ: Any,
    sharedMemBytes: Any,
    hStream: Any,
    kernelParams: Any,
    extra: Any,
) -> None:
    """Queue a kernel; the arguments are copied now."""
    grid = uint(gridDimX), uint(gridDimY), uint(gridDimZ)
    block = uint(blockDimX), uint(blockDimY), uint(blockDimZ)
    shared = uint(sharedMemBytes)
    launch = make_launch(driver, f, grid, block, shared, kernel_params(kernelParams), extra)
    _queue(driver, launch, hStream)


@driver_call()
def cuLaunchCooperativeKernel(
    driver: Driver,
    f: Any,
    gridDimX: Any,
    gridDimY: Any,
    gridDimZ: Any,
    blockDimX: Any,
    blockDimY: Any,
    blockDimZ: Any,
    sharedMemBytes: Any,
    hStream: Any,
    kernelParams: Any,
) -> None:
    """Queue a kernel whose CTAs all run at the same time."""
    grid = uint(gridDimX), uint(gridDimY), uint(gridDimZ)
    block = uint(blockDimX), uint(blockDimY), uint(blockDimZ)
    shared, address = uint(sharedMemBytes), kernel_params(kernelParams)
    _queue(driver, make_launch(driver, f, grid, block, shared, address, 0, None, True), hStream)


@driver_call()
def cuLaunchKernelEx(driver: Driver, config: Any, f: Any, kernelParams: Any, extra: Any) -> None:
    """Queue a kernel with attributes: cluster, cooperative, programmatic serialization."""
    if config is None:
        raise Refused("CUDA_ERROR_INVALID_VALUE", "a null config")
    grid = config.gridDimX, config.gridDimY, config.gridDimZ
    block = config.blockDimX, config.blockDimY, config.blockDimZ
    shared, address = config.sharedMemBytes, kernel_params(kernelParams)
    cluster, cooperative, programmatic = None, False, False
    # As in the driver: numAttrs counts, whatever else the array holds.
    for attribute in config.attrs[: config.numAttrs] if config.numAttrs else ():
        value = attribute.value
        if attribute.id == _ATTRIBUTE.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
            cluster = value.clusterDim.x, value.clusterDim.y, value.clusterDim.z
        elif attribute.id == _ATTRIBUTE.CU_LAUNCH_ATTRIBUTE_COOPERATIVE:
            cooperative = bool(value.cooperative)
        elif attribute.id == _ATTRIBUTE.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION:
            programmatic = bool(value.programmaticStreamSerializationAllowed)
    launch = make_launch(driver, f, grid, block, shared, address, extra, cluster, cooperative)
    _queue(driver, launch, config.hStream, programmatic)


@driver_call(results=1)
def cuOccupancyMaxActiveClusters(driver: Driver, func: Any, config: Any) -> int:
    """Clusters of a launch configuration that the device holds at once."""
    function: Function = driver.context.functions[func]
    block = config.blockDimX, config.blockDimY, config.blockDimZ
    cluster = function.required_cluster or NO_CLUSTER
    for attribute in config.attrs[: config.numAttrs] if config.numAttrs else ():
        if attribute.id == _ATTRIBUTE.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION:
            dim = attribute.value.clusterDim
            cluster = dim.x, dim.y, dim.z
    return function.clusters_at_once(cluster, prod(block), config.sharedMemBytes)


# ---- helpers ----


def make_launch(
    driver: Driver,
    f: Any,
    grid: Extent,
    block: Extent,
    shared_bytes: int,
    params_address: int,
    extra: Any,
    cluster: Extent | None = None,
    is_cooperative: bool = False,
) -> Launch:
    """A checked launch with its arguments read from ``params_address``."""
    function: Function = driver.context.functions[f]
    if size_t(extra):
        raise Refused("CUDA_ERROR_NOT_SUPPORTED", "arguments in `extra`: use kernelParams")
    params = function.read_arguments(params_address)
    cluster = cluster or function.required_cluster or NO_CLUSTER
    launch = Launch(handle(f), function, grid, block, cluster, shared_bytes, params, is_cooperative)
    launch.check(driver.properties)
    return launch


def _queue(driver: Driver, launch: Launch, hStream: Any, is_programmatic: bool = False) -> None:
    run = KernelRun(driver, launch, driver.context.memory)
    enqueue(driver, stream_of(driver, hStream), KernelTask(run, launch, is_programmatic))
