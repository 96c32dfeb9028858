"""Gated recurrence of the rows of a step that verifies drafts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.recurrent.drafted_rows import DraftedStates
from urdir.ptxgen.kernels.recurrent.gated_recurrence import TILE, TILE_NBYTES, GatedRecurrence
from urdir.ptxgen.kernels.recurrent.rows import EARLY_NBYTES
from urdir.ptxgen.spec import Array, Param


@dataclass(frozen=True)
class DraftedRecurrence(DraftedStates, GatedRecurrence):
    """`GatedRecurrence` of rows that verify drafts (`DraftedStates`), bit for bit."""

    _: KW_ONLY
    most: int
    drafted: bool = False

    name = "drafted_recurrence"
    template = ("urdir.templates", "recurrent/drafted_recurrence.ptx.j2")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_rows()

    @property
    def brings_values(self) -> bool:
        return True

    @property
    def tile(self) -> int:
        """Tokens loaded at once: all rows of a sequence, if they fit."""
        nbytes = (12 if self.channels else 8) * self.key_dim
        return min(TILE, 1 + self.most, TILE_NBYTES // nbytes)

    @property
    def reads_early(self) -> bool:
        state = self.nbytes(self.param("state"))
        return self.rows * state <= self.sequences * EARLY_NBYTES

    @property
    def kept_inputs(self) -> tuple[Param, ...]:
        """All but queries: what a state is moved on by."""
        decays = (p for p in self.decay_params if p.shape[0] == "rows")
        keys = (p for p in self.key_params if p.name != self.arrays["q"] or p.name == "mixed")
        return (*keys, *decays, *self.beta_params)

    @property
    def params(self) -> tuple[Param, ...]:
        skipped = (*self.beta_params, *self.skip_params)
        inputs = (*self.key_params, *self.decay_params, *skipped)
        return (*inputs, *self.row_params, *self.kept_params, *self.state_params)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        """As `GatedRecurrence` processes the kept tokens and the rows of each sequence."""
        states = inputs["state"].copy()
        y = np.zeros((self.rows, self.heads, self.value_dim), np.float32)
        for of in self.sequences_of(inputs):
            tokens, before = self.tokens_of(inputs, of), of.replayed
            if "q_heads" not in tokens and self.order == "apart":
                rows = inputs["q_heads"][of.first : of.first + of.count]
                unread = np.zeros((before, *rows.shape[1:]), rows.dtype)
                tokens["q_heads"] = np.concatenate([unread, rows])
            state = states[of.sequence : of.sequence + 1]
            whole = self._tokens(inputs, tokens, state, of.stored)
            certain = {name: x[: before + 1] for name, x in tokens.items()}
            y[of.first : of.first + of.count] = whole["y"][before:]
            states[of.sequence] = self._tokens(inputs, certain, state, of.stored)["state"][0]
        return {**self.keep(inputs), "state": states, "y": y}

    def _tokens(
        self, inputs: Mapping[str, Any], tokens: Mapping[str, Any], state: Array, first: int
    ) -> dict[str, Array]:
        """The recurrence of some tokens of one sequence, from position ``first`` on."""
        count = len(next(iter(tokens.values())))
        fields = {name: x for name, x in self.fields().items() if name not in ("most", "drafted")}
        alone = GatedRecurrence(**fields | {"rows": count, "sequences": 1, "segments": 1})
        shared = {p.name: inputs[p.name] for p in alone.params if p.name in inputs}
        rows = {
            "sequence": np.zeros(count, np.uint32),
            "position": first + np.arange(count, dtype=np.uint32),
            "segment": np.array([[0, count]], np.uint32),
        }
        return alone.reference(**shared | dict(tokens) | rows | {"state": state})

    @classmethod
    def examples(cls) -> Mapping[str, DraftedRecurrence]:
        def rows(count: int, sequences: int, most: int, *, drafted: bool = True) -> dict[str, Any]:
            shape = {"rows": count, "sequences": sequences, "max_len": 64, "segments": 0}
            return {**shape, "most": most, "drafted": drafted}

        def heads(count: int, shared: int, key_dim: int, value_dim: int) -> dict[str, Any]:
            sizes = {"heads": count, "key_heads": shared}
            return {**sizes, "key_dim": key_dim, "value_dim": value_dim}

        delta, scan = partial(cls, delta=True, eps=1e-6), partial(cls, delta=False)
        by_channel = partial(delta, order="apart", channels=True)
        single = partial(rows, drafted=False)
        return {
            "one row": delta(**single(1, 2, 1), **heads(2, 1, 8, 6)),
            "rows": delta(**single(5, 4, 3), **heads(4, 2, 64, 20), tiled=True),
            "one draft": delta(**rows(5, 3, 1), **heads(2, 1, 12, 34)),
            "drafts": delta(**rows(23, 7, 3), **heads(4, 2, 32, 20), tiled=True),
            "many drafts": delta(**rows(40, 3, 17), **heads(2, 2, 128, 24)),
            "scan": scan(**rows(14, 4, 5), **heads(6, 3, 16, 10), order="vkq"),
            "scan of arrays": scan(**rows(9, 2, 7), **heads(4, 1, 16, 12), order="apart"),
            "steady": scan(**rows(8, 3, 3), **heads(3, 3, 20, 24), order="apart", steady=True),
            "channels": by_channel(**rows(12, 3, 4), **heads(3, 3, 12, 20)),
            "channels with a floor": by_channel(
                **rows(16, 4, 7), **heads(2, 2, 36, 20), floor=-5.0, negated=True
            ),
        }

    def bytes_moved(self) -> int:
        """The states of the rows' sequences, once, the rows, and what is kept of them."""
        kept = sum(self.nbytes(p) // self.rows for p in self.kept_inputs)
        return super().bytes_moved() + (4 if self.drafted else 0) * self.rows * kept // 4
