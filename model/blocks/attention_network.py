"""The attention of a layer as a network: its products, what is done to heads, and the gate."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from urdir.model.blocks.attention import LayerAttention, incremental_attention_into
from urdir.model.blocks.linear import Activations
from urdir.model.blocks.parts import Destination, LayerStep
from urdir.model.families.description import Attention, OutputGate
from urdir.model.memory.norms import NormLayer
from urdir.model.memory.weights import Matrix
from urdir.ptxgen.kernels.activate import Activate
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.linear.choice import fills_sms
from urdir.ptxgen.kernels.normalise import Normalise

if TYPE_CHECKING:
    from urdir.driver.memory import Slice


def append_attention(
    at: LayerStep, mixer: Attention, x: Activations, norm: NormLayer | None, to: Destination
) -> Activations:
    """O (attention of the norm of x), gated where there is a gate."""
    at.linear.append(at.name("attn_qkv"), _products(at, mixer), x, norm, clamp=mixer.clamp)
    _append_head_norms(at, mixer)
    at_cache = layer_attention(at, mixer)
    incremental_attention_into(at.plan, at_cache, at.work["heads"])
    if mixer.gate is not None:
        _append_gate(at, mixer, mixer.gate)
    if mixer.value_scale != 1.0:
        assert mixer.o.bias is None
        to = replace(to, scale=to.scale * mixer.value_scale)
    fill = fills_sms(at.rows.keys)
    return at.finish("attn_output", at.matrix(mixer.o), at.work["heads"], to, fill=fill)


def _append_head_norms(at, mixer):
    n = mixer.qk_norm
    if n is not None:
        for name, of, heads in (("q", n.q, mixer.heads), ("k", n.k, mixer.kv_heads)):
            norm = at.norm(of)
            at.plan.launch(
                Normalise(at.rows.count * heads, mixer.key_dim, norm.norm),
                at.name(f"attn_{name}_norm"), x=at.work[name], weight=norm.weight, y=at.work[name],
            )


def _append_gate(at: LayerStep, mixer: Attention, gate: OutputGate) -> None:
    """heads *= f(gate), by value or by head, in place."""
    values = at.rows.count * mixer.output_width
    group = mixer.output_width // gate.linear.rows
    kernel = Activate(values, Activation(gate.activation), gated=True, group=group)
    heads = at.work["heads"]
    label = at.name("attn_gate")
    at.plan.launch(kernel, label, gate=at.work["attention gate"], up=heads, y=heads)


def layer_attention(at: LayerStep, mixer: Attention) -> LayerAttention:
    parts = at.parts
    return LayerAttention(
        label=at.name("attention"),
        cache=parts.cache,
        layer=at.index,
        heads=mixer.heads,
        rows=at.rows,
        work=at.work,
        rotation=None if mixer.rope is None else mixer.rope.rotation,
        frequencies=None if mixer.rope is None else parts.weights.rope_tables[mixer.rope],
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
