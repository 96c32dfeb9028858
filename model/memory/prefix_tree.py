"""Prefix tree of cached pages.

Keys and values depend on all earlier tokens, so a page can serve every sequence with the same
tokens up to the page's end. Cached pages are nodes of a tree: a node's parent is the page before
it. Lookup compares tokens, page after page, not hashes: different prefixes are never confused.
Children of a node are sorted by tokens: the longest matches, whole pages or partial ones, are
neighbours of the insertion point.

Each *scope*, a byte string, has its own tree: sequences share within a scope only.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from operator import attrgetter, ne
from weakref import WeakValueDictionary

#: A partial page is shared by a copy, which takes as long as computing a few tokens: the minimum,
#: as a fraction of the page.
LEAST_COPIED = 1 / 4


_TOKENS = attrgetter("tokens")


@dataclass(frozen=True, slots=True)
class Path:
    """What is cached of a sequence's first ``wanted`` tokens: the ``nodes`` of whole pages, then
    the first ``common`` tokens of ``part``. ``followed`` tokens are in the tree, which layers with
    a window may lack."""

    nodes: list[Node]
    part: Node | None
    common: int
    wanted: int
    followed: int

    @property
    def all_nodes(self) -> list[Node]:
        """The nodes of all cached tokens."""
        return self.nodes if self.part is None else [*self.nodes, self.part]

    def tokens(self, page_len: int) -> int:
        """Number of cached tokens."""
        return len(self.nodes) * page_len + self.common


class Node:
    """A page that holds ``tokens`` after those of its ancestors; or a root, without parent and
    page. ``page`` is -1 while it is in a slot of the host."""

    __slots__ = ("__weakref__", "children", "page", "parent", "tokens")

    def __init__(self, parent: Node | None, tokens: tuple[int, ...], page: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.page = page
        self.children: list[Node] = []  # sorted by tokens, which are distinct

    @property
    def is_on_device(self) -> bool:
        """Whether it has a page."""
        return self.page >= 0

    def child(self, tokens: tuple[int, ...]) -> Node | None:
        """The child that begins with ``tokens``."""
        at = bisect_left(self.children, tokens, key=_TOKENS)
        after = self.children[at] if at < len(self.children) else None
        return after if after is not None and after.tokens[: len(tokens)] == tokens else None

    def insert(self, child: Node) -> None:
        """Add a child, with tokens that no other has."""
        insort(self.children, child, key=_TOKENS)

    def remove(self, child: Node) -> None:
        """Remove a child."""
        del self.children[bisect_left(self.children, child.tokens, key=_TOKENS)]

    def path(self) -> list[Node]:
        """The nodes from the first page to this one."""
        nodes, node = [], self
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]


class PrefixTree:
    """Trees of nodes of ``page_len`` tokens or, at their ends, fewer; one tree for each scope."""

    def __init__(self, page_len: int) -> None:
        self.page_len = page_len
        # A root lives while a page of it is cached, which refers to it.
        self.roots: WeakValueDictionary[bytes, Node] = WeakValueDictionary()

    def root(self, scope: bytes) -> Node:
        """The root of a scope, removed with the last reference to it."""
        return self.roots.setdefault(scope, Node(None, (), -1))

    def find(self, tokens: tuple[int, ...], scope: bytes) -> tuple[list[Node], Node | None, int]:
        """The whole pages that ``tokens`` start with; the page with the longest partial match after
        them, if worth a copy; and the length of that match."""
        length, node, found = self.page_len, self.root(scope), list[Node]()
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


def common_length(a: tuple[int, ...], b: tuple[int, ...]) -> int:
    """Length of the common prefix."""
    if a == b:
        return len(a)
    shorter = min(len(a), len(b))
    return next((i for i, differ in enumerate(map(ne, a, b)) if differ), shorter)
