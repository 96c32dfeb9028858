"""Page pool of layers with a window: their pages are attached to the nodes of a prefix tree.

A token attends to the last ``span`` tokens only. So a prefix is usable in these layers if the pages
of its last ``span`` - 1 tokens are there, and pages before them serve prefixes that part earlier.
Pages that a sequence has left behind are evicted before those of the ends of prefixes.
"""

from __future__ import annotations

from collections.abc import Sequence

from urdir.model.memory.counted_pages import CountedPages
from urdir.model.memory.prefix_tree import Node


class WindowPages(CountedPages):
    """``pages`` pages of ``page_len`` tokens for layers whose tokens attend to the last ``span``;
    bookkeeping only, without device."""

    def __init__(self, pages: int, page_len: int, span: int) -> None:
        super().__init__(pages, page_len)
        self.span = span
        self._pages: dict[Node, int] = {}
        self._hosted: set[Node] = set()  # nodes whose pages are in slots of the host
        self._nodes: list[Node | None] = [None] * pages

    def first_block(self, length: int) -> int:
        """The first page that the token at position ``length`` attends to."""
        return max(0, length + 1 - self.span) // self.page_len

    def lacks(self, nodes: Sequence[Node], length: int) -> int | None:
        """The last of ``nodes``, the pages of ``length`` tokens, that is missing of those that the
        next token attends to; None if none is."""
        blocks = range(len(nodes) - 1, self.first_block(length) - 1, -1)
        return next((at for at in blocks if not self._has(nodes[at])), None)

    def page(self, node: Node) -> int | None:
        """The page of a node, if it has one."""
        return self._pages.get(node)

    def of(self, nodes: Sequence[Node]) -> list[int]:
        """The pages of nodes, which have some."""
        return [self._pages[node] for node in nodes]

    def attach(self, node: Node, page: int) -> None:
        """Keep a page for the prefix that ends with ``node``, unless one is kept for it already."""
        if node not in self._pages and self._nodes[page] is None:
            self._pages[node], self._nodes[page] = page, node

    def forget(self, page: int, filled: int) -> None:
        """The only user of a page writes tokens into it from index ``filled`` on: it is detached
        if it was kept with other tokens there."""
        node = self._nodes[page]
        if node is not None and len(node.tokens) > filled:
            self.detach(node)

    def send(self, node: Node) -> int | None:
        """A node moves to the host: the page whose contents do, too. It can be taken then."""
        page = self._pages.get(node)
        if page is not None:
            self.detach(node)
            self._hosted.add(node)
        return page

    def check_restore(self, nodes: Sequence[Node]) -> None:
        """Raise ContextFullError unless there is room for the pages of all ``nodes``."""
        held = [self._pages[node] for node in nodes if node in self._pages]
        self.check_room(len(nodes) - len(held) + self.unreferenced(held))

    def restore(self, nodes: Sequence[Node], claimed: Sequence[Node]) -> list[Node]:
        """Take pages, which are kept then, for those of ``nodes``, in order, that are in slots of
        the host: which these are. The slots of the ``claimed`` nodes are freed. Raises
        ContextFullError, without effect."""
        self.check_restore(nodes)
        hosted = [node for node in nodes if node in self._hosted]
        held = [self._pages[node] for node in nodes if node in self._pages]
        self.share(held)
        pages = sorted(self.take(len(hosted)))
        for node, page in zip(hosted, pages, strict=True):
            self._hosted.remove(node)
            self.attach(node, page)
        self._hosted.difference_update(claimed)
        self.release([*held, *pages])
        return hosted

    def detach(self, node: Node) -> None:
        """A node has left the tree, or lost its page here."""
        self._hosted.discard(node)
        if (page := self._pages.pop(node, None)) is None:
            return
        self._nodes[page] = None
        if not self._users[page]:
            del self._kept[page]
            self._unused.append(page)
            self.evictions += 1

    def leave(self, page: int) -> None:
        """Drop the reference of a sequence whose window has passed the page; it is evicted before
        all others."""
        self.release([page])
        if page in self._kept:
            self._kept.move_to_end(page, last=False)

    def touch(self, page: int) -> None:
        """Mark a page as used: if it is kept, it is evicted last."""
        if page in self._kept:
            self._kept.move_to_end(page)

    def _has(self, node: Node) -> bool:
        return node in self._pages or node in self._hosted

    def _is_known(self, page: int) -> bool:
        return self._nodes[page] is not None

    def _evict(self, page: int) -> None:
        node = self._nodes[page]
        assert node is not None
        self.detach(node)

    def _evicted(self) -> None:
        """Nothing is left of their contents."""
