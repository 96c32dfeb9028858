"""Causal attention of prompts over one block of keys after another, a launch each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.prefill_wgmma import PrefillWgmma
from urdir.ptxgen.kernels.attention.scores import Scores
from urdir.ptxgen.spec import Access, Array, Param
from urdir.ptxgen.weights.packed import pack, unpack

#: A position of idle rows.
IDLE = 0xFFFFFFFF


@dataclass(frozen=True)
class PrefillBlock(PrefillWgmma):
    """Attention of chunks of prompts over a block of the keys of sequences of up to ``tokens``.

    See PrefillWgmma. The caches hold ``layout.max_len`` keys, those from token ``first`` on, a
    multiple. From block to block ``partial`` (rows, heads, value_dim) and ``softmax`` (rows, heads,
    2) carry the sums of weighted values, the maxima of exponents (of 2) and the sums of weights;
    block 0 begins them. A tile of queries ends with the block of the last key that it sees, which
    makes its ``out`` and leaves the others as they are; later ones change nothing.

    A block has whole key tiles, so that a row has the same bits in whatever chunk it stands. Scores
    have no window, sinks or ALiBi, values at most 128 dims.
    """

    tokens: int = 0

    name = "prefill_block"
    is_block = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layout.max_len % self.key_tile or self.tokens < self.layout.max_len:
            raise PtxgenError(
                f"a block of {self.layout.max_len} keys of {self.tokens} tokens: it has whole "
                f"tiles of {self.key_tile}, and no more than there are tokens"
            )
        if self.parts > 1 or self.scores.span or self.scores.sinks or self.scores.max_bias:
            raise PtxgenError("blocks are for values of up to 128 dims and plain scores")

    @property
    def positions(self) -> int:
        return self.tokens

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            Param("first", "u32"),
            *self.input_params,
            Param("partial", "f32", ("rows", "heads", "value_dim"), Access.INOUT),
            Param("softmax", "f32", ("rows", "heads", 2), Access.INOUT),
            # that of tiles which do not end here stays as it is
            replace(self.out_param, access=Access.INOUT),
        )

    def reference(self, **inputs: Any) -> dict[str, Array]:
        first, length = int(inputs["first"]), self.layout.max_len
        position = inputs["position"].astype(np.int64)
        position[position >= self.tokens] = -1
        last = self._last_keys(position)
        ends = (last < first + length) & ((last >= first) | (first == 0))
        made = {name: inputs[name].copy() for name in ("partial", "softmax")}
        out = np.zeros(made["partial"].shape, np.float32)
        here = inputs | {"position": position - first}
        for row in np.flatnonzero(position >= 0):
            top, total = inputs["softmax"][row].astype(np.float64).T
            values = inputs["partial"][row].astype(np.float64)
            if not first:
                top, total, values = np.full(self.heads, -np.inf), 0 * total, 0 * values
            if position[row] >= first:
                seen = min(int(position[row]) - first, length - 1)
                own = self.softmax(here, int(row), 0, seen)
                most = np.maximum(top, own[0])
                factors = np.exp2(top - most), np.exp2(own[0] - most)
                total = factors[0] * total + factors[1] * own[1]
                values = factors[0][:, None] * values + factors[1][:, None] * own[2]
                top = most
            out[row] = values / total[:, None]
            goes_on = ~ends[row] & (position[row] >= first)
            made["partial"][row, goes_on] = values[goes_on]
            made["softmax"][row, goes_on] = np.stack([top, total], axis=1)[goes_on]
        return made | {"out": self._with_ended(inputs["out"], out, ends)}

    def _last_keys(self, position: Array) -> Array:
        """The last key that some query sees of the tile that a query is in, (rows, heads)."""
        query = np.arange(self.rows)[:, None] * self.group + np.arange(self.heads) % self.group
        last = np.full(self.tiles, -1)
        np.maximum.at(last, query // self.queries, position[:, None])
        found: Array = last[query // self.queries]
        return found

    def _with_ended(self, before: Array, out: Array, ends: Array) -> Array:
        """The output before, with that of queries whose tile ends."""
        if self.packs:
            before = unpack(before, self.rows, self.heads * self.value_dim).reshape(out.shape)
        made: Array = np.where(ends[:, :, None], out, before)
        return self.as_output(made.astype(np.float32))

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """A chunk whose last rows see more than the block, or whose first rows less; the last row
        of several is idle."""
        length = self.layout.max_len
        blocks = -(-self.tokens // length)
        first = length * int(rng.integers(0, blocks))
        most = min(self.tokens, first + length + self.rows) - self.rows
        start = int(rng.integers(max(0, first - self.rows // 2), most + 1))
        return self.chunk_at(rng, first, start)

    def chunk_at(self, rng: np.random.Generator, first: int, start: int) -> dict[str, Any]:
        """Inputs for the block from token ``first`` on and rows from position ``start`` on."""
        length = self.layout.max_len
        position = start + np.arange(self.rows)
        if self.rows > 1:
            position[-1] = IDLE
        position[position >= self.tokens] = IDLE
        seen = np.where(position < first, 0, np.minimum(position - first, length - 1))
        seen[position == IDLE] = IDLE
        inputs = self.inputs_at(rng, seen.tolist(), [0] * self.rows)
        inputs |= {"first": np.uint32(first), "position": position.astype(np.uint32)}
        shape = (self.rows, self.heads, self.value_dim)
        inputs["partial"], out = rng.standard_normal((2, *shape)).astype(np.float32)
        maxima, sums = rng.normal(0, 3, shape[:2]), rng.uniform(1, 5, shape[:2])
        inputs["softmax"] = np.stack([maxima, sums], axis=2).astype(np.float32)
        inputs["out"] = pack(out.reshape(self.rows, -1)) if self.packs else out
        return inputs

    @classmethod
    def examples(cls) -> Mapping[str, PrefillBlock]:
        wide = KvLayout(1, 2, 192, 192, "f16", value_dim=128)
        return {
            "one tile": cls(2, KvLayout(1, 2, 112, 64, "f16"), rows=7, tokens=300),
            "packs": cls(2, wide, rows=35, packs=True, tokens=700),
            "softcap": cls(
                6, KvLayout(1, 2, 224, 96, "f16", value_dim=64), 90, Scores(softcap=5.0), tokens=448
            ),
        }
