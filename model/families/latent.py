"""Multi-head latent attention (MLA, arXiv 2405.04434), read from a file.

Keys, under the architecture's name: attention.kv_lora_rank (the latent vector),
attention.key_length_mla and value_length_mla (of a head). Layers with a window may have keys of
their own, which end with "_swa".
"""

from __future__ import annotations

import math
from typing import Any

from urdir.model.errors import ConfigError, UnsupportedError
from urdir.model.families.attention import Attention, Latent
from urdir.model.families.reader import Reader
from urdir.model.families.stored import Linear
from urdir.ptxgen.kernels.norm import Norm


def latent_head_dims(file: Reader, suffix: str = "") -> tuple[int, int]:
    """Dimensions of a key head and of a value head, non-absorbed."""
    names = [f"attention.{name}_length_mla{suffix}" for name in ("key", "value")]
    key, value = map(file.count, names)
    if not key or not value:
        raise UnsupportedError(
            f"{file.key(names[0])} or {names[1]} is missing: old file, convert the model again"
        )
    return key, value


def latent_norm(file: Reader) -> Norm:
    """The norm of latent vectors; a folder may have another epsilon for it."""
    return Norm("rms", file.own("latent_eps", float, file.rms()))


def latent_attention(
    file: Reader,
    layer: int,
    heads: int,
    shared: int,
    rank: int = 0,
    *,
    scale: float | None = None,
    suffix: str = "",
    key_norm: bool = False,
    **options: Any,
) -> Attention:
    """MLA of a layer.

    ``shared`` values of the key are common to all heads and not part of the latent vector: the
    rotated ones, if any rotate; 0: the latent vector is the key. ``rank`` is that of the query
    projection (0: full).

    ``scale`` defaults to 1 / sqrt(key dimension); ``options`` are fields of `Attention`. The keys
    of sizes end with ``suffix``. ``key_norm``: the shared values have a norm, attn_k_norm.
    """
    hidden, norm = file.hidden, latent_norm(file)
    latent = file.size(f"attention.kv_lora_rank{suffix}")
    key_dim, value_dim = latent_head_dims(file, suffix)
    own = key_dim - shared
    if own < 1 or shared < 0:
        key = file.key(f"attention.key_length_mla{suffix}")
        raise ConfigError(
            f"heads of {key_dim} values ({key}), of which {shared} rotate "
            "(rope.dimension_count): some must not rotate"
        )
    name, source = ("attn_q_b", rank) if rank else ("attn_q", hidden)
    queries = file.linear(name, layer, heads * key_dim, source)
    down = file.linear("attn_kv_a_mqa", layer, latent + shared, hidden)
    vector = down.part(0, latent)
    absorb, keys, expand = _heads_of_latent(file, layer, heads, own, value_dim, latent)
    return Attention(
        heads=heads,
        kv_heads=1,
        key_dim=shared + latent,
        value_dim=latent,
        scale=file.own("score_scale", float, scale or 1.0 / math.sqrt(key_dim)),
        q=queries.part(own, shared, key_dim) if shared else queries,
        k=down.part(latent, shared) if shared else vector,
        v=vector,
        o=file.linear("attn_output", layer, hidden, heads * value_dim),
        latent=Latent(
            down=vector,
            norm=file.norm("attn_kv_a_norm", layer, norm, latent),
            q_still=queries.part(0, own, key_dim) if shared else queries,
            absorb=absorb,
            expand=expand,
            keys=keys if shared else None,
            q_down=file.linear("attn_q_a", layer, rank, hidden) if rank else None,
            q_norm=file.norm("attn_q_a_norm", layer, norm, rank) if rank else None,
            k_norm=file.norm("attn_k_norm", layer, norm, shared) if key_norm else None,
        ),
        **options,
    )


def keys_and_values(file: Reader, layer: int, width: int, latent: int) -> Linear:
    """The matrix from latent vectors to keys and values of heads, (width, latent). Raises
    UnsupportedError for columns in an order of their own: rows and columns of its keys are
    exchanged, and products of heads read latent vectors as they are in the cache."""
    found = file.linear("attn_kv_b", layer, width, latent)
    if found.order is not None:
        raise UnsupportedError(
            f"tensor '{found.matrix.name}' has columns in an order of its own (desc_act), which "
            "latent vectors are not brought into: use a folder without desc_act"
        )
    return found


def _heads_of_latent(
    file: Reader, layer: int, heads: int, own: int, value_dim: int, latent: int
) -> tuple[Linear, Linear, Linear]:
    """The matrices between a head and the latent vector: absorbed into queries, of keys, and of
    values. A folder has one matrix with the key rows of each head before its value rows."""
    if file.of_folder:
        both = own + value_dim
        up = keys_and_values(file, layer, heads * both, latent)
        keys = up.part(0, own, both)
        return keys.transposed(), keys, up.part(own, value_dim, both)
    absorb = file.linear("attn_k_b", layer, heads, latent, own)
    values = file.linear("attn_v_b", layer, heads, value_dim, latent)
    return absorb, absorb.part(0, latent, latent).transposed(half=True), values
