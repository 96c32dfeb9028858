"""The adapter of each row that tokens of its text have switched on (Granite Switch)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.limits import POSITIVE, limited
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, ceil_div


@dataclass(frozen=True)
class SwitchRows(KernelSpec):
    """The ``adapter`` of each row, from 1 on (0: none), and the ``token`` that it is embedded as.

    ``adapters`` (vocab,) u32 are those that tokens switch on, ``embedded`` (vocab,) u32 what they
    are embedded as. The adapter of row r is the mean of ``adapters`` of tokens[sequence[r], 0 ..
    position[r]], rounded, halves up: tokens that switch one on have weight 1, others
    ``other_weight``. It is 0 where none is switched on, and in padding rows (``max_len`` or more).

    After the ``rows`` come ``outputs`` further ones, ``output_sequence`` and ``output_position``:
    rows of the step whose results are wanted. ``row`` are the numbers of rows, of each kind from 0
    on, and ``scale`` is 1: they are sequence and scale of a row in `LoraShrink`.

    A CTA reads all tokens of its row.
    """

    vocab: int
    max_len: int
    rows: int = 1
    sequences: int = 1
    outputs: int = 0
    other_weight: float = 0.0

    name = "switch_rows"
    limits = limited(
        vocab=POSITIVE,
        max_len=POSITIVE,
        rows=range(1, 1 << 30),
        sequences=POSITIVE,
        outputs=range(1 << 30),
    )
    #: This kernel begins a step: see `Embedding`.
    waits_for_dependencies = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.0 <= self.other_weight <= 1.0:
            raise PtxgenError(f"switch_rows: other tokens weigh {self.other_weight}: 0 to 1")

    @property
    def params(self) -> tuple[Param, ...]:
        more = ("output_sequence", "output_position") if self.outputs else ()
        return (
            Param("adapters", "u32", ("vocab",), Access.IN),
            Param("embedded", "u32", ("vocab",), Access.IN),
            Param("tokens", "u32", ("sequences", "max_len"), Access.IN),
            Param("sequence", "u32", ("rows",), Access.IN),
            Param("position", "u32", ("rows",), Access.IN),
            *(Param(name, "u32", ("outputs",), Access.IN) for name in more),
            Param("token", "u32", ("every",), Access.OUT),
            Param("adapter", "u32", ("every",), Access.OUT),
            Param("row", "u32", ("every",), Access.OUT),
            Param("scale", "f32", ("every",), Access.OUT),
        )

    @property
    def every(self) -> int:
        """Rows of both kinds."""
        return self.rows + self.outputs

    @property
    def threads(self) -> int:
        """Threads of a CTA: one for four tokens."""
        return min(512, 32 * ceil_div(self.max_len, 128))

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(self.every, 1, 1), block=(self.threads, 1, 1))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        token, adapter = np.zeros(self.every, np.uint32), np.zeros(self.every, np.uint32)
        positions = np.concatenate([inputs["position"], inputs.get("output_position", [])])
        sequences = np.concatenate([inputs["sequence"], inputs.get("output_sequence", [])])
        rows = zip(sequences.astype(int), positions.astype(int), strict=True)
        for row, (sequence, position) in enumerate(rows):
            if position >= self.max_len or sequence >= self.sequences:
                continue
            text = inputs["tokens"][sequence, : position + 1]
            token[row] = text[-1] if text[-1] >= self.vocab else inputs["embedded"][text[-1]]
            switched = inputs["adapters"][text[text < self.vocab]].astype(np.float64)
            count = np.count_nonzero(switched)
            others = len(text) - count
            if count:
                mean = switched.sum() / (count + others * np.float32(self.other_weight))
                adapter[row] = np.floor(mean + 0.5)
        number = np.concatenate([np.arange(self.rows), np.arange(self.outputs)])
        return {
            "token": token,
            "adapter": adapter,
            "row": number.astype(np.uint32),
            "scale": np.ones(self.every, np.float32),
        }

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """A tenth of the tokens switches an adapter on, a text has none of these, one an unknown
        token; the last of several rows is a padding row."""
        inputs = super().make_inputs(rng)
        adapters = np.arange(1, self.vocab + 1) * (np.arange(self.vocab) % 10 == 1)
        inputs["adapters"] = adapters.astype(np.uint32)
        inputs["embedded"] = rng.integers(0, self.vocab, self.vocab, np.uint32)
        shape = self.sequences, self.max_len
        tokens = rng.integers(0, self.vocab, shape, np.uint32)
        tokens[0, -1] = self.vocab + 3
        tokens[-1] -= tokens[-1] % 10 == 1
        inputs["tokens"] = tokens
        for kind, count in (("", self.rows), ("output_", self.outputs)):
            positions = rng.integers(0, self.max_len, count, np.uint32)
            positions[:1], positions[1:][-1:] = self.max_len - 1, self.max_len
            if count:
                sequences = (np.arange(count) % self.sequences).astype(np.uint32)
                inputs |= {f"{kind}sequence": sequences, f"{kind}position": positions}
        return inputs

    @classmethod
    def examples(cls) -> dict[str, SwitchRows]:
        return {
            "one row": cls(vocab=57, max_len=300),
            "none switched on": cls(vocab=1, max_len=9, rows=3),
            "rows": cls(vocab=33, max_len=2100, rows=5, sequences=3, other_weight=1e-3),
            "outputs": cls(vocab=900, max_len=70, rows=6, sequences=2, outputs=3, other_weight=1.0),
        }

    def bytes_moved(self) -> int:
        """As if rows stood in the middle of their texts."""
        return self.every * (4 * self.max_len + 32)
