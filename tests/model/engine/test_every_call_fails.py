"""Every function of the driver fails once, over opening, prompt, decoding and closing a model.

Whichever call it is: one of the package's errors, nothing left on the device, and another model can
be opened on the same driver, with the same answers. (tests/driver/test_every_call_fails.py does so
with every call of what a device can do.)
"""

from __future__ import annotations

import gc
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest

from tests.model.stepping import stepping
from urdir.driver import bindings
from urdir.driver.cache import CacheWarning
from urdir.driver.device import Device
from urdir.driver.errors import DriverError
from urdir.model.families.config import Config
from urdir.model.files.gguf import Gguf
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights

#: Functions of the default run; --full takes all.
SAMPLE = (
    "cuMemAlloc", "cuModuleLoadData", "cuStreamCreate", "cuMemcpyHtoDAsync",
    "cuLaunchKernelEx", "cuGraphInstantiate", "cuGraphLaunch", "cuMemFree",
)  # fmt: skip
#: Nobody is told where what is unreachable, or goes with its context, cannot be ended.
SILENT = {"cuGraphDestroy", "cuModuleUnload", "cuCtxGetCurrent", "cuCtxSetCurrent"}
SILENT |= {"cuEventDestroy"}
#: A cached kernel that fails is compiled anew, with a warning.
REBUILT = {"cuModuleLoadData", "cuModuleGetFunction", "cuFuncGetParamInfo", "cuFuncGetAttribute"}
REBUILT |= {"cuFuncSetAttribute"}


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled kernels, without which a run takes seconds."""
    return tmp_path_factory.mktemp("cache")


def use(api: Any, data: Path, cache: Path) -> list[int]:
    """Tokens chosen by the device, greedily, after a prompt."""
    with (
        Gguf(data / "golden" / "nano-llama-q8_0.gguf") as gguf,
        Device.open("emulator", api=api, cache_folder=cache) as device,
        Weights.load(gguf, Config.of(gguf), device) as weights,
        stepping(device, weights, SessionSettings(context=32)) as eager,
    ):
        eager.feed([1, 5, 6, 7])
        tokens = [eager.step()[0] for _ in range(3)]
        eager.truncate(2)
        return tokens


@pytest.fixture(scope="module")
def calls(cache: Path) -> dict[str, int]:
    """How often a sound run calls each function."""
    data = Path(__file__).parents[2] / "data"
    use(bindings.emulated(), data, cache)
    api = bindings.emulated()
    use(api, data, cache)
    assert api.live() == {}
    return {name: n for name, n in api.event_counts.items() if name.startswith("cu")}


def functions(config: pytest.Config) -> tuple[str, ...]:
    from urdir.driver.emulator.api import FUNCTIONS

    return tuple(FUNCTIONS) if config.getoption("--full") else SAMPLE


def failure(api: Any, data: Path, cache: Path) -> str | None:
    """The message of the run's error, if any."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CacheWarning)
        try:
            use(api, data, cache)
        except DriverError as error:
            return str(error)
    return None


@pytest.mark.slow
@pytest.mark.usefixtures("own_garbage")
def test_every_function_fails(
    calls: dict[str, int], data: Path, cache: Path, pytestconfig: pytest.Config
) -> None:
    expected = use(bindings.emulated(), data, cache)
    threads = set(threading.enumerate())
    for name in functions(pytestconfig):
        count = calls.get(name, 0)
        for nth in {n for n in (1, count // 2 + 1, count) if 0 < n <= count}:
            where = f"call {nth} of {name}"
            api = bindings.emulated()
            api.inject(name, nth)
            message = failure(api, data, cache)
            assert message is None or "CUDA_ERROR_UNKNOWN" in message, where
            assert message or name in SILENT | REBUILT, where
            gc.collect()
            assert not api.pending_faults(), where
            assert set(threading.enumerate()) <= threads, where
            left = {"context": 1} if name == "cuDevicePrimaryCtxRelease" else {}
            assert api.live() == left, where
        if count:
            assert use(api, data, cache) == expected, name
