"""Both turns of a conversation are timed, and the second one finds the first."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from urdir.driver.device import Device
from urdir.model.engine.session import Session
from urdir.model.families.config import Config
from urdir.model.files.gguf import Gguf
from urdir.model.measure import second_turn
from urdir.model.measure.second_turn import second_turn_context, second_turn_rows
from urdir.model.memory.session_settings import SessionSettings
from urdir.model.memory.weights import Weights


@pytest.mark.slow
def test_a_second_turn_finds_the_first(
    reference_file: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of the prompt, and the answer but for its last token, beside a window; the second time
    that, too, in host memory."""
    monkeypatch.setattr(second_turn, "ANSWER", 3)
    monkeypatch.setattr(second_turn, "QUESTION", 5)
    settings = SessionSettings(
        second_turn_context(60), page_len=16, sequences=2, chunk=32, prefix_host_memory=1 << 20
    )
    assert settings.context == 60 + 5 + 6
    with (
        Device.open("emulator") as device,
        Gguf(reference_file("gemma3-dense")) as gguf,
        Weights.load(gguf, Config.of(gguf), device) as weights,
        Session(device, weights, settings) as session,
    ):
        first, second, other = second_turn_rows(session, 60, 1)
    assert (first.turn, first.tokens, first.cached, first.share) == (1, 60, 0, 1.0)
    assert (second.turn, second.tokens, second.cached) == (2, 68, 62)
    assert second.share == pytest.approx(second.first_token_ms / first.first_token_ms)
    assert second.first_token_ms > 0
    assert (other.turn, other.source, other.tokens, other.cached) == (2, "host", 68, 63)
