"""gpt-oss (arXiv 2508.10925): alternating sliding windows, attention sinks, clamped SwiGLU experts.

Every projection has a bias.

    experts: down(gate' sigmoid(1.702 gate') (up' + 1))     gate' = min(gate, 7), |up'| <= 7

Expert weights are the softmax over the chosen logits. Keys: those of `parts`, `rope` and
`windows`, expert_feed_forward_length. llama.cpp: `src/models/openai-moe.cpp`.
"""

from __future__ import annotations

from typing import Any

from urdir.model.families.dense import rms_decoder, shared_rope, windowed_mixer
from urdir.model.families.description import Description
from urdir.model.families.feed_forward import Mixture
from urdir.model.families.mixtures import expert_width, mixture, router
from urdir.model.families.parts import head_dims, heads
from urdir.model.families.reader import Reader
from urdir.model.families.rope import windowed_rope
from urdir.model.families.windows import windowed_layers
from urdir.ptxgen.kernels.activation import Activation


def gpt_oss(file: Reader) -> Description:
    """gpt-oss-20b and gpt-oss-120b."""
    windowed, window = windowed_layers(file, 2), file.size("attention.sliding_window")
    full = shared_rope(file, "half")
    local = windowed_rope(file, full, head_dims(file)[0], scaled=True)

    def sinks(index: int) -> dict[str, Any]:
        return {"sinks": file.vector("attn_sinks.weight", index, heads(file, index)[0])}

    def network(index: int) -> Mixture:
        return mixture(
            file,
            index,
            router(file, index, "softmax_selected", bias="required"),
            expert_width(file, index),
            Activation("swiglu_oai", 7.0),
            bias="required",
        )

    attends = windowed_mixer(
        file, windowed, window, local, full, more=sinks, output_bias="required"
    )
    names = ("attn_norm", "post_attention_norm")
    return rms_decoder(file, attends, network, norms=names)


ARCHITECTURES = {"gpt-oss": gpt_oss}
