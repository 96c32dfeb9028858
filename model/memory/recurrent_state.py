"""States of recurrent mixers on the device, one per sequence and layer.

A state is that after a sequence's last processed token, and cannot be undone: kernels overwrite it
with every token. In addition a copy can be *kept*, by default that after the last prompt, from
which a truncated sequence resumes. Tokens in between are processed again, which gives the same
state except for rounding. A token at position 0 reads no state: nothing has to be cleared.

The requests of a `Service` are only ever truncated to nothing: a finished answer is dropped
together with the work of steps that ran ahead. There the slots for copies are *shared* between
sequences: `SharedStates` tracks their contents.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Self

from urdir.model.errors import ModelError
from urdir.model.families.config import Config
from urdir.model.owner import Owner

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    from urdir.driver.device import Device
    from urdir.driver.memory import Slice
    from urdir.driver.stream import Stream


@dataclass(frozen=True, slots=True)
class RecurrentShape:
    """Shape of the states of ``sequences``: ``layers`` has, for each layer with a recurrent mixer,
    the bytes of one sequence's arrays by name. There are ``shared`` slots for copies that belong to
    no sequence; by default one slot per sequence. Where steps verify up to ``drafts`` drafts of a
    sequence, ``inputs`` are the arrays that keep inputs of drafts; states are copied where there
    are none.
    """

    layers: Mapping[int, Mapping[str, int]]
    sequences: int
    shared: int | None = None
    drafts: int = 0
    inputs: Mapping[int, Mapping[str, int]] = field(default_factory=dict)

    @classmethod
    def of(cls, config: Config, sequences: int, shared: int | None = None, drafts: int = 0) -> Self:
        """The states that the layers of a model need, f32."""
        of_layers = enumerate(layer.recurrents for layer in config.layers)
        mixers = {index: of for index, of in of_layers if of}
        if not drafts:
            layers = {i: _bytes(_merged(m.state for m in of)) for i, of in mixers.items()}
            return cls(layers, sequences, shared)
        from urdir.model.memory.drafted_states import kept_inputs  # imports numpy

        states = {i: _merged(m.state_with(drafts) for m in of) for i, of in mixers.items()}
        kept = {i: _merged(kept_inputs(m, drafts) for m in of) for i, of in mixers.items()}
        layers = {index: _bytes(of) for index, of in states.items()}
        inputs = {index: _bytes(of) for index, of in kept.items()}
        return cls(layers, sequences, shared, drafts, inputs)

    @property
    def kept(self) -> int:
        """Number of slots for copies."""
        return self.sequences if self.shared is None else self.shared

    @property
    def nbytes(self) -> int:
        """Bytes of one sequence's state."""
        return sum(sum(arrays.values()) for arrays in self.layers.values())

    def arguments(self, arena: Mapping[str, Slice], layer: int) -> dict[str, Slice]:
        """Arguments of kernels over a layer's states, by parameter name, in an arena of `sizes`."""
        names = (*self.layers[layer], *self.inputs.get(layer, ()))
        return {name: arena[f"{name}.{layer}"] for name in names}

    def sizes(self) -> dict[str, int]:
        """Bytes by name of all arrays: the active states (sequences, ...) and the kept ones (kept,
        ...), and inputs of drafts (sequences, ...)."""
        kinds = (
            ("", self.sequences, self.layers),
            ("kept ", self.kept, self.layers),
            ("", self.sequences, self.inputs),
        )
        return {
            f"{prefix}{name}.{index}": nbytes * count
            for prefix, count, layers in kinds
            for index, arrays in layers.items()
            for name, nbytes in arrays.items()
            if count
        }


class RecurrentState(Owner):
    """The states of a session's sequences. Copies are queued on ``stream``, after the queued steps.
    Operations also apply to the ``followers``, other ranks."""

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
        if self._arena is not None and shape.drafts:
            for of in self._arena.values():  # a scan loads a state before it knows that it counts
                of.fill(0)
        self._kept = [0] * shape.sequences  # token counts of the kept states; 0: none

    def arguments(self, layer: int) -> dict[str, Slice]:
        """Arguments of kernels over a layer's states, by parameter name."""
        assert self._arena is not None
        return self.shape.arguments(self._arena, layer)

    def keep(self, sequence: int, length: int) -> None:
        """Keep a copy of a sequence's state, which is that after ``length`` tokens, if it has a
        slot for it."""
        if self.shape.shared is None:
            self._kept[sequence] = 0  # invalid until fully copied
            self.save(sequence, sequence)
            self._kept[sequence] = length

    def save(self, sequence: int, place: int) -> None:
        """Copy the state of a sequence to a slot."""
        self._copy("", sequence, "kept ", place)

    def restore(self, place: int, sequence: int) -> None:
        """Copy the state in a slot to a sequence."""
        self._copy("kept ", place, "", sequence)

    def planes(self) -> Iterator[tuple[Slice, int, int]]:
        """Of each array of kept states: its memory, where they begin, and the bytes of one."""
        assert self._arena is not None
        for name, nbytes in self._arrays():
            yield self._arena["kept " + name], 0, nbytes

    def read(self, place: int) -> list[npt.NDArray[np.uint8]]:
        """The bytes of the state in a slot."""
        import numpy as np

        return [part.download(np.uint8, part.nbytes) for part in self._parts(place)]

    def write(self, place: int, arrays: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Write what `read` read to a slot, after the queued steps."""
        for part, array in zip(self._parts(place), arrays, strict=True):
            part.upload(array)

    def _parts(self, place: int) -> Iterable[Slice]:
        for memory, start, nbytes in self.planes():
            yield memory.slice(start + place * nbytes, nbytes)

    def kept(self, sequence: int, length: int, now: int) -> int:
        """The longest length up to ``length`` with a state, given the present one after ``now``
        tokens: all of them, that of the kept state, or 0."""
        if not self.shape.layers or length >= now:
            return length
        return self._kept[sequence] if self._kept[sequence] <= length else 0

    def truncate(self, sequence: int, length: int, now: int) -> None:
        """Restore the state after ``length`` tokens. Raises ModelError, without effect, unless it
        is `kept`."""
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
        """Copy the state of ``source`` after its ``length`` tokens to ``target``, as active and as
        kept state."""
        self._kept[target] = 0
        if length:
            self._copy("", source, "", target)
            self.keep(target, length)

    def close(self) -> None:
        """Free the states. Idempotent."""
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


def _merged(arrays: Iterable[Mapping[str, int]]) -> dict[str, int]:
    return {name: count for of in arrays for name, count in of.items()}


def _bytes(values: Mapping[str, int]) -> dict[str, int]:
    """Bytes of this many f32 values."""
    return {name: 4 * count for name, count in values.items()}
