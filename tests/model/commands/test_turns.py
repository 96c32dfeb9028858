"""Threads of a command that answers."""

from __future__ import annotations

import sys
from typing import Any, cast

import pytest

from urdir.model.commands.opening import load
from urdir.model.engine import loading
from urdir.model.turns import TURN_SECONDS


def test_threads_take_short_turns_from_the_opening_on(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = sys.getswitchinterval()
    found: list[float] = []
    monkeypatch.setattr(loading, "Loading", lambda wanted: found.append(sys.getswitchinterval()))
    try:
        sys.setswitchinterval(0.005)
        load(cast(Any, None))
        assert [*found, sys.getswitchinterval()] == pytest.approx([TURN_SECONDS] * 2)
    finally:
        sys.setswitchinterval(usual)
