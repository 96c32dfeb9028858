"""Random inputs of attention: caches that hold what given rows attend to, and rows of texts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.attention.reference import Attention
from urdir.ptxgen.spec import Array, ceil_div


def cached_inputs(
    spec: Attention,
    rng: np.random.Generator,
    positions: list[int],
    sequences: list[int],
    block_table: Array | None,
) -> dict[str, Any]:
    """Inputs for given rows: each cache holds what they attend to, and NaN beyond; the queries
    of padding rows are NaN.

    A paged layout gets a random table where none is given.
    """
    layout = spec.layout
    inputs: dict[str, Any] = {}
    if layout.is_paged:
        inputs["block_table"] = layout.random_table(rng) if block_table is None else block_table
    lengths = [0] * layout.sequences
    for sequence, position in zip(sequences, positions, strict=True):
        if position < layout.max_len:
            lengths[sequence] = max(lengths[sequence], position + 1)
    shape = (spec.rows, spec.heads, spec.head_dim)
    inputs["q"] = rng.standard_normal(shape).astype(np.float32)
    inputs["q"][np.array(positions) >= layout.max_len] = np.nan
    for name, cache in layout.caches.items():
        inputs[name] = cache.random_cache(rng, lengths, inputs.get("block_table"))
    if spec.scores.sinks:  # some dominate, some are negligible
        inputs["sinks"] = rng.normal(0, 4, spec.heads).astype(np.float32)
    if spec.scores.relative:
        bias = rng.standard_normal((spec.heads, 2 * spec.scores.relative + 1))
        inputs["relative"] = bias.astype(np.float32)
    inputs["sequence"] = np.array(sequences, np.uint32)
    inputs["position"] = np.array(positions, np.uint32)
    return inputs


def texts_side_by_side(spec: Attention, rng: np.random.Generator) -> tuple[list[int], Array]:
    """Last visible key and first one of each row of random texts, often with padding rows."""
    live = int(rng.integers(ceil_div(spec.rows, 2), spec.rows + 1))
    cuts = np.flatnonzero(rng.random(live) < 0.1)
    edges = np.unique(np.concatenate([[0], cuts, [live]]))
    lengths = np.diff(edges)
    starts, ends = (np.repeat(of, lengths) for of in (edges[:-1], edges[1:]))
    window = int(rng.integers(0, 2)) * int(rng.integers(2, 40))
    kind = replace(spec.scores, texts=False, causal=bool(rng.integers(0, 2)), window=window)
    begin, last = kind.bounds(starts, ends)
    positions = [*last.tolist(), *[spec.layout.max_len + 7] * (spec.rows - live)]
    idle = np.full(spec.rows - live, 0xFFFFFFFF, np.uint32)
    return positions, np.concatenate([begin, idle])


def rows_of_drafts(spec: Attention, rng: np.random.Generator) -> tuple[list[int], list[int]]:
    """Positions and sequences of random rows: of each sequence a token and drafts of the next
    ones, of which some are idle."""
    positions: list[int] = []
    sequences: list[int] = []
    max_len, count = spec.layout.max_len, spec.layout.sequences
    for sequence in range(count):
        left = spec.rows - len(positions) - (count - 1 - sequence)
        rows = left if sequence == count - 1 else int(rng.integers(1, max(2, min(9, left + 1))))
        start = int(rng.integers(max_len // 2, max_len))
        found = int(rng.integers(1, rows + 1))
        own = [start + row for row in range(rows)]
        own = [at if row < found else 2**32 - 1 for row, at in enumerate(own)]
        positions += own
        sequences += [sequence] * rows
    return positions[: spec.rows], sequences[: spec.rows]
