"""Progress bars: on terminals alone, for what takes long, and nothing stays of them."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import termios
import threading

import pytest

from urdir.model.progress import Progress, until_first

DRAWN = """
import time
from tqdm import tqdm
from urdir.model import progress
from urdir.model.progress import Progress, until_first

progress._DELAY_SECONDS, progress._TICK_SECONDS = 60, 0.02
refresh, seen = tqdm.refresh, []


def noted(bar, *more, **options):
    refresh(bar, *more, **options)
    seen.append(bar.n)


tqdm.refresh = noted


def drawn(done):
    seen.clear()
    while seen.count(done) < 2:  # at least one has begun since
        time.sleep(0.01)


with Progress("short", 2) as bar:
    bar.advance()
progress._DELAY_SECONDS = 0.1
with Progress("loading", 4) as bar:
    for number in bar.over(range(4)):
        drawn(number)
    drawn(4)
    bar.note("a note")
    time.sleep(0.1)
with Progress("compiling") as bar:
    drawn(0)
    bar.reach(3, 4)
    drawn(3)


def late():
    drawn(0)
    yield from "abc"


print("".join(until_first("prompt", late())))
"""


def on_terminal(code: str) -> str:
    """What a program writes to a terminal of 80 columns."""
    leader, follower = pty.openpty()
    termios.tcsetwinsize(follower, (24, 80))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=follower, stderr=follower, env=environment
    ):
        os.close(follower)
        written = b""
        while True:
            try:
                piece = os.read(leader, 1 << 16)
            except OSError:  # the other side is closed
                break
            if not piece:
                break
            written += piece
    os.close(leader)
    return written.decode().replace("\r\n", "\n")


def test_bars_are_drawn_and_wiped() -> None:
    written = on_terminal(DRAWN)
    assert "short" not in written
    assert re.search(r"\rloading +25 % \|[#█]+[^\r]*\| 00:\d\d<00:\d\d", written)
    assert re.search(r"\rloading 100 % \|[^\r]*\| 00:\d\d<00:00", written)
    assert re.search(r"\rcompiling 00:\d\d", written)
    assert re.search(r"\rcompiling +75 %", written)
    assert re.search(r"\rprompt 00:\d\d", written)
    shown = [_last_text(line) for line in written.split("\n")]
    assert shown == ["a note", "abc", ""]


def _last_text(line: str) -> str:
    """What a terminal shows of a line that was written again and again."""
    cells: list[str] = []
    for part in line.split("\r"):
        cells[: len(part)] = part
    return "".join(cells).rstrip()


def test_nothing_is_written_where_there_is_no_terminal(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("urdir.model.progress._DELAY_SECONDS", 0.0)
    before = set(threading.enumerate())
    with Progress("loading", 2) as progress:
        assert set(threading.enumerate()) <= before
        progress.advance()
        progress.reach(1, 2)
        assert list(progress.over("ab")) == ["a", "b"]
        progress.note("a note")
    assert list(until_first("prompt", iter("xyz"))) == ["x", "y", "z"]
    assert list(until_first("prompt", iter(""))) == []
    assert capsys.readouterr() == ("", "a note\n")


def test_an_error_ends_the_bar() -> None:
    written = on_terminal(
        DRAWN.partition("with")[0]
        + "progress._DELAY_SECONDS = 0.1\n"
        + "with Progress('loading', 2) as bar:\n    drawn(0)\n    raise SystemExit('broken')\n"
    )
    assert "\rloading   0 %" in written
    assert [_last_text(line) for line in written.split("\n")] == ["broken", ""]
