"""The key/value caches of all layers on the device: contiguous or paged, with one interface.

Storage belongs to *sequences*, numbered from 0. ``reserve`` makes sure that positions may be
written, ``truncate`` gives storage back (to length 0: all of it), and ``fork`` makes one sequence a
copy of another's beginning. All three are refused or done whole. Kernels see the arrays only, and
take what is valid from positions in device memory.

Layers whose tokens look back on few keys keep the last of them only, in a ring (`KvLayout`).
Layers with equal slots share the bookkeeping: they are a *group*.

Sequences can begin with pages that others have computed (`KvCache.publish`, `KvCache.match`). They
share them in all layers or in none, and a ring overwrites its beginning: so caches with rings share
none. Nor do those beside layers that keep a state: none is kept at the ends of pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from urdir.driver.context import close_all
from urdir.driver.errors import DriverError
from urdir.model.errors import ContextFullError, ModelError
from urdir.model.memory.cache_shape import CachedLayer, CacheShape, table_name
from urdir.model.memory.pages import PagePool
from urdir.model.memory.queued_writes import QueuedWrites
from urdir.model.owner import Owner
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.memory import Arena, Slice
    from urdir.driver.stream import Stream


class KvCache(Owner):
    """Keys and values of every layer, laid out as ``shape`` says; nothing is stored at first.

    Copies within the cache and changes of its tables are queued on ``stream``. What is done here is
    done to the ``followers`` too, the caches of other ranks, which have other heads of the same
    tokens."""

    def __init__(
        self,
        device: Device,
        shape: CacheShape,
        stream: Stream,
        followers: Sequence[KvCache] = (),
    ) -> None:
        self.shape = shape
        self._followers = tuple(followers)
        self._writes = QueuedWrites(device, stream)
        sizes = shape.sizes()  # none in a model without attention
        self._arena = device.arena(sizes, "KV cache") if sizes else None
        self._groups: list[Group] = []
        for number, indices in enumerate(shape.groups):
            assert self._arena is not None
            layers = {index: shape.layers[index] for index in indices}
            is_paged = shape.layers[indices[0]].layout.is_paged
            kind = PagedGroup if is_paged else Group
            self._groups.append(kind(self._arena, self._writes, stream, layers, table_name(number)))
        only = self._groups[0] if len(self._groups) == 1 and not shape.has_states else None
        # Pages without rings are one group: those that sequences can share by what they hold.
        self._known = only if isinstance(only, PagedGroup) and not only.layout.capacity else None

    def layout(self, layer: int) -> KvLayout:
        """How the keys and values lie that a layer uses."""
        return self.shape.layout(layer)

    def arguments(self, layer: int) -> dict[str, Slice]:
        """What kernels over the cache of a layer take, by parameter name."""
        assert self._arena is not None
        owner = self.shape.owners[layer]
        arrays = self.shape.layers[owner].arrays
        caches = {f"{name[0]}_cache": self._arena[f"{name}.{owner}"] for name in arrays}
        if self.layout(layer).is_paged:
            caches["block_table"] = self._arena[table_name(self.shape.group_of(layer))]
        return caches

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return 0 if self._arena is None else self._arena.nbytes

    @property
    def most_tokens(self) -> int:
        """The longest that a sequence can become that has the cache for itself."""
        return min([self.shape.max_len, *(group.most_tokens for group in self._groups)])

    @property
    def share_len(self) -> int:
        """Tokens of the pages that `match` shares; 0 where it finds nothing."""
        return 0 if self._known is None else self._known.layout.page_len

    @property
    def pools(self) -> tuple[PagePool, ...]:
        """The pages of each group of layers; none in a contiguous cache."""
        return tuple(group.pool for group in self._groups if isinstance(group, PagedGroup))

    def reserve(self, sequence: int, start: int, end: int, *, stored: int | None = None) -> int:
        """Make positions ``start`` to ``end`` of a sequence writable; the first ``stored`` tokens
        (by default those before ``start``) are kept in all layers. Returns up to where positions
        are writable now: pages are taken whole.

        Raises ContextFullError when there is no room, nothing has changed then, and DriverError.
        """
        self._check_length(sequence, end)
        for group in self._groups:
            group.check_room(sequence, start, end)
        for group in self._groups:
            group.reserve(sequence, start, end, start if stored is None else stored)
        for cache in self._followers:
            cache.reserve(sequence, start, end, stored=stored)
        return min([self.shape.max_len, *(group.writable(end) for group in self._groups)])

    def match(self, sequence: int, tokens: Sequence[int], end: int, spare: int = 0) -> int:
        """Begin an empty sequence with the longest known beginning of ``tokens``, and reserve its
        positions up to ``end``, which is not before the last of them. Returns how many tokens it
        has.

        Raises ContextFullError, nothing changed, unless room for ``spare`` tokens is left then;
        ModelError for a sequence that holds something; DriverError, and it is empty.
        """
        self._check_length(sequence, end)
        if len(tokens) > end:
            raise ModelError(f"{len(tokens)} tokens to look for, and room for {end} is asked for")
        if any(group.is_written(sequence) for group in self._groups):
            raise ModelError(f"sequence {sequence} holds tokens: truncate it to 0 first")
        try:
            found = self._match(sequence, tokens, end, spare)
            for cache in self._followers:
                cache.match(sequence, tokens, end, spare)
        except DriverError:  # of a copy
            self.truncate(sequence, 0)
            raise
        return found

    def _match(self, sequence: int, tokens: Sequence[int], end: int, spare: int) -> int:
        """`match` of this cache alone."""
        if self._known is not None:
            return self._known.match(sequence, tokens, end, spare)
        for group in self._groups:
            group.check_room(sequence, 0, end, spare)
        for group in self._groups:
            group.reserve(sequence, 0, end, 0)
        return 0

    def publish(self, sequence: int, tokens: Sequence[int]) -> None:
        """A sequence holds ``tokens`` from its first position on: others may begin with them."""
        self._check_sequence(sequence)
        if self._known is not None:
            self._known.publish(sequence, tokens)
        for cache in self._followers:
            cache.publish(sequence, tokens)

    def kept(self, sequence: int, length: int) -> int:
        """How many of the first ``length`` tokens `truncate` may leave: all, or none where a ring
        has lost keys that the next token looks back on."""
        self._check_sequence(sequence)
        return length if all(group.keeps(sequence, length) for group in self._groups) else 0

    def truncate(self, sequence: int, length: int) -> None:
        """Give back what lies past the first ``length`` tokens. Raises ModelError, nothing changed,
        where these are not `kept`."""
        if self.kept(sequence, length) != length:
            raise ModelError(
                f"sequence {sequence} cannot be cut to {length} tokens: layers with a window hold "
                "later ones only"
            )
        for group in self._groups:
            group.truncate(sequence, length)
        for cache in self._followers:
            cache.truncate(sequence, length)

    def fork(self, source: int, target: int, length: int) -> None:
        """Make ``target`` hold the first ``length`` tokens of ``source``; what it held is gone."""
        self._check_length(source, length)
        self._check_sequence(target)
        for group in self._groups:
            group.fork(source, target, length)
        for cache in self._followers:
            cache.fork(source, target, length)

    def pages(self, sequence: int, layer: int = 0) -> tuple[int, ...]:
        """The pages of a sequence in a layer, in order of position; none in a contiguous cache."""
        return self._groups[self.shape.group_of(layer)].pages(sequence)

    @property
    def free_tokens(self) -> int:
        """Tokens that unused pages have room for, in the fullest group of layers."""
        return min((group.free_tokens for group in self._groups), default=0)

    def close(self) -> None:
        """Free the cache; closing twice does nothing."""
        close_all([self._writes] if self._arena is None else [self._writes, self._arena])

    def _check_sequence(self, sequence: int) -> None:
        sequences = self.shape.sequences
        if not 0 <= sequence < sequences:
            raise ModelError(f"sequence {sequence}: the cache has {sequences}")

    def _check_length(self, sequence: int, end: int) -> None:
        self._check_sequence(sequence)
        if end > self.shape.max_len:
            raise ContextFullError(
                f"sequence {sequence}: {end} tokens exceed the cache's {self.shape.max_len}"
            )


class Group:
    """Layers with equal slots, in a contiguous cache: every sequence has its own; a fork copies."""

    def __init__(
        self,
        arena: Arena,
        writes: QueuedWrites,
        stream: Stream,
        layers: dict[int, CachedLayer],
        table: str,
    ) -> None:
        self._arena = arena
        self._writes = writes
        self._stream = stream
        self._layers = layers
        self._table_name = table
        self.layout = next(iter(layers.values())).layout
        # How far each sequence was written since it was empty: a ring keeps the end of that.
        self._written = [0] * self.layout.sequences

    @property
    def free_tokens(self) -> int:
        """Tokens that unused pages have room for."""
        return 0

    @property
    def most_tokens(self) -> int:
        """See KvCache."""
        return self.layout.max_len

    def pages(self, sequence: int) -> tuple[int, ...]:
        """See KvCache."""
        return ()

    def check_room(self, sequence: int, start: int, end: int, spare: int = 0) -> None:
        """Raise ContextFullError unless positions ``start`` to ``end`` can be reserved, and
        ``spare`` others of other sequences after that."""

    def writable(self, end: int) -> int:
        """Up to where positions are writable once those before ``end`` are."""
        return end

    def is_written(self, sequence: int) -> bool:
        """Whether a sequence holds anything."""
        return self._written[sequence] > 0

    def reserve(self, sequence: int, start: int, end: int, stored: int) -> None:
        """See KvCache; there is room."""
        self._written[sequence] = max(self._written[sequence], end)

    def keeps(self, sequence: int, length: int) -> bool:
        """Whether what a token at position ``length`` looks back on is still there."""
        oldest = max(0, self._written[sequence] - self.layout.places)
        return length == 0 or all(
            oldest <= (max(0, length + 1 - layer.span) if layer.span else 0)
            for layer in self._layers.values()
        )

    def truncate(self, sequence: int, length: int) -> None:
        """See KvCache; what is left is kept."""
        if length == 0:
            self._written[sequence] = 0

    def fork(self, source: int, target: int, length: int) -> None:
        """See KvCache."""
        self._copy_slots(source, target)
        self._written[target] = self._written[source]

    def _copy_slots(self, source: int, target: int) -> None:
        """Copy a whole sequence (contiguous) or page (paged) within every layer."""
        for index, layer in self._layers.items():
            for name, layout in layer.arrays.items():
                _, heads, length = layout.slot_shape
                cache = self._arena[f"{name}.{index}"]
                planes = [(0, heads * length * layout.row_nbytes)]
                if layout.scale_row_nbytes:
                    planes.append((layout.scales_offset, heads * length * layout.scale_row_nbytes))
                for offset, nbytes in planes:
                    place = cache.slice(offset + target * nbytes, nbytes)
                    place.copy_from(cache.slice(offset + source * nbytes, nbytes), self._stream)


class PagedGroup(Group):
    """Layers with equal slots, in pages: sequences take them as they grow; a fork shares them until
    one of the two writes. In a ring a sequence uses its pages again and again, so that those behind
    the window serve it for what comes."""

    def __init__(
        self,
        arena: Arena,
        writes: QueuedWrites,
        stream: Stream,
        layers: dict[int, CachedLayer],
        table: str,
    ) -> None:
        super().__init__(arena, writes, stream, layers, table)
        layout = self.layout
        self.pool = PagePool(layout.pages, layout.page_len)
        self._pages: list[list[int]] = [[] for _ in range(layout.sequences)]
        self._table = np.zeros((layout.sequences, layout.blocks), np.uint32)
        writes.write(arena[table], self._table)

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
        """See Group. Sequences that fill their rings need no others."""
        shared, missing = self._wanted(sequence, start, end)
        others = 0 if self.layout.capacity else self._blocks(spare)
        self.pool.check_room(len(shared) + len(missing) + others)

    def writable(self, end: int) -> int:
        """See Group."""
        return self._blocks(end) * self.layout.page_len

    def reserve(self, sequence: int, start: int, end: int, stored: int) -> None:
        """See Group."""
        held, layout = self._pages[sequence], self.layout
        shared, missing = self._wanted(sequence, start, end)
        fresh = self.pool.take(len(shared) + len(missing))
        pages = [*held, *fresh[len(shared) :]]
        try:
            for block, page in zip(shared, fresh, strict=False):
                pages[block] = page
                # of a ring any page may hold tokens that are still looked back on
                if layout.capacity or block * layout.page_len < stored:
                    self._copy_slots(held[block], page)
            if fresh:
                self._upload(sequence, pages)
        except DriverError:
            self.pool.release(fresh)
            raise
        super().reserve(sequence, start, end, stored)
        self.pool.release([held[block] for block in shared])
        if not layout.capacity:
            first = start // layout.page_len
            for page in pages[first : len(held)][:1]:  # it and those after it are written anew
                self.pool.forget(page, start - first * layout.page_len)
        self._pages[sequence] = pages

    def match(self, sequence: int, tokens: Sequence[int], end: int, spare: int) -> int:
        """See KvCache."""
        begun = self.pool.match(tokens, self._blocks(end), self._blocks(spare))
        self._pages[sequence] = begun.pages  # before what may fail: then they are given back
        self._written[sequence] = end
        if begun.source is not None:
            self._copy_slots(begun.source, begun.pages[begun.tokens // self.layout.page_len])
        self._upload(sequence, begun.pages)
        return begun.tokens

    def publish(self, sequence: int, tokens: Sequence[int]) -> None:
        """See KvCache."""
        self.pool.publish(tokens, self._pages[sequence])

    def truncate(self, sequence: int, length: int) -> None:
        """See Group."""
        super().truncate(sequence, length)
        held = self._pages[sequence]
        if self.layout.capacity and length:
            return  # later positions may lie in any page
        keep = self._blocks(length)
        self.pool.release(held[keep:])
        del held[keep:]

    def fork(self, source: int, target: int, length: int) -> None:
        """See Group."""
        held = self._pages[source]
        if not self.layout.capacity:
            held = held[: self._blocks(length)]
        self.pool.share(held)
        self.truncate(target, 0)
        self._pages[target] = list(held)
        self._written[target] = self._written[source]
        self._upload(target, held)

    def _blocks(self, tokens: int) -> int:
        """Pages that so many tokens take."""
        return -(-tokens // self.layout.page_len)

    def _wanted(self, sequence: int, start: int, end: int) -> tuple[list[int], list[int]]:
        """Blocks of positions ``start`` to ``end``: those whose pages others use, those without."""
        held, layout = self._pages[sequence], self.layout
        blocks = dict.fromkeys(
            block % layout.blocks for block in range(start // layout.page_len, self._blocks(end))
        )
        shared = [b for b in blocks if b < len(held) and self.pool.is_shared(held[b])]
        return shared, sorted(b for b in blocks if b >= len(held))

    def _upload(self, sequence: int, pages: Sequence[int]) -> None:
        """Make them those of a sequence in the table that kernels read."""
        row = self._table[sequence]
        row[: len(pages)] = pages
        self._writes.write(self._arena[self._table_name], row, sequence * row.nbytes)
