"""Advance the decode state by one token, on the device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.argmax import INVALID_RANK, indices, ranks
from urdir.ptxgen.kernels.sampling import OFFSETS, SETTINGS_WORDS, pack_settings, unpack_settings
from urdir.ptxgen.kernels.sampling_limits import INVALID_TOKEN, MOST_END_IDS
from urdir.ptxgen.limits import POSITIVE, POSITIVE_31_BITS, limited, up_to
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, ceil_div

#: The position of a padding row: at least the max_len of every kernel.
IDLE = 2**32 - 1


@dataclass(frozen=True)
class Advance(KernelSpec):
    """End of a step: position += 1 in every row; the sampled token is appended unless it is known.

    ``tokens[s]`` is a whole sequence, of which ``known[s]`` entries are valid; ``position[r]`` is
    that of the token that row r processed, in sequence ``sequence[r]``. During a prompt the next
    token is known and is kept; at ``max_len`` nothing is appended. A position of ``max_len`` or
    more marks a padding row, which is unchanged. Without ``sampling`` (a step without logits) the
    positions are the only parameter. With it, two active rows must not belong to one sequence.

    A row becomes a padding row, with position IDLE, if its sampled token is appended and is one of
    the end ids in ``settings[s]`` (`sampling.pack_settings`), with ``min_tokens`` before it, or
    INVALID_TOKEN: later steps in the queue do nothing for it.

    ``slots`` (a power of two, or 0 for none): the sampled token of a row at position p is also
    written to ``mailbox[sequence[r], p % slots]``, which may be page-locked host memory.

    ``slices`` (0 for none): the sampled token of any row is that of the highest of its ``ranks``
    (rows, slices), as left by Argmax; ``sampled`` is then written. Position, sequence, known and
    settings are read before ``griddepcontrol.wait``: earlier launches of the same graph may write
    them only if a plain edge in between ensures their completion.

    ``turns``: sequences take turns. ``sequence`` and ``position`` have ``places`` entries; after
    those of the rows come those of ``waiting[0]`` sequences without a row in this step, at most as
    many as rows. In the end the row with ``turn[r]`` = i below that number exchanges its entries
    with the i-th of these, and ``turn[r]`` falls by the number, modulo the rows. If row r of eight
    has turn r, a ninth sequence has row 0 in the next step, and the one that had it row 1 in the
    step after that.
    """

    max_len: int
    rows: int = 1
    sequences: int = 1
    sampling: bool = True
    slots: int = 0
    slices: int = 0
    turns: bool = False
    places: int = 0

    name = "advance"
    limits = limited(max_len=POSITIVE_31_BITS, rows=up_to(1024), sequences=POSITIVE)

    #: Maximum number of ranks of a row: a lane of its warp has 32 of them in flight.
    most_slices = 1024
    most_end_ids = MOST_END_IDS
    settings_words = SETTINGS_WORDS
    offsets = OFFSETS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slots < 0 or self.slots & (self.slots - 1) or (self.slots and not self.sampling):
            raise PtxgenError(f"advance: slots is {self.slots}: a power of two, 0 without sampling")
        most = self.most_slices if self.sampling else 0
        if not 0 <= self.slices <= most:
            raise PtxgenError(f"advance: slices must be in 0 ... {most}, not {self.slices}")
        if self.turns and not self.sampling:
            raise PtxgenError("advance: no turns without sampling")
        least = self.rows if self.turns else 0
        if self.places < least or (self.places and not self.turns):
            raise PtxgenError(f"advance: places must be at least {least}, not {self.places}")

    @property
    def entries(self) -> int:
        """Entries of ``sequence`` and ``position``."""
        return self.places if self.turns else self.rows

    @property
    def params(self) -> tuple[Param, ...]:
        position = Param("position", "u32", ("entries",), Access.INOUT)
        if not self.sampling:
            return (position,)
        return Param.given(
            Param("sequence", "u32", ("entries",), Access.INOUT if self.turns else Access.IN),
            position,
            Param("tokens", "u32", ("sequences", "max_len"), Access.INOUT),
            Param("known", "u32", ("sequences",), Access.INOUT),
            Param("settings", "u32", ("sequences", "settings_words"), Access.IN),
            Param("sampled", "u32", ("rows",), Access.OUT if self.slices else Access.IN),
            self.slices and Param("ranks", "u64", ("rows", "slices"), Access.IN),
            self.slots and Param("mailbox", "u32", ("sequences", "slots"), Access.INOUT),
            self.turns and Param("turn", "u32", ("rows",), Access.INOUT),
            self.turns and Param("waiting", "u32", (1,), Access.IN),
        )

    @property
    def launch_fields(self) -> frozenset[str]:
        return frozenset({"rows", "places"} if self.sampling else ())

    @property
    def launch_shape(self) -> LaunchShape:
        if self.sampling:
            return LaunchShape(grid=(self.rows, 1, 1), block=(32, 1, 1))
        return LaunchShape(grid=(1, 1, 1), block=(32 * ceil_div(self.rows, 32), 1, 1))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        state = {p.name: inputs[p.name].copy() for p in self.params if p.access is Access.INOUT}
        position, sequence = state["position"], inputs.get("sequence", state["position"])
        sampled = inputs.get("sampled", np.zeros(0, np.uint32))
        if self.slices:
            sampled = state["sampled"] = indices(inputs["ranks"].max(axis=1))
        for row in np.flatnonzero(position[: self.rows] < self.max_len):
            if self.slots:
                place = sequence[row], position[row] % self.slots
                state["mailbox"][place] = sampled[row]
            position[row] += 1
            if not self.sampling:
                continue
            at, s = position[row], sequence[row]
            if at == state["known"][s]:
                if sampled[row] in end_ids_at(inputs["settings"][s], int(at)):
                    position[row] = IDLE
                if at < self.max_len:
                    state["tokens"][s, at] = sampled[row]
                    state["known"][s] += 1
        if self.turns:
            waiting, turn = int(inputs["waiting"][0]), state["turn"]
            rows = np.flatnonzero(turn < waiting)
            others = self.rows + turn[rows]
            for of in (state["sequence"], position):
                of[rows], of[others] = of[others], of[rows]
            turn[:] = (turn.astype(np.int64) - waiting) % self.rows
        return state

    @classmethod
    def examples(cls) -> dict[str, Advance]:
        return {
            "one token": cls(max_len=1),
            "greedy alone": cls(max_len=7, sampling=False),
            "rows of some sequences": cls(max_len=50, rows=3, sequences=5),
            "many rows": cls(max_len=9, rows=64, sequences=64),
            "many rows, greedy alone": cls(max_len=9, rows=40, sampling=False),
            "long context": cls(max_len=4096),
            "mailbox": cls(max_len=20, rows=37, sequences=40, slots=4),
            "mailbox and slices": cls(max_len=50, slots=4, slices=126),
            "one slice each": cls(max_len=9, rows=5, sequences=5, slots=2, slices=1),
            "slices of a few rows": cls(max_len=9, rows=3, sequences=4, slices=32),
            "turns": cls(max_len=9, rows=5, sequences=9, slots=2, slices=3, turns=True, places=8),
            "turns of drawn tokens": cls(max_len=9, rows=5, sequences=9, turns=True, places=7),
        }

    def bytes_moved(self) -> int:
        """Bytes of positions, counts and tokens of the rows, without the sequences."""
        ranks_and_mailbox = 8 * self.slices + 4 * bool(self.slots)
        return self.rows * (8 + (4 + 8 + 8 + 4 + 4 if self.sampling else 0) + ranks_and_mailbox)

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Rows of different sequences: at the end of one, within a prompt, or padding. Some tokens
        are end ids or invalid."""
        known, entries = rng.integers(1, self.max_len, self.sequences, endpoint=True), self.entries
        sequence = rng.permutation(max(self.sequences, entries))[:entries] % self.sequences
        position = known[sequence] - 1
        position -= np.where(rng.random(entries) < 0.3, rng.integers(0, position + 1), 0)
        if self.rows > 1:
            position[rng.random(entries) < 0.2] = self.max_len + 2
        state = {
            "sequence": sequence,
            "position": position,
            "tokens": rng.integers(0, 1000, (self.sequences, self.max_len)),
            "known": known,
            "sampled": rng.integers(1000, 2000, self.rows),
            "mailbox": rng.integers(0, 1000, (self.sequences, self.slots)),
            "turn": np.roll(np.arange(self.rows), rng.integers(0, self.rows)),
            "waiting": rng.integers(0, min(entries - self.rows, self.rows) + 1, 1),
        }
        inputs = {name: values.astype(np.uint32) for name, values in state.items()}
        logits = rng.integers(-3, 3, (self.rows, self.slices)).astype(np.float32)
        of = rng.permuted(np.tile(np.arange(1000, 1000 + self.slices), (self.rows, 1)), axis=1)
        inputs["ranks"] = ranks(logits, of)
        inputs["ranks"][rng.random(inputs["ranks"].shape) < 0.02] = INVALID_RANK
        inputs["sampled"][rng.random(self.rows) < 0.1] = INVALID_TOKEN
        ends = [rng.integers(1000, 2000, rng.integers(0, 17)) for _ in range(self.sequences)]
        for row in np.flatnonzero(rng.random(self.rows) < 0.3):
            token = indices(inputs["ranks"][row].max()) if self.slices else inputs["sampled"][row]
            ends[sequence[row]] = np.append(ends[sequence[row]][1:], token)
        inputs["settings"] = np.stack(
            [
                pack_settings(
                    end_ids=ids.tolist(),
                    answer_at=int(rng.integers(0, self.max_len, endpoint=True)),
                    min_tokens=int(rng.choice([0, 0, 1, self.max_len])),
                )
                for ids in ends
            ]
        )
        return {p.name: inputs[p.name] for p in self.params if p.access is not Access.OUT}


def end_ids_at(settings: Array, at: int) -> list[int]:
    """The tokens that end a sequence at a place: its end ids, and the invalid token."""
    record = unpack_settings(settings)
    is_early = max(at - int(record["answer_at"]), 0) < record["min_tokens"]
    count = 0 if is_early else record["end_count"]
    return [*record["end_ids"][:count].tolist(), INVALID_TOKEN]
