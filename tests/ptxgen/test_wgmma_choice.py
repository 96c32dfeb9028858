"""How products on Hopper's tensor cores are cut."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.epilogue.activation import Gated
from urdir.ptxgen.kernels.linear.epilogue.pack import PackedVectors
from urdir.ptxgen.kernels.linear.packed_parts import Mixture, takes_packed
from urdir.ptxgen.kernels.linear.products.gemm_wgmma import MOST, GemmWgmma, WgmmaCut
from urdir.ptxgen.kernels.linear.wgmma_choice import TURN_BATCH, any_cut, choose_wgmma, estimate
from urdir.ptxgen.tools.gpus import GPUS
from urdir.ptxgen.weights.formats import FORMATS

SMS = GPUS["h200"].sm_count
#: The fields of the products of an 8B model.
PRODUCTS: dict[str, dict[str, Any]] = {
    "qkv": {"rows": 6144, "cols": 4096},
    "output": {"rows": 4096, "cols": 4096},
    "gate_up": {"rows": 14336, "cols": 4096, "epilogue": (Gated(), PackedVectors())},
    "down": {"rows": 4096, "cols": 14336},
}
#: us on an H200, Q6_K weights of down and else Q4_K: the fastest way of a sweep, by vectors.
FASTEST = {
    "qkv": {9: 7.9, 33: 9.3, 65: 10.8, 129: 17.0, 192: 20.0, 256: 24.2, 512: 46.7},
    "output": {9: 6.4, 32: 7.1, 64: 8.8, 136: 10.9, 208: 15.9, 256: 17.3, 512: 27.0},
    "gate_up": {9: 21.4, 33: 24.5, 65: 36.7, 129: 48.1, 192: 69.4, 256: 89.2, 512: 152.8},
    "down": {9: 15.8, 32: 17.7, 64: 20.1, 136: 32.8, 208: 40.3, 256: 46.2, 512: 85.4},
}
TYPES = {"down": "Q6_K"}


def chosen(fmt: str, vectors: int, **fields: Any) -> GemmWgmma:
    product = GemmWgmma(FORMATS[fmt], batch=vectors, cut=any_cut(vectors), **fields)
    return choose_wgmma(product, SMS)


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_estimate_follows_what_was_measured(name: str) -> None:
    for vectors, measured in FASTEST[name].items():
        estimated = estimate(chosen(TYPES.get(name, "Q4_K"), vectors, **PRODUCTS[name]), SMS)
        assert 0.82 * measured < estimated < 1.2 * measured


@pytest.mark.parametrize(
    ("name", "vectors", "cut"),
    [  # the fastest of the sweep, or within 5 % of it
        ("qkv", 9, WgmmaCut(1, 16, 4, 1, 3, 2, 4)),
        ("qkv", 65, WgmmaCut(1, 72, 2, 1, 3, 2, 4)),
        ("qkv", 129, WgmmaCut(1, 136, 1, 1, 3, 4, 1)),
        ("output", 33, WgmmaCut(1, 40, 2, 2, 4, 3, 4)),
        ("output", 512, WgmmaCut(2, 128, 1, 1, 3, 4, 1)),
        ("gate_up", 16, WgmmaCut(4, 16, 1, 1, 4, 3, 4)),
        ("gate_up", 33, WgmmaCut(4, 40, 1, 1, 4, 3, 4)),
        ("gate_up", 129, WgmmaCut(2, 136, 1, 1, 3, 4, 1)),
        ("gate_up", 160, WgmmaCut(2, 160, 1, 1, 3, 4, 1)),
        ("gate_up", 512, WgmmaCut(2, 128, 1, 1, 3, 4, 1)),
        ("down", 9, WgmmaCut(1, 16, 2, 2, 4, 3, 4)),
        ("down", 65, WgmmaCut(1, 72, 2, 2, 3, 2, 4)),
        ("output", 97, WgmmaCut(1, 56, 2, 1, 3, 2, 4)),
        ("output", 128, WgmmaCut(1, 64, 2, 1, 3, 2, 4)),
        ("down", 96, WgmmaCut(1, 96, 2, 2, 2, 3, 2)),
        ("down", 136, WgmmaCut(1, 136, 1, 2, 3, 4, 1)),
        ("down", 256, WgmmaCut(1, 256, 1, 2, 3, 4, 1)),
        ("gate_up", 256, WgmmaCut(2, 256, 1, 1, 3, 4, 1)),
        ("gate_up", 2048, WgmmaCut(2, 176, 1, 1, 3, 4, 1)),
        ("gate_up", 65, WgmmaCut(4, 72, 1, 1, 3, 2, 4)),  # by the estimate: not in the sweep
        ("gate_up", 104, WgmmaCut(4, 104, 1, 1, 3, 2, 4)),
        ("gate_up", 112, WgmmaCut(4, 112, 1, 1, 3, 2, 4)),
        ("gate_up", 120, WgmmaCut(4, 120, 1, 1, 2, 2, 4)),
        ("qkv", 112, WgmmaCut(1, 112, 2, 1, 2, 3, 2)),
        ("qkv", 128, WgmmaCut(1, 128, 2, 1, 2, 4, 1)),
        ("down", 112, WgmmaCut(1, 112, 2, 2, 2, 3, 2)),
        ("down", 120, WgmmaCut(1, 120, 2, 2, 2, 4, 1)),
        ("down", 128, WgmmaCut(1, 128, 2, 2, 2, 4, 1)),
    ],
)
def test_the_fastest_way_is_chosen(name: str, vectors: int, cut: WgmmaCut) -> None:
    assert chosen(TYPES.get(name, "Q4_K"), vectors, **PRODUCTS[name]).cut == cut


@pytest.mark.parametrize("vectors", [88, 96, 104])
def test_a_warpgroup_has_no_sm_alone_where_two_are_faster(vectors: int) -> None:
    """Q, K and V of an 8B model in one launch."""
    others = ((FORMATS["Q4_K"], 1024), (FORMATS["Q6_K"], 1024))
    found = chosen("Q4_K", vectors, rows=4096, cols=4096, others=others)
    assert found.cut == WgmmaCut(1, vectors, 2, 1, 2, 3, 2)


@pytest.mark.turns(2)
@pytest.mark.parametrize("fmt", ["Q4_K", "Q6_K", "F16"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_more_vectors_take_no_less_and_little_more(name: str, fmt: str) -> None:
    """By the estimate: no less (2 % where splits end), and of each vector 4 % more at most; with
    one tile more than the widest, which has 256 where two stages of weights fit no more, up to
    30 %. Up to where CTAs take turns, which is faster."""
    few = range(16, TURN_BATCH, 8)
    us = [(v, estimate(chosen(fmt, v, **PRODUCTS[name]), SMS)) for v in few]
    for (before, least), (after, most) in pairwise(us):
        assert most > 0.98 * least, after
        assert most / after < (1.3 if before in (256, MOST) else 1.04) * least / before, after


@pytest.mark.parametrize("fmt", ["Q4_K", pytest.param("F16", marks=pytest.mark.full)])
def test_eight_vectors_more_are_no_cliff(fmt: str) -> None:
    """By the estimate all four products take 4 % more of each vector at most, but where a round of
    CTAs has all vectors in one to eight of the widest tiles, and they have one more."""
    us = {}
    for v in range(64, 2305, 8):
        us[v] = sum(estimate(chosen(TYPES.get(n, fmt), v, **PRODUCTS[n]), SMS) for n in PRODUCTS)
    widths, most_more = ((256, MOST), 1.16) if FORMATS[fmt].is_float else ((MOST,), 1.08)
    widest = {width * tiles: most_more for width in widths for tiles in range(1, 9)}
    for before, after in pairwise(us):
        most = widest.get(before, 1.04)
        assert us[after] / after < most * us[before] / before, after


@pytest.mark.parametrize("fmt", [name for name in FORMATS if name != "F32"])
@pytest.mark.parametrize("vectors", [9, 65, 200, 2048])
def test_every_type_has_a_way(fmt: str, vectors: int) -> None:
    for fields in ({"rows": 17, "cols": 256}, {"rows": 256, "cols": 512, "epilogue": (Gated(),)}):
        assert chosen(fmt, vectors, **fields).launch_shape.threads <= 640


def test_f32_weights_have_none() -> None:
    assert not takes_packed((FORMATS["Q4_K"], FORMATS["F32"]))
    with pytest.raises(PtxgenError, match="not for F32"):
        chosen("F32", 16, rows=64, cols=64)


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "MXFP4", "Q8_0", "F16"])
@pytest.mark.parametrize("height", [16, 32, 64, 128])
def test_tiles_of_experts_of_any_type_find_room(name: str, height: int) -> None:
    """Gated or not."""
    for gated in (True, False):
        steps = (Gated(), PackedVectors()) if gated else ()
        shape = (FORMATS[name], 768, 2048, 64, any_cut(height))
        product = GemmWgmma.of(*shape, *steps, mixture=Mixture(128, 8, height))
        made = choose_wgmma(product, SMS)
        assert made.cut.vectors == height
