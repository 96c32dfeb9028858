"""Examples of incremental attention: ``cls`` makes an IncrementalAttention."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeVar

from urdir.ptxgen.kernels.attention.cache_examples import with_caches
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.own_token import QK_NORM, V_NORM, OwnToken, Temperature
from urdir.ptxgen.kernels.attention.scores import Scores
from urdir.ptxgen.kernels.rotation import Rotation

S = TypeVar("S")


def examples_of_rows(cls: Callable[..., S]) -> Mapping[str, S]:
    """Rows whose tokens are in the cache, and rows that append theirs."""
    latent = partial(KvLayout, values_in_keys=True)
    examples = {
        "head_dim 8": cls(1, KvLayout(1, 1, 1, 8, "f32")),
        "head_dim 64": cls(2, KvLayout(1, 2, 9, 64, "f16")),
        "head_dim 80": cls(4, KvLayout(1, 2, 70, 80, "f16")),
        "head_dim 96 f32": cls(3, KvLayout(1, 1, 33, 96, "f32")),
        "head_dim 112": cls(4, KvLayout(1, 1, 150, 112, "f16")),
        "seven heads a KV head": cls(7, KvLayout(1, 1, 131, 128, "f16")),
        "head_dim 256": cls(8, KvLayout(1, 1, 40, 256, "f16")),
        "head_dim 256 f32": cls(8, KvLayout(1, 1, 40, 256, "f32")),
        "long cache": cls(24, KvLayout(1, 2, 300, 64, "f16")),
        "71 heads a KV head": cls(71, KvLayout(1, 1, 77, 64, "f32")),
        "head_dim 16": cls(2, KvLayout(1, 1, 16, 16, "f16")),
        "bf16 rows": cls(4, KvLayout(2, 1, 45, 80, "bf16"), rows=3),
        "q8_0": cls(8, KvLayout(1, 2, 70, 128, "q8_0")),
        "q8_0 rows window": cls(
            2, KvLayout(3, 2, 41, 96, "q8_0"), rows=4, scores=Scores(window=13)
        ),
        "window and softcap": cls(
            4, KvLayout(2, 1, 50, 64, "f16"), rows=3, scores=Scores(window=20, softcap=30.0)
        ),
        "scale and softcap": cls(
            2, KvLayout(1, 1, 30, 256, "f32"), scores=Scores(scale=0.0625, softcap=50.0)
        ),
        "pages": cls(6, KvLayout(2, 2, 64, 128, "f16", page_len=16, pages=7), rows=3),
        "pages q8_0": cls(4, KvLayout(3, 1, 96, 64, "q8_0", page_len=32, pages=11), rows=4),
        "pages bf16 window": cls(
            8,
            KvLayout(2, 1, 64, 112, "bf16", page_len=16, pages=6),
            rows=3,
            scores=Scores(window=24),
        ),
        "pages f32 head_dim 256": cls(
            12, KvLayout(1, 1, 128, 256, "f32", page_len=64, pages=3), rows=2
        ),
        "head_dim 512": cls(3, KvLayout(1, 1, 20, 512, "f16")),
        "head_dim 512 f32": cls(2, KvLayout(1, 1, 19, 512, "f32")),
        "latent": cls(6, latent(2, 1, 20, 576, "f16", value_dim=512), rows=2),
        "latent q8_0": cls(3, latent(1, 1, 20, 576, "q8_0", value_dim=512)),
        "value_dim 504": cls(2, KvLayout(1, 1, 9, 576, "f16", value_dim=504), most_heads=1),
        "values in keys": cls(4, latent(1, 1, 50, 128, "f16", value_dim=64)),
        "head_dim 320 q8_0": cls(2, KvLayout(1, 1, 19, 320, "q8_0"), most_heads=1),
        "value_dim": cls(5, KvLayout(1, 1, 37, 192, "f16", value_dim=128)),
        "value_dim 512": cls(2, KvLayout(1, 1, 9, 72, "bf16", value_dim=512)),
        "sinks": cls(5, KvLayout(2, 1, 40, 64, "f16"), rows=3, scores=Scores(sinks=True)),
        "chunk": cls(2, KvLayout(2, 1, 50, 64, "f16"), rows=3, scores=Scores(chunk=12)),
        "chunk and window": cls(
            2, KvLayout(3, 1, 50, 40, "f32"), rows=4, scores=Scores(chunk=16, window=9)
        ),
        "ALiBi": cls(6, KvLayout(2, 2, 70, 80, "f16"), rows=3, scores=Scores(max_bias=8.0)),
        "ALiBi softcap sinks": cls(
            4,
            KvLayout(1, 1, 70, 64, "f32"),
            scores=Scores(max_bias=4.0, softcap=20.0, sinks=True),
        ),
        "relative pages": cls(
            6, KvLayout(2, 2, 96, 64, "f16", 16, 13), rows=3, scores=Scores(relative=20)
        ),
        "texts": cls(4, KvLayout(1, 2, 60, 64, "f32"), rows=50, scores=Scores(texts=True)),
        "texts ALiBi": cls(
            3, KvLayout(1, 1, 50, 64, "f32"), rows=33, scores=Scores(texts=True, max_bias=8.0)
        ),
        "texts relative": cls(
            6, KvLayout(1, 2, 90, 32, "f16"), rows=70, scores=Scores(texts=True, relative=9)
        ),
        "ring": cls(
            2, KvLayout(2, 2, 90, 64, "f16", capacity=32), rows=3, scores=Scores(window=30)
        ),
        "ring of pages": cls(
            2, KvLayout(3, 1, 160, 64, "q8_0", 16, 7, capacity=32), 4, Scores(chunk=32)
        ),
        "tokens of its own choice": cls(
            3, latent(3, 1, 90, 96, "f16", 1, 300, value_dim=64), rows=3
        ),
        "tokens of its own choice q8_0": cls(
            2, KvLayout(2, 1, 70, 64, "q8_0", 1, 200, value_dim=32), rows=2
        ),
        **_examples_with_a_token(cls),
    }
    others = {
        "q8_0 rows window": "fp8",
        "pages q8_0": "q4_0",
        "head_dim 320 q8_0": "fp8 f32",
        "latent pages q8_0": "fp8",
        "norm q8_0 value_dim": "fp8 q4_0",
        "rope q8_0": "fp8",
        "rope pages q8_0": "q4_0 q8_0",
        "rope q8_0 four warps": "f16 fp8",
    }
    return with_caches(examples, others)


def _examples_with_a_token(cls: Callable[..., S]) -> Mapping[str, S]:
    """Every type of cache, style and way to divide heads and pairs among threads."""
    whole = OwnToken(Rotation(128, "half"))
    half = OwnToken(Rotation(64, "interleaved", magnitude=1.2))
    latent = partial(KvLayout, values_in_keys=True)
    return {
        "latent rows": cls(
            6, latent(2, 1, 20, 576, "f16", value_dim=512), rows=2, token=half, most_heads=1
        ),
        "latent f32": cls(1, latent(1, 1, 20, 576, "f32", value_dim=512), token=half),
        "latent pages q8_0": cls(
            2,
            latent(2, 1, 32, 576, "q8_0", 16, 5, value_dim=512),
            rows=2,
            token=half,
            most_heads=1,
        ),
        "latent vector": cls(
            5,
            latent(3, 1, 40, 576, "f16", value_dim=512),
            rows=3,
            token=OwnToken(Rotation(64, "interleaved", 1.2), latent_norm=QK_NORM),
            most_heads=1,
        ),
        "latent vector of a single row": cls(
            5,
            latent(1, 1, 20, 576, "f16", value_dim=512),
            token=OwnToken(Rotation(48, "half"), latent_norm=QK_NORM),
            most_heads=1,
        ),
        "latent vector without rope": cls(
            3,
            latent(2, 1, 32, 192, "q8_0", 16, 5, value_dim=128),
            rows=2,
            token=OwnToken(latent_norm=QK_NORM),
        ),
        "values in keys q8_0": cls(
            4, latent(2, 1, 40, 192, "q8_0", value_dim=128), rows=3, token=half
        ),
        "values in keys bf16": cls(
            10, latent(2, 2, 50, 112, "bf16", value_dim=48), rows=3, token=half
        ),
        "rope of 6": cls(
            1, KvLayout(1, 1, 1, 8, "f32"), token=OwnToken(Rotation(6, "interleaved"))
        ),
        "rope half": cls(
            *(4, KvLayout(1, 2, 70, 80, "f16")),
            token=OwnToken(Rotation(32, "half")),
            starts_next=True,
        ),
        "rope rows": cls(4, KvLayout(2, 1, 131, 128, "f16"), rows=3, token=whole),
        "rope four warps": cls(
            8, KvLayout(8, 2, 48, 128, "f16", 16, 27), rows=8, token=whole, packs=True, warps=4
        ),
        "rope q8_0 four warps": cls(
            4, KvLayout(2, 1, 131, 64, "q8_0"), rows=3, scores=Scores(window=70), warps=4
        ),
        "norms four warps": cls(
            *(8, KvLayout(8, 2, 48, 128, "f16", 16, 27), 8),
            token=replace(whole, qk_norm=QK_NORM),
            warps=4,
        ),
        "all norms four warps": cls(
            *(4, KvLayout(2, 1, 131, 64, "q8_0"), 3, Scores(window=70)),
            token=OwnToken(Rotation(64, "half"), QK_NORM, V_NORM),
            warps=4,
        ),
        "rope q8_0": cls(8, KvLayout(1, 2, 70, 128, "q8_0"), token=whole, most_heads=2),
        "rope q8_0 window": cls(
            2, KvLayout(3, 2, 41, 96, "q8_0"), rows=4, scores=Scores(window=13), token=half
        ),
        "rope bf16 softcap": cls(
            7,
            KvLayout(2, 1, 50, 128, "bf16"),
            rows=3,
            scores=Scores(softcap=30.0),
            token=half,
            most_heads=1,
        ),
        "rope f32 head_dim 256": cls(
            12,
            KvLayout(1, 2, 33, 256, "f32"),
            token=OwnToken(Rotation(256, "half", magnitude=1.1)),
        ),
        "rope pages": cls(
            6, KvLayout(2, 2, 64, 128, "f16", page_len=16, pages=9), rows=3, token=whole
        ),
        "rope pages q8_0": cls(
            5, KvLayout(2, 1, 64, 64, "q8_0", page_len=32, pages=5), rows=2, token=half
        ),
        "rope pages bf16": cls(
            3,
            KvLayout(3, 1, 32, 112, "bf16", 16, 6),
            rows=4,
            token=OwnToken(Rotation(90, "half")),
        ),
        "token without rope": cls(3, KvLayout(2, 1, 40, 72, "f16"), rows=3, token=OwnToken()),
        "token relative": cls(
            2, KvLayout(2, 2, 70, 64, "f16"), 3, Scores(relative=9, scale=1.0), OwnToken()
        ),
        "norm": cls(
            4,
            KvLayout(3, 2, 40, 128, "f16"),
            rows=4,
            token=OwnToken(Rotation(128, "half"), QK_NORM),
        ),
        "norm q8_0 value_dim": cls(
            5,
            KvLayout(2, 1, 30, 192, "q8_0", value_dim=128),
            rows=2,
            token=OwnToken(Rotation(64, "half"), QK_NORM, V_NORM),
        ),
        "v_norm head_dim 512": cls(
            3,
            KvLayout(2, 1, 20, 512, "bf16"),
            rows=2,
            token=OwnToken(Rotation(512, "half"), QK_NORM, V_NORM),
        ),
        "norm after rope": cls(
            3,
            KvLayout(2, 1, 30, 80, "f16"),
            rows=2,
            token=OwnToken(Rotation(48, "interleaved"), QK_NORM, rope_first=True),
        ),
        "norm without rope": cls(2, KvLayout(1, 1, 33, 80, "f32"), token=OwnToken(None, QK_NORM)),
        "temperature": cls(
            3,
            KvLayout(2, 1, 40, 64, "f16"),
            rows=3,
            token=OwnToken(Rotation(48, "half"), temperature=Temperature(0.1, 8, 1)),
        ),
        "temperature ring": cls(
            2,
            KvLayout(2, 1, 90, 64, "f16", capacity=16),
            rows=3,
            scores=Scores(chunk=16),
            token=OwnToken(temperature=Temperature(0.3, 7)),
        ),
        "reads another layer's cache": cls(
            4,
            KvLayout(2, 1, 40, 64, "f16"),
            rows=3,
            token=OwnToken(Rotation(64, "half"), QK_NORM, None, Temperature(0.1, 4), appends=False),
        ),
        "ring norm": cls(
            2,
            KvLayout(2, 1, 96, 64, "bf16", 16, 6, capacity=32),
            rows=2,
            scores=Scores(window=20, sinks=True, max_bias=8.0),
            token=OwnToken(Rotation(64, "half"), QK_NORM),
        ),
        "norm of rows": cls(
            4,
            KvLayout(2, 2, 40, 64, "f16"),
            rows=3,
            token=OwnToken(Rotation(64, "half"), QK_NORM, qk_norm_over="row"),
        ),
        "norm of long rows": cls(
            71,
            KvLayout(1, 1, 20, 128, "q8_0"),
            token=OwnToken(Rotation(32, "interleaved"), QK_NORM, V_NORM, qk_norm_over="row"),
        ),
        "norm of rows, shared": cls(
            5,
            KvLayout(2, 1, 24, 72, "f32"),
            rows=2,
            token=OwnToken(Rotation(64, "half"), V_NORM, appends=False, qk_norm_over="row"),
        ),
        "packs": cls(4, KvLayout(16, 2, 20, 64, "f16"), rows=16, token=half, packs=True),
        "packs seven heads": cls(7, KvLayout(2, 1, 9, 256, "f32"), rows=8, packs=True),
        "packs five": cls(
            4, KvLayout(5, 2, 20, 64, "f16"), rows=5, token=half, packs=True, order="lanes"
        ),
        "rope many rows": cls(4, KvLayout(4, 2, 70, 64, "f16"), rows=5, token=half),
    }
