"""`urdir completion`: scripts that bash, zsh and fish take."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from urdir.model.cli import COMMANDS

Cli = Callable[..., tuple[int, str, str]]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_knows_commands_and_flags(cli: Cli, shell: str) -> None:
    code, out, _ = cli("completion", shell)
    assert code == 0
    for word in (*COMMANDS, "explain", "repeat-penalty", "temp", "clear-cache"):
        assert word in out
    assert "mirostat" not in out  # refused


def test_completion_in_bash(cli: Cli, tmp_path: Path) -> None:
    script = tmp_path / "urdir.bash"
    script.write_text(cli("completion", "bash")[1])
    (tmp_path / "model.gguf").touch()

    def complete(*words: str) -> set[str]:
        typed = " ".join(f"'{word}'" for word in ("urdir", *words))
        line = (
            f". {script}; COMP_WORDS=({typed}); COMP_CWORD={len(words)}; "
            '$(complete -p urdir | sed -E "s/.*-F ([^ ]+).*/\\1/"); '
            'printf "%s\\n" "${COMPREPLY[@]}"'
        )
        done = subprocess.run(
            ["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True, check=True
        )
        return {word.strip() for word in done.stdout.splitlines()}

    assert complete("sh") == {"show"}
    assert complete("ptx", "st") == {"stats"}
    assert complete("run", "--min-") == {"--min-p", "--min-tokens"}
    assert complete("bench", "-o", "js") >= {"json", "jsonl"}
    for words in (("show", "mod"), ("run", "-m", "mod"), ("run", "mod"), ("ptx", "diff", "mod")):
        assert complete(*words) == {"model.gguf"}


@pytest.mark.skipif(shutil.which("fish") is None, reason="fish is not installed")
def test_completion_in_fish(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "urdir.fish").write_text(cli("completion", "fish")[1])
    (tmp_path / "model.gguf").touch()
    lines = ["urdir sh", "urdir ptx st", "urdir bench -o js", "urdir show mod", "urdir run -m mod"]
    script = "source urdir.fish; " + "; ".join(f"complete -C '{line}'" for line in lines)
    done = subprocess.run(
        ["fish", "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    found = [line.split("\t")[0] for line in done.stdout.splitlines()]
    assert [word for word in found if word] == [
        *("show", "stats", "json", "jsonl", "model.gguf", "model.gguf")
    ]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="zsh is not installed")
def test_completion_in_zsh(cli: Cli, tmp_path: Path) -> None:
    """The function is found for the command, and zsh reads it."""
    (tmp_path / "_urdir").write_text(cli("completion", "zsh")[1])
    script = f"fpath=({tmp_path} $fpath); autoload -U compinit; compinit -u -D; echo $_comps[urdir]"
    done = subprocess.run(
        ["zsh", "-f", "-c", f"{script}; autoload +X _urdir && whence -w _urdir"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert (done.stdout, done.stderr) == ("_urdir\n_urdir: function\n", "")
