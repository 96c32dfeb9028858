"""Tokens that llama.cpp selects of a pool that it cuts (Qwen 4).

All tokens of a pool have its score. llama.cpp (`ggml_top_k` on a CPU) takes the highest of them by
std::partial_sort, top_k + pool - 1 in all, so that a pool may be cut; which of its tokens stay
follows from the heap of that function, here that of libstdc++.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from tests.model.reference import Reference
from urdir.model.families.attention import Indexer

#: Rows of goldens before the first of which llama.cpp cuts a pool: these are compared.
WHOLE_POOLS = {"qwen4exp": 19}


class CutPools(Reference):
    """The reference with llama.cpp's choice."""

    def best_tokens(self, of: Indexer, scores: list[Any], row: int) -> list[int]:
        """The tokens that a row attends to, the last ones, which are no pool, among them."""
        each = np.repeat(np.array(scores, np.float32), of.pool)
        each = np.concatenate([each, np.full(row + 1 - len(each), np.inf, np.float32)])
        return kept(each, min(len(each), of.width))


def kept(scores: Any, most: int) -> list[int]:
    """The places of the ``most`` highest scores that std::partial_sort leaves in front."""
    heap = list(range(most))
    for parent in range(most // 2 - 1, -1, -1):
        _sift(heap, scores, parent, heap[parent])
    for place in range(most, len(scores)):
        if scores[place] > scores[heap[0]]:
            _sift(heap, scores, 0, place)
    return heap


def _sift(heap: list[int], scores: Any, hole: int, value: int) -> None:
    """Put a value into the heap, whose top has the lowest score: the hole moves down to a leaf, and
    the value up from there (__adjust_heap)."""
    top, child = hole, 2 * hole + 2
    while child < len(heap):
        if scores[heap[child]] > scores[heap[child - 1]]:
            child -= 1
        heap[hole], hole = heap[child], child
        child = 2 * hole + 2
    if child == len(heap):
        heap[hole], hole = heap[child - 1], child - 1
    while hole > top and scores[heap[(hole - 1) // 2]] > scores[value]:
        heap[hole], hole = heap[(hole - 1) // 2], (hole - 1) // 2
    heap[hole] = value
