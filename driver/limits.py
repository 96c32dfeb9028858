"""Launch limits: a kernel's launch shape against the device's limits."""

from __future__ import annotations

from collections.abc import Iterator

from urdir.driver.errors import LaunchError
from urdir.driver.kernel import Kernel
from urdir.driver.properties import DeviceProperties


def check_limits(kernel: Kernel, properties: DeviceProperties) -> None:
    """Raise LaunchError if the launch shape exceeds the device: field, value, limit, device."""
    broken = [
        f"{field} is {value:,}, {limit}" for field, value, limit in _violations(kernel, properties)
    ]
    if broken:
        raise LaunchError(
            f"kernel {kernel.name} cannot be launched on {properties.name}: {'; '.join(broken)}"
        )


def _violations(kernel: Kernel, properties: DeviceProperties) -> Iterator[tuple[str, int, str]]:
    shape = kernel.launch_shape
    extents = (
        ("grid", shape.grid, properties.max_grid),
        ("block", shape.block, properties.max_block),
        ("cluster", shape.cluster, (properties.max_cluster,) * 3),
    )
    for field, extent, limits in extents:
        for axis, value, limit in zip("xyz", extent, limits, strict=True):
            if type(value) is not int:
                kind = type(value).__name__
                raise LaunchError(f"kernel {kernel.name}: {field}.{axis} is {value!r}, a {kind}")
            if not 1 <= value <= limit:
                yield f"{field}.{axis}", value, f"the limit is {limit:,}"
            if field == "grid" and value % max(shape.cluster["xyz".index(axis)], 1):
                yield f"{field}.{axis}", value, f"not a multiple of the cluster {shape.cluster}"
    threads = shape.block[0] * shape.block[1] * shape.block[2]
    ctas = shape.cluster[0] * shape.cluster[1] * shape.cluster[2]
    totals = (
        ("threads of a block", threads, properties.max_threads_per_block),
        ("CTAs of a cluster", ctas, properties.max_cluster),
        ("shared_bytes", shape.shared_bytes, properties.shared_per_block_optin),
        ("cooperative", int(shape.cooperative), int(properties.cooperative)),
    )
    for field, value, limit in totals:
        if value > limit:
            yield field, value, f"the limit is {limit:,}"
