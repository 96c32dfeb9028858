"""Rules for indexers, and attention to the tokens that they select (DSA)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from urdir.model.families.rope import RopeConfig
from urdir.model.graph.attention import Attend
from urdir.model.graph.compression import SelectBlocks
from urdir.model.graph.latent import AttendLatent
from urdir.model.graph.selection import Select
from urdir.model.lower.attend import LayerAttention, append_keys_alone, append_tokens
from urdir.model.lower.latent_heads import append_absorbed, append_latent_key, parts_of_heads
from urdir.model.lower.lowering import Lowering
from urdir.model.lower.rule import Rule, alone
from urdir.ptxgen.kernels.attention.choice import chosen_attention
from urdir.ptxgen.kernels.attention.index_scores import IndexScores, can_multiply
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.latent_decode import LatentDecode
from urdir.ptxgen.kernels.attention.mean_keys import MeanKeys
from urdir.ptxgen.kernels.attention.own_token import PLAIN_TOKEN, OwnToken
from urdir.ptxgen.kernels.attention.pool_keys import PoolKeys
from urdir.ptxgen.kernels.attention.prepare_tokens import PrepareTokens
from urdir.ptxgen.kernels.attention.select_keys import select_keys
from urdir.ptxgen.kernels.attention.spread_slots import SpreadSlots
from urdir.ptxgen.kernels.join import Join

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.model.graph.tensor import Tensor

#: Bytes of the scores of rows that are selected at once: a long prompt is cut by them, into parts
#: of multiples of four rows, whose positions are 16-byte aligned.
SCORES_NBYTES, ALIGNED_ROWS = 64 << 20, 4
#: Position and sequence of each row among the tokens that it has selected, u32.
LAST, ROW = "selected last", "selected row"


def lower_select(at: Lowering, of: Select) -> None:
    """select: index keys into the cache, and the tokens with the highest scores. Where no row of a
    step has more tokens than it would select, all attend to all."""
    sparse = at.rows.keys > of.indexer.width
    _append_index_tokens(at, of, of.indexer.heads if sparse else 0)
    if sparse:
        append_selection(at, of)


def lower_cache_index(at: Lowering, of: Select) -> None:
    """cache_index: the keys alone."""
    _append_index_tokens(at, of, 0)


def selects(at: Lowering, of: AttendLatent | Attend) -> bool:
    """Whether rows attend to selected tokens alone."""
    return of.selected is not None and at.rows.keys > of.selected.width


def append_selected(at: Lowering, of: AttendLatent, attention: LayerAttention) -> None:
    """Attention of every row to the tokens that were selected for it, once its own key is in the
    cache; ``attention`` is that to all tokens."""
    assert of.selected is not None
    append_latent_key(at, of)
    append_keys_alone(at.plan, attention)
    rows, rope = at.rows, attention.token.rope
    norm, alone = of.of.norm.norm, of.mixer.key_is_latent
    kernel = chosen_attention(
        of.mixer.heads,
        attention.layout.chosen(rows.count, of.selected.width),
        rows.count,
        attention.scores,
        attention.sm_count,
        attention.target,
        None if at.exact or alone or not norm.weight else OwnToken(latent_norm=norm, appends=False),
    )
    in_parts = isinstance(kernel, LatentDecode)
    append_absorbed(at, of, rows.count, in_parts)
    if rope is not None:
        layout, q = attention.layout, at.work["q"]
        if in_parts:
            layout = KvLayout(1, 1, layout.max_len, layout.value_start, "f16")
            q = at.work["q rotated"]
        turn = PrepareTokens(of.mixer.heads, layout, rows.count, OwnToken(rope, appends=False))
        table = attention.constants["frequencies"]
        at.launch(turn, of.name("attention.q"), q=q, frequencies=table, position=rows.position)
    chosen = replace(
        attention,
        caches={**attention.caches, "block_table": at.place(of.selected)},
        rows=replace(rows, sequence=at.work[ROW], position=at.work[LAST]),
        constants={**attention.constants, **(parts_of_heads(at, of) if in_parts else {})},
    )
    chosen.launch(at.plan, kernel, of.label, out=at.place(of.y))


def _append_index_tokens(at: Lowering, of: Select, heads: int) -> None:
    """Index keys of the rows, turned, into the cache; queries turned, if ``heads`` of them."""
    indexer, rows, shape = of.indexer, at.rows, at.parts.cache.shape
    if indexer.pool_rope is not None:
        _append_means(at, of, indexer.pool_rope, heads)
        return
    layout, given = shape.index_layout(of.layer), {**_cache(at, of), **rows.arguments}
    given |= {"q": at.place(of.q), "k": at.place(of.k)}
    if indexer.pool > 1:
        assert of.gate is not None
        raw, given["k"] = at.parts.cache.arguments(of.layer)["r_cache"], at.work["index raw"]
        parts = {"a": at.place(of.k), "b": at.place(of.gate)}
        join = Join(rows.count, indexer.dim, indexer.dim)
        at.launch(join, f"{of.label}.raw", **parts, y=given["k"])
        layout, given["k_cache"] = shape.index_layout(of.layer, "raw"), raw
    token = OwnToken(None if indexer.rope is None else indexer.rope.rotation)
    if indexer.rope is not None:
        given["frequencies"] = at.parts.weights.rope_tables[indexer.rope]
    kernel = PrepareTokens(heads, layout, rows.count, token)
    names = [param.name for param in kernel.params]
    at.launch(kernel, f"{of.label}.tokens", **{name: given[name] for name in names})
    if indexer.places is not None:
        at.launch(
            PoolKeys(layout, indexer.pool, rows.count),
            f"{of.label}.pools",
            **(_cache(at, of) | rows.arguments),
            places=at.vector(indexer.places),
            raw=given["k_cache"],
        )


def _append_means(at: Lowering, of: Select, rope: RopeConfig, heads: int) -> None:
    """Keys of the rows as they are into the cache, and those of the pools that they end, as means;
    queries turned, if ``heads`` of them."""
    indexer, rows, layout = of.indexer, at.rows, at.parts.cache.shape.index_layout(of.layer)
    tables, cache = at.parts.weights.rope_tables, _cache(at, of)
    raw = at.parts.cache.arguments(of.layer)["r_cache"]
    if heads and indexer.rope is not None:
        token = OwnToken(indexer.rope.rotation, appends=False)
        turn = PrepareTokens(heads, layout, rows.count, token)
        q, table = at.place(of.q), tables[indexer.rope]
        at.launch(turn, f"{of.label}.q", q=q, frequencies=table, position=rows.position)
    append = PrepareTokens(0, layout, rows.count, PLAIN_TOKEN)
    given = {**cache, "k_cache": raw, **rows.arguments}
    at.launch(append, f"{of.label}.tokens", k=at.place(of.k), **given)
    norm = at.norm(indexer.k_norm)
    assert norm.weight is not None
    at.launch(
        MeanKeys(layout, indexer.pool, rope.rotation, norm.norm.eps, rows.count),
        f"{of.label}.pools",
        **(cache | rows.arguments),
        weight=norm.weight,
        frequencies=tables[rope],
        raw=raw,
    )


def append_selected_heads(
    at: Lowering, of: Attend, selected: Tensor, attention: LayerAttention
) -> None:
    """Attention of every row to the tokens that were ``selected`` for it, by heads; ``attention``
    is that to all tokens."""
    append_tokens(at.plan, attention)
    layout, groups = attention.layout, attention.layout.kv_heads
    slots, last, row = at.place(selected), at.work[LAST], at.work[ROW]
    if groups > 1:  # the query heads of each KV head are rows of their own
        assert of.sinks is None
        apart = layout.page_len or layout.places
        spread = SpreadSlots(at.rows.count, selected.width, groups, apart)
        given = {"slots": slots, "last": last}
        slots, last, row = (at.work[f"{name} of heads"] for name in ("slots", LAST, ROW))
        made = {"spread": slots, "spread_last": last, "spread_row": row}
        at.launch(spread, f"{of.label}.slots", **given, **made)
    rows = replace(at.rows, count=at.rows.count * groups, sequence=row, position=last)
    kernel = chosen_attention(
        of.heads // groups,
        replace(layout.chosen(rows.count, selected.width), kv_heads=1),
        rows.count,
        attention.scores,
        attention.sm_count,
        attention.target,
        None,
    )
    chosen = replace(attention, caches={**attention.caches, "block_table": slots}, rows=rows)
    chosen.launch(at.plan, kernel, of.label, out=at.place(of.y))


def append_selection(at: Lowering, of: Select | SelectBlocks) -> None:
    """Scores of all tokens, and the slots of the highest in a cache of one head, some rows after
    others."""
    rows, indexer, keys = at.rows, of.indexer, at.rows.keys // of.indexer.pool
    layout, index = at.parts.cache.layout(of.layer), at.parts.cache.shape.index_layout(of.layer)
    layout = replace(layout, kv_heads=1) if isinstance(of, SelectBlocks) else layout
    cache = _cache(at, of)
    table = {"block_table": cache["block_table"]} if layout.is_paged else {}
    scores, most = at.work["index scores"], SCORES_NBYTES // (4 * keys)
    each = max(1, most // ALIGNED_ROWS) * ALIGNED_ROWS
    for first in range(0, rows.count, each):
        count = min(each, rows.count - first)
        kernel = IndexScores(
            index,
            indexer.heads,
            count,
            keys,
            rounds=not at.exact and can_multiply(index),
            pool=indexer.pool,
            weighted=of.weights is not None,
            early=not rows.attend_to_each_other,
        ).spread(at.limits.sms)
        shape = (layout, count, keys, indexer.most, indexer.pool)
        select = select_keys(*shape, at.limits.sms, at.limits.target)

        def part(place: Slice, width: int = 1, first: int = first, count: int = count) -> Slice:
            return place.slice(4 * first * width, 4 * count * width)

        suffix = f" rows {first}" if each < rows.count else ""
        where = {name: part(place) for name, place in rows.arguments.items()}
        given = cache | where
        if of.weights is not None:
            given["weights"] = part(at.place(of.weights), of.weights.width)
        at.launch(
            kernel,
            f"{of.label}.scores{suffix}",
            **given,
            q=part(at.place(of.q), of.q.width),
            scores=scores.slice(0, 4 * count * keys),
        )
        at.launch(
            select,
            f"{of.label}.select{suffix}",
            **(table | where),
            first=first,
            scores=scores.slice(0, 4 * count * keys),
            slots=part(at.place(of.y), indexer.width),
            last=part(at.work[LAST]),
            row=part(at.work[ROW]),
        )


def _cache(at: Lowering, of: Select | SelectBlocks) -> dict[str, Slice]:
    """The cache of index keys, by the names of kernels' parameters."""
    arguments = at.parts.cache.arguments(of.layer)
    table = {"block_table": arguments["block_table"]} if "block_table" in arguments else {}
    return {"k_cache": arguments["i_cache"], **table}


RULES: Sequence[Rule] = (alone("select", lower_select), alone("cache_index", lower_cache_index))
