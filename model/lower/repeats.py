"""Layers that are alike are lowered once: the launches of one stand for those of the next, with
other weights and another cache."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple
from weakref import WeakKeyDictionary

from urdir.driver.memory import Region
from urdir.driver.operation import Launch
from urdir.model.families.layers import LayerConfig
from urdir.model.families.stored import Linear, StoredMatrix, of_any_layer, stored_in
from urdir.model.graph.ops import Norm
from urdir.model.graph.tensor import Tensor
from urdir.model.lower.lowering import Lowering
from urdir.model.lower.parts import LayerParts
from urdir.model.memory.weights import Weights

if TYPE_CHECKING:
    from urdir.driver.memory import Slice

_NUMBER = re.compile(r"^blk\.(\d+)\.")
#: Where bytes are: the buffer, and the offset in it.
Key = tuple[int, int]


class Kind(NamedTuple):
    """What a layer is like, a number; and its own arguments of launches, in the same order in all
    layers of the kind. ``kind`` is None for layers whose launches depend on others."""

    kind: int | None
    arguments: tuple[Slice, ...]


class Kinds:
    """The kinds of a model's layers, as they are on one device."""

    _known: ClassVar[WeakKeyDictionary[Weights, Kinds]] = WeakKeyDictionary()

    def __init__(self, parts: LayerParts) -> None:
        self._cache = parts.cache
        self._numbers: dict[Any, int] = {}
        self._tables = set(stored_in(parts.config.ropes))  # kept in another form
        self.layers = [self._kind(parts, i, of) for i, of in enumerate(parts.config.layers)]

    @classmethod
    def of(cls, parts: LayerParts) -> Kinds:
        """Those of the model that ``parts`` has, which are found once."""
        found = cls._known.get(parts.weights)
        if found is None or found._cache is not parts.cache:
            found = cls._known[parts.weights] = cls(parts)
        return found

    def _kind(self, parts: LayerParts, index: int, layer: LayerConfig) -> Kind:
        blocks = layer.blocks
        apart = layer.embedding or layer.saves or layer.adds
        if apart or any(block.banks or block.recalls for block in blocks):
            return Kind(None, ())
        stored = [of for of in stored_in(layer) if of not in self._tables]
        weights = parts.weights
        arguments, formats = [], []
        for of in stored:
            if isinstance(of, StoredMatrix):
                matrix = weights.matrix(Linear(of))
                formats.append(matrix.format.name)
                arguments.append(matrix.data)
            else:
                arguments.append(weights.vector(of))
        layout = None
        if layer.attention is not None:
            layout = parts.cache.layout(index)
            arguments += parts.cache.arguments(index).values()
        if layer.recurrent is not None and parts.recurrent is not None:
            arguments += parts.recurrent.arguments(index).values()
            slopes = getattr(layer.recurrent, "slopes", None)
            arguments += [] if slopes is None else [weights.rates[slopes]]
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

    @property
    def key(self) -> Any:
        """What launches of its readers depend on."""
        begun = self.begun and (_key(self.begun[0]), _key(self.begun[1]), self.begun[2])
        packed = self.packed and _key(self.packed)
        return self.made_by, _key(self.place), packed, self.sent, begun


@dataclass(frozen=True, slots=True)
class _Lowered:
    """What a layer was lowered to: its launches, and what is left at its end."""

    index: int
    launches: tuple[Launch, ...]
    count: int
    held: tuple[_Held, ...]
    completed: tuple[int, int] | None


class Repeats:
    """Lowered layers of one plan, by what their launches depend on."""

    def __init__(self, at: Lowering) -> None:
        self._at, self._starts = at, at.starts
        whole = len(at.starts) == at.parts.config.n_layers > 1
        self._kinds = Kinds.of(at.parts).layers if whole else []
        self._known: dict[Any, _Lowered] = {}
        self._open: tuple[int, Any, int, int] | None = None

    def begin(self, index: int) -> bool:
        """The operations that follow are those of a layer; True if they are lowered."""
        self._open = None
        if index + 1 >= len(self._kinds):
            return False
        kinds = self._kinds[index].kind, self._kinds[index + 1].kind
        if None in kinds:
            return False
        at, start = self._at, self._starts[index]
        held = self._held(start, self._end(index + 1))
        # what is completed stays so: the operations up to the next norm may read it
        key = kinds, at.position - start, tuple(of.key for of in held), self._completed(start)
        found = self._known.get(key)
        if found is None:
            self._open = index, key, at.position, len(at.plan)
            return False
        return self._repeat(found, index)

    def end(self) -> None:
        """The operations of the layer that was begun are lowered."""
        if self._open is None:
            return
        index, key, position, launches = self._open
        at = self._at
        made = tuple(at.plan[launches:])
        own = {_key(of) for i in (index, index + 1) for of in self._kinds[i].arguments}
        if not all(isinstance(op, Launch) and self._is_own(op, own) for op in made):
            return
        following = self._starts[index + 1]
        self._known[key] = _Lowered(
            index,
            tuple(op for op in made if isinstance(op, Launch)),
            at.position - position,
            tuple(self._held(following, self._end(index + 1))),
            self._completed(following),
        )

    def _end(self, index: int) -> int:
        """The number of the operation after those of a layer."""
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

    def _is_own(self, op: Launch, own: set[Key]) -> bool:
        """Whether all that differs between layers is known of a launch."""
        parts = self._at.parts
        shared = {_key(table) for table in parts.weights.rope_tables.values()}
        if _NUMBER.match(op.label) is None:
            return False
        for value in op.args.values():
            if isinstance(value, Region) and value.buffer is not parts.work.buffer:
                differs = value.buffer.name in ("weights", "KV cache", "recurrent state")
                if differs and _key(value) not in own | shared:
                    return False
        return True

    def _repeat(self, found: _Lowered, index: int) -> bool:
        at, moved = self._at, self._moved(found.index, index)
        if moved is None:
            return False
        step = index - found.index
        for op in found.launches:
            match = _NUMBER.match(op.label)
            assert match is not None
            label = f"blk.{int(match[1]) + step}.{op.label[match.end() :]}"
            args = {
                name: moved.get(_key(value), value) if isinstance(value, Region) else value
                for name, value in op.args.items()
            }
            at.plan.launch(op.kernel, label, **args)
        at.position += found.count
        following = self._starts[index + 1]
        for held in found.held:
            at.restore(following + held.made_by, held.place, held.packed, held.sent, held.begun)
        at.completed = None
        if found.completed is not None:
            norm = at.ops[following + found.completed[0]]
            assert isinstance(norm, Norm)
            at.completed = norm.x, norm.of
        return True

    def _moved(self, source: int, target: int) -> dict[Key, Region] | None:
        """The arguments of a layer and of the next one for those of another; None where they do
        not go with each other."""
        moved: dict[Key, Region] = {}
        for more in (0, 1):
            pair = self._kinds[source + more].arguments, self._kinds[target + more].arguments
            for old, new in zip(*pair, strict=True):
                if moved.setdefault(_key(old), new).offset != new.offset:
                    return None
        return moved


def _key(of: Region) -> Key:
    return id(of.buffer), of.offset
