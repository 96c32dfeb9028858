"""Layers with a window in a paged cache: pages that the window has passed are released."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from urdir.model.memory.block_table import BlockTable
from urdir.model.memory.cache_groups import PagedGroup
from urdir.model.memory.cache_shape import CachedLayer, Window
from urdir.model.memory.prefix_tree import Node, Path
from urdir.model.memory.window_pages import WindowPages

if TYPE_CHECKING:
    from urdir.driver.memory import Arena
    from urdir.driver.stream import Stream


class WindowGroup(PagedGroup):
    """Layers with equal windows and pages. A sequence takes pages for its next tokens and releases
    those that no later token attends to, also where queued steps accept no draft.

    Of a prompt whose pages others may reuse, pages are held until they are published. Then those
    before its *ends* are evicted last: what it has found, what it has in common with other prompts,
    and all of it. Other prompts are likely to part there.
    """

    pool: WindowPages

    def __init__(
        self,
        arena: Arena,
        stream: Stream,
        layers: dict[int, CachedLayer],
        window: Window,
        table: BlockTable,
    ) -> None:
        layout = next(iter(layers.values())).layout
        pool = WindowPages(layout.pages, layout.page_len, window.span)
        super().__init__(arena, stream, layers, layout, pool, table)
        self._window = window
        sequences = layout.sequences
        self._first = [0] * sequences  # pages released before those held
        self._prompts = [0] * sequences  # lengths of prompts whose pages others may reuse
        self._published = [0] * sequences
        self._ends: list[tuple[int, ...]] = [()] * sequences

    @property
    def most_tokens(self) -> int:
        """See Group."""
        layout = self.layout
        fits = layout.pages >= min(self._window.most_pages, layout.blocks)
        return layout.max_len if fits else layout.pages * layout.page_len

    def check_room(self, sequence: int, start: int, end: int, spare: int = 0) -> None:
        """See Group. Later tokens of a sequence need no more pages than it releases."""
        shared, missing = self._wanted(sequence, start, end)
        passed = self._pages[sequence][: self._passed(sequence, start)]
        freed = sum(not self.pool.is_shared(page) for page in passed)
        self.pool.check_room(len(shared) + len(missing) - freed)

    def check_begin(self, path: Path, end: int) -> None:
        """Raise ContextFullError unless there is room for a sequence that begins with a prefix,
        and for the tokens up to ``end`` of its first step."""
        found = path.tokens(self.layout.page_len)
        held = self.pool.of(path.nodes[self.pool.first_block(found) :])
        last = min(end, found + self._window.rows)
        fresh = self._blocks(last) - found // self.layout.page_len
        source = () if path.part is None else self.pool.of([path.part])
        self.pool.check_room(fresh + self.pool.unreferenced([*held, *source]))

    def begin(self, sequence: int, path: Path, end: int) -> None:
        """Start an empty sequence with a cached prefix, for which room was checked; pages for
        later tokens up to ``end`` are taken step by step. Raises DriverError."""
        pool, found = self.pool, path.tokens(self.layout.page_len)
        first = pool.first_block(found)
        pages = pool.of(path.nodes[first:])
        pool.share(pages)
        self._pages[sequence], self._first[sequence] = pages, min(first, len(path.nodes))
        self._written[sequence] = end
        self._published[sequence] = found
        self._prompts[sequence] = path.wanted + 1 if path.wanted else 0
        self._ends[sequence] = (found, path.followed, path.wanted + 1)
        if path.part is not None:
            (source,) = pool.of([path.part])
            pool.touch(source)
            pages += (taken := pool.take(1))
            if taken != [source]:
                self._copy_slots(source, taken[0])
        self._set_table(sequence)

    def reserve(self, sequence: int, start: int, end: int, stored: int) -> None:
        """See Group."""
        held = self._pages[sequence]
        passed = self._passed(sequence, start)
        for page in held[:passed]:
            self._leave(sequence, page)
        super().reserve(sequence, start, end, stored)

    def publish(self, sequence: int, length: int, node: Node, leading: Sequence[int]) -> None:
        """Keep pages of a sequence for the first ``length`` tokens, whose tree ends with ``node``;
        the sequence has the pages ``leading`` of other layers. A page in part filled is kept only
        where the tree has that of this sequence: others go on otherwise."""
        self.keep(node, self._first[sequence], self._pages[sequence], leading, length)
        self._published[sequence] = length

    def keep(
        self, node: Node, first: int, pages: Sequence[int], leading: Sequence[int], length: int
    ) -> None:
        """Keep ``pages``, from number ``first`` on; see `publish`."""
        nodes, size = node.path(), self.layout.page_len
        for at, page in zip(range(first, len(nodes)), pages, strict=False):
            if (at + 1) * size <= length or nodes[at].page == leading[at]:
                self.pool.attach(nodes[at], page)

    def keeps(self, sequence: int, length: int) -> bool:
        """See Group."""
        return length == 0 or self._first[sequence] <= self.pool.first_block(length)

    def truncate(self, sequence: int, length: int) -> None:
        """See Group."""
        super().truncate(sequence, length)
        if not length:
            self._first[sequence] = self._prompts[sequence] = self._published[sequence] = 0
            self._ends[sequence] = ()

    def _passed(self, sequence: int, start: int) -> int:
        """How many of the pages of a sequence no token from ``start`` on attends to."""
        last = start - self._window.kept
        if start < self._prompts[sequence]:
            last = min(last, self._published[sequence])
        count = last // self.layout.page_len - self._first[sequence]
        return min(max(0, count), len(self._pages[sequence]))

    def _leave(self, sequence: int, page: int) -> None:
        """Release the first page of a sequence."""
        size = self.layout.page_len
        start = self._first[sequence] * size
        reach = self._window.span + size  # others may part a little earlier
        is_end = any(end - reach < start + size and start < end for end in self._ends[sequence])
        del self._pages[sequence][0]
        self._first[sequence] += 1
        if is_end:
            self.pool.release([page])
        else:
            self.pool.leave(page)
