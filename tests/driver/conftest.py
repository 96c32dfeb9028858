"""A small kernel of its own for the driver's tests, with every part replaceable."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from urdir.ptxgen.spec import Access, LaunchShape, Param

N = 1000
SHAPE = LaunchShape((-(-N // 128), 1, 1), (128, 1, 1))

# y[i] = scale * x[i] + i, one thread an element
PTX = """\
.version 6.3
.target sm_75
.address_size 64
.visible .entry ramp(
    .param .u64 x,
    .param .u32 n,
    .param .u64 y,
    .param .f32 scale
)
{
    .reg .pred %done;
    .reg .b32 %i, %block, %threads, %n;
    .reg .b64 %x, %y, %offset;
    .reg .f32 %value, %scale, %index;
    ld.param.u64 %x, [x];
    ld.param.u64 %y, [y];
    ld.param.u32 %n, [n];
    ld.param.f32 %scale, [scale];
    mov.u32 %i, %tid.x;
    mov.u32 %block, %ctaid.x;
    mov.u32 %threads, %ntid.x;
    mad.lo.u32 %i, %block, %threads, %i;
    setp.ge.u32 %done, %i, %n;
    @%done bra DONE;
    mul.wide.u32 %offset, %i, 4;
    add.u64 %x, %x, %offset;
    add.u64 %y, %y, %offset;
    ld.global.f32 %value, [%x];
    cvt.rn.f32.u32 %index, %i;
    fma.rn.f32 %value, %value, %scale, %index;
    st.global.f32 [%y], %value;
DONE:
    ret;
}
"""


@dataclass(frozen=True)
class TextKernel:
    """A kernel given as PTX text; counts how often it is rendered."""

    text: str = PTX
    name: str = "ramp"
    params: tuple[Param, ...] = (
        Param("x", "f32", (N,), Access.IN),
        Param("n", "u32"),
        Param("y", "f32", (N,), Access.OUT),
        Param("scale", "f32"),
    )
    launch_shape: LaunchShape = SHAPE
    spec_key: str = "ramp-1"
    waits_for_dependencies: bool = False
    rendered: tuple[list[str], ...] = ([],)

    def key(self, target: str) -> str:
        return f"{self.spec_key}-{target}"

    def ptx(self, target: str) -> str:
        self.rendered[0].append(target)
        return self.text

    def shape_of(self, param: Param) -> tuple[int, ...]:
        return tuple(int(extent) for extent in param.shape)

    def nbytes(self, param: Param) -> int:
        return int(np.prod(self.shape_of(param))) * param.numpy_dtype.itemsize

    def reference(self, **inputs: Any) -> dict[str, Any]:
        exact = inputs["x"].astype(np.float64) * inputs["scale"] + np.arange(N)
        return {"y": exact.astype(np.float32)}

    def bytes_moved(self) -> int:
        return 8 * N

    def flops(self) -> int:
        return 2 * N


@pytest.fixture
def make_kernel() -> Callable[..., TextKernel]:
    """Makes `TextKernel`s: ``make_kernel(text=..., params=...)``."""

    def make(**fields: Any) -> TextKernel:
        return TextKernel(**{"rendered": ([],), **fields})

    return make


@pytest.fixture
def start_python() -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """``start_python(script, *argv)``: another interpreter that finds what this one finds."""
    started: list[subprocess.Popen[bytes]] = []

    def start(script: str, *argv: object) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-c", script, *map(str, argv)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        started.append(subprocess.Popen(command, env=environment))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait()
