"""Attention to the last tokens and to compressed blocks (DeepSeek V4) as operations."""

from __future__ import annotations

from urdir.model.families.attention import Attention
from urdir.model.families.compression import BlockIndexer, Compression
from urdir.model.families.rope import RopeConfig
from urdir.model.families.stored import Linear
from urdir.model.graph.compression import AttendBlocks, CacheBlocks, SelectBlocks, TurnTail
from urdir.model.graph.latent import HeadProduct
from urdir.model.graph.ops import Norm
from urdir.model.graph.tensor import Tensor
from urdir.model.layers.builder import LayerOps


def compressed_attention(
    at: LayerOps, mixer: Attention, of: Compression, x: Tensor, scale: float
) -> Tensor:
    """scale * O (the groups' products of attention of x)."""
    heads = at.graph.add(_attend(at, AttendBlocks, mixer, of, x))
    heads = _turned(at, "attention.back", heads, _rope(mixer), mixer.heads, back=True)
    low = Tensor("low heads", heads.rows, of.o_down.rows)
    label = at.name("attn_output_a")
    low = at.graph.add(HeadProduct(label, low, heads, of.o_down, of.groups))
    return at.finish("attn_output_b", low, mixer.o, scale)


def cached_blocks(at: LayerOps, mixer: Attention, of: Compression, x: Tensor) -> None:
    """What later tokens need of x, into the cache."""
    at.graph.add(_attend(at, CacheBlocks, mixer, of, x))


def _attend(
    at: LayerOps, kind: type[AttendBlocks], mixer: Attention, of: Compression, x: Tensor
) -> AttendBlocks:
    """The attention of the products of x."""
    assert mixer.k is not None
    rope, blocks, index = _rope(mixer), of.blocks, of.index
    wanted: list[tuple[str, Linear]] = [("latent q", of.q_down), ("key", mixer.k)]
    queries = [("query", mixer.q)]
    if blocks is not None:
        wanted += [("block keys", blocks.keys), ("block gates", blocks.gate)]
    if index is not None:
        own = index.blocks
        wanted += [("index keys", own.keys), ("index gates", own.gate)]
        wanted.append(("index weights", index.weights))
        queries.append(("index query", index.q))
    made = {name: at.product("attn_kv", x, linear, name) for name, linear in wanted}
    down = at.norm("attn_q_a_norm", made["latent q"], of.q_norm)
    made |= {name: at.product("attn_q_b", down, linear, name) for name, linear in queries}
    selected = None if index is None else _selected(at, index, rope, made)
    y = Tensor("normed query", x.rows, mixer.query_width)
    norm = Norm(at.name("attn_q_norm"), y, made["query"], of.head_norm, mixer.key_dim)
    q = _turned(at, "attention.q", at.graph.add(norm), rope, mixer.heads)
    k = at.norm("attn_kv_a_norm", made["key"], of.k_norm, "normed key")
    return kind(
        at.name("attention"),
        Tensor("heads", x.rows, q.width),
        q,
        _turned(at, "attention.k", k, rope, 1),
        made.get("block keys"),
        made.get("block gates"),
        selected,
        mixer,
        at.index,
    )


def _selected(at: LayerOps, of: BlockIndexer, rope: RopeConfig, made: dict[str, Tensor]) -> Tensor:
    """The blocks that rows attend to."""
    q = _turned(at, "indexer.q", made["index query"], rope, of.heads)
    y = Tensor("selected", q.rows, of.width, "u32")
    weights, k, gate = (made[f"index {name}"] for name in ("weights", "keys", "gates"))
    label = at.name("indexer")
    return at.graph.add(SelectBlocks(label, y, q, weights, k, gate, of, rope, at.index))


def _turned(
    at: LayerOps, label: str, x: Tensor, rope: RopeConfig, heads: int, *, back: bool = False
) -> Tensor:
    y = Tensor(f"turned {x.name}", x.rows, x.width)
    return at.graph.add(TurnTail(at.name(label), y, x, rope, heads, back))


def _rope(mixer: Attention) -> RopeConfig:
    assert mixer.rope is not None
    return mixer.rope
