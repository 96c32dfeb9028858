"""Linear attention with a decaying state over prompts: prepared chunks on tensor cores."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.recurrent.chunk_reference import moved_states
from urdir.ptxgen.kernels.recurrent.chunks import MAX_KEYS, RecurrentChunks
from urdir.ptxgen.kernels.recurrent.prepare_chunks import PrepareChunks
from urdir.ptxgen.kernels.recurrent.prepared_layout import BLOCK, CHUNK, ChunkStage
from urdir.ptxgen.render.kernel import field_values
from urdir.ptxgen.spec import Access, Array, LaunchShape, Param, ceil_div

#: Maximum warps per CTA, of 16 values each, and the number of CTAs above which the maximum is used.
MOST_WARPS, MANY_CTAS = 4, 96
#: Chunks in shared memory: one in use, others in flight; and the shared memory that a CTA may have
#: on every target.
STAGES, SHARED_NBYTES = 3, 99 * 1024


@dataclass(frozen=True)
class ChunkedRecurrence(RecurrentChunks):
    """The result of `RecurrentChunks`, from chunks that `PrepareChunks` has prepared.

    Rows of S and of W are divided by their largest values and rounded to f16 as factors of
    products, so that none exceeds f16's range. Sums and the state are f32. A sequence's bits depend
    on how its tokens are divided into segments.
    """

    name = "chunked_recurrence"

    @property
    def splits(self) -> int:
        """Warps that share the keys of a value."""
        return 1 if self.rule.key_dim <= MAX_KEYS else 2

    @property
    def own_keys(self) -> int:
        """Keys per warp."""
        return self.rule.key_dim // self.splits

    @property
    def groups(self) -> int:
        """Groups of 16 values per CTA: a power of two."""
        rule, groups = self.rule, MOST_WARPS // self.splits
        while groups > 1 and rule.heads * ceil_div(rule.value_dim, BLOCK * groups) < MANY_CTAS:
            groups //= 2
        return groups

    @property
    def columns(self) -> int:
        """Values of the state per CTA."""
        return BLOCK * self.groups

    @property
    def stage(self) -> ChunkStage:
        """What is loaded for a chunk."""
        return ChunkStage(self.prepared, self.columns)

    @property
    def stages(self) -> int:
        """Number of stages: up to `STAGES`, at least two."""
        return max(2, min(STAGES, (SHARED_NBYTES - self.parts_nbytes) // self.stage.nbytes))

    @property
    def rows_at_once(self) -> int:
        """Tokens whose values a CTA's threads copy at once, 16 bytes each."""
        return 4 * self.launch_shape.threads // self.columns

    @property
    def parts_place(self) -> int:
        """In shared memory, after the stages: partial results."""
        return self.stages * self.stage.nbytes

    @property
    def params(self) -> tuple[Param, ...]:
        rule, prepared = self.rule, self.prepared_params(Access.IN)
        values = tuple(p for p in rule.key_params if p.name == rule.qkv.arrays["v"])
        return (*values, *prepared, *rule.skip_params, *self.row_params, *rule.state_params)

    @property
    def parts_nbytes(self) -> int:
        """Bytes of partial results that warps exchange."""
        return 4 * BLOCK * CHUNK * self.groups * (self.splits - 1)

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(
            grid=(ceil_div(self.rule.value_dim, self.columns), self.rule.heads, self.segments),
            block=(32 * self.groups * self.splits, 1, 1),
            shared_bytes=self.parts_place + self.parts_nbytes,
        )

    def flops(self) -> int:
        of_state = 2 * (2 + self.rule.delta) * self.rule.key_dim
        of_tokens = 2 * len(self.prepared.squares) * CHUNK
        return self.rows * self.rule.heads * self.rule.value_dim * (of_state + of_tokens)

    def bytes_moved(self) -> int:
        """States, values, results, and what is prepared."""
        states = 8 * self.segments * self.rule.state_size
        values = 8 * self.rows * self.rule.heads * self.rule.value_dim
        return states + values + self.prepared_nbytes

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """With what `PrepareChunks` makes of random keys and queries."""
        prepare = PrepareChunks(**field_values(self))
        inputs = super().make_inputs(rng)
        given = prepare.make_inputs(rng)
        rows = {p.name: inputs[p.name] for p in self.row_params}
        return inputs | prepare.reference(**given | rows)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        return moved_states(self, inputs)
