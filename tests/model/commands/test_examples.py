"""The examples that every --help prints, run as they stand on a small model."""

from __future__ import annotations

import importlib
import io
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from urdir.model import cli as command_line
from urdir.model.files import hub, source

#: What takes the emulator long. The sizes of bench are for GPUs, all kernels take minutes, and a
#: server goes on: their examples are parsed alone, but for what is short.
SLOW = ("run", "chat", "logits", "ptx stats --model", "ptx dump --model", "ptx explain gemm")
PARSED = ("bench", "check", "serve")
SHORT = ("check --kernel",)


def modules() -> Iterator[ModuleType]:
    yield command_line
    for name in command_line.COMMANDS:
        yield importlib.import_module(f"urdir.model.commands.{name}")
    ptx = importlib.import_module("urdir.model.commands.ptx")
    yield from ptx.SUBCOMMANDS


def examples() -> list[str]:
    """The lines of all help texts that begin with a command, without the remarks after them."""
    found = [
        line[2:].split("   ")[0].split("  ")[0].strip()
        for module in modules()
        for line in module.EXAMPLES.splitlines()
        if line.startswith(("  urdir ", "  echo "))
    ]
    return list(dict.fromkeys(found))


def is_one_of(example: str, kinds: tuple[str, ...]) -> bool:
    return example.partition("urdir ")[2].startswith(kinds)


def runs(example: str) -> bool:
    return is_one_of(example, SHORT) or not is_one_of(example, PARSED)


def marked(example: str) -> object:
    marks = [pytest.mark.full, pytest.mark.slow] if is_one_of(example, SLOW) else []
    return pytest.param(example, marks=marks)


@pytest.fixture
def folder(
    data: Path, tmp_path: Path, demo_file: Path, cli: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> Path:  # fmt: skip
    """What the examples name: a model, a folder of safetensors, PTX files, a hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copy(demo_file, "model.gguf")
    Path("folder").symlink_to(data / "safetensors" / "llama-bf16")
    for module in (hub, source):
        monkeypatch.setattr(module, "download", lambda name: Path("model.gguf").resolve())
    Path("tokens.txt").write_text("1 2 3")
    cli("ptx", "dump", "add", "-o", "old")
    cli("ptx", "dump", "add", "--target", "sm_80", "-o", "new")
    shutil.copytree("new", "out")
    (mine,), (theirs,) = Path("old").iterdir(), Path("new").iterdir()
    for name, file in (("mine.ptx", mine), ("theirs.ptx", theirs), ("edited.ptx", mine)):
        shutil.copy(file, name)
    for name in (".local/share/bash-completion/completions", ".zfunc", ".config/fish/completions"):
        Path(name).mkdir(parents=True)
    return tmp_path


def words_of(example: str) -> list[str]:
    """What the shell would give to urdir; stdin is left to the test, stdout goes nowhere."""
    words = shlex.split(example.partition("urdir ")[2].partition(" > ")[0])
    return [file for word in words for file in (_expanded(word) if "*" in word else [word])]


def _expanded(pattern: str) -> list[str]:
    return sorted(str(path) for path in Path().glob(pattern)) or [pattern]


def test_there_are_examples_of_every_command() -> None:
    names = [words_of(example)[0] for example in examples()]
    assert set(names) == set(command_line.COMMANDS)
    assert len(names) > 55


@pytest.mark.parametrize("example", examples())
def test_every_example_is_a_command_line(example: str) -> None:
    words = words_of(example)
    command_line.build_parser(words[0]).parse(words)


@pytest.mark.parametrize("example", [marked(e) for e in examples() if runs(e)])
def test_every_example_runs(
    example: str,
    folder: Path,
    cli: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    piped = shlex.split(example)[1] if example.startswith("echo") else "Hello!"
    monkeypatch.setattr(sys, "stdin", io.StringIO(piped))
    code, out, err = cli(*words_of(example))
    if "pip install" in err:
        pytest.skip(err)
    assert code == example.startswith("urdir ptx diff"), err
    assert out or Path("logits.npy").is_file()
