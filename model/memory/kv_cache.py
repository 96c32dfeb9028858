"""The key/value cache on the device: contiguous or paged, with one interface.

Storage belongs to *sequences*, numbered from 0. ``reserve`` makes sure that positions may be
written, ``truncate`` gives storage back (to length 0: all of it), and ``fork`` makes one sequence a
copy of another's beginning. All three are refused or done whole. Kernels see the arrays only, and
take what is valid from positions in device memory.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from urdir.model.errors import ContextFullError, ModelError
from urdir.model.families.description import Config
from urdir.model.owner import Owner
from urdir.ptxgen.kernels.attention.kv_layout import KvDtype, KvLayout

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.memory import Slice


def rounded_capacity(context: int) -> int:
    """Positions to allocate for a context: the next power of two, at least 256.

    Kernels are specialised by this number, so that few values of it should exist.
    """
    return max(256, 1 << (context - 1).bit_length())


def kv_layout(
    config: Config,
    context: int,
    dtype: KvDtype,
    *,
    sequences: int = 1,
    page_len: int = 0,
    pages: int | None = None,
) -> KvLayout:
    """The layout of one layer's keys (or values) for ``sequences`` of up to ``context`` tokens.

    ``page_len`` 0 is contiguous; else ``pages`` pages (None: enough for all sequences at once).
    """
    mixer = config.layers[0].mixer  # the caches of all layers have one shape
    shape = KvLayout(
        sequences, mixer.kv_heads, rounded_capacity(context), mixer.key_dim, dtype=dtype
    )
    return in_pages(shape, page_len, pages)


def in_pages(shape: KvLayout, page_len: int, pages: int | None) -> KvLayout:
    """A contiguous layout, in pages where ``page_len`` is not 0; both numbers as `kv_layout` takes
    them."""
    if page_len and pages is None:
        pages = shape.sequences * (shape.max_len // page_len)
    return replace(shape, page_len=page_len, pages=pages or 0)


def cache_sizes(layers: int, layout: KvLayout) -> dict[str, int]:
    """Bytes by name: keys and values of ``layers`` layers, and the block table of a paged cache."""
    sizes = {
        f"{kind}.{layer}": layout.nbytes for layer in range(layers) for kind in ("keys", "values")
    }
    if layout.is_paged:
        sizes["block table"] = 4 * layout.sequences * layout.blocks
    return sizes


def create_cache(device: Device, layers: int, layout: KvLayout) -> KvCache:
    """The cache that ``layout`` describes, for ``layers`` layers. Raises OutOfMemoryError."""
    kind = PagedKvCache if layout.is_paged else ContiguousKvCache
    return kind(device, layers, layout)


class KvCache(Owner):
    """Keys and values of every layer, laid out as ``layout`` says; nothing is stored at first."""

    def __init__(self, device: Device, layers: int, layout: KvLayout) -> None:
        self.layout = layout
        self.n_layers = layers
        self._arena = device.arena(cache_sizes(layers, layout), "KV cache")

    def keys(self, layer: int) -> Slice:
        """Keys of a layer."""
        return self._arena[f"keys.{layer}"]

    def values(self, layer: int) -> Slice:
        """Values of a layer."""
        return self._arena[f"values.{layer}"]

    def arguments(self, layer: int) -> dict[str, Slice]:
        """What kernels over this layer's cache take, by parameter name."""
        caches = {"k_cache": self.keys(layer), "v_cache": self.values(layer)}
        if self.layout.is_paged:
            caches["block_table"] = self._arena["block table"]
        return caches

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._arena.nbytes

    def reserve(self, sequence: int, start: int, end: int, *, stored: int | None = None) -> None:
        """Make positions ``start`` to ``end`` of a sequence writable; the first ``stored`` tokens
        (by default those before ``start``) are kept in all layers.

        Raises ContextFullError when there is no room; nothing has changed then.
        """
        raise NotImplementedError

    def truncate(self, sequence: int, length: int) -> None:
        """Give back what lies past the first ``length`` tokens."""
        raise NotImplementedError

    def fork(self, source: int, target: int, length: int) -> None:
        """Make ``target`` hold the first ``length`` tokens of ``source``; what it held is gone."""
        raise NotImplementedError

    def close(self) -> None:
        """Free the cache; closing twice does nothing."""
        self._arena.close()

    def _copy_slots(self, source: int, target: int) -> None:
        """Copy a whole sequence (contiguous) or page (paged) within every layer."""
        layout = self.layout
        _, heads, length = layout.slot_shape
        planes = [(0, heads * length * layout.row_nbytes)]
        if layout.scale_row_nbytes:
            planes.append((layout.scales_offset, heads * length * layout.scale_row_nbytes))
        for layer in range(self.n_layers):
            for cache in (self.keys(layer), self.values(layer)):
                for offset, nbytes in planes:
                    place = cache.slice(offset + target * nbytes, nbytes)
                    place.copy_from(cache.slice(offset + source * nbytes, nbytes))

    def _check_sequence(self, sequence: int) -> None:
        if not 0 <= sequence < self.layout.sequences:
            raise ModelError(f"sequence {sequence}: the cache has {self.layout.sequences}")

    def _check_length(self, sequence: int, end: int) -> None:
        self._check_sequence(sequence)
        if end > self.layout.max_len:
            raise ContextFullError(
                f"sequence {sequence}: {end} tokens exceed the cache's {self.layout.max_len}"
            )


class ContiguousKvCache(KvCache):
    """Every sequence has room for ``max_len`` tokens; a fork copies."""

    def reserve(self, sequence: int, start: int, end: int, *, stored: int | None = None) -> None:
        """See KvCache."""
        self._check_length(sequence, end)

    def truncate(self, sequence: int, length: int) -> None:
        """See KvCache."""
        self._check_sequence(sequence)

    def fork(self, source: int, target: int, length: int) -> None:
        """See KvCache."""
        self._check_length(source, length)
        self._check_sequence(target)
        self._copy_slots(source, target)


class PagedKvCache(KvCache):
    """Sequences take pages as they grow; a fork shares them until one of the two writes."""

    def __init__(self, device: Device, layers: int, layout: KvLayout) -> None:
        super().__init__(device, layers, layout)
        self._pages: list[list[int]] = [[] for _ in range(layout.sequences)]
        self._users = [0] * layout.pages
        self._table = np.zeros((layout.sequences, layout.blocks), np.uint32)
        self._arena["block table"].upload(self._table)

    @property
    def free_tokens(self) -> int:
        """Tokens that unused pages have room for."""
        return self._users.count(0) * self.layout.page_len

    def pages(self, sequence: int) -> tuple[int, ...]:
        """The pages of a sequence, in order of position."""
        return tuple(self._pages[sequence])

    def reserve(self, sequence: int, start: int, end: int, *, stored: int | None = None) -> None:
        """See KvCache."""
        self._check_length(sequence, end)
        held, page_len = self._pages[sequence], self.layout.page_len
        blocks = range(start // page_len, -(-end // page_len))
        shared = [b for b in blocks if b < len(held) and self._users[held[b]] > 1]
        missing = [b for b in blocks if b >= len(held)]
        fresh = self._take(len(shared) + len(missing))
        for block, page in zip(shared, fresh, strict=False):
            if block * page_len < (start if stored is None else stored):
                self._copy_slots(held[block], page)
            self._users[held[block]] -= 1
            held[block] = page
        held.extend(fresh[len(shared) :])
        if fresh:
            self._upload(sequence)

    def truncate(self, sequence: int, length: int) -> None:
        """See KvCache."""
        self._check_sequence(sequence)
        held = self._pages[sequence]
        keep = -(-length // self.layout.page_len)
        for page in held[keep:]:
            self._users[page] -= 1
        del held[keep:]

    def fork(self, source: int, target: int, length: int) -> None:
        """See KvCache."""
        self._check_length(source, length)
        self._check_sequence(target)
        shared = self._pages[source][: -(-length // self.layout.page_len)]
        for page in shared:
            self._users[page] += 1
        self.truncate(target, 0)
        self._pages[target] = shared
        self._upload(target)

    def _take(self, count: int) -> list[int]:
        """``count`` unused pages, lowest first, marked as used; all or none."""
        free = [page for page, users in enumerate(self._users) if not users][:count]
        if len(free) < count:
            raise ContextFullError(
                f"the KV cache is full: {count} pages of {self.layout.page_len} tokens are needed, "
                f"{len(free)} of {self.layout.pages} are free"
            )
        for page in free:
            self._users[page] = 1
        return free

    def _upload(self, sequence: int) -> None:
        held, row = self._pages[sequence], self._table[sequence]
        row[: len(held)] = held
        self._arena["block table"].upload(row, offset=sequence * row.nbytes)
