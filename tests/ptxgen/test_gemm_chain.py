"""Chains of products: their CTAs wait for each other, so that all must be on the device at once."""

from __future__ import annotations

import pytest

from urdir.driver import Device, check_kernel
from urdir.driver.emulator.api import Api
from urdir.ptxgen.kernels.linear.chain_choice import choose_chain
from urdir.ptxgen.kernels.linear.epilogue.activation import Gated
from urdir.ptxgen.kernels.linear.epilogue.norm import BeginNorm
from urdir.ptxgen.kernels.linear.epilogue.pack import PackedVectors
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.products.gemm_wgmma import GemmWgmma
from urdir.ptxgen.kernels.linear.prologue.norm import begun
from urdir.ptxgen.kernels.linear.wgmma_choice import any_cut
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.weights.formats import FORMATS

#: SMs that sixteen CTAs of seven row groups a pair take.
SMS = 16


def layer(batch: int) -> tuple[GemmWgmma, ...]:
    q4_k, q6_k, cut = FORMATS["Q4_K"], FORMATS["Q6_K"], any_cut(batch)
    packed, rms = PackedVectors(), begun(Norm("rms", 1e-5))
    return (
        GemmWgmma.of(q4_k, 512, 768, batch, cut, Residual(), BeginNorm(), packed),
        GemmWgmma.of(q4_k, 1792, 512, batch, cut, rms, Gated(), packed),
        GemmWgmma.of(q6_k, 512, 1792, batch, cut, Residual(), BeginNorm(), packed),
        GemmWgmma.of(q4_k, 200, 512, batch, cut, rms, others=((q4_k, 70), (q6_k, 66))),
    )


@pytest.mark.parametrize("batch", [13, 60])
def test_seven_row_groups_of_a_pair_of_ctas(batch: int) -> None:
    chain = choose_chain(layer(batch), SMS)
    assert chain is not None
    assert chain.shares_last
    assert chain.launch_shape.grid == (SMS, 1, 1)
    api = Api(target="sm_90a", sm_count=SMS)
    with Device.open("emulator:sm_90a", api=api) as device:
        check_kernel(device, chain, sanitize=False)
