"""Which kernel multiplies activations with a weight matrix, and what it may take of an SM."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from urdir.ptxgen.formats import Format
from urdir.ptxgen.kernels._fused_product import SHARED_NBYTES
from urdir.ptxgen.kernels.int8_matvec import WARPS, warps_with_room
from urdir.ptxgen.kernels.matvec import MAX_BATCH

#: The largest batch for which ``Matvec`` is taken where either may be. Measured on an H200, Q4_K,
#: microseconds of matvec and matmul at batch 8: 84 and 51 (14336 x 4096), 46 and 62 (4096 x 14336),
#: 17 and 21 (4096 x 4096): even over a layer, where matvec needs fewer launches, and rounds less.
LAST_MATVEC = MAX_BATCH


def choose_product(batch: int, exact: bool) -> Literal["matvec", "matmul"]:
    """The kernel for ``batch`` activation vectors.

    ``exact`` asks for f32 activations: always "matvec", which takes ``MAX_BATCH`` of them a launch
    (a larger batch in slices). Else "matmul", which rounds activations and weights to f16, from
    the batch on where its tensor cores win.
    """
    return "matvec" if exact or batch <= LAST_MATVEC else "matmul"


def shared_of_a_cta(per_sm: int, per_cta: int, larger: bool) -> tuple[int, int]:
    """Bytes of shared memory that a matvec's CTA takes at least and at most.

    An SM should hold one CTA of a launch, and one of the next, which loads weights meanwhile. So
    the ``larger`` ones take more than half of it, the others what is left: two of a kind meet only
    where the SM is empty otherwise. The driver keeps 1 KB of each. ``per_sm`` and ``per_cta``: the
    device's limits.
    """
    most = max(per_sm * (5 if larger else 4) // 9 - 1024, SHARED_NBYTES)
    return (min(per_cta, per_sm // 2 + 1024) if larger else 0), min(per_cta, most)


def has_room(formats: Iterable[Format], cols: int, shared: int) -> bool:
    """Whether ``Int8Matvec`` is worth taking for rows of ``cols`` columns.

    With ``shared`` bytes for a CTA their activations have to leave room for at least half of its
    warps. ``Matvec`` takes any.
    """
    return warps_with_room(formats, cols, shared) >= WARPS // 2
