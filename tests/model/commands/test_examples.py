"""The examples that every --help prints, run as they stand on a small model."""

from __future__ import annotations

import functools
import importlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from tests.model.tiny_encoder import write_encoder
from tests.processes import beginning, end_of, running, start_python
from urdir.model import cli as command_line
from urdir.model.families.shapes import SHAPES
from urdir.model.files import hub, source
from urdir.model.measure.base_logits import packed, writing
from urdir.model.measure.perplexity import Chunk
from urdir.model.verify import check

#: What takes the emulator long, but for what is short.
SLOW = ("run", "chat", "logits", "ptx stats --model", "ptx dump --model", "ptx explain gemm")
SLOW += ("bench", "check", "perplexity")
SHORT = ("check --kernel",)
#: Sizes for GPUs, and what the emulator gets in their place.
SMALLER = {
    "32,128-512*2": "3,4-8*2", "0,256": "0,6", "1,8,16-256*2": "1,2-4*2", "100-300": "2-3",
    "512,128": "3,5", "1,32": "1,4", "500": "8", "128": "8", "64": "2", "1200": "3", "1000": "3",
    "20": "9",
}  # fmt: skip
SMALL = {"-p": "4", "-n": "2", "-r": "1"}
SMALL_LOAD = {"--users": "2", "--requests": "3", "--input": "8", "--answer": "2-3"}
URL = "http://127.0.0.1:8080"
KEY = "a key"


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


def marked(example: str) -> object:
    is_slow = is_one_of(example, SLOW) and not is_one_of(example, SHORT)
    return pytest.param(example, marks=[pytest.mark.full, pytest.mark.slow] if is_slow else [])


@pytest.fixture
def folder(
    data: Path, tmp_path: Path, demo_file: Path, cli: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> Path:  # fmt: skip
    """What the examples name: a model, a folder of safetensors, PTX files, a hub."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    shutil.copy(demo_file, "model.gguf")
    shutil.copy(data / "golden" / "nano-llama-q8_0.gguf", "model-f16.gguf")
    Path("models").mkdir()
    Path("models/model.gguf").symlink_to(Path("model.gguf").resolve())
    Path("folder").symlink_to(data / "safetensors" / "llama-bf16")
    for module in (hub, source):
        monkeypatch.setattr(module, "download", lambda name: Path("model.gguf").resolve())
    for name in ("bge", "qwen3-embedding", "reranker"):
        write_encoder(Path(f"{name}.gguf"), ranks=name == "reranker", unused=8000)
    Path("tokens.txt").write_text("1 2 3")
    Path("keys.txt").write_text(KEY)
    Path("wiki.test.raw").write_text("Once upon a time. " * 9)
    for name in ("f16.gguf", "q4.gguf"):
        Path(name).symlink_to("model.gguf")
    with writing(Path("base.kld"), [Chunk((1, 2, 3, 4, 5, 6))], 2048) as base:
        base.write(packed(np.zeros((2, 2048), np.float32)).tobytes())
    body = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2}
    line = json.dumps({"custom_id": "a", "url": "/v1/chat/completions", "body": body})
    Path("in.jsonl").write_text(line)
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


def smaller(words: list[str]) -> list[str]:
    """The words of an example of bench, with sizes for the emulator."""
    words = [SMALLER.get(word, word) for word in words]
    if not {"--kernels", "--startup"} & {*words}:
        usual = SMALL_LOAD if "--load" in words else SMALL
        if "--rate" in words or "--at-once" in words:
            usual = {flag: value for flag, value in usual.items() if flag != "--users"}
        words += [part for pair in usual.items() if pair[0] not in words for part in pair]
    return words


class Server:
    """`urdir serve`, which goes on until it is interrupted."""

    def __init__(self, words: list[str]) -> None:
        self.process = start_python(
            *("-m", "urdir.model", *words, "--device", "emulator", "--port", "0"),
            env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "URDIR_CACHE_DIR": ""},
            stderr=subprocess.PIPE,
        )
        assert self.process.stderr is not None
        lines: list[str] = []
        with beginning(self.process):
            while not (found := re.search(r"http://\S+", "".join(lines[-1:]))):
                lines.append(self.process.stderr.readline())
                assert lines[-1], "".join(lines)
        self.url = found[0].replace("0.0.0.0", "127.0.0.1")

    def close(self) -> int:
        with running(self.process):
            self.process.send_signal(signal.SIGINT)
            return end_of(self.process)[0]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with closing(Server(["serve"])) as started:
        yield started


def test_there_are_examples_of_every_command() -> None:
    names = [words_of(example)[0] for example in examples()]
    assert set(names) == set(command_line.COMMANDS)
    assert len(names) > 55


parser_of = functools.cache(command_line.build_parser)


@pytest.mark.parametrize("example", examples())
def test_every_example_is_a_command_line(example: str) -> None:
    words = words_of(example)
    parser_of(words[0]).parse(words)


@pytest.mark.parametrize("example", [marked(e) for e in examples() if " serve" not in e])
def test_every_example_runs(
    example: str,
    folder: Path,
    data: Path,
    cli: Callable[..., tuple[int, str, str]],
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
) -> None:
    words = words_of(example)
    if words[0] == "bench":
        words = smaller(words)
        shape = replace(SHAPES["llama-3.2-1b"], layers=2, hidden=256, ffn=512, vocab=512)
        monkeypatch.setitem(SHAPES, "llama-3.1-8b", replace(shape, heads=4, kv_heads=2))
        small = replace(SHAPES["bge-large"], layers=1, hidden=64, heads=2, kv_heads=2, head_dim=32)
        monkeypatch.setitem(SHAPES, "bge-large", replace(small, ffn=128, vocab=512))
        shutil.copy(data / "golden" / "nano-llama-q8_0.gguf", "model.gguf")  # no vocabulary
    if words[0] == "perplexity":
        words += ["-c", "6", "--chunks", "1"]
    if words[0] == "check" and not is_one_of(example, SHORT):  # all kernels take minutes
        every = check.select_kernels(())
        monkeypatch.setattr(check, "select_kernels", lambda names: every[:2])
    if URL in words:
        words[words.index(URL)] = request.getfixturevalue("server").url
    piped = shlex.split(example)[1] if example.startswith("echo") else "Hello!"
    monkeypatch.setattr(sys, "stdin", io.StringIO(piped))
    code, out, err = cli(*words)
    if "pip install" in err:
        pytest.skip(err)
    assert code == example.startswith("urdir ptx diff"), err
    assert out or any(Path().glob("*.npy"))


@pytest.mark.full
@pytest.mark.slow
@pytest.mark.parametrize("example", [e for e in examples() if " serve" in e and "--ray" not in e])
def test_every_server_answers(example: str, folder: Path) -> None:
    """Asked as the help says; the hub's place is taken by a file."""
    words = words_of(example.replace("-hf org/repo-GGUF", "-m model.gguf").replace("8192", "128"))
    help_text = importlib.import_module("urdir.model.commands.serve").EXAMPLES
    asked = shlex.split(help_text[help_text.index("  curl ") :])
    asked += ["-H", f"Authorization: Bearer {KEY}"] if "keys.txt" in words else []
    server = Server(words)
    try:
        asked = [word.replace(URL, server.url) for word in asked]
        reply = subprocess.run([*asked, "-s", "--noproxy", "*"], capture_output=True, text=True)
        assert json.loads(reply.stdout)["choices"][0]["message"]["content"]
    finally:
        code = server.close()
    assert code in (0, 130)
