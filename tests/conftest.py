"""Devices for tests: the emulator always, the GPU as well where the probe finds one."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import pytest

from urdir.driver.device import Device, Probe, probe

find_gpu = functools.cache(probe)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--urdir-require-gpu", action="store_true", help="no GPU fails a GPU test (not: skips it)"
    )
    parser.addoption("--full", action="store_true", help="also run the tests marked full")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not config.getoption("--full"):
        for item in items:
            if item.get_closest_marker("full"):
                item.add_marker(pytest.mark.skip(reason="part of --full"))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """A test that takes ``device_name`` (or ``device``) runs on the emulator and on the GPU."""
    if "device_name" in metafunc.fixturenames:
        names: list[object] = ["emulator"]
        if metafunc.config.getoption("--urdir-require-gpu") or not find_gpu().is_absent:
            names.append(pytest.param("cuda", marks=pytest.mark.gpu))
        metafunc.parametrize("device_name", names, scope="session")


@pytest.fixture
def device(device_name: str) -> Iterator[Device]:
    """A device of either kind, opened for one test, without a disk cache."""
    with Device.open(device_name) as opened:
        yield opened


@pytest.fixture
def emulator() -> Iterator[Device]:
    """The emulator, for what only it can do: injected faults, a poisoned context."""
    with Device.open("emulator") as opened:
        yield opened


@pytest.fixture(scope="session")
def gpu_probe(pytestconfig: pytest.Config) -> Probe:
    """What the machine has; skips when it has no GPU. One that is there and fails is a failure."""
    found = find_gpu()
    if found.is_absent and not pytestconfig.getoption("--urdir-require-gpu"):
        pytest.skip(found.detail)
    if found.error is not None:
        pytest.fail(found.detail)
    return found


@pytest.fixture
def gpu_device(gpu_probe: Probe) -> Iterator[Device]:
    """The first GPU."""
    with Device.open("cuda") as opened:
        yield opened
