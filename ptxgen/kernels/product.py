"""Which kernel multiplies activations with a weight matrix."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from urdir.ptxgen.formats import FORMATS, UNIT, Format
from urdir.ptxgen.kernels._batch_matrix import BLOCK_ROWS
from urdir.ptxgen.kernels.batch_matvec import BatchMatvec
from urdir.ptxgen.kernels.matvec import MAX_BATCH, Activations, Matvec

#: The largest batch for which a matrix-vector product is taken where a matrix product may be.
#: Measured on an H200, Q4_K, microseconds of matvec and matmul at batch 8: 84 and 51 (14336 x
#: 4096), 46 and 62 (4096 x 14336), 17 and 21 (4096 x 4096): even over a layer, where matvec needs
#: fewer launches, and rounds less.
LAST_MATVEC = MAX_BATCH
#: The smallest batch for which ``BatchMatvec`` is taken where ``Matvec`` may be.
FIRST_BATCH_MATVEC = 2


def choose_product(batch: int, exact: bool) -> Literal["matvec", "matmul"]:
    """The kind of kernel for ``batch`` activation vectors: for few of them, or for many.

    ``exact`` asks for f32 activations: always "matvec", which takes ``MAX_BATCH`` of them a launch
    (a larger batch in slices). Else "matmul", which rounds activations and weights to f16, from
    the batch on where its tensor cores win.
    """
    return "matvec" if exact or batch <= LAST_MATVEC else "matmul"


def matvec_of(
    matrices: Sequence[tuple[Format, int]], cols: int, batch: int, exact: bool, sm: int, **form: Any
) -> Matvec | BatchMatvec:
    """The "matvec" for matrices (type, rows) of ``cols`` columns on an sm_``sm``.

    ``form``: the fields of both classes that say what goes with the product. Activations are f32 if
    ``exact`` or where a matrix is not quantised, else 16-bit integers: of several vectors on
    integer tensor cores where there are any.
    """
    (fmt, rows), *others = matrices
    formats = [fmt for fmt, _ in matrices]
    form["others"] = tuple(others)
    if (
        not exact
        and batch >= FIRST_BATCH_MATVEC
        and can_take(formats, [rows for _, rows in matrices], sm)
    ):
        return BatchMatvec(fmt, rows, cols, batch=batch, **form)
    activations: Activations = "f32" if exact or any(fmt.is_float for fmt in formats) else "i16"
    return Matvec(fmt, rows, cols, batch=batch, activations=activations, **form)


def scratch_nbytes(rows: Sequence[int], cols: int, gated: bool = False) -> tuple[int, int]:
    """Bytes of ``partials`` and of ``arrived`` at most, for a launch of matrices of any type.

    ``rows``: of each matrix that shares the ``cols`` activations. Nothing for what none could take.
    """
    if min(rows) < BLOCK_ROWS or cols % UNIT:
        return 0, 0
    fmt = FORMATS["Q8_0"]
    spec = BatchMatvec(
        fmt, rows[0], cols, gated=gated, eps=1e-5, others=tuple((fmt, r) for r in rows[1:])
    )
    return 4 * spec.share_count * spec.total_tiles * spec.record, 4 * spec.total_tiles


def can_take(formats: Sequence[Format], rows: Sequence[int], sm: int) -> bool:
    """Whether ``BatchMatvec`` is written for matrices of these types and rows on an sm_``sm``."""
    return sm >= 80 and min(rows) >= BLOCK_ROWS and not any(fmt.is_float for fmt in formats)
