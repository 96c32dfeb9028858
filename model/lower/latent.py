"""Rules for attention to latent vectors: absorbed, or with keys and values of each head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from urdir.model.families.attention import Attention
from urdir.model.graph.latent import AttendLatent, CacheLatent, HeadProduct
from urdir.model.graph.op import Op
from urdir.model.graph.ops import Gather, Product
from urdir.model.lower.attend import LayerAttention, append_keys_alone, incremental_attention_into
from urdir.model.lower.experts.per_row import PerRow
from urdir.model.lower.latent_blocks import append_blocks, block_kernel
from urdir.model.lower.latent_heads import (
    WRITTEN_KEYS,
    WRITTEN_SEQUENCE,
    WRITTEN_VALUES,
    append_absorbed,
    append_latent_key,
    append_own_heads,
    parts_of_heads,
)
from urdir.model.lower.lowering import Lowering
from urdir.model.lower.prepared import attention_of_rows
from urdir.model.lower.registers import Overlaid
from urdir.model.lower.requests import packs
from urdir.model.lower.rows import Rows
from urdir.model.lower.rule import Rule, alone
from urdir.model.lower.selection import append_selected, selects
from urdir.model.lower.stream import lower_gather
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.own_token import OwnToken
from urdir.ptxgen.kernels.gather import Gather as GatherKernel

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.ptxgen.kernels.attention.prefill_block import PrefillBlock


def lower_absorbed(at: Lowering, of: AttendLatent) -> None:
    """attend_latent: each row attends to latent vectors."""
    if selects(at, of):
        append_selected(at, of, _layer_attention(at, of, of.mixer, _token(of.mixer), at.rows))
        return
    if at.rows.drafts and _append_drafted(at, of):
        return
    in_parts = _in_parts(at, of)
    if not in_parts:
        append_latent_key(at, of)
    attention = _absorbed(at, of, at.rows, in_parts)
    incremental_attention_into(at.plan, attention, at.place(of.y))


def lower_cached(at: Lowering, of: CacheLatent) -> None:
    """cache_latent: key and value of each row."""
    append_latent_key(at, of)
    append_keys_alone(at.plan, _layer_attention(at, of, of.mixer, _token(of.mixer), at.rows))


def lower_expanded(at: Lowering, ops: Sequence[Op]) -> bool:
    """attend_latent [gathers] head_product: prompts attend by keys and values of heads, which is
    less work. Rows that begin a sequence attend to each other; others walk over what is cached, a
    block after another."""
    of, *gathers, product = ops
    assert isinstance(of, AttendLatent)
    assert isinstance(product, HeadProduct)
    own = of.mixer.written_out
    if own is None or selects(at, of) or not at.is_read_once(of.y):
        return False
    if product.x is not of.y and not at.is_read_once(product.x):
        return False
    packed, y = False, of.y
    if at.rows.walk is not None and (kernel := block_kernel(at, of, own)) is not None:
        heads, packed = _append_walked(at, of, own, kernel, product)
    elif at.rows.begins and at.takes_gemm(at.rows.count):
        heads, packed = _append_begun(at, of, own, product)
    else:
        return False
    for gather in gathers:
        assert isinstance(gather, Gather)
        if gather.x is not y:
            lower_gather(at, gather)
            continue
        assert at.outputs is not None
        select = GatherKernel(product.y.width, gather.x.rows, gather.y.rows)
        to = at.place(gather.y)
        at.launch(select, gather.label, x=heads, index=at.outputs.index, y=to)
        heads = to
    at.move(product.y, heads)
    if packed:
        at.packed[product.y] = heads
    return True


def lower_head_product(at: Lowering, of: HeadProduct) -> None:
    """head_product: the values of heads of what they attended to."""
    x, y, matrix = at.place(of.x), at.place(of.y), at.matrix(of.of)
    PerRow(at, of.x.rows).append_in_turn(of.label, matrix, of.heads, x, y)


def _append_walked(
    at: Lowering, of: AttendLatent, own: Attention, kernel: PrefillBlock, product: HeadProduct
) -> tuple[Slice, bool]:
    """The heads of attention, and whether they are packed: prompts walk over what is cached, other
    rows attend to latent vectors, whose results become each head's own values."""
    append_latent_key(at, of)
    heads, values = at.place(of.y), at.work["expanded"]
    first, rest = at.rows.split()
    if first.count:
        attention = _absorbed(at, of, first, in_parts=_in_parts(at, of, first))
        incremental_attention_into(at.plan, attention, heads)
        matrix = at.matrix(of.of.expand)
        PerRow(at, first.count).append_in_turn(product.label, matrix, of.mixer.heads, heads, values)
    packed = not first.count and kernel.can_pack and _takes_packed(at, product)
    whole = _layer_attention(at, of, of.mixer, _token(of.mixer), at.rows)
    prompts = whole.of_rows(first.count, rest)
    made = append_blocks(at, of, replace(kernel, packs=packed), prompts, first.count)
    return (values if first.count else made), packed


def _append_begun(
    at: Lowering, of: AttendLatent, own: Attention, product: HeadProduct
) -> tuple[Slice, bool]:
    """The heads of attention of the first rows of a sequence: the latent vectors go into the cache,
    and the rows attend to each other by the keys and values of heads."""
    append_latent_key(at, of)
    token, work, rows = _token(of.mixer), at.work, at.rows
    append_keys_alone(at.plan, _layer_attention(at, of, of.mixer, token, rows))
    made = append_own_heads(at, of, own)
    attention = replace(
        _layer_attention(at, of, own, token, rows),
        layout=KvLayout(1, own.kv_heads, rows.count, own.key_dim, "f16", value_dim=own.value_dim),
        caches={"k_cache": work[WRITTEN_KEYS], "v_cache": work[WRITTEN_VALUES]},
        rows=replace(rows, sequence=work.zeroed(WRITTEN_SEQUENCE)),
        work=Overlaid(made, work),
    )
    packed = attention.can_pack and _takes_packed(at, product)
    heads = work["packed"] if packed else at.place(of.y)
    incremental_attention_into(at.plan, attention, heads, packs=packed)
    return heads, packed


def _takes_packed(at: Lowering, product: HeadProduct) -> bool:
    """Whether the product of the heads comes next, and takes them packed."""
    following = at.following()
    if not isinstance(following, Product) or following.x is not product.y:
        return False
    if following.x.rows != at.rows.count or not at.is_read_once(product.y):
        return False
    return packs(at, at.rows.count, [at.matrix(following.of)])


def _append_drafted(at: Lowering, of: AttendLatent) -> bool:
    """Attention of several rows of a sequence on wgmma, after their keys are in the cache; False
    where no kernel takes them."""
    layout, norm = at.parts.cache.layout(of.layer), of.of.norm.norm
    if not layout.values_in_keys:
        return False
    own = _token(of.mixer)
    token = replace(own, latent_norm=norm, appends=False)
    attention = _layer_attention(at, of, of.mixer, token, at.rows)
    if (kernel := attention.latent_kernel()) is None:
        return False
    append_latent_key(at, of)
    append_keys_alone(at.plan, replace(attention, token=own))
    append_absorbed(at, of, at.rows.count, in_parts=True)
    attention.launch(at.plan, kernel, attention.label, out=at.place(of.y))
    return True


def _absorbed(at: Lowering, of: AttendLatent, rows: Rows, in_parts: bool) -> LayerAttention:
    """Attention to latent vectors of the first ``rows``."""
    append_absorbed(at, of, rows.count, in_parts)
    norm = of.of.norm.norm if in_parts else None
    token = replace(_token(of.mixer), latent_norm=norm)
    return _layer_attention(at, of, of.mixer, token, rows)


def _in_parts(at: Lowering, of: AttendLatent, rows: Rows | None = None) -> bool:
    """Whether attention itself puts the heads of a latent vector together."""
    layout = at.parts.cache.layout(of.layer)
    parts = layout.values_in_keys and not of.mixer.key_is_latent
    return parts and not (rows or at.rows).attend_to_each_other


def _token(mixer: Attention) -> OwnToken:
    """What attention does to the heads of a row's new token."""
    assert mixer.qk_norm is None
    rope = None if mixer.rope is None else mixer.rope.rotation
    return OwnToken(rope=rope, v_norm=mixer.v_norm, temperature=mixer.temperature)


def _layer_attention(
    at: Lowering, of: AttendLatent, mixer: Attention, token: OwnToken, rows: Rows
) -> LayerAttention:
    parts = at.parts
    constants: dict[str, Slice] = {}
    if mixer.rope is not None:
        constants["frequencies"] = parts.weights.rope_tables[mixer.rope]
    if mixer.sinks is not None:
        constants["sinks"] = at.vector(mixer.sinks)
    if token.latent_norm is not None:
        constants |= parts_of_heads(at, of)
    return attention_of_rows(at, of, mixer, token, constants, rows)


RULES: Sequence[Rule] = (
    Rule("attend_latent ( gather )* head_product", lower_expanded),
    alone("attend_latent", lower_absorbed),
    alone("cache_latent", lower_cached),
    alone("head_product", lower_head_product),
)
