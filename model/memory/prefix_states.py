"""Which beginnings of sequences the kept states of recurrent layers are of; no device.

Whoever begins with the same tokens can go on from a state, but from that one length alone, where
pages serve any. So it counts where states are kept: at the end of what two prompts have in common,
which more are likely to have, and near the end of a prompt, for its other answers and for the next
turn of its conversation. Both at ends of pages, so that what is before them can be shared.

Known beginnings are paths of a tree whose nodes are pages. The tokens themselves are compared. Each
scope has a tree of its own, as with pages; all scopes share the places.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from weakref import WeakValueDictionary

#: The least worth a state, in pages beyond the one before it. Computing up to there takes a step of
#: its own, in which the weights are read once more: as long as some 60 tokens of a prompt take
#: (qwen3.5-4b Q4_K_M on an H200: 896 tokens/s one by one, 54,851 in prompts). Pages have 64.
LEAST_PAGES = 8


class PrefixStates:
    """``places`` for states after whole pages of ``page_len`` tokens, numbered from 0; none where
    there are no pages.

    A place is *taken* for a state that is being computed, and *known* by the tokens before it from
    then on that it is. Of the known ones the least recently used makes room.
    """

    def __init__(self, places: int, page_len: int) -> None:
        self.places = places
        self._page_len = page_len
        self._unused = list(reversed(range(places)))
        self._known: OrderedDict[int, _Node] = OrderedDict()  # least recently used first
        # Of each scope; a root lives as long as one of its states is known, which leads to it.
        self._roots: WeakValueDictionary[bytes, _Node] = WeakValueDictionary()

    @property
    def known(self) -> int:
        """States that are known."""
        return len(self._known)

    def find(self, tokens: Sequence[int], held: int, scope: bytes = b"") -> tuple[int, int]:
        """The longest beginning of ``tokens`` of which a state is known in ``scope``: its length, 0
        without one, and the state's place.

        Pages hold the first ``held`` tokens. What lies beyond is lost to all who begin so: its
        states are forgotten.
        """
        found, place = 0, -1
        for length, node in self._path(tokens, scope) if self._known else ():
            if length > held:
                self._forget(node)
                break
            if node.place is not None:
                found, place = length, node.place
        if found:
            self._known.move_to_end(place)
        return found, place

    def cuts(self, tokens: Sequence[int], found: int, scope: bytes = b"") -> tuple[int, ...]:
        """Where states are to be kept, for others of ``scope``, while a sequence that begins with
        ``tokens`` is computed, of which a state after the first ``found`` is there."""
        if not self.places:
            return ()
        common = max((length for length, _ in self._path(tokens, scope)), default=0)
        cuts = []
        for length in (common, len(tokens) // self._page_len * self._page_len):
            if length - found >= LEAST_PAGES * self._page_len:
                cuts.append(length)
                found = length
        return tuple(cuts)

    def take(self) -> int | None:
        """A place for a state; what it held is forgotten. None while all are taken."""
        if self._unused:
            return self._unused.pop()
        if not self._known:
            return None
        place, node = self._known.popitem(last=False)
        node.place = None
        _prune(node)
        return place

    def give_back(self, place: int) -> None:
        """Nothing is to be known of the state in a place that was taken."""
        self._unused.append(place)

    def know(self, tokens: Sequence[int], place: int, scope: bytes = b"") -> None:
        """The state in a place that was taken is that after ``tokens``, whole pages, for others of
        ``scope``. One that is known already stays."""
        node = self._root(scope)
        for page in self._pages(tokens):
            if page not in node.children:
                node.children[page] = _Node(node, page)
            node = node.children[page]
        if node.place is None:
            node.place = place
            self._known[place] = node
        else:
            self.give_back(place)
            self._known.move_to_end(node.place)

    def _root(self, scope: bytes) -> _Node:
        """The root of a scope: what it is found by ends with the last that refers to it."""
        return self._roots.setdefault(scope, _Node(None, ()))

    def _path(self, tokens: Sequence[int], scope: bytes) -> Iterator[tuple[int, _Node]]:
        """The nodes of the pages that ``tokens`` begin with, each with the tokens up to its end."""
        node, length = self._root(scope), 0
        for page in self._pages(tokens):
            child = node.children.get(page)
            if child is None:
                return
            node, length = child, length + self._page_len
            yield length, node

    def _pages(self, tokens: Sequence[int]) -> Iterator[tuple[int, ...]]:
        """The whole pages of tokens."""
        size = self._page_len
        for end in range(size, len(tokens) + 1, size):
            yield tuple(tokens[end - size : end])

    def _forget(self, node: _Node) -> None:
        """All states from a page on are forgotten."""
        assert node.parent is not None
        del node.parent.children[node.tokens]
        _prune(node.parent)
        lost = [node]
        while lost:
            node = lost.pop()
            lost += node.children.values()
            node.children.clear()  # or the circle would keep the root
            if node.place is not None:
                del self._known[node.place]
                self.give_back(node.place)


class _Node:
    """A page after those of its parents, or a root without any; ``place`` is that of the state
    after it, if there is one. There is one at every end of the tree."""

    __slots__ = ("__weakref__", "children", "parent", "place", "tokens")

    def __init__(self, parent: _Node | None, tokens: tuple[int, ...]) -> None:
        self.parent = parent
        self.tokens = tokens
        self.place: int | None = None
        self.children: dict[tuple[int, ...], _Node] = {}


def _prune(node: _Node) -> None:
    """Forget a page, and those before it, that lead to no state."""
    while node.parent is not None and node.place is None and not node.children:
        del node.parent.children[node.tokens]
        node = node.parent
