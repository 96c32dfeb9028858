"""Which kernel multiplies activations with a weight matrix, and what it may take of an SM."""

from __future__ import annotations

from typing import Literal

from urdir.ptxgen.kernels.matvec import MAX_BATCH, SHARED_NBYTES

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


def shared_of_a_cta(per_sm: int, per_cta: int) -> int:
    """Bytes of shared memory that a matvec's CTA may take, static and dynamic together.

    Half of an SM's, so that the next launch's CTA is there (and loads weights) while this one
    works, less 1 KB that the driver keeps of each; but no less than `SHARED_NBYTES`. ``per_sm`` and
    ``per_cta`` are the device's limits.
    """
    return min(per_cta, max(per_sm // 2 - 1024, SHARED_NBYTES))
