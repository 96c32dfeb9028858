"""dots.note 3: MLA with a gate for each head, over tokens that an indexer selects, or with a window
and smaller latent vectors; DeepSeek V3's experts.

Keys: those of `deepseek32` without yarn_log_multiplier; attention.sliding_window,
attention.sliding_window_pattern (a flag for each layer), attention.kv_lora_rank_swa,
key_length_mla_swa, value_length_mla_swa, rope.freq_base_swa, and rope.dimension_count_swa
(refused if it differs). Layers with a window have no indexer; the others must have one. llama.cpp:
`src/models/` dots3note.cpp, which has no graph for MTP.

Keys of indexers rotate by halves in GGUF files, as neighbours in folders: so do llama.cpp and
transformers (its class, whatever config.json says).
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from urdir.model.errors import ConfigError, UnsupportedError
from urdir.model.families.architectures.deepseek32 import INDEX_EPS, INDEXER, indexer
from urdir.model.families.attention import Attention
from urdir.model.families.dense import rms_decoder
from urdir.model.families.description import Description
from urdir.model.families.latent import latent_attention, latent_head_dims
from urdir.model.families.mixtures import scoring, unless_dense
from urdir.model.families.parts import output_gate
from urdir.model.families.reader import Reader
from urdir.model.families.rope import read_base, read_rope
from urdir.model.families.scored_experts import scored_experts
from urdir.model.families.windows import flagged_layers
from urdir.ptxgen.kernels.norm import Norm


def dots3note(file: Reader) -> Description:
    """dots.note 3."""
    windowed, window = flagged_layers(file), file.size("attention.sliding_window")
    key = "attention.indexer.types"
    own = file.by_layer(key, bool) if file.has_key(key) else [True] * len(windowed)
    for layer, (short, selects) in enumerate(zip(windowed, own, strict=True)):
        if not short and not selects:
            raise ConfigError(f"{file.key(key)}: layer {layer} has neither window nor indexer")
    rope = read_rope(file, "interleaved", latent_head_dims(file)[0], factors=False)
    if file.optional("rope.dimension_count_swa", int, rope.dim) != rope.dim:
        raise UnsupportedError(f"{file.key('rope.dimension_count_swa')}: not {rope.dim}")
    local = replace(rope, freq_base=read_base(file, "rope.freq_base_swa", rope.freq_base))
    turns, norm = rope if file.of_folder else replace(rope, style="half"), Norm("layer", INDEX_EPS)
    scores, rank = scoring(file), file.size("attention.q_lora_rank")

    def attends(index: int) -> Attention:
        heads, short = file.size_at("attention.head_count", index), windowed[index]
        return latent_attention(
            *(file, index, heads, rope.dim, rank),
            suffix="_swa" if short else "",
            key_norm=True,
            rope=local if short else rope,
            window=window if short else 0,
            gate=output_gate(file, index, heads, "sigmoid"),
            indexer=None if short else indexer(file, index, turns, rank, norm=norm),
        )

    experts = partial(scored_experts, file, scores=scores)
    return rms_decoder(file, attends, unless_dense(file, experts), unused=INDEXER)


ARCHITECTURES = {"dots3note": dots3note}
