"""How products on Hopper's tensor cores are cut."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear import wgmma_choice
from urdir.ptxgen.kernels.linear.epilogue.activation import Gated
from urdir.ptxgen.kernels.linear.epilogue.pack import PackedVectors
from urdir.ptxgen.kernels.linear.packed_parts import Mixture, takes_packed
from urdir.ptxgen.kernels.linear.products.gemm_wgmma import GemmWgmma, WgmmaCut
from urdir.ptxgen.kernels.linear.wgmma_choice import any_cut, choose_wgmma, estimate
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
#: us on an H200 with Q4_K weights: the fastest way of a sweep over all, by vectors.
FASTEST = {
    "qkv": {16: 7.2, 32: 8.0, 64: 10.2, 128: 17.1, 256: 25.8, 512: 51.7, 2048: 155.4},
    "output": {16: 6.3, 32: 7.3, 64: 8.9, 128: 12.4, 256: 17.8, 512: 27.2, 2048: 106.6},
    "gate_up": {16: 23.2, 32: 25.0, 64: 31.9, 128: 53.2, 256: 107.5, 512: 187.9, 2048: 747.1},
    "down": {16: 14.2, 32: 15.6, 64: 18.8, 128: 32.1, 256: 47.4, 512: 87.3, 2048: 356.2},
}


def chosen(fmt: str, vectors: int, **fields: Any) -> GemmWgmma:
    product = GemmWgmma(FORMATS[fmt], batch=vectors, cut=any_cut(vectors), **fields)
    return choose_wgmma(product, SMS)


@pytest.mark.parametrize("name", PRODUCTS)
def test_the_estimate_follows_what_was_measured(name: str) -> None:
    """Launch and ramp, 2 to 6 us, are not in it."""
    for vectors, measured in FASTEST[name].items():
        estimated = estimate(chosen("Q4_K", vectors, **PRODUCTS[name]), SMS)
        assert 0.88 * measured - 6 < estimated < 1.04 * measured


@pytest.mark.parametrize(
    ("name", "vectors", "cut"),
    [  # the fastest of the sweep
        ("qkv", 16, WgmmaCut(1, 16, 4, 1, 3, 2, 4)),
        ("qkv", 64, WgmmaCut(1, 64, 2, 1, 3, 2, 4)),
        ("qkv", 128, WgmmaCut(2, 128, 1, 2, 3, 4, 1)),
        ("output", 64, WgmmaCut(1, 64, 2, 2, 3, 2, 4)),
        ("output", 256, WgmmaCut(2, 128, 1, 2, 3, 4, 1)),
        ("gate_up", 16, WgmmaCut(4, 16, 1, 1, 4, 3, 4)),
        ("gate_up", 64, WgmmaCut(4, 64, 1, 1, 3, 2, 4)),
        ("gate_up", 2048, WgmmaCut(2, 128, 1, 1, 3, 4, 1)),
        ("down", 32, WgmmaCut(1, 32, 2, 2, 4, 3, 4)),  # in a step; four splits in the sweep
        ("down", 512, WgmmaCut(2, 128, 1, 1, 3, 4, 1)),
        # by the estimate: not in the sweep
        ("qkv", 72, WgmmaCut(1, 72, 2, 1, 3, 2, 4)),
        ("down", 72, WgmmaCut(1, 72, 2, 2, 3, 2, 4)),
    ],
)
def test_the_fastest_way_is_chosen(name: str, vectors: int, cut: WgmmaCut) -> None:
    assert chosen("Q4_K", vectors, **PRODUCTS[name]).cut == cut


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


@pytest.mark.parametrize(
    ("name", "vectors", "sharers"),
    [("gate_up", 2048, 2), ("qkv", 512, 2), ("gate_up", 64, 1), ("qkv", 128, 1)],
)
def test_pairs_of_ctas_may_share_activations(
    name: str, vectors: int, sharers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not those with few vectors, and not CTAs that share the columns."""
    product = chosen("Q4_K", vectors, **PRODUCTS[name])
    monkeypatch.setattr(wgmma_choice, "SHARERS", 2)
    shared = wgmma_choice._sharing(product)
    assert shared.cut.sharers == sharers
    assert shared.launch_shape.cluster[1] == sharers
    odd = replace(product, rows=64 * (2 * product.cut.row_groups + 1), epilogue=())
    assert wgmma_choice._sharing(odd).cut.sharers == 1 + (odd.row_ctas % 2 == 0) * (sharers - 1)
