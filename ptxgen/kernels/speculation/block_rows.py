"""The rows of blocks of drafts: a last token and masks after it, of each sequence."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.advance import IDLE
from urdir.ptxgen.limits import POSITIVE, POSITIVE_31_BITS, limited
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, ceil_div


@dataclass(frozen=True)
class BlockRows(KernelSpec):
    """Rows of blocks of ``slots`` rows of ``answers`` sequences, those of a slot side by side.

    Of a block whose token is at n = token_position[i] of s = draft_sequence[i], with drafts up to
    ``until[i]``: row j * answers + i is at ``position`` n + j as long as that is at most
    ``until[i]``. Its ``token`` is tokens[s, n] in slot 0, else ``mask``. It attends to positions up
    to ``end``, its own where the draft is ``causal``, else ``until[i]``. Other rows are padding:
    position and end IDLE. ``number`` is the row's number, ``first`` 0, or IDLE for padding. Slot 0
    of an ``anchored`` draft proposes a token as well: its block ends before ``until[i]``.
    """

    answers: int
    slots: int
    max_len: int
    mask: int
    sequences: int = 1
    causal: bool = False
    anchored: bool = False

    name = "block_rows"
    limits = limited(
        answers=POSITIVE,
        slots=POSITIVE,
        sequences=POSITIVE,
        max_len=POSITIVE_31_BITS,
        mask=range(1 << 31),
    )

    @property
    def rows(self) -> int:
        """Rows that are made."""
        return self.answers * self.slots

    @property
    def params(self) -> tuple[Param, ...]:
        made = ("sequence", "position", "end", "token", "number", "first")
        return (
            Param("draft_sequence", "u32", ("answers",), Access.IN),
            Param("token_position", "u32", ("answers",), Access.IN),
            Param("until", "u32", ("answers",), Access.IN),
            Param("tokens", "u32", ("sequences", "max_len"), Access.IN),
            *(Param(name, "u32", ("rows",), Access.OUT) for name in made),
        )

    @property
    def launch_shape(self) -> LaunchShape:
        threads = min(128, 32 * ceil_div(self.rows, 32))
        return LaunchShape(grid=(ceil_div(self.rows, threads), 1, 1), block=(threads, 1, 1))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        made = {p.name: np.full(self.rows, IDLE, np.uint32) for p in self.params[4:]}
        made["number"][:] = np.arange(self.rows)
        made["token"][:] = self.mask
        made["sequence"][:] = np.tile(inputs["draft_sequence"], self.slots)
        for row in range(self.rows):
            slot, i = divmod(row, self.answers)
            start, until = int(inputs["token_position"][i]), int(inputs["until"][i])
            until -= self.anchored
            if start >= self.max_len or start + slot > until:
                continue
            if not slot:
                made["token"][row] = inputs["tokens"][inputs["draft_sequence"][i], start]
            made["position"][row] = start + slot
            made["end"][row] = start + slot if self.causal else until
            made["first"][row] = 0
        return made

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Blocks of different lengths, and padding."""
        start = rng.integers(0, self.max_len - 1, self.answers)
        until = np.minimum(start + rng.integers(1, self.slots + 1, self.answers), self.max_len - 1)
        start[rng.random(self.answers) < 0.2] = IDLE
        sequence = rng.permutation(max(self.sequences, self.answers))[: self.answers]
        inputs = {
            "draft_sequence": sequence % self.sequences,
            "token_position": start,
            "until": until,
            "tokens": rng.integers(0, 1000, (self.sequences, self.max_len)),
        }
        return {name: values.astype(np.uint32) for name, values in inputs.items()}

    @classmethod
    def examples(cls) -> dict[str, BlockRows]:
        return {
            "one block": cls(answers=1, slots=4, max_len=9, mask=7),
            "causal blocks": cls(answers=5, slots=8, max_len=40, mask=3, sequences=9, causal=True),
            "many rows": cls(answers=40, slots=16, max_len=99, mask=5, sequences=40),
            "anchored blocks": cls(answers=6, slots=5, max_len=30, mask=2, anchored=True),
        }

    def bytes_moved(self) -> int:
        """The rows, and the blocks that they are of."""
        return 24 * self.rows + 16 * self.answers
