"""The public names: what the stubs promise is there, and in what type checkers read."""

from __future__ import annotations

import ast
import importlib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("ptxgen", "driver", "model")


def promised(package: str) -> list[str]:
    """The names of a package's stub."""
    tree = ast.parse((ROOT / package / "__init__.pyi").read_text())
    imported = [n for node in tree.body if isinstance(node, ast.ImportFrom) for n in node.names]
    assert all(name.asname == name.name for name in imported)  # else pyright calls it private
    return [name.name for name in imported]


@pytest.mark.parametrize("package", PACKAGES)
def test_every_promised_name_is_there_and_typed(package: str) -> None:
    module = importlib.import_module(f"urdir.{package}")
    names = promised(package)
    assert len(names) > 10
    assert set(names) <= set(dir(module))
    assert all(getattr(module, name) is not None for name in names)
    assert (ROOT / package / "py.typed").is_file()
    consumer = ast.parse((ROOT / "tests/typing/consumer.py").read_text())
    used = {node.id for node in ast.walk(consumer) if isinstance(node, ast.Name)}
    assert set(names) <= used
