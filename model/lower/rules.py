"""All rules, in the order in which they are tried: those of more operations first."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from pkgutil import iter_modules
from types import ModuleType

from urdir.model import graph, lower
from urdir.model.lower import (
    adapters,
    attention,
    collectives,
    linear,
    moe,
    norms,
    router,
    rwkv,
    shared_expert,
    stream,
)
from urdir.model.lower.rule import RuleBook

#: Rules of these begin with operations that others begin with, too, and are tried in this order.
_FIRST = (adapters, shared_expert, router, moe, attention, rwkv, linear, collectives, norms, stream)


def _rooms() -> Iterator[ModuleType]:
    """Modules with rules: those above, and of each module of operations that of its name here."""
    yield from _FIRST
    known = {room.__name__ for room in _FIRST}
    operations = {of.name for of in iter_modules(graph.__path__)}
    for of in iter_modules(lower.__path__, f"{lower.__name__}."):
        has_operations = of.name.rpartition(".")[2] in operations
        if has_operations and not of.ispkg and of.name not in known:
            yield import_module(of.name)


#: What a step is lowered by.
RULES = RuleBook([rule for room in _rooms() for rule in room.RULES])
