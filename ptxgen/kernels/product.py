"""Which kernel multiplies activations with a weight matrix."""

from __future__ import annotations

from typing import Literal

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
