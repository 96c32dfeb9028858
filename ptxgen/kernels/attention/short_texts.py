"""Attention of whole texts of few tokens, from heads as the products leave them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.scores import LOG2E, Scores
from urdir.ptxgen.kernels.rotation import Rotation, frequencies, turns_table
from urdir.ptxgen.limits import GRID_ROWS, limited
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance, ceil_div
from urdir.ptxgen.weights.layout import TILE_COLS
from urdir.ptxgen.weights.packed import GROUP, pack, packed_shape

#: Tokens of a text at most: a CTA has a text's keys and values at once.
MOST_TOKENS = 128
#: Of rows and texts that are none.
IDLE = 0xFFFFFFFF


@dataclass(frozen=True)
class ShortTexts(KernelSpec):
    """out[r, h] = softmax(scale * q[r, h] . K[h / group]) V[h / group] of the rows of whole texts
    side by side.

    Text t has rows ``segment[t, 0]`` ... ``segment[t, 1]`` - 1, up to `MOST_TOKENS`; row r attends
    to the keys of rows ``begin[r]`` ... ``position[r]`` of its text. q (rows, heads, head_dim), k
    and v (rows, kv_heads, head_dim) f32 are what products leave, or, with ``halves``, heads in f16,
    (heads, rows, head_dim). With ``rope`` q and k are rotated first, at their places in their
    texts, by ``frequencies``, a ``turns_table``. They are then rounded to f16, as are the weights;
    sums are f32.

    Rows of no text come last. Their positions are IDLE and their results zeros; texts that are none
    come last, and have IDLE bounds. With ``packs`` the output has the form that the next product
    takes (`weights.packed`).
    """

    heads: int
    kv_heads: int
    head_dim: int
    rows: int
    texts: int
    scale: float | None = None
    rope: Rotation | None = None
    packs: bool = False
    halves: bool = False

    #: Tokens of a text at most.
    most = MOST_TOKENS
    name = "short_texts"
    #: Values of a head.
    DIMS = frozenset({32, 64})
    limits = limited(head_dim=sorted(DIMS), rows=GRID_ROWS, texts=GRID_ROWS)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.kv_heads < 1 or self.heads < 1 or self.heads % self.kv_heads:
            raise PtxgenError(
                f"{self.heads} query heads are not a multiple of {self.kv_heads} KV heads"
            )
        if self.rope and not self.rotates(self.rope, self.head_dim):
            raise PtxgenError("attention of short texts rotates whole heads, half and half")
        if self.query_scale <= 0:
            raise PtxgenError(f"attention of short texts: a scale of {self.scale}")
        if self.packs and not self.can_pack:
            raise PtxgenError(f"packed rows are multiples of {TILE_COLS} values")

    @staticmethod
    def rotates(rope: Rotation, head_dim: int) -> bool:
        """Whether the kernel rotates heads so."""
        return (rope.rotary_dim, rope.style) == (head_dim, "half")

    @property
    def can_pack(self) -> bool:
        """Whether ``packs`` is supported: places beyond the last column would not be cleared."""
        return self.heads * self.head_dim % TILE_COLS == 0

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.heads // self.kv_heads

    @property
    def warps(self) -> int:
        """Warps of a CTA, each of 16 queries."""
        return MOST_TOKENS // 16

    @property
    def query_scale(self) -> float:
        """The factor from q . k to the exponent of 2."""
        return Scores(self.scale).scale_of(self.head_dim) * LOG2E

    @property
    def stride(self) -> int:
        """Bytes from a key to the next in shared memory: 16 more than it has, so that the same 16
        bytes of eight keys lie in different banks."""
        return 2 * self.head_dim + 16

    @property
    def packed_groups(self) -> int:
        """Groups of eight packed rows; those beyond ``rows`` are zeros."""
        return ceil_div(self.rows, GROUP)

    @property
    def out_rows(self) -> int:
        """Rows of the output."""
        return GROUP * self.packed_groups if self.packs else self.rows

    @property
    def out_param(self) -> Param:
        """The output."""
        if not self.packs:
            return Param("out", "f32", ("rows", "heads", "head_dim"), Access.OUT)
        return Param("out", "f16", packed_shape(self.rows, self.heads * self.head_dim), Access.OUT)

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            self._heads_param("q", "heads"),
            self._heads_param("k", "kv_heads"),
            self._heads_param("v", "kv_heads"),
            *(() if self.rope is None else (self.rope.param,)),
            Param("begin", "u32", ("rows",), Access.IN),
            Param("position", "u32", ("rows",), Access.IN),
            Param("segment", "u32", ("texts", 2), Access.IN),
            self.out_param,
        )

    def _heads_param(self, name: str, heads: str) -> Param:
        """Heads of rows, as they come."""
        if self.halves:
            return Param(name, "f16", (heads, "rows", "head_dim"), Access.IN)
        return Param(name, "f32", ("rows", heads, "head_dim"), Access.IN)

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(
            grid=(self.heads, self.texts, 1), block=(32 * self.warps, 1, 1), resident=2
        )

    @property
    def tolerance(self) -> Tolerance:
        """2^-11 for each rounding to f16: of q, k, v and the weights. Rounding errors of q and k
        affect the output as errors of scores."""
        found = Tolerance(rtol=4 * 2**-11)
        return found.rounded_to("f16") if self.packs else found

    def reference(self, **inputs: Any) -> dict[str, Array]:
        out = np.zeros((self.rows, self.heads, self.head_dim), np.float32)
        of_rows = {
            name: inputs[name].swapaxes(0, 1) if self.halves else inputs[name] for name in "qkv"
        }
        for first, end in inputs["segment"].tolist():
            if first == IDLE:
                continue
            q, k, v = (of_rows[name][first:end].astype(np.float64) for name in "qkv")
            if self.rope is not None:
                q, k = (
                    self.rope.turn(of, np.arange(end - first), inputs["frequencies"])
                    for of in (q, k)
                )
            k, v = (np.repeat(of, self.group, axis=1) for of in (k, v))
            exponents = np.einsum("rhd,khd->hrk", q, k) * self.query_scale
            key = np.arange(first, end)
            begin, last = (inputs[name][first:end, None] for name in ("begin", "position"))
            exponents = np.where((begin <= key) & (key <= last), exponents, -np.inf)
            weights = np.exp2(exponents - exponents.max(axis=2, keepdims=True))
            weights /= weights.sum(axis=2, keepdims=True)
            out[first:end] = np.einsum("hrk,khd->rhd", weights, v)
        return {"out": pack(out.reshape(self.rows, -1)) if self.packs else out}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Texts of random lengths, the first as long as can be; often with rows and texts that are
        none."""
        lengths, left = list[int](), int(rng.integers(ceil_div(self.rows, 2), self.rows + 1))
        while left and len(lengths) < self.texts:
            length = int(rng.integers(1, MOST_TOKENS + 1)) if lengths else MOST_TOKENS
            lengths.append(min(left, length))
            left -= lengths[-1]
        ends = np.cumsum(lengths)
        segment = np.full((self.texts, 2), IDLE, np.uint32)
        segment[: len(lengths)] = np.stack([ends - lengths, ends], axis=1)
        live = int(ends[-1])
        starts, stops = np.repeat(ends - lengths, lengths), np.repeat(ends, lengths)
        window = int(rng.integers(0, 2)) * int(rng.integers(2, 40))
        kind = Scores(window=window, causal=bool(rng.integers(0, 2)))
        bounds = np.full((2, self.rows), IDLE, np.uint32)
        bounds[:, :live] = kind.bounds(starts, stops)
        inputs: dict[str, Any] = {}
        for name, heads in (("q", self.heads), ("k", self.kv_heads), ("v", self.kv_heads)):
            x = rng.standard_normal((self.rows, heads, self.head_dim)).astype(np.float32)
            x[live:] = np.nan
            inputs[name] = x.swapaxes(0, 1).astype(np.float16).copy() if self.halves else x
        if self.rope is not None:
            inputs["frequencies"] = turns_table(frequencies(self.head_dim, 1e4)[0])
        return inputs | {"begin": bounds[0], "position": bounds[1], "segment": segment}

    @classmethod
    def examples(cls) -> dict[str, ShortTexts]:
        half = Rotation(64, "half")
        return {
            "one text": cls(2, 2, 64, rows=7, texts=1),
            "texts": cls(3, 3, 64, rows=290, texts=9),
            "many texts than rows": cls(1, 1, 32, rows=30, texts=16, scale=0.25),
            "heads that share": cls(4, 2, 64, rows=160, texts=4),
            "rope": cls(2, 1, 64, rows=200, texts=5, rope=half),
            "rope of narrow heads": cls(2, 2, 32, rows=70, texts=2, rope=Rotation(32, "half", 1.5)),
            "packs": cls(4, 4, 64, rows=139, texts=3, packs=True),
            "packs narrow heads": cls(8, 8, 32, rows=35, texts=4, packs=True),
            "halves": cls(4, 2, 64, rows=171, texts=4, packs=True, halves=True),
            "halves of narrow heads": cls(3, 3, 32, rows=150, texts=4, scale=0.25, halves=True),
            "halves, rope": cls(2, 1, 64, rows=200, texts=5, rope=half, halves=True),
            "halves of narrow heads, rope": cls(
                2, 2, 32, rows=70, texts=2, rope=Rotation(32, "half", 1.5), halves=True
            ),
        }

    def flops(self) -> int:
        """For texts that fill the rows: two products and about eight operations of softmax per
        key."""
        keys = self.rows * min(MOST_TOKENS, ceil_div(self.rows, self.texts))
        return self.heads * keys * (4 * self.head_dim + 8)

    def bytes_moved(self) -> int:
        """Bytes of q, k, v and out."""
        return sum(self.nbytes(of) for of in self.params if of.name in ("q", "k", "v", "out"))
