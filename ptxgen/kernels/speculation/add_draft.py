"""A draft of each row becomes the next token of its sequence, and the row moves on to it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.advance import IDLE
from urdir.ptxgen.kernels.argmax import INVALID_RANK, indices, ranks
from urdir.ptxgen.limits import GRID_ROWS, POSITIVE, POSITIVE_31_BITS, limited, up_to
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param


@dataclass(frozen=True)
class AddDraft(KernelSpec):
    """For each of ``rows`` at t = token_position[r] of s = sequence[r]: tokens[s, t + 1] = the
    index of the highest of ranks[start + r], as Argmax leaves them; found[s] += 1.

    A draft of ``mapped`` tokens (0: those of the model) has a ``map`` (mapped,) u32 from its own
    ids to the model's. ``position``, the row's place in the draft's cache, and ``token_position``
    move on by one; at ``until[r]`` the row becomes a padding row, IDLE. So it does, without a
    draft, if it is there already, or if none can be chosen, or one that is not among the model's
    ``vocab`` tokens. A row is padding where one of the positions is ``max_len`` or more. Without
    ``moves`` rows have no ``position`` of their own: they keep nothing of what they draft. Where it
    is ``judged``, a draft whose ``probability`` (ranked,) f32, as `TopProbability` leaves it, is
    below ``p_min[s]`` f32 is none.
    """

    slices: int
    max_len: int
    vocab: int
    rows: int = 1
    sequences: int = 1
    mapped: int = 0
    start: int = 0
    moves: bool = True
    judged: bool = False

    name = "add_draft"
    limits = limited(
        slices=up_to(1024),
        rows=GRID_ROWS,
        mapped=range(1 << 31),
        start=range(1 << 31),
        max_len=POSITIVE_31_BITS,
        sequences=POSITIVE,
        vocab=POSITIVE_31_BITS,
    )

    @property
    def params(self) -> tuple[Param, ...]:
        return Param.given(
            Param("ranks", "u64", ("ranked", "slices"), Access.IN),
            self.judged and Param("probability", "f32", ("ranked",), Access.IN),
            self.judged and Param("p_min", "f32", ("sequences",), Access.IN),
            self.mapped and Param("map", "u32", ("mapped",), Access.IN),
            Param("sequence", "u32", ("rows",), Access.IN),
            self.moves and Param("position", "u32", ("rows",), Access.INOUT),
            Param("token_position", "u32", ("rows",), Access.INOUT),
            Param("until", "u32", ("rows",), Access.IN),
            Param("tokens", "u32", ("sequences", "max_len"), Access.INOUT),
            Param("found", "u32", ("sequences",), Access.INOUT),
        )

    @property
    def ranked(self) -> int:
        """Rows of ranks, up to the last one that is read."""
        return self.start + self.rows

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(self.rows, 1, 1), block=(32, 1, 1))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        state = {p.name: inputs[p.name].copy() for p in self.params if p.access is Access.INOUT}
        chosen = indices(inputs["ranks"][self.start :].max(axis=1))
        for row, token in enumerate(chosen.tolist()):
            at, s = int(state["token_position"][row]), inputs["sequence"][row]
            if at >= self.max_len or (self.moves and state["position"][row] >= self.max_len):
                continue
            if self.mapped:
                token = int(inputs["map"][token]) if token < self.mapped else IDLE
            is_last = at + 1 >= inputs["until"][row]
            if self.judged and inputs["probability"][self.start + row] < inputs["p_min"][s]:
                token = IDLE
            if token >= self.vocab or at >= inputs["until"][row]:
                is_last = True
            else:
                state["tokens"][s, at + 1] = token
                state["found"][s] += 1
            state["token_position"][row] = IDLE if is_last else at + 1
            if self.moves:
                state["position"][row] = IDLE if is_last else state["position"][row] + 1
        return state

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Rows of different sequences, some at their last draft, some padding, some without a
        choice."""
        shape = (self.ranked, self.slices)
        logits = rng.integers(-3, 3, shape).astype(np.float32)
        of = rng.integers(0, self.mapped or self.vocab + 2, shape).astype(np.uint32)
        found = ranks(logits, of)
        found[rng.random(self.ranked) < 0.1, 0] = INVALID_RANK
        position = rng.integers(0, self.max_len - 1, self.rows).astype(np.uint32)
        more = rng.integers(0, 4, self.rows)
        until = np.minimum(position + more, self.max_len - 1).astype(np.uint32)
        places = np.maximum(position, 1).astype(np.uint32) - np.uint32(1)
        position[rng.random(self.rows) < 0.2] = IDLE
        places[rng.random(self.rows) < 0.2] = IDLE
        tokens = rng.integers(0, self.vocab, (self.sequences, self.max_len))
        inputs = {
            "ranks": found,
            "probability": rng.random(self.ranked),
            "p_min": rng.choice([0.0, 0.5, 1.0], self.sequences),
            "map": rng.integers(0, self.vocab, self.mapped, np.uint32),
            "sequence": rng.permutation(max(self.sequences, self.rows))[: self.rows],
            "position": places,
            "token_position": position,
            "until": until,
            "tokens": tokens,
            "found": rng.integers(0, 4, self.sequences),
        }
        return {p.name: inputs[p.name].astype(p.numpy_dtype) for p in self.params}

    @classmethod
    def examples(cls) -> dict[str, AddDraft]:
        return {
            "one slice": cls(slices=1, max_len=9, vocab=40),
            "a few rows": cls(slices=5, max_len=30, vocab=1000, rows=7, sequences=9, start=14),
            "mapped": cls(slices=32, max_len=20, vocab=128_256, rows=5, sequences=5, mapped=32_000),
            "judged": cls(
                slices=9, max_len=33, vocab=9000, rows=8, sequences=8, start=8, judged=True
            ),
            "no places": cls(slices=3, max_len=20, vocab=600, rows=5, sequences=7, moves=False),
            "many slices": cls(slices=251, max_len=12, vocab=250_000, rows=2, sequences=2),
        }

    def bytes_moved(self) -> int:
        """A row's ranks, its places and its token."""
        return self.rows * (8 * self.slices + 40)
