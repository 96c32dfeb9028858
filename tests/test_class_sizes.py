"""No class grows past what a reader keeps in mind: the methods of a class and of its bases.

PYTHONPATH=.src python tests/test_class_sizes.py        prints the longest classes
"""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Iterator

import urdir.driver
import urdir.model
import urdir.ptxgen

#: Lines of the methods of a class, those of its bases in the project counted.
MOST_LINES = 300


def _modules() -> Iterator[str]:
    """Names of the product's modules; the emulator is a test's device."""
    for room in (urdir.ptxgen, urdir.driver, urdir.model):
        for found in pkgutil.walk_packages(room.__path__, f"{room.__name__}."):
            if ".emulator" not in found.name and not found.name.endswith("__main__"):
                yield found.name


def _classes() -> Iterator[type]:
    """Every class of the product; not those that need an optional package (ray)."""
    for name in _modules():
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as exc:
            if (exc.name or "").startswith("urdir"):
                raise
            continue
        for each in vars(module).values():
            if inspect.isclass(each) and each.__module__ == name:
                yield each


_FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


@functools.cache
def _methods(module: str) -> dict[str, int]:
    """Lines of the methods, decorators among them, of each class of a module by qualified name."""
    lines: dict[str, int] = {}

    def visit(node: ast.AST, prefix: str) -> None:
        for each in ast.iter_child_nodes(node):
            if isinstance(each, ast.ClassDef):
                methods = [
                    n for n in each.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
                ]
                lines[prefix + each.name] = sum(map(_length, methods))
                visit(each, f"{prefix}{each.name}.")
            elif isinstance(each, _FUNCTION):
                visit(each, f"{prefix}{each.name}.<locals>.")
            else:
                visit(each, prefix)

    visit(ast.parse(inspect.getsource(sys.modules[module])), "")
    return lines


def _length(method: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    first = min(node.lineno for node in (method, *method.decorator_list))
    return (method.end_lineno or first) - first + 1


def _lines(of: type, package: str = "urdir.") -> int:
    """Lines of the methods of a class and of its bases in the ``package``."""
    bases = (each for each in of.__mro__ if each.__module__.startswith(package))
    return sum(_methods(each.__module__).get(each.__qualname__, 0) for each in bases)


def test_classes_are_short() -> None:
    sizes = {f"{each.__module__}.{each.__qualname__}": _lines(each) for each in _classes()}
    assert len(sizes) > 1000
    grown = {name: lines for name, lines in sizes.items() if lines > MOST_LINES}
    assert not grown, "too many lines of methods, bases counted: a concept may be an object"


class Base:
    """Nine lines of methods, the blank ones between them apart."""

    field = 1

    @property
    def first(self) -> int:
        """Documented."""
        return self.field

    def second(self) -> int:
        def inner() -> int:
            return 1

        return inner()


class Derived(Base):
    """Two more."""

    def third(self) -> int:
        return 3


def test_lines_are_those_of_methods_and_of_bases() -> None:
    assert (_lines(Base, __name__), _lines(Derived, __name__)) == (9, 11)


if __name__ == "__main__":
    longest = sorted(((_lines(each), each.__name__) for each in _classes()), reverse=True)
    for size, class_name in longest[:20]:
        print(f"{size} {class_name}")
