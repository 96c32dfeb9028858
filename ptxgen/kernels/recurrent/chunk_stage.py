"""A prepared chunk in shared memory, and the values of its tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from urdir.ptxgen.kernels.recurrent.prepared_layout import CHUNK, PreparedLayout


@dataclass(frozen=True, slots=True)
class ChunkStage:
    """What is ``prepared`` of a chunk, then ``columns`` values of each of its tokens, then a
    barrier; places in bytes."""

    prepared: PreparedLayout
    columns: int

    @property
    def places(self) -> Mapping[str, int]:
        """Start of each part of a prepared chunk in shared memory, contiguous, and their "end", in
        bytes."""
        sizes = self.prepared.nbytes_of
        squares, numbers = sizes["tiles"], sizes["tiles"] + sizes["squares"]
        begins = dict.fromkeys(self.prepared.squares, squares)
        begins |= dict.fromkeys(self.prepared.numbers, numbers)
        places = {name: begins.get(name, 0) + at for name, at in self.prepared.places.items()}
        return {**places, "end": numbers + sizes["numbers"]}

    @property
    def value_stride(self) -> int:
        """Bytes of a token's values: four more than needed, so that neighbouring lanes' tokens lie
        in different banks."""
        return 4 * (self.columns + 4)

    @property
    def barrier_place(self) -> int:
        """After the values: the barrier that counts arrived bytes."""
        return self.places["end"] + CHUNK * self.value_stride

    @property
    def nbytes(self) -> int:
        """Bytes of all that is loaded for a chunk."""
        return self.barrier_place + 16
