"""Examples of prefill attention: ``cls`` makes a kernel of chunks of prompts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

from urdir.ptxgen.kernels.attention.cache_examples import with_caches
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.scores import Scores

S = TypeVar("S")


def prefill_examples(cls: Callable[..., S]) -> dict[str, S]:
    """Every width of heads, type of cache and kind of score, smallest first."""
    latent = partial(KvLayout, values_in_keys=True)
    examples = {
        "one row": cls(1, KvLayout(1, 1, 1, 16, "f16"), rows=1),
        "head_dim 64": cls(2, KvLayout(2, 1, 100, 64, "f16"), rows=17),
        "bf16 softcap": cls(4, KvLayout(2, 2, 80, 80, "bf16"), rows=50, scores=Scores(softcap=5.0)),
        "pages window": cls(
            7, KvLayout(2, 1, 160, 128, "f16", 16, 22), rows=20, scores=Scores(window=70)
        ),
        "pages f32 head_dim 256": cls(3, KvLayout(1, 3, 96, 256, "f32", 32, 3), rows=70),
        "pages q8_0 window": cls(
            4,
            KvLayout(1, 1, 192, 96, "q8_0", 64, 4),
            rows=33,
            scores=Scores(window=5, softcap=30.0),
        ),
        "scale": cls(1, KvLayout(2, 1, 70, 112, "f16"), rows=64, scores=Scores(scale=0.25)),
        "head_dim 8": cls(2, KvLayout(1, 1, 40, 8, "f16"), rows=20),
        "head_dim 72": cls(3, KvLayout(1, 1, 80, 72, "f16"), rows=30),
        "head_dim 24 f32": cls(1, KvLayout(1, 1, 70, 24, "f32"), rows=70),
        "head_dim 200": cls(2, KvLayout(1, 1, 50, 200, "bf16"), rows=20),
        "head_dim 264": cls(1, KvLayout(1, 1, 40, 264, "f16"), rows=20),
        "head_dim 512": cls(2, KvLayout(1, 1, 40, 512, "f16"), rows=33),
        "latent": cls(3, latent(1, 1, 40, 576, "f16", value_dim=512), rows=18),
        "latent pages q8_0": cls(1, latent(1, 1, 32, 576, "q8_0", 16, 3, 512), rows=9),
        "values in keys": cls(2, latent(2, 2, 70, 72, "bf16", value_dim=48), rows=20),
        "head_dim 512 q8_0": cls(1, KvLayout(1, 1, 30, 512, "q8_0"), 9, Scores(window=20)),
        "value_dim": cls(4, KvLayout(1, 1, 70, 192, "f16", value_dim=128), rows=20),
        "value_dim 328": cls(2, KvLayout(1, 1, 40, 40, "f16", value_dim=328), rows=20),
        "value_dim 24": cls(2, KvLayout(1, 1, 40, 320, "f32", value_dim=24), rows=20),
        "chunk": cls(2, KvLayout(1, 1, 200, 64, "f16"), 90, Scores(chunk=37)),
        "chunk and window": cls(1, KvLayout(1, 1, 200, 64, "f32"), 90, Scores(chunk=64, window=50)),
        "sinks": cls(3, KvLayout(1, 1, 90, 64, "f16"), 40, Scores(sinks=True)),
        "sinks window": cls(
            2, KvLayout(1, 1, 160, 32, "f16"), 60, Scores(sinks=True, window=40, softcap=9.0)
        ),
        "ALiBi": cls(3, KvLayout(1, 1, 150, 64, "f16"), 50, Scores(max_bias=8.0)),
        "relative": cls(2, KvLayout(2, 2, 120, 64, "f16"), 50, Scores(relative=30)),
        "texts": cls(2, KvLayout(1, 2, 200, 64, "f16"), 150, Scores(texts=True)),
        "texts ALiBi": cls(3, KvLayout(1, 1, 90, 32, "f32"), 80, Scores(texts=True, max_bias=8.0)),
        "texts relative": cls(
            4, KvLayout(1, 2, 170, 64, "f16"), 130, Scores(texts=True, relative=20)
        ),
        "ring": cls(2, KvLayout(2, 1, 300, 64, "f16", capacity=128), 60, Scores(window=60)),
        "ring of pages": cls(
            2, KvLayout(2, 1, 320, 64, "bf16", 16, 18, capacity=128), 50, Scores(chunk=70)
        ),
    }
    others = {
        "pages window": "fp8",
        "latent": "fp8",
        "head_dim 72": "f32 fp8",
        "ring": "q4_0",
        "value_dim": "f16 q4_0",
        "head_dim 512": "q8_0 q4_0",
    }
    return with_caches(examples, others)


def wgmma_examples(cls: Callable[..., S]) -> dict[str, S]:
    """Heads of 64 to 256 values, packed outputs, several tiles of keys."""
    examples = {
        "one tile": cls(2, KvLayout(2, 1, 40, 64, "f16"), rows=7),
        "head_dim 128": cls(8, KvLayout(2, 2, 300, 128, "f16"), rows=41),
        "pages window": cls(
            7, KvLayout(2, 1, 320, 128, "f16", 16, 42), rows=20, scores=Scores(window=70)
        ),
        "head_dim 256": cls(2, KvLayout(1, 1, 200, 256, "f16"), rows=20),
        "head_dim 80 softcap": cls(
            4, KvLayout(1, 2, 150, 80, "f16"), rows=70, scores=Scores(softcap=5.0, scale=0.25)
        ),
        "value_dim": cls(4, KvLayout(1, 1, 130, 192, "f16", value_dim=144), rows=20),
        "values in keys": cls(
            4, KvLayout(1, 1, 130, 192, "f16", value_dim=144, values_in_keys=True), rows=20
        ),
        "values in keys q8_0": cls(
            2, KvLayout(1, 1, 90, 128, "q8_0", value_dim=64, values_in_keys=True), rows=20
        ),
        "chunk and window": cls(
            1, KvLayout(1, 1, 400, 64, "f16"), 150, Scores(chunk=164, window=150)
        ),
        "sinks": cls(3, KvLayout(1, 1, 200, 64, "f16"), 45, Scores(sinks=True)),
        "ALiBi": cls(3, KvLayout(1, 1, 180, 96, "f16"), 30, Scores(max_bias=8.0)),
        "bf16": cls(2, KvLayout(1, 1, 150, 80, "bf16"), rows=20),
        "q8_0": cls(2, KvLayout(1, 1, 256, 96, "q8_0", 32, 9), rows=66, scores=Scores(window=120)),
        "packs": cls(8, KvLayout(1, 2, 150, 128, "f16"), rows=35, packs=True),
        "packs head_dim 64": cls(12, KvLayout(1, 4, 40, 64, "f16"), rows=9, packs=True),
        "packs head_dim 192": cls(4, KvLayout(1, 4, 40, 192, "f16"), rows=3, packs=True),
        "texts": cls(3, KvLayout(1, 3, 300, 64, "f16"), 290, Scores(texts=True)),
        "texts ALiBi": cls(4, KvLayout(1, 2, 200, 80, "bf16"), 150, Scores(texts=True, max_bias=8)),
        "ring of pages": cls(
            2, KvLayout(2, 1, 640, 64, "f16", 16, 36, capacity=256), 50, Scores(window=130)
        ),
    }
    others = {
        "head_dim 128": "fp8",
        "head_dim 256": "fp8 q4_0",
        "value_dim": "fp8",
        "pages window": "fp8 f16",
        "head_dim 80 softcap": "bf16 fp8",
        "ring of pages": "q4_0",
        "packs": "f16 q4_0",
    }
    return with_caches(examples, others)
