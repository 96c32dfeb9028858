"""What all attention kernels have in common: fields, scales, reference, inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.scores import PLAIN, Scores
from urdir.ptxgen.spec import Access, Array, KernelSpec, Param, ceil_div
from urdir.ptxgen.weights.packed import pack, packed_shape

#: The most values of a head, of keys and of values.
MAX_HEAD_DIM = 576
LOG2E = math.log2(math.e)
SINKS = Param("sinks", "f32", ("heads",), Access.IN)


def with_sinks(sinks: Array, top: Array, total: Array, values: Array) -> tuple[Array, Array]:
    """Sums of weights (..., heads) and weighted values (..., heads, value_dim), both relative to
    maxima ``top`` (..., heads) of 2's exponent, after each head's sink has taken part."""
    logits = sinks.astype(np.float64) * LOG2E
    most = np.maximum(top, logits)
    rescale = np.exp2(top - most)
    return total * rescale + np.exp2(logits - most), values * rescale[..., None]


@dataclass(frozen=True)
class AttentionSpec(KernelSpec):
    """Attention of ``rows`` query tokens over the KV cache: row r is token ``position[r]`` of
    sequence ``sequence[r]`` and attends to keys up to its own, as ``scores`` says.

    out[r, h] = softmax(scores(q[r, h] . K[s, h / group])) V[s, h / group]. Keys that no row attends
    to are never read. A position from ``max_len`` on marks a padding row, whose results are zeros.
    In a ring, rows look back on at most ``capacity`` keys.
    """

    heads: int
    layout: KvLayout
    rows: int = 1
    scores: Scores = PLAIN

    def __post_init__(self) -> None:
        if self.heads < 1 or self.heads % self.layout.kv_heads:
            raise PtxgenError(
                f"{self.heads} query heads are not a multiple of {self.layout.kv_heads} KV heads"
            )
        if not 1 <= self.rows <= 65535:
            raise PtxgenError(f"attention of {self.rows} rows: 1 to 65535")
        if max(self.head_dim, self.value_dim) > MAX_HEAD_DIM:
            raise PtxgenError(
                f"attention takes heads of up to {MAX_HEAD_DIM} values: "
                f"head_dim {self.head_dim}, value_dim {self.value_dim}"
            )
        if not self.scores.causal:
            raise PtxgenError("keys after a row's own are those of texts")
        if self.scores.texts and (self.layout.sequences > 1 or self.rows > self.layout.max_len):
            raise PtxgenError(
                f"texts side by side are one sequence with room for all rows: {self.rows} rows, "
                f"{self.layout.sequences} sequences of {self.layout.max_len}"
            )
        if self.layout.capacity and not 0 < self.scores.span <= self.layout.capacity:
            raise PtxgenError(
                f"rows look back on {self.scores.span or 'all'} keys, in a ring of "
                f"{self.layout.capacity}"
            )

    @property
    def head_dim(self) -> int:
        """Width of query and key heads."""
        return self.layout.head_dim

    @property
    def value_dim(self) -> int:
        """Values of a head of V, and of the output."""
        return self.layout.values_per_head

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.heads // self.layout.kv_heads

    @property
    def _exponent_scale(self) -> float:
        """Factor from q . k to the exponent of 2 in the softmax, without a soft-cap."""
        return self.scores.scale_of(self.head_dim) * LOG2E

    @property
    def query_scale(self) -> float:
        """The factor of queries. With a soft-cap, scores s become 2 s / cap in units of the
        exponent of 2, the argument of its tanh."""
        return self._exponent_scale * (2.0 / self.scores.softcap if self.scores.softcap else 1.0)

    @property
    def cap_exponent(self) -> float:
        """The soft-cap, in units of the exponent of 2."""
        return self.scores.softcap * LOG2E

    @property
    def log2e(self) -> float:
        """From a score to the exponent of 2."""
        return LOG2E

    @property
    def input_params(self) -> tuple[Param, ...]:
        """q, the caches, and where the rows are."""
        return (
            Param("q", "f32", ("rows", "heads", "head_dim"), Access.IN),
            *self.layout.params(Access.IN),
            Param("sequence", "u32", ("rows",), Access.IN),
            Param("position", "u32", ("rows",), Access.IN),
        )

    @property
    def params(self) -> tuple[Param, ...]:
        return (*self.input_params, *self.score_params, self.out_param)

    @property
    def packs(self) -> bool:
        """Whether the output is packed f16 (`weights.packed`), as the next product takes it."""
        return False

    @property
    def out_param(self) -> Param:
        """The output: a row's heads, which are one vector where they are packed."""
        if not self.packs:
            return Param("out", "f32", ("rows", "heads", "value_dim"), Access.OUT)
        return Param("out", "f16", packed_shape(self.rows, self.heads * self.value_dim), Access.OUT)

    def finished(self, inputs: dict[str, Array]) -> Array:
        """The output for these inputs."""
        return self.as_output(self.attend(inputs))

    def as_output(self, heads: Array) -> Array:
        """The output, made of the heads (rows, heads, value_dim) of all rows."""
        return pack(heads.reshape(self.rows, -1)) if self.packs else heads

    @property
    def score_params(self) -> tuple[Param, ...]:
        """What ``scores`` takes: the logits of sinks, the first keys of rows of texts, the bias by
        distance."""
        scores, found = self.scores, []
        if scores.sinks:
            found.append(SINKS)
        if scores.texts:
            found.append(Param("begin", "u32", ("rows",), Access.IN))
        if scores.relative:
            found.append(Param("relative", "f32", ("heads", 2 * scores.relative + 1), Access.IN))
        return tuple(found)

    def softmax(
        self, inputs: dict[str, Array], row: int, first: int, last: int
    ) -> tuple[Array, Array, Array]:
        """Row ``row`` over keys first ... last in float64, by the definition: the maximum of the
        exponents (of 2) and the sum of weights, (heads,); weighted V (heads, value_dim)."""
        top, weights, out = self.weighted(inputs, row, first, last)
        return top, weights.sum(axis=1), out

    def weighted(
        self, inputs: dict[str, Array], row: int, first: int, last: int
    ) -> tuple[Array, Array, Array]:
        """The same with the weights, (heads, keys), in place of their sum."""
        layout, seen = self.layout, np.arange(first, last + 1)
        stored = [
            cache.read(
                inputs[name], int(inputs["sequence"][row]), seen, inputs.get("block_table")
            ).astype(np.float64)
            for name, cache in layout.caches.items()
        ]
        keys, values = stored[0], stored[-1][..., layout.value_start :]
        q = inputs["q"][row].astype(np.float64).reshape(layout.kv_heads, self.group, self.head_dim)
        position = row if self.scores.texts else int(inputs["position"][row])
        products = np.einsum("hgd,hkd->hgk", q, keys)
        exponents = self.scores(products, seen, position, self.head_dim)
        if most := self.scores.relative:
            bias = inputs["relative"][:, np.clip(seen - position, -most, most) + most]
            exponents = exponents + bias.reshape(exponents.shape).astype(np.float64)
        exponents = exponents * LOG2E
        top = exponents.max(axis=2)
        weights = np.exp2(exponents - top[:, :, None])
        out = np.einsum("hgk,hkd->hgd", weights, values)
        weights = weights.reshape(self.heads, -1)
        return top.ravel(), weights, out.reshape(self.heads, self.value_dim)

    def attend(self, inputs: dict[str, Array]) -> Array:
        """The output (rows, heads, value_dim) f32 of all rows; zeros for idle ones."""
        out = np.zeros((self.rows, self.heads, self.value_dim), np.float32)
        for row, position in enumerate(inputs["position"].tolist()):
            if position < self.layout.max_len:
                first = self.scores.first_key(position)
                if self.scores.texts:
                    first = int(inputs["begin"][row])
                top, total, values = self.softmax(inputs, row, first, position)
                if self.scores.sinks:
                    total, values = with_sinks(inputs["sinks"], top, total, values)
                out[row] = values / total[:, None]
        return out

    def inputs_of_texts(self, rng: np.random.Generator) -> dict[str, Any]:
        """Inputs for texts side by side, of random lengths and bounds, often with padding rows."""
        live = int(rng.integers(ceil_div(self.rows, 2), self.rows + 1))
        cuts = np.flatnonzero(rng.random(live) < 0.1)
        edges = np.unique(np.concatenate([[0], cuts, [live]]))
        lengths = np.diff(edges)
        starts, ends = (np.repeat(of, lengths) for of in (edges[:-1], edges[1:]))
        window = int(rng.integers(0, 2)) * int(rng.integers(2, 40))
        kind = replace(self.scores, texts=False, causal=bool(rng.integers(0, 2)), window=window)
        begin, last = kind.bounds(starts, ends)
        positions = [*last.tolist(), *[self.layout.max_len + 7] * (self.rows - live)]
        inputs = self.inputs_at(rng, positions, [0] * self.rows)
        idle = np.full(self.rows - live, 0xFFFFFFFF, np.uint32)
        return inputs | {"begin": np.concatenate([begin, idle])}

    def inputs_at(
        self,
        rng: np.random.Generator,
        positions: list[int],
        sequences: list[int],
        block_table: Array | None = None,
    ) -> dict[str, Any]:
        """Inputs for given rows: each cache holds what they attend to, and NaN beyond; the queries
        of padding rows are NaN.

        A paged layout gets a random table where none is given.
        """
        layout = self.layout
        inputs: dict[str, Any] = {}
        if layout.is_paged:
            inputs["block_table"] = layout.random_table(rng) if block_table is None else block_table
        lengths = [0] * layout.sequences
        for sequence, position in zip(sequences, positions, strict=True):
            if position < layout.max_len:
                lengths[sequence] = max(lengths[sequence], position + 1)
        shape = (self.rows, self.heads, self.head_dim)
        inputs["q"] = rng.standard_normal(shape).astype(np.float32)
        inputs["q"][np.array(positions) >= layout.max_len] = np.nan
        for name, cache in layout.caches.items():
            inputs[name] = cache.random_cache(rng, lengths, inputs.get("block_table"))
        if self.scores.sinks:  # some dominate, some are negligible
            inputs["sinks"] = rng.normal(0, 4, self.heads).astype(np.float32)
        if self.scores.relative:
            bias = rng.standard_normal((self.heads, 2 * self.scores.relative + 1))
            inputs["relative"] = bias.astype(np.float32)
        inputs["sequence"] = np.array(sequences, np.uint32)
        inputs["position"] = np.array(positions, np.uint32)
        return inputs
