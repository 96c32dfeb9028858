"""Examples of flash decoding: ``cls`` makes a FlashDecode."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import TypeVar

from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.own_token import QK_NORM, V_NORM, OwnToken, Temperature
from urdir.ptxgen.kernels.attention.scores import Scores
from urdir.ptxgen.kernels.rotation import Rotation

S = TypeVar("S")

#: Examples that exist with other caches, too: types of keys and values, or of both.
OTHER_CACHES = {
    "head_dim 80": "fp8",
    "pages f32 window": "q4_0",
    "latent": "fp8",
    "ring": "fp8 q4_0",
    "rope ring q8_0": "fp8",
    "rope cluster pages q8_0": "q4_0",
    "rope q8_0 head_dim 256": "fp8",
    "latent clusters": "fp8",
    "rope pages q8_0": "f16 fp8",
    "norms ring": "q4_0 fp8",
    "packs": "bf16 q4_0",
    "norm of rows": "f32 fp8",
    "drafts": "fp8",
    "drafts bf16 window pages": "fp8 f16",
    "drafts q8_0 pages": "q8_0 q4_0",
}


def plain_examples(cls: Callable[..., S]) -> dict[str, S]:
    """Rows whose tokens are in the cache."""
    small, large = (partial(cls, ctas=4, least=16, most=most) for most in (16, 32))
    return {
        "one chunk": cls(1, KvLayout(1, 1, 16, 64, "f16")),
        "head_dim 80": cls(4, KvLayout(1, 2, 70, 80, "f16"), ctas=3, least=16),
        "long chunks": cls(4, KvLayout(1, 1, 200, 128, "f16"), ctas=2),
        "many chunks": cls(4, KvLayout(1, 1, 300, 128, "f16"), ctas=40, least=16),
        "bf16": small(7, KvLayout(1, 1, 50, 128, "bf16")),
        "f32 rows": cls(12, KvLayout(2, 1, 60, 96, "f32"), rows=3, ctas=6, least=16),
        "window": small(3, KvLayout(2, 1, 70, 112, "f16"), rows=3, scores=Scores(window=20)),
        "q8_0 softcap": large(8, KvLayout(1, 1, 64, 256, "q8_0"), scores=Scores(softcap=50.0)),
        "pages": large(4, KvLayout(2, 2, 96, 64, "f16", page_len=16, pages=10), rows=3),
        "pages q8_0": small(2, KvLayout(3, 1, 128, 128, "q8_0", page_len=64, pages=7), rows=4),
        "pages f32 window": large(
            2, KvLayout(1, 1, 64, 256, "f32", page_len=16, pages=5), scores=Scores(window=33)
        ),
        "head_dim 512": small(2, KvLayout(1, 1, 40, 512, "f16")),
        "latent": small(
            3, KvLayout(1, 1, 40, 576, "f16", value_dim=512, values_in_keys=True), most_heads=1
        ),
        "value_dim": large(3, KvLayout(1, 1, 40, 192, "f16", value_dim=128)),
        "chunk sinks": small(2, KvLayout(3, 1, 90, 64, "f16"), 3, Scores(chunk=48, sinks=True)),
        "ALiBi": large(3, KvLayout(2, 1, 70, 64, "f16"), 3, Scores(max_bias=8.0)),
        "relative": large(2, KvLayout(2, 2, 70, 64, "f16"), 3, Scores(relative=9)),
        "40 rows": cls(2, KvLayout(40, 1, 50, 64, "f16"), rows=40, ctas=5, least=16, most=16),
        "a long row": cls(2, KvLayout(3, 2, 150, 64, "f16"), rows=3, ctas=8, least=32, most=48),
        "cluster": cls(4, KvLayout(2, 1, 70, 64, "f16"), rows=2, ctas=2, cluster=4, least=16),
        "clusters": cls(4, KvLayout(3, 1, 150, 64, "f16"), 3, ctas=2, cluster=2, least=16, most=16),
        "cluster sinks f32": cls(
            6, KvLayout(1, 2, 90, 80, "f32"), 1, Scores(sinks=True), ctas=1, cluster=2, least=16
        ),
        "ring": small(2, KvLayout(3, 1, 160, 64, "f16", 16, 13, capacity=64), 3, Scores(window=50)),
    }


def examples_with_a_token(cls: Callable[..., S]) -> dict[str, S]:
    """Every type of cache; chunks shorter and longer than a step of keys."""
    small, large = (partial(cls, ctas=4, least=16, most=most) for most in (16, 32))
    whole = OwnToken(Rotation(128, "half"))
    half = OwnToken(Rotation(64, "interleaved", magnitude=1.2))
    latent = replace(half, latent_norm=QK_NORM)
    return {
        "latent rows": small(
            3,
            KvLayout(2, 1, 48, 576, "q8_0", 16, 7, value_dim=512, values_in_keys=True),
            rows=3,
            token=half,
        ),
        "values in keys": small(
            8,
            KvLayout(2, 1, 40, 192, "f16", value_dim=128, values_in_keys=True),
            rows=3,
            token=half,
        ),
        "latent cluster": cls(
            3,
            KvLayout(1, 1, 70, 576, "f16", value_dim=512, values_in_keys=True),
            token=latent,
            most_heads=1,
            ctas=1,
            cluster=4,
            least=16,
        ),
        "latent clusters": cls(
            5,
            KvLayout(2, 1, 150, 576, "f16", value_dim=512, values_in_keys=True),
            rows=2,
            token=latent,
            ctas=2,
            cluster=2,
            least=16,
            most=32,
        ),
        "rope": cls(4, KvLayout(1, 1, 200, 128, "f16"), token=whole, ctas=4, least=16, most=64),
        "rope cluster": cls(
            4, KvLayout(1, 1, 300, 128, "f16"), 1, token=whole, ctas=1, cluster=8, ring=80 << 10
        ),
        "rope cluster pages q8_0": cls(
            8, KvLayout(2, 1, 96, 128, "q8_0", 16, 14), 2, token=whole, cluster=4, least=16
        ),
        "rope ring q8_0": cls(
            4, KvLayout(3, 1, 600, 128, "q8_0"), 3, token=whole, ctas=2, cluster=2, ring=68 << 10
        ),
        "rope f32 rows": small(12, KvLayout(2, 1, 60, 96, "f32"), rows=3, token=half),
        "rope bf16 window": small(
            3, KvLayout(2, 1, 70, 112, "bf16"), rows=3, scores=Scores(window=20), token=half
        ),
        "rope q8_0 head_dim 256": large(
            8, KvLayout(1, 1, 64, 256, "q8_0"), token=OwnToken(Rotation(90, "half"))
        ),
        "rope pages": large(4, KvLayout(2, 2, 96, 64, "f16", page_len=16, pages=14), 3, token=half),
        "norms head_dim 512 shared": small(
            2,
            KvLayout(1, 1, 40, 512, "f16", value_dim=64),
            token=OwnToken(Rotation(128, "half"), QK_NORM, appends=False),
        ),
        "norm of rows": small(
            6,
            KvLayout(2, 2, 60, 96, "bf16"),
            rows=2,
            token=OwnToken(Rotation(96, "half"), QK_NORM, qk_norm_over="row"),
        ),
        "packs": cls(
            4,
            KvLayout(16, 1, 70, 64, "q8_0"),
            rows=16,
            token=half,
            ctas=20,
            least=16,
            most=16,
            packs=True,
        ),
        "packs clusters": cls(
            8,
            KvLayout(8, 2, 40, 128, "f16"),
            rows=8,
            token=whole,
            ctas=3,
            cluster=2,
            least=16,
            most=16,
            packs=True,
        ),
        "norms ring": small(
            3,
            KvLayout(2, 1, 100, 96, "q8_0", capacity=64),
            rows=2,
            scores=Scores(chunk=64, window=40),
            token=OwnToken(Rotation(96, "half"), QK_NORM, V_NORM, Temperature(0.2, 16)),
        ),
        "rope pages q8_0": small(2, KvLayout(3, 1, 128, 128, "q8_0", 64, 7), rows=4, token=whole),
    }


def examples_of_drafts(cls: Callable[..., S]) -> dict[str, S]:
    """Rows of a sequence that share a read of its keys."""
    ring = 96 << 10
    return {
        "drafts": cls(4, KvLayout(3, 1, 300, 128, "f16"), 9, ctas=6, least=16, ring=ring, run=4),
        "drafts bf16 window pages": cls(
            8,
            KvLayout(4, 2, 192, 96, "bf16", 16, 50),
            13,
            Scores(window=50),
            ctas=5,
            least=16,
            most=32,
            run=2,
        ),
        "drafts q8_0 pages": cls(
            4,
            KvLayout(2, 2, 256, 128, "q8_0", 64, 9),
            8,
            ctas=5,
            least=32,
            most=48,
            ring=ring,
            run=4,
        ),
        "drafts sinks softcap": cls(
            2,
            KvLayout(1, 1, 150, 64, "f16"),
            5,
            Scores(sinks=True, softcap=30.0),
            ctas=2,
            least=16,
            run=4,
        ),
        "drafts ALiBi": cls(
            3, KvLayout(2, 3, 70, 64, "f16"), 6, Scores(max_bias=8.0), ctas=3, least=16, run=2
        ),
        "drafts chunk cluster": cls(
            4,
            KvLayout(3, 1, 200, 64, "f16"),
            11,
            Scores(chunk=64),
            ctas=2,
            cluster=4,
            least=16,
            most=16,
            run=2,
        ),
        "drafts head_dim 256": cls(
            2, KvLayout(2, 1, 100, 256, "f16"), 8, ctas=4, least=16, ring=ring, run=2
        ),
        "drafts packs": cls(
            8,
            KvLayout(3, 2, 90, 64, "f16"),
            16,
            ctas=6,
            least=16,
            most=16,
            ring=ring,
            run=4,
            packs=True,
        ),
        "drafts packs six": cls(
            8,
            KvLayout(3, 2, 90, 64, "f16"),
            6,
            ctas=6,
            least=16,
            most=16,
            ring=ring,
            run=2,
            packs=True,
            order="lanes",
        ),
        "drafts of three heads": cls(
            6, KvLayout(2, 2, 90, 64, "f16"), 7, ctas=6, least=16, most=32, run=2
        ),
        "drafts of 40 rows": cls(2, KvLayout(9, 1, 60, 64, "f16"), 40, ctas=5, least=16, run=4),
        "drafts in one chunk": cls(2, KvLayout(3, 1, 60, 64, "q8_0"), 9, ctas=2, run=2),
    }


def examples_of_latents(cls: Callable[..., S]) -> dict[str, S]:
    """One key for all heads, whose end is the value, in clusters."""
    latent = partial(KvLayout, value_dim=512, values_in_keys=True)
    turned = OwnToken(Rotation(64, "interleaved", 1.2), latent_norm=QK_NORM)
    packs = partial(
        cls,
        16,
        latent(16, 1, 80, 576, "bf16", 16, 90),
        token=OwnToken(Rotation(64, "half"), latent_norm=QK_NORM),
        most_heads=16,
        packs=True,
        ctas=16,
        cluster=2,
        least=16,
    )
    still = OwnToken(latent_norm=QK_NORM)
    return {
        "one tile": cls(8, latent(1, 1, 40, 576, "f16"), token=turned, ctas=1, cluster=2, least=16),
        "chunks": cls(
            *(16, latent(2, 1, 320, 576, "f16", 16, 50), 2, Scores(scale=0.1), turned, 16),
            ctas=4,
            cluster=2,
            least=16,
            most=64,
        ),
        "dealt": cls(
            *(16, latent(3, 1, 420, 576, "f16"), 3),
            token=still,
            ctas=1,
            cluster=4,
            least=16,
            most=16,
        ),
        "rows of a sequence": cls(
            *(16, latent(2, 1, 150, 576, "f16"), 4),
            token=replace(turned, appends=False),
            most_heads=16,
            ctas=4,
            cluster=2,
            least=16,
            most=32,
        ),
        "tokens of its own choice": cls(
            *(16, latent(3, 1, 150, 576, "f16", 1, 500), 3),
            token=OwnToken(latent_norm=QK_NORM, appends=False),
            most_heads=16,
            ctas=3,
            cluster=2,
            least=16,
        ),
        "packs": packs(rows=16),
        "packs seven": packs(rows=7),
    }
