"""Causal convolution along a sequence whose taps lie apart; its state is a ring of inputs."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.limits import GRID_ROWS, POSITIVE, POWERS_OF_TWO, limited
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance, ceil_div

#: Channels of a CTA, one for each thread.
THREADS = 128
#: The furthest token that a result depends on, at most.
MOST_BACK = 255


def ring_slots(back: int, most: int = 0) -> int:
    """Values of a channel that a sequence keeps, for results that depend on tokens up to ``back``
    places before, in steps of up to ``most`` drafts: a power of two."""
    return 1 << (back + most).bit_length()


@dataclass(frozen=True)
class DilatedConv(KernelSpec):
    """y[t, c] = silu(sum over j of weight[c, j] x[t - (taps - 1 - j) * dilation, c]).

    Inputs of tokens before the step are in ``tail``, that of a position in slot position % slots;
    those before the first token are 0. The launch reads it; another one with ``stores`` writes the
    step's inputs to it, and no result. Rows of a sequence are side by side, at consecutive
    positions. A row with a position from ``max_len`` on is a padding row, with zeros.
    """

    channels: int
    taps: int
    dilation: int
    slots: int
    max_len: int
    rows: int = 1
    sequences: int = 1
    stores: bool = False

    name = "dilated_conv"
    limits = limited(
        channels=POSITIVE,
        rows=GRID_ROWS,
        taps=range(2, 1 << 31),
        dilation=POSITIVE,
        slots=POWERS_OF_TWO,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.back > MOST_BACK or self.slots <= self.back:
            raise PtxgenError(
                f"dilated_conv: {self.slots} slots for tokens up to {self.back} places before: "
                f"more than that, which is {MOST_BACK} at most"
            )

    @property
    def back(self) -> int:
        """The furthest token that a result depends on, in places before its own."""
        return (self.taps - 1) * self.dilation

    @property
    def params(self) -> tuple[Param, ...]:
        matrix, tail = ("rows", "channels"), ("sequences", "slots", "channels")
        weight = Param("weight", "f32", ("channels", "taps"), Access.IN)
        return Param.given(
            Param("x", "f32", matrix, Access.IN),
            *(() if self.stores else (weight,)),
            Param("sequence", "u32", ("rows",), Access.IN),
            Param("position", "u32", ("rows",), Access.IN),
            Param("tail", "f32", tail, Access.INOUT if self.stores else Access.IN),
            not self.stores and Param("y", "f32", matrix, Access.OUT),
        )

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(
            grid=(ceil_div(self.channels, THREADS), self.rows, 1), block=(THREADS, 1, 1)
        )

    @property
    def tolerance(self) -> Tolerance:
        return Tolerance(rtol=1e-7 if self.stores else 5e-6)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        x, tail = inputs["x"].astype(np.float64), inputs["tail"].copy()
        at = list(zip(inputs["sequence"].tolist(), inputs["position"].tolist(), strict=True))
        rows = {key: row for row, key in enumerate(at) if key[1] < self.max_len}
        if self.stores:
            for (sequence, position), row in rows.items():
                if (sequence, position + self.slots) not in rows:
                    tail[sequence, position % self.slots] = inputs["x"][row]
            return {"tail": tail}
        y = np.zeros_like(x)
        for (sequence, position), row in rows.items():
            for tap in range(self.taps):
                place = position - (self.taps - 1 - tap) * self.dilation
                if (sequence, place) in rows:
                    value = x[rows[sequence, place]]
                elif place >= 0:
                    value = tail[sequence, place % self.slots].astype(np.float64)
                else:
                    continue
                y[row] += inputs["weight"][:, tap] * value
        return {"y": (y / (1.0 + np.exp(-y))).astype(np.float32)}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Runs of rows of different sequences, the first at position 0; the last row of more than
        two is a padding row."""
        inputs = super().make_inputs(rng)
        cuts = sorted(rng.choice(self.rows, min(self.sequences, self.rows), replace=False))
        cuts = [0, *(cut for cut in cuts if cut), self.rows][: self.sequences + 1]
        cuts[-1] = self.rows
        sequence, position = np.zeros(self.rows), np.zeros(self.rows)
        order = rng.permutation(self.sequences)
        for number, (start, stop) in enumerate(pairwise(cuts)):
            first = rng.integers(1, self.max_len - (stop - start)) if number else 0
            sequence[start:stop] = order[number]
            position[start:stop] = first + np.arange(stop - start)
        if self.rows > 2:
            position[-1] = self.max_len + 2
        at = {"sequence": sequence, "position": position}
        return inputs | {name: of.astype(np.uint32) for name, of in at.items()}

    @classmethod
    def examples(cls) -> dict[str, DilatedConv]:
        return {
            "one row": cls(130, 4, 3, 16, 64),
            "rows": cls(37, 4, 3, 16, 96, 45, 4),
            "two taps": cls(140, 2, 5, 8, 64, 5, 6),
            "one apart": cls(64, 3, 1, 4, 64, 9, 2),
            "stored row": cls(130, 4, 3, 16, 64, stores=True),
            "stored rows": cls(37, 4, 3, 16, 96, 45, 4, stores=True),
        }

    def flops(self) -> int:
        return 0 if self.stores else 2 * self.rows * self.channels * self.taps
