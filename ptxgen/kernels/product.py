"""Which kernel multiplies activations with a weight matrix."""

from __future__ import annotations

from typing import Literal

#: The largest batch for which ``Matvec`` is taken where either may be. Measured on an H200, Q4_K
#: 14336 x 4096, microseconds of matvec and matmul: 40 and 51 at batch 2, 56 and 51 at 3.
LAST_MATVEC = 2


def choose_product(batch: int, exact: bool) -> Literal["matvec", "matmul"]:
    """The kernel for ``batch`` activation vectors.

    ``exact`` asks for f32 activations: always "matvec", which takes ``MAX_BATCH`` of them a launch
    (a larger batch in slices). Else "matmul", which rounds activations and weights to f16, from
    the batch on where its tensor cores win.
    """
    return "matvec" if exact or batch <= LAST_MATVEC else "matmul"
