"""The states of recurrent mixers on the device, one of each for every sequence.

A state is that after a sequence's last processed token, and cannot be taken back: kernels overwrite
it with every token. Beside it a copy can be *kept*, by default that after the last prompt, so that
a sequence that is cut goes on from there. What lies between is processed again, which gives the
same state as before but for rounding. A token at position 0 reads no state: nothing has to be
cleared.

The requests of a `Service` are never cut but to nothing: an answer that has ended is forgotten, and
so is what a step that ran ahead made of it. There the places for copies are no sequence's own, but
*shared*: `SharedStates` knows what each is of.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from urdir.model.errors import ModelError
from urdir.model.families.config import Config
from urdir.model.owner import Owner

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.memory import Slice
    from urdir.driver.stream import Stream


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """The states of ``sequences``: ``layers`` has for each layer with a recurrent mixer the bytes
    of one sequence's arrays by name. There is room for ``shared`` copies, which no sequence has to
    itself; by default for one of each sequence's own."""

    layers: Mapping[int, Mapping[str, int]]
    sequences: int
    shared: int | None = None

    @classmethod
    def of(cls, config: Config, sequences: int, shared: int | None = None) -> Self:
        """Those that the layers of a model need, f32."""
        layers = {
            index: {name: 4 * values for name, values in layer.recurrent.state.items()}
            for index, layer in enumerate(config.layers)
            if layer.recurrent is not None
        }
        return cls(layers, sequences, shared)

    @property
    def kept(self) -> int:
        """How many copies there is room for."""
        return self.sequences if self.shared is None else self.shared

    @property
    def nbytes(self) -> int:
        """Bytes of one sequence's state."""
        return sum(sum(arrays.values()) for arrays in self.layers.values())

    def sizes(self) -> dict[str, int]:
        """Bytes by name of all arrays: those that kernels move on (sequences, ...), and those for
        what is kept (kept, ...)."""
        return {
            f"{prefix}{name}.{index}": nbytes * count
            for prefix, count in (("", self.sequences), ("kept ", self.kept))
            for index, arrays in self.layers.items()
            for name, nbytes in arrays.items()
            if count
        }


class RecurrentState(Owner):
    """The states of a session's sequences. Copies are queued on ``stream``, after the steps that
    are queued there. What is done here is done to those of the ``followers``, other ranks."""

    def __init__(
        self,
        device: Device,
        shape: RecurrentShape,
        stream: Stream,
        followers: Sequence[RecurrentState] = (),
    ) -> None:
        self.shape = shape
        self._stream, self._followers = stream, tuple(followers)
        sizes = shape.sizes()
        self._arena = device.arena(sizes, "recurrent state") if sizes else None
        self._kept = [0] * shape.sequences  # tokens that the kept states are of; 0: none is

    def arguments(self, layer: int) -> dict[str, Slice]:
        """What kernels over the states of a layer take, by parameter name."""
        assert self._arena is not None
        return {name: self._arena[f"{name}.{layer}"] for name in self.shape.layers[layer]}

    def keep(self, sequence: int, length: int) -> None:
        """Keep the state of a sequence, which is that after ``length`` tokens, where it has a place
        for that."""
        if self.shape.shared is None:
            self._kept[sequence] = 0  # until all of it is copied
            self.save(sequence, sequence)
            self._kept[sequence] = length

    def save(self, sequence: int, place: int) -> None:
        """Copy the state of a sequence to a place of those that are kept."""
        self._copy("", sequence, "kept ", place)

    def restore(self, place: int, sequence: int) -> None:
        """Make the state of a sequence that in a place of those that are kept."""
        self._copy("kept ", place, "", sequence)

    def kept(self, sequence: int, length: int, now: int) -> int:
        """After how many of the first ``length`` tokens a state is there, the last being that after
        ``now`` tokens: all of them, as many as the kept state is of, or none."""
        if not self.shape.layers or length >= now:
            return length
        return self._kept[sequence] if self._kept[sequence] <= length else 0

    def truncate(self, sequence: int, length: int, now: int) -> None:
        """Make the state that after ``length`` tokens. Raises ModelError, nothing changed, where it
        is not `kept`."""
        if self.kept(sequence, length, now) != length:
            raise ModelError(
                f"sequence {sequence} cannot be cut to {length} tokens: recurrent layers hold the "
                f"state after {now}, and after {self._kept[sequence]}"
            )
        if 0 < length < now:
            self.restore(sequence, sequence)
        if length < self._kept[sequence]:
            self._kept[sequence] = 0

    def fork(self, source: int, target: int, length: int) -> None:
        """Make the state of ``target``, and what it keeps, that of ``source`` after its ``length``
        tokens."""
        self._kept[target] = 0
        if length:
            self._copy("", source, "", target)
            self.keep(target, length)

    def close(self) -> None:
        """Free the states; closing twice does nothing."""
        if self._arena is not None:
            self._arena.close()

    def _copy(self, source: str, from_sequence: int, target: str, to_sequence: int) -> None:
        for follower in self._followers:
            follower._copy(source, from_sequence, target, to_sequence)
        if self._arena is None or (source, from_sequence) == (target, to_sequence):
            return
        for name, nbytes in self._arrays():
            part = self._arena[target + name].slice(to_sequence * nbytes, nbytes)
            origin = self._arena[source + name].slice(from_sequence * nbytes, nbytes)
            part.copy_from(origin, self._stream)

    def _arrays(self) -> Iterable[tuple[str, int]]:
        for index, arrays in self.shape.layers.items():
            for name, nbytes in arrays.items():
                yield f"{name}.{index}", nbytes
