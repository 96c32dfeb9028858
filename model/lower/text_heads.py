"""Queries, keys and values of short texts, which products leave as heads in f16."""

from __future__ import annotations

from dataclasses import replace

from urdir.model.graph.attention import Attend, Cache
from urdir.model.graph.ops import Rope
from urdir.model.lower.chain import Chain
from urdir.model.lower.lowering import Lowering
from urdir.model.lower.prepared import Prepared, layer_attention
from urdir.ptxgen.kernels.linear.epilogue.heads import HeadPlaces, Heads


def heads_of_texts(at: Lowering, chain: Chain) -> Heads | None:
    """The step that leaves the products of a chain as the f16 heads that attention of short texts
    reads next; None for other products."""
    if at.rows.texts is None or chain.epilogue or len(chain.results) != 3:
        return None
    ops = at.ops[at.end : at.end + 3]
    last = next((n for n, op in enumerate(ops) if not isinstance(op, Rope)), len(ops))
    attend = ops[last] if last < len(ops) else None
    if not isinstance(attend, Attend) or isinstance(attend, Cache) or attend.selected is not None:
        return None
    prepared = Prepared.of(ops[: last + 1])
    if prepared is None or prepared.token is None or prepared.sources != tuple(chain.results):
        return None
    if not all(map(at.is_read_once, (*chain.results, *(op.y for op in ops[:last])))):
        return None
    attention = layer_attention(at, attend, prepared.token, {})
    kernel = replace(attention, halves=True).short_kernel(packs=False)
    if kernel is None:
        return None
    dims = kernel.head_dim
    return Heads((HeadPlaces(dims, 0, dims, kernel.rows),) * 3, whole=True)
