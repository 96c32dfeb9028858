"""Compiled templates in a folder: used when they are good, made again when they are not."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jinja2
import pytest

from urdir.ptxgen.kernels.rms_norm import RmsNorm
from urdir.ptxgen.render import jinja as template_environment
from urdir.ptxgen.render import sources

SPEC = RmsNorm(rows=2, cols=70, eps=1e-5)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    former = sources.compiled_folder()
    sources.keep_compiled(tmp_path)
    yield tmp_path
    sources.keep_compiled(former)
    template_environment.environment.cache_clear()


def text_of_a_new_process() -> str:
    template_environment.environment.cache_clear()
    return SPEC.ptx("sm_90")


def test_the_next_process_compiles_nothing(folder: Path, compiled: list[Any]) -> None:
    text = text_of_a_new_process()
    assert "urdir.templates/rms_norm.ptx.j2" in compiled
    assert len(list(folder.iterdir())) == len(compiled)
    compiled.clear()
    assert text_of_a_new_process() == text
    assert compiled == []


@pytest.mark.parametrize("damage", [b"", b"too short", b"\0" * 4096, None])
def test_a_damaged_file_is_never_run(
    folder: Path, compiled: list[Any], damage: bytes | None
) -> None:
    text = text_of_a_new_process()
    count = len(compiled)
    for path in folder.iterdir():
        data = path.read_bytes()
        path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]) if damage is None else damage)
    assert text_of_a_new_process() == text
    assert len(compiled) == 2 * count
    assert text_of_a_new_process() == text
    assert len(compiled) == 2 * count


@pytest.mark.parametrize(("owner", "name"), [(jinja2, "__version__"), (sys, "version")])
def test_another_version_compiles_again(
    folder: Path, compiled: list[Any], monkeypatch: pytest.MonkeyPatch, owner: Any, name: str
) -> None:
    text = text_of_a_new_process()
    count = len(compiled)
    monkeypatch.setattr(owner, name, "another")
    assert text_of_a_new_process() == text
    assert len(compiled) == 2 * count
    assert len(list(folder.iterdir())) == count  # in place of the old ones


def test_an_edited_template_is_compiled_again(
    folder: Path, compiled: list[Any], edited: Callable[[], None]
) -> None:
    text_of_a_new_process()
    compiled.clear()
    edited()
    assert "exit;" in text_of_a_new_process()
    assert compiled == ["urdir.templates/rms_norm.ptx.j2"]


def test_a_folder_that_is_not_there_costs_a_compilation(folder: Path, compiled: list[Any]) -> None:
    sources.keep_compiled(folder / "absent")
    text = text_of_a_new_process()
    assert compiled
    sources.keep_compiled(None)
    assert text_of_a_new_process() == text
    assert os.listdir(folder) == []
