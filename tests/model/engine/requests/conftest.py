"""What tests of requests have in common."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from urdir.driver.device import Device
from urdir.model.engine.session import Session
from urdir.model.families.config import Config
from urdir.model.files.gguf import Gguf
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights


@pytest.fixture
def session(data: Path, device_name: str) -> Iterator[Session]:
    """A session of a small model, with room for four users, in pages."""
    with _session(data, device_name) as opened:
        yield opened


@pytest.fixture
def emulated_session(data: Path) -> Iterator[Session]:
    """The same on the emulator, which counts what is open and can be made to fail."""
    with _session(data, "emulator") as opened:
        yield opened


@contextmanager
def _session(data: Path, device_name: str) -> Iterator[Session]:
    with (
        Device.open(device_name) as device,
        Gguf(data / "golden" / "nano-llama-q8_0.gguf") as gguf,
        Weights.load(gguf, replace(Config.of(gguf), context_length=1024), device) as weights,
        Session(device, weights, SessionSettings(64, sequences=4, page_len=16)) as opened,
    ):
        yield opened
