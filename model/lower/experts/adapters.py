"""Low-rank adapters of experts: launches of their own, between those of the products."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from urdir.model.families.adapters import AdapterRoom
from urdir.model.families.stored import Linear
from urdir.model.graph.experts import Experts, Route
from urdir.model.lower.adapters import SLOTS, rows_of_tensor
from urdir.model.lower.lowering import Lowering
from urdir.model.lower.requests import alike
from urdir.model.lower.rows import Rows
from urdir.ptxgen.kernels.linear.lora_expand import LoraExpand
from urdir.ptxgen.kernels.linear.lora_shrink import LoraShrink

if TYPE_CHECKING:
    from urdir.driver.memory import Slice

# One object for equal kernels, with its cached properties.
_shrink = lru_cache(maxsize=64)(LoraShrink)
_expand = lru_cache(maxsize=64)(LoraExpand)


@dataclass(frozen=True, slots=True)
class ExpertAdapters:
    """Adapters of the experts ``of`` an operation: those that the register "expert" names for each
    of the ``rows``, of matrices that have ``room``."""

    at: Lowering
    of: Experts
    rows: Rows
    room: AdapterRoom

    def add_first(self, x: Slice, gate: Slice, up: Slice) -> None:
        """See `CallAdapters`."""
        of = self.of
        places = [(of.up, gate)] if of.gate is None else [(of.gate, gate), (of.up, up)]
        self._append(f"{of.label}_first", x, of.up.cols, places)

    def add_last(self, y: Slice) -> None:
        """Add what they make of the activated products to the sum of the experts."""
        of = self.of
        self._append(
            f"{of.label}_down", self.at.work["expert gate"], of.down.cols, [(of.down, y)], last=True
        )

    def _append(
        self,
        label: str,
        x: Slice,
        cols: int,
        matrices: list[tuple[Linear, Slice]],
        *,
        last: bool = False,
    ) -> None:
        """Add B (A x) to the products of matrices that have adapters, each with its place: x
        (rows, cols), places (rows, used, out); or of the ``last`` matrix x (rows, used, cols), and
        the weighted sum to its place (rows, out)."""
        found = [(of, y) for of, y in matrices if self.room.has(of)]
        if not found:
            return
        at, room, rows = self.at, self.room, self.rows
        assert rows.adapter is not None
        count, experts, used = self.of.x.rows, self.of.selection.experts, self.of.selection.used
        ordered = at.takes_gemm(count)  # as `GroupedGemm` leaves its first products
        low, slot, expert = at.work["expert lora"], at.work[SLOTS], at.work["expert"]
        shrink = _shrink(
            *(count, cols, len(found), room.slots, room.rank, rows.adapter.nbytes // 4),
            room.element,
            experts=experts,
            used=used,
            by_pair=last,
            ordered=ordered and last,
        )
        at.launch(
            shrink.cut,
            f"{label}.lora",
            x=x,
            sequence=rows.sequence,
            adapter=rows.adapter,
            adapter_scale=rows.adapter_scale,
            expert=expert,
            order=at.work["expert pair"] if ordered and last else None,
            lora=low,
            lora_slot=slot,
            **{
                f"lora_a{suffix}": at.parts.weights.lora(of)[0]
                for suffix, (of, _) in zip(shrink.suffixes, found, strict=True)
            },
        )
        for place, (of, y) in enumerate(found):
            expand = _expand(
                *(count, of.rows // experts, room.slots, room.rank, experts, used),
                room.element,
                place,
                len(found),
                last,
                ordered and not last,
            )
            at.launch(
                expand,
                f"{label}.lora_b{place or ''}",
                lora=low,
                lora_slot=slot,
                lora_b=at.parts.weights.lora(of)[1],
                expert=expert,
                order=at.work["expert pair"] if ordered and not last else None,
                weight=at.work["expert weight"] if last else None,
                y=y,
            )


def known_positions(at: Lowering, of: Route | Experts) -> Slice:
    """The positions of the rows, by which mixtures know padding. Where launches between products go
    over the pairs of all rows, sequences stand in their place, and no row is padding."""
    rows, readers = rows_of_tensor(at, of.x), [of] if isinstance(of, Experts) else at.readers(of.y)
    apart = any(isinstance(op, Experts) and _are_apart(at, op) for op in readers)
    return rows.sequence if apart else rows.position


def _are_apart(at: Lowering, of: Experts) -> bool:
    """Whether there are launches between the products: adapters, or the activation."""
    together = of.gate is None or alike(at.matrix(of.gate), at.matrix(of.up))
    return of.room is not None or not together
