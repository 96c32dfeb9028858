"""NVTX ranges: names of what is queued, which Nsight Systems and other tools show.

They need the package nvtx (extra `nvtx`); without it nothing is named. A range takes 0.2 us where
no tool is attached (core of a cloud Xeon, 2026-11).
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager, nullcontext
from functools import cache, lru_cache
from typing import Any

#: The domain that tools show the ranges in.
DOMAIN = "urdir"
_NOTHING = nullcontext()


class _Range(AbstractContextManager[None]):
    """A range of this thread while it is entered; it may be entered again."""

    def __init__(self, domain: Any, name: str) -> None:
        self._domain = domain
        self._attributes = domain.get_event_attributes(message=name)

    def __enter__(self) -> None:
        self._domain.push_range(self._attributes)

    def __exit__(self, *exc: object) -> None:
        self._domain.pop_range()


@lru_cache(maxsize=4096)
def named(name: str) -> AbstractContextManager[None]:
    """A range of that name."""
    domain = _domain()
    return _NOTHING if domain is None else _Range(domain, name)


@cache
def _domain() -> Any:
    """The domain; None without the package."""
    try:
        return importlib.import_module("nvtx").get_domain(DOMAIN)
    except ImportError:
        return None
