"""Ctrl-C in every phase of a command, and a conversation on a terminal."""

from __future__ import annotations

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from tests.patience import PATIENCE
from tests.processes import kill, start_python
from urdir.model import interrupts

#: The command, interrupted where it first imports a module of that name.
AT_IMPORT = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
name, sent = sys.argv.pop(1), []
def hook(event, args):
    if event == "import" and args[0] == name and not sent:
        sent.append(name)
        signal.raise_signal(signal.SIGINT)
sys.addaudithook(hook)
from urdir.model.__main__ import main
code = main()
sys.exit(code if sent else 99)
"""


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join(sys.path)
    return {**os.environ, "URDIR_DEVICE": "emulator", "PYTHONPATH": path, **more}


@pytest.mark.parametrize(
    "module",
    [
        "urdir.model.interrupts",
        pytest.param("urdir.model.commands.parser", marks=pytest.mark.full),
        "urdir.model.commands.opening",
        "urdir.model.memory.weights",  # a model is opened, in three threads
        pytest.param("urdir.model.text.text_stream", marks=pytest.mark.full),
        pytest.param("urdir.model.engine.generate", marks=pytest.mark.slow),  # weights go up
    ],
)
def test_ctrl_c_at_any_time_is_one_line(module: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", AT_IMPORT, module, "run", "--temp", "0", "-p", "Hi"],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )
    assert done.returncode in (130, -signal.SIGINT), done.stderr  # Python's own way to say it
    assert done.stderr.split() == ["interrupted"]
    assert done.stdout == ""


class Interrupted:
    """An attribute that is named when Ctrl-C comes."""

    def __set_name__(self, owner: type, name: str) -> None:
        signal.raise_signal(signal.SIGINT)


def _make_a_class() -> None:
    type("Owner", (), {"named": Interrupted()})
    time.sleep(PATIENCE)


def test_an_interrupt_waits_until_an_import_has_let_go(monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        interrupts.spare_imports()
        code = SimpleNamespace(co_filename="<frozen importlib._bootstrap>")
        frame: Any = SimpleNamespace(f_code=code)
        interrupts._interrupt(signal.SIGINT, frame)
        with pytest.raises(KeyboardInterrupt):
            time.sleep(PATIENCE)
        with pytest.raises(KeyboardInterrupt):
            _make_a_class()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        interrupts.spare_imports()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


class Terminal:
    """urdir on a terminal of 80 columns, as a person sees it."""

    def __init__(self, *words: str) -> None:
        self._mine, theirs = pty.openpty()
        self.process = start_python(
            *("-c", _SCRIPT, *words),
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment(PROMPT_TOOLKIT_NO_CPR="1", TERM="xterm"),
        )
        os.close(theirs)
        self.seen = ""

    def type(self, text: str) -> None:
        os.write(self._mine, text.encode())

    def wait(self, pattern: str, seconds: float = PATIENCE) -> str:
        """What has come up to ``pattern``, without what moves the cursor."""
        end = time.monotonic() + seconds
        while (found := re.search(pattern, self.seen)) is None:
            assert time.monotonic() < end, self.seen
            if select.select([self._mine], [], [], 0.1)[0]:
                try:
                    data = os.read(self._mine, 65536)
                except OSError:  # the other side is gone
                    data = b""
                assert data, self.seen
                text = data.decode(errors="replace")
                self.seen += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", text).replace("\r", "")
        before, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return before

    def close(self) -> None:
        kill(self.process)
        os.close(self._mine)


_SCRIPT = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from urdir.model.__main__ import main
sys.exit(main())
"""


@pytest.fixture
def terminal() -> Iterator[Terminal]:
    opened = Terminal("chat", "--temp", "0", "-c", "128")
    yield opened
    opened.close()


@pytest.mark.slow
@pytest.mark.full
def test_a_conversation_on_a_terminal(terminal: Terminal) -> None:
    banner = terminal.wait("\n>")
    assert "Urdir Demo 5M on " in banner
    assert "a context of 128 tokens\n/help lists the commands, Ctrl-D leaves" in banner
    terminal.type("\x1b[200~What is\n2 plus 3?\x1b[201~")  # pasted: two lines, one turn
    terminal.type("\r")
    terminal.wait("2 plus 3 is 5.\n")
    assert "prompt tokens" in terminal.wait("\n>")
    terminal.type("half a line\x03")
    terminal.wait("Ctrl-D or /exit leaves\n>")
    terminal.type("/se\t")
    terminal.wait("/set")
    terminal.type("\r")
    assert "temperature" in terminal.wait("min-tokens +0\n>")
    terminal.type("Tell me a long story.\r")
    terminal.wait("Tell me a long story.")
    terminal.type("\x03")  # while it answers
    terminal.wait("\n>")
    terminal.type("/stats\r")
    terminal.wait("of 128 tokens of context in use")
    terminal.type("\x04")
    assert terminal.process.wait(PATIENCE) == 0
