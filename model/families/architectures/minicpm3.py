"""MiniCPM 3 and PLM: MLA as in `deepseek2` with dense FFNs.

The scales of MiniCPM depend on sizes only. llama.cpp: `src/models/` minicpm3.cpp, plm.cpp.

    x = 12 embedding,  x += 1.4 / sqrt(layers) network(RMSNorm(x)),  logits = 256 / hidden output x'

Keys: those of `parts` and `rope`, attention.layer_norm_rms_epsilon; attention.kv_lora_rank (the
latent vector), attention.q_lora_rank (MiniCPM), rope.dimension_count (the rotated part of a head).
"""

from __future__ import annotations

import math

from urdir.model.families.attention import Attention, Latent
from urdir.model.families.dense import rms_decoder, shared_rope
from urdir.model.families.description import Description
from urdir.model.families.latent import keys_and_values, latent_norm
from urdir.model.families.mixtures import plain_dense
from urdir.model.families.parts import RELU2, dense, head_dims
from urdir.model.families.reader import Reader
from urdir.model.families.rope import RopeConfig


def minicpm3(file: Reader) -> Description:
    """MiniCPM 3 (OpenBMB, arXiv 2404.06395)."""
    rope = shared_rope(file, "half", factors=True)
    return rms_decoder(
        file,
        lambda layer: _attention(file, layer, rope, file.size("attention.q_lora_rank")),
        lambda layer: plain_dense(file, layer),
        scale=1.4 / math.sqrt(file.layer_count()),
        embedding_scale=12.0,
        logit_scale=256.0 / file.hidden,
    )


def plm(file: Reader) -> Description:
    """PLM (arXiv 2503.12167): queries have full rank, an ungated squared ReLU."""
    rope = shared_rope(file, "interleaved")
    return rms_decoder(
        file,
        lambda layer: _attention(file, layer, rope),
        lambda layer: dense(file, layer, RELU2, gated=False, bias="absent"),
        output="absent",
        output_bias="absent",
    )


def _attention(file: Reader, layer: int, rope: RopeConfig, rank: int = 0) -> Attention:
    """MLA of a layer, with queries of a ``rank`` (0: full). The file stores a head's key rows
    beside its value rows (attn_kv_b); absorbing them into the query needs their transpose. A head
    may rotate as a whole."""
    hidden, norm, (key_dim, value_dim) = file.hidden, latent_norm(file), head_dims(file)
    heads, still = file.size_at("attention.head_count", layer), key_dim - rope.dim
    latent = file.size("attention.kv_lora_rank")
    name, source = ("attn_q_b", rank) if rank else ("attn_q", hidden)
    queries = file.linear(name, layer, heads * key_dim, source)
    down = file.linear("attn_kv_a_mqa", layer, latent + rope.dim, hidden)
    both, width = still + value_dim, heads * (still + value_dim)
    up = keys_and_values(file, layer, width, latent)
    vector = down.part(0, latent)
    return Attention(
        heads=heads,
        kv_heads=1,
        key_dim=rope.dim + (latent if still else 0),
        value_dim=latent,
        scale=1.0 / math.sqrt(key_dim),
        q=queries.part(still, rope.dim, key_dim),
        k=down.part(latent, rope.dim),
        v=vector,
        o=file.linear("attn_output", layer, hidden, heads * value_dim),
        rope=rope,
        latent=Latent(
            down=vector,
            norm=file.norm("attn_kv_a_norm", layer, norm, latent),
            q_still=queries.part(0, still, key_dim) if still else None,
            absorb=up.part(0, still, both).transposed() if still else None,
            expand=up.part(still, value_dim, both),
            keys=up.part(0, still, both) if still else None,
            q_down=file.linear("attn_q_a", layer, rank, hidden) if rank else None,
            q_norm=file.norm("attn_q_a_norm", layer, norm, rank) if rank else None,
        ),
    )


ARCHITECTURES = {"minicpm3": minicpm3, "plm": plm}
