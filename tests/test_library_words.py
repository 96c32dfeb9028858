"""Libraries speak of arguments: flags and commands are the command line's."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
FLAG = re.compile(r"(?<![\w\-/.])(--[a-z][a-z-]+|-[a-z]{1,3}(?=[ ,:;)]|$))|URDIR_[A-Z]")
#: What starts other programs, is the command line itself, or declares its flags.
EXCEPT = (
    "driver/apart.py",
    "model/cli.py",
    "model/engine/sampling_settings.py",
    "model/environment.py",
    "model/measure/startup.py",
    "model/serve/guard.py",
    "model/serve/listening.py",
    "driver/pytest_plugin.py",
    "ptxgen/tools/sass.py",
)


def texts(path: Path) -> Iterator[str]:
    """The constant texts of a module that are not docstrings."""
    tree = ast.parse(path.read_text())
    nodes = list(ast.walk(tree))
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    first = (node.body[0] for node in nodes if isinstance(node, documented) and node.body)
    documents = {id(statement.value) for statement in first if isinstance(statement, ast.Expr)}
    for node in nodes:
        if isinstance(node, ast.Constant) and id(node) not in documents:
            yield str(node.value)


def test_no_message_of_a_library_names_a_flag() -> None:
    found = {
        f"{path.relative_to(ROOT)}: {text}"
        for folder in ("model", "driver", "ptxgen")
        for path in (ROOT / folder).rglob("*.py")
        if "commands" not in path.parts and str(path.relative_to(ROOT)) not in EXCEPT
        for text in texts(path)
        if FLAG.search(text) and "nvidia-smi" not in text
    }
    assert not found
