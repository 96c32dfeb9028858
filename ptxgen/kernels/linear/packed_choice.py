"""Which kernel multiplies packed activations with weights on a device, if any does."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear import mma_choice, wgmma_choice
from urdir.ptxgen.kernels.linear.choice import Limits
from urdir.ptxgen.kernels.linear.epilogue.heads import Heads
from urdir.ptxgen.kernels.linear.packed_parts import takes_packed
from urdir.ptxgen.kernels.linear.products.gemm_mma import GemmMma
from urdir.ptxgen.kernels.linear.products.gemm_wgmma import GemmWgmma
from urdir.ptxgen.kernels.linear.products.packed_product import PackedProduct
from urdir.ptxgen.kernels.linear.steps import Step, find, in_order
from urdir.ptxgen.target import Target
from urdir.ptxgen.weights.formats import Format


def packs(limits: Limits, formats: tuple[Format, ...]) -> bool:
    """Whether a product with such weights takes packed activations on the device."""
    if not takes_packed(formats):
        return False
    if limits.target in wgmma_choice.TARGETS:
        return True
    has_mma = Target.parse(limits.target).portable in mma_choice.TARGETS
    return has_mma and all(mma_choice.fits(fmt, limits) for fmt in formats)


def packs_mixtures(limits: Limits, formats: tuple[Format, ...]) -> bool:
    """Whether products with such weights of experts do: only `GemmWgmma` has a mixture."""
    return limits.target in wgmma_choice.TARGETS and takes_packed(formats)


def begins_norms(limits: Limits) -> bool:
    """Whether such products begin the norm that follows, and complete one that is begun."""
    return limits.target in wgmma_choice.TARGETS


def choose_packed(
    limits: Limits, fmt: Format, rows: int, cols: int, batch: int, *steps: Step, **fields: Any
) -> PackedProduct:
    """The product with these ``steps``, in any order, cut for the device: `GemmWgmma` on devices
    with wgmma, else `GemmMma`. That of `Heads` is cut as if there were all vectors that they have
    room for.

    ``fields``: the other ones of `PackedProduct`. Raises PtxgenError where `packs` says no.
    """
    if not packs(limits, (fmt,)):
        raise PtxgenError(f"no product of packed activations with {fmt.name} on {limits.target}")
    heads = find(steps, Heads)
    if heads is not None and batch < heads.room:
        whole = choose_packed(limits, fmt, rows, cols, heads.room, *steps, **fields)
        return replace(whole, batch=batch)
    given = (fmt, rows, cols, batch)
    if limits.target in wgmma_choice.TARGETS:
        cut = wgmma_choice.any_cut(batch)
        product = GemmWgmma.of(*given, cut, *in_order(GemmWgmma, *steps), **fields)
        return wgmma_choice.choose_wgmma(product, limits.sms)
    mma = GemmMma.of(*given, mma_choice.any_cut(batch), *in_order(GemmMma, *steps), **fields)
    return mma_choice.choose_mma(mma, limits)
