"""Attention by a latent vector (MLA, arXiv 2405.04434) as operations, in the absorbed form."""

from __future__ import annotations

from urdir.model.families.attention import Attention, Indexer, Latent
from urdir.model.graph.latent import AttendLatent, CacheLatent, HeadProduct
from urdir.model.graph.selection import CacheIndex, Select
from urdir.model.graph.tensor import Tensor
from urdir.model.layers.attention import gated
from urdir.model.layers.builder import LayerOps


def latent_attention(at: LayerOps, mixer: Attention, x: Tensor, scale: float) -> Tensor:
    """scale * O (attention of x), gated where there is a gate."""
    assert mixer.latent is not None
    attend, gates = _attend(at, AttendLatent, mixer, mixer.latent, x)
    heads = at.only_outputs("attention.output_rows", at.graph.add(attend))
    if at.residual is not None:
        at.residual = at.only_outputs("output_rows", at.residual)
    if gates is not None:
        gates = at.only_outputs("attn_gate.output_rows", gates, "output gate")
    expand = mixer.latent.expand
    y = Tensor("expanded", heads.rows, expand.rows)
    heads = at.graph.add(HeadProduct(at.name("attn_v_b"), y, heads, expand, mixer.heads))
    if mixer.gate is not None and gates is not None:
        heads = gated(at, mixer.gate, gates, heads)
    return at.finish("attn_output", heads, mixer.o, scale * mixer.value_scale)


def cached_latents(at: LayerOps, mixer: Attention, x: Tensor) -> None:
    """What later tokens need of x, into the cache."""
    assert mixer.latent is not None
    at.graph.add(_attend(at, CacheLatent, mixer, mixer.latent, x)[0])


def _attend(
    at: LayerOps, kind: type[AttendLatent], mixer: Attention, of: Latent, x: Tensor
) -> tuple[AttendLatent, Tensor | None]:
    """The attention of the products of x, and those of the gate."""
    assert mixer.k is not None
    # a head all of which turns is not put together, nor one that does not turn
    whole, still = of.q_still is None, mixer.key_is_latent
    key, query = ("k", "q") if whole else ("k rotated", "q rotated")
    wanted = [*([] if still else [(key, mixer.k)]), ("latent", of.down)]
    queries = [] if still else [(query, mixer.q)]
    queries += [] if of.q_still is None else [("q still", of.q_still)]
    wanted += queries if of.q_down is None else [("latent q", of.q_down)]
    if (indexer := mixer.indexer) is not None:
        assert indexer.weights is not None
        wanted += [("index k", indexer.k), ("index weights", indexer.weights)]
        wanted += [] if indexer.gate is None else [("index gate", indexer.gate)]
        queries.append(("index q", indexer.q))
    if mixer.gate is not None:
        wanted.append(("attention gate", mixer.gate.linear))
    made = {name: at.product("attn_kv_a", x, linear, name) for name, linear in wanted}
    if of.k_norm is not None:
        made[key] = at.norm("attn_k_norm", made[key], of.k_norm, key)
    if of.q_down is not None:
        down = at.norm("attn_q_a_norm", made["latent q"], of.q_norm)
        made |= {name: at.product("attn_q_b", down, linear, name) for name, linear in queries}
    selected = at.step.selected if mixer.follows_indexer else None
    if indexer is not None:
        at.step.selected = selected = _selected(at, kind, indexer, made)
    q, k, latent = made.get(query), made.get(key), made["latent"]
    width = mixer.output_width if kind is AttendLatent else (q or latent).width
    attend = kind(
        at.name("attention"),
        Tensor("heads", latent.rows, width),
        q,
        k,
        latent,
        made.get("q still"),
        mixer,
        at.index,
        selected if kind is AttendLatent else None,
    )
    return attend, made.get("attention gate")


def _selected(
    at: LayerOps, kind: type[AttendLatent], of: Indexer, made: dict[str, Tensor]
) -> Tensor:
    """The tokens that rows attend to, or (of `CacheLatent`) their index keys alone in the cache."""
    q, k = made["index q"], at.norm("indexer.k_norm", made["index k"], of.k_norm, "index key")
    y = Tensor("selected", q.rows, of.width, "u32")
    select = Select
    if kind is CacheLatent:
        y, select = Tensor("index queries", q.rows, q.width), CacheIndex
    weights, gate = made["index weights"], made.get("index gate")
    return at.graph.add(select(at.name("indexer"), y, q, k, weights, gate, of, at.index))
