"""Some mutated input of each kind (`python -m tests.fuzz` takes any number)."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
#: Not `TARGETS` of `targets.py`: the tests of a package are not imported by pytest.
TARGETS = ("gguf", "safetensors", "adapter", "tokenizer", "template", "http", "ptx")


def fuzz(*argv: object) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([*sys.path, str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}
    return subprocess.run(
        [sys.executable, "-m", "tests.fuzz", *map(str, argv)],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip


@pytest.mark.slow
def test_nothing_but_the_projects_own_errors() -> None:
    check(TARGETS, 60)


@pytest.mark.full
@pytest.mark.parametrize("target", TARGETS)
def test_many_inputs(target: str) -> None:
    check([target], 20_000)


def check(targets: Sequence[str], count: int) -> None:
    """Each of ``targets`` takes ``count`` inputs and has no finding; all of them is the default."""
    names = () if targets == TARGETS else targets
    done = fuzz(*names, "--count", count, "--seed", 1, "--time", 20)
    assert done.returncode == 0, done.stdout + done.stderr
    reports = [line.partition(" inputs, seed 1, ")[0] for line in done.stdout.splitlines()]
    assert reports == [f"{target}: {count:,}" for target in targets]
