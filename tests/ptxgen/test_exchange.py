"""Exchanges between devices: sums and parts of all ranks, replays, a rank that is late."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import pytest

from urdir.driver.bindings import emulated
from urdir.driver.errors import CudaError, GroupError
from urdir.driver.execute import record, run
from urdir.driver.group import Group, launch_together
from urdir.driver.plan import Plan
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.exchange.all_gather import AllGather
from urdir.ptxgen.kernels.exchange.all_reduce import AllReduce
from urdir.ptxgen.kernels.exchange.all_reduce_two_shot import AllReduceTwoShot, stage_sizes
from urdir.ptxgen.kernels.exchange.gives import Gives, SumOfRanks
from urdir.ptxgen.kernels.exchange.spec import Exchange, describe_fault, inbox_nbytes, rounded
from urdir.ptxgen.kernels.linear.epilogue.send import Send
from urdir.ptxgen.kernels.linear.products.gemv import Gemv
from urdir.ptxgen.kernels.linear.prologue.sum import RankAdd
from urdir.ptxgen.weights.formats import FORMATS

CAPACITY = 1024
#: Values of a rank's part, and the CTAs that take turns with them, of a sum in two shots.
PART, CTAS = 4096, 3


class Ranks:
    """A group with inboxes and stages; x, residual and y of up to 2 x ``PART`` values."""

    def __init__(self, group: Group) -> None:
        self.group = group
        inbox = inbox_nbytes(len(group), CAPACITY)
        counts = 4 * CAPACITY // 256
        sizes = {"inbox": inbox, "epochs": counts, "sent": counts, "x": 8 * PART}
        sizes |= {"y": 8 * PART, "residual": 8 * PART} | stage_sizes(len(group), PART)
        self.memory = [device.arena(sizes, "rank") for device in group]
        self.faults = [device.pinned(8, "fault") for device in group]
        self.streams = [device.create_stream() for device in group]
        for arena in self.memory:
            for part in arena.values():
                part.fill(0)

    def plan(self, kernel: Exchange | AllReduceTwoShot) -> Plan:
        """The exchange of one rank."""
        plan = Plan(f"rank {kernel.rank}")
        plan.launch(kernel, kernel.name, **self.arguments(kernel))
        return plan

    def arguments(self, kernel: Exchange | AllReduceTwoShot) -> dict[str, Any]:
        """Of a rank."""
        own = self.memory[kernel.rank]
        given = {**own, "fault": self.faults[kernel.rank]}
        for name in ("inbox", "stage", "flags"):
            given |= {f"{name}{rank}": arena[name] for rank, arena in enumerate(self.memory)}
        return {p.name: given[p.name] for p in kernel.params}

    def run(self, kernels: Sequence[Any], **inputs: Sequence[Any]) -> list[Any]:
        """y of every rank, of inputs by rank."""
        self.put(**inputs)
        for kernel, device, stream in zip(kernels, self.group, self.streams, strict=True):
            run(self.plan(kernel), device, stream)
        return self.results(kernels)

    def put(self, **inputs: Sequence[Any]) -> None:
        for name, arrays in inputs.items():
            for arena, array in zip(self.memory, arrays, strict=True):
                arena[name].upload(array)

    def results(self, kernels: Sequence[Any]) -> list[Any]:
        shapes = [kernel.shape_of(kernel.param("y")) for kernel in kernels]
        return [
            arena["y"].download(np.float32, shape)
            for arena, shape in zip(self.memory, shapes, strict=True)
        ]


@pytest.fixture(params=[2, 4])
def ranks(
    request: pytest.FixtureRequest, device_name: str, needs_gpus: Callable[[int], None]
) -> Iterator[Ranks]:
    needs_gpus(request.param)
    with Group.open(device_name, request.param) as group:
        yield Ranks(group)


@pytest.fixture(params=[2, 4])
def emulated_ranks(request: pytest.FixtureRequest) -> Iterator[Ranks]:
    """For faults, which would end what other tests have on a GPU."""
    with Group.open("emulator", request.param) as group:
        yield Ranks(group)


def values(rng: np.random.Generator, count: int, *shape: int) -> list[Any]:
    return [rng.standard_normal(shape).astype(np.float32) for _ in range(count)]


def in_order(parts: Sequence[Any]) -> Any:
    total = parts[0].copy()
    for part in parts[1:]:
        total += part
    return total


def test_every_rank_has_the_sum_in_the_order_of_the_ranks(ranks: Ranks) -> None:
    rng, count = np.random.default_rng(3), len(ranks.group)
    for n in (1, 33, 257, 1000, 255):  # epochs go on, whatever the number of values
        kernels = [AllReduce(n, count, rank, CAPACITY) for rank in range(count)]
        x = values(rng, count, n)
        for y in ranks.run(kernels, x=x):
            assert (y == in_order(x)).all()


@pytest.mark.sanitizer
def test_a_residual_is_added_to_the_sum(ranks: Ranks) -> None:
    rng, count = np.random.default_rng(4), len(ranks.group)
    kernels = [AllReduce(300, count, rank, CAPACITY, residual=True) for rank in range(count)]
    x, residual = values(rng, count, 300), values(rng, 1, 300) * count
    for y in ranks.run(kernels, x=x, residual=residual):
        assert (y == residual[0] + in_order(x)).all()


@pytest.mark.sanitizer
def test_a_replayed_graph_is_what_launches_are(ranks: Ranks) -> None:
    rng, count = np.random.default_rng(5), len(ranks.group)
    kernels = [AllReduce(513, count, rank, CAPACITY) for rank in range(count)]
    with ExitStack() as owners:
        graphs = [
            owners.enter_context(record(ranks.plan(kernel), device))
            for kernel, device in zip(kernels, ranks.group, strict=True)
        ]
        for _ in range(5):
            x = values(rng, count, 513)
            ranks.put(x=x)
            launch_together([*zip(graphs, ranks.streams, strict=True)])
            ranks.group.synchronize()
            replayed = ranks.results(kernels)
            for y in (*replayed, *ranks.run(kernels, x=x)):
                assert (y == in_order(x)).all()


@pytest.mark.parametrize("rows", [1, 3])
def test_every_rank_has_the_parts_side_by_side(ranks: Ranks, rows: int) -> None:
    rng, count = np.random.default_rng(6), len(ranks.group)
    widths = (100, 33, 257, 1)[:count]
    kernels = [AllGather.of(rows, widths, rank, CAPACITY) for rank in range(count)]
    for _ in range(3):
        x = [rng.standard_normal((rows, width)).astype(np.float32) for width in widths]
        for y in ranks.run(kernels, x=x):
            assert (y == np.concatenate(x, axis=1)).all()


@pytest.mark.sanitizer
def test_sums_and_parts_take_turns_in_one_inbox(ranks: Ranks) -> None:
    rng, count = np.random.default_rng(7), len(ranks.group)
    for number in range(6):
        n = 700 - 97 * number
        x = values(rng, count, n)
        summed = ranks.run([AllReduce(n, count, r, CAPACITY) for r in range(count)], x=x)
        widths = (n,) * count
        parts = ranks.run([AllGather.of(1, widths, r, CAPACITY) for r in range(count)], x=x)
        for y, all_parts in zip(summed, parts, strict=True):
            assert (y == in_order(x)).all()
            assert (all_parts == np.concatenate(x)).all()


@pytest.mark.sanitizer
def test_products_are_given_as_they_are_made(ranks: Ranks) -> None:
    check_given(ranks)


def check_given(ranks: Ranks) -> None:
    """The same graphs replayed, with sums by themselves and in the next product; other exchanges of
    the same inboxes come between."""
    rng, count, rows = np.random.default_rng(12), len(ranks.group), 320
    with ExitStack() as owners:
        graphs, products = [], []
        for rank, device in enumerate(ranks.group):
            gives = Gives(count, rank, CAPACITY)
            product = Gemv.of(FORMATS["Q4_K"], rows, 256, Send(gives), activations="i16")
            total = AllReduce(rows, count, rank, CAPACITY, residual=True, given=True)
            weights = device.allocate(product.layout.nbytes, "weights")
            weights.upload(product.make_inputs(rng)["weights"])
            own = device.allocate(4 * rows, "own")
            words = {f"inbox{other}": ranks.memory[other]["inbox"] for other in gives.others}
            words |= {name: ranks.memory[rank][name] for name in ("epochs", "sent")}
            plans = [Plan(f"rank {rank}"), Plan(f"rank {rank}, next product")]
            for plan in plans:
                plan.launch(
                    product, "product", weights=weights, x=ranks.memory[rank]["x"], y=own, **words
                )
            plans[0].launch(total, "sum", **ranks.arguments(total) | {"x": own})
            takes = Gemv.of(FORMATS["F32"], 40, rows, RankAdd(SumOfRanks(count, rank, CAPACITY)))
            next_weights = device.allocate(takes.layout.nbytes, "next weights")
            next_weights.fill(0)
            plans[1].launch(
                takes,
                "next product",
                weights=next_weights,
                x=own,
                before=ranks.memory[rank]["residual"],
                y=device.allocate(4 * 40, "next product"),
                stream=ranks.memory[rank]["y"],
                fault=ranks.faults[rank],
                **{f"inbox{rank}": ranks.memory[rank]["inbox"]},
                **{name: ranks.memory[rank][name] for name in ("epochs", "sent")},
            )
            graphs.append([owners.enter_context(record(plan, device)) for plan in plans])
            products.append(own)
        for number in range(6):
            x, residual = values(rng, count, 256), values(rng, 1, rows) * count
            ranks.put(x=x, residual=residual)
            chosen = [of[number % 2] for of in graphs]
            launch_together([*zip(chosen, ranks.streams, strict=True)])
            ranks.group.synchronize()
            given = [own.download(np.float32, rows) for own in products]
            assert all(np.abs(part).max() > 0 for part in given)
            for arena in ranks.memory:
                y = arena["y"].download(np.float32, (rows,))
                assert (y == residual[0] + in_order(given)).all()
            n = 1 + 100 * number
            x = values(rng, count, n)
            for y in ranks.run([AllReduce(n, count, r, CAPACITY) for r in range(count)], x=x):
                assert (y == in_order(x)).all()


def two_shots(n: int, ranks: int, **fields: Any) -> list[AllReduceTwoShot]:
    """One for each rank."""
    fields = {"most_ctas": CTAS, **fields}
    return [AllReduceTwoShot(n, ranks, rank, PART, **fields) for rank in range(ranks)]


@pytest.mark.sanitizer
def test_two_shots_give_the_bits_of_one(ranks: Ranks) -> None:
    """Parts of any size, with and without a rest; rounds go on, and any rank may lag behind."""
    rng, count = np.random.default_rng(10), len(ranks.group)
    for n in (4, 2 * PART, 1036, 5000, 8):
        x, residual = values(rng, count, n), values(rng, 1, n) * count
        for y in ranks.run(two_shots(n, count), x=x):
            assert (y == in_order(x)).all()
        kernels = two_shots(n, count, residual=True)
        for y in ranks.run(kernels, x=x, residual=residual):
            assert (y == residual[0] + in_order(x)).all()


def test_two_shots_are_replayed_in_place_among_others(ranks: Ranks) -> None:
    """y is x, and the same graph has a sum in one shot after it."""
    rng, count, n = np.random.default_rng(11), len(ranks.group), 3000
    with ExitStack() as owners:
        graphs = []
        for kernel in two_shots(n, count, residual=True):
            own = ranks.memory[kernel.rank]
            given = ranks.arguments(kernel) | {"y": own["x"].slice(0, 4 * n)}
            both = Plan("both")
            both.launch(kernel, "two shots", **given)
            both.extend([*ranks.plan(AllReduce(CAPACITY, count, kernel.rank, CAPACITY))])
            graphs.append(owners.enter_context(record(both, ranks.group[kernel.rank])))
        for _ in range(4):
            x, residual = values(rng, count, n), values(rng, 1, n) * count
            ranks.put(x=x, residual=residual)
            launch_together([*zip(graphs, ranks.streams, strict=True)])
            ranks.group.synchronize()
            first = residual[0] + in_order(x)
            for arena in ranks.memory:
                assert (arena["x"].download(np.float32, (n,)) == first).all()
                twice = in_order([first[:CAPACITY]] * count)
                assert (arena["y"].download(np.float32, (CAPACITY,)) == twice).all()


def test_a_rank_that_never_comes_is_named(emulated_ranks: Ranks) -> None:
    ranks = emulated_ranks
    count = len(ranks.group)
    faults = ranks.faults
    ranks.group.notes.append(lambda: describe_fault(int(faults[0].view(np.uint64, 1)[0])))
    late = count - 1
    kernels = [AllReduce(40, count, rank, CAPACITY, polls=40) for rank in range(count)]
    x = values(np.random.default_rng(8), count, 40)
    ranks.run(kernels, x=x)
    for rank in range(late):
        run(ranks.plan(kernels[rank]), ranks.group[rank], ranks.streams[rank])
    with pytest.raises(CudaError, match=f"timed out waiting for rank {late}, in epoch 2") as caught:
        ranks.streams[0].synchronize()
    assert f"rank {late}, emulator:sm_90a/{late}: no fault of its own" in str(caught.value)
    with pytest.raises(GroupError, match="close the group"):
        ranks.streams[late].synchronize()


def test_a_rank_that_never_comes_to_two_shots_is_named(emulated_ranks: Ranks) -> None:
    ranks, count = emulated_ranks, len(emulated_ranks.group)
    faults, late = ranks.faults, count - 1
    ranks.group.notes.append(lambda: describe_fault(int(faults[0].view(np.uint64, 1)[0])))
    for kernel in two_shots(40, count, polls=2000)[:late]:
        run(ranks.plan(kernel), ranks.group[kernel.rank], ranks.streams[kernel.rank])
    with pytest.raises(CudaError, match=f"timed out waiting for rank {late}, in epoch 1"):
        ranks.streams[0].synchronize()


def test_exchanges_have_no_races() -> None:
    with Group.open("emulator", 2, api=emulated(device_count=2, sanitize=True)) as group:
        ranks, rng = Ranks(group), np.random.default_rng(9)
        for n in (300, 17):
            x = values(rng, 2, n)
            for y in ranks.run([AllReduce(n, 2, rank, CAPACITY) for rank in range(2)], x=x):
                assert (y == in_order(x)).all()
            gathers = [AllGather.of(1, (n, n), rank, CAPACITY) for rank in range(2)]
            for y in ranks.run(gathers, x=x):
                assert (y == np.concatenate(x)).all()
        for n in (5000, 60):
            x = values(rng, 2, n)
            for y in ranks.run(two_shots(n, 2), x=x):
                assert (y == in_order(x)).all()
        check_given(ranks)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ranks": 1}, "rank 0 of 1"),
        ({"rank": 2}, "rank 2 of 2"),
        ({"capacity": 1000}, "multiple of 256"),
        ({"n": 1025}, "room for 1024"),
        ({"n": 0}, "0 values"),
        ({"polls": 0}, "0 polls"),
        ({"n": 64, "cols": 48}, "multiple of 32"),
        ({"n": 64, "cols": 96}, "64 values as rows of 96"),
    ],
)
def test_exchanges_that_cannot_be_are_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(PtxgenError, match=message):
        AllReduce(**{"n": 5, "ranks": 2, "rank": 0, "capacity": 1024, **fields})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"ranks": 1}, "rank 0 of 1"),
        ({"n": 6}, "a multiple of 4"),
        ({"capacity": 1000}, "room for 1000"),
        ({"capacity": 1 << 22}, "at most 2097152"),
        ({"most_ctas": 257}, "257 CTAs"),
        ({"n": 1 << 15, "capacity": 1 << 14, "most_ctas": 1}, "1 CTAs for parts of 16384"),
    ],
)
def test_two_shots_that_cannot_be_are_refused(fields: dict[str, int], message: str) -> None:
    with pytest.raises(PtxgenError, match=message):
        AllReduceTwoShot(**{"n": 4096, "ranks": 2, "rank": 0, "capacity": 2048, **fields})


def test_products_that_cannot_be_given_are_refused() -> None:
    q8 = FORMATS["Q8_0"]
    with pytest.raises(PtxgenError, match="300 values of a rank, inboxes have room for 256"):
        Gemv.of(q8, 300, 64, Send(Gives(2, 0, 256)))
    with pytest.raises(PtxgenError, match="rank 2 of 2"):
        Gemv.of(q8, 3, 64, Send(Gives(2, 2, 256)))
    with pytest.raises(PtxgenError, match="send is for the product of one matrix"):
        Gemv.of(q8, 3, 64, Send(Gives(2, 0, 256)), others=((q8, 3),))


def test_widths_are_of_the_ranks() -> None:
    with pytest.raises(PtxgenError, match="widths"):
        AllGather(10, 2, 0, 256, widths=(10,))
    with pytest.raises(PtxgenError, match="do not divide into rows of 3"):
        AllGather(10, 2, 0, 256, widths=(3, 4))
    assert rounded(1) == 256
    assert describe_fault(0) == ""
