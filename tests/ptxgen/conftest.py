"""What tests of compiled templates share."""

from __future__ import annotations

from typing import Any

import jinja2
import pytest


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
