"""Hyper-connections (mHC, arXiv 2512.24880), read from a file.

Keys, under the architecture's name: hyper_connection.count (4), epsilon, and sinkhorn_iterations
or magnitude; or low_rank alone.
"""

from __future__ import annotations

from dataclasses import replace

from urdir.model.errors import UnsupportedError
from urdir.model.families.layers import (
    Block,
    HyperConnection,
    LayerConfig,
    LowRankConnection,
    StreamJoin,
)
from urdir.model.families.parts import rms_norm
from urdir.model.families.reader import Reader
from urdir.model.families.stored import Normalization
from urdir.ptxgen.kernels.streams import STREAMS, mixes_of


def with_streams(
    file: Reader, index: int, layer: LayerConfig, *, mixed: bool = True
) -> LayerConfig:
    """The layer with hyper-connections of its attention and of its FFN, tensors hc_attn_fn, base,
    scale, and hc_ffn_fn, base, scale. The streams are ``mixed`` with each other, or independent,
    with a magnitude of what blocks write."""
    blocks = zip(("attn", "ffn"), layer.blocks, strict=True)
    own = (replace(block, hyper=_connection(file, index, name, mixed)) for name, block in blocks)
    return replace(layer, blocks=tuple(own))


def _connection(file: Reader, index: int, name: str, mixed: bool) -> HyperConnection:
    _check_count(file)
    iterations = file.size("hyper_connection.sinkhorn_iterations") if mixed else 0
    mixes = mixes_of(iterations)
    return HyperConnection(
        norm=Normalization(replace(rms_norm(file), weight=False)),
        mixes=file.linear(f"hc_{name}_fn", index, mixes, STREAMS * file.hidden),
        scale=file.vector(f"hc_{name}_scale.weight", index, 3 if mixed else 2),
        base=file.vector(f"hc_{name}_base.weight", index, mixes),
        iterations=iterations,
        eps=file.amount("hyper_connection.epsilon"),
        magnitude=2.0 if mixed else file.number("hyper_connection.magnitude"),
    )


def _check_count(file: Reader) -> None:
    if (count := file.size("hyper_connection.count")) != STREAMS:
        raise UnsupportedError(
            f"{file.key('hyper_connection.count')} is {count}: {STREAMS} streams are supported"
        )


def with_low_rank(file: Reader, index: int, blocks: tuple[Block, ...]) -> tuple[Block, ...]:
    """Attention and FFN with connections of low rank, tensors hc_attn_norm, down, up, inject, and
    hc_ffn_norm, down, up, inject."""
    named = zip(("attn", "ffn"), blocks, strict=True)
    return tuple(replace(of, hyper=low_rank(file, f"hc_{name}", index)) for name, of in named)


def low_rank(file: Reader, name: str, layer: int | None) -> LowRankConnection:
    """The connection of those tensors; without inject after all layers."""
    _check_count(file)
    rank, width = file.size("hyper_connection.low_rank"), STREAMS * file.hidden
    inject = None
    if layer is not None:
        inject = file.linear(f"{name}_inject", layer, STREAMS, width)
    return LowRankConnection(
        norm_of_streams(file, f"{name}_norm", layer),
        file.linear(f"{name}_down", layer, rank, width),
        file.linear(f"{name}_up", layer, width, rank),
        inject,
    )


def norm_of_streams(file: Reader, name: str, layer: int | None) -> Normalization:
    """The norm of each stream, with weights of its own."""
    return file.norm(name, layer, rms_norm(file), STREAMS, file.hidden)


def stream_join(file: Reader) -> StreamJoin:
    """The weighted sum of streams after the last layer, tensors output_hc_fn, base, scale."""
    return StreamJoin(
        norm=Normalization(replace(rms_norm(file), weight=False)),
        mixes=file.linear("output_hc_fn", None, STREAMS, STREAMS * file.hidden),
        scale=file.vector("output_hc_scale.weight", None, 1),
        base=file.vector("output_hc_base.weight", None, STREAMS),
        eps=file.amount("hyper_connection.epsilon"),
    )
