"""Parts of a step without memory, by which the room that its values need is measured.

Addresses of *paper* are numbers that no memory has: what is lowered for it never runs.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from urdir.driver.memory import Slice
from urdir.model.families.config import Config
from urdir.model.lower.arena import aligned, place
from urdir.model.lower.lifetimes import Lifetimes
from urdir.model.lower.parts import StepParts
from urdir.model.lower.registers import COUNTERS
from urdir.model.lower.sheet import Sheet
from urdir.model.memory.cache_shape import CacheShape
from urdir.model.memory.device_state import StateShape
from urdir.model.memory.exchange import ExchangeShape, RankExchange
from urdir.model.memory.recurrent_state import RecurrentShape
from urdir.model.memory.scored_rows import SCORES_SIZES
from urdir.model.memory.text_rows import TextRowsShape
from urdir.model.memory.weights import Weights
from urdir.model.memory.workspace import WorkspaceShape
from urdir.model.owner import Owner

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.memory import Buffer, Region
    from urdir.driver.properties import DeviceProperties
    from urdir.driver.stream import Stream
    from urdir.model.files.model_file import ModelFile

#: Addresses of paper begin where those of registers end, far enough apart for any allocation.
_addresses = itertools.count(1 << 62, 1 << 44)


class _PaperBuffer(Owner):
    """An allocation without memory."""

    closed = False

    def __init__(self, nbytes: int, name: str) -> None:
        self.nbytes, self.name, self.handle = nbytes, name, next(_addresses)

    def close(self) -> None:
        """Nothing is held."""


class _PaperSlice(Slice):
    """Bytes that are not there."""

    __slots__ = ()

    def fill(self, byte: int, stream: Stream | None = None) -> None:
        """Nothing is written."""


class PaperArena(Owner, Mapping[str, Slice]):
    """Named slices of an allocation without memory."""

    def __init__(self, sizes: Mapping[str, int], name: str) -> None:
        offset, spans = 0, {}
        for key, nbytes in sizes.items():
            spans[key] = offset, nbytes
            offset += aligned(nbytes)
        self.nbytes = offset
        self.buffer = cast("Buffer", _PaperBuffer(offset, name))
        self._slices = {key: _PaperSlice(self.buffer, *span, key) for key, span in spans.items()}

    def __getitem__(self, key: str) -> Slice:
        return self._slices[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._slices)

    def __len__(self) -> int:
        return len(self._slices)

    def close(self) -> None:
        """Nothing is held."""


class PaperDevice:
    """What plans depend on of a device, with memory of paper."""

    def __init__(self, device: Device | PaperDevice) -> None:
        self.properties: DeviceProperties = device.properties
        self.native_target: str = device.native_target

    def arena(self, sizes: Mapping[str, int], name: str) -> PaperArena:
        """An arena of paper."""
        return PaperArena(sizes, name)

    def pinned(self, nbytes: int, name: str) -> _PaperBuffer:
        """Host memory of paper."""
        return _PaperBuffer(nbytes, name)


def paper_weights(file: ModelFile, config: Config, device: Device) -> Weights:
    """The weights of a file as they would lie on a device."""
    return Weights(file, config, cast("Device", PaperDevice(device)))


class _PaperCache:
    """A `KvCache` of paper."""

    def __init__(self, shape: CacheShape) -> None:
        self.shape, self._arena = shape, PaperArena(shape.sizes(), "KV cache")
        self.layout = shape.layout

    def arguments(self, layer: int) -> dict[str, Slice]:
        """See `KvCache.arguments`."""
        return self.shape.arguments(self._arena, layer)


class _PaperRecurrent:
    """A `RecurrentState` of paper."""

    def __init__(self, shape: RecurrentShape) -> None:
        self.shape, self._arena = shape, PaperArena(shape.sizes(), "recurrent state")

    def arguments(self, layer: int) -> dict[str, Slice]:
        """See `RecurrentState.arguments`."""
        return self.shape.arguments(self._arena, layer)


class _PaperScores:
    """`ScoresRead` of paper."""

    def __init__(self) -> None:
        self._arena = PaperArena(SCORES_SIZES, "scores")
        self.logprobs, self.likely = self._arena["logprobs"], self._arena["likely"]


class _PaperState:
    """A `DecodeState` of paper."""

    def __init__(self, shape: StateShape) -> None:
        self._arena = PaperArena(shape.sizes(), "decode state")
        self.sequences, self.max_len, self.slots = shape.sequences, shape.max_len, shape.slots
        self.drafts_states = shape.drafts is not None and shape.states
        self.adapters, self.sources = shape.adapters, shape.sources
        self.scores = _PaperScores()

    def __getitem__(self, name: str) -> Slice:
        return self._arena[name]


class PaperTextRows:
    """`TextRows` of paper."""

    def __init__(self, shape: TextRowsShape) -> None:
        self.shape, self._arena = shape, PaperArena(shape.sizes(), "rows of texts")

    def parts(self, rows: int, texts: int) -> dict[str, Slice]:
        """See `TextRows.parts`."""
        return self.shape.parts(self._arena, rows, texts)


class PaperWorkspace:
    """A `Workspace` of paper. Outputs lie at the start of room without end."""

    def __init__(self, shape: WorkspaceShape) -> None:
        self.shape = shape
        self.kept: dict[str, Slice] = dict(PaperArena({**shape.kept, **shape.zeroed}, "workspace"))
        self.shared = Slice(cast("Buffer", _PaperBuffer(1 << 43, "room")), 0, 1 << 43, "room")
        offset = 0
        for output, nbytes in shape.outputs.items():
            self.kept[output] = self.shared.slice(offset, nbytes, output)
            offset += aligned(nbytes)

    def __getitem__(self, name: str) -> Slice:
        return self.kept[name]

    def __contains__(self, name: object) -> bool:
        return name in self.kept


class PaperSheet(Sheet):
    """A `Sheet` to be measured."""

    def copy(self, dst: Region, src: Region, label: str) -> None:
        """Append nothing: copies are between places that are kept, and take no room."""


class PaperShapes(NamedTuple):
    """What a session has beside its weights."""

    cache: CacheShape
    recurrent: RecurrentShape
    state: StateShape
    exchange: ExchangeShape | None
    workspace: WorkspaceShape


def paper_parts(weights: Weights, shapes: PaperShapes, exact: bool) -> StepParts:
    """Parts of steps of a session without memory; ``weights`` may be on a device."""
    given: Any = {
        "cache": _PaperCache(shapes.cache),
        "recurrent": _PaperRecurrent(shapes.recurrent),
        "state": _PaperState(shapes.state),
        "work": PaperWorkspace(shapes.workspace),
        "exchange": _exchange(weights.config, shapes.exchange),
    }
    device = cast("Device", PaperDevice(weights.device))
    return StepParts(device=device, config=weights.config, weights=weights, exact=exact, **given)


def _exchange(config: Config, shape: ExchangeShape | None) -> RankExchange | None:
    if shape is None or config.share is None:
        return None
    arenas = [PaperArena(shape.sizes(), "exchange") for _ in range(shape.ranks)]
    fault = PaperArena({"fault": 8}, "fault")["fault"]
    return RankExchange.of(config.share, shape, arenas, fault)


class Needs(NamedTuple):
    """Bytes that steps need: ``room`` for their values, of which ``bound`` are in use at once, and
    memory that is ``zeroed``, by name."""

    room: int = 0
    bound: int = 0
    zeroed: Mapping[str, int] = {}

    def most(self, other: Needs) -> Needs:
        """What both need, one after the other."""
        names = (*self.zeroed, *(name for name in other.zeroed if name not in self.zeroed))
        most = {name: max(self.zeroed.get(name, 0), other.zeroed.get(name, 0)) for name in names}
        return Needs(max(self.room, other.room), max(self.bound, other.bound), most)

    def for_rows(self, most: int) -> Needs:
        """The same with a counter for each of ``most`` rows: of the steps that count the rows of a
        router, the largest is between those that are measured, none of which may count."""
        return self._replace(zeroed={**self.zeroed, COUNTERS: 4 * most})


def needs_of(sheet: Sheet) -> Needs:
    """The bytes that the launches of a sheet need."""
    found = Lifetimes(sheet.launches, sheet.work.shared)
    places = place(found.lifetimes())
    return Needs(places.nbytes, places.bound, found.zeroed)
