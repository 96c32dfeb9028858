"""Rules for attention to the last tokens and to compressed blocks (DeepSeek V4)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from urdir.model.families.compression import Compressor
from urdir.model.families.rope import RopeConfig
from urdir.model.graph.compression import AttendBlocks, SelectBlocks, TurnTail
from urdir.model.lower.lowering import Lowering
from urdir.model.lower.rule import Rule, alone
from urdir.model.lower.selection import LAST, ROW, append_selection
from urdir.ptxgen.kernels.attention import turn_tail
from urdir.ptxgen.kernels.attention.block_slots import BlockSlots
from urdir.ptxgen.kernels.attention.choice import chosen_attention
from urdir.ptxgen.kernels.attention.compress_keys import CompressKeys
from urdir.ptxgen.kernels.attention.own_token import PLAIN_TOKEN
from urdir.ptxgen.kernels.attention.prepare_tokens import PrepareTokens
from urdir.ptxgen.kernels.join import Join

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.model.graph.tensor import Tensor
    from urdir.ptxgen.kernels.attention.kv_layout import KvLayout

#: Slots of the keys that each row attends to, (rows, most) u32; keys and gates of tokens, side by
#: side, f32.
SLOTS, BESIDE = "attended slots", "keys and gates"


def lower_turn_tail(at: Lowering, of: TurnTail) -> None:
    """turn_tail: the last values of heads."""
    rotation, dim = of.rope.rotation, of.x.width // of.heads
    kernel = turn_tail.TurnTail(of.x.rows, of.heads, dim, rotation, of.back)
    table = at.parts.weights.rope_tables[of.rope]
    at.launch(
        kernel,
        of.label,
        x=at.place(of.x),
        frequencies=table,
        position=at.rows.position,
        y=at.place(of.y),
    )


def lower_select_blocks(at: Lowering, of: SelectBlocks) -> None:
    """select_blocks: index keys of blocks into the cache, and the blocks with the highest scores.
    Where no row of a step has more blocks than it would select, all attend to all."""
    _append_blocks(at, of, "raw", of.indexer.blocks, of.rope, (of.k, of.gate))
    if _selects(at, of):
        append_selection(at, of)


def lower_attend_blocks(at: Lowering, of: AttendBlocks) -> None:
    """attend_blocks: keys into the cache, and attention to those of the last tokens and blocks."""
    _append_keys(at, of)
    layout, rows = at.parts.cache.layout(of.layer), at.rows
    ratio = 0 if of.of.blocks is None else of.of.blocks.ratio
    most, chosen = of.of.most_blocks(rows.keys), _is_selected(at, of)
    window = min(of.of.window, rows.keys)
    slots = BlockSlots(layout, rows.count, window, ratio, most, chosen)
    cache = at.parts.cache.arguments(of.layer)
    table = {"block_table": cache["block_table"]} if layout.is_paged else {}
    selected = {"selected": at.place(of.selected)} if chosen and of.selected is not None else {}
    places = {"slots": at.work[SLOTS], "last": at.work[LAST], "row": at.work[ROW]}
    at.launch(slots, f"{of.label}.slots", **table, **selected, **rows.arguments, **places)
    own = replace(layout.chosen(rows.count, slots.width), kv_heads=1)
    limits, heads = at.limits, of.mixer.heads
    scores = of.mixer.scores
    kernel = chosen_attention(heads, own, rows.count, scores, limits.sms, limits.target, None)
    assert of.mixer.sinks is not None
    at.launch(
        kernel,
        of.label,
        q=at.place(of.q),
        k_cache=cache["k_cache"],
        block_table=at.work[SLOTS],
        sinks=at.vector(of.mixer.sinks),
        sequence=at.work[ROW],
        position=at.work[LAST],
        out=at.place(of.y),
    )


def lower_cache_blocks(at: Lowering, of: AttendBlocks) -> None:
    """cache_blocks: the keys alone."""
    _append_keys(at, of)


def _selects(at: Lowering, of: SelectBlocks) -> bool:
    """Whether some row may have more blocks than are selected."""
    return at.rows.keys // of.indexer.pool > of.indexer.most // of.indexer.pool


def _is_selected(at: Lowering, of: AttendBlocks) -> bool:
    blocks = of.of.blocks
    return (
        of.selected is not None
        and blocks is not None
        and at.rows.keys // blocks.ratio > of.of.most_blocks(at.rows.keys)
    )


def _append_keys(at: Lowering, of: AttendBlocks) -> None:
    """Keys of the rows into the cache, and of the blocks that they end."""
    layout, key = at.parts.cache.layout(of.layer), at.place(of.k)
    caches = at.parts.cache.arguments(of.layer)
    if layout.kv_heads > 1:  # the second head is that of blocks, which are written later
        beside = Join(of.k.rows, of.k.width, of.k.width)
        at.launch(beside, f"{of.label}.beside", a=key, b=key, y=at.work[BESIDE])
        key = at.work[BESIDE]
    _append_tokens(at, f"{of.label}.cached", layout, key, caches["k_cache"], of.layer)
    if of.keys is not None and of.gates is not None:
        assert of.of.blocks is not None
        assert of.mixer.rope is not None
        _append_blocks(at, of, "blocks", of.of.blocks, of.mixer.rope, (of.keys, of.gates))


def _append_blocks(
    at: Lowering,
    of: SelectBlocks | AttendBlocks,
    kind: Literal["raw", "blocks"],
    blocks: Compressor,
    rope: RopeConfig,
    tokens: tuple[Tensor, Tensor],
) -> None:
    """Keys and gates of the rows' ``tokens`` into the cache of that ``kind``, and keys of the
    blocks that they end into that of the indexer or of attention."""
    cache, beside = at.parts.cache, at.work[BESIDE]
    caches, raw = cache.arguments(of.layer), cache.shape.index_layout(of.layer, kind)
    keys, gates = tokens
    join = Join(keys.rows, blocks.width, blocks.width)
    at.launch(join, f"{of.label}.{kind}", a=at.place(keys), b=at.place(gates), y=beside)
    source = caches[f"{kind[0]}_cache"]
    _append_tokens(at, f"{of.label}.{kind}.cached", raw, beside, source, of.layer)
    norm, to = at.norm(blocks.norm), (cache.layout(of.layer), caches["k_cache"])
    if kind == "raw":
        to = cache.shape.index_layout(of.layer), caches["i_cache"]
    kernel = CompressKeys(raw, to[0], blocks.ratio, rope.rotation, norm.norm.eps, keys.rows)
    at.launch(
        kernel,
        f"{of.label}.{kind}.compressed",
        places=at.vector(blocks.places),
        weight=norm.weight,
        frequencies=at.parts.weights.rope_tables[rope],
        raw=source,
        k_cache=to[1],
        block_table=caches.get("block_table"),
        **at.rows.arguments,
    )


def _append_tokens(
    at: Lowering, label: str, layout: KvLayout, k: Slice, cache: Slice, layer: int
) -> None:
    """Keys of the rows' tokens into a cache of that ``layout``."""
    kernel = PrepareTokens(0, layout, at.rows.count, PLAIN_TOKEN)
    table = at.parts.cache.arguments(layer).get("block_table")
    at.launch(kernel, label, k=k, k_cache=cache, block_table=table, **at.rows.arguments)


RULES: Sequence[Rule] = (
    alone("turn_tail", lower_turn_tail),
    alone("select_blocks", lower_select_blocks),
    alone("attend_blocks", lower_attend_blocks),
    alone("cache_blocks", lower_cache_blocks),
)
