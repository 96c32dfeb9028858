"""Decode attention with a latent vector on Hopper's tensor cores: many heads share each key
read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.flash_decode import FlashDecode
from urdir.ptxgen.kernels.attention.flash_decode_examples import examples_of_latents
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
    CTA's. For shapes that it `serves`. A ``token`` that is not appended, whose key is in the cache,
    is one of several rows of a sequence.
    """

    most_heads: int = 8
    cluster: int = 8

    heads_of_cta: ClassVar = (8, 16)
    takes_queries_in_parts: ClassVar = True
    name = "latent_decode"
    template = ("urdir.templates", "attention/latent_decode.ptx.j2")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.heads % self.most_heads or not self.serves(
            self.heads, self.layout, self.scores, self.token
        ):
            raise PtxgenError(
                f"latent_decode: multiples of {self.most_heads} heads, rows with a latent vector "
                f"and plain scores, 16-bit caches of keys of {ROTATED_DIM} rotated and {VALUE_DIM} "
                f"other values: not {self.heads} heads of {self.layout}"
            )
        if self.cluster == 1 or self.ring:
            raise PtxgenError("latent_decode: clusters of 2, 4 or 8 CTAs, without a ring")

    @staticmethod
    def serves(heads: int, layout: KvLayout, scores: Scores, token: OwnToken | None) -> bool:
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

    @property
    def targets(self) -> tuple[str, ...]:
        return ("sm_90a",)

    @property
    def tile(self) -> int:
        return self.most_heads

    @property
    def suits_tensor_cores(self) -> bool:
        return True

    @property
    def reads_once(self) -> bool:
        return False

    def resident_on(self, target: Target) -> int:
        return 2

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(
            grid=(self.head_tiles, self.split.takers * self.cluster, 1),
            block=(WARPGROUP, 1, 1),
            cluster=(1, self.cluster, 1),
            shared_bytes=LatentCta(self, Target.parse("sm_90a")).nbytes,
            prefers_shared=True,
        )

    def cta(self, target: Target) -> LatentCta:  # type: ignore[override]
        """The template's description of a CTA, which differs from FlashDecode's."""
        return LatentCta(self, target)

    @classmethod
    def examples(cls) -> Mapping[str, LatentDecode]:
        return examples_of_latents(cls)
