"""The read bandwidth of a device at the moment: other speeds are given as shares of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from urdir.driver import execute
from urdir.driver.plan import Plan
from urdir.ptxgen.kernels.read_stream import ReadStream

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.stream import Stream

#: Sizes the read-only kernel is timed on: the best one counts. On a GPU they are so large that
#: launch costs and the L2 cache are negligible. The emulator's "bandwidth" is the host's.
GPU_READ_BYTES = (1 << 30, 2 << 30, 4 << 30)
EMULATOR_READ_BYTES = (1 << 22,)
_READS = 6
#: Bytes of a copy by which the link to the host is timed.
LINK_BYTES = 256 << 20
#: Part of a device's name -> bytes per second that it reads when nothing is wrong with it.
EXPECTED = {"H200": 4.4e12}


def read_bandwidth(device: Device) -> float:
    """Bytes per second of a read-only kernel, the best over several sizes and runs."""
    sizes = EMULATOR_READ_BYTES if device.is_emulated else GPU_READ_BYTES
    free, _ = device.memory_info()
    best = 0.0
    for nbytes in (size for size in sizes if size < 0.8 * free):
        best = max(best, _read_once(device, nbytes))
    return best


def link_bandwidth(device: Device) -> float:
    """Bytes per second of copies from page-locked host memory, the best of several."""
    nbytes = EMULATOR_READ_BYTES[0] if device.is_emulated else LINK_BYTES
    with (
        device.pinned(nbytes, "link") as source,
        device.allocate(nbytes, "link") as target,
        device.create_stream() as stream,
    ):
        plan = Plan("link")
        plan.copy(target, source, "copy")
        return _best_rate(plan, device, stream, nbytes)


def doubt(device_name: str, bandwidth: float) -> str:
    """Why a run with this read bandwidth does not count; "" where nothing is wrong."""
    for part, least in EXPECTED.items():
        if part in device_name and bandwidth < least:
            return (
                f"read bandwidth {bandwidth / 1e12:.2f} TB/s: a healthy {part} has at least "
                f"{least / 1e12:.1f}, so this run does not count"
            )
    return ""


def _read_once(device: Device, nbytes: int) -> float:
    spec = ReadStream.covering(nbytes, device.properties.sm_count)
    size = spec.nbytes(spec.param("data"))
    with (
        device.allocate(size, "bandwidth input") as data,
        device.allocate(spec.nbytes(spec.param("seen")), "bandwidth output") as seen,
        device.create_stream() as stream,
    ):
        data.fill(0x5A)
        plan = Plan("read bandwidth")
        plan.launch(spec, "read", data=data, seen=seen)
        return _best_rate(plan, device, stream, size)


def _best_rate(plan: Plan, device: Device, stream: Stream, nbytes: int) -> float:
    """Bytes per second of a plan that moves this many, the best of several runs."""
    runs = (execute.profile(plan, device, stream)[0].ms for _ in range(_READS))
    return nbytes / (1e-3 * min(runs))
