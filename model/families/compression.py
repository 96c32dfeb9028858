"""Attention to the last tokens and to compressed blocks of all tokens (DeepSeek V4), described."""

from __future__ import annotations

from dataclasses import dataclass

from urdir.model.families.stored import Linear, Normalization, StoredVector


@dataclass(frozen=True, slots=True)
class Compressor:
    """One key for every ``ratio`` tokens: the sum of ``keys`` (width, hidden) x of its tokens,
    weighted value by value by the softmax over tokens of ``gate`` (width, hidden) x + ``places``
    (ratio, width), then its ``norm`` (dim,), rotated by the position of its first token.

    Where width is twice dim, a block's key is made of the tokens before it, too: of the first half
    of the values of those, and the second half of the values of the block's tokens.
    """

    ratio: int
    keys: Linear
    gate: Linear
    places: StoredVector
    norm: Normalization

    @property
    def width(self) -> int:
        """Values of a token."""
        return self.keys.rows

    @property
    def dim(self) -> int:
        """Values of a block's key."""
        assert self.norm.weight is not None
        return self.norm.weight.size


@dataclass(frozen=True, slots=True)
class BlockIndexer:
    """A lightning indexer of blocks (`attention.Indexer`): a row attends to the blocks with the
    highest scores, of up to ``most`` tokens. Its keys have a compressor of their own (``blocks``).
    """

    heads: int
    dim: int
    most: int
    q: Linear
    weights: Linear
    blocks: Compressor

    @property
    def pool(self) -> int:
        """Tokens of a block."""
        return self.blocks.ratio

    @property
    def width(self) -> int:
        """Tokens of the selected blocks, and of the one that has begun."""
        return self.most + self.pool - 1


@dataclass(frozen=True, slots=True)
class Compression:
    """Attention to the last ``window`` tokens and to compressed ``blocks``: to all whole ones up to
    the row, or to those that an ``index`` selects. Without blocks to the window alone.

    There is one KV head: the norm of `Attention.k` x, whose last values rotate, is key and value.
    Queries are those of ``q_norm`` (``q_down`` x), each head normed without weights
    (``head_norm``). Results are rotated back. ``o_down`` (groups * rank, heads * dim / groups)
    multiplies each of ``groups`` of heads, before `Attention.o`.
    """

    window: int
    q_down: Linear
    q_norm: Normalization
    head_norm: Normalization
    k_norm: Normalization
    o_down: Linear
    groups: int
    blocks: Compressor | None = None
    index: BlockIndexer | None = None

    def most_blocks(self, keys: int) -> int:
        """Blocks that a row attends to at most, among ``keys`` tokens."""
        if self.blocks is None:
            return 0
        whole = keys // self.blocks.ratio
        return whole if self.index is None else min(whole, self.index.most // self.blocks.ratio)
