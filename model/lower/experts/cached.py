"""Experts in host memory: those that rows chose are looked up in a cache on the device, and what it
lacks is copied before the products; of one row by the products themselves."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from urdir.driver.memory import Slice
from urdir.model.families.stored import Linear
from urdir.model.graph.experts import Experts
from urdir.model.lower.adapters import rows_of_tensor
from urdir.model.lower.experts.layer import MixtureLayer
from urdir.model.lower.experts.per_row import PerRow
from urdir.model.lower.experts.products import MixtureCall
from urdir.model.lower.lowering import Lowering
from urdir.model.memory.expert_cache import ExpertCache, ReadExperts
from urdir.model.memory.layer_files import InFile
from urdir.model.memory.weights import Matrix
from urdir.ptxgen.kernels.experts.fetch import FetchExperts
from urdir.ptxgen.kernels.experts.place import MAX_PAIRS, PlaceExperts
from urdir.ptxgen.kernels.experts.settle import MAX_CACHES, SettleExperts
from urdir.ptxgen.kernels.experts.up import ExpertsUp

#: The register with the slot of each pair's expert, or where experts are gathered its number.
SLOT = "expert slot"
#: Pairs of rows and experts that products multiply with the matrices of a cache, at most.
MAX_HELD = 256
#: Pairs for each expert of a layer, of more of which all experts are streamed: nearly all of them
#: are chosen, and copies run beside the launches before.
MOST_CHOICES = 4

_place = lru_cache(maxsize=64)(PlaceExperts)
_fetch = lru_cache(maxsize=64)(FetchExperts)
_settle = lru_cache(maxsize=64)(SettleExperts)


def through_cache(at: Lowering, of: Experts, call: MixtureCall, cache: ExpertCache) -> MixtureCall:
    """The mixture after the launches that copy the chosen experts: of few pairs with the matrices
    of its cache, of more with the streamed ones, where the chosen experts are gathered. Of many
    pairs it is as it was: all experts are streamed."""
    rows, used = of.x.rows, of.selection.used
    if rows == 1 and used <= cache.slots and cache.reader is None:
        return replace(call, mixture=_held(call.mixture, of, cache, state=cache.state))
    gathers = at.takes_gemm(rows) or rows * used > min(cache.slots, MAX_HELD)
    if gathers and (
        rows * used > min(MAX_PAIRS, MOST_CHOICES * cache.experts) or cache.reader is not None
    ):
        return call
    products, copies, work = PerRow(at, rows), at.work["expert copies"], at.work
    warps = 1 if call.parted is None else products.down(call).cut.warps
    sizes = rows, used, cache.experts, cache.slots
    place = _place(*sizes, call.selection, gathers, call.logit_parts, warps)
    chosen = products.choice(call)
    if call.selection is not None:  # what the products would have done
        chosen["weight"] = work["expert weight"]
    at.launch(
        place,
        f"{call.label}.place",
        position=rows_of_tensor(at, of.x).position,
        state=cache.state,
        slot=work[SLOT],
        copies=copies,
        **chosen,
    )
    whole = call.mixture
    if gathers:
        _append_gather(at, call.label, cache, place, copies)
        return replace(call, mixture=replace(whole, number=SLOT), selection=None, parted=None)
    _append_fetch(at, call.label, cache, place, copies)
    held = _held(whole, of, cache, number=SLOT)
    return replace(call, mixture=held, selection=None, parted=None)


def append_settled(at: Lowering, first: int) -> None:
    """Append the launches after which caches have what products from launch ``first`` on have
    looked up there and copied. They run beside those that follow, up to what moves the row on."""
    looked_up: dict[SettleExperts, dict[int, Slice]] = {}
    for kernel, _, args in at.plan.launches[first:]:
        if isinstance(kernel, ExpertsUp) and (held := kernel.held) is not None:
            state = args["state"]
            one = _settle(1, held.used, held.experts, held.slots)
            looked_up.setdefault(one, {})[state.offset] = state
    rows = at.rows if at.outputs is None or at.outputs.rows.count > 1 else at.outputs.rows
    for one, states in looked_up.items():
        every = [*states.values()]
        for start in range(0, len(every), MAX_CACHES):
            some = every[start : start + MAX_CACHES]
            kernel = _settle(len(some), one.used, one.experts, one.slots)
            given = {f"state{i}": of for i, of in enumerate(some)}
            at.launch(kernel, "settle", position=rows.position, **given)


def _append_fetch(
    at: Lowering, label: str, cache: ExpertCache, place: PlaceExperts, copies: Slice
) -> None:
    """Copy what is listed to its slots."""
    targets, label = cache.targets(), f"{label}.fetch"
    if cache.reader is not None:
        at.launch(ReadExperts(cache, place.most_copies), label, copies=copies, **targets)
        return
    sizes = tuple(part.nbytes for part in cache.parts.values())
    fetch = _fetch(cache.experts, cache.slots, place.most_copies, sizes, at.limits.sms)
    at.launch(fetch, label, copies=copies, **cache.sources(), **targets)


def _append_gather(
    at: Lowering, label: str, cache: ExpertCache, place: PlaceExperts, copies: Slice
) -> None:
    """Copy what is listed to its slots and to the slots of the streamed matrices, where the experts
    that are cached are copied, too."""
    weights = at.parts.weights
    whole = {f"whole{i}": weights.matrix(of).data for i, of in enumerate(cache.layouts)}
    sizes = tuple(part.nbytes for part in cache.parts.values())
    tails = tuple(
        of.nbytes - cache.experts * part
        for of, part in zip(whole.values(), sizes, strict=False)  # biases have parts, too
    )
    fetch = _fetch(cache.experts, cache.slots, place.most_copies, sizes, at.limits.sms, tails)
    powers = {f"tail{i}": cache.powers.get(of) for i, of in enumerate(cache.layouts)}
    arguments = {**cache.sources(), **cache.targets(), **whole, **powers}
    at.launch(fetch, f"{label}.gather", copies=copies, **arguments)


def _held(mixture: MixtureLayer, of: Experts, cache: ExpertCache, **fields: Any) -> MixtureLayer:
    """The mixture of the experts in the slots; products that look them up there have a state."""

    def matrix(whole: Matrix, of: Linear) -> Matrix:
        part, layout = cache.parts[of.matrix], cache.layouts[of.matrix]
        bias = None if of.bias is None else cache.parts[of.bias].target
        held = replace(whole, layout=layout, data=part.target)
        if "state" not in fields:
            return replace(held, bias=bias)
        assert not isinstance(part.source, InFile | Slice)  # `ExpertCache.reader`
        return replace(held, source=part.source, held_bias=bias)

    gate = None if mixture.gate is None or of.gate is None else matrix(mixture.gate, of.gate)
    up, down = matrix(mixture.up, of.up), matrix(mixture.down, of.down)
    return replace(mixture, up=up, down=down, gate=gate, slots=cache.slots, **fields)
