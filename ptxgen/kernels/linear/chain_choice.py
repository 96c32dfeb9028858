"""How consecutive products of few packed activation vectors are cut as one launch."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.products.gemm_chain import STEPS, WARPGROUPS, GemmChain
from urdir.ptxgen.kernels.linear.products.gemm_wgmma import FEW, GemmWgmma, WgmmaCut
from urdir.ptxgen.kernels.linear.products.packed_product import CTA_COST, SM_NBYTES
from urdir.ptxgen.spec import ceil_div
from urdir.ptxgen.weights.packed import GROUP, GROUP_NBYTES, TILE_SLICES

#: Slots of weights of a warpgroup, most first; about the bytes of activations, and the most stages.
STAGES, X_NBYTES, MOST_STAGES = (4, 3, 2), 48 << 10, 6


def can_chain(product: GemmWgmma) -> bool:
    """Whether a product may be one of a chain."""
    plain = product.mixture is None and not product.launch_fields
    few = GROUP < product.batch <= FEW
    return plain and few and all(type(step) in STEPS for step in product.steps)


@lru_cache(maxsize=256)
def choose_chain(products: tuple[GemmWgmma, ...], sms: int) -> GemmChain | None:
    """Products as one launch of a device with ``sms`` SMs, which has all CTAs at once; None if it
    has not. The cuts that they have do not matter."""
    for stages in STAGES:
        for shares in (True, False):
            try:
                chain = GemmChain(tuple(_cut(p, sms) for p in products), stages, shares)
            except PtxgenError:
                continue
            shape = chain.launch_shape
            if shape.shared_bytes <= SM_NBYTES - CTA_COST and shape.grid[0] <= sms:
                return chain
    return None


def _cut(product: GemmWgmma, sms: int) -> GemmWgmma:
    """Row groups of a gated product; else splits, in clusters if there is room for them."""
    groups = ceil_div(product.batch, GROUP)
    stage = GROUP_NBYTES * groups
    if product.steps.gated:
        stages = max(2, min(MOST_STAGES, X_NBYTES // (TILE_SLICES * stage)))
        cut = WgmmaCut(WARPGROUPS, GROUP * groups, 1, 1, 1, stages, TILE_SLICES)
        return replace(product, cut=cut)
    slices = 2 if groups <= 2 else 1
    stages = max(2, min(MOST_STAGES, X_NBYTES // (WARPGROUPS * slices * stage)))
    cut = WgmmaCut(1, GROUP * groups, WARPGROUPS, 1, 1, stages, slices)
    one = replace(product, cut=cut)
    room = 2 * one.tiling.row_ctas <= sms
    return replace(one, cut=replace(cut, cluster=2)) if room else one
