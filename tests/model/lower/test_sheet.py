"""Values of registers: where one ends and the next begins, and where they are placed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from urdir.driver import execute
from urdir.driver.device import Device
from urdir.driver.operation import Launch
from urdir.driver.plan import Plan
from urdir.model.errors import ModelError
from urdir.model.lower.lifetimes import Lifetimes
from urdir.model.lower.sheet import Sheet
from urdir.model.memory.workspace import Workspace, WorkspaceShape
from urdir.ptxgen.kernels.add import Add
from urdir.ptxgen.kernels.rescale import Rescale

N = 300  # not a multiple of the alignment
KEPT = {"x": 4 * N, "y": 4 * N}


@pytest.fixture
def work(emulator: Device) -> Iterator[Workspace]:
    with Workspace(emulator, WorkspaceShape(KEPT, {"out": 4 * N}, room=1 << 16)) as opened:
        yield opened


def copy(sheet: Sheet, x: str, y: str, scale: float = 1.0) -> None:
    sheet.launch(Rescale(N, scale=scale), f"{x} to {y}", x=sheet.registers[x], y=sheet.registers[y])


def add(sheet: Sheet, a: str, b: str, y: str) -> None:
    of = sheet.registers
    sheet.launch(Add(N), f"{a} and {b} to {y}", a=of[a], b=of[b], y=of[y])


def spans(plan: Plan, work: Workspace) -> list[dict[str, int]]:
    """Where the arguments of each launch begin, counted from the room."""
    assert work.shared is not None
    start = work.shared.address
    return [
        {name: part.address - start for name, part in op.args.items()}  # type: ignore[union-attr]
        for op in plan
        if isinstance(op, Launch)
    ]


def test_a_register_that_is_written_anew_has_another_value(work: Workspace) -> None:
    sheet = Sheet(work)
    copy(sheet, "x", "a")
    copy(sheet, "a", "b")
    copy(sheet, "b", "a")
    copy(sheet, "a", "y")
    found = Lifetimes(sheet.launches, work.shared)
    assert [(value.kind, value.launches) for value in found.values] == [
        ("a", [0, 1]),
        ("a", [2, 3]),
        ("b", [1, 2]),
    ]


def test_a_part_that_is_read_later_keeps_the_value(work: Workspace) -> None:
    """The first half is written anew, the second one is still read."""
    sheet, half = Sheet(work), 2 * N
    a, y = sheet.registers["a"], sheet.registers["y"]
    copy(sheet, "x", "a")
    x = sheet.registers["x"].slice(0, half)
    sheet.launch(Rescale(N // 2), "first", x=x, y=a.slice(0, half))
    sheet.launch(Rescale(N), "both", x=a, y=y)
    (value,) = Lifetimes(sheet.launches, work.shared).values
    assert value.launches == [0, 1, 2]
    assert (value.start, value.stop) == (0, 4 * N)


def test_branches_do_not_share_bytes(work: Workspace) -> None:
    """b and c are made and read by launches between which there is no path."""
    sheet = Sheet(work)
    copy(sheet, "x", "b")
    copy(sheet, "b", "b2")
    copy(sheet, "x", "c")
    copy(sheet, "c", "c2")
    add(sheet, "b2", "c2", "y")
    plan = Plan("branches")
    sheet.append_to(plan)
    places = spans(plan, work)
    starts = [places[0]["y"], places[1]["y"], places[2]["y"], places[3]["y"]]
    assert len(set(starts)) == 4
    assert {(edge.before, edge.after) for edge in plan.edges()} == {(0, 1), (1, 4), (2, 3), (3, 4)}


def test_a_chain_shares_bytes_and_computes_the_same(work: Workspace, emulator: Device) -> None:
    sheet, names = Sheet(work), ["x", *(f"value {i}" for i in range(6)), "y"]
    for number, (x, y) in enumerate(itertools.pairwise(names)):
        copy(sheet, x, y, scale=1.0 + number)
    plan = Plan("chain")
    sheet.append_to(plan)
    offsets = {place["y"] for place in spans(plan, work)[:-1]}
    assert len(offsets) == 2  # one is read while the other is written
    values = np.random.default_rng(2).standard_normal(N).astype(np.float32)
    work["x"].upload(values)
    with emulator.create_stream() as stream:
        execute.run(plan, emulator, stream)
        stream.synchronize()
    expected = values * np.prod(np.arange(1.0, 8.0))
    np.testing.assert_allclose(work["y"].download(np.float32), expected, rtol=1e-5)


def test_outputs_stay_to_the_end(work: Workspace) -> None:
    """What is dead before an output is made may lie there; what is made after it may not."""
    sheet = Sheet(work)
    copy(sheet, "x", "a")
    copy(sheet, "a", "out")
    copy(sheet, "out", "b")
    copy(sheet, "b", "y")
    plan = Plan("outputs")
    sheet.append_to(plan)
    places = spans(plan, work)
    assert places[1]["y"] == 0
    assert places[2]["y"] >= 4 * N


def test_too_little_room_is_named(emulator: Device) -> None:
    with Workspace(emulator, WorkspaceShape(KEPT, room=1024)) as work:
        sheet = Sheet(work)
        copy(sheet, "x", "a")
        copy(sheet, "a", "y")
        with pytest.raises(ModelError, match=r"small: its values take 1,280 bytes, .* has 1,024"):
            sheet.append_to(Plan("small"))


@pytest.mark.parametrize("role", ["x", "y"])
def test_memory_that_was_to_be_zeros_is_named(work: Workspace, role: str) -> None:
    """Whether it is read or written."""
    sheet, of = Sheet(work), {"x": "x", "y": "y"}
    given = {name: sheet.registers[at] for name, at in of.items()}
    sheet.launch(Rescale(N), "count", **(given | {role: sheet.registers.zeroed("counts")}))
    with pytest.raises(ModelError, match="has no 'counts' of 1,200 bytes, zeros at first"):
        sheet.append_to(Plan("counts"))
