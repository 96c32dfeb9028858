"""GPT-2 (Radford et al. 2019) and its relatives: LayerNorm with biases, mostly ungated GELU.

Keys: those of `parts`, of `rope` in models with RoPE, attention.layer_norm_epsilon; each family
lists its own. llama.cpp: `src/models/` gpt2.cpp, starcoder.cpp, starcoder2.cpp, bloom.cpp,
codeshell.cpp, gptneox.cpp, falcon.cpp, jais.cpp, jais2.cpp, mpt.cpp, nemotron.cpp, orion.cpp,
stablelm.cpp.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from urdir.model.families.attention import Attention, QkNorm
from urdir.model.families.dense import decoder, shared_rope
from urdir.model.families.description import Description
from urdir.model.families.feed_forward import Dense
from urdir.model.families.layers import Block, Branch, LayerConfig
from urdir.model.families.parts import (
    RELU,
    RELU2,
    SILU,
    attention,
    dense,
    gelu,
    head_dims,
    heads,
    layer_norm,
    model,
    parallel,
    row_norms,
    sequential,
)
from urdir.model.families.reader import Presence, Reader
from urdir.model.families.rope import RopeConfig
from urdir.model.families.stored import StoredMatrix
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.rotation import RopeStyle


def _positions(file: Reader) -> StoredMatrix:
    return file.matrix("position_embd", None, file.size("context_length"), file.hidden)


def _decoder(
    file: Reader,
    rope: RopeConfig | None,
    activation: Activation | None = None,
    *,
    gated: bool = False,
    qkv_bias: Presence = "optional",
    output_bias: Presence = "required",
    bias: Presence = "required",
    attends: dict[str, Any] | None = None,
    **options: Any,
) -> Description:
    """A decoder of equal layers; ``attends`` are further fields of `Attention`."""
    fields = {"qkv_bias": qkv_bias, "output_bias": output_bias, **(attends or {})}
    return decoder(
        file,
        layer_norm(file),
        lambda layer: attention(file, layer, rope, **fields),
        lambda layer: dense(file, layer, activation or gelu(file), gated=gated, bias=bias),
        **{"norm_bias": "required", **options},
    )


def gpt2(file: Reader) -> Description:
    """GPT-2 and StarCoder (arXiv 2305.06161): learned positions. Of a folder also BioGPT and XGLM,
    which scale the embedding."""
    return _decoder(
        file,
        None,
        qkv_bias="required",
        positions=_positions(file),
        embedding_scale=file.own("embedding_scale", float, 1.0),
    )


def gpt1(file: Reader) -> Description:
    """The first GPT (Radford et al. 2018): norms of the stream after each network. Folders only."""
    norm = layer_norm(file)

    def layer(index: int) -> LayerConfig:
        mixer = attention(file, index, None, qkv_bias="required", output_bias="required")
        network = dense(file, index, gelu(file), gated=False, bias="required")
        between, after = (
            file.norm(name, index, norm, bias="required") for name in ("attn_norm", "ffn_norm")
        )
        blocks = Block((Branch(mixer),)), Block((Branch(network),), stream_norm=between)
        return LayerConfig(blocks, output_norm=after)

    return model(file, layer, None, output="optional", positions=_positions(file))


def persimmon(file: Reader) -> Description:
    """Persimmon and the text of Fuyu (Adept 2023): LayerNorms of heads, squared ReLU. Folders
    only."""
    norm, rope, key_dim = layer_norm(file), shared_rope(file, "half"), head_dims(file)[0]

    def mixer(layer: int) -> Attention:
        q, k = (
            file.norm(f"attn_{name}_norm", layer, norm, key_dim, bias="required") for name in "qk"
        )
        norms = QkNorm(q, k)
        return attention(
            file, layer, rope, qk_norm=norms, qkv_bias="required", output_bias="required"
        )

    return decoder(
        file,
        norm,
        mixer,
        lambda layer: dense(file, layer, RELU2, gated=False, bias="required"),
        norm_bias="required",
        output="required",
    )


def gptneo(file: Reader) -> Description:
    """GPT-Neo (EleutherAI 2021): learned positions, scores that are not scaled, windows in some
    layers. Folders only."""
    attends = {"scale": 1.0}
    return _decoder(file, None, qkv_bias="absent", attends=attends, positions=_positions(file))


def starcoder2(file: Reader) -> Description:
    """StarCoder 2 (arXiv 2402.19173)."""
    return _decoder(file, shared_rope(file, "half"))


def codeshell(file: Reader) -> Description:
    """CodeShell (arXiv 2403.15747); files without an embedding tie it to the output matrix."""
    embedding = "token_embd" if file.has("token_embd.weight") else "output"
    return _decoder(file, shared_rope(file, "half"), output="required", embedding=embedding)


def opt(file: Reader) -> Description:
    """OPT (arXiv 2205.01068): learned positions, ReLU. Folders only: GGUF has no such name."""
    return _decoder(file, None, RELU, qkv_bias="required", positions=_positions(file))


def gptj(file: Reader) -> Description:
    """GPT-J (EleutherAI 2021): RoPE of neighbours. Folders only."""
    return parallel_decoder(file, "interleaved", output_bias="absent")


def parallel_decoder(file: Reader, style: RopeStyle, output_bias: Presence) -> Description:
    """Attention and FFN in parallel on one LayerNorm, with biases; ``output_bias`` is that of the
    output of attention."""
    rope = shared_rope(file, style)
    return decoder(
        file,
        layer_norm(file),
        lambda layer: attention(file, layer, rope, output_bias=output_bias),
        lambda layer: dense(file, layer, gelu(file), gated=False, bias="required"),
        norm_bias="required",
        norms=("attn_norm", "attn_norm"),
        side_by_side=True,
        output="required",
        output_bias="required",
    )


def bloom(file: Reader) -> Description:
    """BLOOM (arXiv 2211.05100): ALiBi, normalised embedding."""
    norm = file.norm("token_embd_norm", None, layer_norm(file), bias="required")
    attends = {"max_bias": 8.0}
    return _decoder(file, None, qkv_bias="required", attends=attends, embedding_norm=norm)


def jais(file: Reader) -> Description:
    """Jais (arXiv 2308.16149): ALiBi (attention.max_alibi_bias), scores divided by the head
    dimension, SwiGLU."""
    max_bias = file.amount("attention.max_alibi_bias")
    attends = {"max_bias": max_bias, "scale": 1.0 / head_dims(file)[1]}
    return _decoder(
        file, None, SILU, gated=True, qkv_bias="required", attends=attends, output="required"
    )


def jais2(file: Reader) -> Description:
    """Jais 2: squared ReLU."""
    return _decoder(file, shared_rope(file, "half"), RELU2)


def nemotron(file: Reader) -> Description:
    """Nemotron 3 and 4 (arXiv 2402.16819): squared ReLU, partial RoPE. Stored LayerNorm weights
    include the 1 of (1 + weight)."""
    return _decoder(
        file,
        shared_rope(file, "half"),
        RELU2,
        output_bias="optional",
        bias="optional",
        output="required",
    )


def orion(file: Reader) -> Description:
    """Orion (arXiv 2401.12246): LLaMA with LayerNorm."""
    return _decoder(
        file,
        shared_rope(file, "half"),
        SILU,
        gated=True,
        output_bias="absent",
        bias="absent",
        output="required",
    )


def gptneox(file: Reader) -> Description:
    """GPT-NeoX (arXiv 2204.06745), Pythia: with use_parallel_residual, attention and FFN in
    parallel, each with its own norm."""
    side_by_side = file.required("use_parallel_residual", bool)
    return _decoder(
        file,
        shared_rope(file, "half"),
        qkv_bias="required",
        side_by_side=side_by_side,
        output="required",
    )


def mpt(file: Reader) -> Description:
    """MPT (MosaicML 2023): ALiBi or learned positions, few biases, activations optionally divided
    by stored values.

    Keys: attention.max_alibi_bias, attention.clamp_kqv (0: none).
    """
    norm, max_bias = layer_norm(file), file.amount("attention.max_alibi_bias")
    clamp = file.optional("attention.clamp_kqv", float, 0.0)
    has_norms = file.anywhere("attn_q_norm.weight")
    has_divisors = file.anywhere("ffn.act.scales")

    def mixer(layer: int) -> Attention:
        norms = row_norms(file, layer, norm, bias="optional") if has_norms else None
        return attention(file, layer, None, qk_norm=norms, max_bias=max_bias, clamp=max(clamp, 0.0))

    def network(layer: int) -> Dense:
        plain = dense(file, layer, gelu(file), gated=False)
        divisors = file.vector("ffn.act.scales", layer, plain.width) if has_divisors else None
        return replace(plain, divisors=divisors)

    return decoder(
        file,
        norm,
        mixer,
        network,
        norm_bias="optional",
        positions=_positions(file) if file.has("position_embd.weight") else None,
        unused=() if has_norms else ("attn_k_norm.weight", "attn_k_norm.bias"),
    )


def falcon(file: Reader) -> Description:
    """Falcon (arXiv 2311.16867): attention and FFN in parallel, on one norm or (40B: attn_norm_2)
    on two."""
    norm, rope = layer_norm(file), shared_rope(file, "half")
    second = file.anywhere("attn_norm_2.weight")

    def layer(index: int) -> LayerConfig:
        before = file.norm("attn_norm", index, norm, bias="required")
        own = file.norm("attn_norm_2", index, norm, bias="optional") if second else before
        return parallel(
            attention(file, index, rope, qkv_bias="absent", output_bias="absent"),
            dense(file, index, gelu(file), gated=False, bias="absent"),
            (own, before),
        )

    return model(file, layer, file.norm("output_norm", None, norm, bias="required"))


def stablelm(file: Reader) -> Description:
    """StableLM (arXiv 2402.17834): LayerNorm, SwiGLU, optional QK norms. Without ffn_norm (12B)
    attention and FFN run in parallel."""
    norm, (key_dim, _) = layer_norm(file), head_dims(file)
    rope = shared_rope(file, "half")

    def layer(index: int) -> LayerConfig:
        queries, keys = heads(file, index)
        q = file.optional_norm("attn_q_norm", index, norm, queries, key_dim)
        k = file.optional_norm("attn_k_norm", index, norm, keys, key_dim)
        norms = QkNorm(q, k) if q and k else None
        mixer = attention(file, index, rope, qk_norm=norms, output_bias="absent")
        network = dense(file, index, bias="absent")
        before = file.norm("attn_norm", index, norm, bias="required")
        between = file.optional_norm("ffn_norm", index, norm, bias="optional")
        if between is None:
            return parallel(mixer, network, (before, before))
        return sequential(mixer, network, (before, between))

    output_norm = file.norm("output_norm", None, norm, bias="required")
    return model(file, layer, output_norm, output="required")


ARCHITECTURES = {
    "gpt2": gpt2,
    "starcoder": gpt2,
    "gpt1": gpt1,
    "persimmon": persimmon,
    "gptneo": gptneo,
    "starcoder2": starcoder2,
    "codeshell": codeshell,
    "bloom": bloom,
    "jais": jais,
    "jais2": jais2,
    "nemotron": nemotron,
    "orion": orion,
    "gptneox": gptneox,
    "mpt": mpt,
    "falcon": falcon,
    "opt": opt,
    "gptj": gptj,
    "stablelm": stablelm,
}
