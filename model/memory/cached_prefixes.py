"""Prefixes that sequences of a paged cache share: pages of all groups of layers, by one tree."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from urdir.driver.errors import DriverError
from urdir.model.memory.cache_groups import LeadingGroup, PagedGroup
from urdir.model.memory.host_pages import HostPages
from urdir.model.memory.host_slots import Move
from urdir.model.memory.prefix_copy import Bytes, read_pages, write_pages
from urdir.model.memory.prefix_tree import Node, Path
from urdir.model.memory.window_group import WindowGroup

#: Weight of the last step in the mean time of a prompt's tokens, and the least tokens of one that
#: counts: weights are read for few tokens as well.
_LEARNED, _LEAST_TOKENS = 0.2, 256


class CachedPrefixes:
    """The tree of the ``leading`` group, of layers that keep all tokens, with what ``windows``
    attach to its nodes. Evicted pages move to the ``host``, if there is one, and come back unless
    that takes longer than computing them."""

    def __init__(
        self,
        leading: LeadingGroup,
        windows: Sequence[WindowGroup],
        host: HostPages[Node] | None = None,
    ) -> None:
        self.leading, self.windows, self.host = leading, tuple(windows), host
        self._pool, self._page_len = leading.pool, leading.layout.page_len
        self._pool.host = host
        # Seconds for a token of a prompt, and for one that comes back; 0: not known.
        self._prompt_seconds = self._copy_seconds = 0.0

    def measure(self) -> None:
        """Measure the rate of copies to the device, before any page is used."""
        if self.host is not None:
            pages = min(group.layout.pages for group in self.groups)
            self._copy_seconds = self.host.measure(pages) / self._page_len

    @property
    def groups(self) -> tuple[PagedGroup, ...]:
        """All groups, the leading one first."""
        return (self.leading, *self.windows)

    def learn(self, tokens: int, seconds: float) -> None:
        """A step computed this many tokens of prompts in that time."""
        if tokens < _LEAST_TOKENS:
            return
        mean, each = self._prompt_seconds, seconds / tokens
        self._prompt_seconds = mean + _LEARNED * (each - mean) if mean else each

    def known(self, tokens: Sequence[int], scope: bytes) -> int:
        """How many of ``tokens`` are in whole pages of the tree, also where windows are missing."""
        return self._pool.known(tokens, scope)

    def found(self, tokens: Sequence[int], scope: bytes) -> int:
        """How many of ``tokens`` `match` would find."""
        return self._find(tokens, scope).tokens(self._page_len)

    def match(
        self, sequence: int, tokens: Sequence[int], end: int, spare: int, scope: bytes, most: int
    ) -> int:
        """Start a sequence with the longest usable prefix of up to ``most`` tokens; see
        `KvCache.match`."""
        path = replace(self._find(tokens[:most], scope), wanted=len(tokens))
        self._restore(path)
        self.leading.check_begin(path, end, spare)
        for window in self.windows:
            window.check_begin(path, end)
        for window in self.windows:
            window.begin(sequence, path, end)
        return self.leading.begin(sequence, path, end, spare)  # it may evict the path's part

    def publish(self, sequence: int, tokens: Sequence[int], scope: bytes) -> None:
        """Share what a sequence holds; see `KvCache.publish`."""
        pages = self.leading.pages(sequence)
        last = self._pool.publish(tokens, pages, scope)
        if last is not None:
            for window in self.windows:
                window.publish(sequence, len(tokens), last, pages)

    def evict(self) -> None:
        """Evict all pages that no sequence holds. Raises DriverError."""
        for group in self.groups:
            group.pool.release(group.pool.take(group.pool.free))

    # ---- as bytes ----

    def read(self, tokens: Sequence[int], scope: bytes) -> tuple[int, list[Bytes]]:
        """How many of ``tokens`` are cached in ``scope``, and the bytes of their pages: of the
        leading layers, and of each window those that the next token attends to.

        Raises ContextFullError without room for those that are in host memory, and DriverError."""
        path = self._find(tokens, scope)
        self._restore(path)
        length = path.tokens(self._page_len)
        arrays = read_pages(self.leading, [node.page for node in path.all_nodes])
        for window in self.windows:
            nodes = path.all_nodes[window.pool.first_block(length) :]
            arrays += read_pages(window, window.pool.of(nodes))
        return length, arrays

    def shapes(self, length: int) -> list[tuple[int, int]]:
        """The shapes of the arrays that `read` returns for this many tokens: (pages, bytes)."""
        blocks = -(-length // self._page_len)
        return [
            (blocks - self._first_block(group, length), nbytes)
            for group in self.groups
            for _, _, nbytes in group.planes()
        ]

    def write(self, tokens: Sequence[int], arrays: Sequence[Bytes], scope: bytes) -> None:
        """Cache what `read` returned for others of ``scope``. Raises ContextFullError and
        DriverError, without effect."""
        left, blocks = list(arrays), -(-len(tokens) // self._page_len)
        taken: list[list[int]] = []
        try:
            for group in self.groups:
                first = self._first_block(group, len(tokens))
                taken.append(group.pool.take(blocks - first))
                planes = len(list(group.planes()))
                write_pages(group, taken[-1], left[:planes])
                del left[:planes]
            last = self._pool.publish(tokens, taken[0], scope)
            for window, pages in zip(self.windows, taken[1:], strict=True):
                if last is not None:
                    first = self._first_block(window, len(tokens))
                    window.keep(last, first, pages, taken[0], len(tokens))
        finally:
            for group, pages in zip(self.groups, taken, strict=False):
                group.pool.release(pages)

    def erase(self, tokens: Sequence[int], scope: bytes) -> int:
        """Evict the end of a prefix, as far as no sequence and no longer prefix has it. Returns how
        many of ``tokens`` were cached."""
        path = self._pool.find(tokens, scope)
        self._pool.erase(path)
        return path.tokens(self._page_len)

    # ---- parts ----

    def _find(self, tokens: Sequence[int], scope: bytes) -> Path:
        pays = not self._prompt_seconds or self._copy_seconds < self._prompt_seconds
        return self._pool.find(tokens, scope, has_slots=pays)

    def _first_block(self, group: PagedGroup, length: int) -> int:
        """The first page of a group that a token at position ``length`` attends to."""
        return group.pool.first_block(length) if isinstance(group, WindowGroup) else 0

    def _restore(self, path: Path) -> None:
        """Bring the pages of a path that are in host memory back to the device. Raises
        ContextFullError, without effect, and DriverError."""
        if self.host is None or all(node.is_on_device for node in path.all_nodes):
            return
        length = path.tokens(self._page_len)
        needed = [path.all_nodes[of.pool.first_block(length) :] for of in self.windows]
        self._pool.check_restore(path)
        for window, nodes in zip(self.windows, needed, strict=True):
            window.pool.check_restore(nodes)
        claimed = self._pool.restore(path)
        hosted = [node for node, _ in claimed]
        restored = [
            window.pool.restore(nodes, hosted)
            for window, nodes in zip(self.windows, needed, strict=True)
        ]
        moves = []
        for node, slot in claimed:
            pairs = zip(self.windows, restored, strict=True)
            pages = [of.pool.page(node) if node in nodes else None for of, nodes in pairs]
            moves.append(Move(node, slot, (node.page, *pages)))
        try:
            self.host.give(moves)
        except DriverError:
            self._pool.give_up(claimed)
            raise
