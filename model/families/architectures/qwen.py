"""Qwen 1 (arXiv 2309.16609), and the text decoders of Qwen 2 VL and Qwen 3 VL.

arXiv 2409.12191, 2511.21631.

Keys: those of `parts` and `rope`, attention.layer_norm_rms_epsilon, rope.dimension_sections (VL).
llama.cpp: `src/models/` qwen.cpp, qwen2vl.cpp, qwen3vl.cpp.
"""

from __future__ import annotations

from urdir.model.families.attention import Attention
from urdir.model.families.dense import decoder, mixer, plain_decoder, rms_decoder, shared_rope
from urdir.model.families.description import Description
from urdir.model.families.parts import attention, dense, head_dims, heads
from urdir.model.families.reader import Reader
from urdir.model.families.rope import with_sections
from urdir.ptxgen.kernels.norm import Norm


def qwen(file: Reader) -> Description:
    """Qwen 1: feed_forward_length counts both halves of the gated FFN. With fewer KV heads than
    heads, only the first of the 3 * hidden rows of attn_qkv are used, as in llama.cpp."""
    key_dim, _ = head_dims(file)
    rope = shared_rope(file, "half")

    def attends(layer: int) -> Attention:
        queries, keys = heads(file, layer)
        fused = file.linear("attn_qkv", layer, 3 * file.hidden, file.hidden, bias="required")
        wide, narrow = queries * key_dim, keys * key_dim
        q, k, v = (
            fused.part(first, rows)
            for first, rows in ((0, wide), (wide, narrow), (wide + narrow, narrow))
        )
        return attention(file, layer, rope, output_bias="absent", q=q, k=k, v=v)

    return rms_decoder(
        file,
        attends,
        lambda layer: dense(
            file, layer, width=file.size_at("feed_forward_length", layer) // 2, bias="absent"
        ),
        output="required",
    )


def qwen2vl(file: Reader) -> Description:
    """Qwen 2 VL. A missing norm epsilon counts as 0, as in llama.cpp, which does not read it. The
    output bias is ignored, as there."""
    eps = file.amount("attention.layer_norm_rms_epsilon")
    rope = with_sections(file, shared_rope(file, "half"))
    return decoder(
        file,
        Norm("rms", eps),
        mixer(file, rope),
        output_bias="absent",
        unused=("output.bias",),
    )


def qwen3vl(file: Reader) -> Description:
    """Qwen 3 VL: QK norms, interleaved axes. Deepstack adds image features to the first layers and
    has no effect on text."""
    rope = with_sections(file, shared_rope(file, "half"), interleaved=True)
    attends, unused = {"head_norm": True}, ("cls.output.weight",)
    return plain_decoder(file, rope, attends=attends, unused=unused)


ARCHITECTURES = {"qwen": qwen, "qwen2vl": qwen2vl, "qwen3vl": qwen3vl}
