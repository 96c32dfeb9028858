"""Links in progress and loaded modules as data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from urdir.driver.emulator.jit import Unit
from urdir.driver.emulator.logs import JitOptions


@dataclass
class Link:
    """A link in progress; ``output`` is the image that cuLinkComplete gave out, kept alive."""

    options: JitOptions
    units: list[Unit] = field(default_factory=list)
    output: Any = None


@dataclass
class LoadedModule:
    """A module, the addresses of its variables, the handles given out for its functions."""

    unit: Unit
    symbols: dict[str, int]
    handle: int = 0
    functions: dict[str, int] = field(default_factory=dict)
