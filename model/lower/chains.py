"""Consecutive products of few packed vectors, joined as one launch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from urdir.driver.kernel import nbytes_of
from urdir.model.lower.lifetimes import Unplaced
from urdir.model.lower.registers import CHAIN_COUNTS
from urdir.ptxgen.kernels.linear.chain_choice import can_chain, choose_chain
from urdir.ptxgen.kernels.linear.epilogue.pack import packed_param
from urdir.ptxgen.kernels.linear.products.gemm_chain import GemmChain
from urdir.ptxgen.kernels.linear.products.gemm_wgmma import GemmWgmma
from urdir.ptxgen.spec import Access

if TYPE_CHECKING:
    from urdir.model.lower.sheet import Sheet


def join_chains(sheet: Sheet, first: int, sms: int) -> None:
    """Join launches of a sheet, from number ``first`` on, that are a chain of products for a device
    with ``sms`` SMs."""
    runs: list[list[Unplaced]] = []
    for launch in sheet.launches[first:]:
        if runs and _follows(runs[-1][-1], launch):
            runs[-1].append(launch)
        else:
            runs.append([launch])
    sheet.launches[first:] = [launch for run in runs for launch in _joined(sheet, run, sms)]


def _follows(before: Unplaced, launch: Unplaced) -> bool:
    """Whether a product multiplies what the launch before leaves."""
    product, after = before.kernel, launch.kernel
    if not isinstance(product, GemmWgmma) or not isinstance(after, GemmWgmma):
        return False
    if not product.packs or not can_chain(product) or not can_chain(after):
        return False
    return bool(before.args[packed_param(product)].address == launch.args["x"].address)


def _joined(sheet: Sheet, run: Sequence[Unplaced], sms: int) -> Sequence[Unplaced]:
    """A run as one launch and what is left of it."""
    if len(run) < 2:
        return run
    chain = choose_chain(tuple(cast("GemmWgmma", launch.kernel) for launch in run), sms)
    args = None if chain is None else _arguments(sheet, chain, run)
    if chain is None or args is None:
        return [*_joined(sheet, run[:-1], sms), run[-1]]
    counts = sheet.registers.zeroed(CHAIN_COUNTS)
    args["counts"] = counts.slice(0, nbytes_of(chain, "counts"))
    label = f"{run[0].label}.chain"
    return [Unplaced(chain, label, {param.name: args[param.name] for param in chain.params})]


def _arguments(sheet: Sheet, chain: GemmChain, run: Sequence[Unplaced]) -> dict[str, Any] | None:
    """Those of the launches; None where one takes something else than a product before leaves, or
    overwrites what one takes."""
    args: dict[str, Any] = {}
    for place, launch in enumerate(run):
        for name, of in chain.registers_of(place):
            if args.setdefault(of, launch.args[name]).address != launch.args[name].address:
                return None
    params = [param for param in chain.params if param.name in args]
    taken = {args[param.name].address for param in params if param.access is Access.IN}
    # A register that two products write has the value of the last one afterwards; that of the first
    # one only the chain takes.
    last: set[int] = set()
    for param in reversed([param for param in params if param.access is Access.OUT]):
        if args[param.name].address in taken:
            return None
        if args[param.name].address in last:
            args[param.name] = sheet.registers.new(f"{param.name} of a chain").part()
        last.add(args[param.name].address)
    return args
