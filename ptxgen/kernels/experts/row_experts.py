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

#: Experts of which each warp chooses for itself; all of a CTA choose among more. On an H200 a step
#: of one row of qwen3-next-80b-a3b (512 experts) takes 1,214 us so, 3,026 where each warp sorts.
MOST_BY_WARPS = 128


@dataclass(frozen=True)
class RowExperts:
    """``used`` of ``experts`` for each of ``batch`` rows: those in ``expert`` (batch, used) u32 on
    the device, or each warp chooses them by a plain ``selection`` from ``logits`` (batch, experts)
    f32; for one row from their ``logit_parts``. Rows whose ``position`` (batch,) u32 is `IDLE` are
    padding, and have none; one row has no position. ``has_shared``: one row that chooses has expert
    number ``experts`` besides, as the last of ``used``, weighted by the sigmoid of its ``gate``."""

    batch: int
    experts: int
    used: int
    selection: Selection | None = None
    logit_parts: LogitParts | None = None
    has_shared: bool = False

    @property
    def chosen_together(self) -> bool:
        """Whether all warps of a CTA choose together, whose ranks of experts lie where tiles will
        be, and not each warp for itself."""
        return self.selection is not None and self.experts > MOST_BY_WARPS

    @property
    def chosen_slots(self) -> int:
        """How many of a row's experts are chosen."""
        return self.used - self.has_shared

    def check(self, name: str) -> None:
        """Raise PtxgenError, for kernel ``name``, for impossible numbers and for
        a selection of others."""
        most = min(self.experts + self.has_shared, MAX_USED)
        if not 1 + self.has_shared <= self.used <= most or self.batch < 1:
            raise PtxgenError(
                f"{name}: {self.used} of {self.experts} experts for {self.batch} rows: "
                f"1 to {MAX_USED} of them, for at least one row"
            )
        by, sizes = self.selection, (self.experts, self.chosen_slots)
        if by is not None and (by.experts, by.used) != sizes:
            raise PtxgenError(f"{name}: {sizes[1]} of {self.experts} experts, not {by}")
        if by is not None and not by.is_plain:
            raise PtxgenError(f"{name}: a warp does not choose by {by}")
        parts = self.logit_parts
        if parts is not None and (by is None or self.batch > 1 or self.experts not in TAKEN):
            raise PtxgenError(
                f"{name}: parts of logits are for one row that chooses among {TAKEN} experts"
            )
        if self.has_shared and (by is None or parts is not None or self.batch > 1):
            raise PtxgenError(f"{name}: an expert besides is for one row that chooses by logits")

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
            gate = {"gate": rng.standard_normal(1).astype(np.float32)} if self.has_shared else {}
            return inputs | self.selection.random_logits(self.batch, rng) | gate
        return inputs | {"expert": random_choice(rng, self.batch, self.experts, self.used)}

    def chosen(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs with ``expert``, and ``weight`` where the experts are chosen here."""
        if self.selection is None:
            return {**inputs}
        parts = self.logit_parts
        logits = inputs["logits"] if parts is None else parts.logits(inputs)
        expert, weight = self.selection(logits)
        if self.has_shared:
            gate = inputs.get("gate", np.zeros(1)).astype(np.float64)  # first products need none
            expert = np.append(expert, [[self.experts]], axis=1)
            weight = np.append(weight, [1.0 / (1.0 + np.exp(-gate))], axis=1)
        return {**inputs, "expert": expert, "weight": weight}
