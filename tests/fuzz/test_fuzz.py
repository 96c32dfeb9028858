"""Some mutated input of each kind (`python -m tests.fuzz` takes any number)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Not `TARGETS` of `targets.py`: the tests of a package are not imported by pytest.
TARGETS = ("gguf", "safetensors", "tokenizer", "template", "http", "ptx")


def fuzz(*argv: object) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([*sys.path, str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-m", "tests.fuzz", *map(str, argv)],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_nothing_but_the_projects_own_errors(target: str, pytestconfig: pytest.Config) -> None:
    count = 20_000 if pytestconfig.getoption("--full") else 60
    done = fuzz(target, "--count", count, "--seed", 1, "--time", 20)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.startswith(f"{target}: {count:,} inputs, seed 1, ")


def test_all_targets_are_listed() -> None:
    done = fuzz("--help")
    assert f"of {', '.join(TARGETS)} (default" in done.stdout
