"""Decode attention with a latent vector on Hopper's tensor cores: many heads share each key
read."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import ClassVar

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.flash_decode import FlashDecode
from urdir.ptxgen.kernels.attention.flash_decode_examples import examples_of_latents
from urdir.ptxgen.kernels.attention.head_tiles import HeadLanes, HeadTiles
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.latent_cta import WARPGROUP, LatentCta
from urdir.ptxgen.kernels.attention.own_token import OwnToken
from urdir.ptxgen.kernels.attention.scores import Scores
from urdir.ptxgen.spec import LaunchShape
from urdir.ptxgen.target import Target

#: Rotated dims of a key, and those that are its value: DeepSeek's.
ROTATED_DIM, VALUE_DIM = 64, 512


@dataclass(frozen=True)
class LatentDecode(FlashDecode):
    """Flash decoding in clusters for heads that share one key whose end is the value.

    See FlashDecode. A CTA has 8 or 16 heads (``most_heads``), and multiplies 64 keys at once with
    queries and weights as sums of two 16-bit floats. It reads keys once, and uses them from shared
    memory as keys and as values. CTA n of a cluster merges part n of all heads' values; with
    several chunks the last CTAs n to finish do so, which are counted in ``arrived`` at head n of a
    CTA's. `serves_latents` has its shapes. A ``token`` that is not appended, whose key is in the
    cache, is one of several rows of a sequence.
    """

    most_heads: int = 8
    cluster: int = 8

    heads_of_cta: ClassVar = (8, 16)
    takes_queries_in_parts: ClassVar = True
    name = "latent_decode"
    targets = ("sm_90a",)

    def __post_init__(self) -> None:
        super().__post_init__()
        _check(self)

    @cached_property
    def head_tiles(self) -> HeadTiles:
        lanes = HeadLanes(*self.layout.widths, WARPGROUP // 32)
        return HeadTiles(
            self.layout.kv_heads, self.group, self.most_heads, lanes, tensor_cores=True
        )

    def resident_on(self, target: Target) -> int:
        return 2

    @property
    def launch_shape(self) -> LaunchShape:
        nbytes = LatentCta(self, Target.parse("sm_90a")).nbytes
        return replace(super().launch_shape, shared_bytes=nbytes)

    def cta(self, target: Target) -> LatentCta:  # type: ignore[override]
        """The template's description of a CTA, which differs from FlashDecode's."""
        return LatentCta(self, target)

    @classmethod
    def examples(cls) -> dict[str, LatentDecode]:
        return examples_of_latents(cls)


def serves_latents(heads: int, layout: KvLayout, scores: Scores, token: OwnToken | None) -> bool:
    """Whether the kernel supports a number of heads, a cache, scores and new tokens."""
    if token is None or token.latent_norm is None or token.temperature is not None:
        return False
    turns = token.rope is None or token.rope.rotary_dim == ROTATED_DIM
    dims = (layout.value_start, layout.values_per_head)
    is_plain = Scores(scale=scores.scale) == scores and not layout.capacity
    return (
        turns
        and is_plain
        and heads % min(LatentDecode.heads_of_cta) == 0
        and layout.format.bits == 16
        and dims == (ROTATED_DIM, VALUE_DIM)
    )


def _check(spec: LatentDecode) -> None:
    heads, layout = spec.heads, spec.layout
    if heads % spec.most_heads or not serves_latents(heads, layout, spec.scores, spec.token):
        raise PtxgenError(
            f"latent_decode: multiples of {spec.most_heads} heads, rows with a latent vector and "
            f"plain scores, 16-bit caches of keys of {ROTATED_DIM} rotated and {VALUE_DIM} other "
            f"values: not {heads} heads of {layout}"
        )
    if spec.cluster == 1 or spec.ring:
        raise PtxgenError("latent_decode: clusters of 2, 4 or 8 CTAs, without a ring")
