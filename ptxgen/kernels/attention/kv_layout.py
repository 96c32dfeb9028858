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

K and V are two caches with the same slots, of ``head_dim`` and ``value_dim`` values. A layout
describes K, its ``values`` describe V. With ``values_in_keys`` there is only K, and V is the last
``value_dim`` values of its rows (latent attention). Element types:

- f32, f16, bf16: rounded to nearest even; values out of range become infinity;
- q8_0: groups of 32 values q * d. d = max|x| / 127, rounded to f16, and q = x / d (d as rounded),
  rounded to nearest even into -127 ... 127. All quants (slots, head_dim) s8 come first, then all
  scales (slots, head_dim / 32) f16. A NaN, or a magnitude beyond 127 * 65504, makes its group NaN.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.kv_types import KV_DTYPES, MIN_PAGE_LEN, KvDtype
from urdir.ptxgen.spec import Access, Param

#: Values of a q8_0 group, which share a scale.
GROUP = 32

_ELEMENT_BYTES: Mapping[KvDtype, int] = {"f32": 4, "f16": 2, "bf16": 2, "q8_0": 1}
_SCALE_BYTES = 2

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class KvLayout:
    """One layer's K cache and its ``values``; see the module's docstring.

    ``page_len`` 0 means contiguous; a page length is a power of two from 16 on that divides
    ``max_len``, and ``pages`` is the number of pages. ``value_dim`` 0 means ``head_dim``.
    ``capacity`` 0 means ``max_len``; others are powers of two, multiples of the page length. Raises
    PtxgenError for unsupported shapes.
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

    def __post_init__(self) -> None:
        if self.dtype not in KV_DTYPES:
            raise PtxgenError(f"KV cache type {self.dtype!r} is none of {', '.join(KV_DTYPES)}")
        for name, dim in (("head_dim", self.head_dim), ("value_dim", self.values_per_head)):
            if not 8 <= dim <= 1024 or dim % 8:
                raise PtxgenError(f"{name} {dim} of a KV cache must be a multiple of 8 in 8..1024")
            if self.dtype == "q8_0" and dim % GROUP:
                raise PtxgenError(f"{name} {dim} of a q8_0 KV cache must be a multiple of {GROUP}")
        if min(self.sequences, self.kv_heads, self.max_len) < 1:
            raise PtxgenError(
                f"empty KV cache: sequences {self.sequences}, kv_heads {self.kv_heads}, "
                f"max_len {self.max_len}"
            )
        self._check_pages()
        self._check_ring()
        if self.value_start < 0 or (self.dtype == "q8_0" and self.value_start % (2 * GROUP)):
            raise PtxgenError(
                f"value_dim {self.values_per_head} of head_dim {self.head_dim}: values within the "
                f"keys of a {self.dtype} cache must begin at a multiple of "
                f"{2 * GROUP if self.dtype == 'q8_0' else 8}"
            )
        if self.slots >= 1 << 32:
            raise PtxgenError(f"a KV cache of {self.slots:,} slots: at most 2^32 - 1 are addressed")

    def _check_pages(self) -> None:
        if not self.page_len:
            if self.pages:
                raise PtxgenError(f"a contiguous KV cache has no pages: {self.pages}")
            return
        if self.page_len < MIN_PAGE_LEN or self.page_len & (self.page_len - 1):
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

    # ---- shape ----

    @property
    def is_paged(self) -> bool:
        """Whether a block table maps a sequence's tokens to pages."""
        return self.page_len > 0

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
    def values(self) -> KvLayout:
        """The layout of the cache with V."""
        dims = self.head_dim if self.values_in_keys else self.values_per_head
        return replace(self, head_dim=dims, value_dim=0, values_in_keys=False)

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
        """PTX type of the elements of a cache's array: "u8" for q8_0."""
        return "u8" if self.dtype == "q8_0" else self.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of a cache's array: slots x head_dim; for q8_0 its bytes, (nbytes,)."""
        return (self.nbytes,) if self.dtype == "q8_0" else (*self.slot_shape, self.head_dim)

    @property
    def numpy_dtype(self) -> np.dtype[Any]:
        """numpy type of the elements of a cache's array (bf16 as its bits, uint16)."""
        return Param("cache", self.element_dtype).numpy_dtype

    # ---- bytes ----

    @property
    def row_nbytes(self) -> int:
        """Bytes of a slot's elements, without q8_0's scales: the distance between slots."""
        return self.head_dim * _ELEMENT_BYTES[self.dtype]

    @property
    def raw_words(self) -> int:
        """32-bit registers for eight elements in the cache's form, and q8_0's scale."""
        return {"f32": 8, "f16": 4, "bf16": 4, "q8_0": 3}[self.dtype]

    @property
    def scale_row_nbytes(self) -> int:
        """Bytes of a slot's scales; 0 without scales."""
        return self.head_dim // GROUP * _SCALE_BYTES if self.dtype == "q8_0" else 0

    @property
    def scales_offset(self) -> int:
        """Byte offset of the scales in a q8_0 cache."""
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
            Param(name, self.element_dtype, layout.shape, access)
            for name, layout in self.caches.items()
        )
        if not self.is_paged:
            return caches
        return (*caches, Param("block_table", "u32", (self.sequences, self.blocks), Access.IN))

    @property
    def token_params(self) -> tuple[Param, ...]:
        """``k`` and, if it has a separate cache, ``v``: new tokens (rows, kv_heads, dim) f32."""
        return tuple(
            Param(name[0], "f32", ("rows", cache.kv_heads, cache.head_dim), Access.IN)
            for name, cache in self.caches.items()
        )

    # ---- numpy ----

    def empty(self, byte: int = 0xFF) -> Array:
        """A cache of equal bytes; 0xFF reads as NaN in every type (q8_0 by its scales)."""
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
        rows = self.elements(cache)[slots]
        if self.dtype == "q8_0":
            scales = self.scales(cache)[slots].astype(np.float32)
            with np.errstate(invalid="ignore"):  # a scale of infinity: 0 * inf is NaN
                return rows.astype(np.float32) * np.repeat(scales, GROUP, axis=-1)
        if self.dtype == "bf16":
            return (rows.astype(np.uint32) << 16).view(np.float32)
        return rows.astype(np.float32)

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
        x = np.asarray(values, np.float32)
        if self.dtype == "q8_0":
            quants, scales = quantise(x)
            self.elements(cache)[slots] = quants
            self.scales(cache)[slots] = scales
        elif self.dtype == "bf16":
            self.elements(cache)[slots] = to_bf16(x)
        else:
            with np.errstate(over="ignore"):
                self.elements(cache)[slots] = x.astype(self.numpy_dtype)

    def elements(self, cache: Array) -> Array:
        """A view of all elements, (slots, head_dim); quants as int8."""
        if self.dtype == "q8_0":
            cache = cache[: self.scales_offset].view(np.int8)
        return cache.reshape(self.slots, self.head_dim)

    def scales(self, cache: Array) -> Array:
        """A view of all scales of a q8_0 cache, (slots, head_dim / 32) f16."""
        return cache[self.scales_offset :].view(np.float16).reshape(self.slots, -1)

    # ---- caches for tests ----

    def rounded(self, token: Array) -> npt.NDArray[np.float32]:
        """A token (kv_heads, head_dim) after a round trip through a cache of this type."""
        single = KvLayout(1, self.kv_heads, 1, self.head_dim, self.dtype)
        cache = single.empty()
        single.write(cache, 0, [0], token[:, None])
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


def quantise(x: npt.NDArray[np.float32]) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.float16]]:
    """f32 values (..., n) -> q8_0 quants (..., n) and scales (..., n / 32)."""
    groups = x.reshape(*x.shape[:-1], x.shape[-1] // GROUP, GROUP)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        scales = (np.abs(groups).max(axis=-1) / np.float32(127)).astype(np.float16)
        quants = np.rint(groups / scales.astype(np.float32)[..., None])
    # Groups without a scale become 0. A subnormal scale may be far below max|x| / 127.
    quants = np.where(scales[..., None] == 0, 0.0, np.nan_to_num(quants, nan=0.0))
    quants = np.clip(quants, -127, 127).astype(np.int8)
    return quants.reshape(x.shape), scales


def to_bf16(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint16]:
    """The bits of f32 values rounded to bf16, to nearest even; NaN is 0x7FFF."""
    bits = np.ascontiguousarray(x).view(np.uint32)
    rounded = ((bits.astype(np.uint64) + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)
    return np.where(np.isnan(x), np.uint16(0x7FFF), rounded)
