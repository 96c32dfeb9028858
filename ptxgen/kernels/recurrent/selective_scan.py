"""Mamba's selective scan: a state of a few values per channel, each with its own decay."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.recurrent.rows import RecurrentRows
from urdir.ptxgen.limits import POSITIVE, limited
from urdir.ptxgen.spec import Access, Array, LaunchShape, Param, Tolerance, ceil_div
from urdir.ptxgen.weights.layout import TILE_COLS
from urdir.ptxgen.weights.packed import GROUP, pack, packed_shape

THREADS = 128
#: Maximum values of a channel's state per lane.
MAX_VALUES = 64


@dataclass(frozen=True)
class SelectiveScan(RecurrentRows):
    """h = exp(dt a) h + dt x b,  y = (h . c + skip x) silu(gate),  dt = softplus(step), for each
    channel (Gu & Dao 2023, arXiv 2312.00752).

    h and ``a`` (channels, size) have ``size`` values per channel, which share b and c (rows, size);
    x, ``step`` and ``gate`` (rows, channels) are per channel. With ``packs`` (`can_pack`) y is
    packed f16 for the next product (`weights.packed`).
    """

    channels: int
    size: int
    packs: bool = False

    activation: ClassVar = Activation("silu")
    #: Neighbouring lanes that share a channel, each with two of every eight values.
    lanes: ClassVar = 4
    name = "selective_scan"
    limits = limited(**RecurrentRows.limits, channels=POSITIVE, size=range(8, 1 << 31, 8))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.size // self.lanes > MAX_VALUES:
            raise PtxgenError(
                f"selective_scan: {self.size} values: at most {MAX_VALUES} for each of "
                f"{self.lanes} lanes"
            )
        self.check_segments()
        if self.packs and not self.can_pack(self.rows, self.channels, self.size):
            raise PtxgenError(
                f"{self.name}: {self.size} values of {self.rows} rows of {self.channels} channels "
                "packed"
            )

    @staticmethod
    def can_pack(rows: int, channels: int, size: int) -> bool:
        """Whether ``packs`` is supported: places beyond the last row or channel would not be
        cleared."""
        return rows % GROUP == 0 and channels % TILE_COLS == 0

    @property
    def groups(self) -> int:
        """Groups of packed rows."""
        return ceil_div(self.rows, GROUP)

    def check_segments(self) -> None:
        """Raise PtxgenError for rows that another kernel handles."""
        if self.segments:
            raise PtxgenError("selective_scan: segments are prefill_scan's")

    @property
    def sums(self) -> int:
        """Sums per lane, one for every second of its pairs if their number is even: as eight lanes
        would have them (`PrefillScan`)."""
        return 1 if self.size % 16 else 2

    @property
    def own_channels(self) -> int:
        """Channels per CTA."""
        return THREADS // self.lanes

    @property
    def params(self) -> tuple[Param, ...]:
        matrix, shared = ("rows", "channels"), ("rows", "size")
        return (
            Param("x", "f32", matrix, Access.IN),
            Param("step", "f32", matrix, Access.IN),
            Param("gate", "f32", matrix, Access.IN),
            Param("b", "f32", shared, Access.IN),
            Param("c", "f32", shared, Access.IN),
            Param("a", "f32", ("channels", "size"), Access.IN),
            Param("skip", "f32", ("channels",), Access.IN),
            *self.row_params,
            Param("state", "f32", ("sequences", "channels", "size"), Access.INOUT),
            self.out_param,
        )

    @property
    def out_param(self) -> Param:
        """The results."""
        if self.packs:
            return Param("y", "f16", packed_shape(self.rows, self.channels), Access.OUT)
        return Param("y", "f32", ("rows", "channels"), Access.OUT)

    @property
    def launch_shape(self) -> LaunchShape:
        ctas = ceil_div(self.channels, self.own_channels)
        return LaunchShape(grid=(ctas, self.rows, 1), block=(THREADS, 1, 1))

    @property
    def tolerance(self) -> Tolerance:
        # exp and softplus are approximated; a state carries errors from token to token
        exact = Tolerance(rtol=1e-5)
        return exact.rounded_to("f16") if self.packs else exact

    def reference(self, **inputs: Any) -> dict[str, Array]:
        states = inputs["state"].astype(np.float64)
        y = np.zeros((self.rows, self.channels))
        for row, sequence, is_first in self.tokens(inputs):
            token = {name: inputs[name][row] for name in ("x", "step", "b")}
            states[sequence] = moved(states[sequence] * (not is_first), inputs["a"], token)
            y[row] = result(inputs, row, states[sequence])
        made = pack(y) if self.packs else y.astype(np.float32)
        return {"state": states.astype(np.float32), "y": made}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Decays between 0 and 1, as models have them; see `make_rows`."""
        inputs = super().make_inputs(rng)
        inputs["a"] = -np.exp(inputs["a"])
        return inputs

    @classmethod
    def examples(cls) -> Mapping[str, SelectiveScan]:
        single = partial(cls, max_len=64, segments=0)
        return {
            "one row": single(1, 2, channels=10, size=8),
            "rows": single(6, 5, channels=70, size=16),
            "long states": single(3, 3, channels=33, size=248),
            "odd eights": single(2, 2, channels=9, size=24),
            "packed": single(16, 20, channels=256, size=16, packs=True),
            "packed odd eights": single(8, 6, channels=512, size=24, packs=True),
        }

    def flops(self) -> int:
        return 6 * self.rows * self.channels * self.size

    def bytes_moved(self) -> int:
        """The states of the rows' sequences, the decays, and the rows."""
        states = (8 * (self.segments or self.rows) + 4) * self.channels * self.size
        return states + 4 * self.rows * (4 * self.channels + 2 * self.size)


def moved(state: Array, a: Array, token: Mapping[str, Array]) -> Array:
    """A sequence's state (channels, size) f64 after a ``token`` with its x, step and b."""
    x, step, b = (token[name].astype(np.float64) for name in ("x", "step", "b"))
    dt = np.logaddexp(0.0, step)[:, None]
    after: Array = state * np.exp(dt * a) + dt * x[:, None] * b
    return after


def result(inputs: Mapping[str, Any], row: int, state: Array) -> Array:
    """y (channels,) of a row, f64, from the state after it."""
    x, c = (inputs[name][row].astype(np.float64) for name in ("x", "c"))
    y: Array = state @ c + inputs["skip"] * x
    return y * SelectiveScan.activation(inputs["gate"][row])
