"""Whole models of equal layers: attention and a network, with norms before, after or both."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from urdir.model.errors import UnsupportedError
from urdir.model.families.description import Attention, Config, LayerConfig, Network
from urdir.model.families.parts import model, parallel, sequential
from urdir.model.families.reader import Presence, Reader
from urdir.model.families.stored import Normalization
from urdir.ptxgen.kernels.norm import Norm

#: A norm by its tensor's name, by what it is (one without weights), or none.
NormName = str | Normalization | None
Pair = tuple[NormName, NormName]


def decoder(
    file: Reader,
    norm: Norm,
    mixer: Callable[[int], Attention],
    network: Callable[[int], Network],
    *,
    norm_bias: Presence = "absent",
    norms: Pair = ("attn_norm", "ffn_norm"),
    post_norms: Pair = (None, None),
    side_by_side: bool = False,
    scale: float = 1.0,
    output_norm: NormName = "output_norm",
    more: Callable[[int], dict[str, Any]] = lambda index: {},
    **options: Any,
) -> Config:
    """The model of these attentions and networks by layer, one after the other or ``side_by_side``.

    ``norm`` is what all norms do; ``more`` gives a layer's further fields of `LayerConfig`,
    ``options`` go to `parts.model`.
    """

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


def plain(norm: Norm) -> Normalization:
    """A norm without weights."""
    return Normalization(Norm(norm.kind, norm.eps, weight=False))


def without_experts(file: Reader, most: int = 0) -> None:
    """Raise UnsupportedError for more than ``most`` experts."""
    experts = file.count("expert_count")
    if experts > most:
        raise UnsupportedError(
            f"{file.architecture} with a mixture of {experts} experts ({file.key('expert_count')})"
        )
