"""A transformer layer of the llama family, as launches appended to a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from urdir.model.blocks.attention import LayerAttention, incremental_attention_into
from urdir.model.blocks.linear import Activations, LinearLayers, device_limits
from urdir.model.blocks.rows import Rows
from urdir.model.families.description import Config
from urdir.model.memory.device_state import DecodeState
from urdir.model.memory.kv_cache import KvCache
from urdir.model.memory.norms import NormLayer
from urdir.model.memory.weights import LayerWeights, Weights
from urdir.ptxgen.kernels.linear.choice import fills_sms
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.normalise import Normalise

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.memory import Arena, Slice
    from urdir.driver.plan import Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerParts:
    """The device, and the owners of everything on it that layers read and write.

    ``exact`` keeps activations f32; without ``fused``, decode attention is launched in parts.
    """

    device: Device
    config: Config
    weights: Weights
    cache: KvCache
    work: Arena
    exact: bool
    fused: bool = True

    def attention(self, rows: Rows, index: int) -> LayerAttention:
        """The attention of layer ``index``."""
        mixer = self.config.layers[index].mixer
        return LayerAttention(
            label=f"blk.{index}.attention",
            cache=self.cache,
            layer=index,
            heads=mixer.heads,
            rows=rows,
            work=self.work,
            rotation=mixer.rope.rotation,
            frequencies=self.weights.rope_tables[mixer.rope],
            sm_count=self.device.properties.sm_count,
            exact=self.exact,
            fused=self.fused,
        )

    def linear(self, plan: Plan, rows: Rows) -> LinearLayers:
        """What appends this step's linear layers to ``plan``."""
        limits = device_limits(self.device.properties)
        return LinearLayers(plan, self.work, rows.count, exact=self.exact, limits=limits)

    def norm(self, weight: Slice) -> NormLayer:
        """An RMSNorm of the model with these weights."""
        return NormLayer(Norm("rms", self.config.rms_eps), weight)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts(LayerParts):
    """What a step reads and writes: that of its layers, and the rows' tokens and positions."""

    state: DecodeState


def transformer_layer_workspace(
    plan: Plan, parts: LayerParts, rows: Rows, index: int, x: Activations
) -> Activations:
    """Append layer ``index`` on the workspace: ``work["hidden"]`` (rows, hidden) in and out; ``x``
    is what is known of it before, the result what is known after.

    The first residual goes to ``work["residual"]``, because input and output share a buffer.
    """
    return transformer_layer_indexed(
        plan,
        parts,
        rows,
        index,
        x,
        parts.work["hidden"],
        w=parts.weights.layers[index],
        next_norm=parts.norm(parts.weights.norm_after(index)),
    )


def transformer_layer_indexed(
    plan: Plan,
    parts: LayerParts,
    rows: Rows,
    index: int,
    x: Activations,
    y: Slice,
    w: LayerWeights,
    next_norm: NormLayer | None = None,
) -> Activations:
    """Append layer ``index`` with weights ``w``: x (rows, hidden) f32 -> y (rows, hidden) f32; y
    may be x's buffer. The norm after it, if it is known, is begun.

    norm -> Q, K, V (+ biases) -> QK-norm -> RoPE, append to the cache, attention -> O -> residual
    -> norm -> SwiGLU -> residual. Raises LaunchError, naming launch and parameter, for a
    buffer that is null, closed or too small.
    """
    work, ffn_norm = parts.work, parts.norm(w.ffn_norm)
    at, linear = f"blk.{index}.", parts.linear(plan, rows)
    qkv = [(w.q, work["q"]), (w.k, work["k"]), (w.v, work["v"])]
    linear.append(at + "attn_qkv", qkv, x, parts.norm(w.attn_norm))
    _append_qk_norm(plan, parts, rows, index, w)
    incremental_attention_into(plan, parts.attention(rows, index), work["heads"])
    fill = fills_sms(rows.keys)
    attended = linear.append_residual(
        at + "attn_output",
        w.o,
        work["heads"],
        residual=x.x,
        y=work["residual"],
        next_norm=ffn_norm,
        fill=fill,
    )
    linear.append_gated(
        at + "ffn_gate_up", w.gate, w.up, attended, norm=ffn_norm, y=work["activated"]
    )
    return linear.append_residual(
        at + "ffn_down",
        w.down,
        work["activated"],
        residual=work["residual"],
        y=y,
        next_norm=next_norm,
    )


def _append_qk_norm(plan: Plan, parts: LayerParts, rows: Rows, index: int, w: LayerWeights) -> None:
    """RMSNorm of every head of Q and K (Qwen3), in place."""
    mixer = parts.config.layers[index].mixer
    work, eps = parts.work, parts.config.rms_eps
    for name, weight, heads in (("q", w.q_norm, mixer.heads), ("k", w.k_norm, mixer.kv_heads)):
        if weight is not None:
            kernel = Normalise(rows=rows.count * heads, cols=mixer.key_dim, norm=Norm("rms", eps))
            label = f"blk.{index}.attn_{name}_norm"
            plan.launch(kernel, label, x=work[name], weight=weight, y=work[name])
