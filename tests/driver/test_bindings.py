"""Missing parts of a driver become typed errors; importing needs and loads nothing."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import cuda.bindings.driver as cuda
import pytest

from urdir.driver import bindings
from urdir.driver.errors import DriverTooOldError, NoDriverError


class DynamicLibNotFoundError(RuntimeError):
    """As cuda.pathfinder raises it."""


def _raise(error: Exception) -> Any:
    raise error


def test_no_libcuda_is_no_driver() -> None:
    missing = DynamicLibNotFoundError('"cuda" can only be found via system search')
    api = bindings.GuardedApi(SimpleNamespace(cuInit=lambda flags: _raise(missing)))
    with pytest.raises(NoDriverError, match="no NVIDIA driver on this machine"):
        api.cuInit(0)


def test_a_thread_that_loads_the_driver_imports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it say what is missing: opening a device does."""
    done: list[str] = []

    def initialise(flags: int) -> Any:
        done.append("loaded")
        raise DynamicLibNotFoundError

    def import_bindings() -> SimpleNamespace:
        done.append("imported")
        return SimpleNamespace(CUresult=cuda.CUresult, cuInit=initialise)

    monkeypatch.setattr(bindings, "_import_bindings", import_bindings)
    load = bindings.driver_loader()
    assert done == ["imported"]
    load()
    assert done == ["imported", "loaded"]


def test_missing_function_is_a_driver_too_old() -> None:
    missing = RuntimeError('Function "cuFuncGetParamInfo" not found')
    api = bindings.GuardedApi(
        SimpleNamespace(
            cuFuncGetParamInfo=lambda f, i: _raise(missing),
            cuDriverGetVersion=lambda: (cuda.CUresult.CUDA_SUCCESS, 12020),
        )
    )
    with pytest.raises(
        DriverTooOldError, match=r"has CUDA 12\.2, needs >= 580 \(CUDA 13\); .*cuFuncGetParamInfo"
    ):
        api.cuFuncGetParamInfo(0, 0)


def test_function_taken_from_the_emulator_is_a_driver_too_old() -> None:
    emulated = bindings.emulated(driver_version=12020)
    emulated.remove("cuMemAlloc")
    with pytest.raises(DriverTooOldError, match=r"has CUDA 12\.2.*cuMemAlloc"):
        bindings.GuardedApi(emulated).cuMemAlloc(16)


def test_other_runtime_errors_pass() -> None:
    api = bindings.GuardedApi(
        SimpleNamespace(cuX=lambda: _raise(RuntimeError("List is too small")))
    )
    with pytest.raises(RuntimeError, match="List is too small"):
        api.cuX()


def test_enums_and_structs_are_those_of_the_bindings() -> None:
    api = bindings.real()
    assert api.CUresult is cuda.CUresult
    assert isinstance(api.CUDA_MEMCPY2D(), cuda.CUDA_MEMCPY2D)
    assert bindings.emulated().CUresult is cuda.CUresult
    with pytest.raises(AttributeError):
        _ = api.cuNoSuchFunction


def test_import_loads_neither_bindings_nor_libcuda() -> None:
    script = (
        "import sys, urdir.driver.device, urdir.driver.plan\n"
        "print([m for m in sys.modules if m.startswith('cuda.bindings')])\n"
        "print('libcuda' in open('/proc/self/maps').read())"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout.split("\n")[:2] == ["[]", "False"], result.stderr
