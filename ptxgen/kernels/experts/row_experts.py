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
    the device, or each warp chooses them by a ``selection`` from ``logits`` (batch, experts) f32,
    perhaps with a ``choice_bias`` (experts,) f32; for one row from their ``logit_parts``. Rows
    whose ``position`` (batch,) u32 is `IDLE` are padding, and have none; one row has no position.
    ``shared``: as many of ``used``, the last, are experts that one row has besides, with weight 1:
    numbers ``experts`` and following."""

    batch: int
    experts: int
    used: int
    selection: Selection | None = None
    logit_parts: LogitParts | None = None
    shared: int = 0

    @property
    def chosen_together(self) -> bool:
        """Whether all warps of a CTA choose together, whose ranks of experts lie where tiles will
        be, and not each warp for itself."""
        return self.selection is not None and self.experts > MOST_BY_WARPS

    @property
    def chosen_slots(self) -> int:
        """How many of a row's experts are chosen."""
        return self.used - self.shared

    def check(self, name: str) -> None:
        """Raise PtxgenError, for kernel ``name``, for impossible numbers and for
        a selection of others."""
        most = min(self.experts + self.shared, MAX_USED)
        if not 1 + self.shared <= self.used <= most or self.shared < 0 or self.batch < 1:
            raise PtxgenError(
                f"{name}: {self.used} of {self.experts} experts for {self.batch} rows: "
                f"1 to {MAX_USED} of them, for at least one row"
            )
        by, sizes = self.selection, (self.experts, self.chosen_slots)
        if by is not None and (by.experts, by.used) != sizes:
            raise PtxgenError(f"{name}: {sizes[1]} of {self.experts} experts, not {by}")
        if by is not None and not by.is_chosen_by_products:
            raise PtxgenError(f"{name}: a warp does not choose by {by}")
        parts, plain = self.logit_parts, by is not None and by.is_plain
        if parts is not None and (not plain or self.batch > 1 or self.experts not in TAKEN):
            raise PtxgenError(
                f"{name}: parts of logits are for one row that chooses among {TAKEN} experts by "
                "these alone"
            )
        if self.shared and (parts is not None or self.batch > 1):
            raise PtxgenError(f"{name}: experts besides are for one row, without logits in parts")

    @property
    def params(self) -> tuple[Param, ...]:
        """What a launch reads of them."""
        if self.logit_parts is not None:
            return self.logit_parts.params(self.experts)
        chosen = [Param("expert", "u32", ("batch", self.chosen_slots), Access.IN)]
        if self.selection is not None:
            chosen = [Param("logits", "f32", ("batch", "experts"), Access.IN)]
            if self.selection.bias:
                chosen.append(Param("choice_bias", "f32", ("experts",), Access.IN))
        position = Param("position", "u32", ("batch",), Access.IN)
        return (*chosen, position) if self.batch > 1 else tuple(chosen)

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Random values of these; most rows choose some experts, and no row some others."""
        if self.logit_parts is not None:
            return self.logit_parts.make_inputs(self.experts, rng)
        inputs = {"position": np.arange(self.batch, dtype=np.uint32)}
        if self.selection is not None:
            return inputs | self.selection.random_logits(self.batch, rng)
        return inputs | {"expert": random_choice(rng, self.batch, self.experts, self.chosen_slots)}

    def chosen(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs with ``expert``, and ``weight`` where the experts are chosen here."""
        found = {name: inputs[name] for name in ("expert", "weight") if name in inputs}
        if self.selection is not None:
            parts = self.logit_parts
            logits = inputs["logits"] if parts is None else parts.logits(inputs)
            found["expert"], found["weight"] = self.selection(logits, inputs.get("choice_bias"))
        if self.shared:
            own = {"expert": self.experts + np.arange(self.shared), "weight": np.ones(self.shared)}
            found = {name: np.append(of, [own[name]], axis=1) for name, of in found.items()}
        return {**inputs, **found}
