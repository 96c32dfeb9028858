"""Gated recurrence: linear attention with a decaying state, token by token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.recurrent.heads import RecurrentHeads
from urdir.ptxgen.spec import Array, LaunchShape, Param, Tolerance, ceil_div

THREADS = 128
#: Maximum lanes that share a column of the state; its values per lane, and their maximum.
MAX_LANES, VALUES, MAX_VALUES = 32, 16, 64
#: Tokens loaded to shared memory at once, and bytes for data with one value per key.
TILE, TILE_NBYTES = 16, 32768
#: Neighbouring lanes that compute a token's numbers: the same for every tile, so that bits do not
#: depend on how a prompt is divided.
TOKEN_LANES = THREADS // TILE


@dataclass(frozen=True)
class GatedRecurrence(RecurrentHeads):
    """`RecurrentHeads`, token by token, in f32."""

    name = "gated_recurrence"
    template = ("urdir.templates", "recurrent/gated_recurrence.ptx.j2")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.key_dim // self.lanes > MAX_VALUES:
            raise PtxgenError(
                f"gated_recurrence: keys of {self.key_dim}: at most {MAX_VALUES} for each of "
                f"{self.lanes} lanes"
            )

    # ---- division of work ----

    @property
    def lanes(self) -> int:
        """Neighbouring lanes that share a column of the state: a power of two, each with the same
        number of vectors of four values."""
        vectors, lanes = self.key_dim // 4, 1
        while 4 * vectors > VALUES * lanes and lanes < MAX_LANES and vectors % (2 * lanes) == 0:
            lanes *= 2
        return lanes

    @property
    def columns(self) -> int:
        """Columns of the state per CTA."""
        return THREADS // self.lanes

    @property
    def vectors(self) -> int:
        """Vectors of four keys per lane."""
        return self.key_dim // (4 * self.lanes)

    @property
    def stride(self) -> int:
        """Bytes from a lane's vector to its next."""
        return 16 * self.lanes

    @property
    def brings_values(self) -> bool:
        """Whether values come to shared memory like keys: those of several tokens."""
        return self.segments > 0

    @property
    def tile(self) -> int:
        """Tokens loaded at once."""
        nbytes = (12 if self.channels else 8) * self.key_dim
        return min(TILE, self.rows if self.segments else 1, TILE_NBYTES // nbytes)

    @property
    def token_lanes(self) -> int:
        """See `TOKEN_LANES`."""
        return TOKEN_LANES

    @property
    def params(self) -> tuple[Param, ...]:
        skipped = (*self.beta_params, *self.skip_params)
        inputs = (*self.key_params, *self.decay_params, *skipped)
        return (*inputs, *self.row_params, *self.state_params)

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
        q, k, v = (self.heads_of(inputs, name) for name in "qkv")
        gate, dt = self.log_decays(inputs)
        decay = np.exp(gate)[:, :, None]
        if self.delta:
            q, k = self.of_length_one(q), self.of_length_one(k)
            beta = 1.0 / (1.0 + np.exp(-inputs["beta"].astype(np.float64)))[:, :, None]
        for row, sequence, is_first in self.tokens(inputs):
            state = states[sequence] * (decay[row] * (not is_first))
            if self.delta:
                added = beta[row] * (v[row] - np.einsum("hvk,hk->hv", state, k[row]))
            else:
                added = dt[row] * v[row]
            state = state + added[:, :, None] * k[row][:, None, :]
            y[row] = self.scale * np.einsum("hvk,hk->hv", state, q[row])
            if self.skip_params:
                y[row] += inputs["skip"][:, None] * v[row]
            states[sequence] = state
        return {"state": states.astype(np.float32), "y": y.astype(np.float32)}

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
        row = self.width + self.gates + self.heads * (self.value_dim + 1)
        return states * self.key_dim + 4 * self.rows * row
