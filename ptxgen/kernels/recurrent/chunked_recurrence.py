"""Linear attention with a decaying state over prompts: prepared chunks on tensor cores."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.recurrent.chunks import BLOCK, CHUNK, MAX_KEYS, RecurrentChunks
from urdir.ptxgen.kernels.recurrent.heads_reference import heads_of
from urdir.ptxgen.kernels.recurrent.prepare_chunks import PrepareChunks
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
    template = ("urdir.templates", "recurrent/chunked_recurrence.ptx.j2")

    @property
    def splits(self) -> int:
        """Warps that share the keys of a value."""
        return 1 if self.key_dim <= MAX_KEYS else 2

    @property
    def own_keys(self) -> int:
        """Keys per warp."""
        return self.key_dim // self.splits

    @property
    def groups(self) -> int:
        """Groups of 16 values per CTA: a power of two."""
        groups = MOST_WARPS // self.splits
        while groups > 1 and self.heads * ceil_div(self.value_dim, BLOCK * groups) < MANY_CTAS:
            groups //= 2
        return groups

    @property
    def columns(self) -> int:
        """Values of the state per CTA."""
        return BLOCK * self.groups

    @property
    def stages(self) -> int:
        """Number of stages: up to `STAGES`, at least two."""
        return max(2, min(STAGES, (SHARED_NBYTES - self.parts_nbytes) // self.stage_nbytes))

    @property
    def places(self) -> Mapping[str, int]:
        """Start of each part of a prepared chunk in shared memory, contiguous, and their "end", in
        bytes."""
        sizes = self.nbytes_of
        squares, numbers = sizes["tiles"], sizes["tiles"] + sizes["squares"]
        begins = dict.fromkeys(self.squares, squares) | dict.fromkeys(self.numbers, numbers)
        places = {name: begins.get(name, 0) + at for name, at in self.part_places.items()}
        return {**places, "end": numbers + sizes["numbers"]}

    @property
    def value_stride(self) -> int:
        """Bytes of a token's values: four more than needed, so that neighbouring lanes' tokens lie
        in different banks."""
        return 4 * (self.columns + 4)

    @property
    def rows_at_once(self) -> int:
        """Tokens whose values a CTA's threads copy at once, 16 bytes each."""
        return 4 * self.launch_shape.threads // self.columns

    @property
    def barrier_place(self) -> int:
        """After the values: the barrier that counts arrived bytes."""
        return self.places["end"] + CHUNK * self.value_stride

    @property
    def stage_nbytes(self) -> int:
        """Bytes of all that is loaded for a chunk."""
        return self.barrier_place + 16

    @property
    def parts_place(self) -> int:
        """In shared memory, after the stages: partial results."""
        return self.stages * self.stage_nbytes

    @property
    def params(self) -> tuple[Param, ...]:
        values = tuple(p for p in self.key_params if p.name == self.arrays["v"])
        prepared = self.prepared_params(Access.IN)
        return (*values, *prepared, *self.skip_params, *self.row_params, *self.state_params)

    @property
    def parts_nbytes(self) -> int:
        """Bytes of partial results that warps exchange."""
        return 4 * BLOCK * CHUNK * self.groups * (self.splits - 1)

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(
            grid=(ceil_div(self.value_dim, self.columns), self.heads, self.segments),
            block=(32 * self.groups * self.splits, 1, 1),
            shared_bytes=self.parts_place + self.parts_nbytes,
        )

    def flops(self) -> int:
        of_state = 2 * (2 + self.delta) * self.key_dim
        of_tokens = 2 * len(self.squares) * CHUNK
        return self.rows * self.heads * self.value_dim * (of_state + of_tokens)

    def bytes_moved(self) -> int:
        """States, values, results, and what is prepared."""
        states = 8 * self.segments * self.heads * self.value_dim * self.key_dim
        values = 8 * self.rows * self.heads * self.value_dim
        return states + values + self.prepared_nbytes

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """With what `PrepareChunks` makes of random keys and queries."""
        prepare = PrepareChunks(**self.fields())
        inputs = super().make_inputs(rng)
        given = prepare.make_inputs(rng)
        rows = {p.name: inputs[p.name] for p in self.row_params}
        return inputs | prepare.reference(**given | rows)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        states = inputs["state"].astype(np.float64)
        y = np.zeros((self.rows, self.heads, self.value_dim))
        v = heads_of(self, inputs, "v")
        for slot, rows, _ in self.chunks_of(inputs):
            sequence, tokens = inputs["sequence"][rows.start], slice(rows.start, rows.stop)
            if inputs["position"][rows.start] == 0:
                states[sequence] = 0.0
            for head in range(self.heads):
                values = np.pad(v[tokens, head], ((0, CHUNK - len(rows)), (0, 0)))
                state = states[sequence, head]
                result, states[sequence, head] = self._move(inputs, slot, head, values, state)
                y[tokens, head] = result[: len(rows)]
            if self.skip_params:
                y[tokens] += inputs["skip"][:, None] * v[tokens]
        return {"state": states.astype(np.float32), "y": y.astype(np.float32)}

    def _move(
        self, inputs: Mapping[str, Any], slot: int, head: int, v: Array, state: Array
    ) -> tuple[Array, Array]:
        """Results of a chunk's tokens, and the state after them, f64."""
        tiles = inputs["tiles"][slot, self.tile_head(head)].astype(np.float64)
        squares = [self.of_blocks(square) for square in inputs["squares"][slot, head]]
        ends = list(accumulate(self.numbers.values()))[:-1]
        parts = np.split(inputs["numbers"][slot, head].astype(np.float64), ends)
        numbers = dict(zip(self.numbers, parts, strict=True))
        keys, queries = tiles[:2, :, : self.key_dim]
        left, decay = tiles[-1, :, : self.key_dim], numbers.get("decay")
        read, owed = queries @ state.T, keys @ state.T
        if not self.channels:
            before = numbers["before"][:, None]
            read, owed = before * read, before * owed
            left, decay = numbers["after"][:, None] * keys, before[-1]
        w = numbers["of_w"][:, None] * (v - owed if self.delta else v)
        for i in range(0, CHUNK, BLOCK) if self.delta else ():
            own = slice(i, i + BLOCK)
            w[own] += squares[1][own, :i] @ w[:i]
            w[own] = squares[1][own, own] @ w[own]
        return numbers["of_y"][:, None] * (read + squares[0] @ w), decay * state + w.T @ left
