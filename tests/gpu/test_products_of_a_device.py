"""Products on tensor cores that keep all SMs at work: the same bits each time, and the
reference's values. What one CTA does with copies and products at its leisure is tested elsewhere;
here copies for the next tile come while shared memory is busiest."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from urdir.driver import Device, run_kernel
from urdir.model.lower.parts import device_limits
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.linear.bytes_choice import choose_bytes
from urdir.ptxgen.kernels.linear.epilogue.activation import Activated
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.epilogue.pack import PackedVectors
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.mma_choice import any_bytes_cut, choose_mma
from urdir.ptxgen.kernels.linear.products.gemm_bytes import BytesCut, GemmBytes
from urdir.ptxgen.kernels.linear.products.gemm_e4m3 import GemmE4m3
from urdir.ptxgen.kernels.linear.products.gemm_mma_bytes import GemmMmaBytes
from urdir.ptxgen.kernels.linear.products.gemm_mma_e4m3 import GemmMmaE4m3
from urdir.ptxgen.kernels.linear.products.gemm_wgmma import GemmWgmma, WgmmaCut
from urdir.ptxgen.kernels.linear.products.gemv import Gemv
from urdir.ptxgen.kernels.linear.products.packed_product import PackedProduct
from urdir.ptxgen.kernels.linear.wgmma_choice import any_cut, choose_wgmma
from urdir.ptxgen.weights.formats import FORMATS

VECTORS, RUNS = 2048, 3
GELU = Activated(Activation("gelu_erf"))

#: Rows, columns and steps: few columns end often, many keep the rings full.
PRODUCTS = {
    "many columns": (1024, 4096, (Bias(), Residual())),
    "packed": (4096, 512, (Bias(), GELU, PackedVectors())),
}


@pytest.fixture
def hopper(urdir_gpu: Device, needs_wgmma: Callable[[Device], None]) -> Device:
    needs_wgmma(urdir_gpu)
    return urdir_gpu


def check(device: Device, spec: PackedProduct | Gemv) -> None:
    """All runs give the same bits, and those of the reference but for rounding."""
    inputs = spec.make_inputs(np.random.default_rng(spec.cols))
    wanted = spec.reference(**inputs)
    first = run_kernel(device, spec, inputs)
    share = 4e-3 if isinstance(spec, GemmWgmma) else spec.tolerance.rtol
    for output, y in first.items():
        np.testing.assert_allclose(y, wanted[output], atol=share * np.abs(wanted[output]).max())
    for _ in range(RUNS):
        for output, y in run_kernel(device, spec, inputs).items():
            np.testing.assert_array_equal(y, first[output])


@pytest.mark.parametrize(
    ("name", "product"),
    [("F16", "packed"), ("BF16", "many columns"), ("Q8_0", "many columns"), ("Q4_K", "packed")],
)
def test_products(hopper: Device, name: str, product: str) -> None:
    rows, cols, steps = PRODUCTS[product]
    spec = GemmWgmma.of(FORMATS[name], rows, cols, VECTORS, any_cut(VECTORS), *steps)
    check(hopper, choose_wgmma(spec, hopper.properties.sm_count))


@pytest.mark.parametrize("name", ["Q4_K", "Q6_K", "BF16"])
def test_tiles_of_more_vectors_than_an_instruction_takes(hopper: Device, name: str) -> None:
    cut = WgmmaCut(2, 264, weight_stages=1, x_stages=3)
    spec = GemmWgmma.of(FORMATS[name], 2048, 4096, 1049, cut, Bias(), Residual())
    check(hopper, spec)


@pytest.mark.parametrize("rings", [(2, 5), (3, 4), (4, 3)])
def test_turns(hopper: Device, rings: tuple[int, int]) -> None:
    """With any depth of the rings: two stages of weights are the most often waited for."""
    weights, activations = rings
    sms = hopper.properties.sm_count
    cut = WgmmaCut(2, 256, weight_stages=weights, x_stages=activations, ctas=sms)
    spec = GemmWgmma.of(FORMATS["F16"], 4096, 2048, VECTORS, cut, Bias(), Residual())
    assert spec.tiling.row_ctas * spec.tiling.tiles > sms
    check(hopper, spec)


@pytest.mark.parametrize("name", ["E4M3R256", "E4M3G128"])
def test_products_of_e4m3(hopper: Device, name: str) -> None:
    rows, cols, steps = PRODUCTS["many columns"]
    spec = GemmE4m3.of(FORMATS[name], rows, cols, VECTORS, BytesCut(1, 8, 2, 2), *steps)
    check(hopper, choose_bytes(spec, hopper.properties.sm_count))


@pytest.mark.parametrize(("kind", "name"), [(GemmE4m3, "E4M3R256"), (GemmBytes, "Q6_K")])
def test_tiles_of_eight_bits_that_take_registers_of_warps_that_copy(
    hopper: Device, kind: type[GemmBytes], name: str
) -> None:
    cut = BytesCut(2, 272, 2, 3, sets=2)
    check(hopper, kind.of(FORMATS[name], 2048, 4096, 1081, cut, Bias(), Residual()))


@pytest.mark.parametrize(("kind", "name"), [(GemmMmaE4m3, "E4M3R256"), (GemmMmaBytes, "Q4_K")])
def test_products_of_eight_bits_by_mma(
    urdir_gpu: Device, kind: type[GemmMmaBytes], name: str
) -> None:
    rows, cols, steps = PRODUCTS["many columns"]
    spec = kind.of(FORMATS[name], rows, cols, VECTORS, any_bytes_cut(VECTORS), *steps)
    check(urdir_gpu, choose_mma(spec, device_limits(urdir_gpu)))


@pytest.mark.parametrize("name", ["NVFP4", "Q4_K", "Q6_K", "Q8_0", "IQ2_XS"])
def test_one_vector(hopper: Device, name: str) -> None:
    """Copies for a later tile begin while lanes multiply the one whose slot they fill."""
    sms = hopper.properties.sm_count
    check(hopper, Gemv.of(FORMATS[name], 8192, 4096, activations="i16", stages=2, sms=sms))
