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
from urdir.model.graph.recurrent import Recur
from urdir.model.lower.chain import Chain
from urdir.model.lower.lowering import Lowering


def precedes_mixture(at: Lowering) -> bool:
    """Whether experts are chosen before the next layer's attention, or recurrence."""
    following = (op for op in at.ops[at.end :] if isinstance(op, Attend | Recur | Route))
    return isinstance(next(following, None), Route)


def product_starts_next(at: Lowering, chain: Chain) -> bool:
    """Whether a product of several rows starts the next launch early: queries, keys and values of
    attention before a mixture, or the product whose sum's norm a router reads.

    On an H200 a step of 2, 4, 5 and 8 rows of qwen3-30b-a3b takes 1,438, 1,941, 1,641 and 1,817 us
    so, with routers that do it, too; else 1,444, 1,972, 1,679 and 1,867. Of 8 without routers it
    takes 1,861, without Q, K and V 1,825. One of 4 and 8 rows of gpt-oss-20b takes 1,306 and 1,699
    us, else 1,318 and 1,699; of qwen3.5-35b-a3b 1,815 and 2,578, else 1,817 and 2,576.
    """
    if not may_start_next(at, chain.rows):
        return False
    following = at.following()
    if chain.residual is None:
        heads = len(chain.products) > 1 and isinstance(following, Attend | Norm | Rope)
        return heads and _attends_and_routes(at)
    if not isinstance(following, Norm) or following.x is not chain.y:
        return False
    return any(isinstance(op, Route) for op in at.readers(following.y))


def may_start_next(at: Lowering, rows: int) -> bool:
    """Whether launches of that many rows before a mixture may start the next one early."""
    several = rows > 1 and not at.takes_gemm(rows) and not at.rows.prompt
    return several and at.parts.exchange is None and not at.parts.weights.expert_caches


def _attends_and_routes(at: Lowering) -> bool:
    """Whether attention comes next, and experts are chosen before the next one."""
    following = (op for op in at.ops[at.end :] if isinstance(op, Attend | Route))
    return [isinstance(op, Route) for op in islice(following, 2)] == [False, True]
