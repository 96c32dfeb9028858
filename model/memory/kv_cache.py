"""KV caches of all layers on the device: contiguous or paged, with one interface.

Storage belongs to *sequences*, numbered from 0. ``reserve`` makes positions writable, ``truncate``
releases storage (to length 0: all of it), and ``fork`` copies a sequence's beginning to another.
Each fails without effect or succeeds completely. Kernels only see the arrays, and find the valid
part from positions in device memory.

Layers with sliding windows store the last keys only: in a ring (`KvLayout`), or in pages that are
released once the window has passed them (`WindowGroup`). Layers with equal slots share bookkeeping:
they are a *group*.

Sequences can reuse pages that others of their scope have computed (`KvCache.publish`,
`KvCache.match`): the leading group, of layers that keep all tokens, has a tree of them; groups with
windows attach theirs to its nodes. Where all layers have windows it leads without pages of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from urdir.driver.context import close_all
from urdir.driver.errors import DriverError
from urdir.model.errors import ContextFullError, ModelError
from urdir.model.memory.cache_groups import Group, LeadingGroup, PagedGroup
from urdir.model.memory.cache_shape import CacheShape
from urdir.model.memory.cached_prefixes import CachedPrefixes
from urdir.model.memory.counted_pages import CountedPages
from urdir.model.memory.host_pages import HostPages
from urdir.model.memory.open_groups import open_groups
from urdir.model.memory.prefix_tree import Node
from urdir.model.memory.queued_writes import QueuedWrites
from urdir.model.memory.window_group import WindowGroup
from urdir.model.owner import Owner
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.memory import Slice
    from urdir.driver.stream import Stream


class LayerCaches(Protocol):
    """The caches of a model's layers, as kernels see them."""

    @property
    def shape(self) -> CacheShape:
        """What they look like."""

    def layout(self, layer: int) -> KvLayout:
        """The layout of the keys and values that a layer uses."""

    def arguments(self, layer: int) -> dict[str, Slice]:
        """Arguments of kernels over a layer's cache, by parameter name."""


@dataclass(frozen=True, slots=True)
class LaterLayers:
    """The layers of a cache from number ``first`` on, those of a draft model, with numbers of their
    own from 0."""

    cache: KvCache
    shape: CacheShape
    first: int

    def layout(self, layer: int) -> KvLayout:
        """See `LayerCaches`."""
        return self.shape.layout(layer)

    def arguments(self, layer: int) -> dict[str, Slice]:
        """See `LayerCaches`."""
        return self.cache.arguments(self.first + layer)


class KvCache(Owner):
    """Keys and values of every layer, in the layout of ``shape``; empty at first.

    Copies within the cache and changes of its tables are queued on ``stream``. Operations also
    apply to the ``followers``: the caches of other ranks, with other heads of the same tokens.
    Pages that are evicted move to ``host_nbytes`` of host memory."""

    def __init__(
        self,
        device: Device,
        shape: CacheShape,
        stream: Stream,
        followers: Sequence[KvCache] = (),
        host_nbytes: int = 0,
    ) -> None:
        self.shape = shape
        self.followers = tuple(followers)
        self._writes = QueuedWrites(device, stream)
        sizes = shape.sizes()  # empty for a model without attention
        self._arena = device.arena(sizes, "KV cache") if sizes else None
        self._groups: Sequence[Group] = ()
        if self._arena is not None:
            self._groups = open_groups(self._arena, stream, shape, self._writes)
        #: What sequences share; None: nothing.
        self.prefixes: CachedPrefixes | None = None
        leading = [group for group in self._groups if isinstance(group, LeadingGroup)]
        if leading and shape.share_len:
            windows = [group for group in self._groups if isinstance(group, WindowGroup)]
            host = None
            if host_nbytes:
                host = HostPages[Node](device, stream, [*leading, *windows], host_nbytes)
            self.prefixes = CachedPrefixes(leading[0], windows, host)
            if not device.is_emulated:  # which copies and computes at other rates than a GPU
                self.prefixes.measure()

    def layout(self, layer: int) -> KvLayout:
        """The layout of the keys and values that a layer uses."""
        return self.shape.layout(layer)

    def after(self, first: int) -> LaterLayers:
        """The layers from number ``first`` on, as a model's."""
        return LaterLayers(self, self.shape.after(first), first)

    def arguments(self, layer: int) -> dict[str, Slice]:
        """Arguments of kernels over a layer's cache, by parameter name."""
        assert self._arena is not None
        return self.shape.arguments(self._arena, layer)

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return 0 if self._arena is None else self._arena.nbytes

    @property
    def most_tokens(self) -> int:
        """The longest possible sequence, with the cache to itself."""
        return min([self.shape.max_len, *(group.most_tokens for group in self._groups)])

    @property
    def share_len(self) -> int:
        """Page length for shared prefixes; see `CacheShape.share_len`."""
        return self.shape.share_len

    def known(self, tokens: Sequence[int], scope: bytes = b"") -> int:
        """How many of ``tokens`` are in cached whole pages of ``scope``: all if no layer has
        pages."""
        if not self._groups:
            return len(tokens)
        return 0 if self.prefixes is None else self.prefixes.known(tokens, scope)

    def finds(self, tokens: Sequence[int], scope: bytes = b"") -> bool:
        """Whether `match` would find all of ``tokens``, which fill whole pages."""
        if self._groups and self.prefixes is None:
            return False
        return self._found(tokens, scope) == len(tokens)

    @property
    def pools(self) -> tuple[CountedPages, ...]:
        """The pages of each group of layers; empty for a contiguous cache."""
        return tuple(group.pool for group in self._groups if isinstance(group, PagedGroup))

    def reserve(self, sequence: int, start: int, end: int, *, stored: int | None = None) -> int:
        """Make positions ``start`` to ``end`` of a sequence writable, keeping the first ``stored``
        tokens (default: those before ``start``) in all layers. Returns the end of the writable
        positions: pages are taken whole.

        Raises ContextFullError if there is no room, without effect, and DriverError.
        """
        self._check_length(sequence, end)
        for group in self._groups:
            group.check_room(sequence, start, end)
        for group in self._groups:
            group.reserve(sequence, start, end, start if stored is None else stored)
        for cache in self.followers:
            cache.reserve(sequence, start, end, stored=stored)
        return min([self.shape.max_len, *(group.writable(end) for group in self._groups)])

    def match(
        self, sequence: int, tokens: Sequence[int], end: int, spare: int = 0, scope: bytes = b""
    ) -> int:
        """Start an empty sequence with the longest cached prefix of ``tokens`` in ``scope``, and
        reserve its positions up to ``end``, which is not before the last token; in layers with a
        window those of its first step are only checked. Returns the prefix length.

        Raises ContextFullError, without effect, unless room for ``spare`` tokens remains;
        ModelError for a sequence that is not empty; DriverError, after which it is empty.
        """
        self._check_length(sequence, end)
        if len(tokens) > end:
            raise ModelError(f"{len(tokens)} tokens to look up, but {end} positions to reserve")
        if any(group.is_written(sequence) for group in self._groups):
            raise ModelError(f"sequence {sequence} holds tokens: truncate it to 0 first")
        most = self._found(tokens, scope) if self.followers else len(tokens)
        try:
            found = self._match(sequence, tokens, end, spare, scope, most)
            for cache in self.followers:
                cache._match(sequence, tokens, end, spare, scope, most)
        except (DriverError, ContextFullError):  # from a copy; from a follower with other layers
            self.truncate(sequence, 0)
            raise
        return found

    def _found(self, tokens: Sequence[int], scope: bytes) -> int:
        """How many of ``tokens`` `match` finds in every rank: they have other layers, so that other
        pages were evicted from windows, and from the host."""
        caches = [cache.prefixes for cache in (self, *self.followers) if cache.prefixes is not None]
        length, shorter = -1, len(tokens)
        while length != shorter:
            length = shorter
            shorter = min((of.found(tokens[:length], scope) for of in caches), default=length)
        return length

    def _match(
        self, sequence: int, tokens: Sequence[int], end: int, spare: int, scope: bytes, most: int
    ) -> int:
        """`match` in this cache, without followers, of up to ``most`` tokens."""
        if self.prefixes is not None:
            return self.prefixes.match(sequence, tokens, end, spare, scope, most)
        for group in self._groups:
            group.check_room(sequence, 0, end, spare)
        for group in self._groups:
            group.reserve(sequence, 0, end, 0)
        return 0

    def publish(self, sequence: int, tokens: Sequence[int], scope: bytes = b"") -> None:
        """Share ``tokens``, which a sequence holds from its first position, with others of
        ``scope``."""
        self._check_sequence(sequence)
        if self.prefixes is not None:
            self.prefixes.publish(sequence, tokens, scope)
        for cache in self.followers:
            cache.publish(sequence, tokens, scope)

    def kept(self, sequence: int, length: int) -> int:
        """The length to which `truncate` can cut the first ``length`` tokens: all, or 0 if a layer
        with a window has lost keys that the next token attends to."""
        self._check_sequence(sequence)
        return length if all(group.keeps(sequence, length) for group in self._groups) else 0

    def truncate(self, sequence: int, length: int) -> None:
        """Release everything after the first ``length`` tokens. Raises ModelError, without effect,
        unless these are `kept`."""
        if self.kept(sequence, length) != length:
            raise ModelError(
                f"sequence {sequence} cannot be cut to {length} tokens: layers with a window hold "
                "later ones only"
            )
        for group in self._groups:
            group.truncate(sequence, length)
        for cache in self.followers:
            cache.truncate(sequence, length)

    def fork(self, source: int, target: int, length: int) -> None:
        """Copy the first ``length`` tokens of ``source`` to ``target``, replacing its contents."""
        self._check_length(source, length)
        self._check_sequence(target)
        for group in self._groups:
            group.fork(source, target, length)
        for cache in self.followers:
            cache.fork(source, target, length)

    def pages(self, sequence: int, layer: int = 0) -> tuple[int, ...]:
        """The pages of a sequence in a layer, in order of position; empty for a contiguous
        cache."""
        return self._groups[self.shape.group_of(layer)].pages(sequence)

    @property
    def free_tokens(self) -> int:
        """Tokens that fit the unused pages of the fullest group of layers."""
        return min((group.free_tokens for group in self._groups), default=0)

    def close(self) -> None:
        """Free the cache. Idempotent."""
        host = None if self.prefixes is None else self.prefixes.host
        parts = [host, self._writes, self._arena]
        close_all([part for part in parts if part is not None])

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
