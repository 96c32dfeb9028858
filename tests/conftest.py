"""The plugin's devices under short names, and --full."""

from __future__ import annotations

import gc
import importlib
import itertools
import os
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from urdir.driver import pytest_plugin
from urdir.driver.device import Device, Probe
from urdir.driver.device_owner import DeviceOwner
from urdir.driver.errors import CudaError

# Neither an example nor making one is a failure because the machine has other work.
hypothesis.settings.register_profile(
    "loaded", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("loaded")

#: Test data, among it a package with tests of its own: model/verify/test_kernel_suite.py runs them.
collect_ignore = ["data"]


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    parser.addoption("--full", action="store_true", help="also run the tests marked full")
    parser.addoption(
        "--references",
        type=Path,
        metavar="DIR",
        help="run the tests of logits, and no others, on the references of this folder",
    )
    parser.addoption(
        "--made-folders",
        type=Path,
        metavar="DIR",
        help="where test_made_folders.py keeps its folders (pytest's cache)",
    )
    parser.addoption("--soak", type=float, default=600.0, help="seconds of a server under load")
    if not pluginmanager.has_plugin("urdir"):  # from the source tree: nothing is installed
        pluginmanager.register(pytest_plugin, "urdir")


def pytest_configure(config: pytest.Config) -> None:
    # for xdist's workers, which begin later: each has a core, and idle threads of BLAS spin
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if not hasattr(config, "workerinput"):  # one cache for all workers, and not the user's
        cache = tempfile.TemporaryDirectory(prefix="urdir-cache-")
        config.add_cleanup(cache.cleanup)
        os.environ["URDIR_CACHE_DIR"] = cache.name


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each worker whole files where possible, instead of slices of every file: tests of a file
    share compiled kernels and open models."""
    from xdist.scheduler import WorkStealingScheduling

    is_default = config.getoption("dist") == "load"
    return WorkStealingScheduling(config, log) if is_default else None


@pytest.hookimpl(optionalhook=True, wrapper=True)
def pytest_xdist_auto_num_workers() -> Generator[None, int, int]:
    """One more than there are cores: tests of servers, browsers and commands wait half of their
    time for other processes."""
    found = yield
    return found if "PYTEST_XDIST_AUTO_NUM_WORKERS" in os.environ else found + 1


@pytest.hookimpl(tryfirst=True)
def pytest_collection(session: pytest.Session) -> None:
    """In a run of everything each worker begins with other files: a new clone has no compiled
    tests, all would rewrite each at the same time (9 s), and so find those of the others."""
    config = session.config
    if not hasattr(config, "workerinput") or config.args != config.getini("testpaths"):
        return
    worker, workers = int(config.workerinput["workerid"][2:]), config.workerinput["workercount"]
    for path in sorted((config.rootpath / "tests").rglob("test_*.py"))[worker::workers]:
        inside = path.relative_to(config.rootpath)
        if "data" not in inside.parts:
            with suppress(Exception, pytest.skip.Exception):  # which collection reports
                importlib.import_module(".".join(inside.with_suffix("").parts))


def pytest_collectstart() -> None:
    gc.disable()  # until all tests are collected, none of which is garbage: a quarter of the time


def pytest_collection_finish() -> None:
    gc.freeze()  # thousands of tests, which every collection would look through
    gc.enable()
    gc.set_threshold(200_000, 1 << 30, 1 << 30)  # older objects: see `pytest_runtest_teardown`


#: How many tests have ended in this process, and its CPU time at the last look at frozen objects.
_ended, _looked = itertools.count(1), [0.0]
#: CPU seconds between two of these: one takes a second.
_BETWEEN = 240.0


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Long-lived objects, compiled kernels above all, are frozen, since looking through them in
    every collection took a fifteenth of the time. Now and then they are collected too: frozen
    cycles are never freed."""
    if next(_ended) % 50 == 0:
        if (now := time.process_time()) - _looked[0] > _BETWEEN:
            _looked[0] = now
            gc.unfreeze()
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """What is a part of ``--full`` is left out, and counted as deselected: 8,000 skipped tests took
    15 s. Of the rest the quick ones are marked."""
    quick, turns = set(), defaultdict[tuple[str, type], "itertools.count[int]"](itertools.count)
    kept, left_out = [], []
    only_references = config.getoption("--references") is not None
    for item in items:
        case = _kind_of_case(item)
        if only_references:
            is_left_out = item.get_closest_marker("references") is None
        else:
            is_left_out = _is_full(item, turns[case]) and not config.getoption("--full")
        if is_left_out:
            left_out.append(item)
            continue
        kept.append(item)
        if case not in quick and not item.get_closest_marker("slow"):
            quick.add(case)
            item.add_marker(pytest.mark.quick)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def _is_full(item: pytest.Item, turn: Iterator[int]) -> bool:
    """Whether the default run leaves a test out: on the emulator. A GPU takes no time for it.
    ``turn`` counts the cases that come by turns: of n the first, or those that are named."""
    callspec = getattr(item, "callspec", None)
    if callspec is not None and callspec.params.get("urdir_device_name") == "cuda":
        return False
    if item.get_closest_marker("full") is not None:
        return True
    turns = item.get_closest_marker("turns")
    if turns is None:
        return False
    which = turns.kwargs.get("which", 0)
    return next(turn) % turns.args[0] not in (which if isinstance(which, tuple) else (which,))


def _kind_of_case(item: pytest.Item) -> tuple[str, type]:
    """What a test tries: its function, and the kernel where it is for every kernel."""
    callspec = getattr(item, "callspec", None)
    spec = callspec.params.get("spec") if callspec else None
    return item.nodeid.partition("[")[0], type(spec)


@pytest.fixture
def own_garbage() -> None:
    """Collections in this test look at its own objects alone: those that thousands of tests before
    it have left (gigabytes, seconds for each) stay as they are."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _gpu_stays_open(request: pytest.FixtureRequest) -> None:
    """Tests of a GPU share its primary context, which the driver ends with its last user and takes
    a fifth of a second to make again: thousands of tests open a device of their own."""
    if request.node.get_closest_marker(pytest_plugin.MARKER):
        shared: DeviceOwner = request.getfixturevalue("_urdir_shared_gpu")
        with suppress(CudaError):  # of a test before, by a device of its own
            shared.device.synchronize()
        assert shared.device  # after a fault a new one


@pytest.fixture(scope="session")
def device_name(urdir_device_name: str) -> str:
    """ "emulator", and "cuda" as well where the probe finds a GPU."""
    return urdir_device_name


@pytest.fixture(scope="session")
def needs_gpus(device_name: str, urdir_probe: Probe) -> Callable[[int], None]:
    """``needs_gpus(count)`` skips a test of GPUs where there are fewer; there is any number of
    emulated devices."""

    def need(count: int) -> None:
        if device_name == "cuda" and len(urdir_probe.devices) < count:
            pytest.skip(f"needs {count} GPUs, here are {len(urdir_probe.devices)}")

    return need


@pytest.fixture
def device(urdir_device: Device) -> Device:
    """A device of either kind, opened for one test, without a disk cache."""
    return urdir_device


@pytest.fixture
def needs_wgmma() -> Callable[[Device], None]:
    """Skips a test if a device has no wgmma."""

    def check(device: Device) -> None:
        if device.native_target != "sm_90a":
            pytest.skip(f"wgmma is for sm_90a, not {device.native_target}")

    return check


@pytest.fixture
def on_hopper(request: pytest.FixtureRequest, needs_wgmma: Callable[[Device], None]) -> None:
    """The same of the test's ``device``, where it has one."""
    if "device" in request.fixturenames:
        needs_wgmma(request.getfixturevalue("device"))


@pytest.fixture
def emulator(urdir_emulator: Device) -> Device:
    """The emulator, for what only it can do: injected faults, a poisoned context."""
    return urdir_emulator


@pytest.fixture
def gpu_device(urdir_gpu: Device) -> Device:
    """The first GPU."""
    return urdir_gpu
