"""Launches before a mixture that let the next one start before they wait themselves.

What follows such a launch may run beside the one before it, too. All kernels wait before they
write, and before they read what a step has made, with two exceptions: products of experts of a row
read x early, and last products the choice of experts. They follow launches that wait first. Experts
that are cached, and sums of ranks, are left out.
"""

from __future__ import annotations

from itertools import islice

from urdir.model.graph.attention import Attend
from urdir.model.graph.experts import Route
from urdir.model.graph.ops import Norm, Rope
from urdir.model.lower.chain import Chain
from urdir.model.lower.lowering import Lowering

#: From how many rows on queries, keys and values before a mixture start the next launch early; the
#: same of the product that a router follows, and of the router.
HEADS_FROM, OUTPUT_FROM, ROUTER_FROM = 2, 5, 5


def precedes_mixture(at: Lowering) -> bool:
    """Whether experts are chosen before the next attention."""
    return _routes(at, 1) == [True]


def product_starts_next(at: Lowering, chain: Chain) -> bool:
    """Whether a product of several rows starts the next launch early: queries, keys and values of
    attention before a mixture, or the product whose sum's norm a router reads."""
    if not _may(at, chain.rows):
        return False
    following = at.following()
    if chain.residual is None:
        heads = chain.rows >= HEADS_FROM and isinstance(following, Attend | Norm | Rope)
        return heads and len(chain.products) > 1 and _routes(at, 2) == [False, True]
    if chain.rows < OUTPUT_FROM or not isinstance(following, Norm) or following.x is not chain.y:
        return False
    return any(isinstance(op, Route) for op in at.readers(following.y))


def router_starts_next(at: Lowering, rows: int) -> bool:
    """Whether a router whose experts choose for themselves starts their launch early."""
    return _may(at, rows) and rows >= ROUTER_FROM


def _may(at: Lowering, rows: int) -> bool:
    several = rows > 1 and not at.takes_gemm(rows) and not at.rows.prompt
    return several and at.parts.exchange is None and not at.parts.weights.expert_caches


def _routes(at: Lowering, count: int) -> list[bool]:
    """Whether what comes next of attention and routers is a router, of the first ``count``."""
    following = (at.ops[number] for number in range(at.end, len(at.ops)))
    found = (isinstance(op, Route) for op in following if isinstance(op, Attend | Route))
    return list(islice(found, count))
