"""Which product of packed activations a device gets, and that its cut fits the device."""

from __future__ import annotations

import pytest

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.choice import Limits
from urdir.ptxgen.kernels.linear.epilogue.activation import Gated
from urdir.ptxgen.kernels.linear.epilogue.pack import PackedVectors
from urdir.ptxgen.kernels.linear.packed_choice import choose_packed, packs
from urdir.ptxgen.kernels.linear.products.gemm_mma import GemmMma, MmaCut
from urdir.ptxgen.kernels.linear.products.gemm_wgmma import GemmWgmma
from urdir.ptxgen.kernels.linear.steps import Epilogue
from urdir.ptxgen.ptx.architecture import ARCHITECTURES, number_of
from urdir.ptxgen.tools.assemble import assemble, is_available
from urdir.ptxgen.weights.formats import FORMATS

#: A gated product needs two row groups, any other one.
GATED = (Gated(), PackedVectors())
SHAPES: tuple[tuple[int, tuple[Epilogue, ...]], ...] = ((700, ()), (512, GATED))


def limits(target: str, sms: int = 108) -> Limits:
    holds = ARCHITECTURES[number_of(target)]
    return Limits(sms, holds.shared, holds.shared_per_cta, target=target)


@pytest.mark.parametrize(
    ("target", "kind"),
    [
        ("sm_90a", GemmWgmma),
        *((target, GemmMma) for target in ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")),
    ],
)
def test_the_target_decides(target: str, kind: type) -> None:
    product = choose_packed(limits(target), FORMATS["Q4_K"], 512, 512, 16)
    assert type(product) is kind
    assert product.target_on(target) == target


def test_none_on_turing_and_for_f32_weights() -> None:
    assert not packs(limits("sm_75"), (FORMATS["Q4_K"],))
    assert not packs(limits("sm_90"), (FORMATS["Q4_K"], FORMATS["F32"]))
    with pytest.raises(PtxgenError, match="no product of packed activations with Q4_K on sm_75"):
        choose_packed(limits("sm_75"), FORMATS["Q4_K"], 512, 512, 16)


@pytest.mark.turns(2)
@pytest.mark.parametrize("target", ["sm_80", "sm_86", "sm_90"])
@pytest.mark.parametrize("vectors", [9, 65, 2048])
def test_every_type_has_a_cut_that_fits(target: str, vectors: int) -> None:
    """Unquantised weights are too large for the 99 KB of a CTA of sm_86."""
    held = limits(target)
    without = {name for name, fmt in FORMATS.items() if not packs(held, (fmt,))}
    assert without == ({"F32", "F16", "BF16"} if target == "sm_86" else {"F32"})
    for name in FORMATS.keys() - without:
        for rows, steps in SHAPES:
            product = choose_packed(held, FORMATS[name], rows, 512, vectors, *steps)
            assert product.grids.end <= held.shared_per_cta
            taken = (product.grids.end + 1024) * product.launch_shape.resident
            assert taken <= held.shared_per_sm


@pytest.mark.turns(5)
@pytest.mark.skipif(not is_available(), reason="needs nvJitLink")
@pytest.mark.parametrize("vectors", [16, 64, 2048])
@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "sm_90a"])
def test_what_an_8b_model_launches_does_not_spill(target: str, vectors: int) -> None:
    for name in ("Q4_K", "Q6_K"):
        for rows, steps in ((6144, ()), (14336, GATED)):
            product = choose_packed(limits(target), FORMATS[name], rows, 4096, vectors, *steps)
            made = assemble(product.ptx(target), target).entries[product.name]
            assert not made.spills, f"{product.cut}: {made}"


@pytest.mark.parametrize(
    "fields",
    [
        {"row_groups": 3, "vectors": 16, "operands": 2},  # a warp has rows of two groups
        {"row_groups": 4, "vectors": 16, "splits": 2},  # 32 warps
        {"row_groups": 1, "vectors": 12},
        {"row_groups": 1, "vectors": 8, "x_stages": 3, "x_slices": 4},  # ahead of the weights
        {"row_groups": 1, "vectors": 8, "weight_stages": 1},
    ],
)
def test_what_is_no_cut(fields: dict[str, int]) -> None:
    with pytest.raises(PtxgenError, match="impossible cut"):
        MmaCut(**fields)
