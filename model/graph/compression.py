"""Operations of attention to the last tokens and to compressed blocks (DeepSeek V4)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from urdir.model.families.attention import Attention
from urdir.model.families.compression import BlockIndexer, Compression, Compressor
from urdir.model.families.rope import RopeConfig
from urdir.model.graph.evaluation import Evaluation, Floats
from urdir.model.graph.op import Op
from urdir.model.graph.tensor import Tensor
from urdir.ptxgen.kernels.attention.turn_tail import turned_tail


@dataclass(frozen=True, slots=True, eq=False)
class TurnTail(Op):
    """y = x with the last values of each head rotated by the rows' positions, or ``back``."""

    word = "turn_tail"
    x: Tensor
    rope: RopeConfig
    heads: int
    back: bool = False

    def __post_init__(self) -> None:
        self._check_same(self.x)
        self._check(self.x.width % self.heads == 0, f"not {self.heads} heads")

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        heads = x[0].reshape(len(x[0]), self.heads, -1)
        table, sign = at.turns(self.rope), -1 if self.back else 1
        turned = turned_tail(heads, self.rope.rotation, at.positions, table, sign)
        return np.asarray(turned.reshape(x[0].shape))


@dataclass(frozen=True, slots=True, eq=False)
class SelectBlocks(Op):
    """y (rows, width) u32 = the tokens of the blocks with the highest index scores of each row.

    ``q`` (rows, heads * dim), turned, and ``weights`` (rows, heads); ``k`` and ``gate`` (rows,
    width of a token) go into the cache of ``layer``, and so do keys of blocks made of them.

    While evaluated, y are numbers of blocks, and the number of rows where a row has fewer; on the
    device slots of tokens.
    """

    word = "select_blocks"
    q: Tensor
    weights: Tensor
    k: Tensor
    gate: Tensor
    indexer: BlockIndexer
    rope: RopeConfig
    layer: int

    def __post_init__(self) -> None:
        of = self.indexer
        widths = (self.q.width, self.weights.width, self.k.width, self.gate.width)
        wanted = (of.heads * of.dim, of.heads, of.blocks.width, of.blocks.width)
        self._check(widths == wanted, "the widths differ")

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        of, rows = self.indexer, len(x[0])
        keys = block_keys(at, of.blocks, self.rope, x[2], x[3])
        products = np.maximum(np.einsum("rhd,kd->rhk", x[0].reshape(rows, of.heads, -1), keys), 0)
        scores = np.einsum("rhk,rh->rk", products, x[1])
        chosen = np.full((rows, of.width), float(rows))
        for row, position in enumerate(at.positions.tolist()):
            count = (position + 1) // of.pool
            best = np.argsort(-scores[row, :count], kind="stable")[: of.most // of.pool]
            chosen[row, : len(best)] = best
        return chosen


@dataclass(frozen=True, slots=True, eq=False)
class AttendBlocks(Op):
    """y (rows, heads * dim) = attention of the rows to the last tokens, and to blocks of tokens.

    ``q`` (rows, heads * dim) and ``k`` (rows, dim), which is the value, too, are turned; k goes
    into the cache of ``layer``. ``keys`` and ``gates`` (rows, width) of tokens go into that of
    blocks, and so do keys of blocks made of them; rows attend to those that are ``selected``, if
    given.
    """

    word = "attend_blocks"
    q: Tensor
    k: Tensor
    keys: Tensor | None
    gates: Tensor | None
    selected: Tensor | None
    mixer: Attention
    layer: int

    def __post_init__(self) -> None:
        mixer, of = self.mixer, self.of
        widths = self.q.width, self.k.width
        self._check(widths == (mixer.heads * mixer.key_dim, mixer.key_dim), "the widths differ")
        self._check((self.keys is None) == (of.blocks is None), "keys go with blocks")

    @property
    def of(self) -> Compression:
        """The description of windows and blocks."""
        assert self.mixer.compression is not None
        return self.mixer.compression

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        mixer, of, rows = self.mixer, self.of, len(x[0])
        q, keys = x[0].reshape(rows, mixer.heads, -1), x[1]
        behind = at.positions[:, None] - at.positions[None, :]
        seen = (behind >= 0) & (behind < of.window)
        if of.blocks is not None:
            assert mixer.rope is not None
            made = block_keys(at, of.blocks, mixer.rope, x[2], x[3])
            keys = np.concatenate([keys, made])
            numbers = np.arange(len(made))
            whole = (at.positions[:, None] + 1) // of.blocks.ratio > numbers
            if self.selected is not None:
                whole &= (x[4][:, :, None] == numbers).any(axis=1)
            seen = np.concatenate([seen, whole], axis=1)
        logits = np.einsum("qhd,kd->hqk", q, keys) * mixer.scale
        logits = np.where(seen, logits, -np.inf)
        assert mixer.sinks is not None
        sinks = np.broadcast_to(at.vector(mixer.sinks)[:, None, None], (*logits.shape[:2], 1))
        logits = np.concatenate([logits, sinks], axis=2)
        weights = np.exp(logits - logits.max(axis=2, keepdims=True))
        weights = weights / weights.sum(axis=2, keepdims=True)
        found: Floats = np.einsum("hqk,kd->qhd", weights[:, :, :-1], keys).reshape(rows, -1)
        return found


@dataclass(frozen=True, slots=True, eq=False)
class CacheBlocks(AttendBlocks):
    """The keys of the rows alone, into the cache; y are the queries, which nothing reads."""

    word = "cache_blocks"

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        return x[0]


def block_keys(
    at: Evaluation, of: Compressor, rope: RopeConfig, keys: Floats, gates: Floats
) -> Floats:
    """Keys (blocks, dim) of whole blocks, of keys and gates (rows, width) of tokens."""
    count, dim, width = len(keys) // of.ratio, of.dim, of.width
    shape = count, of.ratio, width
    values = keys[: count * of.ratio].reshape(shape)
    logits = gates[: count * of.ratio].reshape(shape) + at.vector(of.places).reshape(-1, width)
    if width > dim:
        nothing = np.zeros((1, of.ratio, dim))
        before = np.concatenate([nothing, values[:-1, :, :dim]])[:count]
        values = np.concatenate([before, values[:, :, dim:]], axis=1)
        before = np.concatenate([nothing - np.inf, logits[:-1, :, :dim]])[:count]
        logits = np.concatenate([before, logits[:, :, dim:]], axis=1)
    if not count:
        return np.zeros((0, dim))
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    made = (weights * values).sum(axis=1) / weights.sum(axis=1)
    assert of.norm.weight is not None
    made = of.norm.norm(made, at.vector(of.norm.weight))
    first = np.arange(count) * of.ratio
    turned: Floats = turned_tail(made[:, None], rope.rotation, first, at.turns(rope))[:, 0]
    return turned
