"""Two-shot all-reduce for many values: each rank adds one part and distributes its sums.

Values go to the *stage* of another rank, (2, ranks, capacity) f32: addends for its part, and its
sums of the others. After each of the two a CTA sets a flag in the memory of every other rank, (2,
ranks, ctas) u32, to its round number, and waits for theirs. So each rank sends 2 (ranks - 1) /
ranks of its bytes, where one-shot (`AllReduce`) sends ranks - 1 times its words, of twice as many
bytes.

A stage needs no second half. A rank writes to the first area of the next round after its own round
has ended, for which it received the flags of all CTAs, set after they had read that area; and to
the second after it received the next round's flag, which the other set when its round had ended.

``rounds`` (ctas,) u32 count the completed rounds of a rank's CTAs, as ``epochs`` do in `spec`, and
``fault`` likewise names a rank that was waited for without success.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.exchange.spec import POLLS, THREADS, OneOfRanks, check_ranks
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance, ceil_div

#: Maximum CTAs per launch: all are resident, since they wait for each other.
MOST_CTAS = 256
#: Maximum vectors of four values per thread, for every part.
MOST_VECTORS = 8
#: Maximum values of a part.
MOST_PART = 4 * THREADS * MOST_VECTORS * MOST_CTAS


def part_of(values: int, ranks: int) -> int:
    """Values that a rank adds; the last ranks may have fewer."""
    return 4 * ceil_div(values, 4 * ranks)


def stage_sizes(ranks: int, capacity: int) -> dict[str, int]:
    """Bytes of every rank's memory for parts of up to ``capacity`` values, by name."""
    return {
        "stage": 4 * 2 * ranks * capacity,
        "flags": 4 * 2 * ranks * MOST_CTAS,
        "rounds": 4 * MOST_CTAS,
    }


@dataclass(frozen=True)
class AllReduceTwoShot(OneOfRanks, KernelSpec):
    """The sum of the ranks' vectors (n,), added in the order of the ranks; plus a ``residual``.

    n is a multiple of 4, and a rank's part of it at most ``capacity``. All ranks get the same bits,
    those of `AllReduce`.
    """

    n: int
    ranks: int
    rank: int
    capacity: int
    residual: bool = False
    polls: int = POLLS
    most_ctas: int = MOST_CTAS

    name = "all_reduce_two_shot"

    def __post_init__(self) -> None:
        check_ranks(self.name, self.rank, self.ranks, self.polls)
        if self.n < 4 or self.n % 4:
            raise PtxgenError(f"{self.name}: {self.n} values: a multiple of 4")
        if not 1 <= self.most_ctas <= MOST_CTAS or self.vectors > MOST_VECTORS:
            raise PtxgenError(
                f"{self.name}: {self.most_ctas} CTAs for parts of {self.part} values: 1 to "
                f"{MOST_CTAS}, with at most {4 * THREADS * MOST_VECTORS} each"
            )
        if not self.part <= self.capacity <= MOST_PART or self.capacity % 4:
            raise PtxgenError(
                f"{self.name}: parts of {self.part} values, stages have room for {self.capacity}: "
                f"a multiple of 4, at most {MOST_PART}"
            )

    @property
    def part(self) -> int:
        """Values that a rank adds."""
        return part_of(self.n, self.ranks)

    def first(self, rank: int) -> int:
        """The first value of a rank's part."""
        return rank * self.part

    def length(self, rank: int) -> int:
        """Values of a rank's part."""
        return max(0, min(self.part, self.n - self.first(rank)))

    def place(self, area: int, rank: int) -> int:
        """Offset in a stage of the values of ``rank``."""
        return (area * self.ranks + rank) * self.capacity

    def flag(self, area: int, rank: int) -> int:
        """The flag of the first CTA of ``rank``."""
        return (area * self.ranks + rank) * self.most_ctas

    @cached_property
    def vectors(self) -> int:
        """Vectors of a thread, of every part."""
        return ceil_div(self.part, 4 * THREADS * self.most_ctas)

    @property
    def span(self) -> int:
        """Values of a CTA, of every part."""
        return 4 * THREADS * self.vectors

    @property
    def params(self) -> tuple[Param, ...]:
        stage, flags = (2, "ranks", "capacity"), (2, "ranks", "most_ctas")
        return Param.given(
            Param("x", "f32", ("n",), Access.IN),
            self.residual and Param("residual", "f32", ("n",), Access.IN),
            Param("y", "f32", ("n",), Access.OUT),
            *(Param(f"stage{rank}", "f32", stage, Access.INOUT) for rank in range(self.ranks)),
            *(Param(f"flags{rank}", "u32", flags, Access.INOUT) for rank in range(self.ranks)),
            Param("rounds", "u32", ("most_ctas",), Access.INOUT),
            Param("fault", "u64", (1,), Access.INOUT),
        )

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(ceil_div(self.part, self.span), 1, 1), block=(THREADS, 1, 1))

    @property
    def tolerance(self) -> Tolerance:
        return Tolerance.of_sum("f32", terms=self.ranks + self.residual)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        """Where what others give and their sums have come."""
        left = {name: np.copy(value) for name, value in inputs.items() if name not in _READ}
        x, came = inputs["x"], inputs[f"stage{self.rank}"]
        own = slice(self.first(self.rank), self.first(self.rank) + self.length(self.rank))
        count = self.length(self.rank)
        y = np.zeros(self.n, np.float32)
        given = [x[own] if r == self.rank else came[0, r, :count] for r in range(self.ranks)]
        total: Array = np.stack(given).astype(np.float64).sum(axis=0)
        y[own] = total + inputs["residual"][own] if self.residual else total
        ctas = self.launch_shape.grid[0]
        left["rounds"][:ctas] += np.uint32(1)
        for rank in self.others:
            first, length = self.first(rank), self.length(rank)
            y[first : first + length] = came[1, rank, :length]
            left[f"stage{rank}"][0, self.rank, :length] = x[first : first + length]
            left[f"stage{rank}"][1, self.rank, :count] = y[own]
            left[f"flags{rank}"][:, self.rank, :ctas] = left["rounds"][:ctas]
        return {"y": y, **left}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Any rounds; the flags and values of the other ranks have come."""
        inputs = super().make_inputs(rng)
        inputs["rounds"] = rng.integers(0, 2**32, self.most_ctas, np.uint32)
        inputs["fault"] = np.zeros(1, np.uint64)
        for rank in range(self.ranks):
            stage = rng.standard_normal((2, self.ranks, self.capacity))
            inputs[f"stage{rank}"] = stage.astype(np.float32)
            inputs[f"flags{rank}"] = np.zeros((2, self.ranks, self.most_ctas), np.uint32)
        inputs[f"flags{self.rank}"][:] = inputs["rounds"] + np.uint32(1)
        return inputs

    @classmethod
    def examples(cls) -> dict[str, AllReduceTwoShot]:
        return {
            "two ranks": cls(n=2072, ranks=2, rank=0, capacity=1100),
            "the last of four": cls(n=9000, ranks=4, rank=3, capacity=4096, residual=True),
            "no part": cls(n=4, ranks=3, rank=1, capacity=8),
            "several vectors": cls(9300, 2, 1, capacity=4800, residual=True, most_ctas=2),
        }

    def bytes_moved(self) -> int:
        """Values, and what goes through stages."""
        staged = 2 * (self.n - self.length(self.rank)) + 2 * len(self.others) * self.part
        return 4 * (self.n * (2 + self.residual) + staged)

    def flops(self) -> int:
        return self.length(self.rank) * (self.ranks - 1 + self.residual)


_READ = frozenset(("x", "residual"))
