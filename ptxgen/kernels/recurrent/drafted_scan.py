"""Mamba's selective scan of the rows of a step that verifies drafts."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.recurrent.drafted_reference import keep, sequences_of, tokens_of
from urdir.ptxgen.kernels.recurrent.drafted_rows import DraftedStates
from urdir.ptxgen.kernels.recurrent.selective_scan import SelectiveScan, moved, result
from urdir.ptxgen.spec import Array, Param


@dataclass(frozen=True)
class DraftedScan(DraftedStates, SelectiveScan):
    """`SelectiveScan` of rows that verify drafts (`DraftedStates`), bit for bit."""

    _: KW_ONLY
    most: int
    drafted: bool = False

    name = "drafted_scan"

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_rows()

    @staticmethod
    def can_pack(rows: int, channels: int, size: int) -> bool:
        """Results are always f32."""
        return False

    @property
    def kept_inputs(self) -> tuple[Param, ...]:
        """What a state is moved on by."""
        return tuple(p for p in super().params if p.name in ("x", "step", "b"))

    @property
    def params(self) -> tuple[Param, ...]:
        *inputs, state, y = super().params
        return (*inputs, *self.kept_params, state, y)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        """As `SelectiveScan` processes the kept tokens and the rows of each sequence."""
        states = inputs["state"].astype(np.float64)
        y = np.zeros((self.rows, self.channels))
        for of in sequences_of(self, inputs):
            tokens = tokens_of(self, inputs, of)
            state = states[of.sequence] * (of.stored > 0)
            for i in range(of.replayed + of.count):
                token = {name: values[i] for name, values in tokens.items()}
                state = moved(state, inputs["a"], token)
                if i == of.replayed:
                    states[of.sequence] = state
                if i >= of.replayed:
                    row = of.first + i - of.replayed
                    y[row] = result(inputs, row, state)
        made = {"state": states.astype(np.float32), "y": y.astype(np.float32)}
        return keep(self, inputs) | made

    @classmethod
    def examples(cls) -> dict[str, DraftedScan]:
        of = partial(cls, max_len=64, segments=0)
        return {
            "one row": of(rows=1, sequences=2, channels=10, size=8, most=1),
            "rows": of(rows=6, sequences=5, channels=70, size=16, most=3),
            "drafts": of(rows=19, sequences=5, channels=70, size=16, most=3, drafted=True),
            "odd eights": of(rows=9, sequences=2, channels=9, size=24, most=7, drafted=True),
        }
