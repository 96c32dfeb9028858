"""A KV cache made from sizes, how far its sequences are, and the one place that runs operations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, Self, TypeVar, cast

import numpy as np
import numpy.typing as npt

from urdir.driver import execute
from urdir.driver.plan import Plan
from urdir.model.engine.realizar.host_tokens import read_tokens, write_tokens
from urdir.model.engine.realizar.placed_rows import PlacedRows
from urdir.model.errors import ModelError
from urdir.model.families.rope import RopeConfig
from urdir.model.lower.attend import LayerAttention
from urdir.model.lower.rows import Rows
from urdir.model.memory.cache_shape import CacheShape, in_pages
from urdir.model.memory.kv_cache import KvCache
from urdir.model.memory.partial_results import PARTIAL, most_partial
from urdir.model.owner import Owner
from urdir.ptxgen.kernels.advance import Advance
from urdir.ptxgen.kernels.attention.choice import decode_attention, split_attention
from urdir.ptxgen.kernels.attention.flash_decode import FlashDecode
from urdir.ptxgen.kernels.attention.incremental_attention import IncrementalAttention
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.kv_types import KvDtype
from urdir.ptxgen.kernels.attention.own_token import OwnToken
from urdir.ptxgen.kernels.rotation import turns_table

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.memory import Region


@dataclass(frozen=True, slots=True)
class Operation:
    """What one call runs on one layer: launches, and the rows they are about.

    Each of ``sequences`` gains ``tokens`` tokens: 0 where it only attends to what is stored, more
    than 1 for a prompt, which is of one sequence.
    """

    plan: Plan
    layer: int
    sequences: tuple[int, ...]
    tokens: int

    @property
    def is_prompt(self) -> bool:
        """Whether the rows are consecutive tokens of one sequence."""
        return self.tokens > 1


Cached_co = TypeVar("Cached_co", bound="CachedAttention", covariant=True)


class Launcher(Protocol[Cached_co]):
    """Where operations go: a `CachedAttention` runs them at once, a `Recording` collects them."""

    @property
    def attention(self) -> Cached_co:
        """The cache that the operations are about."""

    def submit(self, operation: Operation) -> list[int]:
        """Run or collect an operation; the sequences' lengths after it."""


class CachedAttention(Owner):
    """Keys and values of ``layers`` layers, and what attention over them needs beside the caller's
    buffers: room for partial results, and the rows' positions in device memory.

    ``kv_heads`` defaults to ``heads``; ``page_len`` 0 is contiguous, else the cache has ``pages``
    pages (enough for all sequences by default). ``rope`` rotates queries and keys; without it they
    are taken as they are. ``lengths[layer][sequence]`` tokens are stored. Raises PtxgenError for
    sizes that no kernel takes and OutOfMemoryError.
    """

    def __init__(
        self,
        device: Device,
        *,
        heads: int,
        head_dim: int,
        max_len: int,
        kv_heads: int | None = None,
        layers: int = 1,
        kv_dtype: KvDtype = "f16",
        sequences: int = 1,
        page_len: int = 0,
        pages: int | None = None,
        rope: RopeConfig | None = None,
    ) -> None:
        layout = KvLayout(sequences, kv_heads or heads, max_len, head_dim, dtype=kv_dtype)
        layout = in_pages(layout, page_len, pages)
        self.device, self.heads, self.rope = device, heads, rope
        self.lengths = [[0] * sequences for _ in range(layers)]
        with ExitStack() as owners:
            shape = CacheShape.equal(layout, layers)
            self.stream = owners.enter_context(device.create_stream("attention"))
            self.cache = owners.enter_context(KvCache(device, shape, self.stream))
            sizes = self._sizes(layout, layers)
            self.work = owners.enter_context(device.arena(sizes, "attention"))
            self.placed = PlacedRows(self.work)
            if (arrived := PARTIAL["arrived"]) in self.work:
                self.work[arrived].fill(0)
            if rope is not None:
                self.work["frequencies"].upload(turns_table(rope.frequencies()))
            self._owners = owners.pop_all()

    def _sizes(self, layout: KvLayout, layers: int) -> dict[str, int]:
        sizes, sequences = PlacedRows.sizes(layout, layers), layout.sequences
        sizes["heads"] = 4 * sequences * self.heads * layout.head_dim
        if self.rope is not None:
            sizes["frequencies"] = 4 * self.rope.dim
        return sizes | self.partial_sizes(layout, range(1, sequences + 1))

    def partial_sizes(self, layout: KvLayout, counts: Iterable[int]) -> dict[str, int]:
        """Bytes of the partial results of split attention of any of ``counts`` rows."""
        sm_count = self.device.properties.sm_count
        kernels: list[IncrementalAttention | FlashDecode] = []
        for rows in counts:
            whole = IncrementalAttention(self.heads, layout, rows)
            kernels.append(split_attention(whole, layout.max_len, sm_count))
            kernels.append(decode_attention(whole, layout.max_len, sm_count))
        return most_partial(kernels)

    @property
    def layout(self) -> KvLayout:
        """How a layer's keys (and values) lie in memory."""
        return self.cache.layout(0)

    @property
    def attention(self) -> Self:
        """Itself: see Launcher."""
        return self

    # ---- what is stored ----

    def store(
        self, layer: int, keys: npt.ArrayLike, values: npt.ArrayLike, *, sequence: int = 0
    ) -> None:
        """Make ``keys`` and ``values`` (tokens, kv_heads, head_dim) f32, of the host, all that a
        layer has of a sequence. Keys are stored as they are, not rotated.

        Raises ContextFullError when they do not fit; nothing is changed then.
        """
        self._check(layer, (sequence,))
        arrays = [np.asarray(a, np.float32) for a in (keys, values)]
        wanted = (len(arrays[0]), self.layout.kv_heads, self.layout.head_dim)
        if arrays[0].shape != wanted or arrays[1].shape != wanted:
            shapes = f"{arrays[0].shape} and {arrays[1].shape}"
            raise ModelError(f"keys and values {shapes}: (tokens, {wanted[1]}, {wanted[2]}) needed")
        self.cache.reserve(sequence, 0, wanted[0], stored=self._longest(sequence))
        write_tokens(self.cache, layer, sequence, *arrays)
        self.lengths[layer][sequence] = wanted[0]

    def stored(
        self, layer: int, *, sequence: int = 0
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Keys and values (tokens, kv_heads, head_dim) f32 that a layer has of a sequence."""
        self._check(layer, (sequence,))
        return read_tokens(self.cache, layer, sequence, self.lengths[layer][sequence])

    def truncate(self, length: int, *, sequence: int = 0) -> None:
        """Forget every token of a sequence from ``length`` on, in all layers."""
        self._check(0, (sequence,))
        if not 0 <= length <= self._longest(sequence):
            raise ModelError(f"cannot truncate {self._longest(sequence)} tokens to {length}")
        for lengths in self.lengths:
            lengths[sequence] = min(lengths[sequence], length)
        self.cache.truncate(sequence, self._longest(sequence))

    def fork(self, source: int, target: int) -> None:
        """Make ``target`` a copy of ``source``; pages are shared until one of the two writes."""
        self._check(0, (source, target))
        self.cache.fork(source, target, self._longest(source))
        for lengths in self.lengths:
            lengths[target] = lengths[source]

    def _longest(self, sequence: int) -> int:
        return max(lengths[sequence] for lengths in self.lengths)

    def _check(self, layer: int, sequences: Sequence[int]) -> None:
        if not 0 <= layer < len(self.lengths):
            raise ModelError(f"layer {layer}: the cache has {len(self.lengths)}")
        for sequence in sequences:
            if not 0 <= sequence < self.layout.sequences:
                raise ModelError(f"sequence {sequence}: the cache has {self.layout.sequences}")

    # ---- operations ----

    def rows(self, layer: int, sequences: Sequence[int], tokens: int = 1) -> Rows:
        """The rows of an operation: one a sequence, or the ``tokens`` of a prompt of one sequence.

        Raises ModelError for an unknown layer or sequence, or a sequence named twice.
        """
        self._check(layer, sequences)
        if not sequences or len(set(sequences)) != len(sequences):
            raise ModelError(f"sequences {list(sequences)}: each once, at least one")
        if tokens < 1:
            raise ModelError(f"{tokens} tokens: at least one")
        prompt = tokens if tokens > 1 else 0
        of, at = self.placed.of(layer, bool(prompt))
        return Rows(max(tokens, len(sequences)), self.layout.max_len, prompt, of, at)

    def layer(self, layer: int, rows: Rows, **buffers: Region | None) -> LayerAttention:
        """The attention of a layer over ``rows``; ``buffers`` are the caller's q, k, v, which are
        checked where something is launched with them."""
        rope, given = self.rope, cast(Mapping[str, "Region"], buffers)
        return LayerAttention(
            label=f"layer {layer}.attention",
            layout=self.layout,
            caches=self.cache.arguments(layer),
            heads=self.heads,
            rows=rows,
            work={**self.work, **given},
            sm_count=self.device.properties.sm_count,
            target=self.device.native_target,
            token=OwnToken(None if rope is None else rope.rotation),
            constants={} if rope is None else {"frequencies": self.work["frequencies"]},
        )

    def submit(self, operation: Operation) -> list[int]:
        """Run an operation at once, without waiting for it; the lengths after it.

        Raises LaunchError, ContextFullError and CudaError; lengths and what is stored are then as
        they were.
        """
        bound = execute.bind(with_advance([operation], self), self.device)
        self.perform([operation], lambda: execute.run(bound, self.device, self.stream))
        return self.lengths_after(operation)

    def perform(self, operations: Sequence[Operation], queue: Callable[[], None]) -> None:
        """Make room, write the rows' positions to device memory if they are stale, ``queue`` the
        launches; then the lengths move on. All of it or nothing."""
        grown = [op for op in operations if op.tokens]
        prompts = {self.lengths[op.layer][op.sequences[0]] for op in grown if op.is_prompt}
        if len(prompts) > 1:
            raise ModelError(f"prompts of one step begin at several lengths: {sorted(prompts)}")
        try:
            self._reserve(grown)
            for op in operations:
                self._place(op, is_grown=any(op.layer == other.layer for other in grown))
            queue()
        except BaseException:
            self.placed.forget()
            for op in grown:
                for sequence in op.sequences:
                    self.cache.truncate(sequence, self._longest(sequence))
            raise
        for op in grown:
            for sequence in op.sequences:
                self.lengths[op.layer][sequence] += op.tokens
            if not op.is_prompt:
                self.placed.advance(op.layer)

    def _reserve(self, grown: Sequence[Operation]) -> None:
        """Make room for the tokens that operations append."""
        for op in grown:
            for sequence in op.sequences:
                start, longest = self.lengths[op.layer][sequence], self._longest(sequence)
                self.cache.reserve(sequence, start, start + op.tokens, stored=longest)

    def _place(self, operation: Operation, is_grown: bool) -> None:
        """Write an operation's rows to device memory, unless it holds them already."""
        layer, lengths = operation.layer, self.lengths[operation.layer]
        if operation.is_prompt:
            (sequence,) = operation.sequences
            self.placed.place_prompt(sequence, lengths[sequence], operation.tokens)
            return
        pairs = [(s, lengths[s] - (not is_grown)) for s in operation.sequences]
        if min(position for _, position in pairs) < 0:
            raise ModelError(f"layer {layer}: sequences {list(operation.sequences)}: one is empty")
        self.placed.place(layer, pairs)

    def lengths_after(self, operation: Operation) -> list[int]:
        """The lengths of an operation's sequences now."""
        return [self.lengths[operation.layer][s] for s in operation.sequences]

    def close(self) -> None:
        """Free everything. Idempotent."""
        self._owners.close()


def with_advance(operations: Sequence[Operation], attention: CachedAttention) -> Plan:
    """The launches of operations that are one step; positions move on at its end."""
    plan = Plan(f"{len(operations)} operations" if len(operations) > 1 else "operation")
    for operation in operations:
        plan.extend(operation.plan)
    for op in operations:
        if op.tokens and not op.is_prompt:
            advance = Advance(attention.layout.max_len, len(op.sequences), sampling=False)
            _, position = attention.placed.of(op.layer, is_prompt=False)
            plan.launch(advance, f"layer {op.layer}.advance", position=position)
    return plan
