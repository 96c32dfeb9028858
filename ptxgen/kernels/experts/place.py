"""Which slots of a cache of experts have the chosen ones, and which are to be copied there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.advance import IDLE
from urdir.ptxgen.kernels.experts.parts import TAKEN, LogitParts
from urdir.ptxgen.kernels.experts.select import random_positions
from urdir.ptxgen.kernels.experts.selection import MAX_EXPERTS, MAX_USED, Selection
from urdir.ptxgen.kernels.pairs import random_choice
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance

#: Pairs of rows and experts of a launch, at most.
MAX_PAIRS = 512
#: See `PlaceExperts`. Experts of a layer that are copied for a token, of 8 of 128, with 32 and 64
#: slots (simulated), with the locality of traces (`memory.local_choices`), and of independent
#: choices of which the more popular half have 90 %:
#:     the credit less the distance         1.60, 0.292; 4.56, 1.29
#:     less half of it                      1.72, 0.305; 4.54, 1.17
#:     16 or 32, less the distance          1.62, 0.290; 4.57, 1.51 and 1.57, 0.291; 4.56, 1.29
#:     none: the least recently used slots  1.50, 0.282; 4.85, 2.01
#: If some experts are also popular in each text, all of these are within 4 %. If the future were
#: known, 0.74, 0.16 with locality: its choices are drawn by recency, so that nothing else that is
#: known before finds more than the last line.
CREDIT = 24


@dataclass(frozen=True)
class PlaceExperts(KernelSpec):
    """The slot of the expert of each pair; those without one take the slots of the experts with the
    lowest stamps.

    Each launch that chooses an expert makes its stamp the number of the launch, or what it was if
    that is more, plus `CREDIT` less the distance of the two (0 at least): when it was chosen
    last, and how often of late, as LRFU weighs both (Lee et al. 2001). Experts that have lost their
    slot keep their stamp.

    ``state`` (u32) has for every expert its slot + 1 (0: none), for every slot its expert + 1, for
    every expert its stamp, the number of the launch, how many pairs there were, how many copies, a
    blank; for every expert, how many pairs have chosen it; what one row has chosen, see
    `SettleExperts`. Zeros are an empty cache.
    Pairs of padding rows, whose ``position`` is `IDLE`, choose nothing: they get what another pair
    has, and are not counted.
    With a plain ``selection`` experts are chosen by ``logits`` here, as products choose them, and
    ``weight`` has their weights; of one row they may come in ``logit_parts``, which as many
    ``warps`` add up as those of the products would, in the same order.
    ``copies``: how many, three blanks, then (expert, slot) of each that is to be copied,
    then zeros.

    ``gathers``: the pairs may choose more experts than there are slots, and all chosen experts are
    to be copied to one place. Experts beyond the slots have the number ``slots`` in the list; the
    first blank is how many chosen experts had a slot, and a second list, behind `most_copies`
    entries of the first one, has these. ``slot`` is then the expert.

    Raises PtxgenError for fewer slots than pairs unless it ``gathers``.
    """

    rows: int
    used: int
    experts: int
    slots: int
    selection: Selection | None = None
    gathers: bool = False
    logit_parts: LogitParts | None = None
    warps: int = 1

    name = "place_experts"
    credit: ClassVar[int] = CREDIT

    def __post_init__(self) -> None:
        if not 1 <= self.pairs <= MAX_PAIRS or not 1 <= self.experts <= MAX_EXPERTS:
            raise PtxgenError(
                f"place_experts: {self.rows} x {self.used} of {self.experts} experts: up to "
                f"{MAX_PAIRS} pairs, {MAX_EXPERTS} experts"
            )
        of = self.selection
        if of is not None and (
            not of.is_plain or (of.experts, of.used) != (self.experts, self.used)
        ):
            raise PtxgenError(f"place_experts: {of}: a plain one of as many experts")
        parts, sizes = self.logit_parts is not None, (self.rows, self.warps)
        if parts and (of is None or self.rows > 1 or self.experts not in TAKEN):
            raise PtxgenError(
                f"place_experts: logits in parts are those of one row and a selection among "
                f"{', '.join(map(str, TAKEN))} experts, not {sizes[0]} among {self.experts}"
            )
        if not 1 <= self.warps <= (32 if parts else 1):
            raise PtxgenError(f"place_experts: {self.warps} warps: up to 32 for logits in parts")
        if not (1 if self.gathers else self.most_copies) <= self.slots <= self.experts:
            raise PtxgenError(
                f"place_experts: {self.slots} slots for {self.rows} x {self.used} of "
                f"{self.experts} experts: at least as many as are chosen, at most one each"
            )

    @property
    def pairs(self) -> int:
        """Pairs of rows and experts."""
        return self.rows * self.used

    @property
    def most_copies(self) -> int:
        """Experts that are copied at most."""
        return min(self.pairs, self.experts)

    @property
    def idle(self) -> int:
        """The position of a padding row."""
        return IDLE

    @property
    def second_list(self) -> int:
        """Where the list of experts that had a slot begins, in bytes."""
        return 4 * copies_words(self.most_copies)

    @property
    def list_vectors(self) -> int:
        """Vectors of four words in the list of copies."""
        return copies_words(self.most_copies, self.gathers) // 4

    @property
    def words(self) -> int:
        """Words of the state."""
        return state_words(self.experts, self.slots)

    @property
    def params(self) -> tuple[Param, ...]:
        chosen: tuple[Param, ...] = (Param("expert", "u32", ("rows", "used"), Access.IN),)
        weights: tuple[Param, ...] = ()
        if self.selection is not None:
            chosen = (Param("logits", "f32", ("rows", "experts"), Access.IN),)
            weights = (Param("weight", "f32", ("rows", "used"), Access.OUT),)
        if self.logit_parts is not None:
            chosen = self.logit_parts.params(self.experts)
        return (
            *chosen,
            Param("position", "u32", ("rows",), Access.IN),
            Param("state", "u32", ("words",), Access.INOUT),
            Param("slot", "u32", ("rows", "used"), Access.OUT),
            Param("copies", "u32", (4 * self.list_vectors,), Access.OUT),
            *weights,
        )

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(1, 1, 1), block=(32 * self.warps, 1, 1))

    @property
    def tolerance(self) -> Tolerance:
        """Of weights, as `SelectExperts` has it, or of sums of parts; all else is equal."""
        if self.logit_parts is not None:
            return Tolerance(rtol=1e-5, atol=1e-6)
        return Tolerance() if self.selection is None else Tolerance(rtol=2e-6, atol=1e-7)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        weights = {}
        if self.selection is not None:
            parts = self.logit_parts
            logits = inputs["logits"] if parts is None else parts.logits(inputs)
            expert, weight = self.selection(logits)
            inputs["expert"], weights["weight"] = expert, weight.astype(np.float32)
        state = inputs["state"].copy()
        held, holder, stamp, rest, chosen, _ = parts_of(state, self.experts, self.slots)
        now = rest[0] + 1
        experts = np.minimum(inputs["expert"], self.experts - 1).ravel()
        active = np.repeat(inputs["position"] != IDLE, self.used)
        some = np.flatnonzero(active)
        experts[~active] = experts[some[some >= some[-1] // 32 * 32][0]] if len(some) else 0
        found = np.unique(held[experts])
        found = found[found > 0] - 1
        used = np.unique(experts)
        late = np.maximum(stamp[used], now)
        apart = late - np.minimum(stamp[used], now)
        stamp[used] = late + CREDIT - np.minimum(apart, CREDIT)
        taken = {*found.tolist()}
        copies = np.zeros(4 * self.list_vectors, np.uint32)
        if self.gathers:
            copies[1] = len(found)
            second = copies[copies_words(self.most_copies) :][: 2 * len(found)]
            second.reshape(-1, 2)[:] = np.stack([holder[found] - 1, found], axis=1)
        missing = dict.fromkeys(experts[held[experts] == 0].tolist())
        for number, expert in enumerate(missing):
            free = {*range(self.slots)} - taken
            last = [stamp[of - 1] if of else 0 for of in holder]
            slot = min(free, key=lambda free: (last[free], free), default=self.slots)
            if free:
                taken.add(slot)
                if holder[slot]:
                    held[holder[slot] - 1] = 0
                holder[slot], held[expert] = expert + 1, slot + 1
            copies[4 + 2 * number :][:2] = expert, slot
        copies[0] = len(missing)
        rest[:3] += np.array([1, len(some), copies[0]], np.uint32)
        np.add.at(chosen, experts[active], np.uint32(1))
        slot = (experts if self.gathers else held[experts] - 1).reshape(self.rows, self.used)
        return {"state": state, "copies": copies, "slot": slot.astype(np.uint32), **weights}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """A cache of which some slots are used, and its state after launches like this one, and
        others that chose none of these experts."""
        state = np.zeros(self.words, np.uint32)
        for _ in range(3):
            parts_of(state, self.experts, self.slots)[3][0] += rng.integers(
                0, 3 * CREDIT, dtype=np.uint32
            )
            state = self.reference(**self._random_choice(rng), state=state)["state"]
        return {**self._random_choice(rng), "state": state}

    def _random_choice(self, rng: np.random.Generator) -> dict[str, Array]:
        """That of some rows; of several the second is a padding row."""
        position = random_positions(self.rows, rng)
        if self.logit_parts is not None:
            bias = {"router_bias": rng.standard_normal(self.experts).astype(np.float32)}
            made = self.logit_parts.make_inputs(self.experts, rng)
            return {**made, **(bias if self.logit_parts.bias else {}), "position": position}
        if self.selection is not None:
            return {**self.selection.random_logits(self.rows, rng), "position": position}
        expert = random_choice(rng, self.rows, self.experts, self.used)
        return {"expert": expert, "position": position}

    @classmethod
    def examples(cls) -> dict[str, PlaceExperts]:
        return {
            "one": cls(1, 1, 1, 1),
            "two slots": cls(1, 2, 8, 2),
            "a row": cls(1, 8, 128, 40),
            "odd": cls(3, 5, 61, 17),
            "all of them": cls(2, 31, 31, 31),
            "many pairs": cls(8, 32, 512, 300),
            "more than slots": cls(13, 5, 61, 17, gathers=True),
            "slots for some of a row": cls(1, 8, 70, 3, gathers=True),
            "slots for all": cls(5, 3, 33, 20, gathers=True),
            "chosen for few slots": cls(
                3, 4, 33, 5, Selection(33, 4, "softmax_selected"), gathers=True
            ),
            "chosen here": cls(3, 4, 33, 20, Selection(33, 4, "softmax_selected")),
            "by parts": cls(
                *(1, 8, 128, 40, Selection(128, 8, normalised=True)),
                logit_parts=LogitParts(45, 1280, 1e-6),
                warps=8,
            ),
            "by parts, for few slots": cls(
                *(1, 4, 32, 3, Selection(32, 4, "softmax_selected")),
                gathers=True,
                logit_parts=LogitParts(90, 2880, 1e-5, bias=True, scale=0.5),
                warps=12,
            ),
            "by parts, one warp": cls(1, 2, 64, 5, Selection(64, 2), logit_parts=LogitParts(3, 48)),
            "a softmax of all": cls(1, 8, 70, 9, Selection(70, 8, normalised=True, scale=2.5)),
        }

    def flops(self) -> int:
        return self.pairs + self.slots


def state_words(experts: int, slots: int) -> int:
    """Words of the state of a cache."""
    return 3 * experts + slots + 4 + MAX_USED


def copies_words(most: int, gathers: bool = False) -> int:
    """Words of a list of copies, in whole vectors of four; see `PlaceExperts`."""
    return 4 + 2 * (most + most % 2) * (2 if gathers else 1)


def parts_of(state: Array, experts: int, slots: int) -> list[Array]:
    """Views of the parts of a state, see `PlaceExperts`."""
    return np.split(state, np.cumsum([experts, slots, experts, 4, experts]))
