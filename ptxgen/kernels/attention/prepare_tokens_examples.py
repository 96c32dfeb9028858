"""Examples of the preparation of tokens: ``cls`` makes a PrepareTokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar

from urdir.ptxgen.kernels.attention.cache_examples import with_caches
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.own_token import QK_NORM, V_NORM, OwnToken, Temperature
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.rotation import Rotation

S = TypeVar("S")


def examples_of_tokens(cls: Callable[..., S]) -> Mapping[str, S]:
    """Tokens appended as they are, rotated, normed; queries or keys alone."""
    whole, part = Rotation(128, "half"), Rotation(32, "half", 1.2)
    turned = OwnToken(Rotation(64, "interleaved"))
    weightless = Norm("rms", 1e-5, weight=False)
    examples = {
        # appended without processing
        "head_dim 8 f32": cls(1, KvLayout(1, 1, 1, 8, "f32")),
        "head_dim 80": cls(3, KvLayout(1, 3, 7, 80, "f16")),
        "bf16 rows": cls(3, KvLayout(2, 3, 9, 80, "bf16"), 3),
        "q8_0 rows": cls(2, KvLayout(2, 2, 5, 96, "q8_0"), 5),
        "pages q8_0": cls(2, KvLayout(2, 2, 64, 160, "q8_0", page_len=32, pages=3), 4),
        "q8_0 value_dim 320": cls(2, KvLayout(1, 2, 9, 64, "q8_0", value_dim=320), 2),
        "head_dim 1024": cls(1, KvLayout(1, 2, 5, 1024, "bf16", value_dim=264), 2),
        "values in keys": cls(
            2,
            KvLayout(2, 1, 30, 576, "f16", value_dim=512, values_in_keys=True),
            2,
            OwnToken(Rotation(64, "interleaved")),
        ),
        "values in plain keys": cls(
            1, KvLayout(1, 2, 9, 96, "q8_0", value_dim=32, values_in_keys=True), 3
        ),
        "many heads": cls(70, KvLayout(1, 70, 5, 40, "f16", value_dim=24), 2),
        "v_norm f32": cls(
            3, KvLayout(1, 3, 9, 16, "f32", value_dim=24), 2, OwnToken(v_norm=V_NORM)
        ),
        # rotated
        "rope": cls(8, KvLayout(1, 2, 40, 128, "f16"), 3, OwnToken(whole)),
        "rope, many rows": cls(9, KvLayout(2, 3, 1000, 128, "f16"), 600, OwnToken(whole)),
        "rope, partial": cls(3, KvLayout(1, 1, 50, 80, "f32"), 2, OwnToken(part)),
        "rope, odd": cls(2, KvLayout(1, 1, 90, 72, "bf16"), 2, OwnToken(Rotation(20, "half", 1.1))),
        "rope of q8_0": cls(
            5, KvLayout(2, 1, 64, 96, "q8_0", 16, 7), 3, OwnToken(Rotation(96, "half"))
        ),
        "interleaved": cls(4, KvLayout(1, 2, 30, 64, "f16"), 3, turned),
        "interleaved, partial": cls(
            5, KvLayout(1, 5, 30, 96, "f32"), 2, OwnToken(Rotation(48, "interleaved", 1.3))
        ),
        "interleaved, odd": cls(
            2, KvLayout(1, 1, 30, 80, "f16"), 2, OwnToken(Rotation(42, "interleaved"))
        ),
        "head_dim 512": cls(
            3, KvLayout(1, 1, 30, 512, "f16"), 2, OwnToken(Rotation(512, "half"), v_norm=V_NORM)
        ),
        "ring of pages": cls(4, KvLayout(3, 2, 96, 64, "f16", 16, 7, capacity=32), 5, turned),
        "ring": cls(2, KvLayout(2, 1, 40, 64, "q8_0", capacity=8), 7, turned),
        # normed
        "norm": cls(6, KvLayout(1, 2, 100, 128, "f16"), 3, OwnToken(whole, QK_NORM)),
        "norm, odd": cls(
            2, KvLayout(1, 1, 40, 72, "f32"), 2, OwnToken(Rotation(20, "interleaved"), QK_NORM)
        ),
        "norm after rope": cls(
            2,
            KvLayout(1, 1, 40, 80, "f16"),
            2,
            OwnToken(Rotation(48, "half"), QK_NORM, rope_first=True),
        ),
        "norms of all, odd": cls(
            3,
            KvLayout(1, 1, 40, 72, "f16", value_dim=40),
            2,
            OwnToken(Rotation(20, "half"), QK_NORM, V_NORM),
        ),
        "norm alone": cls(2, KvLayout(1, 1, 9, 64, "f16"), 2, OwnToken(None, QK_NORM)),
        "temperature": cls(
            2,
            KvLayout(1, 1, 90, 48, "f32"),
            3,
            OwnToken(Rotation(40, "half"), temperature=Temperature(0.1, 8192, 1)),
        ),
        "temperature alone": cls(
            1, KvLayout(1, 1, 5000, 32, "f16"), 3, OwnToken(temperature=Temperature(0.2, 100))
        ),
        "all of it": cls(
            6,
            KvLayout(2, 2, 70, 96, "q8_0"),
            3,
            OwnToken(Rotation(96, "interleaved", 1.3), QK_NORM, V_NORM, Temperature(0.5, 8, 1)),
        ),
        "keys alone": cls(
            0,
            KvLayout(2, 1, 30, 96, "f16", value_dim=64, values_in_keys=True),
            3,
            OwnToken(Rotation(32, "interleaved")),
        ),
        "keys and values alone": cls(
            0, KvLayout(1, 2, 30, 64, "f32", value_dim=40), 2, OwnToken(part)
        ),
        "texts": cls(
            2, KvLayout(1, 1, 30, 64, "f16"), 21, OwnToken(Rotation(64, "half")), texts=True
        ),
        "texts without rope": cls(3, KvLayout(1, 3, 16, 40, "f32"), 9, texts=True),
        "queries alone": cls(
            2, KvLayout(1, 2, 30, 320, "f16"), 2, OwnToken(part, weightless, appends=False)
        ),
    }
    others = {
        "rope of q8_0": "fp8",
        "norms of all, odd": "fp8",
        "keys and values alone": "f16 fp8",
        "q8_0 rows": "q4_0",
        "rope, many rows": "fp8",
        "ring": "q4_0 fp8",
    }
    return with_caches(examples, others)
