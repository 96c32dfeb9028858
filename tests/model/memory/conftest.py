"""What tests of memory share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from urdir.driver.device import Device
from urdir.driver.stream import Stream


@pytest.fixture
def stream(device: Device) -> Iterator[Stream]:
    """A stream of the test's device."""
    with device.create_stream() as created:
        yield created
