"""What CTAs that split a row's keys leave for each other, in numpy."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from urdir.ptxgen.kernels.attention.chunk_cut import ChunkCut
from urdir.ptxgen.kernels.attention.reference import softmax
from urdir.ptxgen.kernels.attention.spec import AttentionSpec
from urdir.ptxgen.spec import Array


def sums_of_chunks(
    spec: AttentionSpec, cut: ChunkCut, run: int, inputs: dict[str, Array]
) -> dict[str, Array]:
    """``partial``, ``softmax`` and ``arrived`` after a launch. The chunks of each row are those of
    the row whose read of keys it shares; the last one also has the row's later keys."""
    first_rows = np.arange(spec.rows) - places_in_runs(spec, run, inputs)
    chunks = [chunks_of(spec, cut, at) for at in inputs["position"][first_rows].tolist()]
    partial, tops = inputs["partial"].copy(), inputs["softmax"].copy()
    for row, position in enumerate(inputs["position"].tolist()):
        seen = spec.scores.first_key(position)
        for index, keys in enumerate(chunks[row]):
            is_last = index == len(chunks[row]) - 1
            first, last = max(seen, keys[0]), position if is_last else keys[-1]
            if first > last:  # a chunk of which this row sees nothing
                tops[row, :, index] = np.finfo(np.float32).min, 0
                partial[row, :, index] = 0
                continue
            top, total, values = softmax(spec, inputs, row, first, last)
            tops[row, :, index] = np.stack([top, total], axis=1)
            partial[row, :, index] = values
    arrived = np.zeros_like(inputs["arrived"])
    return {"partial": partial, "softmax": tops, "arrived": arrived}


def chunks_of(spec: AttentionSpec, cut: ChunkCut, position: int) -> list[range]:
    """The chunks of a row at ``position``; none for a padding row, or if not split."""
    if position >= spec.layout.max_len:
        return []
    return cut.ranges(spec.scores.first_key(position), position + 1)


def places_in_runs(spec: AttentionSpec, run: int, inputs: dict[str, Array]) -> Array:
    """For each row, how many rows before it share its read of keys: consecutive tokens of a
    sequence do, up to ``run``."""
    places = np.zeros(spec.rows, np.int64)
    rows = zip(inputs["sequence"].tolist(), inputs["position"].tolist(), strict=True)
    for row, ((before, last), (sequence, position)) in enumerate(pairwise(rows), 1):
        if (sequence, position) == (before, last + 1) and position < spec.layout.max_len:
            places[row] = places[row - 1] + 1
    return places % run
