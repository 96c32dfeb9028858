"""Page pool of a paged cache: reference counts, and a prefix tree of cached pages.

Keys and values depend on all earlier tokens, so a page can serve every sequence with the same
tokens up to the page's end. Cached pages are nodes of a tree: a node's parent is the page before
it. Lookup compares tokens, page after page, not hashes: different prefixes are never confused.
Children of a node are sorted by tokens: the longest matches, whole pages or partial ones, are
neighbours of the insertion point.

Each *scope*, a byte string, has its own tree: sequences share within a scope only. All scopes share
the pages and the eviction order.

A page without references is *unused*, or *kept* for its prefix until it is evicted. The least
recently used page is evicted first, and a page before its parent.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter, ne
from weakref import WeakValueDictionary

from urdir.model.errors import ContextFullError

#: A partial page is shared by a copy, which takes as long as computing a few tokens: the minimum,
#: as a fraction of the page.
LEAST_COPIED = 1 / 4


@dataclass(frozen=True, slots=True)
class Match:
    """Pages for a new sequence, in order of position, with a reference for it.

    They hold its first ``tokens`` tokens once the contents of page ``source`` (None: nothing) are
    copied to the first incomplete page.
    """

    pages: list[int]
    tokens: int
    source: int | None


class PagePool:
    """``pages`` pages of ``page_len`` tokens, numbered from 0; bookkeeping only, without device.

    Taking and releasing a page take constant time. ``queries`` and ``hits`` count the tokens looked
    up and found by `match`, ``evictions`` the evicted pages.
    """

    def __init__(self, pages: int, page_len: int) -> None:
        self.page_len = page_len
        self.queries = self.hits = self.evictions = 0
        self._users = [0] * pages
        self._unused = list(reversed(range(pages)))
        self._kept: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._nodes: list[_Node | None] = [None] * pages
        # By scope; a root lives while a page of it is cached, which refers to it.
        self._roots: WeakValueDictionary[bytes, _Node] = WeakValueDictionary()

    @property
    def pages(self) -> int:
        """All pages."""
        return len(self._users)

    @property
    def free(self) -> int:
        """Number of pages that can be taken: unused, or kept for their prefixes only."""
        return len(self._unused) + len(self._kept)

    @property
    def kept(self) -> int:
        """Number of unreferenced pages that keep a prefix."""
        return len(self._kept)

    @property
    def used(self) -> int:
        """Number of referenced pages."""
        return self.pages - self.free

    def is_shared(self, page: int) -> bool:
        """Whether a page has several references, so that writes need a copy."""
        return self._users[page] > 1

    def check_room(self, count: int) -> None:
        """Raise ContextFullError unless ``count`` pages can be taken."""
        if count > self.free:
            raise ContextFullError(
                f"the KV cache is full: {count} pages of {self.page_len} tokens are needed, "
                f"{self.free} of {self.pages} are free"
            )

    # ---- references ----

    def take(self, count: int) -> list[int]:
        """Take ``count`` unreferenced pages, evicting their prefixes. Raises ContextFullError,
        without effect."""
        self.check_room(count)
        while len(self._unused) < count:
            oldest = self._nodes[next(iter(self._kept))]
            assert oldest is not None
            self._forget(oldest)
        taken = [self._unused.pop() for _ in range(count)]
        for page in taken:
            self._users[page] = 1
        return taken

    def share(self, pages: Sequence[int]) -> None:
        """Add a reference to referenced or kept pages."""
        for page in pages:
            if not self._users[page]:
                del self._kept[page]
            self._users[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Drop a sequence's references, in order of position. Pages without references stay as
        cached prefixes if they are in the tree."""
        for page in pages:
            assert self._users[page], f"page {page} has no reference"
            self._users[page] -= 1
            if self._users[page]:
                continue
            if self._nodes[page] is None:
                self._unused.append(page)
            else:
                self._kept[page] = None
        known = (self._nodes[page] for page in reversed(pages))
        self._touch(next((node for node in known if node is not None), None))

    # ---- prefix tree ----

    def known(self, tokens: Sequence[int], scope: bytes = b"") -> int:
        """How many of ``tokens`` are in cached whole pages of ``scope``."""
        return len(self._find(tuple(tokens), scope)[0]) * self.page_len

    def match(self, tokens: Sequence[int], pages: int, spare: int = 0, scope: bytes = b"") -> Match:
        """``pages`` pages for a sequence that starts with ``tokens``: those of the longest cached
        prefix in ``scope``, shared, then fresh ones.

        Raises ContextFullError, without effect, unless ``spare`` more pages could be taken
        afterwards.
        """
        nodes, part, common = self._find(tuple(tokens), scope)
        fresh = pages - len(nodes)
        self.check_room(fresh + spare + sum(not self._users[node.page] for node in nodes))
        shared = [node.page for node in nodes]
        self.share(shared)
        source = None
        if part is not None:
            self._touch(part)  # the last to be evicted
            source = part.page
        taken = self.take(fresh)
        found = len(nodes) * self.page_len + common
        self.queries += len(tokens)
        self.hits += found
        return Match(shared + taken, found, None if taken[:1] == [source] else source)

    def publish(self, tokens: Sequence[int], pages: Sequence[int], scope: bytes = b"") -> None:
        """Share ``pages``, referenced by the caller, which hold ``tokens`` from the first on, in
        ``scope``. Pages that are already cached belong to the same scope.

        The last page may be partial; more of its tokens may be published later. Pages with the same
        tokens as cached ones are not added.
        """
        length = self.page_len
        at = len(tokens) // length
        while at and not self._is_whole(pages[at - 1]):
            at -= 1
        node = self._nodes[pages[at - 1]] if at else self._root(scope)
        assert node is not None
        for start in range(at * length, len(tokens), length):
            node = self._know(node, tuple(tokens[start : start + length]), pages[start // length])

    def forget(self, page: int, filled: int) -> None:
        """The only user of a page writes tokens into it from index ``filled`` on: it and its
        descendants leave the tree if they were cached with other tokens there."""
        node = self._nodes[page]
        if node is not None and len(node.tokens) > filled:
            self._forget(node)

    def _root(self, scope: bytes) -> _Node:
        """The root of a scope, removed with the last reference to it."""
        return self._roots.setdefault(scope, _Node(None, (), -1))

    def _find(self, tokens: tuple[int, ...], scope: bytes) -> tuple[list[_Node], _Node | None, int]:
        """The whole pages that ``tokens`` start with; the page with the longest partial match after
        them, if worth a copy; and the length of that match."""
        length, node, found = self.page_len, self._root(scope), list[_Node]()
        while True:
            start = len(found) * length
            wanted = tokens[start : start + length]
            at = bisect_left(node.children, wanted, key=_TOKENS)
            near = node.children[max(at - 1, 0) : at + 1]
            best = max(near, key=lambda child: common_length(child.tokens, wanted), default=None)
            common = 0 if best is None else common_length(best.tokens, wanted)
            if best is None or common < length * LEAST_COPIED:
                return found, None, 0
            if common < length:
                return found, best, common
            found.append(best)
            node = best

    def _know(self, parent: _Node, tokens: tuple[int, ...], page: int) -> _Node:
        """The node below ``parent`` with these tokens (or more, in a partial page), made of
        ``page`` if it does not exist."""
        at = bisect_left(parent.children, tokens, key=_TOKENS)
        if at < len(parent.children):
            after = parent.children[at]
            if after.tokens[: len(tokens)] == tokens:
                return after
        known = self._nodes[page]
        if known is not None:  # cached by the first of these tokens
            self._forget(known)
        node = self._nodes[page] = _Node(parent, tokens, page)
        insort(parent.children, node, key=_TOKENS)
        return node

    def _is_whole(self, page: int) -> bool:
        node = self._nodes[page]
        return node is not None and len(node.tokens) == self.page_len

    def _touch(self, node: _Node | None) -> None:
        """Mark a prefix as used: it is evicted last, and each page before its parent."""
        while node is not None:
            if node.page in self._kept:
                self._kept.move_to_end(node.page)
            node = node.parent

    def _forget(self, node: _Node) -> None:
        """Remove a page and its descendants from the tree; unreferenced ones become unused."""
        assert node.parent is not None
        siblings = node.parent.children
        del siblings[bisect_left(siblings, node.tokens, key=_TOKENS)]
        lost = [node]
        while lost:
            node = lost.pop()
            lost += node.children
            node.children.clear()  # otherwise the cycle would keep the root alive
            self._nodes[node.page] = None
            if not self._users[node.page]:
                del self._kept[node.page]
                self._unused.append(node.page)
                self.evictions += 1


class _Node:
    """A page that holds ``tokens`` after those of its ancestors; or a root, without parent and
    page."""

    __slots__ = ("__weakref__", "children", "page", "parent", "tokens")

    def __init__(self, parent: _Node | None, tokens: tuple[int, ...], page: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.page = page
        self.children: list[_Node] = []  # sorted by tokens, which are distinct


_TOKENS = attrgetter("tokens")


def common_length(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Length of the common prefix."""
    if a == b:
        return len(a)
    shorter = min(len(a), len(b))
    return next((i for i, differ in enumerate(map(ne, a, b)) if differ), shorter)
