"""A model's weights on the device: one copy, repacked once in the layout that kernels read."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from urdir.model.families.config import Config
from urdir.model.families.placement import cached_mixtures, expert_matrices, units
from urdir.model.families.stored import Linear, Normalization, Stored, StoredMatrix, StoredVector
from urdir.model.memory.expert_cache import ExpertCache, expert_part_nbytes
from urdir.model.memory.file_keys import matrices_key, model_key
from urdir.model.memory.local_choices import drawn_choices, local_choices
from urdir.model.memory.matrix_rows import float_rows, source_rows
from urdir.model.memory.norms import NormLayer
from urdir.model.memory.streamed import StreamedMatrices, slots_in
from urdir.model.memory.switched_adapters import write_switched
from urdir.model.memory.upload import (
    STAGING_BYTES,
    Piece,
    Repacking,
    as_read,
    upload,
    vector_pieces,
)
from urdir.model.memory.vectors import vector_values
from urdir.model.memory.weight_sizes import (
    EMBEDDED,
    POSITIONS,
    SWITCHED,
    adapted_in,
    arena_name,
    is_in_file,
    kept_tensors,
    layout_of,
    lora_name,
    scales_name,
    table_name,
    weight_sizes,
)
from urdir.model.owner import Owner
from urdir.model.progress import Progress
from urdir.ptxgen.kernels.rotation import turns_table
from urdir.ptxgen.weights.formats import Format
from urdir.ptxgen.weights.layout import Layout

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.memory import Arena, Array, Slice
    from urdir.driver.pinned import PinnedBuffer
    from urdir.model.files.model_file import ModelFile

__all__ = ["STAGING_BYTES", "Matrix", "Weights"]


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight matrix (rows, cols) in its repacked layout; ``bias`` (rows,) f32 or None. With
    ``is_partial`` it has some of the columns: its product is one of several ranks' addends.
    ``scales`` of its rows, where many vectors are multiplied with it as bytes (`eights`). Slots of
    a cache of experts get those that they lack from ``source``; ``held_bias`` is what they have of
    the bias. Columns are those of x in an ``order`` (cols,), of experts in one each (experts, cols)
    f32."""

    layout: Layout
    data: Slice
    bias: Slice | None = None
    is_partial: bool = False
    scales: Slice | None = None
    source: PinnedBuffer | None = None
    held_bias: Slice | None = None
    order: Slice | None = None

    @property
    def format(self) -> Format:
        """The type of its elements."""
        return self.layout.format

    @property
    def rows(self) -> int:
        """Output width."""
        return self.layout.rows

    @property
    def cols(self) -> int:
        """Input width."""
        return self.layout.cols

    def first(self, rows: int) -> Matrix:
        """The first rows, for products of few rows: others take what lies behind the whole matrix
        (`Layout.powers_nbytes`)."""
        layout = replace(self.layout, rows=rows)
        bias = None if self.bias is None else self.bias.slice(0, 4 * rows)
        return replace(self, layout=layout, data=self.data.slice(0, layout.nbytes), bias=bias)


class Weights(Owner):
    """All weights of a model in one allocation, indexed by their references in the description;
    ``rope_tables`` by rotation, ``rates`` by decay slopes, ``biases`` by distance. Addresses,
    which plans need, are known before the upload (`upload`)."""

    def __init__(self, gguf: ModelFile, config: Config, device: Device) -> None:
        self.config = config
        self.device = device
        self._kept = tuple(kept_tensors(config))
        self._layouts = {
            of: layout_of(of, gguf) for of in self._kept if isinstance(of, StoredMatrix)
        }
        with ExitStack() as owners:
            arena = owners.enter_context(device.arena(weight_sizes(gguf, config), "weights"))
            self._arena: Arena = arena
            #: The matrices in host memory.
            self.streamed = owners.enter_context(
                StreamedMatrices(
                    *(device, self._layouts, units(config), slots_in(arena), self._in_files())
                )
            )
            #: Caches of experts, by the matrix up of each.
            self.expert_caches = {
                of.up.matrix: ExpertCache.of(of, self._layouts, self.streamed, arena, arena_name)
                for of in cached_mixtures(config)
            }
            self._owners = owners.pop_all()
        for cache in self.expert_caches.values():
            for matrix in cache.layouts if cache.reader is None else ():
                self.streamed[matrix].transfer = partial(cache.gather, matrix)
        #: How often experts were chosen in the past, by the number of their cache: see
        #: `ExpertCache.counts`. Caches are filled by it.
        self.expert_counts: Mapping[int, Array] = {}
        #: Learned positions (at least the largest cache's, hidden) f32, or None.
        self.positions = self._arena.get(POSITIONS)
        self.rope_tables = {rope: self._arena[table_name(rope)] for rope in config.ropes}
        #: The adapter that each token switches on, and the token that it is embedded as (`Switch`),
        #: (vocab,) u32 each; nothing in other models.
        self.switch_tables = tuple(self._arena[of] for of in (SWITCHED, EMBEDDED) if of in arena)
        #: The bias of each head by distance, (heads, 2 MOST_DISTANCE + 1) f32.
        self.biases = {of: self._arena[table_name(of)] for of in config.biases}
        #: Choices of experts that are drawn, to measure.
        self.choices = drawn_choices(config, arena)
        #: Decay rates of lightning attention states, (heads,) f32.
        self.rates = {slopes: self._arena[table_name(slopes)] for slopes in config.slopes}

    @classmethod
    def load(
        cls, gguf: ModelFile, config: Config, device: Device, stream_dir: Path | None = None
    ) -> Self:
        """Upload and repack every tensor of ``gguf``, from which ``config`` was read.

        Raises as `upload` does; nothing stays allocated then.
        """
        weights = cls(gguf, config, device)
        try:
            weights.upload(gguf, stream_dir=stream_dir)
        except BaseException:
            weights.close()
            raise
        return weights

    def upload(
        self,
        gguf: ModelFile,
        stop: threading.Event | None = None,
        stream_dir: Path | None = None,
    ) -> None:
        """Fill the memory: upload and repack every tensor of ``gguf``; those that stay in files
        are written to ``stream_dir``, unless they are there.

        Uses bounded staging buffers and frees them; prints a progress bar to stderr. Setting
        ``stop`` from another thread ends it early. Raises DriverError if memory runs out or the
        device fails.
        """
        self._arena.buffer.fill(0)  # padding of the last tiles
        self._upload_rope_tables(gguf)
        self._upload_choices()
        self._upload_positions(gguf)
        self._upload_switch(gguf)
        for bias, table in self.biases.items():
            values = vector_values(bias.weight, gguf.tensors[bias.weight.name])
            table.upload(bias.table(values))
        tensors = {of: gguf.tensors[of.name] for of in self._layouts}
        floats = {of: float_rows(of, tensor) for of, tensor in tensors.items()}
        sources = {of: rows or source_rows(of, tensors[of]) for of, rows in floats.items()}
        for slopes, rates in self.rates.items():
            rates.upload(slopes.rates())
        scaled = {of for of in self._layouts if scales_name(of) in self._arena}
        formats = {of: None if rows is None else rows.format for of, rows in floats.items()}
        matrices = [(self._layouts[of], form) for of, form in formats.items()]
        repacking = Repacking(self.device, matrices, {self._layouts[of] for of in scaled})

        def nbytes_of(of: Stored) -> int:
            if isinstance(of, StoredMatrix):
                return as_read(self._layouts[of], formats[of]).source_nbytes
            return 4 * of.size

        total = sum(map(nbytes_of, self._kept))
        rank = self.config.share or self.config.stage
        is_first = rank is None or rank.rank == 0
        stop = stop or threading.Event()
        with Progress("loading", total, shown=is_first) as progress:

            def fill(kept: Sequence[Stored]) -> None:
                pieces = self._pieces(gguf, repacking, sources, kept)
                nbytes = sum(map(nbytes_of, kept))
                upload(self.device, pieces, nbytes, progress=progress.advance, stop=stop)
                if not stop.is_set():
                    self._add_powers(repacking, kept)

            fill([of for of in self._kept if of not in self.streamed])
            if self.streamed.files:
                assert stream_dir is not None
                self._open_files(gguf, formats, stream_dir)
                saved = filter(self.streamed.is_saved, self._kept)
                progress.advance(sum(map(nbytes_of, saved)))
            for group in self.streamed.groups:
                if not stop.is_set():
                    self._fill_streamed(group, fill, repacking, stop)

    def _open_files(
        self, gguf: ModelFile, floats: Mapping[StoredMatrix, Format | None], folder: Path
    ) -> None:
        """Open the files of matrices that are in a folder already."""
        model = model_key(gguf)

        def key_of(some: Sequence[Stored]) -> str:
            matrices = [of for of in some if isinstance(of, StoredMatrix)]
            return matrices_key(
                model, ((arena_name(of), self._layouts[of], floats[of]) for of in matrices)
            )

        self.streamed.open_files(folder, key_of)

    def _fill_streamed(
        self,
        group: Sequence[StoredMatrix],
        fill: Callable[[Sequence[Stored]], None],
        repacking: Repacking,
        stop: threading.Event,
    ) -> None:
        """Fill matrices that slots hold together, where they are kept, and what stays on the device
        of them: caches of experts, and row scales."""
        saved = [of for of in group if self.streamed.is_saved(of)]
        left = [of for of in group if of not in saved]
        if left:
            self.streamed.clear()
            fill(left)
        if stop.is_set():
            return
        self.streamed.save(left)
        has_caches = not self.expert_caches.keys().isdisjoint(group)
        needed = [of for of in saved if has_caches or scales_name(of) in self._arena]
        if needed:
            self.streamed.restore(needed)
            self._add_powers(repacking, needed)
        if has_caches:
            self._fill_caches(group)

    def _add_powers(self, repacking: Repacking, kept: Iterable[Stored]) -> None:
        """What is computed of matrices that are on the device: powers of rows, and scales."""
        repacking.add_powers(
            (self._layouts[of], self._place(of), self._arena.get(scales_name(of)))
            for of in kept
            if isinstance(of, StoredMatrix)
        )

    def _in_files(self) -> dict[StoredMatrix, int]:
        """The matrices that stay in files, with the bytes of each expert of those with caches."""
        config, layouts = self.config, self._layouts
        experts = {
            matrix: expert_part_nbytes(layouts[matrix], of.router.experts)
            for of in cached_mixtures(config)
            for matrix in expert_matrices(of)
        }
        return {
            of: experts.get(of, layouts[of].nbytes)
            for unit in units(config)
            for of in unit
            if is_in_file(config, of)
        }

    def _fill_caches(self, group: Collection[Stored]) -> None:
        """Fill the caches of experts whose matrices are in their slots now."""
        for number, (up, cache) in enumerate(self.expert_caches.items()):
            if up in group:
                cache.fill(self.streamed, self.expert_counts.get(number))

    def matrix(self, of: Linear | StoredMatrix) -> Matrix:
        """A matrix of the description, with its bias."""
        stored, bias = (of.matrix, of.bias) if isinstance(of, Linear) else (of, None)
        order = of.order if isinstance(of, Linear) else None
        return Matrix(
            self._layouts[stored],
            self._place(stored),
            None if bias is None else self.vector(bias),
            stored.columns is not None,
            self._arena.get(scales_name(stored)),
            order=None if order is None else self.vector(order),
        )

    def adapted(self) -> Iterator[tuple[StoredMatrix, Slice, Slice]]:
        """The matrices that have room for adapters, with the places of all A and B."""
        for of in adapted_in(self.config):
            a, b = self._arena[lora_name("A", of)], self._arena[lora_name("B", of)]
            yield of, a, b

    def lora(self, of: Linear | StoredMatrix) -> tuple[Slice, Slice]:
        """The A and the B of all adapters of a matrix (`AdapterRoom`)."""
        stored = of.matrix if isinstance(of, Linear) else of
        return self._arena[lora_name("A", stored)], self._arena[lora_name("B", stored)]

    def vector(self, of: StoredVector) -> Slice:
        """A vector of the description, (size,) f32."""
        return self._arena[arena_name(of)]

    def norm(self, of: Normalization) -> NormLayer:
        """A norm of the description."""
        weight, bias = (None if v is None else self.vector(v) for v in (of.weight, of.bias))
        return NormLayer(of.norm, weight, bias)

    def _place(self, of: Stored) -> Slice:
        """Where a tensor lies on the device, if need be while it is used."""
        return self.streamed.get(of) or self._arena[arena_name(of)]

    def _pieces(
        self,
        gguf: ModelFile,
        repacking: Repacking,
        sources: Mapping[StoredMatrix, Any],
        kept: Iterable[Stored],
    ) -> Iterator[Piece]:
        for of in kept:
            place = self._place(of)
            if isinstance(of, StoredMatrix):
                yield from repacking.pieces(self._layouts[of], sources[of], place)
            else:
                values = vector_values(of, gguf.tensors[of.name])
                yield from vector_pieces(values.view(np.uint8), place)

    def _upload_rope_tables(self, gguf: ModelFile) -> None:
        for rope, table in self.rope_tables.items():
            factors = None
            if rope.factors is not None:
                factors = vector_values(rope.factors, gguf.tensors[rope.factors.name])
            table.upload(turns_table(rope.frequencies(factors)))

    def _upload_choices(self) -> None:
        for (experts, used), drawn in self.choices.items():
            drawn.upload(local_choices(experts, used))

    def _upload_positions(self, gguf: ModelFile) -> None:
        stored = self.config.positions
        if stored is None or self.positions is None:
            return
        layout, tensor = layout_of(stored, gguf), gguf.tensors[stored.name]
        self.positions.fill(0)
        blocks = np.ascontiguousarray(tensor.data[:])
        self.positions.upload(layout.unpack(layout.pack(blocks)).astype(np.float32))

    def _upload_switch(self, gguf: ModelFile) -> None:
        switch, room = self.config.switch, self.config.adapters
        if switch is None or room is None:
            return
        tables = switch.tables(self.config.vocab_size)
        for place, values in zip(self.switch_tables, tables, strict=True):
            place.upload(values)
        write_switched(
            *(switch, room, self.adapted()), lambda of: vector_values(of, gguf.tensors[of.name])
        )

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._arena.nbytes

    @property
    def experts_nbytes(self) -> int:
        """Bytes in host memory of experts that are cached."""
        caches = self.expert_caches.values()
        return sum(self._layouts[of].nbytes for cache in caches for of in cache.layouts)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layouts of all matrices, in the order of the description."""
        return tuple(self._layouts.values())

    def close(self) -> None:
        """Free the weights. Idempotent."""
        self._owners.close()
