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
from typing import TYPE_CHECKING
from weakref import WeakValueDictionary

from urdir.driver.errors import DriverError
from urdir.model.memory.host_slots import Move

if TYPE_CHECKING:
    from urdir.model.memory.host_pages import HostPages

#: Minimum distance of a state from the one before it, in pages. Computing up to a state takes a
#: separate step that reads the weights once more: as long as some 60 prompt tokens take (qwen3.5-4b
#: Q4_K_M on an H200: 896 tokens/s one by one, 54,851 in prompts). Pages have 64.
LEAST_PAGES = 8


#: The place of a state that comes back from the host: its page stays in the tree.
_CLAIMED = -1


class PrefixStates:
    """``places`` slots for states after whole pages of ``page_len`` tokens, numbered from 0; none
    without pages.

    With a ``host`` a state that is evicted moves there, and back once it is found.

    A slot is *taken* for a state under computation, and *known* by the tokens before it once
    computed. The least recently used known state is evicted.
    """

    def __init__(self, places: int, page_len: int) -> None:
        self.places = places
        self.host: HostPages[_Node] | None = None
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
        found, last = 0, None
        for length, node in self._path(tokens, scope):
            if length > held:
                self._forget(node)
                break
            if self._has_state(node) and is_usable(length):
                found, last = length, node
        if last is None:
            return 0, -1
        if last.place is None and not self._restore(last):
            return self.find(tokens[: found - 1], held, scope, is_usable)
        assert last.place is not None
        self._known.move_to_end(last.place)
        return found, last.place

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
            if self._has_state(node):
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
        if self.host is not None and (filled := self.host.put(node)) is not None:
            slot, lost = filled
            if lost is not None:
                self._prune(lost)
            try:
                self.host.receive([Move(node, slot, (place,))])
            except DriverError:
                self.host.drop(node)
                self._prune(node)
                self.give_back(place)
                raise
        self._prune(node)
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
            if self.host is not None:
                self.host.drop(node)
            node.place = place
            self._known[place] = node
        else:
            self.give_back(place)
            self._known.move_to_end(node.place)

    def _has_state(self, node: _Node) -> bool:
        """Whether there is a state after a page, on the device or the host."""
        return node.place is not None or (self.host is not None and self.host.has(node))

    def _restore(self, node: _Node) -> bool:
        """Bring a state back from the host; False if all slots are taken. Raises DriverError."""
        assert self.host is not None
        slot = self.host.claim(node)
        place, node.place = None, _CLAIMED
        try:
            if (place := self.take()) is not None:
                self.host.give([Move(node, slot, (place,))])
        except DriverError:
            if place is not None:
                self.give_back(place)
            place = None
            raise
        finally:
            node.place = place
            if place is None:
                self.host.free(slot)
                self._prune(node)
        if place is None:
            return False
        self._known[place] = node
        return True

    def _root(self, scope: bytes) -> _Node:
        """The root of a scope, removed with the last reference to it."""
        return self._roots.setdefault(scope, _Node(None, ()))

    def _path(self, tokens: Sequence[int], scope: bytes) -> Iterator[tuple[int, _Node]]:
        """The nodes of the pages that ``tokens`` start with, each with the token count at its
        end."""
        node, length = self._root(scope), 0
        if not self.places:
            return
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
        self._prune(node.parent)
        lost = [node]
        while lost:
            node = lost.pop()
            lost += node.children.values()
            node.children.clear()  # otherwise the cycle would keep the root alive
            if self.host is not None:
                self.host.drop(node)
            if node.place is not None:
                del self._known[node.place]
                self.give_back(node.place)

    def _prune(self, node: _Node) -> None:
        """Remove a page and its ancestors if they lead to no state."""
        while node.parent is not None and not self._has_state(node) and not node.children:
            if node.parent.children.get(node.tokens) is not node:
                return  # it was removed before
            del node.parent.children[node.tokens]
            node = node.parent


class _Node:
    """A page after those of its ancestors, or a root without any; ``place`` is the slot of the
    state after it, or None. Every leaf has one."""

    __slots__ = ("__weakref__", "children", "parent", "place", "tokens")

    def __init__(self, parent: _Node | None, tokens: tuple[int, ...]) -> None:
        self.parent = parent
        self.tokens = tokens
        self.place: int | None = None
        self.children: dict[tuple[int, ...], _Node] = {}
