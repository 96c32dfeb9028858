"""The key/value cache; what it stores is tested with the sessions that use it."""

from __future__ import annotations

import re

from urdir.model.memory import kv_cache


def test_the_description_names_operations_that_exist() -> None:
    words = re.findall(r"``(\w+)``", kv_cache.__doc__ or "")
    assert words
    for kind in (kv_cache.KvCache, kv_cache.Group, kv_cache.PagedGroup):
        assert [word for word in words if not callable(getattr(kind, word, None))] == []
