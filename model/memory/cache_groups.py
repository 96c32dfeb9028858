"""Groups of layers with equal slots in a cache: storage of sequences, contiguous or in pages.

Layers with a window have a ring in a contiguous cache; in pages they are a `WindowGroup`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from urdir.driver.errors import DriverError
from urdir.model.memory.block_table import BlockTable
from urdir.model.memory.cache_shape import CachedLayer
from urdir.model.memory.counted_pages import CountedPages
from urdir.model.memory.pages import PagePool
from urdir.model.memory.prefix_tree import Path
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout

if TYPE_CHECKING:
    from urdir.driver.memory import Arena, Slice
    from urdir.driver.stream import Stream


class Group:
    """Layers with equal slots, in a contiguous cache: sequences are separate; a fork copies."""

    def __init__(
        self, arena: Arena, stream: Stream, layers: dict[int, CachedLayer], layout: KvLayout
    ) -> None:
        self._arena = arena
        self._stream = stream
        self._layers = layers
        self.layout = layout
        # Written length of each sequence since it was empty: a ring keeps the end of that.
        self._written = [0] * self.layout.sequences

    @property
    def free_tokens(self) -> int:
        """Tokens that fit the unused pages."""
        return 0

    @property
    def most_tokens(self) -> int:
        """See KvCache."""
        return self.layout.max_len

    def pages(self, sequence: int) -> tuple[int, ...]:
        """See KvCache."""
        return ()

    def check_room(self, sequence: int, start: int, end: int, spare: int = 0) -> None:
        """Raise ContextFullError unless positions ``start`` to ``end`` can be reserved, leaving
        room for ``spare`` positions of other sequences."""

    def writable(self, end: int) -> int:
        """The end of the writable positions once those before ``end`` are writable."""
        return end

    def is_written(self, sequence: int) -> bool:
        """Whether a sequence stores anything."""
        return self._written[sequence] > 0

    def reserve(self, sequence: int, start: int, end: int, stored: int) -> None:
        """See KvCache; room was checked."""
        self._written[sequence] = max(self._written[sequence], end)

    def keeps(self, sequence: int, length: int) -> bool:
        """Whether the cache still holds what a token at position ``length`` attends to."""
        oldest = max(0, self._written[sequence] - self.layout.places)
        return length == 0 or all(
            oldest <= (max(0, length + 1 - layer.span) if layer.span else 0)
            for layer in self._layers.values()
        )

    def truncate(self, sequence: int, length: int) -> None:
        """See KvCache; the remaining tokens are kept."""
        if length == 0:
            self._written[sequence] = 0

    def fork(self, source: int, target: int, length: int) -> None:
        """See KvCache."""
        self._copy_slots(source, target)
        self._written[target] = self._written[source]

    def planes(self) -> Iterator[tuple[Slice, int, int]]:
        """Of every array of every layer: its memory, and where the values, or their scales, of
        sequences (contiguous) or pages (paged) begin, of this many bytes each."""
        for index, layer in self._layers.items():
            for name, layout in layer.arrays.items():
                _, heads, length = layout.slot_shape
                cache = self._arena[f"{name}.{index}"]
                yield cache, 0, heads * length * layout.row_nbytes
                if layout.scale_row_nbytes:
                    yield cache, layout.scales_offset, heads * length * layout.scale_row_nbytes

    def _copy_slots(self, source: int, target: int) -> None:
        """Copy a whole sequence (contiguous) or page (paged) within every layer."""
        for cache, offset, nbytes in self.planes():
            place = cache.slice(offset + target * nbytes, nbytes)
            place.copy_from(cache.slice(offset + source * nbytes, nbytes), self._stream)


class PagedGroup(Group):
    """Layers with equal slots, in the pages of ``pool``: sequences take them as they grow; a fork
    shares them until one of the two writes. ``layers`` may be empty: only prefixes are tracked
    then, without a ``table``."""

    def __init__(
        self,
        arena: Arena,
        stream: Stream,
        layers: dict[int, CachedLayer],
        layout: KvLayout,
        pool: CountedPages,
        table: BlockTable | None,
    ) -> None:
        super().__init__(arena, stream, layers, layout)
        self.pool = pool
        self._pages: list[list[int]] = [[] for _ in range(self.layout.sequences)]
        self._first = [0] * self.layout.sequences  # pages of a sequence before those held
        self._table = table

    @property
    def free_tokens(self) -> int:
        """See Group."""
        return self.pool.free * self.layout.page_len

    @property
    def most_tokens(self) -> int:
        """See Group."""
        layout = self.layout
        return layout.max_len if layout.pages >= layout.blocks else layout.pages * layout.page_len

    def pages(self, sequence: int) -> tuple[int, ...]:
        """See Group."""
        return tuple(self._pages[sequence])

    def check_room(self, sequence: int, start: int, end: int, spare: int = 0) -> None:
        """See Group."""
        shared, missing = self._wanted(sequence, start, end)
        self.pool.check_room(len(shared) + len(missing) + self._blocks(spare))

    def writable(self, end: int) -> int:
        """See Group."""
        return self._blocks(end) * self.layout.page_len

    def reserve(self, sequence: int, start: int, end: int, stored: int) -> None:
        """See Group."""
        held, size, offset = self._pages[sequence], self.layout.page_len, self._first[sequence]
        shared, missing = self._wanted(sequence, start, end)
        fresh = self.pool.take(len(shared) + len(missing))
        pages = [*held, *fresh[len(shared) :]]
        try:
            for at, page in zip(shared, fresh, strict=False):
                pages[at] = page
                if (at + offset) * size < stored:
                    self._copy_slots(held[at], page)
            if fresh:
                self._set_table(sequence, pages)
        except DriverError:
            self.pool.release(fresh)
            raise
        super().reserve(sequence, start, end, stored)
        self.pool.release([held[at] for at in shared])
        first = start // size - offset
        for page in pages[first : len(held)][:1]:  # it and later ones are rewritten
            self.pool.forget(page, start % size)
        self._pages[sequence] = pages

    def truncate(self, sequence: int, length: int) -> None:
        """See Group."""
        super().truncate(sequence, length)
        held = self._pages[sequence]
        keep = max(0, self._blocks(length) - self._first[sequence])
        self.pool.release(held[keep:])
        del held[keep:]

    def fork(self, source: int, target: int, length: int) -> None:
        """See Group."""
        held = self._pages[source][: self._blocks(length) - self._first[source]]
        self.pool.share(held)
        self.truncate(target, 0)
        self._pages[target] = held
        self._first[target] = self._first[source]
        self._written[target] = self._written[source]
        self._set_table(target)

    def _set_table(self, sequence: int, pages: Sequence[int] | None = None) -> None:
        """Write the pages of a sequence to the device."""
        if self._table is not None:
            held = self._pages[sequence] if pages is None else pages
            self._table.set(sequence, held, self._first[sequence])

    def _blocks(self, tokens: int) -> int:
        """Number of pages for ``tokens`` tokens."""
        return -(-tokens // self.layout.page_len)

    def _wanted(self, sequence: int, start: int, end: int) -> tuple[list[int], list[int]]:
        """Of the held pages those at positions ``start`` to ``end``, by index, that are shared; and
        the indices of pages that are missing there."""
        held, first = self._pages[sequence], self._first[sequence]
        wanted = range(start // self.layout.page_len - first, self._blocks(end) - first)
        shared = [at for at in wanted if at < len(held) and self.pool.is_shared(held[at])]
        return shared, [at for at in wanted if at >= len(held)]


class LeadingGroup(PagedGroup):
    """Layers that keep all tokens, in pages: the nodes of the prefix tree of all layers."""

    pool: PagePool

    def check_begin(self, path: Path, end: int, spare: int) -> None:
        """Raise ContextFullError where `begin` does."""
        self.pool.check_begin(path, self._blocks(end), self._blocks(spare))

    def begin(self, sequence: int, path: Path, end: int, spare: int) -> int:
        """Start an empty sequence with a cached prefix and room for ``end`` tokens; returns the
        prefix length. See `KvCache.match`."""
        begun = self.pool.begin(path, self._blocks(end), self._blocks(spare))
        self._pages[sequence] = begun.pages  # before steps that may fail, so that they are released
        self._written[sequence] = end
        if begun.source is not None:
            self._copy_slots(begun.source, begun.pages[begun.tokens // self.layout.page_len])
        self._set_table(sequence)
        return begun.tokens
