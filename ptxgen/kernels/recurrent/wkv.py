"""Time mixing of RWKV: heads with square states that decay by channel."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.recurrent.rows import RecurrentRows
from urdir.ptxgen.spec import Access, Array, LaunchShape, Param, Tolerance

#: Neighbouring lanes that share a value's state.
LANES = 4
#: The factor of log decays in RWKV 7: -exp(-1/2).
DECAY = -0.606531
#: What the length of a key is at least, before the key is divided by it.
LEAST_LENGTH = 1e-12

Kind = Literal["rwkv7", "rwkv6", "gated"]


@dataclass(frozen=True)
class Wkv(RecurrentRows):
    """Per head a state S (dim values, dim keys), and for each token vectors (dim,) r, k, v and w:

    - "rwkv7" (Peng et al. 2025, arXiv 2503.14456): w = exp(`DECAY` sigmoid(decay)), a =
      sigmoid(rate), u = k * key_scale / its length, k' = k * (1 + (a - 1) * key_rate),
      S = S diag(w) - (S u) (u * a)^T + v k'^T, y = norm(S r) + (sum r * k' * bonus) v. With a
      ``residual`` v = v + (first - v) * sigmoid(residual) before;
    - "rwkv6" (Peng et al. 2024, arXiv 2404.05892): w = exp(-exp(decay)), y = norm(S r + (sum r * k
      * bonus) v), then S = S diag(w) + v k^T;
    - "gated": w as in rwkv6, S = S diag(w) + v (k * (1 - w))^T, y = S r / sqrt(dim).

    The norm of a head's values is a LayerNorm with weights (heads, dim), if ``normed``. y is
    multiplied by the ``gate``, if there is one: as it is, silu(gate) and sigmoid(gate). Value
    heads share the ``key_heads`` of k and v, neighbours the same one.
    """

    heads: int
    dim: int
    kind: Kind
    key_heads: int
    residual: bool = False
    gate: bool = True
    normed: bool = True
    eps: float = 64e-5

    lanes = LANES
    name = "wkv"
    #: exponentials are approximated, a norm divides by small deviations
    tolerance = Tolerance(rtol=2e-5, atol=2e-6)

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.serves(self.dim) or self.heads < 1 or self.heads % self.key_heads:
            raise PtxgenError(
                f"wkv: {self.heads} heads of {self.dim} values with {self.key_heads} key heads: "
                "32, 64 or 128 values"
            )
        if self.kind != "rwkv7" and self.residual:
            raise PtxgenError("wkv: residuals of values belong to rwkv7")
        if self.kind == "gated" and self.normed:
            raise PtxgenError("wkv: gated heads have no norm")

    @staticmethod
    def serves(dim: int) -> bool:
        """Whether heads may have this many values."""
        return dim in (32, 64, 128)

    @property
    def params(self) -> tuple[Param, ...]:
        wide, keys = ("rows", "heads", "dim"), ("rows", "key_heads", "dim")
        vector, is_7 = ("heads", "dim"), self.kind == "rwkv7"
        rows = {"r": wide, "k": keys, "v": keys, "decay": wide}
        rows |= {"rate": wide} if is_7 else {}
        rows |= {"residual": wide, "first": wide} if self.residual else {}
        rows |= {"gate": wide} if self.gate else {}
        weights = (*(("key_scale", "key_rate") if is_7 else ()),)
        weights += ("bonus",) if self.kind != "gated" else ()
        weights += ("weight", "bias") if self.normed else ()
        state = ("sequences", "heads", "dim", "dim")
        return (
            *(Param(name, "f32", shape, Access.IN) for name, shape in rows.items()),
            *(Param(name, "f32", vector, Access.IN) for name in weights),
            *self.row_params,
            Param("state", "f32", state, Access.INOUT),
            Param("y", "f32", wide, Access.OUT),
        )

    @property
    def vectors(self) -> int:
        """Vectors of four keys per lane."""
        return self.dim // (4 * LANES)

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(
            grid=(self.heads, self.segments or self.rows, 1), block=(LANES * self.dim, 1, 1)
        )

    def reference(self, **inputs: Any) -> dict[str, Array]:
        of = {p.name: inputs[p.name] for p in self.params if p.dtype == "f32" and p.name != "y"}
        of = {name: values.astype(np.float64) for name, values in of.items()}
        states, y = of["state"], np.zeros((self.rows, self.heads, self.dim))
        group = self.heads // self.key_heads
        for row, sequence, is_first in self.tokens(inputs):
            r, w = of["r"][row], of["decay"][row]
            k, v = (np.repeat(of[name][row], group, axis=0) for name in "kv")
            state = states[sequence] * (not is_first)
            if self.kind == "rwkv7":
                y[row], states[sequence] = self._seventh(of, row, state, (r, k, v, w))
                continue
            w = np.exp(-np.exp(w))
            old = state
            k = k * (1.0 - w) if self.kind == "gated" else k
            state = state * w[:, None, :] + v[:, :, None] * k[:, None, :]
            if self.kind == "gated":
                out = np.einsum("hvk,hk->hv", state, r) / math.sqrt(self.dim)
            else:
                out = np.einsum("hvk,hk->hv", old, r)
                out = out + np.sum(r * k * of["bonus"], 1, keepdims=True) * v
            y[row] = self._gated(of, row, self._normed(of, out))
            states[sequence] = state
        return {"state": states.astype(np.float32), "y": y.astype(np.float32)}

    def _seventh(
        self, of: Mapping[str, Array], row: int, state: Array, token: tuple[Array, ...]
    ) -> tuple[Array, Array]:
        """The result of a token (heads, dim), and the state after it."""
        r, k, v, w = token
        w, a = np.exp(DECAY * _sigmoid(w)), _sigmoid(of["rate"][row])
        if self.residual:
            v = v + (of["first"][row] - v) * _sigmoid(of["residual"][row])
        u = k * of["key_scale"]
        u = u / np.maximum(np.sqrt(np.sum(u * u, 1, keepdims=True)), LEAST_LENGTH)
        k = k * (1.0 + (a - 1.0) * of["key_rate"])
        seen = np.einsum("hvk,hk->hv", state, u)
        state = state * w[:, None, :] - seen[:, :, None] * (u * a)[:, None, :]
        state = state + v[:, :, None] * k[:, None, :]
        out = self._normed(of, np.einsum("hvk,hk->hv", state, r))
        out = out + np.sum(r * k * of["bonus"], 1, keepdims=True) * v
        return self._gated(of, row, out), state

    def _normed(self, of: Mapping[str, Array], y: Array) -> Array:
        if not self.normed:
            return y
        y = y - y.mean(1, keepdims=True)
        y = y / np.sqrt(np.mean(y * y, 1, keepdims=True) + self.eps)
        return np.asarray(y * of["weight"] + of["bias"])

    def _gated(self, of: Mapping[str, Array], row: int, y: Array) -> Array:
        if not self.gate:
            return y
        gate = of["gate"][row]
        factor = {"rwkv7": 1.0, "rwkv6": gate * _sigmoid(gate), "gated": _sigmoid(gate)}[self.kind]
        return np.asarray(y * (gate if self.kind == "rwkv7" else factor))

    @classmethod
    def examples(cls) -> Mapping[str, Wkv]:
        seven = partial(cls, max_len=64, kind="rwkv7")
        six, gated = partial(seven, kind="rwkv6"), partial(seven, kind="gated", normed=False)

        def rows(count: int, sequences: int, segments: int = 0) -> dict[str, Any]:
            return {"rows": count, "sequences": sequences, "segments": segments}

        def heads(count: int, dim: int, keys: int = 0) -> dict[str, Any]:
            return {"heads": count, "dim": dim, "key_heads": keys or count}

        return {
            "one row": seven(**rows(1, 2), **heads(3, 64), residual=True),
            "rows": seven(**rows(5, 4), **heads(2, 32)),
            "a prompt": seven(**rows(21, 2, 1), **heads(2, 64), residual=True),
            "no gate, no norm": seven(**rows(3, 3), **heads(1, 128), gate=False, normed=False),
            "segments": seven(**rows(45, 4, 3), **heads(1, 32), residual=True),
            "rwkv 6, one row": six(**rows(1, 1), **heads(2, 64)),
            "rwkv 6, a prompt": six(**rows(19, 2, 1), **heads(2, 32)),
            "rwkv 6, rows": six(**rows(6, 5), **heads(1, 128)),
            "gated, rows": gated(**rows(4, 3), **heads(4, 64, 2)),
            "gated prompt": gated(**rows(37, 3, 2), **heads(2, 32, 1)),
        }

    def flops(self) -> int:
        return 8 * self.rows * self.heads * self.dim**2

    def bytes_moved(self) -> int:
        """The states of the rows' sequences, and the rows."""
        states = 8 * (self.segments or self.rows) * self.heads * self.dim**2
        own = [p for p in self.params if p.shape[0] == "rows" and p.dtype == "f32"]
        return states + 4 * self.rows * self.heads * self.dim * len(own)


def _sigmoid(x: Array) -> Array:
    return np.asarray(1.0 / (1.0 + np.exp(-x)))
