"""Properties and limits of a device, read once when it is opened."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from urdir.driver.errors import check
from urdir.ptxgen.ptx.architecture import CLUSTERS_SINCE, PORTABLE_CLUSTER
from urdir.ptxgen.ptx.launch import Dim3

# Field of DeviceProperties -> name of its CUdevice_attribute.
_ATTRIBUTES: Mapping[str, str] = {
    "sm_count": "MULTIPROCESSOR_COUNT",
    "warp_size": "WARP_SIZE",
    "max_threads_per_block": "MAX_THREADS_PER_BLOCK",
    "registers_per_block": "MAX_REGISTERS_PER_BLOCK",
    "shared_per_block": "MAX_SHARED_MEMORY_PER_BLOCK",
    "shared_per_block_optin": "MAX_SHARED_MEMORY_PER_BLOCK_OPTIN",
    "shared_per_sm": "MAX_SHARED_MEMORY_PER_MULTIPROCESSOR",
    "l2_bytes": "L2_CACHE_SIZE",
}


@dataclass(frozen=True, slots=True)
class DeviceProperties:
    """One device; sizes in bytes, versions as (major, minor)."""

    name: str
    compute_capability: tuple[int, int]
    driver_version: tuple[int, int]
    uuid: str
    total_memory: int
    max_grid: Dim3
    max_block: Dim3
    cooperative: bool
    sm_count: int
    warp_size: int
    max_threads_per_block: int
    registers_per_block: int
    shared_per_block: int
    shared_per_block_optin: int
    shared_per_sm: int
    l2_bytes: int

    @property
    def max_cluster(self) -> int:
        """Cluster size that is guaranteed to be accepted; 1 below compute capability 9.0."""
        has_clusters = self.compute_capability >= divmod(CLUSTERS_SINCE, 10)
        return PORTABLE_CLUSTER if has_clusters else 1


def read_properties(api: Any, gpu: Any) -> DeviceProperties:
    """Ask the driver about the device with handle ``gpu``. Raises CudaError."""

    def attribute(name: str) -> int:
        key = getattr(api.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
        return int(check(api, api.cuDeviceGetAttribute(key, gpu), f"cuDeviceGetAttribute {name}"))

    def extent(what: str) -> Dim3:
        x, y, z = (attribute(f"MAX_{what}_DIM_{axis}") for axis in "XYZ")
        return x, y, z

    name = check(api, api.cuDeviceGetName(256, gpu), "cuDeviceGetName")
    uuid = check(api, api.cuDeviceGetUuid(gpu), "cuDeviceGetUuid")
    return DeviceProperties(
        name=bytes(name).split(b"\0")[0].decode(),
        compute_capability=(
            attribute("COMPUTE_CAPABILITY_MAJOR"),
            attribute("COMPUTE_CAPABILITY_MINOR"),
        ),
        driver_version=driver_version(api),
        uuid=bytes(uuid.bytes).hex(),
        total_memory=int(check(api, api.cuDeviceTotalMem(gpu), "cuDeviceTotalMem")),
        max_grid=extent("GRID"),
        max_block=extent("BLOCK"),
        cooperative=bool(attribute("COOPERATIVE_LAUNCH")),
        **{field: attribute(name) for field, name in _ATTRIBUTES.items()},
    )


def driver_version(api: Any) -> tuple[int, int]:
    """The CUDA version that the driver implements: (13, 0) for the 580 line."""
    version = int(check(api, api.cuDriverGetVersion(), "cuDriverGetVersion"))
    return version // 1000, version % 1000 // 10
