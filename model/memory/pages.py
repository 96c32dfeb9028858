"""The pages of a paged cache: who holds them, and which beginnings of sequences they keep.

Keys and values depend on all tokens before them, so that a page can serve every sequence that
begins with the same tokens up to the page's end. Known pages are therefore nodes of a tree: a
node's parent is the page before it. A search compares the tokens themselves, page after page; no
hash stands for them, so no two prefixes can ever be taken for each other. Nodes below one parent
are sorted by their tokens: the neighbours of where a page's tokens belong are those that agree with
them longest, be they whole pages or partly filled ones.

Each *scope*, a name of some bytes, has a tree of its own: sequences share within one scope alone.
All scopes share the pages, and the order in which pages are taken.

A page that nobody holds is *unused*, or *kept* for its prefix until it is needed. The least
recently used is taken first, and a page before the one that it follows.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter, ne
from weakref import WeakValueDictionary

from urdir.model.errors import ContextFullError

#: A part of a page is shared by a copy, which takes as long as it takes to compute a few tokens:
#: the least worth it, as a part of the page.
LEAST_COPIED = 1 / 4


@dataclass(frozen=True, slots=True)
class Match:
    """Pages for a new sequence, in order of position, each held for it.

    They hold its first ``tokens`` tokens once the content of page ``source`` (None: nothing) is
    copied to the first page that is not whole of them.
    """

    pages: list[int]
    tokens: int
    source: int | None


class PagePool:
    """``pages`` pages of ``page_len`` tokens each, numbered from 0; bookkeeping alone, no device.

    Taking a page and giving it back take the same short time however many there are.
    ``queries`` and ``hits`` count the tokens that `match` was asked for and those that it found,
    ``evictions`` the pages whose prefixes were forgotten for others.
    """

    def __init__(self, pages: int, page_len: int) -> None:
        self.page_len = page_len
        self.queries = self.hits = self.evictions = 0
        self._users = [0] * pages
        self._unused = list(reversed(range(pages)))
        self._kept: OrderedDict[int, None] = OrderedDict()  # least recently used first
        self._nodes: list[_Node | None] = [None] * pages
        # Of each scope; a root lives as long as one of its pages is known, which refers to it.
        self._roots: WeakValueDictionary[bytes, _Node] = WeakValueDictionary()

    @property
    def pages(self) -> int:
        """All pages."""
        return len(self._users)

    @property
    def free(self) -> int:
        """Pages that can be taken: unused, or kept for their prefixes alone."""
        return len(self._unused) + len(self._kept)

    @property
    def kept(self) -> int:
        """Pages that nobody holds and that keep a prefix."""
        return len(self._kept)

    @property
    def used(self) -> int:
        """Pages that somebody holds."""
        return self.pages - self.free

    def is_shared(self, page: int) -> bool:
        """Whether more than one holds a page: a copy must be written then."""
        return self._users[page] > 1

    def check_room(self, count: int) -> None:
        """Raise ContextFullError unless ``count`` pages can be taken."""
        if count > self.free:
            raise ContextFullError(
                f"the KV cache is full: {count} pages of {self.page_len} tokens are needed, "
                f"{self.free} of {self.pages} are free"
            )

    # ---- who holds what ----

    def take(self, count: int) -> list[int]:
        """``count`` pages that nobody held, held once now; what they kept is forgotten. Raises
        ContextFullError, nothing changed."""
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
        """Hold pages once more that are held or kept."""
        for page in pages:
            if not self._users[page]:
                del self._kept[page]
            self._users[page] += 1

    def release(self, pages: Sequence[int]) -> None:
        """Give pages of a sequence back, in order of position. Those that nobody holds then stay as
        prefixes where they are known as such."""
        for page in pages:
            assert self._users[page], f"page {page} is held by nobody"
            self._users[page] -= 1
            if self._users[page]:
                continue
            if self._nodes[page] is None:
                self._unused.append(page)
            else:
                self._kept[page] = None
        known = (self._nodes[page] for page in reversed(pages))
        self._touch(next((node for node in known if node is not None), None))

    # ---- what is known ----

    def known(self, tokens: Sequence[int], scope: bytes = b"") -> int:
        """How many of the first ``tokens`` lie in whole pages that are known in ``scope``."""
        return len(self._find(tuple(tokens), scope)[0]) * self.page_len

    def match(self, tokens: Sequence[int], pages: int, spare: int = 0, scope: bytes = b"") -> Match:
        """``pages`` pages for a sequence that begins with ``tokens``: those of the longest prefix
        known in ``scope``, shared, and then fresh ones.

        Raises ContextFullError, nothing changed, unless ``spare`` more could be taken after that.
        """
        nodes, part, common = self._find(tuple(tokens), scope)
        fresh = pages - len(nodes)
        self.check_room(fresh + spare + sum(not self._users[node.page] for node in nodes))
        shared = [node.page for node in nodes]
        self.share(shared)
        source = None
        if part is not None:
            self._touch(part)  # the last to be taken
            source = part.page
        taken = self.take(fresh)
        found = len(nodes) * self.page_len + common
        self.queries += len(tokens)
        self.hits += found
        return Match(shared + taken, found, None if taken[:1] == [source] else source)

    def publish(self, tokens: Sequence[int], pages: Sequence[int], scope: bytes = b"") -> None:
        """``pages``, held by the caller, hold ``tokens`` from the first on: others of ``scope`` may
        share them. Pages that are known already are so in the same scope.

        The last page may be filled in part; more tokens of it may be published later. Pages with
        the same tokens as known ones stay unknown.
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
        """The only holder of a page writes tokens into it, from place ``filled`` on: it and those
        after it are no prefixes any more where they were known with others there."""
        node = self._nodes[page]
        if node is not None and len(node.tokens) > filled:
            self._forget(node)

    def _root(self, scope: bytes) -> _Node:
        """The root of a scope: what it is found by ends with the last that refers to it."""
        return self._roots.setdefault(scope, _Node(None, (), -1))

    def _find(self, tokens: tuple[int, ...], scope: bytes) -> tuple[list[_Node], _Node | None, int]:
        """The whole pages that ``tokens`` begin with, the page that agrees longest with those after
        them where that is worth a copy, and for how many tokens."""
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
        """The node below ``parent`` with these tokens (or more, where they fill a page in part):
        made of ``page`` where there is none."""
        at = bisect_left(parent.children, tokens, key=_TOKENS)
        if at < len(parent.children):
            after = parent.children[at]
            if after.tokens[: len(tokens)] == tokens:
                return after
        known = self._nodes[page]
        if known is not None:  # by the first of these tokens
            self._forget(known)
        node = self._nodes[page] = _Node(parent, tokens, page)
        insort(parent.children, node, key=_TOKENS)
        return node

    def _is_whole(self, page: int) -> bool:
        node = self._nodes[page]
        return node is not None and len(node.tokens) == self.page_len

    def _touch(self, node: _Node | None) -> None:
        """A prefix was used: it is forgotten last, and each page before the one it follows."""
        while node is not None:
            if node.page in self._kept:
                self._kept.move_to_end(node.page)
            node = node.parent

    def _forget(self, node: _Node) -> None:
        """A page and all that follow it are no prefixes any more; those not held are unused."""
        assert node.parent is not None
        siblings = node.parent.children
        del siblings[bisect_left(siblings, node.tokens, key=_TOKENS)]
        lost = [node]
        while lost:
            node = lost.pop()
            lost += node.children
            node.children.clear()  # or the circle would keep the root
            self._nodes[node.page] = None
            if not self._users[node.page]:
                del self._kept[node.page]
                self._unused.append(node.page)
                self.evictions += 1


class _Node:
    """A page that is known to hold ``tokens`` after those of its parents; or a root, without one
    and without a page."""

    __slots__ = ("__weakref__", "children", "page", "parent", "tokens")

    def __init__(self, parent: _Node | None, tokens: tuple[int, ...], page: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.page = page
        self.children: list[_Node] = []  # sorted by tokens, no two of which are equal


_TOKENS = attrgetter("tokens")


def common_length(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """How many tokens two agree in before they differ."""
    if a == b:
        return len(a)
    shorter = min(len(a), len(b))
    return next((i for i, differ in enumerate(map(ne, a, b)) if differ), shorter)
