"""DeepSeek V3.2 and GLM 5: MLA over the tokens that a lightning indexer selects (DSA, arXiv
2512.02556), and DeepSeek V3's experts.

Keys: those of `deepseek2`, without temperatures; attention.indexer.head_count, key_length, top_k;
of GLM 5 also attention.indexer.types (for each layer whether it has an indexer, or selects as the
last layer before that has one) and attention.layer_norm_epsilon of the norm of index keys.
MTP heads attend to all tokens. llama.cpp: `src/models/` deepseek32.cpp, glm-dsa.cpp.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any

from urdir.model.errors import ConfigError, UnsupportedError
from urdir.model.families.architectures.deepseek2 import scaled_rope
from urdir.model.families.attention import Attention, Indexer
from urdir.model.families.dense import rms_decoder
from urdir.model.families.description import Description
from urdir.model.families.latent import latent_attention, latent_head_dims
from urdir.model.families.mixtures import scoring, unless_dense
from urdir.model.families.nextn import NextnKind
from urdir.model.families.parts import layer_norm, rms_norm
from urdir.model.families.reader import Reader
from urdir.model.families.rope import RopeConfig
from urdir.model.families.scored_experts import scored_experts
from urdir.ptxgen.kernels.attention.index_scores import MOST_DIM, MOST_HEADS
from urdir.ptxgen.kernels.attention.pool_keys import MOST_POOL
from urdir.ptxgen.kernels.attention.select_keys import MOST_KEYS
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.rotation import RopeStyle

#: Tensors of an indexer, which layers without one may have.
INDEXER = (
    *("indexer.k_norm.weight", "indexer.k_norm.bias", "indexer.proj.weight"),
    *("indexer.attn_k.weight", "indexer.attn_q_b.weight"),
    *("indexer_compressor_gate.weight", "indexer_compressor_ape.weight"),
)
#: The epsilon of the norm of index keys where a file names none.
INDEX_EPS = 1e-6
#: The context from which on GLM 5.2 has an indexer in layers 0, 1 and every fourth from 2 on.
_LONG = 1048576


def deepseek32(file: Reader) -> Description:
    """DeepSeek V3.2: each layer has an indexer, whose keys rotate by halves."""
    return _sparse(file, "half", [True] * file.layer_count())


def glm_dsa(file: Reader) -> Description:
    """GLM 5: some layers may select as an earlier one."""
    layers = range(file.layer_count())
    usual = [True] * len(layers)
    if file.size("context_length") >= _LONG:
        usual = [layer < 2 or layer % 4 == 2 for layer in layers]
    return _sparse(file, "interleaved", own_indexers(file, usual, layers))


def own_indexers(file: Reader, usual: list[bool], attending: Iterable[int]) -> list[bool]:
    """Whether each layer but those for MTP has an indexer; as ``usual`` where the file does not
    say so. Layers ``attending`` have attention."""
    key = "attention.indexer.types"
    own = file.by_layer(key, bool)[: file.layer_count()] if file.has_key(key) else usual
    first = next(iter(attending), None)
    if first is not None and not own[first]:
        raise ConfigError(
            f"{file.key(key)}: layer {first}, the first with attention, has no indexer"
        )
    return own


def _sparse(file: Reader, style: RopeStyle, own: list[bool]) -> Description:
    scores = scoring(file, "sigmoid")
    network = partial(scored_experts, file, scores=scores, choice_bias="optional")

    def attention(index: int) -> Attention:
        return _attention(file, index, style, own[index] if index < len(own) else None)

    return rms_decoder(
        file,
        attention,
        unless_dense(file, network),
        nextn=NextnKind(rms_norm(file), passes_normed=True),
        unused=INDEXER,
    )


def _attention(file: Reader, layer: int, style: RopeStyle, own: bool | None) -> Attention:
    """The attention of a layer with an indexer of its ``own``, with the one before, or (None) with
    neither."""
    rope, scale = scaled_rope(file, latent_head_dims(file)[0])
    heads, rank = file.size_at("attention.head_count", layer), file.size("attention.q_lora_rank")
    return latent_attention(
        *(file, layer, heads, rope.dim, rank),
        rope=rope,
        scale=scale,
        indexer=indexer(file, layer, replace(rope, style=style), rank) if own else None,
        follows_indexer=own is False,
    )


def check_indexer(file: Reader, rope: RopeConfig | None, block: int = 1) -> tuple[int, int, int]:
    """Heads of an indexer, their values, and how many tokens it selects, or blocks of as many
    tokens. Raises ConfigError, UnsupportedError for what kernels lack."""
    heads, dim, most = (
        file.size(f"attention.indexer.{name}") for name in ("head_count", "key_length", "top_k")
    )
    if rope is not None and rope.dim > dim:
        raise ConfigError(
            f"{file.key('attention.indexer.key_length')} is {dim}, but {rope.dim} values rotate"
        )
    if heads > MOST_HEADS or dim > MOST_DIM or dim % 8 or most * block > MOST_KEYS:
        what = "tokens" if block == 1 else "blocks"
        raise UnsupportedError(
            f"an indexer of {heads} heads of {dim} values that selects {most} {what} "
            f"({file.key('attention.indexer')}): supported are up to {MOST_HEADS} heads of a "
            f"multiple of 8 values, up to {MOST_DIM}, and {MOST_KEYS // block} {what}"
        )
    return heads, dim, most


def indexer(
    file: Reader,
    layer: int,
    rope: RopeConfig | None,
    rank: int,
    *,
    norm: Norm | None = None,
    pools: bool = False,
    rotates_last: bool = False,
) -> Indexer:
    """The indexer of a layer whose queries have that ``rank``; with ``pools`` of
    attention.indexer.kpool tokens, if the file says so. ``norm`` is that of keys, by default with
    the file's epsilon. Where the last values of a head rotate (``rotates_last``), rows are
    reordered, so that these come first: scores are sums over all values of a head."""
    heads, dim, most = check_indexer(file, rope)
    if norm is None:
        eps = "attention.layer_norm_epsilon"
        norm = layer_norm(file) if file.has_key(eps) else Norm("layer", INDEX_EPS)
    q = file.linear("indexer.attn_q_b", layer, heads * dim, rank)
    k = file.linear("indexer.attn_k", layer, dim, file.hidden)
    k_norm = file.norm("indexer.k_norm", layer, norm, dim, bias="required")
    if rotates_last and rope is not None and rope.dim < dim:
        still = dim - rope.dim
        both = [((at + still, at + dim), (at, at + still)) for at in range(0, heads * dim, dim)]
        q, k = q.pick(*chain(*both)), k.pick(*both[0])
        k_norm = replace(
            k_norm,
            weight=k_norm.weight and k_norm.weight.pick(*both[0]),
            bias=k_norm.bias and k_norm.bias.pick(*both[0]),
        )
    return Indexer(
        heads,
        dim,
        most,
        q=q,
        k=k,
        k_norm=k_norm,
        weights=file.linear("indexer.proj", layer, heads, file.hidden),
        rope=rope,
        **(_pools(file, layer, dim, most) if pools else {}),
    )


def _pools(file: Reader, layer: int, dim: int, most: int) -> dict[str, Any]:
    """Fields of an indexer of pools of tokens."""
    if (pool := file.count("attention.indexer.kpool")) <= 1:
        return {}
    if pool > MOST_POOL or most % pool:
        raise UnsupportedError(
            f"{file.key('attention.indexer.kpool')} is {pool}: supported are pools of up to "
            f"{MOST_POOL} tokens, and whole ones ({most} tokens are selected)"
        )
    if not file.optional("attention.indexer.kpool_select_tail", bool, False):
        raise UnsupportedError(
            f"{file.key('attention.indexer.kpool_select_tail')}: without the last tokens"
        )
    return {
        "pool": pool,
        "gate": file.linear("indexer_compressor_gate", layer, dim, file.hidden),
        "places": file.vector("indexer_compressor_ape.weight", layer, pool, dim),
    }


ARCHITECTURES = {"deepseek32": deepseek32, "glm-dsa": glm_dsa}
