"""Sheets: launches without memory, to which rules append, and which are then placed in a plan."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from urdir.driver.memory import Slice
from urdir.driver.parallel import completed, pieces
from urdir.model.lower.arena import place
from urdir.model.lower.lifetimes import Lifetimes, Unplaced, Value
from urdir.model.lower.registers import Registers

if TYPE_CHECKING:
    from urdir.driver.kernel import Kernel
    from urdir.driver.launch import Argument
    from urdir.driver.plan import Plan
    from urdir.model.lower.parts import LayerParts
    from urdir.model.memory.workspace import Workspace


class Launches(Protocol):
    """A plan or a sheet, to which launches are appended."""

    def launch(self, kernel: Kernel, label: str, /, **args: Argument) -> None:
        """Append a launch."""


class Sheet:
    """Launches in execution order, with ``registers`` for what lives between them."""

    def __init__(self, work: Workspace) -> None:
        self.work = work
        self.registers = Registers(work.kept)
        self.launches: list[Unplaced] = []

    def launch(self, kernel: Kernel, label: str, /, **args: Argument) -> None:
        """Append a launch."""
        self.launches.append(Unplaced(kernel, label, args))

    def __len__(self) -> int:
        return len(self.launches)

    def append_to(self, plan: Plan) -> None:
        """Give every value a place in the workspace, and append the launches to a plan. Raises
        ModelError where the workspace is too small, LaunchError for an argument that is wrong."""
        completed(self.placing(plan))

    def placing(self, plan: Plan) -> Generator[None]:
        """`append_to` in pieces."""
        found = Lifetimes(self.launches, self.work.shared)
        yield
        places = place(found.lifetimes())
        yield
        start = self.work.room_for(places.nbytes, plan.name)
        for zeroed, nbytes in found.zeroed.items():
            self.work.check_zeroed(zeroed, nbytes)
        for value, offset in zip(found.values, places.offsets, strict=True):
            value.place = start + offset - value.first
        buffer = self.work.buffer

        def append(launch: tuple[Unplaced, Sequence[tuple[str, Value]]]) -> None:
            (kernel, label, args), values = launch
            for name, value in values:
                part: Slice = args[name]
                offset, nbytes = value.place + part.offset, value.stop - part.offset
                args[name] = Slice(buffer, offset, nbytes, part.name)
            plan.launch(kernel, label, **args)

        yield from pieces(zip(self.launches, found.arguments, strict=True), append)


@contextmanager
def sheet_of(plan: Plan | Sheet, parts: LayerParts) -> Iterator[Sheet]:
    """A sheet that is placed in ``plan`` at the end; a ``plan`` that is a sheet is yielded itself,
    and its owner places it."""
    if isinstance(plan, Sheet):
        yield plan
        return
    sheet = Sheet(parts.work)
    yield sheet
    sheet.append_to(plan)
