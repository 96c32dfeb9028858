"""Prefix tree of cached states of recurrent layers; bookkeeping only, without device.

A request resumes from a state at exactly its prefix length, while pages serve any length. So the
choice of cached states matters: at the end of a prefix common to two prompts, which is likely to
recur, and near the end of a prompt, for further answers and for the next turn. Both are at page
ends, so that the pages before them can be shared.

Cached prefixes are paths of a tree whose nodes are pages. Tokens are compared, not hashes. Each
scope has its own tree, as with pages; all scopes share the slots.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from weakref import WeakValueDictionary

#: Minimum distance of a state from the one before it, in pages. Computing up to a state takes a
#: separate step that reads the weights once more: as long as some 60 prompt tokens take (qwen3.5-4b
#: Q4_K_M on an H200: 896 tokens/s one by one, 54,851 in prompts). Pages have 64.
LEAST_PAGES = 8


class PrefixStates:
    """``places`` slots for states after whole pages of ``page_len`` tokens, numbered from 0; none
    without pages.

    A slot is *taken* for a state under computation, and *known* by the tokens before it once
    computed. The least recently used known state is evicted.
    """

    def __init__(self, places: int, page_len: int) -> None:
        self.places = places
        self._page_len = page_len
        self._unused = list(reversed(range(places)))
        self._known: OrderedDict[int, _Node] = OrderedDict()  # least recently used first
        # By scope; a root lives while a state of it is cached, which leads to it.
        self._roots: WeakValueDictionary[bytes, _Node] = WeakValueDictionary()

    @property
    def known(self) -> int:
        """Number of cached states."""
        return len(self._known)

    def find(
        self,
        tokens: Sequence[int],
        held: int,
        scope: bytes = b"",
        is_usable: Callable[[int], bool] = bool,
    ) -> tuple[int, int]:
        """The longest prefix of ``tokens`` with a cached state in ``scope`` whose length
        ``is_usable``: its length, 0 without one, and the state's slot.

        Pages hold the first ``held`` tokens. States beyond them are useless without pages and are
        removed.
        """
        found, place = 0, -1
        for length, node in self._path(tokens, scope) if self._known else ():
            if length > held:
                self._forget(node)
                break
            if node.place is not None and is_usable(length):
                found, place = length, node.place
        if found:
            self._known.move_to_end(place)
        return found, place

    def cuts(self, tokens: Sequence[int], found: int, scope: bytes = b"") -> tuple[int, ...]:
        """Lengths at which states should be cached for others of ``scope`` while computing a
        sequence that starts with ``tokens``, given a state after the first ``found``."""
        if not self.places:
            return ()
        common = max((length for length, _ in self._path(tokens, scope)), default=0)
        cuts = []
        for length in (common, len(tokens) // self._page_len * self._page_len):
            if length - found >= LEAST_PAGES * self._page_len:
                cuts.append(length)
                found = length
        return tuple(cuts)

    def erase(self, tokens: Sequence[int], scope: bytes = b"") -> int:
        """Remove the states of a prefix, the longest first, as far as no longer prefix has any.
        Returns how many of ``tokens`` lead to one."""
        path = list(self._path(tokens, scope))
        for _, node in reversed(path):
            if node.children:
                break
            if node.place is not None:
                self._forget(node)
        return path[-1][0] if path else 0

    def take(self) -> int | None:
        """Take a slot for a state, evicting its contents. None while all are taken."""
        if self._unused:
            return self._unused.pop()
        if not self._known:
            return None
        place, node = self._known.popitem(last=False)
        node.place = None
        _prune(node)
        return place

    def give_back(self, place: int) -> None:
        """Release a taken slot without caching its state."""
        self._unused.append(place)

    def know(self, tokens: Sequence[int], place: int, scope: bytes = b"") -> None:
        """Cache the state in a taken slot as that after ``tokens``, whole pages, for others of
        ``scope``. An existing equal state stays."""
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
        """The root of a scope, removed with the last reference to it."""
        return self._roots.setdefault(scope, _Node(None, ()))

    def _path(self, tokens: Sequence[int], scope: bytes) -> Iterator[tuple[int, _Node]]:
        """The nodes of the pages that ``tokens`` start with, each with the token count at its
        end."""
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
        """Remove all states from a page on."""
        assert node.parent is not None
        del node.parent.children[node.tokens]
        _prune(node.parent)
        lost = [node]
        while lost:
            node = lost.pop()
            lost += node.children.values()
            node.children.clear()  # otherwise the cycle would keep the root alive
            if node.place is not None:
                del self._known[node.place]
                self.give_back(node.place)


class _Node:
    """A page after those of its ancestors, or a root without any; ``place`` is the slot of the
    state after it, or None. Every leaf has one."""

    __slots__ = ("__weakref__", "children", "parent", "place", "tokens")

    def __init__(self, parent: _Node | None, tokens: tuple[int, ...]) -> None:
        self.parent = parent
        self.tokens = tokens
        self.place: int | None = None
        self.children: dict[tuple[int, ...], _Node] = {}


def _prune(node: _Node) -> None:
    """Remove a page and its ancestors if they lead to no state."""
    while node.parent is not None and node.place is None and not node.children:
        del node.parent.children[node.tokens]
        node = node.parent
