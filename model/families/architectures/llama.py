"""LLaMA (Touvron et al. 2023, arXiv 2302.13971) and its nearest relatives.

RMSNorm, grouped-query attention (GQA, Ainslie et al. 2023, arXiv 2305.13245), SwiGLU.

    x += O attention(rope(Q x'), rope(K x'), V x')        x' = RMSNorm(x)
    x += down(silu(gate x') * up x')                      x' = RMSNorm(x)

Keys: those of `parts` and `rope`, attention.layer_norm_rms_epsilon; for "llama" expert_count,
expert_used_count and groups (`mixtures`). llama.cpp: `src/models/`
llama.cpp, qwen2.cpp, qwen3.cpp.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

from urdir.model.errors import ConfigError
from urdir.model.families.attention import Attention
from urdir.model.families.dense import rms_decoder, shared_rope
from urdir.model.families.description import Description
from urdir.model.families.feed_forward import Dense, Mixture
from urdir.model.families.mixtures import optional_mixture
from urdir.model.families.parts import attention, dense, head_dims, head_norms, rms_norm
from urdir.model.families.reader import Reader
from urdir.ptxgen.kernels.rotation import RopeStyle


def llama(file: Reader) -> Description:
    """Llama 1 to 3, Mistral, Mixtral, TinyLlama, SmolLM and all else that GGUF names "llama".

    The converter permutes the rows of Q and K, so that neighbours rotate together. Tokens of
    pictures, which a folder may have (Llama 3.2 Vision), are never chosen.
    """
    hidden = file.own("first_hidden_token", int, None)
    file.has_key("own.tokens")  # of the rows of the output, where it has fewer than the embedding
    found = _decoder(file, "interleaved", optional_mixture)
    if hidden is None:
        return found
    if not 0 < hidden < found.vocab_size:
        raise ConfigError(
            f"tensor 'token_embd.weight' has {found.vocab_size} rows, tokens from {hidden} on are "
            "never chosen"
        )
    return replace(found, hides=(hidden, found.vocab_size))


def qwen2(file: Reader) -> Description:
    """Qwen 2 and 2.5 (arXiv 2407.10671): biases of Q, K and V."""
    return _decoder(file, "half")


def qwen3(file: Reader) -> Description:
    """Qwen 3 (arXiv 2505.09388), dense: QK norms before RoPE."""
    return _decoder(file, "half", head_norm=True)


def _decoder(
    file: Reader,
    style: RopeStyle,
    network: Callable[[Reader, int], Dense | Mixture] = dense,
    *,
    head_norm: bool = False,
) -> Description:
    norm, (key_dim, _) = rms_norm(file), head_dims(file)
    rope = shared_rope(file, style, factors=True)

    def attends(index: int) -> Attention:
        norms = head_norms(file, index, norm, key_dim) if head_norm else None
        return attention(file, index, rope, qk_norm=norms)

    return rms_decoder(file, attends, partial(network, file))


ARCHITECTURES = {"llama": llama, "qwen2": qwen2, "qwen3": qwen3}
