"""Which experts the rows of a product have: chosen before, or by the warps that multiply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.experts.parts import TAKEN, LogitParts
from urdir.ptxgen.kernels.experts.selection import MAX_USED, Selection
from urdir.ptxgen.kernels.pairs import random_choice
from urdir.ptxgen.spec import Access, Param


@dataclass(frozen=True)
class RowExperts:
    """``used`` of ``experts`` for each of ``batch`` rows: those in ``expert`` (batch, used) u32 on
    the device, or each warp chooses them by a plain ``selection`` from ``logits`` (batch, experts)
    f32; for one row from their ``logit_parts``. Rows whose ``position`` (batch,) u32 is `IDLE` are
    padding, and have none; one row has no position."""

    batch: int
    experts: int
    used: int
    selection: Selection | None = None
    logit_parts: LogitParts | None = None

    def check(self, name: str) -> None:
        """Raise PtxgenError, for kernel ``name``, for impossible numbers and for
        a selection of others."""
        if not 1 <= self.used <= min(self.experts, MAX_USED) or self.batch < 1:
            raise PtxgenError(
                f"{name}: {self.used} of {self.experts} experts for {self.batch} rows: "
                f"1 to {MAX_USED} of them, for at least one row"
            )
        by, sizes = self.selection, (self.experts, self.used)
        if by is not None and (by.experts, by.used) != sizes:
            raise PtxgenError(f"{name}: {self.used} of {self.experts} experts, not {by}")
        if by is not None and not by.is_plain:
            raise PtxgenError(f"{name}: a warp does not choose by {by}")
        parts = self.logit_parts
        if parts is not None and (by is None or self.batch > 1 or self.experts not in TAKEN):
            raise PtxgenError(
                f"{name}: parts of logits are for one row that chooses among {TAKEN} experts"
            )

    @property
    def params(self) -> tuple[Param, ...]:
        """What a launch reads of them."""
        if self.logit_parts is not None:
            return self.logit_parts.params(self.experts)
        chosen = Param("expert", "u32", ("batch", "used"), Access.IN)
        if self.selection is not None:
            chosen = Param("logits", "f32", ("batch", "experts"), Access.IN)
        position = Param("position", "u32", ("batch",), Access.IN)
        return (chosen, position) if self.batch > 1 else (chosen,)

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Random values of these; most rows choose some experts, and no row some others."""
        if self.logit_parts is not None:
            return self.logit_parts.make_inputs(self.experts, rng)
        inputs = {"position": np.arange(self.batch, dtype=np.uint32)}
        if self.selection is not None:
            return inputs | self.selection.random_logits(self.batch, rng)
        return inputs | {"expert": random_choice(rng, self.batch, self.experts, self.used)}

    def chosen(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs with ``expert``, and ``weight`` where the experts are chosen here."""
        if self.selection is None:
            return {**inputs}
        parts = self.logit_parts
        logits = inputs["logits"] if parts is None else parts.logits(inputs)
        expert, weight = self.selection(logits)
        return {**inputs, "expert": expert, "weight": weight}
