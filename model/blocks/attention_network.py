"""The attention of a layer as a network: its products, what is done to heads, and the gate."""

from __future__ import annotations

from typing import TYPE_CHECKING

from urdir.model.blocks.attention import LayerAttention, incremental_attention_into
from urdir.model.blocks.linear import Activations
from urdir.model.blocks.norms import append_head_norm
from urdir.model.blocks.parts import Destination, LayerStep
from urdir.model.families.description import Attention, QkNorm
from urdir.model.memory.weights import Matrix, NormWeights
from urdir.ptxgen.kernels.attention.own_token import OwnToken, Temperature
from urdir.ptxgen.kernels.attention.scores import Scores

if TYPE_CHECKING:
    from urdir.driver.memory import Slice


def append_attention(
    at: LayerStep, mixer: Attention, x: Activations, norm: NormWeights | None, to: Destination
) -> Activations:
    """O (attention of the norm of x), gated where there is a gate."""
    at.linear.append(at.name("attn_qkv"), _products(at, mixer), x, norm)
    if mixer.clamp:
        for name, width in _widths(mixer).items():
            at.clamp(f"attn_{name}.clamp", at.work[name], width, mixer.clamp)
    token = own_token(mixer)
    attention = layer_attention(at, mixer, token)
    if mixer.qk_norm is not None and token.qk_norm is None:
        _append_norms_apart(at, mixer, mixer.qk_norm, attention)
    incremental_attention_into(at.plan, attention, at.work["heads"])
    if mixer.gate is not None:
        at.gate(mixer.gate.activation, mixer.gate.linear.rows, mixer.output_width)
    return at.finish("attn_output", at.matrix(mixer.o), at.work["heads"], to, mixer.value_scale)


def own_token(mixer: Attention) -> OwnToken:
    """What attention itself does to the heads of a row's own token.

    Norms of whole rows, and norms after the rotation, are launches of their own. A norm without
    weights commutes with a rotation that keeps lengths.
    """
    norm = mixer.qk_norm
    fused = norm is not None and _is_fused(mixer, norm)
    rope, t = mixer.rope, mixer.temperature
    return OwnToken(
        rope=None if rope is None else rope.rotation,
        qk_norm=norm.q.norm if norm is not None and fused else None,
        v_norm=mixer.v_norm,
        temperature=None if t is None else Temperature(t.scale, t.floor, int(t.offset)),
        appends=mixer.k is not None,
    )


def scores_of(mixer: Attention) -> Scores:
    """What happens between q . k and the softmax."""
    return Scores(
        scale=mixer.scale,
        softcap=mixer.softcap,
        window=mixer.window,
        chunk=mixer.chunk,
        sinks=mixer.sinks is not None,
        max_bias=mixer.max_bias,
    )


def _is_fused(mixer: Attention, norm: QkNorm) -> bool:
    q = norm.q
    if norm.over != "head" or q.norm.kind != "rms" or q.bias is not None:
        return False
    if q.weight is None:
        keeps_length = mixer.rope is None or mixer.rope.rotation.magnitude == 1.0
        return keeps_length or not norm.after_rope
    return q.weight.size == mixer.key_dim and not norm.after_rope


def layer_attention(at: LayerStep, mixer: Attention, token: OwnToken) -> LayerAttention:
    """What `blocks.attention` needs of this layer."""
    parts = at.parts
    constants: dict[str, Slice] = {}
    if mixer.rope is not None:
        constants["frequencies"] = parts.weights.rope_tables[mixer.rope]
    if mixer.sinks is not None:
        constants["sinks"] = at.vector(mixer.sinks)
    norm = mixer.qk_norm
    if token.qk_norm is not None and norm is not None:
        for name, of in (("q_norm", norm.q), ("k_norm", norm.k)):
            if of.weight is not None:
                constants[name] = at.vector(of.weight)
    return LayerAttention(
        label=at.name("attention"),
        cache=parts.cache,
        layer=at.index,
        heads=mixer.heads,
        rows=at.rows,
        work=at.work,
        token=token,
        scores=scores_of(mixer),
        constants=constants,
        sm_count=parts.device.properties.sm_count,
        exact=parts.exact,
        fused=parts.fused,
    )


def _products(at: LayerStep, mixer: Attention) -> list[tuple[Matrix, Slice]]:
    """The matrices of x, and where their products go. Where K is V, too, it is made twice: K is
    normed and rotated later."""
    wanted = [("q", mixer.q), ("k", mixer.k), ("v", mixer.v or mixer.k)]
    if mixer.gate is not None:
        wanted.append(("attention gate", mixer.gate.linear))
    return [(at.matrix(of), at.work[name]) for name, of in wanted if of is not None]


def _widths(mixer: Attention) -> dict[str, int]:
    return {"q": mixer.query_width, "k": mixer.key_width, "v": mixer.value_width}


def _append_norms_apart(
    at: LayerStep, mixer: Attention, norm: QkNorm, attention: LayerAttention
) -> None:
    raise NotImplementedError
