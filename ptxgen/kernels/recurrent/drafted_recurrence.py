"""Gated recurrence of the rows of a step that verifies drafts."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.recurrent.drafted_reference import keep, sequences_of, tokens_of
from urdir.ptxgen.kernels.recurrent.drafted_rows import DraftedStates
from urdir.ptxgen.kernels.recurrent.gated_recurrence import TILE, TILE_NBYTES, GatedRecurrence
from urdir.ptxgen.kernels.recurrent.heads_examples import drafted_examples
from urdir.ptxgen.kernels.recurrent.heads_reference import recurrence_of_one
from urdir.ptxgen.kernels.recurrent.rows import EARLY_NBYTES
from urdir.ptxgen.spec import Array, Param


@dataclass(frozen=True)
class DraftedRecurrence(DraftedStates, GatedRecurrence):
    """`GatedRecurrence` of rows that verify drafts (`DraftedStates`), bit for bit."""

    _: KW_ONLY
    most: int
    drafted: bool = False

    name = "drafted_recurrence"
    brings_values = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_rows()

    @property
    def tile(self) -> int:
        """Tokens loaded at once: all rows of a sequence, if they fit."""
        nbytes = (12 if self.rule.channels else 8) * self.rule.key_dim
        return min(TILE, 1 + self.most, TILE_NBYTES // nbytes)

    @property
    def reads_early(self) -> bool:
        state = self.nbytes(self.param("state"))
        return self.rows * state <= self.sequences * EARLY_NBYTES

    @property
    def kept_inputs(self) -> tuple[Param, ...]:
        """All but queries: what a state is moved on by."""
        rule = self.rule
        decays = (p for p in rule.decay_params if p.shape[0] == "rows")
        keys = (p for p in rule.key_params if p.name in ("mixed", "k_heads", "v_heads"))
        return (*keys, *decays, *rule.beta_params)

    @property
    def params(self) -> tuple[Param, ...]:
        *inputs, state, y = super().params
        return (*inputs, *self.kept_params, state, y)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        """As `GatedRecurrence` processes the kept tokens and the rows of each sequence."""
        states = inputs["state"].copy()
        y = np.zeros((self.rows, self.rule.heads, self.rule.value_dim), np.float32)
        for of in sequences_of(self, inputs):
            tokens, before = tokens_of(self, inputs, of), of.replayed
            if "q_heads" not in tokens and self.rule.order == "apart":
                rows = inputs["q_heads"][of.first : of.first + of.count]
                unread = np.zeros((before, *rows.shape[1:]), rows.dtype)
                tokens["q_heads"] = np.concatenate([unread, rows])
            state = states[of.sequence : of.sequence + 1]
            whole = recurrence_of_one(self.rule, inputs, tokens, state, of.stored)
            certain = {name: x[: before + 1] for name, x in tokens.items()}
            y[of.first : of.first + of.count] = whole["y"][before:]
            states[of.sequence] = recurrence_of_one(self.rule, inputs, certain, state, of.stored)[
                "state"
            ][0]
        return {**keep(self, inputs), "state": states, "y": y}

    @classmethod
    def examples(cls) -> dict[str, DraftedRecurrence]:
        return drafted_examples(cls)
