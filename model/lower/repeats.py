"""Layers that are alike are lowered once: the launches of one stand for those of the next, with
other weights and another cache."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

from urdir.driver.memory import Region, Slice
from urdir.driver.pinned import PinnedBuffer
from urdir.model.families.layers import LayerConfig
from urdir.model.families.stored import Linear, StoredMatrix, of_any_layer, stored_in
from urdir.model.graph.ops import Norm
from urdir.model.graph.tensor import STREAM, Tensor
from urdir.model.lower.lifetimes import Unplaced
from urdir.model.lower.lowering import Lowering
from urdir.model.lower.parts import LayerParts
from urdir.model.lower.registers import Register, register_of
from urdir.model.memory.weights import Weights

if TYPE_CHECKING:
    from urdir.driver.kernel import Kernel

_NUMBER = re.compile(r"^blk\.(\d+)\.")
Memory = Slice | PinnedBuffer
#: Where bytes are: the buffer, and the offset in it.
Key = tuple[int, int]


class Kind(NamedTuple):
    """What a layer is like, a number; and its own arguments of launches, in the same order in all
    layers of the kind. ``kind`` is None for layers whose launches depend on others."""

    kind: int | None
    arguments: tuple[Memory, ...]


class Kinds:
    """The kinds of a model's layers, as they are on one device."""

    _known: ClassVar[WeakKeyDictionary[Weights, Kinds]] = WeakKeyDictionary()

    def __init__(self, parts: LayerParts) -> None:
        self._cache = parts.cache
        self._numbers: dict[Any, int] = {}
        self._tables = set(
            stored_in((parts.config.ropes, parts.config.biases))
        )  # kept in another form
        self.layers = [self._kind(parts, i, of) for i, of in enumerate(parts.config.layers)]

    @classmethod
    def of(cls, parts: LayerParts) -> Kinds:
        """The kinds of a model's layers, cached by its weights."""
        found = cls._known.get(parts.weights)
        if found is None or found._cache is not parts.cache:
            found = cls._known[parts.weights] = cls(parts)
        return found

    def _kind(self, parts: LayerParts, index: int, layer: LayerConfig) -> Kind:
        blocks = layer.blocks
        apart = layer.altup or layer.embedding or layer.saves or layer.adds
        if apart or any(block.banks or block.recalls for block in blocks):
            return Kind(None, ())
        stored = [of for of in stored_in(layer) if of not in self._tables]
        weights = parts.weights
        arguments: list[Memory] = []
        formats: list[Any] = []
        for of in stored:
            if isinstance(of, StoredMatrix):
                matrix = weights.matrix(Linear(of))
                room = parts.config.adapters
                adapted = room is not None and room.has(of)
                formats.append((matrix.format.name, matrix.scales is not None, adapted))
                arguments += weights.lora(of) if adapted else ()
                arguments += (
                    [matrix.data] if matrix.scales is None else [matrix.data, matrix.scales]
                )
            else:
                arguments.append(weights.vector(of))
        layout = None
        if layer.attention is not None:
            layout = parts.cache.layout(index)
            arguments += parts.cache.arguments(index).values()
            relative = layer.attention.relative
            arguments += [] if relative is None else [weights.biases[relative]]
        if layer.recurrent is not None and parts.recurrent is not None:
            arguments += parts.recurrent.arguments(index).values()
            slopes = getattr(layer.recurrent, "slopes", None)
            arguments += [] if slopes is None else [weights.rates[slopes]]
        for mixture in layer.mixtures:
            cache = weights.expert_caches.get(mixture.up.matrix)
            formats.append(None if cache is None else (cache.slots, cache.reader and index))
            arguments += () if cache is None else cache.arguments()
        key = of_any_layer(layer), tuple(formats), layout
        return Kind(self._numbers.setdefault(key, len(self._numbers)), tuple(arguments))


@dataclass(frozen=True, slots=True)
class _Held:
    """A tensor that operations read later: which operation made it, counted from the first of the
    layer, where it lies, and what is left of it beside."""

    made_by: int
    place: Slice
    packed: Slice | None
    sent: bool
    begun: tuple[Slice, Slice, bool] | None

    def key(self, numbers: dict[int, int]) -> Any:
        """What launches of its readers depend on; ``numbers`` are those of the stream's registers,
        in the order in which they are read."""
        begun = self.begun and (_key(self.begun[0]), _key(self.begun[1]), self.begun[2])
        packed = self.packed and _key(self.packed)
        register = _stream(self.place)
        place: Any = _key(self.place)
        if register is not None:
            place = numbers.setdefault(register.number, len(numbers)), self.place.offset
        return self.made_by, place, packed, self.sent, begun


@dataclass(frozen=True, slots=True)
class _Template:
    """A launch of ``layer``, for any layer that is like it. Arguments that are the layer's
    ``own``, by their slots, and those in ``streams`` are replaced."""

    kernel: Kernel
    layer: int
    suffix: str
    args: Mapping[str, Any]
    own: tuple[tuple[str, int], ...]
    streams: tuple[tuple[str, Slice], ...]


@dataclass(frozen=True, slots=True)
class _Lowered:
    """What a layer was lowered to: its launches, and what is left at its end. Arguments whose
    slots are the ``same`` were one. ``streams`` are the numbers of the registers of the stream that
    it reads and, from ``made`` on, that it makes."""

    index: int
    launches: tuple[_Template, ...]
    same: tuple[tuple[int, int], ...]
    count: int
    streams: tuple[int, ...]
    made: int
    held: tuple[_Held, ...]
    completed: tuple[int, int] | None


class _Open(NamedTuple):
    """A layer that is being lowered, and what there was at its start: the operation, launches,
    numbers of the registers that it reads of the stream, and how many registers."""

    layer: int
    key: Any
    position: int
    launches: int
    streams: tuple[int, ...]
    registers: int


class Repeats:
    """Templates of lowered layers of one plan, by everything that their launches depend on."""

    def __init__(self, at: Lowering) -> None:
        self._at, self._starts = at, at.starts
        whole = len(at.starts) == at.parts.config.n_layers > 1
        self._kinds = Kinds.of(at.parts).layers if whole else []
        self._known: dict[Any, _Lowered] = {}
        self._open: _Open | None = None

    def begin(self, index: int) -> bool:
        """Begin a layer; True if its launches were appended from a template."""
        self._open = None
        if index + 1 >= len(self._kinds):
            return False
        kinds = self._kinds[index].kind, self._kinds[index + 1].kind
        if None in kinds:
            return False
        at, start = self._at, self._starts[index]
        held = self._held(start, self._end(index + 1))
        # what is completed stays so: the operations up to the next norm may read it
        numbers: dict[int, int] = {}
        read = tuple(of.key(numbers) for of in held)
        key = kinds, at.position - start, read, self._completed(start)
        found = self._known.get(key)
        if found is None:
            made = len(at.work.made)
            self._open = _Open(index, key, at.position, len(at.plan), tuple(numbers), made)
            return False
        return self._repeat(found, index, tuple(numbers))

    def end(self) -> None:
        """End the layer that was begun, and keep its launches as a template."""
        if self._open is None:
            return
        of, at = self._open, self._at
        index = of.layer
        launches = at.plan.launches[of.launches :]
        slots: dict[Key, int] = {}
        places = [slots.setdefault(_key(of), i) for i, of in enumerate(self._arguments(index))]
        if not all(self._is_own(op, slots) for op in launches):
            return
        following = self._starts[index + 1]
        made = [r.number for r in at.work.made[of.registers :] if r.name == STREAM]
        self._known[of.key] = _Lowered(
            index,
            tuple(_template(op, slots) for op in launches),
            tuple((first, i) for i, first in enumerate(places) if first != i),
            at.position - of.position,
            (*of.streams, *made),
            len(of.streams),
            tuple(self._held(following, self._end(index + 1))),
            self._completed(following),
        )

    def _end(self, index: int) -> int:
        """The number of the first operation after a layer."""
        starts = self._starts
        return starts[index + 1] if index + 1 < len(starts) else len(self._at.ops)

    def _held(self, start: int, end: int) -> list[_Held]:
        """The tensors that the operations up to ``end`` read and others have made."""
        at, found = self._at, dict[Tensor, _Held]()
        for reads in at.reads[at.position : end]:
            for of in reads:
                made_by = at.numbers.get(of, -1)
                if made_by >= at.position or of in found:
                    continue
                begun = at.begun.get(of)
                left = None if begun is None else (begun.scaled, begun.summary, begun.packed)
                place = at.place(of)
                found[of] = _Held(made_by - start, place, at.packed.get(of), of in at.sent, left)
        return list(found.values())

    def _completed(self, start: int) -> tuple[int, int] | None:
        """Which norm is completed, of which tensor, as numbers of operations; None where that is
        not a norm of this layer."""
        at = self._at
        if at.completed is None:
            return None
        x, of = at.completed
        for number in range(start, at.position):
            op = at.ops[number]
            if isinstance(op, Norm) and op.x is x and op.of == of:
                return number - start, 0
        return None

    def _is_own(self, op: Unplaced, own: Collection[Key]) -> bool:
        """Whether every argument that differs between layers belongs to the layer itself."""
        parts = self._at.parts
        tables = (parts.weights.rope_tables, parts.weights.choices)
        shared = {_key(table) for each in tables for table in each.values()}
        if _NUMBER.match(op.label) is None:
            return False
        for value in op.args.values():
            if isinstance(value, PinnedBuffer) and _key(value) not in own:
                return False
            if isinstance(value, Region):
                differs = value.buffer.name in ("weights", "KV cache", "recurrent state")
                if differs and _key(value) not in own and _key(value) not in shared:
                    return False
        return True

    def _repeat(self, found: _Lowered, index: int, read: Sequence[int]) -> bool:
        """Append the launches of a template for another layer; False if its arguments differ in
        which of them are the same."""
        at, own = self._at, self._arguments(index)
        if any(_key(own[i]) != _key(own[j]) for i, j in found.same):
            return False
        registers = [at.work.made[number] for number in read]
        registers += [at.work.new(STREAM) for _ in found.streams[found.made :]]
        streams = dict(zip(found.streams, registers, strict=True))
        step, append = index - found.index, at.plan.launches.append
        for op in found.launches:
            args = dict(op.args)
            for name, slot in op.own:
                args[name] = own[slot]
            for name, place in op.streams:
                args[name] = _moved(place, streams)
            append(Unplaced(op.kernel, f"blk.{op.layer + step}.{op.suffix}", args))
        at.position += found.count
        following = self._starts[index + 1]
        for held in found.held:
            place = held.place if _stream(held.place) is None else _moved(held.place, streams)
            at.restore(following + held.made_by, place, held.packed, held.sent, held.begun)
        at.completed = None
        if found.completed is not None:
            norm = at.ops[following + found.completed[0]]
            assert isinstance(norm, Norm)
            at.completed = norm.x, norm.of
        return True

    def _arguments(self, index: int) -> tuple[Memory, ...]:
        """The arguments of a layer and of the next one."""
        return self._kinds[index].arguments + self._kinds[index + 1].arguments


def _template(op: Unplaced, slots: Mapping[Key, int]) -> _Template:
    """A launch for layers like the one that it is of, whose arguments are in these slots."""
    match = _NUMBER.match(op.label)
    assert match is not None
    slices = [(name, of) for name, of in op.args.items() if isinstance(of, Slice)]
    memory = [(name, of) for name, of in op.args.items() if isinstance(of, Slice | PinnedBuffer)]
    return _Template(
        op.kernel,
        int(match[1]),
        op.label[match.end() :],
        op.args,
        tuple((name, slots[_key(of)]) for name, of in memory if _key(of) in slots),
        tuple((name, of) for name, of in slices if _stream(of) is not None),
    )


def _moved(place: Slice, streams: Mapping[int, Register]) -> Slice:
    """The same part of the register that replaces another one."""
    register = _stream(place)
    assert register is not None
    return streams[register.number].part(place.offset, place.nbytes)


def _stream(of: Slice) -> Register | None:
    """The register of a slice of the stream."""
    register = register_of(of)
    return register if register is not None and register.name == STREAM else None


def _key(of: Region | PinnedBuffer) -> Key:
    return (id(of.buffer), of.offset) if isinstance(of, Region) else (id(of), 0)
