"""Products whose CTAs take tiles of y in turns: the bits that one tile of each CTA gives."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from urdir.driver import Device, run_kernel
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.linear.epilogue.activation import Activated, Bounded, Gated, Scaled
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.epilogue.heads import HeadPlaces, Heads
from urdir.ptxgen.kernels.linear.epilogue.pack import PackedVectors
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.products.gemm_wgmma import GemmWgmma, WgmmaCut
from urdir.ptxgen.kernels.linear.wgmma_choice import any_cut, choose_wgmma
from urdir.ptxgen.weights.formats import FORMATS

F16, BF16 = FORMATS["F16"], FORMATS["BF16"]
TURNS = WgmmaCut(2, 32, weight_stages=3, x_stages=3, ctas=3)
GELU = Activated(Activation("gelu"))
PACKED = PackedVectors()

#: Odd numbers of vectors, of rows beyond whole tiles, and of tiles of columns beyond the rings'.
CASES: dict[str, GemmWgmma] = {
    "plain": GemmWgmma(F16, 136, 70, 33, TURNS),
    "ends": GemmWgmma.of(BF16, 20, 1400, 129, TURNS, Bias(), Scaled(0.3), Bounded(softcap=4.0)),
    "residual": GemmWgmma.of(F16, 260, 290, 79, TURNS, Bias(), GELU, Residual(0.5)),
    "whole tiles": GemmWgmma.of(F16, 256, 260, 72, TURNS, Bias(), Residual()),
    "packed": GemmWgmma.of(BF16, 133, 513, 75, TURNS, Bias(), GELU, PACKED),
    "packed groups": GemmWgmma.of(F16, 256, 300, 96, TURNS, PACKED),
    "gated": GemmWgmma.of(F16, 131, 300, 93, TURNS, Bias(), Gated(), PACKED),
    "gated groups": GemmWgmma.of(BF16, 256, 800, 64, TURNS, Gated(), PACKED),
    "gated, an odd group": GemmWgmma.of(
        F16, 200, 260, 70, replace(TURNS, vectors=40), Bias(), Gated(), PACKED
    ),
    "heads": GemmWgmma.of(
        F16,
        160,
        290,
        85,
        TURNS,
        Bias(),
        Heads((HeadPlaces(32, 0, 32, 85), HeadPlaces(20, 0, 20, 85)), whole=True),
        others=((F16, 300),),
    ),
    "three": GemmWgmma.of(F16, 40, 290, 85, TURNS, Bias(), others=((BF16, 24), (F16, 300))),
}


def without_turns(spec: GemmWgmma) -> GemmWgmma:
    return replace(spec, cut=replace(spec.cut, ctas=0))


@pytest.mark.sanitizer
@pytest.mark.parametrize("name", CASES)
def test_bits_are_those_of_one_tile_of_each_cta(device: Device, name: str) -> None:
    """Which are compared with the reference (`GemmWgmma.examples`)."""
    spec = CASES[name]
    inputs = spec.make_inputs(np.random.default_rng(len(name)))
    wanted = run_kernel(device, without_turns(spec), inputs)
    reference = spec.reference(**inputs)
    found = run_kernel(device, spec, inputs)
    assert found.keys() == wanted.keys() == reference.keys()
    for output, y in found.items():
        np.testing.assert_array_equal(y, wanted[output])
        size = np.abs(reference[output]).max()
        np.testing.assert_allclose(y, reference[output], atol=2e-3 * size)


@pytest.mark.parametrize("ctas", [1, 2, 5, 64])
def test_any_number_of_ctas_gives_the_same_bits(device: Device, ctas: int) -> None:
    """One, which has all tiles, or more than there are tiles."""
    spec = CASES["residual"]
    inputs = spec.make_inputs(np.random.default_rng(1))
    other = replace(spec, cut=replace(spec.cut, ctas=ctas))
    assert (other.tiling.row_ctas * other.tiling.tiles < ctas) == (ctas == 64)
    found = [run_kernel(device, each, inputs)["y"] for each in (spec, other)]
    np.testing.assert_array_equal(*found)


@pytest.mark.parametrize("weights", [2, 3, 5])
@pytest.mark.parametrize(("stages", "slices"), [(2, 1), (3, 1), (6, 1), (2, 2), (2, 4)])
def test_rings_of_any_depth(device: Device, weights: int, stages: int, slices: int) -> None:
    """The second row group stays behind by the ring's stages, or by a tile of columns."""
    spec = CASES["packed"]
    inputs = spec.make_inputs(np.random.default_rng(2))
    cut = replace(spec.cut, weight_stages=weights, x_stages=stages, x_slices=slices)
    found = [run_kernel(device, replace(spec, cut=c), inputs)["y"] for c in (spec.cut, cut)]
    np.testing.assert_array_equal(*found)


def test_races_are_found_by_the_sanitizer_if_there_are_any(urdir_sanitizer: Device) -> None:
    for name in ("residual", "gated", "three"):
        spec = CASES[name]
        inputs = spec.make_inputs(np.random.default_rng(3))
        run_kernel(urdir_sanitizer, spec, inputs)


@pytest.mark.parametrize(
    ("spec", "fields"),
    [
        (GemmWgmma(FORMATS["Q8_0"], 64, 256, 40, without_turns(CASES["plain"]).cut), {}),
        (CASES["plain"], {"rows": 135}),
        (CASES["plain"], {"others": ((F16, 30),)}),
        (CASES["gated"], {"epilogue": (Gated(),)}),
    ],
)
def test_products_that_cannot_take_turns(spec: GemmWgmma, fields: dict[str, Any]) -> None:
    with pytest.raises(PtxgenError, match=r"cannot take turns"):
        replace(spec, **{"cut": replace(spec.cut, ctas=3), **fields})


@pytest.mark.parametrize(
    "fields", [{"row_groups": 1}, {"row_groups": 4}, {"splits": 2}, {"cluster": 2}]
)
def test_cuts_without_turns(fields: dict[str, int]) -> None:
    alone = replace(TURNS, ctas=0, **fields)
    with pytest.raises(PtxgenError, match="impossible cut"):
        replace(alone, ctas=3)
    with pytest.raises(PtxgenError, match="impossible cut"):
        replace(TURNS, weight_stages=1)


PACKS = (Bias(), GELU, PACKED)


@pytest.mark.parametrize(
    ("steps", "rows", "cols", "batch", "has_turns"),
    [
        (PACKS, 4096, 1024, 8192, True),
        (PACKS, 4096, 1024, 1024, False),  # 128 tiles
        (PACKS, 65536, 1024, 511, False),
        ((Gated(), PACKED), 2624, 1024, 2043, True),
        ((Residual(),), 1024, 4096, 8192, True),
        ((Residual(),), 1024, 1024, 8192, False),  # the end takes the longest
        ((Residual(),), 4096, 4096, 2048, False),  # its order of tiles is as good
    ],
)
def test_there_are_turns_where_they_pay(
    steps: tuple[Any, ...], rows: int, cols: int, batch: int, has_turns: bool
) -> None:
    """Of float weights alone."""
    for name in ("F16", "BF16", "Q8_0", "Q4_K"):
        product = GemmWgmma.of(FORMATS[name], rows, cols, batch, any_cut(batch), *steps)
        chosen = choose_wgmma(product, 132)
        assert chosen.cut.takes_turns == (has_turns and FORMATS[name].is_float)
        if chosen.cut.takes_turns:
            assert chosen.tiling.tiles * chosen.tiling.row_ctas > 132
            assert chosen.launch_shape.grid == (132, 1, 1)
