"""Llama 4 (Meta 2025): chunked attention with RoPE in three of four layers, interleaved experts.

Chunks have 8192 positions. Every fourth layer attends globally without RoPE and scales queries by
position. Every n-th layer has experts.

    x += O attention(norm(rope(Q x')), norm(rope(K x')), V x')       norms without weights
    x += sum of expert_e(score_e x') + shared(x')           score = sigmoid(logit), the best chosen

Keys: those of `parts` and `rope`, expert_feed_forward_length, interleave_moe_layer_step,
attention.sliding_window_pattern; attention.sliding_window must not be 0. llama.cpp:
`src/models/llama4.cpp`, whose chunk and temperature are constants.
"""

from __future__ import annotations

from dataclasses import replace

from urdir.model.errors import UnsupportedError
from urdir.model.families.attention import Attention, QkNorm
from urdir.model.families.dense import rms_decoder, shared_rope, weightless
from urdir.model.families.description import Description
from urdir.model.families.feed_forward import Dense, Mixture
from urdir.model.families.mixtures import expert_width, mixture, plain_dense, router, shared_expert
from urdir.model.families.parts import attention, head_dims, rms_norm
from urdir.model.families.reader import Reader
from urdir.model.families.rope import windowed_rope
from urdir.model.families.windows import windowed_layers
from urdir.ptxgen.kernels.attention.own_token import Temperature

_CHUNK = 8192


def llama4(file: Reader) -> Description:
    """Llama 4: Scout (16 experts) has QK norms, Maverick (128) has none."""
    window = "attention.sliding_window"
    if not file.count(window, _CHUNK):
        # llama.cpp fails at the first token: it has no temperature for this case
        raise UnsupportedError(f"{file.key(window)} is 0: chunked attention is required")
    file.required("interleave_moe_layer_step", int)
    step, chunked = file.count("interleave_moe_layer_step"), windowed_layers(file, 4)
    full = shared_rope(file, "interleaved", factors=True)
    local = windowed_rope(file, full, head_dims(file)[0], scaled=True)
    norm = weightless(rms_norm(file))
    norms = None
    if file.own("qk_norm", bool, file.size("expert_count") != 128):
        norms = QkNorm(norm, norm, after_rope=True)
    chunk = file.own("chunk", int, _CHUNK)
    temperature = Temperature(
        file.own("temperature_scale", float, 0.0 if file.of_folder else 0.1),
        file.own("temperature_length", int, _CHUNK),
        1,
    )

    def attends(index: int) -> Attention:
        rotates = file.own_at("rotates", index, bool, (index + 1) % 4 != 0)
        rope = local if chunked[index] else full
        return attention(
            file,
            index,
            rope if rotates else None,
            qk_norm=norms if rotates else None,
            temperature=None if rotates or not temperature.scale else temperature,
            chunk=chunk if (rotates if file.of_folder else chunked[index]) else 0,
            output_bias="absent",
        )

    def network(index: int) -> Dense | Mixture:
        if not step or (index + 1) % step:
            return plain_dense(file, index)
        route = replace(router(file, index, "sigmoid"), by_logits=True)
        width = expert_width(file, index)
        shared = shared_expert(file, index, width)
        return mixture(file, index, route, width, shared=shared, weigh_input=True)

    return rms_decoder(file, attends, network)


ARCHITECTURES = {"llama4": llama4}
