"""Short causal convolution along a sequence; its state is the earlier tokens that it needs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.recurrent.rows import SEGMENT_ROWS, RecurrentRows, rows_of_drafts
from urdir.ptxgen.kernels.speculation.limits import MOST_DRAFTS
from urdir.ptxgen.limits import POSITIVE, limited
from urdir.ptxgen.spec import Access, Array, LaunchShape, Param, Tolerance, ceil_div
from urdir.ptxgen.weights.layout import TILE_COLS
from urdir.ptxgen.weights.packed import GROUP, pack, packed_shape

#: Channels per CTA, one per thread.
THREADS = 128
#: A tile of rows needs none but the one before it.
MAX_TAPS = SEGMENT_ROWS + 1
#: Convolutions of a launch, at most: of queries, keys and values.
MOST_BESIDE = 3


def tail_slots(taps: int, most: int) -> int:
    """Values per channel and sequence that a convolution keeps, in steps of up to ``most`` drafts
    of a sequence; see `CausalConv`."""
    return 1 << (taps - 1 + most).bit_length() if most else taps - 1


@dataclass(frozen=True)
class CausalConv(RecurrentRows):
    """y[t, c] = f(sum over j of weight[c, j] u[t - taps + 1 + j, c] + bias[c]), of each channel.

    u is x, or with ``gated`` x * input_gate; y is then multiplied by output_gate (LFM2). ``tail``
    holds the last taps - 1 values of u of each sequence, oldest first; the launch updates it.

    In sessions whose steps verify up to ``most`` drafts of a sequence, ``tail`` is a ring: the
    value of a position is at slot position % ``slots``. Nothing else says which drafts were
    accepted: values of others are overwritten before they are read. Where rows are ``drafted``,
    several may be of one sequence, at consecutive positions side by side.

    With ``packs`` (`can_pack`) y is also written as ``packed`` f16 for products (`weights.packed`).

    ``beside``: as many convolutions alike, with inputs, weights, tails and results of their own:
    x, x1, ... They are neither gated nor packed.
    """

    channels: int
    taps: int
    bias: bool = False
    activation: Activation | None = None
    gated: bool = False
    most: int = 0
    drafted: bool = False
    packs: bool = False
    beside: int = 1

    name = "causal_conv"
    limits = limited(
        **RecurrentRows.limits,
        channels=POSITIVE,
        taps=range(2, MAX_TAPS + 1),
        most=range(MOST_DRAFTS + 1),
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.drafted and not self.most:
            raise PtxgenError(f"{self.name}: drafted rows of no drafts")
        self.check_segments()
        if self.packs and not self.can_pack(self.rows, self.channels):
            raise PtxgenError(f"{self.name}: {self.rows} rows of {self.channels} channels packed")
        if not 1 <= self.beside <= MOST_BESIDE or (self.beside > 1 and (self.gated or self.packs)):
            raise PtxgenError(
                f"{self.name}: {self.beside} side by side: 1 to {MOST_BESIDE}, neither gated nor "
                "packed"
            )

    def check_segments(self) -> None:
        """Raise PtxgenError for rows that another kernel handles."""
        if self.segments:
            raise PtxgenError("causal_conv: segments are prefill_conv's")

    @staticmethod
    def can_pack(rows: int, channels: int) -> bool:
        """Whether ``packs`` is supported: places beyond the last row or channel would not be
        cleared."""
        return rows % GROUP == 0 and channels % TILE_COLS == 0

    @property
    def groups(self) -> int:
        """Groups of packed rows."""
        return ceil_div(self.rows, GROUP)

    @property
    def before(self) -> int:
        """Number of earlier values that a result needs."""
        return self.taps - 1

    @property
    def slots(self) -> int:
        """Values of u per channel and sequence in ``tail``: of a ring a power of two, with room for
        the rows of a step beside what they read."""
        return tail_slots(self.taps, self.most)

    @property
    def params(self) -> tuple[Param, ...]:
        matrix, gates = ("rows", "channels"), ("input_gate", "output_gate") if self.gated else ()
        packed, tails = packed_shape(self.rows, self.channels), ("sequences", "slots", "channels")
        return (
            *self._each("x", matrix),
            *(Param(name, "f32", matrix, Access.IN) for name in gates),
            *self._each("weight", ("channels", "taps")),
            *(self._each("bias", ("channels",)) if self.bias else ()),
            *self.row_params,
            *self._each("tail", tails, Access.INOUT),
            *self._each("y", matrix, Access.OUT),
            *((Param("packed", "f16", packed, Access.OUT),) if self.packs else ()),
        )

    @property
    def names(self) -> tuple[str, ...]:
        """The parameters that each of several convolutions has of its own."""
        return ("x", "weight", *(("bias",) if self.bias else ()), "tail", "y")

    def _each(
        self, name: str, shape: tuple[str | int, ...], access: Access = Access.IN
    ) -> tuple[Param, ...]:
        """That parameter of each."""
        numbers = range(self.beside)
        return tuple(Param(f"{name}{n or ''}", "f32", shape, access) for n in numbers)

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(
            grid=(ceil_div(self.channels, THREADS), self.rows, self.beside),
            block=(THREADS, 1, 1),
        )

    @property
    def tolerance(self) -> Tolerance:
        exact = Tolerance(rtol=2e-6)
        return exact.rounded_to("f16") if self.packs else exact

    def reference(self, **inputs: Any) -> dict[str, Array]:
        made: dict[str, Array] = {}
        for tag in ("", *map(str, range(1, self.beside))):
            own = {name: inputs[f"{name}{tag}"] for name in self.names if name != "y"}
            made |= {f"{name}{tag}": of for name, of in self._reference(inputs | own).items()}
        return made

    def _reference(self, inputs: Mapping[str, Any]) -> dict[str, Array]:
        """That of one convolution."""
        u = inputs["x"].astype(np.float64)
        if self.gated:
            u = u * inputs["input_gate"]
        windows, tail = (_ring if self.most else _shifted)(self, inputs, u)
        y = np.einsum("rjc,cj->rc", windows, inputs["weight"].astype(np.float64))
        if self.bias:
            y += inputs["bias"]
        if self.activation is not None:
            y = self.activation(y)
        if self.gated:
            y *= inputs["output_gate"]
        idle = np.ones(self.rows, np.bool_)
        idle[[row for row, _, _ in self.tokens(inputs)]] = False
        y[idle] = 0.0
        packed = {"packed": pack(y)} if self.packs else {}
        return {"tail": tail.astype(np.float32), "y": y.astype(np.float32), **packed}

    def make_rows(self, rng: np.random.Generator) -> dict[str, Any]:
        if not self.drafted:
            return super().make_rows(rng)
        rows = rows_of_drafts(self, rng, self.most)
        return {name: x for name, x in rows.items() if name != "state_at"}

    @classmethod
    def examples(cls) -> Mapping[str, CausalConv]:
        silu = Activation("silu")
        return {
            "one row": cls(1, 2, 64, 0, channels=37, taps=4, activation=silu),
            "one row, gated": cls(1, 1, 64, 0, channels=64, taps=3, gated=True),
            "rows": cls(6, 5, 64, 0, channels=200, taps=4, bias=True, activation=silu),
            "rows, gated": cls(5, 7, 32, 0, channels=130, taps=3, gated=True),
            "two taps": cls(2, 2, 64, 0, channels=12, taps=2, bias=True),
            "nine taps": cls(3, 2, 64, 0, channels=12, taps=9),
            "ring": cls(5, 4, 64, 0, channels=130, taps=4, bias=True, most=3),
            "drafts": cls(23, 7, 64, 0, channels=37, taps=4, activation=silu, most=7, drafted=True),
            "gated drafts": cls(9, 3, 64, 0, channels=40, taps=3, gated=True, most=2, drafted=True),
            "packed": cls(16, 20, 64, 0, channels=256, taps=4, activation=silu, packs=True),
            "packed, gated": cls(24, 9, 64, 0, channels=512, taps=3, gated=True, packs=True),
            "three": cls(1, 3, 64, 0, channels=140, taps=4, activation=silu, beside=3),
            "two, rows": cls(5, 7, 64, 0, channels=37, taps=3, bias=True, beside=2),
            "three rings": cls(5, 4, 64, 0, channels=130, taps=4, most=3, beside=3),
            "packed ring": cls(8, 9, 64, 0, channels=256, taps=4, bias=True, most=3, packs=True),
        }

    def flops(self) -> int:
        return 2 * self.beside * self.rows * self.channels * self.taps


def _shifted(spec: CausalConv, inputs: Mapping[str, Any], u: Array) -> tuple[Array, Array]:
    """The values that each row reads (rows, taps, channels), and the tails after them."""
    tails = inputs["tail"].astype(np.float64)
    windows = np.zeros((spec.rows, spec.taps, spec.channels))
    for row, sequence, is_first in spec.tokens(inputs):
        tail = tails[sequence] * (not is_first)
        windows[row] = np.concatenate([tail, u[row : row + 1]])
        tails[sequence] = windows[row, 1:]
    return windows, tails


def _ring(spec: CausalConv, inputs: Mapping[str, Any], u: Array) -> tuple[Array, Array]:
    """The same of tails by position. Of a prompt's segment only the last values are stored."""
    before, after = (inputs["tail"].astype(np.float64) for _ in range(2))
    windows = np.zeros((spec.rows, spec.taps, spec.channels))
    rows = {(s, int(inputs["position"][row])): row for row, s, _ in spec.tokens(inputs)}
    for (s, position), row in rows.items():
        for tap in range(spec.taps):
            at = position - spec.before + tap
            if (s, at) in rows:
                windows[row, tap] = u[rows[s, at]]
            elif at >= 0:
                windows[row, tap] = before[s, at % spec.slots]
        if not spec.segments or (s, position + spec.before) not in rows:
            after[s, position % spec.slots] = u[row]
    return windows, after
