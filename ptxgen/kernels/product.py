"""Which kernel multiplies activations with a weight matrix."""

from __future__ import annotations

from typing import Literal

from urdir.ptxgen.kernels.matvec import MAX_BATCH
from urdir.ptxgen.target import Target

#: The largest batch for which ``Matvec`` is taken where either may be, by first architecture.
LAST_MATVEC = ((80, MAX_BATCH), (75, MAX_BATCH))


def choose_product(batch: int, exact: bool, target: str) -> Literal["matvec", "matmul"]:
    """The kernel for ``batch`` activation vectors on ``target`` ("sm_90").

    ``exact`` asks for f32 activations: always "matvec", which takes ``MAX_BATCH`` of them a launch
    (a larger batch in slices). Else "matmul", which rounds activations and weights to f16, from
    the batch on where its tensor cores win. Raises PtxgenError for an unknown target.
    """
    sm = Target.parse(target).sm
    last = next(last for first, last in LAST_MATVEC if sm >= first)
    return "matvec" if exact or batch <= last else "matmul"
