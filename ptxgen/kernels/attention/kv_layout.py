"""Layout of a KV cache in memory, shared by all kernels that access it.

A cache is an array of *slots*; a slot holds the ``head_dim`` values of one token in one KV head.

- contiguous: slots (sequences, kv_heads, capacity);
- paged: slots (pages, kv_heads, page_len); ``block_table[s, b]`` is the page that holds tokens
  ``b * page_len ... (b + 1) * page_len - 1`` of sequence s.

A sequence has ``capacity`` slots, by default ``max_len``. With fewer it is a ring: position p uses
slot p % capacity, so a token replaces the one ``capacity`` before it. That is for layers with
sliding windows. Rows that are appended before they attend (a chunk of a prompt) need additional
slots beside the keys that the first of them attends to: the creator of the cache ensures ``capacity
>= window - 1 + rows``.

K and V are two caches with the same slots, of ``head_dim`` and ``value_dim`` values, each in a
format of its own (`kv_formats`). A layout describes K, its ``values`` describe V. With
``values_in_keys`` there is only K, and V is the last ``value_dim`` values of its rows (latent
attention). All elements (slots, head_dim) come first, then all scales of slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.kv_formats import FORMATS, KvFormat
from urdir.ptxgen.kernels.attention.kv_types import KV_DTYPES, MIN_PAGE_LEN, KvDtype
from urdir.ptxgen.spec import Access, Param

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class KvLayout:
    """One layer's K cache and its ``values``; see the module's docstring.

    ``page_len`` 0 means contiguous; a page length is a power of two from 16 on that divides
    ``max_len``, and ``pages`` is the number of pages. Pages of one token (`chosen`) are keys that a
    row has selected: the block table then holds slots. ``value_dim`` 0 means ``head_dim``.
    ``capacity`` 0 means ``max_len``; others are powers of two, multiples of the page length.
    ``value_dtype`` None means ``dtype``. Raises PtxgenError for unsupported shapes.
    """

    sequences: int
    kv_heads: int
    max_len: int
    head_dim: int
    dtype: KvDtype
    page_len: int = 0
    pages: int = 0
    value_dim: int = 0
    capacity: int = 0
    values_in_keys: bool = False
    value_dtype: KvDtype | None = None

    def __post_init__(self) -> None:
        dtypes = (self.dtype, self.value_dtype or self.dtype)
        for dtype in dtypes:
            if dtype not in KV_DTYPES:
                raise PtxgenError(f"KV cache type {dtype!r} is none of {', '.join(KV_DTYPES)}")
        if self.values_in_keys and dtypes[0] != dtypes[1]:
            raise PtxgenError(f"values in {dtypes[0]} keys cannot be {dtypes[1]}")
        dims = (self.head_dim, self.values_per_head)
        for name, dim, dtype in zip(("head_dim", "value_dim"), dims, dtypes, strict=True):
            if not 8 <= dim <= 1024 or dim % 8:
                raise PtxgenError(f"{name} {dim} of a KV cache must be a multiple of 8 in 8..1024")
            if dim % (unit := FORMATS[dtype].unit):
                raise PtxgenError(
                    f"{name} {dim} of a {dtype} KV cache must be a multiple of {unit}"
                )
        if min(self.sequences, self.kv_heads, self.max_len) < 1:
            raise PtxgenError(
                f"empty KV cache: sequences {self.sequences}, kv_heads {self.kv_heads}, "
                f"max_len {self.max_len}"
            )
        self._check_pages()
        self._check_ring()
        if self.value_start < 0 or self.value_start % self.format.value_unit:
            raise PtxgenError(
                f"value_dim {self.values_per_head} of head_dim {self.head_dim}: values within the "
                f"keys of a {self.dtype} cache must begin at a multiple of "
                f"{self.format.value_unit}"
            )
        if self.slots >= 1 << 32:
            raise PtxgenError(f"a KV cache of {self.slots:,} slots: at most 2^32 - 1 are addressed")

    def _check_pages(self) -> None:
        if not self.page_len:
            if self.pages:
                raise PtxgenError(f"a contiguous KV cache has no pages: {self.pages}")
            return
        is_short = self.page_len < MIN_PAGE_LEN and not self.is_chosen
        if is_short or self.page_len & (self.page_len - 1):
            raise PtxgenError(
                f"page_len {self.page_len} is not a power of two from {MIN_PAGE_LEN} on"
            )
        if self.max_len % self.page_len:
            raise PtxgenError(
                f"max_len {self.max_len} is not a multiple of page_len {self.page_len}"
            )
        if self.pages < 1:
            raise PtxgenError("a paged KV cache without pages")

    def _check_ring(self) -> None:
        if not self.capacity:
            return
        if self.capacity & (self.capacity - 1) or not 1 <= self.capacity <= self.max_len:
            raise PtxgenError(
                f"capacity {self.capacity} is not a power of two up to max_len {self.max_len}"
            )
        if self.capacity < self.page_len:
            raise PtxgenError(f"capacity {self.capacity} is less than a page of {self.page_len}")

    @property
    def format(self) -> KvFormat:
        """The format of K (for V use ``values``)."""
        return FORMATS[self.dtype]

    @property
    def formats(self) -> tuple[KvFormat, ...]:
        """The formats of the existing caches."""
        return tuple(cache.format for cache in self.caches.values())

    # ---- shape ----

    @property
    def is_paged(self) -> bool:
        """Whether a block table maps a sequence's tokens to pages."""
        return self.page_len > 0

    @property
    def is_chosen(self) -> bool:
        """Whether the block table names tokens one by one."""
        return self.page_len == 1

    def chosen(self, rows: int, most: int) -> KvLayout:
        """The same cache read by ``rows`` rows, each of up to ``most`` tokens of its own choice:
        ``block_table`` (rows, most) u32 holds their slots, and row r is sequence r."""
        return replace(self, sequences=rows, max_len=most, page_len=1, pages=self.slots)

    @property
    def blocks(self) -> int:
        """Pages of a sequence of ``max_len`` tokens: the row length of the block table."""
        return self.places // self.page_len if self.page_len else 0

    @property
    def places(self) -> int:
        """Slots of a sequence in a KV head."""
        return self.capacity or self.max_len

    @property
    def values_per_head(self) -> int:
        """Values per head in V."""
        return self.value_dim or self.head_dim

    @property
    def widths(self) -> tuple[int, int]:
        """Values of a key and of a value."""
        return self.head_dim, self.values_per_head

    @cached_property
    def values(self) -> KvLayout:
        """The layout of the cache with V."""
        dims = self.head_dim if self.values_in_keys else self.values_per_head
        return replace(
            self,
            dtype=self.value_dtype or self.dtype,
            head_dim=dims,
            value_dim=0,
            values_in_keys=False,
            value_dtype=None,
        )

    @property
    def value_start(self) -> int:
        """Start of V in a row of its cache."""
        return self.head_dim - self.values_per_head if self.values_in_keys else 0

    def cache_of(self, name: str) -> KvLayout:
        """The layout of the cache that holds "k" or "v"."""
        return self.values if name == "v" else self

    @property
    def slot_shape(self) -> tuple[int, int, int]:
        """(sequences, kv_heads, capacity), or (pages, kv_heads, page_len)."""
        if self.is_paged:
            return (self.pages, self.kv_heads, self.page_len)
        return (self.sequences, self.kv_heads, self.places)

    @property
    def slots(self) -> int:
        """Slots of the cache."""
        outer, heads, length = self.slot_shape
        return outer * heads * length

    @property
    def element_dtype(self) -> str:
        """PTX type of the elements of a cache's array: "u8" if they have scales."""
        return "u8" if self.format.is_scaled else self.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a cache's array: slots x head_dim; with scales its bytes, (nbytes,)."""
        return (self.nbytes,) if self.format.is_scaled else (*self.slot_shape, self.head_dim)

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """numpy type of the elements of a cache's array (bf16 as its bits, uint16)."""
        return Param("cache", self.element_dtype).numpy_dtype

    # ---- bytes ----

    @property
    def row_nbytes(self) -> int:
        """Bytes of a slot's elements, without scales: the distance between slots."""
        return self.head_dim * self.format.bits // 8

    @property
    def scale_row_nbytes(self) -> int:
        """Bytes of a slot's scales; 0 without scales."""
        return self.format.scales_of(self.head_dim) * self.format.scale_nbytes

    @property
    def scales_offset(self) -> int:
        """Byte offset of the scales in a cache that has some."""
        return self.slots * self.row_nbytes

    @property
    def token_nbytes(self) -> int:
        """Bytes of one token in all KV heads, in K (for V use ``values``)."""
        return self.kv_heads * (self.row_nbytes + self.scale_row_nbytes)

    @property
    def nbytes(self) -> int:
        """Bytes of K (for V use ``values``)."""
        return self.slots * (self.row_nbytes + self.scale_row_nbytes)

    @property
    def pair_nbytes(self) -> int:
        """Bytes of one token in all KV heads, in K and V."""
        return sum(cache.token_nbytes for cache in self.caches.values())

    # ---- parameters of kernels ----

    @property
    def caches(self) -> dict[str, KvLayout]:
        """The layouts of the existing caches, by parameter name."""
        return {"k_cache": self} | ({} if self.values_in_keys else {"v_cache": self.values})

    def params(self, access: Access) -> tuple[Param, ...]:
        """``k_cache``, ``v_cache`` if it exists, and ``block_table`` (sequences, blocks) if
        paged."""
        caches = tuple(
            Param(name, layout.element_dtype, layout.shape, access)
            for name, layout in self.caches.items()
        )
        return caches + self.table_params

    @property
    def table_params(self) -> tuple[Param, ...]:
        """``block_table`` (sequences, blocks) if paged."""
        if not self.is_paged:
            return ()
        return (Param("block_table", "u32", (self.sequences, self.blocks), Access.IN),)

    @property
    def token_params(self) -> tuple[Param, ...]:
        """``k`` and, if it has a separate cache, ``v``: new tokens (rows, kv_heads, dim) f32."""
        return tuple(
            Param(name[0], "f32", ("rows", cache.kv_heads, cache.head_dim), Access.IN)
            for name, cache in self.caches.items()
        )

    # ---- numpy ----

    def empty(self, byte: int = 0xFF) -> Array:
        """A cache of equal bytes; 0xFF reads as NaN in every type (by its scales, if any)."""
        return np.full(self.nbytes, byte, np.uint8).view(self.numpy_dtype).reshape(self.shape)

    def slots_of(
        self, sequence: int, positions: npt.ArrayLike, block_table: Array | None = None
    ) -> npt.NDArray[np.int64]:
        """The slots (kv_heads, n) of tokens ``positions`` (n,) of a sequence.

        A paged layout needs its ``block_table`` (sequences, blocks).
        """
        at = np.asarray(positions, np.int64) % self.places
        heads = np.arange(self.kv_heads, dtype=np.int64)[:, None]
        if not self.is_paged:
            return (sequence * self.kv_heads + heads) * self.places + at
        if block_table is None:
            raise PtxgenError("a paged KV cache is read through its block table: none given")
        page: npt.NDArray[np.int64] = block_table[sequence].astype(np.int64)[at // self.page_len]
        return (page * self.kv_heads + heads) * self.page_len + at % self.page_len

    def read(
        self,
        cache: Array,
        sequence: int,
        positions: npt.ArrayLike,
        block_table: Array | None = None,
    ) -> npt.NDArray[np.float32]:
        """Values (kv_heads, n, head_dim) f32 of tokens ``positions`` (n,); exact."""
        slots = self.slots_of(sequence, positions, block_table)
        scales = self.scales(cache)[slots] if self.format.is_scaled else None
        return self.format.decode(self.elements(cache)[slots], scales)

    def write(
        self,
        cache: Array,
        sequence: int,
        positions: npt.ArrayLike,
        values: Array,
        block_table: Array | None = None,
    ) -> None:
        """Rounds ``values`` (kv_heads, n, head_dim) f32 into tokens ``positions`` (n,) in place."""
        slots = self.slots_of(sequence, positions, block_table)
        elements, scales = self.format.encode(np.ascontiguousarray(values, np.float32))
        self.elements(cache)[slots] = elements
        if scales is not None:
            self.scales(cache)[slots] = scales

    def elements(self, cache: Array) -> Array:
        """A view of the bytes of all elements, (slots, row_nbytes)."""
        return cache.reshape(-1).view(np.uint8)[: self.scales_offset].reshape(self.slots, -1)

    def scales(self, cache: Array) -> Array:
        """A view of all scales of a cache that has some, (slots, n) f16 or f32."""
        dtype = np.dtype(self.format.scale.replace("f", "float"))
        return cache[self.scales_offset :].view(dtype).reshape(self.slots, -1)

    # ---- caches for tests ----

    def rounded(self, token: Array) -> npt.NDArray[np.float32]:
        """A token (kv_heads, head_dim) after a round trip through a cache of this type, that also a
        slightly different one makes: an fp8 head's maximum is not at an end of those of its scale,
        224 and 448."""
        single = KvLayout(1, self.kv_heads, 1, self.head_dim, self.dtype)
        cache = single.empty()
        single.write(cache, 0, [0], token[:, None])
        if self.format.scales_heads:
            elements = single.elements(cache)
            elements[elements & 0x7F == 0x7E] -= 1
            elements[(elements & 0x7F == 0x76) & ((elements & 0x7F).max(1) == 0x76)[:, None]] += 1
        return single.read(cache, 0, [0])[:, 0]

    def random_table(self, rng: np.random.Generator) -> npt.NDArray[np.uint32]:
        """A block table (sequences, blocks) with scattered pages, some of them shared."""
        wanted = self.sequences * self.blocks
        order = rng.permutation(self.pages)[:wanted]
        order = np.concatenate([order, rng.integers(0, self.pages, wanted - order.size)])
        return rng.permutation(order).astype(np.uint32).reshape(self.sequences, self.blocks)

    def random_cache(
        self,
        rng: np.random.Generator,
        lengths: Sequence[int],
        block_table: Array | None = None,
        byte: int = 0xFF,
    ) -> Array:
        """A cache with normal values in the first ``lengths[s]`` tokens of each sequence (the last
        ones in a ring).

        Everything else is ``byte`` (NaN), except pages that a longer sequence shares.
        """
        cache = self.empty(byte)
        for sequence, length in enumerate(lengths):
            tokens = np.arange(max(0, length - self.places), length)
            values = rng.standard_normal((self.kv_heads, tokens.size, self.head_dim))
            self.write(cache, sequence, tokens, values, block_table)
        return cache
