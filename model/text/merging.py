"""The merge loop of BPE and SentencePiece: repeatedly join the best adjacent pair.

Not left to the `tokenizers` library, which takes half a second to build the tables of a vocabulary
of 262,144 tokens; merged words are cached.
"""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heapify, heappop, heappush

_LONGEST_CACHED = 64  # characters
#: Characters of the words that are cached, each with `_WORD` more for its entry. A character that
#: stays alone takes up to 90 bytes, so they take 50 MB at most; of English text 12 MB.
_CACHED = 1 << 19
_WORD = 8


class Merger:
    """Joins adjacent pairs with a rank: the lowest rank first, the leftmost of equals first.

    `ranks` is indexed by left + `between` + right. A space between gives BPE's merges as GGUF files
    list them; an empty string gives SentencePiece, whose pairs rank by the piece they make.
    """

    def __init__(self, ranks: Mapping[str, float], between: str) -> None:
        self._ranks = ranks
        self._between = between
        self._known: dict[str, list[str]] = {}
        self._room = _CACHED

    def __call__(self, word: str) -> list[str]:
        """The pieces of `word`, from left to right; characters without a merge stay alone."""
        pieces = self._known.get(word)
        if pieces is None:
            pieces = self._merge(word)
            if len(word) <= _LONGEST_CACHED:
                self._room -= len(word) + _WORD
                if self._room < 0:
                    self._known.clear()
                    self._room = _CACHED
                self._known[word] = pieces
        return pieces

    def _merge(self, word: str) -> list[str]:
        ranks, between = self._ranks, self._between
        pieces = list(word)  # "": merged into a piece further left
        n = len(pieces)
        after = list(range(1, n + 1))  # n: none
        before = list(range(-1, n - 1))
        queue: list[tuple[float, int, str]] = []  # rank, position of the left piece, joined text
        for i in range(n - 1):
            left, right = pieces[i], pieces[i + 1]
            if (rank := ranks.get(left + between + right)) is not None:
                queue.append((rank, i, left + right))
        heapify(queue)
        while queue:
            _, i, joined = heappop(queue)
            right_place = after[i]
            if right_place == n or pieces[i] + pieces[right_place] != joined or not pieces[i]:
                continue  # one of the two was merged meanwhile
            pieces[i], pieces[right_place] = joined, ""
            after[i] = follower = after[right_place]
            if follower < n:
                before[follower] = i
                right = pieces[follower]
                if (rank := ranks.get(joined + between + right)) is not None:
                    heappush(queue, (rank, i, joined + right))
            if (place := before[i]) >= 0:
                left = pieces[place]
                if (rank := ranks.get(left + between + joined)) is not None:
                    heappush(queue, (rank, place, left + joined))
        return [piece for piece in pieces if piece]
