"""Streams that are closed, full or of another encoding; text that a terminal would obey."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from urdir.model.commands.terminal import printable

Maker = Callable[..., Path]
LIST = "ptx list add"  # quick, and prints


def shell(command: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line of bash in which U is urdir; no traceback, whatever happens."""
    environment = os.environ | {
        "U": f"{sys.executable} -m urdir.model",
        "URDIR_DEVICE": "emulator",
        "PYTHONPATH": os.pathsep.join(sys.path),
        **variables,
    }
    done = subprocess.run(
        ["bash", "-c", command], env=environment, capture_output=True, timeout=120
    )
    assert b"Traceback" not in done.stderr + done.stdout
    assert b"Exception ignored" not in done.stderr
    return done


@pytest.mark.parametrize(
    ("redirected", "code", "message"),
    [
        (f"{LIST} >&-", 1, b"Bad file descriptor"),
        (f"{LIST} >/dev/full", 1, b"No space left on device"),
        pytest.param("--help >/dev/full", 1, b"No space left on device", marks=pytest.mark.full),
        (f"{LIST} 2>&-", 0, b""),
        pytest.param(f"{LIST} <&-", 0, b"", marks=pytest.mark.full),
        (f"{LIST} <&- >&- 2>&-", 1, b""),
        pytest.param("show nothing.gguf 2>&-", 1, b"", marks=pytest.mark.full),
        ("show nothing.gguf 2>/dev/full", 1, b""),
        ("run <&-", 1, b"stdin cannot be read"),
        ("run </dev/null", 2, b"stdin is empty"),
        pytest.param("run -f /dev/zero", 1, b"more than 16 MiB", marks=pytest.mark.full),
        ("run </dev/zero", 1, b"more than 16 MiB"),
        ("run -f /dev/full/x", 1, b"Not a directory"),
        ("run < <(printf 'caf\\xe9')", 1, b"not UTF-8: byte 3 is 0xe9"),
    ],
)
def test_streams_that_cannot_be_used(redirected: str, code: int, message: bytes) -> None:
    done = shell(f"$U {redirected}", LC_ALL="POSIX", PYTHONUTF8="0")
    assert done.returncode == code
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == bool(message)
    if ">&-" in redirected and "2>&-" not in redirected:
        assert done.stdout == b""


#: A line of every command, those that need a device apart.
COMMANDS = ("list", "env", "completion bash", "ptx dump add")
SLOW = (
    "show demo",
    "ptx explain add",
    "run --temp 0 -n 1 -p Hi",
    "chat --temp 0 -n 1 -st -p Hi",
    "check --kernel add",
    "bench demo -p 1 -n 1 -r 1",
)


@pytest.mark.parametrize("stream", [pytest.param(">&-", marks=pytest.mark.full), ">/dev/full"])
@pytest.mark.parametrize(
    "command",
    [
        *COMMANDS,
        *(pytest.param(line, marks=[pytest.mark.slow, pytest.mark.full]) for line in SLOW),
    ],
)
def test_no_command_says_done_where_its_output_went_nowhere(command: str, stream: str) -> None:
    done = shell(f"$U {command} {stream}")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1].decode()
    assert re.fullmatch(
        "urdir: error: input or output: (Bad file descriptor|No space left on device)", last
    )


@pytest.mark.slow
@pytest.mark.turns(2)
@pytest.mark.parametrize("command", ["run", "chat -st"])
def test_an_answer_that_a_terminal_has_no_characters_for(command: str) -> None:
    """The model's text is made up; all else is as ever."""
    script = (
        "import sys; from urdir.model.cli import main; "
        "from urdir.model.engine.generate import Generation; "
        "text = ['caf\u00e9 ', '\u65e5\u672c', ' \U0001f600.']; "
        "Generation.text = lambda self: (yield from text); "
        "sys.exit(main(sys.argv[1:]))"
    )
    line = f"{shlex.quote(sys.executable)} -c {shlex.quote(script)} {command} -p Hi"
    done = shell(line, PYTHONIOENCODING="latin-1")
    assert (done.returncode, done.stdout) == (0, b"caf\xe9 \\u65e5\\u672c \\U0001f600.\n")


def test_without_stderr_notes_do_not_land_in_the_output() -> None:
    assert shell(f"$U {LIST} 2>&-").stdout == shell(f"$U {LIST}").stdout != b""


def test_no_file_takes_the_number_of_a_closed_stream(tmp_path: Path) -> None:
    """What is printed must not end up in the first file that is opened."""
    name = tmp_path / "out"
    done = shell(f"$U ptx dump add -o {name} >&- 2>&-")
    assert done.returncode == 1
    (file,) = name.iterdir()
    assert file.read_text().startswith("//")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_characters_that_a_terminal_lacks_are_escaped(encoding: str, make_gguf: Maker) -> None:
    path = make_gguf({"general.architecture": "llama", "general.name": "caf\u00e9 \u65e5"})
    done = shell(f"$U show {path}", PYTHONIOENCODING=encoding)
    accent = b"\\xe9" if encoding == "ascii" else b"\xe9"
    assert b"caf" + accent + b" \\u65e5" in done.stdout


def test_what_a_terminal_would_obey_is_escaped(
    cli: Callable[..., tuple[int, str, str]], make_gguf: Maker
) -> None:
    evil = "\x1b]0;mine\x07 \x9b2J \u202egpj.exe \r\n\x7f"
    path = make_gguf(
        {"general.architecture": evil, "names": [evil], "tokenizer.chat_template": evil}
    )
    for argv in (("show", path), ("show", path, "--template"), ("run", path, "x"), ("list",)):
        _, out, err = cli(*argv)
        text = (out + err).replace("\n", "").replace("\t", "")
        assert text.isprintable(), argv
    assert "\\x1b]0;mine\\x07" in cli("show", path)[1]


def test_printable_text_stays() -> None:
    assert printable("na\u00efve \u65e5\u672c \U0001f600") == "na\u00efve \u65e5\u672c \U0001f600"
    assert printable("a\tb\nc", keep="\n") == "a\\tb\nc"
    assert printable(Path("x\x1b")) == "x\\x1b"
    assert printable("\udc80\u2028") == "\\udc80\\u2028"
