"""Memory whose contents are copied from page-locked host memory before they are read.

Several arrays take turns in one *slot* of device memory. A plan whose launches read them is given
its *transfers* by `with_transfers`: operations that fill a slot, most of them copies. Edges follow
from bytes, as for all operations, so that a slot is overwritten only after its last reader.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING

from urdir.driver.errors import LaunchError
from urdir.driver.memory import Slice
from urdir.driver.operation import Copy, Operation
from urdir.driver.pinned import PinnedBuffer

if TYPE_CHECKING:
    from urdir.driver.memory import Buffer


class StreamedSlice(Slice):
    """A slot of device memory while it has the bytes of ``source``, or a part of such a slot
    (``whole`` is all of it). Others with the same bytes of the device have other sources.
    ``transfer`` makes the operation that fills it; None: a copy of the source, without which it is
    needed."""

    __slots__ = ("_whole", "source", "transfer")

    def __init__(
        self,
        buffer: Buffer,
        offset: int,
        nbytes: int,
        name: str,
        source: PinnedBuffer | None,
        whole: StreamedSlice | None = None,
    ) -> None:
        super().__init__(buffer, offset, nbytes, name)
        self.source = source
        self.transfer: Callable[[StreamedSlice], Operation] | None = None
        self._whole = whole

    @property
    def whole(self) -> StreamedSlice:
        """All of the slot."""
        return self._whole or self

    def slice(self, offset: int, nbytes: int, name: str | None = None) -> StreamedSlice:
        """A part of it; see `Region.slice`."""
        self._check_span(offset, nbytes, "slice")
        at = self.offset + offset
        return StreamedSlice(self.buffer, at, nbytes, name or self.name, self.source, self.whole)


class _Content:
    """What a slot has from one transfer on: the number of the last operation that reads it."""

    __slots__ = ("last", "of")

    def __init__(self, of: StreamedSlice, last: int) -> None:
        self.of, self.last = of, last

    def shares_bytes(self, other: StreamedSlice) -> bool:
        """Whether the bytes of another slot are partly those of this one."""
        of = self.of
        return of.buffer is other.buffer and max(of.offset, other.offset) < min(
            of.offset + of.nbytes, other.offset + other.nbytes
        )


def with_transfers(operations: Sequence[Operation]) -> list[Operation]:
    """The operations with a transfer for every slot that they read: as early as its bytes are free,
    and in the order in which the slots are read. What slots have had before is not relied on.

    Raises LaunchError for a launch whose own slots share bytes.
    """
    if not _have_slots(operations):
        return [*operations]
    contents: list[_Content] = []
    copies: list[list[Operation]] = [[] for _ in range(len(operations) + 1)]
    first = 0  # where the next copy may be: transfers stay in the order of their use
    for number, operation in enumerate(operations):
        for of in _slots(operation, written=True):  # a launch fills it
            contents = [content for content in contents if not content.shares_bytes(of)]
            contents.append(_Content(of, number))
        for of in _slots(operation, written=False):
            found = next((content for content in contents if content.of is of), None)
            if found is not None:
                found.last = number
                continue
            gone = [content for content in contents if content.shares_bytes(of)]
            first = max([first, *(content.last + 1 for content in gone)])
            if first > number:
                raise LaunchError(
                    f"{operation.label}: reads {of.name!r} and {gone[-1].of.name!r}, which take "
                    "turns in one slot"
                )
            copies[first].append(_transfer(of))
            contents = [content for content in contents if content not in gone]
            contents.append(_Content(of, number))
    return [each for at, op in enumerate([*operations, None]) for each in (*copies[at], op) if each]


def check_transfers(operations: Iterable[Operation]) -> None:
    """Raise LaunchError, naming operation and slot, for a launch that reads a slot before its
    bytes are copied there, or after others were."""
    operations = [*operations]
    if not _have_slots(operations):
        return
    held: list[StreamedSlice] = []
    for operation in operations:
        for of in _slots(operation, written=True):
            held = [other for other in held if not _Content(other, 0).shares_bytes(of)]
            held.append(of)
        for of in _slots(operation, written=False):
            if all(of is not other for other in held):
                raise LaunchError(
                    f"{operation.label}: {of.name!r} is not in its slot: the plan needs transfers "
                    "before it (with_transfers)"
                )


def is_transfer(operation: Operation) -> bool:
    """Whether an operation copies from host memory, or fills a slot: beside the other ones."""
    return _is_from_host(operation) or any(_slots(operation, written=True))


def transfers_of(operations: Iterable[Operation]) -> list[bool]:
    """Which operations are transfers (`is_transfer`)."""
    operations = [*operations]
    kind = is_transfer if _have_slots(operations) else _is_from_host
    return [*map(kind, operations)]


def _is_from_host(operation: Operation) -> bool:
    return isinstance(operation, Copy) and isinstance(operation.src, PinnedBuffer)


def _have_slots(operations: Iterable[Operation]) -> bool:
    """Whether any operation reads or writes a slot. Plans of several steps repeat operations."""
    distinct = {id(each): each for each in operations}.values()
    kinds = set[type]().union(*(map(type, each.memory()) for each in distinct))
    return any(issubclass(kind, StreamedSlice) for kind in kinds)


def _transfer(of: StreamedSlice) -> Operation:
    if of.transfer is not None:
        return of.transfer(of)
    assert of.source is not None
    return Copy(of, of.source, f"transfer {of.name}")


def _slots(operation: Operation, *, written: bool) -> Collection[StreamedSlice]:
    """The slots that an operation reads alone, or writes, each once."""
    memory = operation.memory()
    if not any(isinstance(of, StreamedSlice) for of in memory):
        return ()
    pairs = zip(operation.uses(), memory, strict=True)
    slots = [
        of.whole for use, of in pairs if isinstance(of, StreamedSlice) and use.writes == written
    ]
    return {id(of): of for of in slots}.values()
