"""Fails unless the installed wheel has every template compiled, no other module beside them, the
chat templates, and what tells type checkers that it has types."""

from __future__ import annotations

import sys
from importlib.resources import files
from typing import Any, NoReturn

import jinja2

from urdir.model.text.named_templates import named_template
from urdir.ptxgen.render.compiled import COMPILED
from urdir.ptxgen.render.jinja import environment, template_names
from urdir.ptxgen.render.sources import TEMPLATES


def _refuse(self: object, source: object, name: object = None, *rest: Any, **more: Any) -> NoReturn:
    sys.exit(f"the wheel lacks a good compiled {name}")


jinja2.Environment.compile = _refuse  # type: ignore[method-assign, assignment]
names = template_names()
for name in names:
    environment().get_template(f"{TEMPLATES}/{name}")
modules = set(COMPILED.rglob("*.py")) - {COMPILED / "__init__.py"}
if not names or len(modules) != len(names):
    sys.exit(f"{COMPILED} has {len(modules)} modules of {len(names)} templates")
print(f"{len(names)} compiled templates")
named_template("chatml")
for package in ("urdir.driver", "urdir.ptxgen", "urdir.model"):
    if not (files(package) / "py.typed").is_file():
        sys.exit(f"{package} lacks py.typed")
