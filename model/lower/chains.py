"""Consecutive products of few packed vectors as one launch, whose weights keep coming meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from urdir.driver.kernel import nbytes_of
from urdir.model.lower.lifetimes import Unplaced
from urdir.model.lower.lowering import Lowering
from urdir.model.lower.registers import CHAIN_COUNTS
from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.epilogue.activation import Gated
from urdir.ptxgen.kernels.linear.epilogue.norm import BeginNorm
from urdir.ptxgen.kernels.linear.epilogue.pack import PackedVectors
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.products.gemm_chain import GemmChain
from urdir.ptxgen.kernels.linear.products.gemm_wgmma import GemmWgmma, WgmmaCut
from urdir.ptxgen.kernels.linear.prologue.norm import BegunNorm
from urdir.ptxgen.spec import ceil_div
from urdir.ptxgen.weights.packed import GROUP, TILE_SLICES

if TYPE_CHECKING:
    from urdir.model.lower.sheet import Sheet

#: The most vectors of a chain, and the steps that its products may have.
MOST, STEPS = 64, (BegunNorm, Gated, Residual, BeginNorm, PackedVectors)
#: Slots of weights of a warpgroup, most first, and about the bytes of activations.
STAGES, X_NBYTES = (4, 3, 2), 48 << 10


def join_chains(at: Lowering, sheet: Sheet, first: int) -> None:
    """Join the launches of a sheet from number ``first`` on, where they are such products."""
    joined: list[Unplaced] = []
    run: list[Unplaced] = []
    for launch in [*sheet.launches[first:], None]:
        if launch is not None and _may_join(launch) and (not run or _follows(run, launch)):
            run.append(launch)
            continue
        joined += _joined(at, sheet, run)
        run = []
        if launch is not None and _may_join(launch):
            run = [launch]
        elif launch is not None:
            joined.append(launch)
    sheet.launches[first:] = joined


def _may_join(launch: Unplaced) -> bool:
    kernel = launch.kernel
    return (
        isinstance(kernel, GemmWgmma)
        and 8 < kernel.batch <= MOST
        and kernel.mixture is None
        and not kernel.launch_fields
        and all(type(step) in STEPS for step in kernel.steps)
    )


def _follows(run: Sequence[Unplaced], launch: Unplaced) -> bool:
    """Whether a product takes what the last one of a run leaves."""
    before: Any = run[-1].kernel
    if not before.packs:
        return False
    packed = "scaled" if before.steps.has(BeginNorm) else "y"
    return bool(run[-1].args[packed].address == launch.args["x"].address)


def _joined(at: Lowering, sheet: Sheet, run: Sequence[Unplaced]) -> Sequence[Unplaced]:
    """A run as one launch, as far as that is possible, or as it is."""
    if len(run) < 2:
        return run
    chain = _chain_of(tuple(launch.kernel for launch in run), at.limits.sms)
    if chain is None:
        return [*_joined(at, sheet, run[:-1]), run[-1]]
    args: dict[str, Any] = {}
    for place, launch in enumerate(run):
        for name, of in chain.registers_of(place):
            if of in args and args[of].address != launch.args[name].address:
                return run
            args.setdefault(of, launch.args[name])
    # Products write all of these in one launch, so that each has its own place.
    for place in range(len(run) - 1):
        for name in ("scaled", "y_summary"):
            if f"{name}_{place}" in args:
                args[f"{name}_{place}"] = sheet.registers.new(f"{name} of a chain").part()
    counts = at.work.zeroed(CHAIN_COUNTS)
    args["counts"] = counts.slice(0, nbytes_of(chain, "counts"))
    label = f"{run[0].label}.chain"
    return [Unplaced(chain, label, {p.name: args[p.name] for p in chain.params})]


@lru_cache(maxsize=256)
def _chain_of(products: tuple[GemmWgmma, ...], sms: int) -> GemmChain | None:
    """A kernel for a device of as many SMs, which must have all CTAs at once."""
    try:
        cut = tuple(_cut(product, sms) for product in products)
        sevens = all(
            _row_groups(p) % 7 == 0 and p.layout.row_tiles % 2 == 0 and _vectors(p) % 16 == 0
            for p in products
            if p.steps.gated
        )
        for stages in STAGES:
            try:
                chain = GemmChain(cut, stages, sevens)
                if chain.launch_shape.shared_bytes <= 227 << 10 and chain.launch_shape.grid[0] <= sms:
                    return chain
            except PtxgenError:
                continue
    except PtxgenError:
        pass
    return None


def _row_groups(product: GemmWgmma) -> int:
    wide = replace(product, cut=WgmmaCut(4, _vectors(product), 1, 1, 1, 1, 4))
    return 4 * wide.tiling.row_ctas


def _vectors(product: GemmWgmma) -> int:
    return GROUP * ceil_div(product.batch, GROUP)


def _cut(product: GemmWgmma, sms: int) -> GemmWgmma:
    vectors = _vectors(product)
    if product.steps.gated:
        stages = max(2, min(6, X_NBYTES // (TILE_SLICES * 128 * vectors)))
        return replace(product, cut=WgmmaCut(4, vectors, 1, 1, 1, stages, TILE_SLICES))
    slices = 2 if vectors <= 16 else 1
    stages = max(2, min(4, X_NBYTES // (4 * slices * 128 * vectors)))
    one = replace(product, cut=WgmmaCut(1, vectors, 4, 1, 1, stages, slices))
    return replace(one, cut=replace(one.cut, cluster=2)) if 2 * one.tiling.row_ctas <= sms else one
