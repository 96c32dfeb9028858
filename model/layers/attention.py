"""The attention of a layer as operations."""

from __future__ import annotations

from urdir.model.families.attention import Attention, CrossKeys, OutputGate
from urdir.model.graph.attention import Attend, Cache
from urdir.model.graph.ops import Bound, Gate, Norm, Rope
from urdir.model.graph.selection import CacheIndex, Select
from urdir.model.graph.tensor import Tensor
from urdir.model.layers.builder import LayerOps
from urdir.ptxgen.kernels.activation import Activation


def attention(at: LayerOps, mixer: Attention, x: Tensor, scale: float) -> Tensor:
    """scale * O (attention of x), gated where there is a gate."""
    selected = _selected(at, Select, mixer, x)
    q, k, v, gates = _products(at, mixer, x)
    heads = at.graph.add(attend_op(at, Attend, "heads", mixer, q, k, v, selected))
    if mixer.gate is not None and gates is not None:
        heads = gated(at, mixer.gate, gates, heads)
    heads = at.norm("attn_sub_norm", heads, mixer.norm, "normed heads")
    heads = at.only_outputs("attention.output_rows", heads)
    if at.residual is not None:
        at.residual = at.only_outputs("output_rows", at.residual)
    return at.finish("attn_output", heads, mixer.o, scale * mixer.value_scale)


def cached_keys(at: LayerOps, mixer: Attention, x: Tensor) -> None:
    """The keys and values of x alone, into the cache, where the layer has one."""
    if mixer.k is not None:
        _selected(at, CacheIndex, mixer, x)
        q, k, v, _ = _products(at, mixer, x)
        at.graph.add(attend_op(at, Cache, "q", mixer, q, k, v))


def _selected(at: LayerOps, kind: type[Select], mixer: Attention, x: Tensor) -> Tensor | None:
    """The tokens that rows attend to, where an indexer selects some; or (of `CacheIndex`) their
    index keys alone in the cache."""
    of = mixer.indexer
    if of is None:
        return None
    assert of.pool_rope is not None
    q, k = (
        at.product("indexer", x, linear, name)
        for linear, name in ((of.q, "index q"), (of.k, "index k"))
    )
    if of.q_norm is not None:
        y = Tensor("index q", q.rows, q.width)
        q = at.graph.add(Norm(at.name("indexer.q_norm"), y, q, of.q_norm, of.dim))
    y = Tensor("selected", q.rows, of.width, "u32")
    if kind is CacheIndex:
        y = Tensor("index queries", q.rows, q.width)
    return at.graph.add(kind(at.name("indexer"), y, q, k, None, None, of, at.index))


def cross_keys(at: LayerOps, mixer: Attention, of: CrossKeys, states: Tensor) -> None:
    """The keys and values of cross attention to a source's ``states``, into the layer's cache."""
    k, v = (
        at.product("cross_attn_kv", states, each, name) for each, name in ((of.k, "k"), (of.v, "v"))
    )
    at.graph.add(attend_op(at, Cache, "keys", mixer, k, k, v))


def gated(at: LayerOps, gate: OutputGate, gates: Tensor, heads: Tensor) -> Tensor:
    """heads * f(gates), by value or by head."""
    y = Tensor(heads.name, heads.rows, heads.width)
    return at.graph.add(Gate(at.name("attn_gate"), y, gates, heads, Activation(gate.activation)))


def _products(
    at: LayerOps, mixer: Attention, x: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Queries, keys, values, normed and turned, and the gate."""
    made = head_products(at, mixer, x)
    for name, y in prepared_heads(at, mixer, made["q"], made.get("k")):
        made[name] = y
    return made["q"], made.get("k"), made.get("v"), made.get("attention gate")


def head_products(at: LayerOps, mixer: Attention, x: Tensor) -> dict[str, Tensor]:
    """Queries, keys, values and the gate, by name, as the products leave them. A matrix that is
    that of keys and of values has two products: keys are normed and turned later."""
    label = "attn_qkv"
    wanted = [("q", mixer.q), ("k", mixer.k), ("v", mixer.v or mixer.k)]
    if mixer.gate is not None:
        wanted.append(("attention gate", mixer.gate.linear))
    made: dict[str, Tensor] = {}
    for name, of in wanted:
        if of is None:
            continue
        y = at.product(label, x, of, name)
        if mixer.clamp:
            bounded = Tensor(name, y.rows, y.width)
            y = at.graph.add(Bound(at.name(label), bounded, y, clamp=mixer.clamp))
        made[name] = y
    return made


def prepared_heads(
    at: LayerOps, mixer: Attention, q: Tensor, k: Tensor | None
) -> list[tuple[str, Tensor]]:
    """Queries and keys after the norms of heads and the rotation, in the mixer's order."""
    heads = {"q": q} if k is None else {"q": q, "k": k}
    counts = {"q": mixer.heads, "k": mixer.kv_heads}

    def norm() -> None:
        of = mixer.qk_norm
        if of is None:
            return
        over = mixer.key_dim if of.over == "head" else 0
        for name, x in heads.items():
            label, y = at.name(f"attn_{name}_norm"), Tensor(name, x.rows, x.width)
            heads[name] = at.graph.add(Norm(label, y, x, of.q if name == "q" else of.k, over))

    def turn() -> None:
        if mixer.rope is None:
            return
        for name, x in heads.items():
            label, y = at.name(f"attention.{name}_rope"), Tensor(name, x.rows, x.width)
            heads[name] = at.graph.add(Rope(label, y, x, mixer.rope, counts[name]))

    after_rope = mixer.qk_norm is not None and mixer.qk_norm.after_rope
    for step in (turn, norm) if after_rope else (norm, turn):
        step()
    return list(heads.items())


def attend_op(
    at: LayerOps,
    kind: type[Attend],
    name: str,
    mixer: Attention,
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    selected: Tensor | None = None,
) -> Attend:
    """The attention of prepared heads, or a `Cache` of their keys and values alone."""
    width = mixer.output_width if kind is Attend else q.width
    return kind(
        at.name("attention"),
        Tensor(name, q.rows, width),
        q,
        k,
        v,
        layer=at.index,
        heads=mixer.heads,
        kv_heads=mixer.kv_heads,
        scores=mixer.scores,
        sinks=mixer.sinks,
        v_norm=mixer.v_norm if k is not None else None,
        temperature=mixer.temperature,
        shares_cache_of=mixer.shares_cache_of,
        relative=mixer.relative,
        cross=mixer.cross is not None,
        selected=selected,
    )
