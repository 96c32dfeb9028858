"""Counts of chosen experts between runs, of one device and of several."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tests.model.engine.test_streaming import NANO
from urdir.model.engine.expert_counts import ExpertCounts
from urdir.model.files.gguf import Gguf


class Cache:
    """A cache of which experts have been chosen a known number of times."""

    def __init__(self, counts: list[int]) -> None:
        self.experts, self._counts = len(counts), np.array(counts, np.uint32)
        self.state = SimpleNamespace(fill=lambda _: None)

    def counts(self) -> Any:
        return self._counts


def rank(stage: int | None, *counts: list[int]) -> Any:
    config = SimpleNamespace(stage=None if stage is None else SimpleNamespace(rank=stage))
    caches = {number: Cache(each) for number, each in enumerate(counts)}
    return SimpleNamespace(config=config, expert_caches=caches, expert_counts={})


@pytest.mark.parametrize("split", ["tensors", "layers", "some layers"])
def test_every_rank_begins_with_its_own(split: str, tmp_path: Path) -> None:
    """Ranks with parts of all layers choose the same experts, others have layers of their own."""
    first, second, third = [1, 2, 3], [4, 5], [6, 7, 8, 9]

    def ranks() -> list[Any]:
        if split == "tensors":
            return [rank(None, first, second), rank(None, first, second)]
        if split == "layers":
            return [rank(0, first), rank(1, second, third)]
        return [rank(0), rank(1, first), rank(2)]

    with Gguf(NANO) as file:
        ExpertCounts(tmp_path, file, ranks()).close()
        after = ranks()
        ExpertCounts(tmp_path, file, after).close()
    for each in after:
        assert each.expert_counts.keys() == each.expert_caches.keys()
        for number, cache in each.expert_caches.items():
            assert each.expert_counts[number].tolist() == cache.counts().tolist()
    (saved,) = (tmp_path / "experts").iterdir()
    kept = {"tensors": 5, "layers": 9, "some layers": 3}[split]
    assert len(np.frombuffer(saved.read_bytes(), np.float32)) == kept
