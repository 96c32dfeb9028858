"""The usual decoder: in every layer attention and then a feed-forward network, each of an RMSNorm
of the stream. What a family does otherwise it hands in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from urdir.model.families.description import Attention, Config, Network
from urdir.model.families.mixtures import require_output
from urdir.model.families.parts import (
    attention,
    head_dims,
    model,
    required_head_norms,
    rms_norm,
    sequential,
)
from urdir.model.families.reader import Reader
from urdir.model.families.rope import read_rope
from urdir.ptxgen.kernels.rotation import RopeStyle


def mixer(
    file: Reader, style: RopeStyle, *, head_norm: bool = False, **options: Any
) -> Callable[[int], Attention]:
    """Attention that is alike in all layers, without a bias of its output unless ``options`` (of
    `parts.attention`) say so; ``head_norm``: each head of queries and keys is normalised."""
    norm, (key_dim, _) = rms_norm(file), head_dims(file)
    rope = read_rope(file, style, key_dim)

    def build(index: int) -> Attention:
        fields: dict[str, Any] = {"output_bias": "absent"}
        if head_norm:
            fields["qk_norm"] = required_head_norms(file, index, norm, key_dim)
        return attention(file, index, rope, **fields | options)

    return build


def decoder(
    file: Reader,
    attends: Callable[[int], Attention],
    network: Callable[[int], Network],
    *,
    second_norm: str = "ffn_norm",
    post_norms: tuple[str, str] | None = None,
    scale: float = 1.0,
    tied: bool = True,
    **options: Any,
) -> Config:
    """The model of these attentions and networks by layer, with norms attn_norm and ``second_norm``
    before them and ``post_norms`` after them. Not ``tied``: the output matrix must be stored.
    ``options`` are fields of `Config`.
    """
    norm = rms_norm(file)
    if not tied:
        require_output(file)

    def build(index: int) -> Any:
        before = file.norm("attn_norm", index, norm), file.norm(second_norm, index, norm)
        after = (None, None)
        if post_norms is not None:
            after = tuple(file.norm(name, index, norm) for name in post_norms)
        return sequential(attends(index), network(index), before, after, scale=scale)

    return model(file, build, file.norm("output_norm", None, norm), **options)
