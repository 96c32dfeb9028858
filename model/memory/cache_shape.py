"""Shape of the KV caches of a model's layers, computed before allocation.

A layer with full attention stores all tokens. One with a window (or chunks) stores a ring of the
last tokens: as many as the window plus the rows of a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Self

from urdir.model.errors import SettingsError
from urdir.model.families.attention import Attention
from urdir.model.families.config import Config
from urdir.model.memory.session_settings import SessionSettings
from urdir.ptxgen.kernels.attention.kv_formats import FORMATS
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout

if TYPE_CHECKING:
    from urdir.driver.memory import Slice


def rounded_capacity(context: int) -> int:
    """Positions to allocate for a context: the next power of two, at least 256.

    Kernels are specialised for this number, so few values should exist.
    """
    return max(256, 1 << (context - 1).bit_length())


def in_pages(shape: KvLayout, page_len: int, pages: int | None) -> KvLayout:
    """Divide a contiguous layout into ``pages`` pages of ``page_len`` tokens, unless that is 0
    (None: enough for all sequences at once). A ring has at least one page."""
    if shape.capacity:
        capacity = max(shape.capacity, page_len)
        shape = replace(shape, capacity=capacity if capacity < shape.max_len else 0)
    whole = shape.sequences * (shape.places // page_len) if page_len else 0
    if page_len and (pages is None or shape.capacity):
        pages = min(whole, pages or whole)
    return replace(shape, page_len=page_len, pages=pages or 0)


@dataclass(frozen=True)
class CachedLayer:
    """The keys and values of one layer. A token attends to the last ``span`` tokens (0: all)."""

    layout: KvLayout
    span: int

    @property
    def arrays(self) -> dict[str, KvLayout]:
        """The layouts of "keys" and "values"; only of keys if these contain the values."""
        return dict(zip(("keys", "values"), self.layout.caches.values(), strict=False))


@dataclass(frozen=True)
class CacheShape:
    """The caches of all layers: ``layers`` by the number of a layer with its own cache;
    ``owners[i]`` is the layer whose cache layer i uses, -1 for one without attention. Pages have
    ``page_len`` tokens; 0: contiguous.
    """

    layers: dict[int, CachedLayer]
    owners: tuple[int, ...]
    sequences: int
    max_len: int
    page_len: int = 0

    @classmethod
    def of(cls, config: Config, settings: SessionSettings, rows: int) -> Self:
        """The caches for steps that append up to ``rows`` tokens of a sequence. The layers of a
        draft model come after the model's; they keep all tokens, so that they have the pages of
        its layers with full attention, or read the model's."""
        max_len = rounded_capacity(settings.context)
        layers: dict[int, CachedLayer] = {}
        owners: list[int] = []
        draft = settings.draft_model
        for part in [config] if draft is None else [config, draft.config]:
            first = len(owners)
            shared = 0 if draft is not None and draft.shares_cache else first
            for index, layer in enumerate(part.layers, first):
                mixer = layer.attention
                owner = -1 if mixer is None else index
                if mixer is not None and mixer.shares_cache_of is not None:
                    owner = owners[shared + mixer.shares_cache_of]
                elif mixer is not None:
                    span = mixer.span if part is config else 0
                    layout = _layout(mixer, settings, max_len, span, rows)
                    layers[index] = CachedLayer(layout, span)
                owners.append(owner)
        return cls(layers, tuple(owners), settings.sequences, max_len, settings.page_len)

    def after(self, first: int) -> Self:
        """The caches of the layers from number ``first`` on, as those of a model; where these read
        caches of layers before, all of them."""
        owners = self.owners[first:]
        if any(0 <= owner < first for owner in owners):
            return replace(self, owners=owners)
        layers = {i - first: of for i, of in self.layers.items() if i >= first}
        owners = tuple(max(-1, owner - first) for owner in owners)
        return replace(self, layers=layers, owners=owners)

    @classmethod
    def equal(cls, layout: KvLayout, layers: int) -> Self:
        """The same cache for every layer."""
        own = {index: CachedLayer(layout, 0) for index in range(layers)}
        return cls(own, tuple(range(layers)), layout.sequences, layout.max_len, layout.page_len)

    def layout(self, layer: int) -> KvLayout:
        """The layout of the keys and values that a layer uses."""
        return self.layers[self.owners[layer]].layout

    @cached_property
    def groups(self) -> Sequence[tuple[int, ...]]:
        """Layers with equal slots, by number: they share bookkeeping."""
        by_slots: dict[tuple[int, int, int], list[int]] = {}
        for index, cached in self.layers.items():
            of = cached.layout
            by_slots.setdefault((of.places, of.page_len, of.pages), []).append(index)
        return [tuple(layers) for layers in by_slots.values()]

    def group_of(self, layer: int) -> int:
        """The group number of a layer's cache."""
        owner = self.owners[layer]
        return next(number for number, layers in enumerate(self.groups) if owner in layers)

    def arguments(self, arena: Mapping[str, Slice], layer: int) -> dict[str, Slice]:
        """Arguments of kernels over a layer's cache, by parameter name, in an arena of `sizes`."""
        owner = self.owners[layer]
        arrays = self.layers[owner].arrays
        caches = {f"{name[0]}_cache": arena[f"{name}.{owner}"] for name in arrays}
        if self.layout(layer).is_paged:
            caches["block_table"] = arena[table_name(self.group_of(layer))]
        return caches

    @property
    def share_len(self) -> int:
        """Page length for shared prefixes; 0 if sequences cannot share. Pages are shared in all
        layers or in none, and a ring overwrites its beginning."""
        layouts = [self.layers[first].layout for first, *_ in self.groups]
        shares = len(layouts) <= 1 and not any(layout.capacity for layout in layouts)
        return self.page_len if shares else 0

    def sizes(self) -> dict[str, int]:
        """Bytes by name: keys and values (if separate) of every layer, and the block table of each
        group of a paged cache."""
        sizes = {}
        for index, cached in self.layers.items():
            for name, layout in cached.arrays.items():
                sizes[f"{name}.{index}"] = layout.nbytes
        for number, (first, *_) in enumerate(self.groups):
            layout = self.layers[first].layout
            if layout.is_paged:
                sizes[table_name(number)] = 4 * layout.sequences * layout.blocks
        return sizes

    def read_nbytes(self, length: int) -> int:
        """Bytes of keys and values that a token after ``length`` others attends to, in all layers
        with attention."""
        total = 0
        for owner in self.owners:
            if owner >= 0:
                cached = self.layers[owner]
                total += cached.layout.pair_nbytes * min(length, cached.span or length)
        return total


def table_name(group: int) -> str:
    """The name of a group's block table."""
    return f"block table {group}"


def _layout(
    mixer: Attention, settings: SessionSettings, max_len: int, span: int, rows: int
) -> KvLayout:
    capacity = 1 << (span - 1 + rows - 1).bit_length() if span else max_len
    keys = settings.kv_dtype
    values = settings.value_dtype or keys
    start = mixer.key_dim - mixer.value_dim
    ends_with_value = mixer.latent is not None and mixer.latent.absorb is not None
    if ends_with_value and values != keys:
        raise SettingsError(
            f"value_dtype {values} of {keys} keys: values of latent attention are part of "
            f"its keys, choose one type for both"
        )
    for name, dtype, dim in (("keys", keys, mixer.key_dim), ("values", values, mixer.value_dim)):
        if dim % (unit := FORMATS[dtype].unit):
            raise SettingsError(
                f"{name} of {dim} dimensions cannot be {dtype}, whose groups have {unit} values: "
                f"choose f16, bf16, f32 or fp8"
            )
    layout = KvLayout(
        settings.sequences,
        mixer.kv_heads,
        max_len,
        mixer.key_dim,
        dtype=keys,
        value_dim=0 if mixer.value_dim == mixer.key_dim else mixer.value_dim,
        capacity=capacity if capacity < max_len else 0,
        values_in_keys=ends_with_value and start % FORMATS[keys].value_unit == 0,
        value_dtype=None if values == keys else values,
    )
    return in_pages(layout, settings.page_len, settings.pages)
