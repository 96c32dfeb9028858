"""Caches of experts on the device: slots for some of those that lie in host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from urdir.driver.host_work import HostWork
from urdir.driver.memory import Array, Region, Slice
from urdir.driver.operation import Launch
from urdir.driver.pinned import PinnedBuffer
from urdir.model.families.placement import expert_biases, expert_matrices
from urdir.model.families.stored import Stored, StoredMatrix
from urdir.model.memory.layer_files import FileReader, InFile
from urdir.ptxgen.kernels.experts.gather import GatherExperts
from urdir.ptxgen.kernels.experts.place import copies_words, parts_of, state_words
from urdir.ptxgen.ptx.launch import Access, Param
from urdir.ptxgen.weights.layout import TILE_ROWS, Layout

if TYPE_CHECKING:
    from urdir.driver.operation import Memory
    from urdir.driver.stream import Stream
    from urdir.driver.streamed import StreamedSlice
    from urdir.model.families.feed_forward import Mixture
    from urdir.model.memory.streamed import StreamedMatrices

#: CTAs that gather cached experts beside the kernels that read those of the layer before, and as
#: many for the others.
GATHERING = 8
_gather = lru_cache(maxsize=64)(GatherExperts)
#: The name of a tensor in the arena of the weights.
Label = Callable[[Stored], str]


@dataclass(frozen=True, slots=True)
class CachedPart:
    """What each expert has of a tensor: ``nbytes`` of ``source``, and in a slot of ``target``."""

    source: PinnedBuffer | Slice | InFile
    target: Slice
    nbytes: int


@dataclass(frozen=True, slots=True)
class ExpertCache:
    """``slots`` for ``experts`` of a layer: the ``parts`` of each, by tensor, and which expert is
    in which slot (``state``, see `PlaceExperts`). ``powers`` are the row powers of all experts
    (`Layout.row_powers`), which products of many rows read."""

    experts: int
    slots: int
    state: Slice
    parts: Mapping[Stored, CachedPart]
    layouts: Mapping[StoredMatrix, Layout]
    powers: Mapping[StoredMatrix, Slice]
    reader: FileReader | None = None

    @classmethod
    def of(
        cls,
        mixture: Mixture,
        layouts: Mapping[StoredMatrix, Layout],
        streamed: StreamedMatrices,
        arena: Mapping[str, Slice],
        label: Label,
    ) -> ExpertCache:
        """That of a mixture, in an arena with parts of `cache_sizes`."""
        experts = mixture.router.experts
        matrices, biases = expert_matrices(mixture), expert_biases(mixture)
        parts: dict[Stored, CachedPart] = {}
        for of in matrices:
            source = streamed[of].source or streamed.in_files[of]
            target, nbytes = arena[_cache(label(of))], expert_part_nbytes(layouts[of], experts)
            parts[of] = CachedPart(source, target, nbytes)
        for bias in biases:
            target = arena[_cache(label(bias))]
            parts[bias] = CachedPart(arena[label(bias)], target, 4 * bias.size // experts)
        state = arena[_state(label(mixture.up.matrix))]
        slots = state.nbytes // 4 - state_words(experts, 0)
        held = {of: cached_layout(layouts[of], experts, slots) for of in matrices}
        reader = streamed.expert_reader if matrices[0] in streamed.in_files else None
        powers = {of: arena[_powers(label(of))] for of in matrices if layouts[of].powers_nbytes}
        return cls(experts, slots, state, parts, held, powers, reader)

    @property
    def expert_nbytes(self) -> int:
        """Bytes of an expert."""
        return sum(part.nbytes for part in self.parts.values())

    def arguments(self) -> Iterator[PinnedBuffer | Slice]:
        """All its memory, in the same order for mixtures that are alike."""
        yield self.state
        for part in self.parts.values():
            if not isinstance(part.source, InFile):
                yield part.source
            yield part.target
        yield from self.powers.values()

    def gather(self, of: StoredMatrix, to: StreamedSlice) -> Launch:
        """The launch that fills the slot of a whole matrix, with experts that are cached from
        there: half of them in half of the time of a copy from the host."""
        part = self.parts[of]
        assert not isinstance(part.source, InFile)
        tail = to.nbytes - self.experts * part.nbytes
        kernel = _gather(self.experts, self.slots, part.nbytes, tail, GATHERING)
        args: dict[str, PinnedBuffer | Slice]
        args = {"state": self.state, "source": part.source, "cached": part.target, "target": to}
        args |= {"tail": self.powers[of]} if tail else {}
        return Launch(kernel, f"transfer {to.name}", args)

    def sources(self) -> dict[str, PinnedBuffer | Slice]:
        """Where `FetchExperts` reads each part."""
        sources = [part.source for part in self.parts.values()]
        return {f"source{i}": of for i, of in enumerate(sources) if not isinstance(of, InFile)}

    def targets(self) -> dict[str, Slice]:
        """The slots of each part."""
        return {f"target{i}": part.target for i, part in enumerate(self.parts.values())}

    def fill(self, streamed: Mapping[Stored, StreamedSlice], counts: Array | None) -> None:
        """Copy experts to all slots, while the matrices are in theirs: those with the highest
        ``counts`` (experts,), by default the first ones."""
        if counts is None or len(counts) != self.experts:
            counts = np.zeros(self.experts, np.float32)
        chosen = np.argsort(-counts, kind="stable")[: self.slots]
        for of, part in self.parts.items():
            source = streamed.get(of, part.source)
            assert isinstance(source, Slice)
            for slot, expert in enumerate(chosen.tolist()):
                place = part.target.slice(slot * part.nbytes, part.nbytes)
                place.copy_from(source.slice(expert * part.nbytes, part.nbytes))
        for of, powers in self.powers.items():
            behind = streamed[of].nbytes - powers.nbytes
            powers.copy_from(streamed[of].slice(behind, powers.nbytes))
        state = np.zeros(self.state.nbytes // 4, np.uint32)
        held, holder, *_ = parts_of(state, self.experts, self.slots)
        held[chosen] = np.arange(1, self.slots + 1)
        holder[:] = chosen + 1
        self.state.upload(state)

    def counts(self) -> Array:
        """How often rows that looked it up have chosen each expert, (experts,) u32."""
        return parts_of(self.state.download(np.uint32), self.experts, self.slots)[4]

    def statistics(self) -> tuple[int, int]:
        """How many pairs of rows and experts there were, and how many experts were copied."""
        state = self.state.download(np.uint32)
        pairs, copies = parts_of(state, self.experts, self.slots)[3][1:3].tolist()
        return pairs, copies


class ReadExperts(HostWork):
    """The experts of a list of ``copies``, up to ``most`` (`PlaceExperts`), read from a file to
    their slots. It waits for the list: they are chosen on the device."""

    name = "read_experts"

    def __init__(self, cache: ExpertCache, most: int) -> None:
        self._cache = cache
        self._words = copies_words(most)

    @property
    def params(self) -> Sequence[Param]:
        """The list, and the slots of each tensor."""
        targets = (
            Param(f"target{i}", "u8", (part.target.nbytes,), Access.INOUT)
            for i, part in enumerate(self._cache.parts.values())
        )
        return (Param("copies", "u8", (4 * self._words,), Access.IN), *targets)

    def perform(self, args: Mapping[str, Memory], stream: Stream) -> None:
        """Wait, read what is listed, and queue its copies."""
        copies, reader = args["copies"], self._cache.reader
        assert isinstance(copies, Region)
        assert reader is not None
        with reader.use():
            stream.synchronize()
            words = copies.download(np.uint32, self._words).tolist()
            reader.copy([*self._missing(words, stream)], stream)

    def _missing(self, words: Sequence[int], stream: Stream) -> Iterator[tuple[InFile, Region]]:
        """What is to be read of the listed experts, and where it goes; the rest is copied."""
        listed = words[4 : 4 + 2 * words[0]]
        for expert, slot in zip(listed[::2], listed[1::2], strict=True):
            for part in self._cache.parts.values():
                source, nbytes = part.source, part.nbytes
                place = part.target.slice(slot * nbytes, nbytes)
                if isinstance(source, InFile):
                    yield source.slice(expert * nbytes, nbytes), place
                else:
                    assert isinstance(source, Slice)
                    place.copy_from(source.slice(expert * nbytes, nbytes), stream)


def cache_sizes(
    mixture: Mixture, layouts: Mapping[StoredMatrix, Layout], slots: int, label: Label
) -> dict[str, int]:
    """Bytes of the cache of a mixture by name."""
    experts = mixture.router.experts
    slots = min(slots, experts)
    sizes = {_state(label(mixture.up.matrix)): 4 * state_words(experts, slots)}
    for matrix in expert_matrices(mixture):
        sizes[_cache(label(matrix))] = cached_layout(layouts[matrix], experts, slots).nbytes
        if layouts[matrix].powers_nbytes:
            sizes[_powers(label(matrix))] = layouts[matrix].powers_nbytes
    for bias in expert_biases(mixture):
        sizes[_cache(label(bias))] = 4 * bias.size // experts * slots
    return sizes


def cached_layout(layout: Layout, experts: int, slots: int) -> Layout:
    """The layout of this many of the experts of a matrix."""
    return replace(layout, rows=layout.rows // experts * slots)


def expert_part_nbytes(layout: Layout, experts: int) -> int:
    """Bytes of each expert of a matrix."""
    return layout.rows // experts // TILE_ROWS * layout.band_nbytes


def _cache(name: str) -> str:
    return f"cached experts of {name}"


def _powers(name: str) -> str:
    return f"row powers of {name}"


def _state(name: str) -> str:
    return f"which experts of {name} are cached"
