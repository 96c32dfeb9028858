"""What all attention kernels have in common: fields, scales, reference, inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.spec import Access, Array, KernelSpec, Param


@dataclass(frozen=True)
class AttentionSpec(KernelSpec):
    """Attention of ``rows`` query tokens over the KV cache: row r is token ``position[r]`` of
    sequence ``sequence[r]`` and attends to keys max(0, position - window + 1) ... position.

    out[r, h] = softmax(scale * q[r, h] . K[s, h / group]) V[s, h / group]. ``scale`` None means
    1 / sqrt(head_dim), ``window`` 0 no window, ``softcap`` c > 0 turns scores s into
    c * tanh(s / c) (Gemma 2). Keys that no row attends to are never read. A position from
    ``max_len`` on marks an idle row, which gives zeros.
    """

    heads: int
    layout: KvLayout
    rows: int = 1
    scale: float | None = None
    window: int = 0
    softcap: float = 0.0

    def __post_init__(self) -> None:
        if self.heads < 1 or self.heads % self.layout.kv_heads:
            raise PtxgenError(
                f"{self.heads} query heads are not a multiple of {self.layout.kv_heads} KV heads"
            )
        if not 1 <= self.rows <= 65535:
            raise PtxgenError(f"attention of {self.rows} rows: 1 to 65535")
        if self.window < 0 or not self.softcap >= 0:
            raise PtxgenError(f"window {self.window} and softcap {self.softcap} are 0 or positive")

    @property
    def head_dim(self) -> int:
        """Values of a head."""
        return self.layout.head_dim

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.heads // self.layout.kv_heads

    @property
    def _exponent_scale(self) -> float:
        """From q . k to the exponent of 2 in the softmax, where there is no soft-cap."""
        scale = 1.0 / math.sqrt(self.head_dim) if self.scale is None else self.scale
        return scale * math.log2(math.e)

    @property
    def query_scale(self) -> float:
        """The factor of queries. With a soft-cap, scores s become 2 s / cap in units of the
        exponent of 2, the argument of its tanh."""
        return self._exponent_scale * (2.0 / self.softcap if self.softcap else 1.0)

    @property
    def cap_exponent(self) -> float:
        """The soft-cap, in units of the exponent of 2."""
        return self.softcap * math.log2(math.e)

    @property
    def input_params(self) -> tuple[Param, ...]:
        """q, the caches, and where the rows are."""
        return (
            Param("q", "f32", ("rows", "heads", "head_dim"), Access.IN),
            *self.layout.params(Access.IN),
            Param("sequence", "u32", ("rows",), Access.IN),
            Param("position", "u32", ("rows",), Access.IN),
        )

    def first_key(self, position: int) -> int:
        """The first key that a row at ``position`` attends to."""
        return max(0, position - self.window + 1) if self.window else 0

    def softmax(
        self, inputs: dict[str, Array], row: int, first: int, last: int
    ) -> tuple[Array, Array, Array]:
        """Row ``row`` over keys first ... last in float64, by the definition: the maximum of the
        exponents (of 2) and the sum of weights, (heads,); weighted V (heads, head_dim)."""
        layout = self.layout
        keys, values = (
            layout.read(
                inputs[name],
                int(inputs["sequence"][row]),
                np.arange(first, last + 1),
                inputs.get("block_table"),
            ).astype(np.float64)
            for name in ("k_cache", "v_cache")
        )
        q = inputs["q"][row].astype(np.float64).reshape(layout.kv_heads, self.group, self.head_dim)
        exponents = np.einsum("hgd,hkd->hgk", q, keys) * self._exponent_scale
        if self.softcap:
            exponents = self.cap_exponent * np.tanh(exponents / self.cap_exponent)
        top = exponents.max(axis=2)
        weights = np.exp2(exponents - top[:, :, None])
        out = np.einsum("hgk,hkd->hgd", weights, values)
        return top.ravel(), weights.sum(axis=2).ravel(), out.reshape(self.heads, self.head_dim)

    def attend(self, inputs: dict[str, Array]) -> Array:
        """The output (rows, heads, head_dim) f32 of all rows; zeros for idle ones."""
        out = np.zeros((self.rows, self.heads, self.head_dim), np.float32)
        for row, position in enumerate(inputs["position"].tolist()):
            if position < self.layout.max_len:
                first = self.first_key(position)
                _, total, values = self.softmax(inputs, row, first, position)
                out[row] = values / total[:, None]
        return out

    def inputs_at(
        self,
        rng: np.random.Generator,
        positions: list[int],
        sequences: list[int],
        block_table: Array | None = None,
    ) -> dict[str, Any]:
        """Inputs for given rows: each cache holds what they attend to, and NaN beyond; the queries
        of idle rows are NaN.

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
        for name in ("k_cache", "v_cache"):
            inputs[name] = layout.random_cache(rng, lengths, inputs.get("block_table"))
        inputs["sequence"] = np.array(sequences, np.uint32)
        inputs["position"] = np.array(positions, np.uint32)
        return inputs
