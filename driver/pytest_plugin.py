"""The pytest plugin: devices and streams as fixtures, a marker for tests that need a GPU.

An entry point loads it in every test run of an environment with urdir, so it imports only pytest
until a test needs more, and all its names begin with ``urdir``:
=======================  ======================================================================
``urdir_device``         an opened device; the test runs on the emulator, and on the GPU as well
                                                  if there is one
``urdir_stream``         a stream of ``urdir_device``
``urdir_emulator``       a new emulator: its own memory, no trace of other tests
``urdir_sanitizer``      a new emulator that also finds races between threads
``urdir_gpu``            the first GPU, shared by all tests; skips without one
``urdir_probe``          what the machine has (`urdir.driver.device.Probe`)
``urdir_faults``         ``urdir_faults("allocation", nth=2)``: a call on ``urdir_emulator`` fails
``@urdir_gpu``           marker: the test needs a GPU, and is skipped without one
``--urdir-require-gpu``  such a test fails without a GPU
``urdir_header``         ini option: name the GPU (or why there is none) in the header of every run
=======================  ======================================================================
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from urdir.driver.device import Device, Probe
    from urdir.driver.device_owner import DeviceOwner
    from urdir.driver.stream import Stream

MARKER = "urdir_gpu"
REQUIRE = "--urdir-require-gpu"
#: Fixtures whose tests look for a GPU.
_PROBING = frozenset({"urdir_gpu", "urdir_probe", "urdir_device_name"})


@functools.cache
def find_gpu() -> Probe:
    """The GPUs of this machine, looked up once per run."""
    from urdir.driver.device import probe

    return probe()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Declare the option and the ini setting."""
    group = parser.getgroup("urdir", "kernels on NVIDIA GPUs")
    group.addoption(
        REQUIRE, action="store_true", help="no GPU fails a GPU test (default: skips it)"
    )
    parser.addini(
        "urdir_header", "name the GPU in the header of every run", type="bool", default=False
    )


def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker."""
    config.addinivalue_line(
        "markers", f"{MARKER}: needs an NVIDIA GPU; skipped without one, or failed ({REQUIRE})"
    )


# ---- report --------------------------------------------------------------------------------------


def pytest_report_header(config: pytest.Config) -> str | None:
    """The line about the GPU, if every run reports it."""
    return _line() if _always(config) else None


def pytest_report_collectionfinish(
    config: pytest.Config, items: Sequence[pytest.Item]
) -> str | None:
    """The same line otherwise, if some test looks for a GPU."""
    return None if _always(config) or not any(map(_probes, items)) else _line()


def _always(config: pytest.Config) -> bool:
    return bool(config.getini("urdir_header") or config.getoption(REQUIRE))


def _probes(item: pytest.Item) -> bool:
    names = getattr(item, "fixturenames", ())
    return item.get_closest_marker(MARKER) is not None or not _PROBING.isdisjoint(names)


def _line() -> str:
    return f"urdir: {find_gpu().detail}"


# ---- the GPU -------------------------------------------------------------------------------------


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip or fail a marked test before its fixtures are set up."""
    if item.get_closest_marker(MARKER):
        need_gpu(item.config)


def need_gpu(config: pytest.Config) -> Probe:
    """Skip the test without a GPU; fail it if one is required, or exists and fails."""
    found = find_gpu()
    if found.is_absent and not config.getoption(REQUIRE):
        pytest.skip(found.detail)
    if found.error is not None:
        pytest.fail(found.detail, pytrace=False)
    return found


@pytest.fixture(scope="session")
def urdir_probe() -> Probe:
    """The GPUs of this machine; never fails."""
    return find_gpu()


@pytest.fixture(scope="session")
def _urdir_shared_gpu() -> Iterator[DeviceOwner]:
    """One opened GPU for all tests: opening costs more than most tests."""
    from urdir.driver.device_owner import DeviceOwner

    with DeviceOwner("cuda") as shared:
        yield shared


@pytest.fixture
def urdir_gpu(request: pytest.FixtureRequest, _urdir_shared_gpu: DeviceOwner) -> Device:
    """The first GPU, opened once for all tests. Do not close it."""
    need_gpu(request.config)
    return _urdir_shared_gpu.device


# ---- any device ----------------------------------------------------------------------------------


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run tests with ``urdir_device`` on the emulator, and on a GPU if there is one."""
    if "urdir_device_name" in metafunc.fixturenames:
        names: list[object] = ["emulator"]
        if metafunc.config.getoption(REQUIRE) or not find_gpu().is_absent:
            names.append(pytest.param("cuda", marks=getattr(pytest.mark, MARKER)))
        metafunc.parametrize("urdir_device_name", names, scope="session")


@pytest.fixture
def urdir_device(urdir_device_name: str) -> Iterator[Device]:
    """A device of either kind, opened for one test, without a cache on disk."""
    from urdir.driver.device import Device

    with Device.open(urdir_device_name) as device:
        yield device


@pytest.fixture
def urdir_stream(urdir_device: Device) -> Iterator[Stream]:
    """A stream of ``urdir_device``."""
    with urdir_device.create_stream() as stream:
        yield stream


@pytest.fixture
def urdir_emulator() -> Iterator[Device]:
    """A new emulator, for emulator features and for tests that need no GPU."""
    from urdir.driver.device import Device

    with Device.open("emulator") as device:
        yield device


@pytest.fixture
def urdir_sanitizer() -> Iterator[Device]:
    """A new emulator that also finds races between threads, several times slower."""
    from urdir.driver.bindings import emulated
    from urdir.driver.device import Device

    with Device.open("emulator", api=emulated(sanitize=True)) as device:
        yield device


@pytest.fixture
def urdir_faults(urdir_emulator: Device) -> Iterator[Callable[..., None]]:
    """``urdir_faults(kind, nth=1, code=None)``: the nth event of a kind on the emulator fails.

    Kinds: "allocation", "host_allocation", "link", "module_load", "instantiate", "launch". A fault
    that never occurred fails the test, which would not have tested it.
    """
    yield urdir_emulator.api.inject
    if left := urdir_emulator.api.pending_faults():
        pytest.fail(f"injected, but never occurred: {', '.join(left)}", pytrace=False)
