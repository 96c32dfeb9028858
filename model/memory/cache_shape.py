"""Shape of the KV caches of a model's layers, computed before allocation.

A layer with full attention stores all tokens. One with a window (or chunks) stores the last ones:
in a contiguous cache in a ring, of as many as the window plus the rows of a step; in pages, which
are released once the window has passed them.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal, Self

from urdir.model.errors import SettingsError
from urdir.model.families.attention import Attention
from urdir.model.families.compression import Compression
from urdir.model.families.config import Config
from urdir.model.memory.device_state import mailbox_slots
from urdir.model.memory.session_settings import SessionSettings
from urdir.ptxgen.kernels.attention.kv_formats import FORMATS
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.kv_types import KvDtype

if TYPE_CHECKING:
    from urdir.driver.memory import Slice


#: Types of keys in layers with compressed blocks.
_COMPRESSED: Sequence[KvDtype] = ("f32", "f16", "bf16")
#: Tokens for which answers reserve room at once.
RESERVED = 64


def rounded_capacity(context: int) -> int:
    """Positions to allocate for a context: the next power of two, at least 256.

    Kernels are specialised for this number, so few values should exist.
    """
    return max(256, 1 << (context - 1).bit_length())


def in_pages(shape: KvLayout, page_len: int, pages: int | None) -> KvLayout:
    """Divide a contiguous layout into ``pages`` pages of ``page_len`` tokens, unless that is 0
    (None: enough for all sequences at once)."""
    if page_len and pages is None:
        pages = shape.sequences * (shape.max_len // page_len)
    return replace(shape, page_len=page_len, pages=pages or 0)


#: Steps with prompts whose tokens may not be published: two in flight and one that is planned.
_STEPS_IN_FLIGHT = 3
#: Of the pages of layers that keep all tokens, the part that layers with a window have for
#: prefixes, beside the windows of all sequences.
_WINDOWS_PART = 4


@dataclass(frozen=True, slots=True)
class Window:
    """The last tokens of a sequence, as layers with a window need them in a paged cache.

    A token attends to the last ``span`` tokens. ``kept`` tokens before the next one are held: steps
    in flight may accept no draft. Steps have up to ``rows`` rows of a sequence, which then has
    ``most_pages`` pages at most, and ``least_pages`` while it answers.
    """

    span: int
    kept: int
    rows: int
    most_pages: int
    least_pages: int

    @classmethod
    def of(cls, span: int, rows: int, lag: int, page_len: int) -> Self:
        """The window of sequences of which up to ``lag`` tokens are not known to be accepted."""
        kept = span - 1 + lag
        most, least = kept + _STEPS_IN_FLIGHT * rows, kept + RESERVED
        return cls(span, kept, rows, 2 + most // page_len, 2 + least // page_len)

    def pages(self, layout: KvLayout, wanted: int | None) -> int:
        """Number of pages: enough for all sequences at once, or where others have ``wanted`` pages,
        for the windows of all sequences, the prompts of steps and some prefixes."""
        most = min(self.most_pages, layout.blocks)
        if wanted is None:
            return layout.sequences * most
        least = layout.sequences * self.least_pages + self.most_pages
        return min(wanted, max(most, least + wanted // _WINDOWS_PART))


@dataclass(frozen=True)
class CachedLayer:
    """The keys and values of one layer. A token attends to the last ``span`` tokens (0: all). In
    pages, a ``window`` says which tokens are stored; None: all.

    A layer with an indexer has its keys in the same slots, in an array of layout ``index``; if they
    are pooled, that has the keys of pools, at their last tokens, and ``raw`` has keys and gates of
    tokens. A token then attends to ``selects`` tokens at most, as in layers that follow (0: all).

    A layer with compressed blocks has their keys in a second head, at their last tokens; ``blocks``
    has what they are made of, keys and gates of tokens, as two heads.
    """

    layout: KvLayout
    span: int
    window: Window | None = None
    index: KvLayout | None = None
    raw: KvLayout | None = None
    blocks: KvLayout | None = None
    selects: int = 0

    @property
    def arrays(self) -> dict[str, KvLayout]:
        """The layouts of "keys" and "values" (only of keys if these contain the values), and of
        keys of an "index", "raw" ones too if they are pooled, and of "blocks"."""
        arrays = dict(zip(("keys", "values"), self.layout.caches.values(), strict=False))
        more = {"index": self.index, "raw": self.raw, "blocks": self.blocks}
        return arrays | {name: layout for name, layout in more.items() if layout is not None}


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
            selects = 0
            for index, layer in enumerate(part.layers, first):
                mixer = layer.attention
                owner = -1 if mixer is None else index
                if mixer is not None and mixer.shares_cache_of is not None:
                    owner = owners[shared + mixer.shares_cache_of]
                elif mixer is not None:
                    span = mixer.span if part is config else 0
                    selects = mixer.indexer.width if mixer.indexer else selects
                    own = _layer(mixer, settings, max_len, span, rows)
                    sparse = mixer.indexer is not None or mixer.follows_indexer
                    layers[index] = replace(own, selects=selects) if sparse else own
                owners.append(owner)
        return cls(layers, tuple(owners), settings.sequences, max_len, settings.page_len)

    def with_pages(self, pages: int) -> Self:
        """The same with this many pages for the layers that keep all tokens."""
        layers = {}
        for index, layer in self.layers.items():
            count = pages if layer.window is None else layer.window.pages(layer.layout, pages)
            layers[index] = replace(
                layer,
                layout=replace(layer.layout, pages=count),
                index=layer.index and replace(layer.index, pages=count),
                raw=layer.raw and replace(layer.raw, pages=count),
                blocks=layer.blocks and replace(layer.blocks, pages=count),
            )
        return replace(self, layers=layers)

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

    def index_layout(
        self, layer: int, kind: Literal["index", "raw", "blocks"] = "index"
    ) -> KvLayout:
        """The layout of the keys of a layer's indexer; of tokens' keys and gates, if pooled; of
        those that blocks are made of."""
        return self.layers[self.owners[layer]].arrays[kind]

    @cached_property
    def groups(self) -> Sequence[tuple[int, ...]]:
        """Layers with equal slots, by number: they share bookkeeping."""
        by_slots: dict[Hashable, list[int]] = {}
        for index, cached in self.layers.items():
            of = cached.layout
            slots = of.places, of.page_len, of.pages, cached.window
            by_slots.setdefault(slots, []).append(index)
        return [tuple(layers) for layers in by_slots.values()]

    def group_of(self, layer: int) -> int:
        """The group number of a layer's cache."""
        owner = self.owners[layer]
        return next(number for number, layers in enumerate(self.groups) if owner in layers)

    @property
    def dtypes(self) -> str:
        """The element types of all layers' caches."""
        arrays = [of for layer in self.layers.values() for of in layer.arrays.values()]
        return ",".join(dict.fromkeys(of.dtype for of in arrays))

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
        """Page length for shared prefixes; 0 if sequences cannot share: layers that keep all tokens
        have the same pages."""
        whole = [first for first, *_ in self.groups if self.layers[first].window is None]
        return self.page_len if len(whole) <= 1 else 0

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
                most = cached.span or cached.selects or length
                total += cached.layout.pair_nbytes * min(length, most)
                total += 0 if cached.index is None else cached.index.pair_nbytes * length
        return total


def table_name(group: int) -> str:
    """The name of a group's block table."""
    return f"block table {group}"


def _index(dim: int, layout: KvLayout, heads: int = 1) -> KvLayout:
    """The cache of an indexer's vectors, in the slots of the layer's own: f32 beside keys in f32,
    else f16."""
    dtype: KvDtype = "f32" if layout.dtype == "f32" else "f16"
    own = replace(layout, kv_heads=heads, head_dim=dim, value_dim=0, dtype=dtype)
    return replace(own, values_in_keys=True)


def _compressed(of: Compression, layer: CachedLayer, max_len: int) -> CachedLayer:
    """The layer with what its compressed blocks need, all in the slots of tokens."""
    if (blocks := of.blocks) is None:
        return replace(layer, selects=of.window)
    keys, index, raw = layer.layout, None, None
    if of.index is not None:
        index = _index(of.index.dim, keys)
        raw = _index(of.index.blocks.width, keys, heads=2)
    selects = of.window + of.most_blocks(max_len)
    made = _index(blocks.width, keys, heads=2)
    return replace(layer, index=index, raw=raw, blocks=made, selects=selects)


def _layer(
    mixer: Attention, settings: SessionSettings, max_len: int, span: int, rows: int
) -> CachedLayer:
    """The cache of a layer: with a window only if that is shorter than the longest sequence."""
    capacity = 1 << (span - 1 + rows - 1).bit_length() if span else max_len
    keys = settings.kv_dtype
    values = settings.value_dtype or keys
    page_len = settings.page_len
    is_short = capacity < max_len
    start = mixer.key_dim - mixer.value_dim
    ends_with_value = mixer.latent is not None and mixer.latent.absorb is not None
    if ends_with_value and values != keys:
        raise SettingsError(
            f"value_dtype {values} of {keys} keys: values of latent attention are part of "
            f"its keys, choose one type for both"
        )
    shares_values = ends_with_value or mixer.compression is not None
    of_values = "value_dtype" if settings.value_dtype else "kv_dtype"
    widths = (("kv_dtype", keys, mixer.key_dim), (of_values, values, mixer.value_dim))
    for option, dtype, dim in widths:
        if dim % (unit := FORMATS[dtype].unit):
            raise SettingsError(
                f"{option} {dtype}: its groups have {unit} values, heads have {dim}: choose f16, "
                "bf16, f32 or fp8"
            )
    compression = mixer.compression
    if compression is not None and (values != keys or keys not in _COMPRESSED):
        raise SettingsError(
            f"kv_dtype {keys}, value_dtype {values}: keys of compressed blocks are their values, "
            f"too: choose {', '.join(_COMPRESSED)} for both"
        )
    layout = KvLayout(
        settings.sequences,
        2 if compression is not None and compression.blocks is not None else mixer.kv_heads,
        max_len,
        mixer.key_dim,
        dtype=keys,
        value_dim=0 if mixer.value_dim == mixer.key_dim else mixer.value_dim,
        capacity=capacity if is_short and not page_len else 0,
        values_in_keys=shares_values and start % FORMATS[keys].value_unit == 0,
        value_dtype=None if values == keys else values,
    )
    layout = in_pages(layout, page_len, settings.pages)
    if not (is_short and page_len):
        if compression is not None:
            return _compressed(compression, CachedLayer(layout, span), max_len)
        if (of := mixer.indexer) is None:
            return CachedLayer(layout, span)
        raw, index = _index(of.raw_width, layout) if of.raw_width else None, _index(of.dim, layout)
        if keys == "fp8" and of.pool == 1:  # as they come; means of several are made in f16
            index = replace(index, dtype=keys)
        return CachedLayer(layout, span, index=index, raw=raw)
    window = Window.of(span, rows, mailbox_slots(settings.drafts), page_len)
    pages = window.pages(layout, settings.pages)
    return CachedLayer(replace(layout, pages=pages), span, window)
