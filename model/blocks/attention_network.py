"""The attention of a layer as a network: its products, what is done to heads, and the gate."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from urdir.model.blocks.activations import Activations, DueGate
from urdir.model.blocks.attention import (
    LayerAttention,
    append_keys_alone,
    append_tokens,
    incremental_attention_into,
)
from urdir.model.blocks.parts import Destination, LayerStep
from urdir.model.families.attention import Attention, Latent, OutputGate, QkNorm
from urdir.model.memory.norms import NormLayer
from urdir.model.memory.weights import Matrix
from urdir.model.memory.workspace import WRITTEN_KEYS, WRITTEN_SEQUENCE, WRITTEN_VALUES
from urdir.ptxgen.kernels.activate import Activate
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.attention.choice import fills_sms
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.own_token import OwnToken
from urdir.ptxgen.kernels.attention.prepare_tokens import PrepareTokens
from urdir.ptxgen.kernels.linear.prologue.gate import Gate
from urdir.ptxgen.kernels.normalise import Normalise

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.ptxgen.kernels.attention.prefill_block import PrefillBlock


def append_attention(
    at: LayerStep, mixer: Attention, x: Activations, norm: NormLayer | None, to: Destination
) -> Activations:
    """O (attention of the norm of x), gated where there is a gate."""
    made, mixer = _append_attended(at, mixer, x, norm)
    heads, due = made.x, None
    if mixer.gate is not None and mixer.latent is None:
        due = _gate_of(at, mixer.gate, at.work["attention gate"], heads, mixer.output_width)
    if at.outputs is not None:
        heads, to = _only_outputs(at, mixer, heads, to)
    if mixer.latent is not None:
        heads = _append_own_values(at, mixer, mixer.latent, heads)
    at = at.after_attention
    if mixer.value_scale != 1.0:
        assert mixer.o.bias is None
        to = replace(to, scale=to.scale * mixer.value_scale)
    fill, made = fills_sms(at.rows.keys), Activations(heads, packed=made.packed, gate=due)
    return at.finish("attn_output", at.matrix(mixer.o), made, to, fill=fill)


def _append_attended(
    at: LayerStep, mixer: Attention, x: Activations, norm: NormLayer | None
) -> tuple[Activations, Attention]:
    """The heads of attention, packed where the product after it takes them so; and ``mixer`` as
    they were made: rows of prompts by keys and values of heads."""
    written = mixer.written_out
    if written is not None and at.rows.walk is not None:
        from urdir.model.blocks.latent_blocks import block_kernel

        assert mixer.latent is not None
        if (kernel := block_kernel(at, mixer.latent, written)) is not None:
            return _append_walked(at, mixer, written, kernel, x, norm), written
    if written is None or not (at.rows.begins and at.linear.takes_gemm):
        attention = _append_heads(at, mixer, x, norm)
    else:
        attention, mixer = _append_written(at, mixer, written, x, norm), written
    packed = _packed_heads(at, mixer) if attention.can_pack else None
    heads = at.work["heads"] if packed is None else packed
    incremental_attention_into(at.plan, attention, heads, packs=packed is not None)
    return Activations(heads, packed=packed), mixer


def _append_walked(
    at: LayerStep,
    mixer: Attention,
    written: Attention,
    kernel: PrefillBlock,
    x: Activations,
    norm: NormLayer | None,
) -> Activations:
    """The heads of attention, of the norm of x, in the workspace: prompts walk over what is cached,
    other rows attend to latent vectors, whose results become each head's own values."""
    from urdir.model.blocks.latent_blocks import append_blocks
    from urdir.model.blocks.latent_heads import append_expanded, append_latent_parts

    latent, heads = mixer.latent, at.work["heads"]
    assert latent is not None
    append_latent_parts(at, mixer, latent, x, norm)
    first, rest = at.rows.split()
    if first.count:
        decoded = replace(at, rows=first)
        incremental_attention_into(at.plan, _append_absorbed(decoded, mixer, latent), heads)
        append_expanded(decoded, mixer, latent, heads)
    packs = not first.count and kernel.can_pack and _packed_heads(at, written) is not None
    own = layer_attention(at, mixer, own_token(mixer)).of_rows(first.count, rest)
    prompts, kernel = replace(at, rows=rest), replace(kernel, packs=packs)
    made = append_blocks(prompts, mixer, kernel, own, first.count)
    return Activations(at.work["expanded"]) if first.count else made


def _packed_heads(at: LayerStep, mixer: Attention) -> Slice | None:
    """Where heads are packed for the product after them; None if that does not take them so, or
    something comes in between."""
    matrix = at.matrix(mixer.o)
    if mixer.gate is not None or at.outputs is not None or mixer.latent is not None:
        return None
    return at.work["packed"] if at.linear.packs(matrix) else None


def _append_own_values(at: LayerStep, mixer: Attention, latent: Latent, heads: Slice) -> Slice:
    """Each head's own values of its latent result, for the rows that go on; gated where there is a
    gate."""
    from urdir.model.blocks.latent_heads import append_expanded

    after, gate, gates = at.after_attention, mixer.gate, "attention gate"
    if gate is not None and at.outputs is not None:
        label, all_gates, gates = "attn_gate.output_rows", at.work[gates], "output gate"
        at.gather_outputs(label, all_gates, gate.linear.rows, at.work[gates])
    heads = append_expanded(after, mixer, latent, heads)
    if gate is not None:
        _append_gate(after, gate, at.work[gates], heads, latent.expand.rows)
    return heads


def _only_outputs(
    at: LayerStep, mixer: Attention, heads: Slice, to: Destination
) -> tuple[Slice, Destination]:
    """The heads of the rows that go on alone, and where their sum goes."""
    wanted = at.work["output heads"]
    at.gather_outputs("attention.output_rows", heads, mixer.output_width, wanted)
    if to.residual is None:
        return wanted, to
    residual = at.free(to.residual, to.y)
    at.gather_outputs("output_rows", to.residual, at.parts.config.hidden, residual)
    return wanted, replace(to, residual=residual)


def append_keys(at: LayerStep, mixer: Attention, x: Activations, norm: NormLayer | None) -> None:
    """The keys and values of x alone, into the cache, where the layer has one."""
    if mixer.latent is not None:
        from urdir.model.blocks.latent_heads import append_latent_parts

        append_latent_parts(at, mixer, mixer.latent, x, norm)
        append_keys_alone(at.plan, layer_attention(at, mixer, own_token(mixer)))
    elif mixer.k is not None:
        append_tokens(at.plan, _append_heads(at, mixer, x, norm))


def _append_heads(
    at: LayerStep, mixer: Attention, x: Activations, norm: NormLayer | None
) -> LayerAttention:
    """The queries, keys and values of the norm of x; what attention does with them. Where all rows
    are decoded it puts the heads of a latent vector together itself."""
    token = own_token(mixer)
    if mixer.latent is not None:
        from urdir.model.blocks.latent_heads import append_latent_key, append_latent_products

        append_latent_products(at, mixer, mixer.latent, x, norm)
        if not _in_parts(at):
            append_latent_key(at, mixer, mixer.latent)
        return _append_absorbed(at, mixer, mixer.latent)
    at.linear.append(at.name("attn_qkv"), products_of(at, mixer), x, norm, clamp=mixer.clamp)
    if mixer.qk_norm is not None and token.qk_norm is None:
        _append_norms_apart(at, mixer, mixer.qk_norm)
    return layer_attention(at, mixer, token)


def _append_absorbed(at: LayerStep, mixer: Attention, latent: Latent) -> LayerAttention:
    """The queries of the parts that there are; what attention to latent vectors does with them."""
    from urdir.model.blocks.latent_heads import append_absorbed

    in_parts = _in_parts(at)
    append_absorbed(at, mixer, latent, in_parts)
    token = replace(own_token(mixer), latent_norm=latent.norm.norm if in_parts else None)
    return layer_attention(at, mixer, token)


def _in_parts(at: LayerStep) -> bool:
    """Whether attention itself puts the heads of a latent vector together."""
    layout = at.parts.cache.layout(at.index)
    return not at.rows.attend_to_each_other and layout.values_in_keys


def _append_written(
    at: LayerStep, mixer: Attention, written: Attention, x: Activations, norm: NormLayer | None
) -> LayerAttention:
    """The same for the first rows of a sequence by a latent vector: that goes into the cache, and
    the rows attend to each other by the keys and values of heads."""
    from urdir.model.blocks.latent_heads import append_latent_parts, append_written_heads

    latent, token, work = mixer.latent, own_token(mixer), at.work
    assert latent is not None
    append_latent_parts(at, mixer, latent, x, norm)
    append_keys_alone(at.plan, layer_attention(at, mixer, token))
    own = append_written_heads(at, mixer, latent, written)
    dims, rows = (written.key_dim, written.value_dim), at.rows.count
    return replace(
        layer_attention(at, written, token),
        layout=KvLayout(1, written.kv_heads, rows, dims[0], "f16", value_dim=dims[1]),
        caches={"k_cache": work[WRITTEN_KEYS], "v_cache": work[WRITTEN_VALUES]},
        rows=replace(at.rows, sequence=work[WRITTEN_SEQUENCE]),
        work={**work, **own},
    )


def _append_norms_apart(at: LayerStep, mixer: Attention, norm: QkNorm) -> None:
    """Norms that attention has not, before it rotates; or the rotation first, where they come after
    it. In place."""
    if norm.after_rope and mixer.rope is not None:
        layout = at.parts.cache.layout(at.index)
        token = OwnToken(mixer.rope.rotation, appends=False)
        for name, heads in (("q", mixer.heads), ("k", mixer.kv_heads)):
            at.plan.launch(
                PrepareTokens(heads, layout, at.rows.count, token),
                at.name(f"attention.{name}_rope"),
                q=at.work[name],
                frequencies=at.parts.weights.rope_tables[mixer.rope],
                position=at.rows.position,
            )
    for name, of, heads in (("q", norm.q, mixer.heads), ("k", norm.k, mixer.kv_heads)):
        rows, cols = (heads, mixer.key_dim) if norm.over == "head" else (1, heads * mixer.key_dim)
        sets = 1 if of.weight is None else of.weight.size // cols
        weights = {"weight": of.weight, "bias": of.bias}
        at.plan.launch(
            Normalise(at.rows.count * rows, cols, of.norm, weight_rows=sets),
            at.name(f"attn_{name}_norm"),
            x=at.work[name],
            y=at.work[name],
            **{key: at.vector(value) for key, value in weights.items() if value is not None},
        )


def _gate_of(
    at: LayerStep, gate: OutputGate, gates: Slice, heads: Slice, width: int
) -> DueGate | None:
    """The gate as the next product takes it: by value, and of all rows; else None, and a launch."""
    if gate.linear.rows == width and at.outputs is None:
        f = Gate(Activation(gate.activation))
        return DueGate(at.name("attn_gate"), width, f, gates)
    _append_gate(at, gate, gates, heads, width)
    return None


def _append_gate(at: LayerStep, gate: OutputGate, gates: Slice, heads: Slice, width: int) -> None:
    """heads (rows, width) *= f(gates), by value or by head, in place."""
    group = width // gate.linear.rows
    f = Activation(gate.activation)
    kernel = Activate(at.rows.count * width, f, gated=True, group=group)
    at.plan.launch(kernel, at.name("attn_gate"), gate=gates, up=heads, y=heads)


def own_token(mixer: Attention) -> OwnToken:
    """What attention itself does to the heads of a row's own token.

    LayerNorms, norms whose heads have weights of their own, and norms after a rotation that changes
    lengths are launches of their own. A norm without weights commutes with the others.
    """
    norm = mixer.qk_norm
    fused = norm is not None and _is_fused(mixer, norm)
    rope = mixer.rope
    is_apart = norm is not None and not fused and norm.after_rope
    token = OwnToken(
        rope=None if rope is None or is_apart else rope.rotation,
        v_norm=mixer.v_norm if mixer.k is not None else None,
        temperature=mixer.temperature,
        appends=mixer.k is not None,
    )
    if norm is None or not fused:
        return token
    rope_first = norm.after_rope and rope is not None and norm.q.weight is not None
    return replace(token, qk_norm=norm.q.norm, qk_norm_over=norm.over, rope_first=rope_first)


def _is_fused(mixer: Attention, norm: QkNorm) -> bool:
    q, k = norm.q, norm.k
    if q.norm.kind != "rms" or q.norm.bias or (mixer.k is not None and k.norm != q.norm):
        return False
    keeps_length = mixer.rope is None or mixer.rope.rotation.magnitude == 1.0
    if norm.after_rope and not keeps_length:
        return False
    if norm.over == "row":
        return q.weight is None or not norm.after_rope or mixer.rope is None
    return q.weight is None or q.weight.size == mixer.key_dim


def layer_attention(at: LayerStep, mixer: Attention, token: OwnToken) -> LayerAttention:
    """What `blocks.attention` needs of this layer."""
    parts = at.parts
    constants: dict[str, Slice] = {}
    if mixer.rope is not None:
        constants["frequencies"] = parts.weights.rope_tables[mixer.rope]
    if mixer.sinks is not None:
        constants["sinks"] = at.vector(mixer.sinks)
    if token.qk_norm is not None and mixer.qk_norm is not None:
        for name, of in (("q_norm", mixer.qk_norm.q), ("k_norm", mixer.qk_norm.k)):
            if of.weight is not None:
                constants[name] = at.vector(of.weight)
    if token.latent_norm is not None and mixer.latent is not None:
        from urdir.model.blocks.latent_heads import parts_of_heads

        constants |= parts_of_heads(at, mixer.latent)
    return LayerAttention(
        label=at.name("attention"),
        layout=parts.cache.layout(at.index),
        caches=parts.cache.arguments(at.index),
        heads=mixer.heads,
        rows=at.rows,
        work=at.work,
        token=token,
        scores=mixer.scores,
        constants=constants,
        sm_count=parts.device.properties.sm_count,
        target=parts.device.native_target,
        exact=parts.exact,
    )


def products_of(at: LayerStep, mixer: Attention) -> list[tuple[Matrix, Slice]]:
    """The matrices of x, and where their products go. Where K is V, too, it is made twice: K is
    normed and rotated later."""
    wanted = [("q", mixer.q), ("k", mixer.k), ("v", mixer.v or mixer.k)]
    if mixer.gate is not None:
        wanted.append(("attention gate", mixer.gate.linear))
    return [(at.matrix(of), at.work[name]) for name, of in wanted if of is not None]
