"""The end of a step with drafts: how many of them stand, and where sequences go on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.advance import IDLE, end_ids_at
from urdir.ptxgen.kernels.argmax import INVALID_RANK, indices, ranks
from urdir.ptxgen.kernels.sampling import OFFSETS, SETTINGS_WORDS, pack_settings, unpack_settings
from urdir.ptxgen.kernels.sampling_limits import INVALID_TOKEN, MOST_END_IDS
from urdir.ptxgen.kernels.speculation.limits import MOST_DRAFTS
from urdir.ptxgen.kernels.speculation.spec import DraftedRows
from urdir.ptxgen.limits import limited, up_to
from urdir.ptxgen.spec import Access, Array, LaunchShape, Param


@dataclass(frozen=True)
class AcceptDrafts(DraftedRows):
    """Draft after draft is accepted while it equals the token that the row before it chose.

    For the row r of a pending token (``place[r]`` 0) at p = ``position[r]`` of a sequence s that
    goes on: rows r ... r + d chose tokens ``sampled``, with d the larger of ``found[s]``, drafts of
    the device, and ``given[s]``, drafts of the host. Those up to the first one whose draft
    is another one, or that ends the sequence, count: at least one and at most ``drafts`` + 1. They
    are the tokens after p, the last of which becomes the pending one: ``known[s]`` and
    ``position[r]`` move on by their number. At ``max_len`` nothing is appended. A sequence ends,
    and its row becomes idle, by one of the end ids in ``settings[s]``, with ``min_tokens`` before
    it, and by INVALID_TOKEN.

    The token that was chosen after position q is also written to ``mailbox[s, q % slots]``, and the
    number of tokens that count to ``counts[s, p % slots]``, with that of the drafts in the upper
    half; both may be page-locked memory of the host. ``slots`` is a power of two.

    ``slices`` (0 for none): the sampled token of a row is that of the highest of its ``ranks``
    (rows, slices), as Argmax leaves them.

    With a ``chance`` (0 to 1) drafts are not compared. Each is accepted with that probability, a
    function of its place and the sequence's seed: what speculation of that quality costs can be
    measured without drafts of that quality. The tokens are not those of the model then.
    """

    drafts: int = 1
    slots: int = 16
    slices: int = 0
    chance: float | None = None

    name = "accept_drafts"
    limits = limited(**DraftedRows.limits, drafts=up_to(MOST_DRAFTS), slices=range(1025))

    most_slices = 1024
    most_end_ids = MOST_END_IDS
    settings_words = SETTINGS_WORDS
    offsets = OFFSETS

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.slots <= self.drafts or self.slots & (self.slots - 1):
            raise PtxgenError(
                f"accept_drafts: slots is {self.slots}: a power of two above {self.drafts}"
            )
        if self.chance is not None and not 0 <= self.chance <= 1:
            raise PtxgenError(f"accept_drafts: chance must be in 0 ... 1, not {self.chance}")

    @property
    def params(self) -> tuple[Param, ...]:
        return Param.given(
            Param("sequence", "u32", ("rows",), Access.IN),
            Param("place", "u32", ("rows",), Access.IN),
            Param("position", "u32", ("rows",), Access.INOUT),
            Param("found", "u32", ("sequences",), Access.IN),
            Param("given", "u32", ("sequences",), Access.IN),
            Param("tokens", "u32", ("sequences", "max_len"), Access.INOUT),
            Param("known", "u32", ("sequences",), Access.INOUT),
            Param("settings", "u32", ("sequences", "settings_words"), Access.IN),
            self.slices and Param("ranks", "u64", ("rows", "slices"), Access.IN),
            not self.slices and Param("sampled", "u32", ("rows",), Access.IN),
            Param("mailbox", "u32", ("sequences", "slots"), Access.INOUT),
            Param("counts", "u32", ("sequences", "slots"), Access.INOUT),
        )

    @property
    def threshold(self) -> int:
        """A draft is accepted where 32 bits of a hash are below this."""
        return min(2**32 - 1, round((self.chance or 0.0) * 2**32))

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(self.rows, 1, 1), block=(32 * (1 + self.drafts), 1, 1))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        state = {p.name: inputs[p.name].copy() for p in self.params if p.access is Access.INOUT}
        chosen = indices(inputs["ranks"].max(axis=1)) if self.slices else inputs["sampled"]
        for row in np.flatnonzero(inputs["place"] == 0):
            p, s = int(inputs["position"][row]), inputs["sequence"][row]
            if p >= self.max_len:
                continue
            drafts = int(max(inputs["found"][s], inputs["given"][s]))
            after = chosen[row : row + drafts + 1].tolist()
            count, is_over = 0, False
            while not is_over:
                token, at = after[count], p + 1 + count
                ends = token in end_ids_at(inputs["settings"][s], at)
                is_over = ends or count == drafts
                if not is_over:
                    is_over = not self.accepts(inputs, s, at, token)
                state["mailbox"][s, (p + count) % self.slots] = token
                if at < self.max_len:
                    state["tokens"][s, at] = token
                count += 1
            state["counts"][s, p % self.slots] = count | drafts << 16
            state["known"][s] = min(p + 1 + count, self.max_len)
            state["position"][row] = IDLE if ends else p + count
        return state

    def accepts(self, inputs: Mapping[str, Array], s: int, at: int, token: int) -> bool:
        """Whether the draft at a place of a sequence stands, where ``token`` was chosen."""
        if self.chance is None:
            return bool(inputs["tokens"][s, at] == token)
        seed = int(unpack_settings(inputs["settings"][s])["seed"]) % 2**32
        return mixed(seed ^ mixed(at)) < self.threshold

    @classmethod
    def examples(cls) -> Mapping[str, AcceptDrafts]:
        return {
            "one draft": cls(max_len=9, rows=2),
            "rows of some sequences": cls(max_len=50, rows=23, sequences=7, drafts=7),
            "greedy": cls(max_len=40, rows=12, sequences=5, drafts=3, slots=4, slices=126),
            "many drafts": cls(max_len=99, rows=64, sequences=6, drafts=31, slots=32),
            "one slice each": cls(max_len=30, rows=9, sequences=3, drafts=2, slices=1),
            "by chance": cls(max_len=60, rows=40, sequences=9, drafts=7, chance=0.7),
            "always": cls(max_len=60, rows=40, sequences=9, drafts=7, chance=1.0),
        }

    def bytes_moved(self) -> int:
        """Rows, their ranks, and what they write."""
        return self.rows * (40 + 8 * self.slices)

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Drafts most of which were chosen; some of these are end ids, some tokens none."""
        rows = self._random_rows(rng, self.drafts)
        wanted, known = rows.pop("wanted"), rows["known"]
        found = np.zeros(self.sequences, np.uint32)
        found[rows["sequence"]] = wanted
        fewer = rng.random(self.sequences) < 0.3
        found[fewer] = rng.integers(0, found[fewer], endpoint=True)
        of_host = rng.random(self.sequences) < 0.3
        tokens = rng.integers(0, 1000, (self.sequences, self.max_len)).astype(np.uint32)
        chosen = rng.integers(1000, 1000 + max(1, self.slices), self.rows).astype(np.uint32)
        chosen[rng.random(self.rows) < 0.05] = INVALID_TOKEN
        for row, place in enumerate(rows["place"].tolist()):  # a draft is what the row before chose
            s = rows["sequence"][row]
            at = int(known[s]) - 1 + place
            if 0 < place <= self.drafts and at < self.max_len and rng.random() < 0.8:
                tokens[s, at] = chosen[row - 1]
        settings = [
            pack_settings(
                end_ids=rng.integers(1000, 1200, rng.integers(0, 17)).tolist(),
                answer_at=int(rng.integers(0, self.max_len, endpoint=True)),
                min_tokens=int(rng.choice([0, 0, 1, self.max_len])),
                seed=int(rng.integers(0, 2**64, dtype=np.uint64)),
            )
            for _ in range(self.sequences)
        ]
        inputs: dict[str, Any] = {
            **rows,
            "found": np.where(of_host, 0, found).astype(np.uint32),
            "given": np.where(of_host, found, 0).astype(np.uint32),
            "tokens": tokens,
            "settings": np.stack(settings),
            "sampled": chosen,
            "mailbox": rng.integers(0, 1000, (self.sequences, self.slots)).astype(np.uint32),
            "counts": rng.integers(0, 1000, (self.sequences, self.slots)).astype(np.uint32),
        }
        if self.slices:
            logits = rng.integers(-3, 3, (self.rows, self.slices)).astype(np.float32)
            of = np.tile(np.arange(1000, 1000 + self.slices), (self.rows, 1))
            inputs["ranks"] = ranks(logits, of)
            for at in range(self.rows):
                if chosen[at] == INVALID_TOKEN:
                    inputs["ranks"][at, rng.integers(self.slices)] = INVALID_RANK
                else:
                    best = ranks(np.full(1, 9, np.float32), chosen[at : at + 1])
                    inputs["ranks"][at, chosen[at] - 1000] = best[0]
        return {p.name: inputs[p.name] for p in self.params if p.access is not Access.OUT}


def mixed(word: int) -> int:
    """32 bits that depend on all bits of a word (the finaliser of MurmurHash3)."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        word = (word ^ word >> shift) * factor % 2**32
    return word ^ word >> 16
