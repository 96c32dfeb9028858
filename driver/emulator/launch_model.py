"""Kernel launches as data: extents, arguments, and the limits that the driver checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Any

from urdir.driver.emulator.calls import Refused
from urdir.driver.emulator.functions import Extent, Function
from urdir.driver.emulator.properties import DeviceProperties
from urdir.ptxgen.ptx.architecture import MAX_BLOCK, MAX_CLUSTER, MAX_GRID, MAX_THREADS

NO_CLUSTER: Extent = (1, 1, 1)


@dataclass(frozen=True, slots=True)
class Launch:
    """A launch: a kernel and its handle, extents, shared bytes, parameter block."""

    handle: int
    function: Function
    grid: Extent
    block: Extent
    cluster: Extent
    shared_bytes: int
    params: bytes
    is_cooperative: bool = False

    @property
    def name(self) -> str:
        """The kernel's entry name."""
        return self.function.name

    def replaced(self, **changes: Any) -> Launch:
        """The same launch with other values for some fields."""
        return dataclasses.replace(self, **changes)

    def check(self, device: DeviceProperties) -> None:
        """Refuse as the driver would on this device, with its error."""
        for code, message in self._violations(device):
            raise Refused(code, f"kernel {self.name}: {message}")

    def _violations(self, device: DeviceProperties) -> Iterator[tuple[str, str]]:
        invalid, function = "CUDA_ERROR_INVALID_VALUE", self.function
        grid, block, cluster = self.grid, self.block, self.cluster
        if any(not 1 <= n <= most for n, most in zip(grid, MAX_GRID, strict=True)):
            yield invalid, f"grid {grid}, the limits are {MAX_GRID}"
        if any(not 1 <= n <= most for n, most in zip(block, MAX_BLOCK, strict=True)):
            yield invalid, f"block {block}, the limits are {MAX_BLOCK}"
        threads = prod(block)
        if threads > MAX_THREADS:
            yield invalid, f"{threads} threads in a block, the limit is {MAX_THREADS}"
        if function.required_block and function.required_block != block:
            yield invalid, f"block {block}, .reqntid {function.required_block}"
        if threads > function.program.max_threads:
            limit = f"its .maxntid allows {function.program.max_threads}"
            yield "CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES", f"{threads} threads in a block, {limit}"
        if self.shared_bytes > function.max_dynamic_shared:
            limit = f"the function allows {function.max_dynamic_shared}"
            yield invalid, f"{self.shared_bytes} bytes of dynamic shared memory, {limit}"
        yield from self._cluster_violations(device)
        room = function.blocks_per_sm(threads, self.shared_bytes) * device.sm_count
        if self.is_cooperative and prod(grid) > room:
            message = f"{prod(grid)} CTAs, {room} fit on the device at once"
            yield "CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE", message
        if cluster != NO_CLUSTER and not function.clusters_at_once(
            cluster, threads, self.shared_bytes
        ):
            message = f"not one cluster {cluster} fits on the device"
            yield "CUDA_ERROR_INVALID_CLUSTER_SIZE", message

    def _cluster_violations(self, device: DeviceProperties) -> Iterator[tuple[str, str]]:
        required, cluster = self.function.required_cluster, self.cluster
        if self.function.needs_cluster and cluster == NO_CLUSTER:
            yield "CUDA_ERROR_INVALID_VALUE", ".explicitcluster, but no cluster is given"
        if cluster == NO_CLUSTER:
            return
        code = "CUDA_ERROR_INVALID_CLUSTER_SIZE"
        if not device.has_clusters:
            yield "CUDA_ERROR_INVALID_VALUE", f"{device.target} has no clusters"
        if any(n < 1 for n in cluster) or prod(cluster) > MAX_CLUSTER:
            yield code, f"cluster {cluster}, at most {MAX_CLUSTER} CTAs"
        if any(g % c for g, c in zip(self.grid, cluster, strict=True)):
            yield code, f"grid {self.grid} is not a multiple of cluster {cluster}"
        if required and required != cluster:
            yield code, f"cluster {cluster}, .reqnctapercluster {required}"
