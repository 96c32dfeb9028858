"""Models of equal layers: attention and an FFN, with norms before, after or both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from urdir.model.errors import UnsupportedError
from urdir.model.families.attention import Attention
from urdir.model.families.description import Description
from urdir.model.families.layers import LayerConfig, Network
from urdir.model.families.parts import (
    attention,
    dense,
    head_dims,
    model,
    parallel,
    required_head_norms,
    rms_norm,
    sequential,
)
from urdir.model.families.reader import Presence, Reader
from urdir.model.families.rope import RopeConfig, read_rope
from urdir.model.families.stored import Normalization
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.rotation import RopeStyle

#: A norm: the name of its tensor, the norm itself if it has no weights, or None.
NormName = str | Normalization | None
Pair = tuple[NormName, NormName]


def decoder(
    file: Reader,
    norm: Norm,
    mixer: Callable[[int], Network],
    network: Callable[[int], Network] | None = None,
    *,
    norm_bias: Presence = "absent",
    norms: Pair = ("attn_norm", "ffn_norm"),
    post_norms: Pair = (None, None),
    side_by_side: bool = False,
    scale: float = 1.0,
    output_norm: NormName = "output_norm",
    more: Callable[[int], dict[str, Any]] = lambda index: {},
    **options: Any,
) -> Description:
    """Describe a model by the mixer (attention) and the FFN of each layer (default: SwiGLU without
    biases), in sequence or ``side_by_side``.

    ``norm`` is the kind of every norm; ``more`` gives a layer's further fields of `LayerConfig`,
    ``options`` go to `parts.model`.
    """
    network = network or partial(dense, file, bias="absent")

    def named(name: NormName, index: int | None) -> Normalization | None:
        if not isinstance(name, str):
            return name
        return file.norm(name, index, norm, bias=norm_bias)

    def layer(index: int) -> LayerConfig:
        before = named(norms[0], index), named(norms[1], index)
        if side_by_side:
            return parallel(mixer(index), network(index), before, scale=scale)
        after = named(post_norms[0], index), named(post_norms[1], index)
        return sequential(mixer(index), network(index), before, after, scale=scale, **more(index))

    return model(file, layer, named(output_norm, None), **options)


# ---- shared parts ----


def rms_decoder(
    file: Reader,
    attends: Callable[[int], Network],
    network: Callable[[int], Network] | None = None,
    **options: Any,
) -> Description:
    """`decoder` with RMSNorm."""
    return decoder(file, rms_norm(file), attends, network, **options)


def shared_rope(file: Reader, style: RopeStyle, *, factors: bool = False) -> RopeConfig:
    """The rotation shared by all layers."""
    return read_rope(file, style, head_dims(file)[0], factors=factors)


def plain_decoder(
    file: Reader,
    rope: RopeConfig | None,
    *,
    attends: Mapping[str, Any] | None = None,
    network: Callable[[int], Network] | None = None,
    **options: Any,
) -> Description:
    """`rms_decoder` of layers with attention that is alike in all of them, ``attends`` being its
    options (`mixer`)."""
    return rms_decoder(file, mixer(file, rope, **attends or {}), network, **options)


def mixer(
    file: Reader,
    rope: RopeConfig | None,
    *,
    head_norm: bool = False,
    after_rope: bool = False,
    **options: Any,
) -> Callable[[int], Attention]:
    """Attention that is alike in all layers. It has no output bias unless ``options`` (of
    `parts.attention`) add one; ``head_norm`` normalises every query and key head."""

    def build(index: int) -> Attention:
        fields: dict[str, Any] = {"output_bias": "absent"}
        if head_norm:
            norm, dim = rms_norm(file), head_dims(file)[0]
            norms = required_head_norms(file, index, norm, dim, after_rope=after_rope)
            fields["qk_norm"] = norms
        return attention(file, index, rope, **fields | options)

    return build


def windowed_mixer(
    file: Reader,
    windowed: Sequence[bool],
    window: int,
    local: RopeConfig | None,
    full: RopeConfig | None,
    *,
    more: Callable[[int], dict[str, Any]] = lambda index: {},
    **options: Any,
) -> Callable[[int], Attention]:
    """As `mixer`, with sliding windows in some layers: ``windowed`` layers attend to a ``window``
    and rotate as ``local``, the others as ``full``; ``more`` gives a layer's further options."""

    def build(index: int) -> Attention:
        rope, size = (local, window) if windowed[index] else (full, 0)
        return mixer(file, rope, window=size, **options, **more(index))(index)

    return build


def weightless(norm: Norm) -> Normalization:
    """A norm without weights."""
    return Normalization(Norm(norm.kind, norm.eps, weight=False))


def without_experts(file: Reader, most: int = 0) -> None:
    """Raise UnsupportedError for more than ``most`` experts."""
    experts = file.count("expert_count")
    if experts > most:
        raise UnsupportedError(
            f"{file.architecture} with {experts} experts ({file.key('expert_count')})"
        )
