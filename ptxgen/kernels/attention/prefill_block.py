"""Chunked-context prefill attention: causal attention over blocks of keys, one launch per block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.block_reference import LANES, attend_to_block
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.prefill_wgmma import PrefillWgmma
from urdir.ptxgen.kernels.attention.scores import Scores
from urdir.ptxgen.spec import Access, Array, Param
from urdir.ptxgen.weights.packed import pack, unpack

#: A position of padding rows.
IDLE = 0xFFFFFFFF


@dataclass(frozen=True)
class PrefillBlock(PrefillWgmma):
    """Attention of prompt chunks over a block of the keys of sequences of up to ``tokens`` tokens.

    See PrefillWgmma. The keys of all sequences of the step form a *walk*: those of a row's sequence
    start at key ``begin`` (rows,) of it, a multiple of ``key_tile``, and so do blocks. Of the
    ``layout.max_len`` keys of the caches a block has the first ``length``, which are those of the
    walk from ``first`` on, also in whole tiles. From block to block ``partial`` (rows, heads,
    value_dim) and ``softmax`` (rows, heads, 4, 2) carry the sums of weighted values and, per lane
    of a query, the maximum exponent (of 2) and the sum of weights. A tile of queries starts them
    with the block of its sequence's first key and ends with that of its last visible key, which
    computes its ``out``; other blocks do not change them.

    A row has the same bits in any chunk, and wherever its keys are in the walk: those of
    PrefillWgmma. Scores have no window, sinks or ALiBi, values at most 128 dims.
    """

    tokens: int = 0

    name = "prefill_block"
    is_block = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.layout.max_len % self.key_tile or self.tokens < 1:
            raise PtxgenError(
                f"a block of {self.layout.max_len} keys of sequences of {self.tokens} tokens: it "
                f"has whole tiles of {self.key_tile}"
            )
        if self.parts > 1 or self.scores.span or self.scores.sinks or self.scores.max_bias:
            raise PtxgenError("blocks are for values of up to 128 dims and plain scores")

    @property
    def positions(self) -> int:
        return self.tokens

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            Param("count", "u32"),
            Param("first", "u32"),
            Param("length", "u32"),
            *self.input_params,
            Param("begin", "u32", ("rows",), Access.IN),
            Param("partial", "f32", ("rows", "heads", "value_dim"), Access.INOUT),
            Param("softmax", "f32", ("rows", "heads", LANES, 2), Access.INOUT),
            # that of tiles which do not end here is unchanged
            replace(self.out_param, access=Access.INOUT),
        )

    def reference(self, **inputs: Any) -> dict[str, Array]:
        carried, out, ends = attend_to_block(self, inputs)
        before = inputs["out"]
        if self.packs:
            before = unpack(before, self.rows, self.heads * self.value_dim).reshape(out.shape)
        made = np.where(ends[:, :, None], out, before)
        return carried | {"out": self.as_output(made.astype(np.float32))}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """A chunk whose last rows see more than the block, or whose first rows less; the last of
        several rows is padding. Another sequence may precede it in the walk."""
        length = self.key_tile * int(rng.integers(1, self.layout.max_len // self.key_tile + 1))
        blocks = -(-self.tokens // length)
        first = length * int(rng.integers(0, blocks))
        most = min(self.tokens, first + length + self.rows) - self.rows
        start = int(rng.integers(max(0, first - self.rows // 2), most + 1))
        begin = self.key_tile * int(rng.integers(0, length // self.key_tile))
        return _block_inputs(self, rng, range(first, first + length), start, begin)

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


def _block_inputs(
    spec: PrefillBlock, rng: np.random.Generator, block: range, start: int, begin: int
) -> dict[str, Any]:
    """Inputs for the ``block`` of keys of a walk, and rows from position ``start`` on of a sequence
    that starts in it at key ``begin``."""
    first, length = block.start, len(block)
    position = start + np.arange(spec.rows)
    if spec.rows > 1:
        position[-1] = IDLE
    position[position >= spec.tokens] = IDLE
    place = position + begin
    seen = np.where(place < first, 0, np.minimum(place - first, length - 1))
    seen[position == IDLE] = IDLE
    inputs = spec.inputs_at(rng, seen.tolist(), [0] * spec.rows)
    inputs |= {"first": np.uint32(first), "length": np.uint32(length)}
    inputs["position"] = position.astype(np.uint32)
    inputs["begin"] = np.full(spec.rows, begin, np.uint32)
    shape = (spec.rows, spec.heads, spec.value_dim)
    inputs["partial"], out = rng.standard_normal((2, *shape)).astype(np.float32)
    maxima = np.repeat(rng.normal(0, 3, shape[:2])[:, :, None], LANES, axis=2)
    sums = rng.uniform(1, 5, maxima.shape)
    inputs["softmax"] = np.stack([maxima, sums], axis=3).astype(np.float32)
    inputs["out"] = pack(out.reshape(spec.rows, -1)) if spec.packs else out
    return inputs
