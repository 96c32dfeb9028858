"""Gated recurrence: linear attention with a decaying state, token by token."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.recurrent.heads import HeadsRule
from urdir.ptxgen.kernels.recurrent.heads_examples import recurrence_examples
from urdir.ptxgen.kernels.recurrent.heads_reference import recurrence
from urdir.ptxgen.kernels.recurrent.rows import RecurrentRows
from urdir.ptxgen.spec import Array, LaunchShape, Param, Tolerance, ceil_div

THREADS = 128
#: Maximum lanes that share a column of the state; its values per lane, and their maximum.
MAX_LANES, VALUES, MAX_VALUES = 32, 16, 64
#: Tokens loaded to shared memory at once, and bytes for data with one value per key.
TILE, TILE_NBYTES = 16, 32768


@dataclass(frozen=True)
class GatedRecurrence(RecurrentRows):
    """Linear attention whose state decays by a ``rule``, token by token, in f32. ``starts_next``:
    the launch after this one may start before this one waits for what is before it."""

    rule: HeadsRule
    starts_next: bool = False

    #: Neighbouring lanes that compute a token's numbers: the same for every tile, so that bits do
    #: not depend on how a prompt is divided.
    token_lanes = THREADS // TILE

    name = "gated_recurrence"
    #: exp and softplus are approximated; a state carries errors from token to token
    tolerance = Tolerance(rtol=1e-5)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rule.key_dim // self.lanes > MAX_VALUES:
            raise PtxgenError(
                f"gated_recurrence: keys of {self.rule.key_dim}: at most {MAX_VALUES} for each of "
                f"{self.lanes} lanes"
            )

    # ---- division of work ----

    @property
    def lanes(self) -> int:
        """Neighbouring lanes that share a column of the state: a power of two, each with the same
        number of vectors of four values."""
        vectors, lanes = self.rule.key_dim // 4, 1
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
        return self.rule.key_dim // (4 * self.lanes)

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
        nbytes = (12 if self.rule.channels else 8) * self.rule.key_dim
        return min(TILE, self.rows if self.segments else 1, TILE_NBYTES // nbytes)

    @property
    def params(self) -> tuple[Param, ...]:
        rule = self.rule
        skipped = (*rule.beta_params, *rule.skip_params)
        inputs = (*rule.key_params, *rule.decay_params, *skipped)
        return (*inputs, *self.row_params, *rule.state_params)

    @property
    def launch_shape(self) -> LaunchShape:
        parts = ceil_div(self.rule.value_dim, self.columns)
        return LaunchShape(
            grid=(parts, self.rule.heads, self.segments or self.rows), block=(THREADS, 1, 1)
        )

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        return self.rule.with_decays(super().make_inputs(rng))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        return recurrence(self.rule, self, inputs)

    @classmethod
    def examples(cls) -> Mapping[str, GatedRecurrence]:
        found = recurrence_examples(cls)
        one = next(spec for spec in found.values() if spec.rows == 1 and spec.reads_early)
        return found | {"starts the next": replace(one, starts_next=True)}

    def flops(self) -> int:
        return 8 * self.rows * self.rule.state_size

    def bytes_moved(self) -> int:
        """The states of the rows' sequences, and the rows."""
        rule, states = self.rule, (self.segments or self.rows) * self.rule.state_size
        row = rule.qkv.width + rule.gates + rule.heads * (rule.value_dim + 1)
        return 8 * states + 4 * self.rows * row
