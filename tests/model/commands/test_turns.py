"""Threads of a command that answers."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from urdir.model.commands.opening import go_on_beside_answers, load
from urdir.model.engine import loading
from urdir.model.engine.batch import Output, StepShape
from urdir.model.engine.requests.warm_up import WarmUp
from urdir.model.turns import SHORT_TURN_SECONDS, TURN_SECONDS


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


def test_turns_are_shorter_until_all_graphs_are_recorded() -> None:
    usual = sys.getswitchinterval()
    gate = SimpleNamespace(left=0.0)
    steps: Any = SimpleNamespace(
        gate=gate,
        plans_enough=False,
        free_share=0.0,  # so that no graph is made
        waits=lambda shape: False,
        end_compilers=lambda: None,
        parts=SimpleNamespace(device=SimpleNamespace(wants_kernels=False)),
    )
    try:
        sys.setswitchinterval(TURN_SECONDS)
        go_on_beside_answers(None)
        go_on_beside_answers(WarmUp(steps, []))
        assert sys.getswitchinterval() == pytest.approx(TURN_SECONDS)
        warm_up = WarmUp(steps, [StepShape(1, 64, Output.GREEDY)])
        go_on_beside_answers(warm_up)
        assert sys.getswitchinterval() == pytest.approx(SHORT_TURN_SECONDS)
        warm_up.work(1.0)
        assert not warm_up.left
        assert sys.getswitchinterval() == pytest.approx(TURN_SECONDS)
    finally:
        sys.setswitchinterval(usual)
