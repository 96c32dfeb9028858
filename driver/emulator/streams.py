"""Streams and events."""

# ruff: noqa: N802, N803  (names as in the driver API)

from __future__ import annotations

import threading
from typing import Any

import cuda.bindings.driver as cuda

from urdir.driver.emulator.calls import Refused, driver_call, handle, uint
from urdir.driver.emulator.machine.faults import ILLEGAL_ADDRESS, LAUNCH_FAILED, KernelFault
from urdir.driver.emulator.machine.memory import MemoryRangeError
from urdir.driver.emulator.scheduler import Event, Mark, Queue, Task
from urdir.driver.emulator.state import Driver
from urdir.driver.interrupts import deferred_interrupts

#: Capacity of a stream: queueing one more task waits, as in the real driver.
QUEUE_LENGTH = 1024

_LEGACY = int(cuda.CU_STREAM_LEGACY)
_PER_THREAD = int(cuda.CU_STREAM_PER_THREAD)
_NON_BLOCKING = int(cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)
_DISABLE_TIMING = int(cuda.CUevent_flags.CU_EVENT_DISABLE_TIMING)
_EVENT_FLAGS = 0b111


def stream_of(driver: Driver, hStream: Any) -> Queue:
    """The queue of a stream handle; 0 and 1 are the legacy default stream, 2 the thread's own."""
    number = handle(hStream)
    context = driver.context
    if number in (0, _LEGACY):
        return context.scheduler.legacy
    if number == _PER_THREAD:
        thread = threading.get_ident()
        if thread not in context.thread_streams:
            context.thread_streams[thread] = context.scheduler.add_queue(Queue())
        return context.thread_streams[thread]
    return context.streams[number]


def enqueue(driver: Driver, queue: Queue, task: Task, after: tuple[Task, ...] = ()) -> Task:
    """Queue a task on a stream; a full queue first runs its oldest task."""
    scheduler = driver.context.scheduler
    if len(queue.tasks) >= QUEUE_LENGTH:
        wait(driver, scheduler.finish, queue.tasks[0])
    return scheduler.enqueue(queue, task, after)


def wait(driver: Driver, run: Any, *args: Any) -> Any:
    """Call a function of the scheduler that runs work; a fault poisons the context. Ctrl-C waits:
    a kernel stopped in the middle would leave the device in a state that no GPU can have."""
    try:
        with deferred_interrupts():
            try:
                return run(*args)
            except KeyboardInterrupt:  # a second Ctrl-C, in the middle of a kernel
                driver.context.poison(LAUNCH_FAILED, "Ctrl-C, twice, stopped a kernel")
                raise
    except KernelFault as fault:
        code, message = fault.code, fault.message
    except MemoryRangeError as error:  # a queued copy or fill whose memory is gone
        code, message = ILLEGAL_ADDRESS, str(error)
    driver.context.poison(code, message)
    raise Refused(code, message)


@driver_call()
def cuCtxSynchronize(driver: Driver) -> None:
    """Run everything queued in the context."""
    wait(driver, driver.context.scheduler.finish_all)


@driver_call(results=1)
def cuStreamCreate(driver: Driver, Flags: Any) -> Any:
    """A new stream."""
    return _create_stream(driver, uint(Flags), 0)


@driver_call(results=1)
def cuStreamCreateWithPriority(driver: Driver, flags: Any, priority: Any) -> Any:
    """A new stream; the priority is clamped to the range and otherwise ignored."""
    return _create_stream(driver, uint(flags), min(0, max(-5, int(priority))))


@driver_call()
def cuStreamDestroy(driver: Driver, hStream: Any) -> None:
    """Destroy a stream; what is queued in it still runs when something waits for it."""
    queue: Queue = driver.context.streams.pop(hStream)
    queue.is_closed = True


@driver_call()
def cuStreamSynchronize(driver: Driver, hStream: Any) -> None:
    """Run everything queued in the stream, and what that waits for."""
    wait(driver, driver.context.scheduler.finish_queue, stream_of(driver, hStream))


@driver_call()
def cuStreamQuery(driver: Driver, hStream: Any) -> None:
    """NOT_READY while something is queued; each such answer lets one task run."""
    queue = stream_of(driver, hStream)
    if not wait(driver, driver.context.scheduler.poll, queue.last):
        raise Refused("CUDA_ERROR_NOT_READY")


@driver_call()
def cuStreamWaitEvent(driver: Driver, hStream: Any, hEvent: Any, Flags: Any) -> None:
    """Order later work of the stream after the event's latest record, if there is one."""
    uint(Flags)
    event = driver.event(hEvent)
    queue = stream_of(driver, hStream)
    if event.mark is not None:
        enqueue(driver, queue, Mark(), (event.mark,))


@driver_call(results=1)
def cuStreamGetFlags(driver: Driver, hStream: Any) -> int:
    """The flags it was created with."""
    return stream_of(driver, hStream).flags


@driver_call(results=1)
def cuStreamGetPriority(driver: Driver, hStream: Any) -> int:
    """The priority it was created with."""
    return stream_of(driver, hStream).priority


@driver_call(results=1)
def cuStreamGetCtx(driver: Driver, hStream: Any) -> Any:
    """The context of a stream."""
    stream_of(driver, hStream)
    return cuda.CUcontext(driver.context.handle)


@driver_call(results=1)
def cuEventCreate(driver: Driver, Flags: Any) -> Any:
    """A new event, not recorded."""
    flags = uint(Flags)
    if flags & ~_EVENT_FLAGS:
        raise Refused("CUDA_ERROR_INVALID_VALUE", f"event flags {flags:#x}")
    return cuda.CUevent(driver.context.events.add(Event(flags)))


@driver_call()
def cuEventDestroy(driver: Driver, hEvent: Any) -> None:
    """Destroy an event; streams that wait for it still do."""
    driver.context.events.pop(hEvent)


@driver_call()
def cuEventRecord(driver: Driver, hEvent: Any, hStream: Any) -> None:
    """Record the stream's present end."""
    event: Event = driver.context.events[hEvent]
    event.mark = Mark()
    enqueue(driver, stream_of(driver, hStream), event.mark)


@driver_call()
def cuEventQuery(driver: Driver, hEvent: Any) -> None:
    """NOT_READY until the point is passed; each such answer lets one task run."""
    event: Event = driver.context.events[hEvent]
    if not wait(driver, driver.context.scheduler.poll, event.mark):
        raise Refused("CUDA_ERROR_NOT_READY")


@driver_call()
def cuEventSynchronize(driver: Driver, hEvent: Any) -> None:
    """Run up to the point; nothing to wait for when it was never recorded."""
    event: Event = driver.context.events[hEvent]
    if event.mark is not None:
        wait(driver, driver.context.scheduler.finish, event.mark)


@driver_call(results=1)
def cuEventElapsedTime(driver: Driver, hStart: Any, hEnd: Any) -> float:
    """Milliseconds of host time that the emulator spent between two points."""
    start: Event = driver.context.events[hStart]
    end: Event = driver.context.events[hEnd]
    if start.mark is None or end.mark is None or (start.flags | end.flags) & _DISABLE_TIMING:
        raise Refused("CUDA_ERROR_INVALID_HANDLE", "an event is not recorded, or takes no time")
    if not (start.mark.done and end.mark.done):
        raise Refused("CUDA_ERROR_NOT_READY", "an event is recorded but not passed")
    return (end.mark.time - start.mark.time) * 1e3


def _create_stream(driver: Driver, flags: int, priority: int) -> Any:
    if flags & ~_NON_BLOCKING:
        raise Refused("CUDA_ERROR_INVALID_VALUE", f"stream flags {flags:#x}")
    context = driver.context
    queue = context.scheduler.add_queue(Queue(not flags & _NON_BLOCKING, flags, priority))
    return cuda.CUstream(context.streams.add(queue))
