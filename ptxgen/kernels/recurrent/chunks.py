"""Chunked form of recurrences for prompts: the prepared data of each chunk and their layout."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Self

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.recurrent.heads import HeadsRule
from urdir.ptxgen.kernels.recurrent.heads_examples import chunk_examples
from urdir.ptxgen.kernels.recurrent.prepared_layout import BLOCK, CHUNK, PreparedLayout
from urdir.ptxgen.kernels.recurrent.rows import RecurrentRows
from urdir.ptxgen.spec import Access, Param, Tolerance, ceil_div
from urdir.ptxgen.target import since

#: Maximum number of keys whose state fits a warp's registers.
MAX_KEYS = 128


@dataclass(frozen=True)
class RecurrentChunks(RecurrentRows):
    """The recurrence of a ``rule`` along segments, by chunks of `CHUNK` tokens from the first of
    each segment: the chunked form of SSD (Dao & Gu 2024, arXiv 2405.21060) and of the gated delta
    rule (Yang et al. 2024, arXiv 2412.06464).

    With G the sums of log g along a chunk, W its additions (e), all tokens of it at once:

        y_i = scale * (exp(G_i) S q_i + sum over j <= i of exp(G_i - G_j) (k_j . q_i) w_j)
        S = exp(G_end) S + sum over j of exp(G_end - G_j) w_j k_j^T

    and for the delta rule w_i = beta_i (v_i - exp(G_i) S k_i - sum over j < i of exp(G_i - G_j)
    (k_j . k_i) w_j), a triangular system. Everything without S is prepared for all chunks at once
    (`PrepareChunks`); then states are advanced chunk by chunk (`ChunkedRecurrence`).

    Prepared data, per chunk and head:

    - ``tiles``: keys and queries divided by their lengths (f16; per key head); with ``channels``,
      per value head, decayed from the chunk's start on, and keys decayed until its end;
    - ``squares`` (f16), block by block: scores, exp(G_i - G_j) (k_j . q_i) for j <= i; for the
      delta rule the inverse of each block's triangular system, and below the diagonal what earlier
      blocks subtract;
    - ``numbers`` (f32): exp(G_i), exp(G_end - G_i), and factors of each token's addition and
      result; with ``channels``, the factors, exp(G_end) of each key, and the largest four times.

    The chunk that starts ``CHUNK`` i rows after the first row r of segment s has index r // CHUNK +
    s + i.
    """

    rule: HeadsRule

    #: Tokens of a chunk.
    chunk = CHUNK

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = self.rule
        if not self.segments or not self.serves(rule):
            raise PtxgenError(
                f"{self.name}: {self.segments} segments, keys of {rule.key_dim}, {rule.value_dim} "
                f"values: it is for segments, multiples of 4 values, and keys of multiples of "
                f"{BLOCK} up to {MAX_KEYS}, or of {2 * BLOCK} up to {2 * MAX_KEYS} without the "
                "delta rule"
            )

    @staticmethod
    def serves(rule: HeadsRule) -> bool:
        """Whether heads of this shape have a chunked form."""
        if rule.value_dim % 4:  # bulk copies are of 16 bytes
            return False
        if rule.key_dim <= MAX_KEYS:
            return rule.key_dim % BLOCK == 0
        return rule.key_dim % (2 * BLOCK) == 0 and rule.key_dim <= 2 * MAX_KEYS and not rule.delta

    @property
    def targets(self) -> tuple[str, ...]:
        # bulk copies
        return since(90)

    # ---- prepared data ----

    @cached_property
    def prepared(self) -> PreparedLayout:
        """How the prepared data of a chunk and a head lie."""
        return PreparedLayout(self.rule.key_dim, self.rule.delta, self.rule.channels)

    @property
    def slots(self) -> int:
        """Slots for chunks."""
        return self.rows // CHUNK + self.segments

    @property
    def tile_heads(self) -> int:
        """Heads with tiles."""
        return self.rule.heads if self.rule.channels else self.rule.key_heads

    def tile_head(self, head: int) -> int:
        """The head whose tiles a value head uses."""
        return head if self.rule.channels else self.rule.key_head(head)

    def prepared_params(self, access: Access) -> tuple[Param, ...]:
        """The arrays of prepared data."""
        heads = {"tiles": self.tile_heads}
        return tuple(
            Param(name, dtype, ("slots", heads.get(name, self.rule.heads), *shape), access)
            for name, (dtype, shape) in self.prepared.shapes.items()
        )

    @property
    def prepared_nbytes(self) -> int:
        """Bytes of the prepared data of all rows, as one segment."""
        sizes, chunks = self.prepared.nbytes_of, ceil_div(self.rows, CHUNK)
        own = sizes["squares"] + sizes["numbers"]
        return chunks * (self.tile_heads * sizes["tiles"] + self.rule.heads * own)

    @property
    def tolerance(self) -> Tolerance:
        """2^-11 for each factor that is rounded to f16."""
        return Tolerance(rtol=4 * 2**-11)

    @classmethod
    def examples(cls) -> dict[str, Self]:
        return chunk_examples(cls)
