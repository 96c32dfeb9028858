"""Streams are queues that run late; events order them; faults surface at a wait and stick."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

NON_BLOCKING = 1
ZEROS = np.zeros(8, np.uint32)


def peek(bench: Any, address: int) -> list[int]:
    """What is in device memory now, without running anything: via a stream ordered with none."""
    stream, host = bench.stream(NON_BLOCKING), np.empty_like(ZEROS)
    bench.ok(bench.api.cuMemcpyDtoHAsync(host, address, host.nbytes, stream))
    bench.synchronize(stream)
    return [int(v) for v in host]


def test_work_runs_only_when_something_waits(bench: Any) -> None:
    x, stream = bench.upload(ZEROS), bench.stream()
    for _ in range(3):
        bench.ok(bench.launch("add", bench.add(x, x, 8, 1), stream))
    assert peek(bench, x) == [0] * 8
    bench.synchronize(stream)
    assert peek(bench, x) == [3] * 8


def test_waiting_for_one_stream_leaves_the_others(bench: Any) -> None:
    x, y = bench.upload(ZEROS), bench.upload(ZEROS)
    one, two = bench.stream(), bench.stream()
    bench.ok(bench.launch("add", bench.add(x, x, 8, 1), one))
    bench.ok(bench.launch("add", bench.add(y, y, 8, 2), two))
    bench.synchronize(two)
    assert (peek(bench, x), peek(bench, y)) == ([0] * 8, [2] * 8)
    bench.ok(bench.api.cuCtxSynchronize())
    assert peek(bench, x) == [1] * 8


def test_legacy_stream_is_ordered_with_blocking_streams_only(bench: Any) -> None:
    x, y = bench.upload(ZEROS), bench.upload(ZEROS)
    bench.ok(bench.launch("add", bench.add(x, x, 8, 1), bench.stream()))
    bench.ok(bench.launch("add", bench.add(y, y, 8, 1), bench.stream(NON_BLOCKING)))
    # A copy in the legacy stream comes after the first, and says nothing of the second.
    assert bench.download(x, ZEROS).tolist() == [1] * 8
    assert peek(bench, y) == [0] * 8
    bench.ok(bench.launch("add", bench.add(x, x, 8, 10)))
    later = bench.stream()
    bench.ok(bench.launch("add", bench.add(x, x, 8, 100), later))
    bench.synchronize(later)
    assert peek(bench, x) == [111] * 8


def test_events_order_streams(bench: Any) -> None:
    api, x, y = bench.api, bench.upload(ZEROS), bench.upload(ZEROS)
    one, two = bench.stream(), bench.stream()
    event = bench.ok(api.cuEventCreate(0))
    bench.ok(api.cuEventSynchronize(event))  # never recorded: nothing to wait for
    bench.ok(api.cuEventQuery(event))
    bench.ok(api.cuMemsetD32Async(x, 5, 8, one))
    bench.ok(api.cuEventRecord(event, one))
    bench.ok(api.cuMemsetD32Async(x, 6, 4, one))
    bench.ok(api.cuStreamWaitEvent(two, event, 0))
    bench.ok(api.cuMemcpyDtoDAsync(y, x, 32, two))
    bench.synchronize(two)
    # Only what is before the event has run.
    assert peek(bench, y) == [5] * 8
    assert peek(bench, x) == [5] * 8
    bench.synchronize(one)
    assert peek(bench, x) == [6] * 4 + [5] * 4


def test_queries_make_progress(bench: Any) -> None:
    api, stream, x = bench.api, bench.stream(), bench.upload(ZEROS)
    event = bench.ok(api.cuEventCreate(0))
    bench.ok(api.cuStreamQuery(stream))
    for _ in range(3):
        bench.ok(bench.launch("add", bench.add(x, x, 8, 1), stream))
    bench.ok(api.cuEventRecord(event, stream))
    answers = [api.cuStreamQuery(stream)[0].name for _ in range(6)]
    assert answers[0] == "CUDA_ERROR_NOT_READY"
    assert answers[-1] == "CUDA_SUCCESS"
    bench.ok(api.cuEventQuery(event))
    bench.ok(bench.launch("add", bench.add(x, x, 8, 1), stream))
    bench.ok(api.cuEventRecord(event, stream))
    bench.fails(api.cuEventQuery(event), "NOT_READY")


def test_elapsed_time(bench: Any) -> None:
    api, stream, x = bench.api, bench.stream(), bench.upload(ZEROS)
    start, end, timeless = (bench.ok(api.cuEventCreate(flags)) for flags in (0, 0, 2))
    bench.fails(api.cuEventElapsedTime(start, end), "INVALID_HANDLE")
    bench.ok(api.cuEventRecord(start, stream))
    bench.ok(bench.launch("add", bench.add(x, x, 8, 1), stream))
    bench.ok(api.cuEventRecord(end, stream))
    bench.fails(api.cuEventElapsedTime(start, end), "NOT_READY")
    bench.ok(api.cuEventSynchronize(end))
    assert 0 < bench.ok(api.cuEventElapsedTime(start, end)) < 10_000
    bench.ok(api.cuEventRecord(timeless, stream))
    bench.synchronize(stream)
    bench.fails(api.cuEventElapsedTime(start, timeless), "INVALID_HANDLE")


def test_destroyed_handles(bench: Any) -> None:
    api, x = bench.api, bench.upload(ZEROS)
    stream, event = bench.stream(), bench.ok(api.cuEventCreate(0))
    bench.ok(bench.launch("add", bench.add(x, x, 8, 1), stream))
    bench.ok(api.cuEventRecord(event, stream))
    bench.ok(api.cuStreamDestroy(stream))
    bench.fails(api.cuStreamSynchronize(stream), "INVALID_HANDLE")
    # What was queued runs all the same.
    bench.ok(api.cuEventSynchronize(event))
    assert peek(bench, x) == [1] * 8
    bench.ok(api.cuEventDestroy(event))
    bench.fails(api.cuEventQuery(event), "INVALID_HANDLE")
    bench.fails(api.cuStreamCreate(77), "INVALID_VALUE")


def test_a_spinning_kernel_lets_other_streams_run(bench: Any) -> None:
    flag, out = bench.upload(ZEROS), bench.upload(ZEROS)
    waiting, setting = bench.stream(NON_BLOCKING), bench.stream(NON_BLOCKING)
    bench.ok(bench.launch("spin", bench.arguments(flag, out), waiting, block=(1, 1, 1)))
    bench.ok(bench.launch("add", bench.add(flag, flag, 8, 9), setting))
    bench.synchronize(waiting)
    assert peek(bench, out)[0] == 9


def test_deadlock_is_a_timeout(bench: Any) -> None:
    flag, out = bench.upload(ZEROS), bench.upload(ZEROS)
    bench.ok(bench.launch("spin", bench.arguments(flag, out), block=(1, 1, 1)))
    bench.fails(bench.api.cuCtxSynchronize(), "LAUNCH_TIMEOUT")
    assert "spin" in bench.api.last_fault


def test_faults_surface_at_a_wait_and_stick(bench: Any) -> None:
    api, stream = bench.api, bench.stream()
    x = bench.upload(ZEROS)
    bench.ok(bench.launch("add", bench.add(x, x + 4096, 8, 1), stream))
    bench.ok(bench.launch("add", bench.add(x, x, 8, 1), stream))  # not yet known
    bench.fails(api.cuStreamSynchronize(stream), "ILLEGAL_ADDRESS")
    assert "add" in api.last_fault
    assert "store" in api.last_fault
    host = np.zeros(8, np.uint32)
    for result in (
        api.cuStreamSynchronize(stream),
        api.cuCtxSynchronize(),
        api.cuMemAlloc(4),
        api.cuMemFree(x),
        api.cuMemcpyDtoH(host, x, 32),
        api.cuStreamCreate(0),
        api.cuEventCreate(0),
        api.cuMemGetInfo(),
        api.cuModuleLoadData(b"x"),
        api.cuGraphCreate(0),
    ):
        bench.fails(result, "ILLEGAL_ADDRESS")
    # What needs no healthy context still works, so that it can be left.
    bench.ok(api.cuCtxGetCurrent())
    bench.ok(api.cuCtxSetCurrent(bench.context))
    bench.ok(api.cuDevicePrimaryCtxRelease(0))


@pytest.mark.parametrize("nth", [1, 3])
def test_injected_fault_hits_the_nth_kernel(bench: Any, nth: int) -> None:
    x, stream = bench.upload(ZEROS), bench.stream()
    bench.api.inject("launch", nth=nth)
    for i in range(1, 5):
        bench.ok(bench.launch("add", bench.add(x, x, 8, 1), stream))
        result = bench.api.cuStreamSynchronize(stream)
        if i < nth:
            bench.ok(result)
        else:
            bench.fails(result, "ILLEGAL_ADDRESS")
            break
    assert i == nth


def test_long_queues_do_not_grow_forever(bench: Any) -> None:
    x, stream = bench.upload(ZEROS), bench.stream()
    arguments = bench.add(x, x, 8, 1)
    for _ in range(1100):
        bench.ok(bench.launch("add", arguments, stream))
    # Like the real driver, whose queue holds 1024 launches: a launch then waits for room.
    assert 0 < peek(bench, x)[0] < 1100
    bench.synchronize(stream)
    assert peek(bench, x) == [1100] * 8


def test_programmatic_launch_begins_before_its_predecessor(bench: Any) -> None:
    """A kernel that loads before its griddepcontrol.wait sees what was there before."""
    for name, programmatic, expected in (
        ("wait_first", 1, 11),
        ("load_then_wait", 1, 10),
        ("load_then_wait", 0, 11),
    ):
        x, y, stream = bench.upload(ZEROS), bench.upload(ZEROS), bench.stream()
        bench.ok(bench.launch("add", bench.add(x, x, 8, 1), stream))
        arguments = bench.add(x, y, 8, 10)
        bench.ok(bench.launch_ex(name, arguments, stream, programmatic=programmatic))
        bench.synchronize(stream)
        assert peek(bench, y) == [expected] * 8
        assert peek(bench, x) == [1] * 8


@pytest.mark.parametrize(("middle", "expected"), [("trigger_wait_first", 10), ("wait_first", 11)])
def test_early_start_reaches_past_a_kernel_that_triggers(
    bench: Any, middle: str, expected: int
) -> None:
    """x += 1; a kernel in between; y = x + 10 loaded before the wait."""
    x, y, z, stream = (*(bench.upload(ZEROS) for _ in range(3)), bench.stream())
    bench.ok(bench.launch("add", bench.add(x, x, 8, 1), stream))
    bench.ok(bench.launch_ex(middle, bench.add(z, z, 8, 1), stream, programmatic=1))
    arguments = bench.add(x, y, 8, 10)
    bench.ok(bench.launch_ex("load_then_wait", arguments, stream, programmatic=1))
    bench.synchronize(stream)
    assert peek(bench, y) == [expected] * 8
