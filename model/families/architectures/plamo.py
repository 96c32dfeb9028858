"""PLaMo 1 to 3 (Preferred Networks).

Keys: those of `parts` and `rope`, attention.layer_norm_rms_epsilon; PLaMo 2: those of
`state_space`; PLaMo 3: attention.sliding_window, attention.sliding_window_pattern,
rope.freq_base_swa, rope.dimension_count_swa. llama.cpp: `src/models/` plamo.cpp, plamo2.cpp,
plamo3.cpp.
"""

from __future__ import annotations

import math

from urdir.model.errors import ConfigError, UnsupportedError
from urdir.model.families.attention import Attention, QkNorm
from urdir.model.families.dense import plain_decoder, shared_rope, windowed_mixer
from urdir.model.families.description import Description
from urdir.model.families.layers import LayerConfig
from urdir.model.families.parts import (
    attention,
    dense,
    head_dims,
    heads,
    model,
    rms_norm,
    sequential,
)
from urdir.model.families.reader import Reader
from urdir.model.families.recurrent import Selective, convolution
from urdir.model.families.rope import RopeConfig, windowed_rope
from urdir.model.families.stored import Normalization
from urdir.model.families.windows import optional_window, optional_windows


def plamo(file: Reader) -> Description:
    """PLaMo 13B: attention and FFN in parallel on one norm."""
    return plain_decoder(
        file,
        shared_rope(file, "half"),
        norms=("attn_norm", "attn_norm"),
        side_by_side=True,
        output="required",
    )


def plamo2(file: Reader) -> Description:
    """PLaMo 2: Mamba with heads where attention.head_count_kv is 0, else attention with QK norms;
    norms before and after each block."""
    rope = shared_rope(file, "half")
    kv_heads = file.by_layer("attention.head_count_kv", int)

    def layer(index: int) -> LayerConfig:
        mixer = _attention(file, index, rope) if kv_heads[index] else _mamba(file, index)
        return _normed_after(file, index, mixer)

    return model(file, layer, file.norm("output_norm", None, rms_norm(file)))


def _attention(file: Reader, layer: int, rope: RopeConfig) -> Attention:
    norm, (dim, value_dim), (queries, keys) = rms_norm(file), head_dims(file), heads(file, layer)
    q_norm = file.norm("attn_q_norm", layer, norm, queries, dim)
    return attention(
        file,
        layer,
        rope,
        scale=1.0 / math.sqrt(value_dim),
        qk_norm=QkNorm(q_norm, file.norm("attn_k_norm", layer, norm, keys, dim)),
        qkv_bias="absent",
        output_bias="absent",
    )


def _mamba(file: Reader, layer: int) -> Selective:
    """Mamba with heads. Rows of ``ssm_in`` are a head's gate, then its input. Norm tensors have no
    ".weight" suffix."""
    hidden, inner = file.hidden, file.size("ssm.inner_size")
    count, size = file.size("ssm.time_step_rank"), file.size("ssm.state_size")
    if inner % count:
        raise ConfigError(
            f"{inner} values in {count} heads ({file.key('ssm.inner_size')}, ssm.time_step_rank)"
        )
    if groups := file.count("ssm.group_count"):
        raise UnsupportedError(f"{file.key('ssm.group_count')} is {groups}, expected 0")
    dim, rank = inner // count, max(64, hidden // 16)
    both = file.linear("ssm_in", layer, 2 * inner, hidden)
    parts = file.linear("ssm_x", layer, rank + 2 * size, inner)

    def norm(name: str, width: int) -> Normalization:
        return Normalization(rms_norm(file), file.vector(name, layer, width))

    return Selective(
        mixed=both.part(dim, dim, 2 * dim),
        conv=convolution(file, "ssm.conv_kernel", "ssm_conv1d", layer, inner),
        gate=both.part(0, dim, 2 * dim),
        low=parts.part(2 * size, rank),
        b=parts.part(0, size),
        c=parts.part(size, size),
        low_norm=norm("ssm_dt_norm", rank),
        b_norm=norm("ssm_b_norm", size),
        c_norm=norm("ssm_c_norm", size),
        step=file.linear("ssm_dt", layer, count, rank, bias="required"),
        a=file.vector("ssm_a", layer, count),
        skip=file.vector("ssm_d", layer, count),
        o=file.linear("ssm_out", layer, hidden, inner),
    )


def _normed_after(file: Reader, layer: int, mixer: Attention | Selective) -> LayerConfig:
    """A layer with norms before and after; the latter's tensors have no ".weight" suffix."""
    norm = rms_norm(file)

    def after(name: str) -> Normalization:
        return Normalization(norm, file.vector(name, layer, file.hidden))

    return sequential(
        mixer,
        dense(file, layer, bias="absent"),
        (file.norm("attn_norm", layer, norm), file.norm("ffn_norm", layer, norm)),
        (after("post_attention_norm"), after("post_ffw_norm")),
    )


def plamo3(file: Reader) -> Description:
    """PLaMo 3: QK norms, norms before and after, sliding windows in seven of eight layers."""
    key_dim, window = head_dims(file)[0], optional_window(file)
    rope = shared_rope(file, "half")
    local = windowed_rope(file, rope, key_dim, scaled=False, base=1e4) if window else rope
    windowed = optional_windows(file, window, 8)
    attends = windowed_mixer(file, windowed, window, local, rope, head_norm=True, qkv_bias="absent")
    return model(
        file,
        lambda index: _normed_after(file, index, attends(index)),
        file.norm("output_norm", None, rms_norm(file)),
    )


ARCHITECTURES = {"plamo": plamo, "plamo2": plamo2, "plamo3": plamo3}
