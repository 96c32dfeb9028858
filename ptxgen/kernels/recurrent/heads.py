"""Recurrences with heads: formula, row layout, parameters."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.recurrent.qkv_rows import Order, QkvRows
from urdir.ptxgen.spec import Access, Param


@dataclass(frozen=True)
class HeadsRule:
    """Per head a state S (value_dim, key_dim), which each token decays, updates and reads:

        S = g S + e k^T,  y = scale * S q,  g = exp(a dt),  dt = softplus(alpha + dt_bias)

    - ``delta`` (gated delta rule, Yang et al. 2024, arXiv 2412.06464): q and k are divided by
      their lengths, sqrt(|.|^2 + eps); e = sigmoid(beta) (v - g S k); scale = 1 / sqrt(key_dim);
    - otherwise SSD (Mamba-2, Dao & Gu 2024, arXiv 2405.21060), with k, q and v for its B, C and x:
      e = dt v; scale = 1, and y += skip * v. If ``steady`` (lightning attention, Qin et al. 2024,
      arXiv 2401.04658), dt is 1 for all tokens, and there is no skip.

    With ``channels`` (Kimi Delta Attention, arXiv 2510.26692) each key of a head has its own g,
    with its own alpha and dt_bias: S = S diag(g) + e k^T. With a ``floor`` below 0, g = exp(floor *
    sigmoid(a (alpha + dt_bias))), which stays above exp(floor); with ``negated`` -a replaces a.

    A row of ``mixed`` has the heads of q, k and v in that ``order``; "apart", they are separate
    arrays. The value ``heads`` share ``key_heads`` of q and k: neighbours do, or with ``tiled``
    every key_heads-th.
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

    def __post_init__(self) -> None:
        if min(self.heads, self.key_heads, self.value_dim) < 1 or self.heads % self.key_heads:
            raise PtxgenError(
                f"a recurrence of {self.heads} heads of {self.value_dim} values with "
                f"{self.key_heads} key heads"
            )
        if self.key_dim < 4 or self.key_dim % 4 or (self.heads * self.value_dim) % 4:
            raise PtxgenError(
                f"a recurrence with keys of {self.key_dim} and {self.heads} x {self.value_dim} "
                "values: multiples of 4"
            )
        if self.negated and not self.floor:
            raise PtxgenError("negated rates without a floor")
        if self.floor > 0.0 or ((self.channels or self.floor) and not self.delta):
            raise PtxgenError(
                f"per-channel gates ({self.channels}) and a floor ({self.floor}, "
                "up to 0) belong to the delta rule"
            )
        if self.steady and self.delta:
            raise PtxgenError("the delta rule has no steady decay")

    @cached_property
    def qkv(self) -> QkvRows:
        """How rows of queries, keys and values lie in memory."""
        return QkvRows(self.order, self.key_heads * self.key_dim, self.heads * self.value_dim)

    @property
    def gates(self) -> int:
        """Values per row of alpha."""
        return 0 if self.steady else self.heads * (self.key_dim if self.channels else 1)

    @property
    def scale(self) -> float:
        """Factor of the result."""
        return 1.0 / math.sqrt(self.key_dim) if self.delta else 1.0

    def key_head(self, head: int) -> int:
        """The head of q and k that a value head uses."""
        return head % self.key_heads if self.tiled else head // (self.heads // self.key_heads)

    @property
    def state_size(self) -> int:
        """Values of the states of all heads."""
        return self.heads * self.value_dim * self.key_dim

    # ---- parameters ----

    @property
    def key_params(self) -> tuple[Param, ...]:
        """The parameters with queries, keys and values."""
        keys = ("rows", self.key_heads, self.key_dim)
        values = ("rows", self.heads, self.value_dim)
        if self.order != "apart":
            return (Param("mixed", "f32", ("rows", self.qkv.width), Access.IN),)
        shapes = zip(self.qkv.arrays.values(), (keys, keys, values), strict=True)
        return tuple(Param(name, "f32", shape, Access.IN) for name, shape in shapes)

    @property
    def decay_params(self) -> tuple[Param, ...]:
        """The parameters from which decays are computed."""
        rates = Param("a", "f32", (self.heads,), Access.IN)
        if self.steady:
            return (rates,)
        gates = (self.heads, self.key_dim) if self.channels else (self.heads,)
        alpha = Param("alpha", "f32", ("rows", *gates), Access.IN)
        return alpha, rates, Param("dt_bias", "f32", gates, Access.IN)

    @property
    def beta_params(self) -> tuple[Param, ...]:
        """The parameter that determines how much of a value is replaced."""
        return (Param("beta", "f32", ("rows", self.heads), Access.IN),) if self.delta else ()

    @property
    def skip_params(self) -> tuple[Param, ...]:
        """The parameter that adds values to results."""
        skips = not self.delta and not self.steady
        return (Param("skip", "f32", (self.heads,), Access.IN),) if skips else ()

    @property
    def state_params(self) -> tuple[Param, ...]:
        """States, and results."""
        state = ("sequences", self.heads, self.value_dim, self.key_dim)
        return (
            Param("state", "f32", state, Access.INOUT),
            Param("y", "f32", ("rows", self.heads, self.value_dim), Access.OUT),
        )

    def with_decays(self, inputs: dict[str, Any]) -> dict[str, Any]:
        """Random inputs with rates such that decays are between 0 and 1, as models have them."""
        rates = np.exp(inputs["a"] - 1.0)
        return inputs | {"a": rates if self.floor and not self.negated else -rates}
