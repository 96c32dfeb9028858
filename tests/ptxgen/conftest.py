"""What tests of compiled templates share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jinja2
import pytest

from urdir.ptxgen.render import jinja as template_environment


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Names of the templates that are compiled from now on."""
    names: list[Any] = []
    really = jinja2.Environment.compile

    def compile_(self: Any, source: Any, name: Any = None, *rest: Any, **more: Any) -> Any:
        names.append(name)
        return really(self, source, name, *rest, **more)

    monkeypatch.setattr(jinja2.Environment, "compile", compile_)
    return names


@pytest.fixture
def edited(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Called, it edits the template of `Normalise`: "ret" becomes "exit"."""
    really = template_environment.read_template

    def read(name: tuple[str, str]) -> str:
        text = really(name)
        return text.replace("ret;", "exit;") if name[1] == "normalise.ptx.j2" else text

    return lambda: monkeypatch.setattr(template_environment, "read_template", read)
