"""`urdir chat` with the demo model."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable

import pytest

from urdir.model.memory.device_state import DecodeState

Cli = Callable[..., tuple[int, str, str]]


@pytest.mark.slow
def test_chat_keeps_the_conversation(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    turns = "What is 2 plus 3?\n/nonsense\nAnd plus 1?\n/clear\n/exit\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(turns))
    code, out, err = cli("chat", "--temp", "0")
    assert code == 0
    assert out.splitlines() == ["2 plus 3 is 5.", "5 plus 1 is 6."]
    assert "/nonsense: unknown" in err
    assert "(0 cached)" not in err.splitlines()[-1]


@pytest.mark.full  # engine/test_modes.py
@pytest.mark.slow
def test_chat_chooses_on_the_host_in_correctness_mode(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every token from logits that were downloaded: the device is not asked for one."""

    def chosen(*_: object, **__: object) -> None:
        raise AssertionError("tokens are chosen on the device")

    monkeypatch.setenv("CORRECTNESS_MODE", "1")
    monkeypatch.setattr(DecodeState, "chosen", chosen)
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is 2 plus 3?\n"))
    code, out, _ = cli("chat", "--temp", "0")
    assert (code, out) == (0, "2 plus 3 is 5.\n")


def test_chat_says_how_many_tokens_are_missing(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("word " * 40 + "\nHello!\n"))
    code, out, err = cli("chat", "--temp", "0", "-c", "32", "-n", "3")
    assert code == 0
    assert "exceed the context of 32 by" in err
    assert out.strip() != ""  # the next turn works
