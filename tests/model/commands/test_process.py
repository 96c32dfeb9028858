"""The command as a process of its own: how it starts, is interrupted, and loses its output."""

from __future__ import annotations

import os
import re
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.processes import end_of, kill, start_python
from urdir.model.files.demo import demo_model


def _environment() -> dict[str, str]:
    return {**os.environ, "URDIR_DEVICE": "emulator", "PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.mark.parametrize("module", ["urdir", "urdir.model"])
def test_the_package_is_the_command(module: str, tmp_path: Path) -> None:
    link = tmp_path / "urdir"
    link.symlink_to(Path(__file__).parents[3] / ".src" / "urdir")  # as a wheel has it
    environment = {**_environment(), "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path[1:]])}
    done = subprocess.run(
        [sys.executable, "-m", module, "--version"],
        env=environment, capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert re.fullmatch(r"urdir (\d+\.\d+\.\d+|not installed)\n", done.stdout)


def test_help_is_quick_and_loads_nothing_heavy() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "urdir.model", "--help"],
        capture_output=True,
        text=True,
        env=_environment(),
        check=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)  # others may lengthen the wall clock
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 2.0  # 0.4 s
    assert "examples:" in done.stdout
    for module in ("numpy", "cuda.bindings", "jinja2", "tokenizers", "gguf"):
        assert f" {module}\n" not in done.stderr


def test_a_closed_stdout_ends_quietly() -> None:
    command = f"{sys.executable} -m urdir.model show {demo_model()} | head -1"
    done = subprocess.run(
        ["bash", "-o", "pipefail", "-c", command],
        capture_output=True,
        text=True,
        env=_environment(),
    )
    assert done.stderr == ""
    assert done.returncode == 0


@pytest.mark.slow
def test_a_cache_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    """A warning without the place in the source."""
    (tmp_path / "file").write_text("not a folder")
    done = subprocess.run(
        [sys.executable, "-m", "urdir.model", "check", "--kernel", "add"],
        env={**_environment(), "URDIR_CACHE_DIR": str(tmp_path / "file" / "cache")},
        capture_output=True,
        text=True,
        check=True,
    )
    (line,) = [line for line in done.stderr.splitlines() if "cache" in line]
    assert line.startswith("urdir: warning: kernels are compiled without the cache ")
    assert "warn" not in done.stderr.replace(line, "")


@pytest.fixture
def start_urdir() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """``start_urdir(*argv)``: the command as a process, which the test does not leave behind.

    It takes Ctrl-C also where these tests were started with it ignored, in the background.
    """
    script = (
        "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
        "from urdir.model.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    started: list[subprocess.Popen[str]] = []

    def start(*argv: str) -> subprocess.Popen[str]:
        pipe = subprocess.PIPE
        process = start_python("-c", script, *argv, stdout=pipe, stderr=pipe, env=_environment())
        started.append(process)
        return process

    yield start
    for process in started:
        kill(process)


@pytest.mark.slow
@pytest.mark.turns(2)
@pytest.mark.parametrize(
    ("seconds", "handler"), [(0.0, signal.default_int_handler), (0.73, signal.SIG_IGN)]
)
def test_an_interrupt_keeps_the_text_and_the_statistics(
    start_urdir: Callable[..., subprocess.Popen[str]], seconds: float, handler: Any
) -> None:
    before = signal.signal(signal.SIGINT, handler)  # as in a terminal, and in the background
    try:
        process = start_urdir("run", "--temp", "0", "--ignore-eos", "-p", "Tell me a story.")
    finally:
        signal.signal(signal.SIGINT, before)
    assert process.stdout is not None
    first = process.stdout.read(4)  # it has begun to answer
    time.sleep(seconds)
    process.send_signal(signal.SIGINT)
    code, rest, err = end_of(process)
    assert code == 130
    assert len(first + rest) > 4
    assert " generated" in err
    assert ", seed " in err
    assert "Traceback" not in err
