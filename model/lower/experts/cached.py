"""Experts in host memory: those that few rows chose are looked up in a cache on the device, which
copies what it lacks before the products."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING, cast

from urdir.model.families.stored import Linear
from urdir.model.graph.experts import Experts
from urdir.model.lower.experts.products import MixtureCall
from urdir.model.lower.lowering import Lowering
from urdir.model.memory.expert_cache import ExpertCache, ReadExperts
from urdir.model.memory.weights import Matrix
from urdir.ptxgen.kernels.experts.fetch import FetchExperts
from urdir.ptxgen.kernels.experts.gather import THREADS
from urdir.ptxgen.kernels.experts.place import MAX_PAIRS, PlaceExperts

if TYPE_CHECKING:
    from urdir.driver.launch import Argument

#: The register with the slot of each pair's expert.
SLOT = "expert slot"

_place = lru_cache(maxsize=64)(PlaceExperts)
_fetch = lru_cache(maxsize=64)(FetchExperts)


def through_cache(at: Lowering, of: Experts, call: MixtureCall, cache: ExpertCache) -> MixtureCall:
    """The mixture with the matrices of its cache, after the launches that fill it. Where rows may
    choose more experts than there are slots, it is as it was: all experts are streamed, or once
    they are chosen (`gather_chosen`) these alone."""
    rows, used = of.x.rows, of.selection.used
    if rows * used > min(cache.slots, MAX_PAIRS):
        return call
    place = _place(rows, used, cache.experts, cache.slots, call.selection)
    copies, work = at.work["expert copies"], at.work
    if call.selection is None:
        chosen = {"expert": work["expert"]}
    else:  # what the products would have done
        chosen = {"logits": work["router logits"], "weight": work["expert weight"]}
    at.launch(
        place,
        f"{call.label}.place",
        state=cache.state,
        slot=work[SLOT],
        copies=copies,
        **chosen,
    )
    parts = [*cache.parts.values()]
    targets = {f"target{i}": part.target for i, part in enumerate(parts)}
    label = f"{call.label}.fetch"
    if cache.reader is not None:
        at.launch(ReadExperts(cache, place.most_copies), label, copies=copies, **targets)
    else:
        nbytes = tuple(part.nbytes for part in parts)
        fetch = _fetch(cache.experts, cache.slots, place.most_copies, nbytes, at.limits.sms)
        sources = {f"source{i}": cast("Argument", part.source) for i, part in enumerate(parts)}
        at.launch(fetch, label, copies=copies, **sources, **targets)
    whole = call.mixture
    held = replace(
        whole,
        up=_held(whole.up, of.up, cache),
        down=_held(whole.down, of.down, cache),
        gate=None if whole.gate is None or of.gate is None else _held(whole.gate, of.gate, cache),
        slots=cache.slots,
        number=SLOT,
    )
    return replace(call, mixture=held, selection=None)


def _held(matrix: Matrix, of: Linear, cache: ExpertCache) -> Matrix:
    """The experts of a matrix that are in the slots."""
    bias = None if of.bias is None else cache.parts[of.bias].target
    layout, data = cache.layouts[of.matrix], cache.parts[of.matrix].target
    return replace(matrix, layout=layout, data=data, bias=bias)


def gather_chosen(at: Lowering, of: Experts, call: MixtureCall, cache: ExpertCache) -> None:
    """Fill the slots of a mixture's matrices with the experts that its rows have chosen, where
    these can be few of all, and are not looked up in the cache."""
    pairs = of.x.rows * of.selection.used
    is_looked_up = pairs <= min(cache.slots, MAX_PAIRS) and not at.takes_gemm(of.x.rows)
    if (
        is_looked_up
        or pairs > min(cache.experts, THREADS)
        or call.selection is not None
        or cache.reader is not None
    ):
        return
    for matrix in cache.layouts:
        to = at.parts.weights.matrix(matrix).data
        kernel, args = cache.gathering(matrix, to, at.limits.sms, pairs)
        at.launch(kernel, f"{call.label}.gather", expert=at.work["expert"], **args)
