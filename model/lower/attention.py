"""Rules for attention: norms and rotation of query and key heads, and the attention after them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from urdir.model.graph.attention import Attend, Cache
from urdir.model.graph.op import Op
from urdir.model.graph.ops import Rope
from urdir.model.lower.attend import append_tokens, incremental_attention_into
from urdir.model.lower.early import precedes_mixture
from urdir.model.lower.lowering import Lowering
from urdir.model.lower.prepared import Prepared, layer_attention
from urdir.model.lower.requests import next_matrix, packs, takes_few_heads
from urdir.model.lower.rule import Rule
from urdir.model.lower.selection import append_selected_heads, selects
from urdir.ptxgen.kernels.attention.own_token import OwnToken
from urdir.ptxgen.kernels.attention.prepare_tokens import PrepareTokens
from urdir.ptxgen.weights.halves import Halves

if TYPE_CHECKING:
    from urdir.model.memory.weights import Matrix


def lower_attention(at: Lowering, ops: Sequence[Op]) -> bool:
    """(norm | rope)* attend."""
    prepared = Prepared.of(ops)
    token = None if prepared is None else prepared.token
    if prepared is None or token is None or not all(at.is_read_once(op.y) for op in ops[:-1]):
        return False
    if any(at.is_read_later(x) for op in ops[:-1] for x in op.reads):
        return False  # which the launches overwrite
    attention = layer_attention(at, prepared.attend, token, prepared.constants(at))
    if at.rows.count == 1 and precedes_mixture(at):
        # On an H200 a step of one row of qwen3-30b-a3b takes 942 us so, else 951; an 8B model 1,336
        # in place of 1,284.
        attention = replace(attention, starts_next=True)
    if prepared.sources[0] in at.halves:
        attention = replace(attention, halves=True)
    if isinstance(prepared.attend, Cache):
        append_tokens(at.plan, attention)
        return True
    selected = prepared.attend.selected
    if selected is not None and selects(at, prepared.attend):
        append_selected_heads(at, prepared.attend, selected, attention)
        return True
    y, matrix = prepared.attend.y, next_matrix(at, prepared.attend.y)
    heads, packed = at.place(y), None
    if matrix is not None and attention.can_pack and _takes_packed(at, matrix):
        attention = replace(attention, order=Halves(matrix.format).order)
        packed = at.work["packed"]
        at.packed[y] = packed
        at.move(y, packed)
    incremental_attention_into(
        at.plan, attention, heads if packed is None else packed, packs=packed is not None
    )
    return True


def _takes_packed(at: Lowering, matrix: Matrix) -> bool:
    return packs(at, at.rows.count, [matrix]) or takes_few_heads(at, matrix)


def lower_rope(at: Lowering, ops: Sequence[Op]) -> bool:
    """A rotation before norms that attention does not compute: in place."""
    (of,) = ops
    assert isinstance(of, Rope)
    attend = next((op for op in at.ops[at.position :] if isinstance(op, Attend)), None)
    if attend is None or at.is_read_later(of.x):
        return False
    token = OwnToken(of.rope.rotation, appends=False)
    layout, rows = at.parts.cache.layout(attend.layer), at.rows
    at.share(of.y, of.x)
    at.launch(
        PrepareTokens(of.heads, layout, rows.count, token),
        of.label,
        q=at.place(of.x),
        frequencies=at.parts.weights.rope_tables[of.rope],
        position=rows.position,
    )
    return True


RULES: Sequence[Rule] = (
    *(
        Rule(f"{before} {attend}".strip(), lower_attention)
        for before in ("rope rope norm norm", "norm norm rope rope", "rope norm", "norm rope")
        for attend in ("attend", "cache")
    ),
    *(
        Rule(f"{before} {attend}".strip(), lower_attention)
        for before in ("norm norm", "rope rope", "norm", "rope", "")
        for attend in ("attend", "cache")
    ),
    Rule("rope", lower_rope),
)
