"""PLaMo 1 and 3 (Preferred Networks).

Keys: those of `parts` and `rope`, attention.layer_norm_rms_epsilon; PLaMo 3:
attention.sliding_window, attention.sliding_window_pattern, rope.freq_base_swa,
rope.dimension_count_swa. llama.cpp: `src/models/` plamo.cpp, plamo3.cpp.
"""

from __future__ import annotations

from urdir.model.families.dense import decoder
from urdir.model.families.description import Attention, Config, LayerConfig
from urdir.model.families.parts import (
    attention,
    dense,
    head_dims,
    model,
    required_head_norms,
    rms_norm,
    sequential,
)
from urdir.model.families.reader import Reader
from urdir.model.families.rope import read_rope, windowed_rope
from urdir.model.families.stored import Normalization
from urdir.model.families.windows import optional_window, windowed_layers


def plamo(file: Reader) -> Config:
    """PLaMo 13B: attention beside the network, both of one norm."""
    rope = read_rope(file, "half", head_dims(file)[0], factors=False)
    return decoder(
        file,
        rms_norm(file),
        lambda layer: attention(file, layer, rope, output_bias="absent"),
        lambda layer: dense(file, layer, bias="absent"),
        norms=("attn_norm", "attn_norm"),
        side_by_side=True,
        output="required",
    )


def plamo3(file: Reader) -> Config:
    """PLaMo 3: normalised heads, norms before and after, windows in seven of eight layers. The
    norms after have no ".weight" in their names."""
    norm, (key_dim, _) = rms_norm(file), head_dims(file)
    rope = read_rope(file, "half", key_dim, factors=False)
    local, window = rope, optional_window(file)
    windowed = [False] * file.layer_count()
    if window:
        local = windowed_rope(file, rope, key_dim, scaled=False, base=1e4)
        windowed = windowed_layers(file, 8)

    def mixer(layer: int) -> Attention:
        return attention(
            file,
            layer,
            local if windowed[layer] else rope,
            qk_norm=required_head_norms(file, layer, norm, key_dim),
            window=window if windowed[layer] else 0,
            qkv_bias="absent",
            output_bias="absent",
        )

    def after(name: str, layer: int) -> Normalization:
        return Normalization(norm, file.vector(name, layer, file.hidden))

    def layer(index: int) -> LayerConfig:
        return sequential(
            mixer(index),
            dense(file, index, bias="absent"),
            (file.norm("attn_norm", index, norm), file.norm("ffn_norm", index, norm)),
            (after("post_attention_norm", index), after("post_ffw_norm", index)),
        )

    return model(file, layer, file.norm("output_norm", None, norm))


ARCHITECTURES = {"plamo": plamo, "plamo3": plamo3}
