"""MiMo-V2 and Step 3.5: mixtures of experts with sliding windows in most layers.

Windowed layers have their own RoPE base (default 10000). Layers without a router are dense.

llama.cpp: `src/models/` mimo2.cpp, step35.cpp.

Keys: those of `parts`, `rope`, `windows` and `mixtures`: expert_feed_forward_length. MiMo:
attention.value_scale. Step: expert_shared_feed_forward_length, expert_gating_func (default 2),
expert_weights_norm, expert_weights_scale, swiglu_clamp_exp, swiglu_clamp_shexp.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from urdir.model.families.dense import rms_decoder, shared_rope, windowed_mixer
from urdir.model.families.description import Description
from urdir.model.families.feed_forward import Dense, Mixture
from urdir.model.families.mixtures import (
    DENSE,
    EXPERTS,
    expert_width,
    limited,
    mixture,
    plain_dense,
    router,
    scoring,
    without,
)
from urdir.model.families.nextn import NextnKind
from urdir.model.families.parts import head_dims, head_norms, heads, output_gate, rms_norm
from urdir.model.families.reader import Reader
from urdir.model.families.rope import check_dim, windowed_rope
from urdir.model.families.scored_experts import scored_experts
from urdir.model.families.windows import flagged_layers


def mimo2(file: Reader) -> Description:
    """MiMo-V2 (arXiv 2601.02780): value heads are narrower or wider than key heads; attention sinks
    in some layers. Layers without a router are dense, and so are MTP heads, whatever they store."""
    windowed, window = flagged_layers(file), file.size("attention.sliding_window")
    full = shared_rope(file, "half")
    value_scale = file.optional("attention.value_scale", float, 0.0)
    local = windowed_rope(file, full, head_dims(file)[0], scaled=False, base=1e4)

    def sinks(index: int) -> dict[str, Any]:
        if not file.has("attn_sinks.weight", index):
            return {}
        return {"sinks": file.vector("attn_sinks.weight", index, heads(file, index)[0])}

    attends = windowed_mixer(
        file,
        windowed,
        window,
        local,
        full,
        more=sinks,
        value_scale=value_scale or 1.0,
        qkv_bias="absent",
    )

    def network(index: int) -> Dense | Mixture:
        if index in file.nextn_layers or not file.has("ffn_gate_inp.weight", index):
            return plain_dense(file, index)
        route = router(file, index, "sigmoid", normalize=True, choice_bias="optional")
        return mixture(file, index, route, expert_width(file, index))

    unused = [f"attn_{name}.bias" for name in ("q", "k", "v", "qkv")]
    nextn = NextnKind(rms_norm(file), passes_normed=False)
    description = rms_decoder(
        file,
        attends,
        network,
        output="required",
        unused=(*unused, "layer_output_norm.weight"),
        nextn=nextn,
    )
    experts = (f"blk.{index}.{name}" for index in file.nextn_layers for name in EXPERTS)
    loaded = tuple(name for name in experts if name in file.stored)
    description = replace(description, unused_tensors=description.unused_tensors + loaded)
    return without(description, file, Mixture, DENSE)


def step35(file: Reader) -> Description:
    """Step 3.5: full-attention layers rotate half as many values, with the file's frequency
    factors; optional per-head attention gates. The shared expert and the dense layers clamp the
    activated gate and the up product."""
    norm, (key_dim, _) = rms_norm(file), head_dims(file)
    windowed, window = flagged_layers(file), file.size("attention.sliding_window")
    whole = shared_rope(file, "half")
    local = windowed_rope(file, whole, key_dim, scaled=False, base=1e4)
    # a folder says how much of a head rotates in each kind of layer
    full = whole if file.of_folder else replace(whole, dim=whole.dim // 2)
    check_dim(file, "rope.dimension_count", full.dim, key_dim)
    if file.anywhere("rope_freqs.weight") and not file.of_folder:
        most = max(local.dim if is_local else full.dim for is_local in windowed) // 2
        factors = file.vector("rope_freqs.weight", None, most)
        full = replace(full, factors=factors.part(0, full.dim // 2))
    scores = scoring(file, "sigmoid")
    limits = file.by_layer("swiglu_clamp_exp", float, 0.0)
    shared_limits = file.by_layer("swiglu_clamp_shexp", float, 0.0)

    def more(index: int) -> dict[str, Any]:
        fields: dict[str, Any] = {"qk_norm": head_norms(file, index, norm, key_dim)}
        if file.has("attn_gate.weight", index):
            fields["gate"] = output_gate(file, index, heads(file, index)[0], "sigmoid")
        return fields

    attends = windowed_mixer(file, windowed, window, local, full, more=more)

    def network(index: int) -> Dense | Mixture:
        beside = limited(shared_limits[index], "activated")
        if not file.has("ffn_gate_inp.weight", index):
            return plain_dense(file, index, beside)
        width = file.size("expert_shared_feed_forward_length")
        inside = limited(limits[index], "activated")
        return scored_experts(
            file, index, width, inside, beside, scores=scores, choice_bias="optional"
        )

    nextn = NextnKind(norm, passes_normed=False)
    description = rms_decoder(file, attends, network, output="required", nextn=nextn)
    return without(description, file, Mixture, DENSE)


ARCHITECTURES = {"mimo2": mimo2, "step35": step35}
