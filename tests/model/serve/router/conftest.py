"""A router that a test starts."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from tests.model.serve.router.toys import RunningRouter, Start, Toys, running_router, spec
from urdir.model.serve.access import Access
from urdir.model.serve.limits import Limits
from urdir.model.serve.router.spec import ModelSpec, RouterSettings


@pytest.fixture
def start(toy_texts: Any) -> Iterator[Start]:
    """Starts a router; toys, settings and limits as wanted."""
    with contextlib.ExitStack() as stack:

        def begin(
            *specs: ModelSpec | str,
            limits: Limits | None = None,
            access: Access | None = None,
            memory: int = 100,
            load_seconds: float = 0.0,
            drain: float | None = None,
            **settings: Any,
        ) -> RunningRouter:
            toys = Toys(toy_texts, access or Access(), load_seconds, memory)
            named = [spec(each) if isinstance(each, str) else each for each in specs]
            bounds = limits or Limits()
            router = running_router(toys, named, RouterSettings(**settings), bounds, drain)
            return stack.enter_context(router)

        yield begin
