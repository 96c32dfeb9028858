"""What tests of requests have in common."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def short_prompts_are_worth_a_state() -> Iterator[None]:
    """States are kept for prompts of a page or more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("urdir.model.memory.prefix_states.LEAST_PAGES", 1)
        yield
