"""Early mixtures of few large experts: Snowflake Arctic, DBRX, Grok and Phi-3.5-MoE.

llama.cpp: `src/models/` arctic.cpp, dbrx.cpp, grok.cpp, phimoe.cpp with the layers of phi3.cpp.

Keys: those of `parts` and `rope`, feed_forward_length for the experts. DBRX: attention.clamp_kqv,
attention.layer_norm_epsilon. Grok: expert_feed_forward_length (default: feed_forward_length),
embedding_scale, logit_scale, attention.output_scale, attn_logit_softcapping,
final_logit_softcapping, rope.scaling.yarn_beta_fast and yarn_attn_factor, with the defaults of Grok
1; router_logit_softcapping and attention.temperature_length have no effect there.
"""

from __future__ import annotations

import math
from dataclasses import replace

from urdir.model.errors import ConfigError
from urdir.model.families.dense import decoder, mixer, shared_rope
from urdir.model.families.description import Description
from urdir.model.families.feed_forward import Mixture
from urdir.model.families.layers import Block, Branch, LayerConfig
from urdir.model.families.mixtures import dense_width, expert_width, mixture, router
from urdir.model.families.parts import GELU, dense, layer_norm, model, rms_norm
from urdir.model.families.reader import Reader
from urdir.ptxgen.kernels.experts.selection import Scoring
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.rotation import RopeScaling


def arctic(file: Reader) -> Description:
    """Arctic: a dense FFN as wide as the hidden size, in parallel with experts that read the
    layer's input."""
    norm, attends = rms_norm(file), mixer(file, shared_rope(file, "interleaved"))

    def layer(index: int) -> LayerConfig:
        small = dense(file, index, width=file.hidden, bias="absent")
        first = Branch(attends(index), file.norm("attn_norm", index, norm))
        second = Branch(small, file.norm("ffn_norm", index, norm))
        experts = Branch(
            _softmax_experts(file, index),
            file.norm("ffn_norm_exps", index, norm),
            reads_layer_input=True,
        )
        return LayerConfig((Block((first,)), Block((second, experts))))

    return model(file, layer, file.norm("output_norm", None, norm))


def dbrx(file: Reader) -> Description:
    """DBRX: LayerNorm without biases; queries, keys and values are clamped."""
    clamp = file.required("attention.clamp_kqv", float)
    return decoder(
        file,
        layer_norm(file),
        mixer(file, shared_rope(file, "half"), clamp=max(clamp, 0.0)),
        lambda index: _softmax_experts(file, index),
        norms=("attn_norm", "attn_output_norm"),
        output="required",
    )


def phimoe(file: Reader) -> Description:
    """Phi-3.5-MoE (arXiv 2404.14219): biases in norms, attention output and logits. In llama.cpp
    norms are RMS norms and weights a softmax; a folder has the published LayerNorm and sparse
    mixer (arXiv 2409.12136)."""
    attends = mixer(file, shared_rope(file, "half", factors=True), output_bias="required")
    if not file.has("output.bias"):
        raise ConfigError("tensor 'output.bias' is missing")
    scores: Scoring = "sparsemixer" if file.of_folder else "softmax"
    norm = Norm("layer" if file.of_folder else "rms", file.rms())

    def network(index: int) -> Mixture:
        route = router(file, index, scores, normalize=not file.of_folder)
        return mixture(file, index, route, dense_width(file, index))

    return decoder(
        file,
        norm,
        attends,
        network,
        norm_bias="required",
        output="required",
    )


def grok(file: Reader) -> Description:
    """Grok 1 and 2: soft-capped scores, norms before and after each block. Grok 2 adds a dense FFN
    to the experts and scales the sum by sqrt(1/2)."""
    norm, rope = rms_norm(file), shared_rope(file, "half")
    attends = mixer(
        file,
        replace(rope, scaling=_grok_scaling(file, rope.scaling)),
        scale=file.number("attention.output_scale", 0.08838834764831845),
        softcap=file.number("attn_logit_softcapping", 30.0),
    )
    for unused in ("router_logit_softcapping", "attention.temperature_length"):
        file.has_key(unused)
    last = "layer_output_norm" if file.anywhere("layer_output_norm.weight") else "post_ffw_norm"

    def layer(index: int) -> LayerConfig:
        width = dense_width(file, index)
        route = router(file, index, normalize=True)
        experts = mixture(
            file, index, route, expert_width(file, index, width), GELU, gate="optional"
        )
        before = file.norm("ffn_norm", index, norm)
        branches, scale = [Branch(experts, before)], 1.0
        if file.has("ffn_up.weight", index):
            small = dense(file, index, GELU, width=width, bias="absent")
            branches, scale = [*branches, Branch(small, before)], math.sqrt(2.0) / 2.0
        first = Branch(attends(index), file.norm("attn_norm", index, norm))
        return LayerConfig(
            (
                Block((first,), file.norm("attn_output_norm", index, norm)),
                Block(tuple(branches), file.norm(last, index, norm), scale),
            )
        )

    return model(
        file,
        layer,
        file.norm("output_norm", None, norm),
        embedding_scale=file.optional("embedding_scale", float, 78.38367176906169) or 1.0,
        logit_scale=file.optional("logit_scale", float, 0.5773502691896257),
        softcap=file.amount("final_logit_softcapping"),
    )


def _grok_scaling(file: Reader, scaling: RopeScaling) -> RopeScaling:
    """RoPE scaling with Grok's default beta_fast. The factor of YaRN's magnitude applies only where
    YaRN is off (llama.cpp: `llama-context.cpp`)."""
    fast = file.number("rope.scaling.yarn_beta_fast", 8.0)
    magnitude = file.number("rope.scaling.yarn_attn_factor", 1.0)
    if scaling.ext_factor:
        magnitude = 1.0
    return replace(scaling, beta_fast=fast, attn_factor=scaling.attn_factor * magnitude)


def _softmax_experts(file: Reader, index: int) -> Mixture:
    return mixture(file, index, router(file, index, normalize=True), dense_width(file, index))


ARCHITECTURES = {"arctic": arctic, "dbrx": dbrx, "phimoe": phimoe, "grok": grok}
