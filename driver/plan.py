"""Plans: a forward pass as data, a sequence of launches, copies and fills.

A plan holds no value that changes from token to token: those live in device memory.
`urdir.driver.execute` interprets plans: eagerly, as a recorded graph, in numpy, with timing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, overload

from urdir.driver.dependencies import Edge, find_edges
from urdir.driver.errors import LaunchError
from urdir.driver.kernel import Kernel
from urdir.driver.launch import Argument
from urdir.driver.memory import Buffer, Region
from urdir.driver.operation import Copy, Fill, Launch, Memory, Operation, allocation_of
from urdir.driver.pinned import PinnedBuffer
from urdir.driver.streamed import with_transfers

#: The last operation to run: its index, or its label (of several, the last); None for all.
StopAfter = int | str | None


class Plan:
    """Operations in execution order.

    ``plan[3]`` is the operation with index 3, ``plan[:3]`` a plan of the first three.
    """

    def __init__(self, name: str, operations: Iterable[Operation] = ()) -> None:
        self.name = name
        self._operations = list(operations)

    def launch(self, kernel: Kernel, label: str, /, **args: Argument) -> None:
        """Append a launch of ``kernel``: a buffer or slice for each pointer, a number for each
        scalar, by the names of parameters. Raises LaunchError for what does not fit (`Launch`),
        with ``label``, the operation's name in messages, profiles and graphs."""
        self._operations.append(Launch(kernel, label, args))

    def copy(self, dst: Region, src: Memory, label: str) -> None:
        """Append a copy of all of ``src`` to the start of ``dst``. Raises LaunchError if ``dst`` is
        smaller, or the two overlap."""
        self._operations.append(Copy(dst, src, label))

    def fill(self, dst: Region, byte: int, label: str) -> None:
        """Append setting every byte of ``dst`` to ``byte``; LaunchError unless that is 0 to 255."""
        self._operations.append(Fill(dst, byte, label))

    def extend(self, operations: Iterable[Operation]) -> None:
        """Append the operations of another plan, or any others."""
        self._operations.extend(operations)

    def add_transfers(self) -> None:
        """Insert the copies of streamed memory that launches read; see `with_transfers`."""
        self._operations = with_transfers(self._operations)

    def __len__(self) -> int:
        return len(self._operations)

    def __iter__(self) -> Iterator[Operation]:
        return iter(self._operations)

    @overload
    def __getitem__(self, index: int) -> Operation: ...
    @overload
    def __getitem__(self, index: slice) -> Plan: ...
    def __getitem__(self, index: int | slice) -> Operation | Plan:
        if isinstance(index, slice):
            return Plan(self.name, self._operations[index])
        return self._operations[index]

    def position(self, stop_after: StopAfter) -> int:
        """The number of operations up to ``stop_after``, an index or the last of that label (None:
        all); LaunchError if unknown."""
        if stop_after is None:
            return len(self)
        if isinstance(stop_after, str):
            found = [i for i, op in enumerate(self) if op.label == stop_after]
        else:
            found = [stop_after] if 0 <= stop_after < len(self) else []
        if not found:
            raise LaunchError(
                f"plan {self.name} has no operation {stop_after!r} to stop after: it has "
                f"{len(self)}, printing the plan lists them"
            )
        return found[-1] + 1

    def edges(self) -> tuple[Edge, ...]:
        """The dependencies between operations, transitively reduced; see `find_edges`."""
        return find_edges(operation.uses() for operation in self)

    def allocations(self) -> tuple[Buffer | PinnedBuffer, ...]:
        """Every allocation in use, once, in order of first use."""
        used = (allocation_of(memory) for operation in self for memory in operation.memory())
        return tuple({id(allocation): allocation for allocation in used}.values())

    def kernels(self) -> tuple[Kernel, ...]:
        """Every kernel that is launched on the device, once, in order of first use."""
        launched = (op.kernel for op in self if isinstance(op, Launch) and not op.is_on_host)
        return tuple({id(kernel): kernel for kernel in launched}.values())

    def table(self) -> list[dict[str, Any]]:
        """One dictionary of plain values (JSON) per operation, with more detail than ``str``."""
        return [_row(i, operation) for i, operation in enumerate(self)]

    def __str__(self) -> str:
        kinds = Counter(type(operation) for operation in self)
        counts = ", ".join(
            f"{kinds[kind]} {one if kinds[kind] == 1 else several}"
            for kind, one, several in (
                (Launch, "launch", "launches"),
                (Copy, "copy", "copies"),
                (Fill, "fill", "fills"),
            )
            if kinds[kind]
        )
        rows = [_cells(row) for row in self.table()]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = (
            "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in rows
        )
        return "\n".join([f"plan {self.name}: {counts or 'empty'}", *lines])

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Print the list of operations in a notebook."""
        printer.text(str(self))

    def __repr__(self) -> str:
        return f"<Plan {self.name!r}, {len(self)} operations>"


def _row(index: int, operation: Operation) -> dict[str, Any]:
    row: dict[str, Any] = {"index": index, "label": operation.label, "what": operation.what}
    access = {True: "inout", False: "in"}
    args = {
        use.name: (
            access[use.writes] if use.reads else "out",
            _span(memory, use.stop - use.start),
        )
        for use, memory in zip(operation.uses(), operation.memory(), strict=True)
    }
    if isinstance(operation, Launch):
        shape = operation.kernel.launch_shape
        row |= {"grid": list(shape.grid), "block": list(shape.block)}
        described: list[list[Any]] = [
            [p.name, *args.get(p.name, ("", operation.args[p.name]))]
            for p in operation.kernel.params
        ]
    else:
        described = [[name, *use] for name, use in args.items()]
    if isinstance(operation, Fill):
        described.append(["byte", "", operation.byte])
    return row | {"args": described, "bytes_moved": operation.bytes_moved()}


def _span(memory: Memory, nbytes: int) -> str:
    """``name[start:stop]``, in bytes of the allocation."""
    allocation = allocation_of(memory)
    name = memory.name if memory.name == allocation.name else f"{allocation.name}.{memory.name}"
    start = memory.address - allocation.address
    return f"{name}[{start}:{start + nbytes}]"


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    extent = f"{_extent(row['grid'])} x {_extent(row['block'])}" if "grid" in row else ""
    args = "  ".join(f"{access} {name}={value}".strip() for name, access, value in row["args"])
    return (f"{row['index']:4d}", row["label"], row["what"], extent, args)


def _extent(extent: list[int]) -> str:
    """A grid or block as (x), (x, y) or (x, y, z), without trailing ones."""
    while len(extent) > 1 and extent[-1] == 1:
        extent = extent[:-1]
    return f"({', '.join(map(str, extent))})"
