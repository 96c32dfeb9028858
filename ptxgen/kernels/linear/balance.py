"""How many tiles of each of a launch's matrices a CTA takes."""

from __future__ import annotations

from collections.abc import Sequence

from urdir.ptxgen.spec import ceil_div


def balanced(bands: Sequence[int], costs: Sequence[int], ctas: int) -> tuple[int, ...]:
    """How many tiles of each matrix a CTA takes, so that the last of ``ctas`` CTAs ends as early as
    possible. ``bands``: tiles of 16 rows of each matrix; ``costs``: how long a tile takes.

    If there are fewer CTAs than matrices, the same number of each.
    """

    def suffice(tiles: Sequence[int]) -> bool:
        return 0 not in tiles and sum(map(ceil_div, bands, tiles)) <= ctas

    times = {
        n * cost for count, cost in zip(bands, costs, strict=True) for n in range(1, count + 1)
    }
    for time in sorted(times):
        tiles = [time // cost for cost in costs]
        if not suffice(tiles):
            continue
        for i in range(len(tiles)):  # CTAs that are left over
            while suffice(fewer := [*tiles[:i], tiles[i] - 1, *tiles[i + 1 :]]):
                tiles = fewer
        return tuple(tiles)
    return (ceil_div(sum(bands), ctas),) * len(bands)
