"""Mamba (Gu & Dao 2023, arXiv 2312.00752), Falcon Mamba and Jamba (arXiv 2403.19887).

    x += o (scan(u, dt, B, C) * silu(z))     u = silu(conv(h));  h, z = ssm_in x'   x' = RMSNorm(x)
                                             dt = softplus(ssm_dt low);  low, B, C = ssm_x u

Keys: those of `parts` and `mixtures`, attention.layer_norm_rms_epsilon; ssm.conv_kernel,
ssm.inner_size (channels), ssm.state_size (values of a channel), ssm.time_step_rank (the low rank of
dt), ssm.dt_b_c_rms (Falcon: low, B and C are normalised, without weights);
attention.head_count_kv (Jamba; 0: the layer is a Mamba layer). llama.cpp: `src/models/`
mamba-base.cpp, mamba.cpp, jamba.cpp.
"""

from __future__ import annotations

from urdir.model.families.dense import rms_decoder, weightless
from urdir.model.families.description import Description
from urdir.model.families.layers import Block, Branch, LayerConfig, Network
from urdir.model.families.mixtures import dense_width, mixture, plain_dense, router
from urdir.model.families.parts import attention, model, rms_norm
from urdir.model.families.reader import Reader
from urdir.model.families.recurrent import Selective, convolution
from urdir.model.families.stored import Normalization
from urdir.ptxgen.kernels.norm import Norm


def mamba(file: Reader) -> Description:
    """Mamba and Falcon Mamba."""
    norm = rms_norm(file)
    inner = Norm("rms", file.own("mixer_eps", float, norm.eps))
    bare = weightless(inner) if file.optional("ssm.dt_b_c_rms", bool, False) else None

    def layer(index: int) -> LayerConfig:
        mixer = _mixer(file, index, (bare, bare, bare))
        return LayerConfig((Block((Branch(mixer, file.norm("attn_norm", index, norm)),)),))

    return model(file, layer, file.norm("output_norm", None, norm))


def jamba(file: Reader) -> Description:
    """Jamba: some layers are attention without RoPE, some have experts; low, B and C are
    normalised."""
    norm, kv_heads = rms_norm(file), file.by_layer("attention.head_count_kv", int)
    size, rank = file.size("ssm.state_size"), file.size("ssm.time_step_rank")

    def mixer(index: int) -> Network:
        if kv_heads[index]:
            return attention(file, index, None, output_bias="absent")
        widths = {"dt": rank, "b": size, "c": size}
        low, b, c = (file.norm(f"ssm_{n}_norm", index, norm, w) for n, w in widths.items())
        return _mixer(file, index, (low, b, c))

    def network(index: int) -> Network:
        if not file.has("ffn_gate_inp.weight", index):
            return plain_dense(file, index)
        route = router(file, index)
        return mixture(file, index, route, dense_width(file, index))

    return rms_decoder(file, mixer, network)


def _mixer(
    file: Reader,
    layer: int,
    norms: tuple[Normalization | None, Normalization | None, Normalization | None],
) -> Selective:
    hidden, inner = file.hidden, file.size("ssm.inner_size")
    size, rank = file.size("ssm.state_size"), file.size("ssm.time_step_rank")
    both = file.linear("ssm_in", layer, 2 * inner, hidden)
    parts = file.linear("ssm_x", layer, rank + 2 * size, inner)
    return Selective(
        mixed=both.part(0, inner),
        conv=convolution(file, "ssm.conv_kernel", "ssm_conv1d", layer, inner, bias="optional"),
        gate=both.part(inner, inner),
        low=parts.part(0, rank),
        b=parts.part(rank, size),
        c=parts.part(rank + size, size),
        low_norm=norms[0],
        b_norm=norms[1],
        c_norm=norms[2],
        step=file.linear("ssm_dt", layer, inner, rank, bias="required"),
        a=file.vector("ssm_a", layer, inner, size),
        skip=file.vector("ssm_d", layer, inner),
        o=file.linear("ssm_out", layer, hidden, inner),
    )


ARCHITECTURES = {"mamba": mamba, "jamba": jamba}
