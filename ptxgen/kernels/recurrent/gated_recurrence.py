"""Linear attention with a decaying state: the gated delta rule, by head or by channel (KDA), and
the scalar-decay scan (SSD)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Literal

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.recurrent.rows import RecurrentRows
from urdir.ptxgen.spec import Access, Array, LaunchShape, Param, Tolerance, ceil_div

THREADS = 128
#: Most lanes that share a column of the state; values of it that a lane has, and the most.
MAX_LANES, VALUES, MAX_VALUES = 32, 16, 64
#: Tokens that are brought to shared memory at once, and bytes for what has a value for each key.
TILE, TILE_NBYTES = 16, 32768
#: Neighbouring lanes that find a token's numbers: as many for every tile, so that these have the
#: same bits however a prompt is divided.
TOKEN_LANES = THREADS // TILE

Order = Literal["qkv", "vkq", "apart"]


@dataclass(frozen=True)
class GatedRecurrence(RecurrentRows):
    """Per head a state S (value_dim, key_dim), which each token decays, adds to and reads:

        S = g S + e k^T,  y = scale * S q,  g = exp(a dt),  dt = softplus(alpha + dt_bias)

    - ``delta`` (gated delta rule, Yang et al. 2024, arXiv 2412.06464): q and k are divided by
      their lengths, sqrt(|.|^2 + eps); e = sigmoid(beta) (v - g S k); scale = 1 / sqrt(key_dim);
    - else SSD (Mamba-2, Dao & Gu 2024, arXiv 2405.21060), with k, q and v for its B, C and x:
      e = dt v; scale = 1, and y += skip * v. Where it is ``steady`` (lightning attention, Qin et
      al. 2024, arXiv 2401.04658), dt is 1 for all tokens, and there is no skip.

    With ``channels`` (Kimi Delta Attention, arXiv 2510.26692) each key of a head has a g of its
    own, and alpha and dt_bias have one for each: S = S diag(g) + e k^T. With a ``floor`` below 0,
    g = exp(floor * sigmoid(a (alpha + dt_bias))), which stays above exp(floor); with ``negated``
    -a stands for a.

    A row of ``mixed`` has the heads of q, k and v in that ``order``; "apart", they are arrays of
    their own. ``heads`` of values share ``key_heads`` of q and k: neighbours do, or with ``tiled``
    every key_heads-th. ``gated``: y is multiplied with silu(gate), of single rows.
    """

    heads: int
    key_heads: int
    key_dim: int
    value_dim: int
    delta: bool
    eps: float = 0.0
    order: Order = "qkv"
    tiled: bool = False
    channels: bool = False
    floor: float = 0.0
    negated: bool = False
    steady: bool = False
    gated: bool = False

    name = "gated_recurrence"
    template = ("urdir.templates", "gated_recurrence.ptx.j2")

    def __post_init__(self) -> None:
        super().__post_init__()
        if min(self.heads, self.key_heads, self.value_dim) < 1 or self.heads % self.key_heads:
            raise PtxgenError(
                f"gated_recurrence: {self.heads} heads of {self.value_dim} values with "
                f"{self.key_heads} heads of keys"
            )
        if self.key_dim < 4 or self.key_dim % 4 or (self.heads * self.value_dim) % 4:
            raise PtxgenError(
                f"gated_recurrence: keys of {self.key_dim} and {self.heads} x {self.value_dim} "
                "values: multiples of 4"
            )
        if self.key_dim // self.lanes > MAX_VALUES:
            raise PtxgenError(
                f"gated_recurrence: keys of {self.key_dim}: at most {MAX_VALUES} for each of "
                f"{self.lanes} lanes"
            )
        if self.negated and not self.floor:
            raise PtxgenError("gated_recurrence: negated rates without a floor")
        if self.floor > 0.0 or ((self.channels or self.floor) and not self.delta):
            raise PtxgenError(
                f"gated_recurrence: gates of channels ({self.channels}) and a floor ({self.floor}, "
                "up to 0) belong to the delta rule"
            )
        if self.steady and self.delta:
            raise PtxgenError("gated_recurrence: the delta rule has no steady decay")
        if self.gated and self.segments:
            raise PtxgenError("gated_recurrence: the results of segments are not gated")

    # ---- how a row lies ----

    @property
    def width(self) -> int:
        """Values of a row of q, k and v together."""
        return 2 * self.key_heads * self.key_dim + self.heads * self.value_dim

    @cached_property
    def offsets(self) -> Mapping[str, int]:
        """Where "q", "k" and "v" begin in a row of theirs."""
        keys, values = self.key_heads * self.key_dim, self.heads * self.value_dim
        match self.order:
            case "qkv":
                return {"q": 0, "k": keys, "v": 2 * keys}
            case "vkq":
                return {"v": 0, "k": values, "q": values + keys}
            case "apart":
                return dict.fromkeys("qkv", 0)

    @property
    def arrays(self) -> Mapping[str, str]:
        """The parameters that "q", "k" and "v" are in."""
        return {name: f"{name}_heads" if self.order == "apart" else "mixed" for name in "qkv"}

    @property
    def strides(self) -> Mapping[str, int]:
        """Values from a row of "q", "k" and "v" to the next."""
        if self.order != "apart":
            return dict.fromkeys("qkv", self.width)
        keys, values = self.key_heads * self.key_dim, self.heads * self.value_dim
        return {"q": keys, "k": keys, "v": values}

    @property
    def gates(self) -> int:
        """Values of a row of alpha."""
        return 0 if self.steady else self.heads * (self.key_dim if self.channels else 1)

    @property
    def scale(self) -> float:
        """Of the result."""
        return 1.0 / math.sqrt(self.key_dim) if self.delta else 1.0

    # ---- how it is divided ----

    @property
    def lanes(self) -> int:
        """Neighbouring lanes that share a column of the state: a power of two, each with as many
        vectors of four values."""
        vectors, lanes = self.key_dim // 4, 1
        while 4 * vectors > VALUES * lanes and lanes < MAX_LANES and vectors % (2 * lanes) == 0:
            lanes *= 2
        return lanes

    @property
    def columns(self) -> int:
        """Columns of the state of a CTA."""
        return THREADS // self.lanes

    @property
    def tile(self) -> int:
        """Tokens that are brought at once."""
        nbytes = (12 if self.channels else 8) * self.key_dim
        return min(TILE, self.rows if self.segments else 1, TILE_NBYTES // nbytes)

    @property
    def token_lanes(self) -> int:
        """See `TOKEN_LANES`."""
        return TOKEN_LANES

    @property
    def params(self) -> tuple[Param, ...]:
        by_head = ("heads",)
        state = ("sequences", "heads", "value_dim", "key_dim")
        gates = ("heads", "key_dim") if self.channels else by_head
        alpha = Param("alpha", "f32", ("rows", *gates), Access.IN)
        beta = Param("beta", "f32", ("rows", "heads"), Access.IN)
        skip, rates = (
            Param("skip", "f32", by_head, Access.IN),
            Param("a", "f32", by_head, Access.IN),
        )
        decays = (alpha, beta if self.delta else skip, rates)
        keys, values = ("rows", "key_heads", "key_dim"), ("rows", "heads", "value_dim")
        apart = zip(self.arrays.values(), (keys, keys, values), strict=True)
        return (
            *(
                (Param(name, "f32", shape, Access.IN) for name, shape in apart)
                if self.order == "apart"
                else (Param("mixed", "f32", ("rows", "width"), Access.IN),)
            ),
            *((rates,) if self.steady else (*decays, Param("dt_bias", "f32", gates, Access.IN))),
            *((Param("gate", "f32", values, Access.IN),) if self.gated else ()),
            *self.row_params,
            Param("state", "f32", state, Access.INOUT),
            Param("y", "f32", ("rows", "heads", "value_dim"), Access.OUT),
        )

    @property
    def launch_shape(self) -> LaunchShape:
        parts = ceil_div(self.value_dim, self.columns)
        return LaunchShape(
            grid=(parts, self.heads, self.segments or self.rows), block=(THREADS, 1, 1)
        )

    @property
    def tolerance(self) -> Tolerance:
        # exp and softplus are approximated; a state carries errors from token to token
        return Tolerance(rtol=1e-5)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        states = inputs["state"].astype(np.float64)
        y = np.zeros((self.rows, self.heads, self.value_dim))
        heads = np.arange(self.heads)
        shared = heads % self.key_heads if self.tiled else heads // (self.heads // self.key_heads)
        rates = -inputs["a"] if self.negated else inputs["a"]
        rates = rates[:, None] if self.channels else rates
        before, dt = np.zeros(()), np.ones((self.rows, self.heads))
        if not self.steady:
            before = inputs["alpha"].astype(np.float64) + inputs["dt_bias"]
            dt = np.logaddexp(0.0, before)
        gate = self.floor / (1.0 + np.exp(-before * rates)) if self.floor else dt * rates
        # (rows, heads, 1, keys or 1)
        decay = np.exp(gate).reshape(self.rows, self.heads, 1, -1)
        for row, sequence, is_first in self.tokens(inputs):
            q, k = (self._heads(inputs, row, name)[shared] for name in "qk")
            v = self._heads(inputs, row, "v")
            state = states[sequence] * (decay[row] * (not is_first))
            if self.delta:
                q, k = (x / np.sqrt(np.sum(x * x, 1, keepdims=True) + self.eps) for x in (q, k))
                beta = 1.0 / (1.0 + np.exp(-inputs["beta"][row].astype(np.float64)))
                added = beta[:, None] * (v - np.einsum("hvk,hk->hv", state, k))
            else:
                added = dt[row][:, None] * v
            state = state + added[:, :, None] * k[:, None, :]
            y[row] = self.scale * np.einsum("hvk,hk->hv", state, q)
            if not self.delta and not self.steady:
                y[row] += inputs["skip"][:, None] * v
            states[sequence] = state
        if self.gated:
            y *= Activation("silu")(inputs["gate"])
        return {"state": states.astype(np.float32), "y": y.astype(np.float32)}

    def _heads(self, inputs: Mapping[str, Any], row: int, name: str) -> Array:
        heads, dim = (self.heads, self.value_dim) if name == "v" else (self.key_heads, self.key_dim)
        values, first = inputs[self.arrays[name]][row].ravel(), self.offsets[name]
        part: Array = values[first : first + heads * dim].astype(np.float64)
        return part.reshape(heads, dim)

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Decays between 0 and 1, as models have them; see `make_rows`."""
        inputs = super().make_inputs(rng) | self.make_rows(rng)
        rates = np.exp(inputs["a"] - 1.0)
        inputs["a"] = rates if self.floor and not self.negated else -rates
        return inputs

    @classmethod
    def examples(cls) -> Mapping[str, GatedRecurrence]:
        delta = partial(cls, max_len=64, delta=True, eps=1e-6)
        scan = partial(cls, max_len=64, delta=False, order="vkq")
        steady = partial(scan, order="apart", steady=True)
        by_channel = partial(delta, order="apart", channels=True)

        def heads(count: int, shared: int, key_dim: int, value_dim: int) -> dict[str, Any]:
            sizes = {"heads": count, "key_heads": shared}
            return {**sizes, "key_dim": key_dim, "value_dim": value_dim}

        def rows(count: int, sequences: int) -> dict[str, Any]:
            return {"rows": count, "sequences": sequences, "segments": 0}

        def prompt(count: int, sequences: int, segments: int = 1) -> dict[str, Any]:
            return {**rows(count, sequences), "segments": segments}

        return {
            "one row": delta(**rows(1, 2), **heads(2, 1, 8, 6)),
            "a row of long keys": delta(**rows(1, 1), **heads(4, 2, 128, 128)),
            "rows": delta(**rows(5, 4), **heads(4, 2, 64, 20), tiled=True),
            "odd lanes": delta(**rows(3, 3), **heads(2, 2, 12, 34)),
            "scan, one row": scan(**rows(1, 1), **heads(4, 1, 128, 64)),
            "scan, rows": scan(**rows(6, 5), **heads(6, 3, 16, 10)),
            "a prompt": delta(**prompt(21, 2), **heads(4, 2, 64, 40), tiled=True),
            "a prompt of 8": delta(**prompt(8, 1), **heads(2, 2, 128, 128)),
            "a prompt of one": delta(**prompt(1, 1), **heads(2, 2, 32, 8)),
            "keys of 256": delta(**prompt(18, 1), **heads(1, 1, 256, 20)),
            "scan of a prompt": scan(**prompt(35, 3), **heads(6, 2, 16, 24)),
            "scan, long keys": scan(**prompt(17, 1), **heads(2, 1, 128, 64)),
            "scan of arrays": scan(**rows(3, 2), **heads(4, 1, 16, 12), order="apart"),
            "scan of arrays, a prompt": scan(**prompt(19, 2), **heads(2, 1, 64, 40), order="apart"),
            "gated scan of rows": scan(**rows(3, 4), **heads(4, 2, 32, 20), gated=True),
            "gated delta rule": delta(**rows(1, 1), **heads(2, 1, 64, 32), gated=True),
            "steady, one row": steady(**rows(1, 1), **heads(2, 2, 8, 8)),
            "steady, rows": steady(**rows(4, 3), **heads(3, 3, 20, 24)),
            "steady, a prompt": steady(**prompt(35, 2), **heads(2, 2, 64, 40)),
            "channels, one row": by_channel(**rows(1, 2), **heads(2, 1, 8, 6)),
            "channels, rows": by_channel(
                **rows(5, 4), **heads(3, 3, 12, 20), floor=-5.0, negated=True
            ),
            "channels of a prompt": by_channel(**prompt(21, 2), **heads(2, 2, 128, 40)),
            "channels with a floor": by_channel(
                **prompt(19, 1), **heads(4, 2, 20, 12), tiled=True, floor=-5.0
            ),
            "segments": delta(**prompt(60, 5, segments=4), **heads(4, 2, 32, 20)),
            "scan of segments": scan(**prompt(40, 3, segments=5), **heads(2, 1, 16, 40)),
        }

    def flops(self) -> int:
        return 8 * self.rows * self.heads * self.value_dim * self.key_dim

    def bytes_moved(self) -> int:
        """The states of the rows' sequences, and the rows."""
        states = 8 * (self.segments or self.rows) * self.heads * self.value_dim
        values = self.value_dim * (2 if self.gated else 1)
        row = self.width + self.gates + self.heads * (values + 1)
        return states * self.key_dim + 4 * self.rows * row
