"""The buffers that mixtures of experts need."""

from __future__ import annotations

from collections.abc import Iterable

from urdir.ptxgen.kernels.experts.gemm import tile_height
from urdir.ptxgen.kernels.experts.selection import Selection
from urdir.ptxgen.kernels.experts.spec import MAX_USED
from urdir.ptxgen.kernels.linear.choice import takes_gemm
from urdir.ptxgen.kernels.linear.spec import MAX_BATCH
from urdir.ptxgen.kernels.pairs import most_places, most_tiles
from urdir.ptxgen.weights.packed import GROUP, packed_nbytes


def mixture_workspace(
    selection: Selection, width: int, hidden: int, rows: int, exact: bool
) -> dict[str, int]:
    """Bytes of the buffers that mixtures of this shape use, for steps of up to ``rows``.

    "experts arrived" must be filled with zeros once; launches leave it so.
    """
    pairs = rows * selection.used
    sizes = {
        "experts arrived": 4 * rows,
        "router logits": 4 * rows * selection.experts,
        "expert": 4 * pairs,
        "expert weight": 4 * pairs,
        "expert gate": 4 * pairs * width,
        "expert up": 4 * pairs * width,
    }
    if not exact:
        # of steps of few rows: up to MAX_USED products of a row
        sizes["expert out"] = 4 * min(rows, MAX_BATCH) * MAX_USED * hidden
    if takes_gemm(rows, exact):
        # Packed vectors take the place of products: before them, and between them.
        places = most_places(rows, selection.experts, selection.used, GROUP)
        sizes["expert pair"] = 4 * places
        sizes["expert gate"] = max(sizes["expert gate"], packed_nbytes(places, width))
        sizes["expert tiles"] = 16 * max(_tiles(selection, count) for count in range(1, rows + 1))
        vectors = packed_nbytes(places, hidden)
        sizes["expert out"] = max(sizes["expert out"], 4 * pairs * hidden, vectors)
    return sizes


def most_workspace(sizes: Iterable[dict[str, int]]) -> dict[str, int]:
    """The largest of each buffer."""
    most: dict[str, int] = {}
    for each in sizes:
        for name, nbytes in each.items():
            most[name] = max(nbytes, most.get(name, 0))
    return most


def _tiles(selection: Selection, rows: int) -> int:
    height = tile_height(rows, selection.experts, selection.used)
    return most_tiles(rows, selection.experts, selection.used, height)
