"""Small kernels in PTX and short ways to use the emulated driver as a program would."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from urdir.driver.emulator.api import Api

HEADER = ".version 7.8\n.target sm_90\n.address_size 64\n"

_INDEX = """
    mov.u32 %i, %ctaid.x;
    mov.u32 %j, %ntid.x;
    mov.u32 %k, %tid.x;
    mad.lo.u32 %i, %i, %j, %k;
    mul.wide.u32 %o, %i, 4;
"""

# y[i] = x[i] + value; after: `wait` where the template says so
_ADD = """
.visible .entry NAME(.param .u64 x, .param .u64 y, .param .u32 n, .param .u32 value)
{
    .reg .pred %p;
    .reg .b32 %i, %j, %k, %n, %a, %v;
    .reg .b64 %x, %y, %o;
    ld.param.u64 %x, [x];
    ld.param.u64 %y, [y];
    ld.param.u32 %n, [n];
    ld.param.u32 %v, [value];
INDEX
    setp.ge.u32 %p, %i, %n;
    @%p bra DONE;
    add.u64 %x, %x, %o;
    add.u64 %y, %y, %o;
    BEFORE
    ld.global.u32 %a, [%x];
    MIDDLE
    add.u32 %a, %a, %v;
    st.global.u32 [%y], %a;
DONE:
    ret;
}
""".replace("INDEX", _INDEX)


def _add(name: str, before: str = "", middle: str = "") -> str:
    return _ADD.replace("NAME", name).replace("BEFORE", before).replace("MIDDLE", middle)


# out = 1 once the flag is set; spins until then
_SPIN = """
.visible .entry spin(.param .u64 flag, .param .u64 out)
{
    .reg .pred %p;
    .reg .b32 %a;
    .reg .b64 %x, %y;
    ld.param.u64 %x, [flag];
    ld.param.u64 %y, [out];
AGAIN:
    ld.relaxed.gpu.global.u32 %a, [%x];
    setp.eq.u32 %p, %a, 0;
    @%p bra AGAIN;
    st.global.u32 [%y], %a;
    ret;
}
"""

# every parameter size, in an order that needs padding
_PARAMETERS = """
.visible .entry parameters(
    .param .u8 a, .param .u64 out, .param .u16 b, .param .f32 c, .param .f64 d, .param .u8 e)
{
    .reg .b16 %h;
    .reg .b32 %w;
    .reg .b64 %y, %l;
    ld.param.u64 %y, [out];
    ld.param.u8 %h, [a];
    cvt.u64.u16 %l, %h;
    st.global.u64 [%y], %l;
    ld.param.u16 %h, [b];
    cvt.u64.u16 %l, %h;
    st.global.u64 [%y+8], %l;
    ld.param.u32 %w, [c];
    cvt.u64.u32 %l, %w;
    st.global.u64 [%y+16], %l;
    ld.param.u64 %l, [d];
    st.global.u64 [%y+24], %l;
    ld.param.u8 %h, [e];
    cvt.u64.u16 %l, %h;
    st.global.u64 [%y+32], %l;
    ret;
}
"""

_SHARED = """
.visible .entry shared_1k(.param .u64 out)
.maxntid 64, 1, 1
{
    .shared .align 4 .b8 room[1024];
    ret;
}
"""

WAIT = "griddepcontrol.wait;"
TRIGGER = "griddepcontrol.launch_dependents;"

PTX = HEADER + "".join(
    [
        _add("add"),
        _add("wait_first", before=WAIT),
        _add("trigger_wait_first", before=TRIGGER + "\n" + WAIT),
        _add("load_then_wait", middle=WAIT),
        _SPIN,
        _PARAMETERS,
        _SHARED,
    ]
)


class Bench:
    """An initialised emulated driver with a current context, and shorthands for tests."""

    def __init__(self, **options: Any) -> None:
        self.api = Api(**options)
        self.ok(self.api.cuInit(0))
        self.device = self.ok(self.api.cuDeviceGet(0))
        self.context = self.ok(self.api.cuDevicePrimaryCtxRetain(self.device))
        self.ok(self.api.cuCtxSetCurrent(self.context))
        self._module: Any = None
        self._alive: list[Any] = []

    def ok(self, result: tuple[Any, ...]) -> Any:
        """The values of a call that must succeed."""
        assert int(result[0]) == 0, (result, self.api.last_refusal)
        return result[1] if len(result) == 2 else result[1:]

    def fails(self, result: tuple[Any, ...], name: str) -> None:
        """A call must fail with CUDA_ERROR_``name`` and give None for each value."""
        assert result[0].name == f"CUDA_ERROR_{name}", (result, self.api.last_refusal)
        assert all(value is None for value in result[1:])

    def function(self, name: str) -> Any:
        """A kernel of PTX above."""
        if self._module is None:
            self._module = self.ok(self.api.cuModuleLoadData(PTX.encode()))
        return self.ok(self.api.cuModuleGetFunction(self._module, name.encode()))

    def upload(self, array: Any) -> int:
        """Device memory that holds a copy of an array."""
        array = np.ascontiguousarray(array)
        address = self.ok(self.api.cuMemAlloc(array.nbytes))
        self.ok(self.api.cuMemcpyHtoD(address, array.ctypes.data, array.nbytes))
        return int(address)

    def download(self, address: int, like: Any) -> Any:
        """A new array of the type and shape of ``like`` from device memory."""
        array = np.empty_like(like)
        self.ok(self.api.cuMemcpyDtoH(array.ctypes.data, address, array.nbytes))
        return array

    def pinned(self, count: int) -> tuple[int, Any]:
        """Page-locked memory: its address, and a u32 view of it."""
        address = self.ok(self.api.cuMemHostAlloc(4 * count, 0))
        return address, np.ctypeslib.as_array((ctypes.c_uint32 * count).from_address(address))

    def arguments(self, *values: Any) -> int:
        """The address of a pointer array; ints are u64, everything else a ctypes value."""
        stored = [ctypes.c_uint64(v) if isinstance(v, int) else v for v in values]
        pointers = (ctypes.c_void_p * len(stored))(*(ctypes.addressof(v) for v in stored))
        self._alive.append((stored, pointers))
        return ctypes.addressof(pointers)

    def add(self, x: int, y: int, n: int, value: int) -> int:
        """The arguments of the kernels that compute y = x + value."""
        return self.arguments(x, y, ctypes.c_uint32(n), ctypes.c_uint32(value))

    def launch(
        self,
        name: str,
        arguments: int,
        stream: Any = 0,
        grid: tuple[int, int, int] = (1, 1, 1),
        block: tuple[int, int, int] = (32, 1, 1),
        shared: int = 0,
    ) -> tuple[Any, ...]:
        """The result of cuLaunchKernel."""
        function = self.function(name)
        return self.api.cuLaunchKernel(function, *grid, *block, shared, stream, arguments, 0)

    def launch_ex(
        self,
        name: str,
        arguments: int,
        stream: Any = 0,
        grid: tuple[int, int, int] = (1, 1, 1),
        block: tuple[int, int, int] = (32, 1, 1),
        **attributes: Any,
    ) -> tuple[Any, ...]:
        """The result of cuLaunchKernelEx: ``cluster=(2, 1, 1)``, ``cooperative=1``,
        ``programmatic=1``.
        """
        api = self.api
        config = api.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.blockDimX, config.blockDimY, config.blockDimZ = block
        config.hStream = api.CUstream(int(stream))
        found = []
        for key, value in attributes.items():
            attribute = api.CUlaunchAttribute()
            ids = api.CUlaunchAttributeID
            if key == "cluster":
                attribute.id = ids.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
                dim = attribute.value.clusterDim
                dim.x, dim.y, dim.z = value
            elif key == "cooperative":
                attribute.id = ids.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
                attribute.value.cooperative = value
            else:
                attribute.id = ids.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
                attribute.value.programmaticStreamSerializationAllowed = value
            found.append(attribute)
        config.attrs = found
        config.numAttrs = len(found)
        return api.cuLaunchKernelEx(config, self.function(name), arguments, 0)

    def stream(self, flags: int = 0) -> Any:
        """A new stream."""
        return self.ok(self.api.cuStreamCreate(flags))

    def synchronize(self, stream: Any) -> None:
        """Wait for a stream."""
        self.ok(self.api.cuStreamSynchronize(stream))

    def node_params(
        self,
        name: str,
        arguments: int,
        grid: tuple[int, int, int] = (1, 1, 1),
        block: tuple[int, int, int] = (32, 1, 1),
    ) -> Any:
        """CUDA_KERNEL_NODE_PARAMS for a kernel."""
        p = self.api.CUDA_KERNEL_NODE_PARAMS()
        p.func = self.function(name)
        p.gridDimX, p.gridDimY, p.gridDimZ = grid
        p.blockDimX, p.blockDimY, p.blockDimZ = block
        p.kernelParams = arguments
        return p


@pytest.fixture
def bench() -> Bench:
    """A fresh emulated driver that poses as sm_90."""
    return Bench()


@pytest.fixture
def make_bench() -> type[Bench]:
    """Makes more of them, with options of Api."""
    return Bench
