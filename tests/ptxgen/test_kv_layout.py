"""The layout of a KV cache: sizes, reading back what was written, rounding, refusals."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.kv_formats import FORMATS, quantise, to_bf16
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.kv_types import KV_DTYPES


@pytest.mark.parametrize(
    ("layout", "shape", "nbytes", "token_nbytes"),
    [
        (KvLayout(2, 3, 5, 64, "f16"), (2, 3, 5, 64), 3840, 384),
        (KvLayout(2, 3, 5, 64, "f32"), (2, 3, 5, 64), 7680, 768),
        (KvLayout(2, 3, 32, 64, "bf16", 16, 9), (9, 3, 16, 64), 55296, 384),
        (KvLayout(2, 3, 5, 64, "q8_0"), (2040,), 2040, 204),
        (KvLayout(1, 1, 32, 96, "q8_0", 16, 4), (6528,), 6528, 102),
        (KvLayout(2, 3, 5, 72, "fp8"), (2280,), 2280, 228),
        (KvLayout(1, 1, 32, 96, "q4_0", 16, 4), (3456,), 3456, 54),
    ],
)
def test_sizes(layout: KvLayout, shape: Any, nbytes: int, token_nbytes: int) -> None:
    assert layout.shape == shape
    assert layout.nbytes == layout.empty().nbytes == nbytes
    assert layout.token_nbytes == token_nbytes


@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize("page_len", [0, 16])
def test_what_is_written_is_read_back_and_nothing_else(dtype: Any, page_len: int) -> None:
    rng = np.random.default_rng(3)
    layout = KvLayout(3, 2, 48, 64, dtype, page_len, 9 if page_len else 0)
    table = layout.random_table(rng) if page_len else None
    cache = layout.empty()
    positions = [0, 15, 16, 47]
    values = rng.standard_normal((2, 4, 64)).astype(np.float32)
    layout.write(cache, 1, positions, values, table)
    found = layout.read(cache, 1, positions, table)
    error = FORMATS[dtype].rtol * np.abs(values).max(axis=-1, keepdims=True)
    assert (np.abs(found - values) <= error).all()
    others = [p for p in range(48) if p not in positions]
    assert np.isnan(layout.read(cache, 1, others, table)).all()
    for sequence in (0, 2):
        assert np.isnan(layout.read(cache, sequence, np.arange(48), table)).all()


def test_contiguous_and_paged_slots() -> None:
    contiguous = KvLayout(2, 3, 64, 8, "f16")
    assert contiguous.slots_of(1, [0, 5]).tolist() == [[192, 197], [256, 261], [320, 325]]
    paged = KvLayout(1, 2, 64, 8, "f16", 16, 8)
    table = np.array([[7, 0, 3, 3]], np.uint32)
    assert paged.slots_of(0, [1, 16, 50], table).tolist() == [[225, 0, 98], [241, 16, 114]]


def test_a_table_shares_pages_only_where_it_must() -> None:
    rng = np.random.default_rng(0)
    enough = KvLayout(3, 1, 64, 8, "f16", 16, 12).random_table(rng)
    assert sorted(enough.ravel()) == list(range(12))
    scarce = KvLayout(3, 1, 64, 8, "f16", 16, 5).random_table(rng)
    assert set(scarce.ravel()) == set(range(5))


def test_q8_0_rounds_by_the_scale_it_stores() -> None:
    x = np.zeros((4, 32), np.float32)
    x[0, :4] = [127, 0.5, 1.5, -126.5]  # d = 1: ties to even
    x[1, :2] = [1e9, 1]  # beyond f16's range
    x[2, :2] = [1e-9, 1e-9]  # below it
    x[3, 5] = np.nan
    quants, scales = quantise(x)
    assert quants[0, :4].tolist() == [127, 0, 2, -126]
    assert scales.ravel()[:3].tolist() == [1, np.inf, 0]
    assert np.isnan(scales[3])
    assert not quants[2].any()
    rng = np.random.default_rng(1)
    normal = rng.standard_normal((50, 64)).astype(np.float32)
    quants, scales = quantise(normal)
    back = quants.reshape(50, 2, 32) * scales.astype(np.float32)[..., None]
    error = np.abs(back - normal.reshape(50, 2, 32))
    assert (error <= 0.51 * scales.astype(np.float32)[..., None]).all()
    assert np.abs(quants.astype(int)).max() == 127


def test_fp8_has_the_least_power_of_two_that_fits_a_head() -> None:
    """Ties go to even; magnitudes from 2^-6 of the scale on keep four bits."""
    x = np.zeros((5, 64), np.float32)
    x[0, :3] = [448, 2**-9, -(2**-10)]  # the second of these is a tie with zero
    x[1, :3] = [448.1, 17, 19]
    x[2, :2] = [1e-30, -3e-31]
    x[3, :2] = [3e38, 1]
    x[4, 5] = np.inf
    elements, scales = FORMATS["fp8"].encode(x)
    assert scales is not None
    assert scales[:2].ravel().tolist() == [1, 2]
    assert np.isnan(scales[4]).all()
    assert elements[0, :3].tolist() == [0x7E, 1, 0]
    back = FORMATS["fp8"].decode(elements, scales)
    assert back[1, :3].tolist() == [448, 16, 20]  # 8.5 and 9.5 are ties of 8, 9 and 10
    assert np.isnan(back[4]).all()
    np.testing.assert_allclose(back[2:4], x[2:4], rtol=2**-4, atol=2e24)
    rng = np.random.default_rng(1)
    heads = rng.standard_normal((50, 96)).astype(np.float32) * np.exp2(
        rng.integers(-60, 60, (50, 1))
    )
    heads = heads.astype(np.float32)
    elements, scales = FORMATS["fp8"].encode(heads)
    assert scales is not None
    most = np.abs(heads).max(axis=1, keepdims=True)
    assert (most <= 448 * scales).all()
    assert (most > 224 * scales).all()
    sizes = np.maximum(np.abs(heads), 2.0**-6 * scales)
    back = FORMATS["fp8"].decode(elements, scales)
    assert (np.abs(back - heads) <= sizes * 2**-4).all()


def test_q4_0_rounds_as_ggml_does() -> None:
    gguf = pytest.importorskip("gguf")
    rng = np.random.default_rng(3)
    x = rng.standard_normal((40, 96)).astype(np.float32)
    x[3, :32] = 0
    elements, scales = FORMATS["q4_0"].encode(x)
    assert scales is not None
    kind = gguf.GGMLQuantizationType.Q4_0
    blocks = gguf.quants.quantize(x, kind)
    np.testing.assert_array_equal(
        FORMATS["q4_0"].decode(elements, scales), gguf.quants.dequantize(blocks, kind)
    )
    np.testing.assert_array_equal(
        scales.view(np.uint16), blocks.reshape(40, 3, 18)[..., :2].copy().view(np.uint16)[..., 0]
    )


def test_bf16_rounds_to_nearest_even() -> None:
    x = np.array([1, 1 + 2**-8, 1 + 3 * 2**-8, 3.4e38, np.inf, -np.nan, -1.5], np.float32)
    assert to_bf16(x).tolist() == [0x3F80, 0x3F80, 0x3F82, 0x7F80, 0x7F80, 0x7FFF, 0xBFC0]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"dtype": "f64"}, "'f64'"),
        ({"head_dim": 12}, "head_dim 12"),
        ({"head_dim": 72, "dtype": "q8_0"}, "head_dim 72 of a q8_0"),
        ({"head_dim": 80, "value_dtype": "q4_0"}, "value_dim 80 of a q4_0"),
        ({"value_dtype": "q4_1"}, "'q4_1'"),
        ({"value_dtype": "fp8", "value_dim": 32, "values_in_keys": True}, "cannot be fp8"),
        ({"kv_heads": 0}, "kv_heads 0"),
        ({"sequences": 0}, "sequences 0"),
        ({"max_len": 1 << 33}, "at most 2\\^32"),
        ({"page_len": 24, "pages": 3}, "page_len 24"),
        ({"page_len": 8, "pages": 3}, "page_len 8"),
        ({"page_len": 128, "pages": 3}, "max_len 64 is not a multiple of page_len 128"),
        ({"page_len": 16}, "without pages"),
        ({"pages": 2}, "contiguous KV cache has no pages: 2"),
    ],
)
def test_layouts_that_no_kernel_handles_are_refused(fields: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {
        "sequences": 1,
        "kv_heads": 1,
        "max_len": 64,
        "head_dim": 64,
        "dtype": "f16",
    }
    with pytest.raises(PtxgenError, match=message):
        KvLayout(**good | fields)


def test_a_paged_cache_is_not_read_without_its_table() -> None:
    layout = KvLayout(1, 1, 32, 8, "f16", 16, 2)
    with pytest.raises(PtxgenError, match="block table"):
        layout.read(layout.empty(), 0, [3])
