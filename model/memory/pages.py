"""Page pool of a paged cache: reference counts, and what a prefix tree keeps of the pages.

All scopes share the pages and the eviction order. A page without references is *unused*, or *kept*
for its prefix until it is evicted. The least recently used page is evicted first, and a page before
its parent. With a *host* the contents of a page that is evicted move to a slot there, and back once
a sequence begins with them: nodes below one in a slot are all in slots. A node whose slot is needed
leaves the tree.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from urdir.driver.errors import DriverError
from urdir.model.memory.counted_pages import CountedPages
from urdir.model.memory.host_slots import Move
from urdir.model.memory.prefix_tree import Node, Path, PrefixTree
from urdir.model.memory.window_pages import WindowPages

if TYPE_CHECKING:
    from urdir.model.memory.host_pages import HostPages


@dataclass(frozen=True, slots=True)
class Match:
    """Pages for a new sequence, in order of position, with a reference for it.

    They hold its first ``tokens`` tokens once the contents of page ``source`` (None: nothing) are
    copied to the first incomplete page.
    """

    pages: list[int]
    tokens: int
    source: int | None


class PagePool(CountedPages):
    """``pages`` pages of ``page_len`` tokens, numbered from 0, and their prefix tree; bookkeeping
    only, without device. A prefix can be used where all ``windows`` have what it needs.

    ``queries`` and ``hits`` count the tokens looked up and found by `match`.
    """

    def __init__(
        self,
        pages: int,
        page_len: int,
        windows: Sequence[WindowPages] = (),
        host: HostPages[Node] | None = None,
    ) -> None:
        super().__init__(pages, page_len)
        self.queries = self.hits = 0
        self.host = host
        self._moves: list[Move[Node]] = []
        self._windows = tuple(windows)
        self._nodes: list[Node | None] = [None] * pages
        self.tree = PrefixTree(page_len)

    def release(self, pages: Sequence[int]) -> None:
        """See CountedPages; their prefix is evicted last."""
        super().release(pages)
        known = (self._nodes[page] for page in reversed(pages))
        self._touch(next((node for node in known if node is not None), None))

    # ---- prefix tree ----

    def known(self, tokens: Sequence[int], scope: bytes = b"") -> int:
        """How many of ``tokens`` are in cached whole pages of ``scope``."""
        return len(self.tree.find(tuple(tokens), scope)[0]) * self.page_len

    def find(self, tokens: Sequence[int], scope: bytes = b"", *, has_slots: bool = True) -> Path:
        """The longest usable prefix of ``tokens`` in ``scope``; without ``has_slots`` of pages on
        the device alone."""
        size = self.page_len
        nodes, part, common = self.tree.find(tuple(tokens), scope)
        followed = len(nodes) * size + common
        if not has_slots:
            part, common = (part, common) if part and part.is_on_device else (None, 0)
            nodes = [node for node in nodes if node.is_on_device]
        if part is not None and self._lacking([*nodes, part], followed) is not None:
            part, common = None, 0
        if part is None:
            while (lacking := self._lacking(nodes, len(nodes) * size)) is not None:
                del nodes[lacking:]
        return Path(nodes, part, common, len(tokens), followed)

    def match(self, tokens: Sequence[int], pages: int, spare: int = 0, scope: bytes = b"") -> Match:
        """``pages`` pages for a sequence that starts with ``tokens``: those of the longest usable
        prefix in ``scope``, shared, then fresh ones. Raises ContextFullError as `begin` does."""
        return self.begin(self.find(tokens, scope), pages, spare)

    def check_begin(self, path: Path, pages: int, spare: int) -> None:
        """Raise ContextFullError where `begin` does."""
        shared = [node.page for node in path.nodes]
        self.check_room(pages - len(shared) + spare + self.unreferenced(shared))

    def begin(self, path: Path, pages: int, spare: int = 0) -> Match:
        """``pages`` pages for a sequence that starts with a cached prefix: its pages, shared, then
        fresh ones.

        Raises ContextFullError, without effect, unless ``spare`` more pages could be taken
        afterwards.
        """
        self.check_begin(path, pages, spare)
        shared = [node.page for node in path.nodes]
        fresh = pages - len(shared)
        self.share(shared)
        source = None
        if path.part is not None:
            self._touch(path.part)  # the last to be evicted
            source = path.part.page
        taken = self.take(fresh)
        found = path.tokens(self.page_len)
        self.queries += path.wanted
        self.hits += found
        return Match(shared + taken, found, None if taken[:1] == [source] else source)

    def check_restore(self, path: Path) -> None:
        """Raise ContextFullError unless there is room for all nodes of a path."""
        held = [node.page for node in path.all_nodes if node.is_on_device]
        self.check_room(len(path.all_nodes) - len(held) + self.unreferenced(held))

    def restore(self, path: Path) -> list[tuple[Node, int]]:
        """Take pages, which are kept then, for the nodes of a path that are in slots of the host:
        these nodes, and their slots, which the caller copies and frees. Raises ContextFullError,
        without effect, and DriverError, after which the tree lacks the nodes."""
        hosted = [node for node in path.all_nodes if not node.is_on_device]
        if not hosted or self.host is None:
            return []
        self.check_restore(path)
        held = [node.page for node in path.all_nodes if node.is_on_device]
        self.share(held)
        claimed = [(node, self.host.claim(node)) for node in hosted]
        try:
            pages = sorted(self.take(len(hosted)))  # copies of neighbours are joined
        except DriverError:
            self.give_up(claimed)
            self.release(held)
            raise
        for node, page in zip(hosted, pages, strict=True):
            node.page, self._nodes[page] = page, node
        self.release([*held, *pages])
        return claimed

    def give_up(self, claimed: Sequence[tuple[Node, int]]) -> None:
        """Nodes of a path, which leave the tree, were not copied from their slots."""
        assert self.host is not None
        for _, slot in claimed:
            self.host.free(slot)
        self._forget(claimed[0][0])

    def erase(self, path: Path) -> None:
        """Remove the last nodes of a path that have no reference and no other node after them."""
        for node in reversed(path.all_nodes):
            if node.children or (node.is_on_device and self._users[node.page]):
                return
            self._forget(node)

    def publish(
        self, tokens: Sequence[int], pages: Sequence[int], scope: bytes = b""
    ) -> Node | None:
        """Share ``pages``, referenced by the caller, which hold ``tokens`` from the first on, in
        ``scope``. Pages that are already cached belong to the same scope. Returns the node of the
        last page, None for no tokens.

        The last page may be partial; more of its tokens may be published later. Pages with the same
        tokens as cached ones are not added.
        """
        length = self.page_len
        at = len(tokens) // length
        while at and not self._is_whole(pages[at - 1]):
            at -= 1
        node = self._nodes[pages[at - 1]] if at else self.tree.root(scope)
        assert node is not None
        for start in range(at * length, len(tokens), length):
            node = self._know(node, tuple(tokens[start : start + length]), pages[start // length])
        return node if tokens else None

    def forget(self, page: int, filled: int) -> None:
        """The only user of a page writes tokens into it from index ``filled`` on: it and its
        descendants leave the tree if they were cached with other tokens there."""
        node = self._nodes[page]
        if node is not None and len(node.tokens) > filled:
            self._forget(node)

    def _know(self, parent: Node, tokens: tuple[int, ...], page: int) -> Node:
        """The node below ``parent`` with these tokens (or more, in a partial page), made of
        ``page`` if it does not exist."""
        if (known := parent.child(tokens)) is not None:
            if not known.is_on_device and known.tokens == tokens:
                self._adopt(known, page)
            return known
        node = self._nodes[page]
        if node is None:
            node = self._nodes[page] = Node(parent, tokens, page)
        else:  # cached by the first of these tokens
            parent.remove(node)
            node.tokens = tokens
        parent.insert(node)
        return node

    def _adopt(self, node: Node, page: int) -> None:
        """A node in a slot of the host has a page again: it was computed once more."""
        if (known := self._nodes[page]) is not None:  # by the first of its tokens
            self._forget(known)
        assert self.host is not None
        self.host.drop(node)
        for window in self._windows:
            window.detach(node)
        node.page, self._nodes[page] = page, node

    def _lacking(self, nodes: Sequence[Node], length: int) -> int | None:
        """The last of ``nodes``, the pages of ``length`` tokens, that a window lacks and needs."""
        found = (window.lacks(nodes, length) for window in self._windows)
        return max((at for at in found if at is not None), default=None)

    def _is_known(self, page: int) -> bool:
        return self._nodes[page] is not None

    def _evict(self, page: int) -> None:
        oldest = self._nodes[page]
        assert oldest is not None
        # sequences that computed the same tokens at once hold later pages alone
        is_before = any(child.is_on_device for child in oldest.children)
        if self.host is None or is_before or (filled := self.host.put(oldest)) is None:
            self._forget(oldest)
            return
        slot, lost = filled
        if lost is not None:
            self._forget(lost)
        windows = tuple([window.send(oldest) for window in self._windows])
        self._moves.append(Move(oldest, slot, (page, *windows)))
        oldest.page, self._nodes[page] = -1, None
        self._leave(page)

    def _evicted(self) -> None:
        moves, self._moves = self._moves, []
        if self.host is None:
            return
        moves = [move for move in moves if self.host.has(move.node)]  # others were forgotten
        if not moves:
            return
        try:
            self.host.receive(moves)
        except DriverError:
            for move in moves:  # each node before its parent
                self._forget(move.node)
            raise

    def _leave(self, page: int) -> None:
        """An unreferenced page is not kept any more."""
        del self._kept[page]
        self._unused.append(page)
        self.evictions += 1

    def _is_whole(self, page: int) -> bool:
        node = self._nodes[page]
        return node is not None and len(node.tokens) == self.page_len

    def _touch(self, node: Node | None) -> None:
        """Mark a prefix as used: it is evicted last, and each page before its parent."""
        while node is not None:
            if node.page in self._kept:
                self._kept.move_to_end(node.page)
            node = node.parent

    def _forget(self, node: Node) -> None:
        """Remove a page and its descendants from the tree; unreferenced ones become unused."""
        assert node.parent is not None
        node.parent.remove(node)
        lost = [node]
        while lost:
            node = lost.pop()
            lost += node.children
            node.children.clear()  # otherwise the cycle would keep the root alive
            for window in self._windows:
                window.detach(node)
            if not node.is_on_device:
                if self.host is not None:
                    self.host.drop(node)
                continue
            self._nodes[node.page] = None
            if not self._users[node.page]:
                self._leave(node.page)
