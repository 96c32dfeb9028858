"""Chunked recurrences in numpy: what is prepared of chunks, and what states make of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import accumulate
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.recurrent.chunks import RecurrentChunks
from urdir.ptxgen.kernels.recurrent.heads_reference import heads_of, log_decays
from urdir.ptxgen.kernels.recurrent.prepared_layout import BLOCK, CHUNK, PADDING
from urdir.ptxgen.spec import Access, Array

#: A logarithm whose power of 2 is 0 in f32.
LOWEST = -160.0


def prepared_chunks(spec: RecurrentChunks, inputs: Mapping[str, Any]) -> dict[str, Array]:
    """``tiles``, ``squares`` and ``numbers`` of all chunks."""
    params = spec.prepared_params(Access.INOUT)
    made = {p.name: inputs[p.name].astype(np.float64) for p in params}
    q, k = (heads_of(spec.rule, inputs, name) for name in "qk")
    log, mix = log_decays(spec.rule, inputs)
    log = np.maximum(log, LOWEST * np.log(2.0))
    if spec.rule.delta:
        mix = 1.0 / (1.0 + np.exp(-inputs["beta"].astype(np.float64)))[:, :, None]
    for slot, rows, _ in chunks_of(inputs):
        for head in range(spec.rule.heads):
            tokens = (_whole(x[rows.start : rows.stop, head]) for x in (q, k, log, mix))
            tiles, squares, numbers = _chunk(spec, *tokens)
            padding = ((0, 0), (0, 0), (0, PADDING))
            made["tiles"][slot, spec.tile_head(head)] = np.pad(tiles, padding)
            made["squares"][slot, head] = [spec.prepared.to_blocks(square) for square in squares]
            made["numbers"][slot, head] = np.concatenate(numbers)
    return {p.name: made[p.name].astype(p.numpy_dtype) for p in params}


def _chunk(
    spec: RecurrentChunks, q: Array, k: Array, log: Array, mix: Array
) -> tuple[list[Array], list[Array], list[Array]]:
    """Tiles, squares and numbers of a chunk of a head, f64."""
    sums, eps = np.cumsum(log, 0), max(spec.rule.eps, 1e-30)
    kk, qq = (np.sqrt(np.sum(x * x, 1, keepdims=True) + eps) for x in (k, q))
    k, q, before, after = k / kk, q / qq, np.exp(sums), np.exp(sums[-1] - sums)
    # (tokens, earlier tokens, keys or 1)
    seen = np.tril(np.ones((CHUNK, CHUNK)))
    decay = np.exp(np.minimum(sums[:, None] - sums, 0.0)) * seen[:, :, None]
    scores = np.sum(q[:, None] * k * decay, 2)
    tiles, squares = [k, q], [scores]
    if spec.rule.delta:
        squares.append(_solution(-mix * np.sum(k[:, None] * k * decay, 2)))
    of_w = mix if spec.rule.delta else mix * kk
    of_y = np.full_like(qq, spec.rule.scale) if spec.rule.delta else qq
    if spec.rule.channels:
        tiles = [k * before, q * before, k * after]
        return (
            tiles,
            squares,
            [of_w[:, 0], of_y[:, 0], before[-1], np.full(4, before[-1].max())],
        )
    return tiles, squares, [x[:, 0] for x in (before, after, of_w, of_y)]


def moved_states(spec: RecurrentChunks, inputs: Mapping[str, Any]) -> dict[str, Array]:
    """``state`` and ``y`` of what is prepared."""
    states = inputs["state"].astype(np.float64)
    y = np.zeros((spec.rows, spec.rule.heads, spec.rule.value_dim))
    v = heads_of(spec.rule, inputs, "v")
    for slot, rows, _ in chunks_of(inputs):
        sequence, tokens = inputs["sequence"][rows.start], slice(rows.start, rows.stop)
        if inputs["position"][rows.start] == 0:
            states[sequence] = 0.0
        for head in range(spec.rule.heads):
            values = np.pad(v[tokens, head], ((0, CHUNK - len(rows)), (0, 0)))
            state = states[sequence, head]
            result, states[sequence, head] = _move(spec, inputs, slot, head, values, state)
            y[tokens, head] = result[: len(rows)]
        if spec.rule.skip_params:
            y[tokens] += inputs["skip"][:, None] * v[tokens]
    return {"state": states.astype(np.float32), "y": y.astype(np.float32)}


def _move(
    spec: RecurrentChunks, inputs: Mapping[str, Any], slot: int, head: int, v: Array, state: Array
) -> tuple[Array, Array]:
    """Results of a chunk's tokens, and the state after them, f64."""
    tiles = inputs["tiles"][slot, spec.tile_head(head)].astype(np.float64)
    squares = [spec.prepared.of_blocks(square) for square in inputs["squares"][slot, head]]
    ends = list(accumulate(spec.prepared.numbers.values()))[:-1]
    parts = np.split(inputs["numbers"][slot, head].astype(np.float64), ends)
    numbers = dict(zip(spec.prepared.numbers, parts, strict=True))
    keys, queries = tiles[:2, :, : spec.rule.key_dim]
    left, decay = tiles[-1, :, : spec.rule.key_dim], numbers.get("decay")
    read, owed = queries @ state.T, keys @ state.T
    if not spec.rule.channels:
        before = numbers["before"][:, None]
        read, owed = before * read, before * owed
        left, decay = numbers["after"][:, None] * keys, before[-1]
    w = numbers["of_w"][:, None] * (v - owed if spec.rule.delta else v)
    for i in range(0, CHUNK, BLOCK) if spec.rule.delta else ():
        own = slice(i, i + BLOCK)
        w[own] += squares[1][own, :i] @ w[:i]
        w[own] = squares[1][own, own] @ w[own]
    return numbers["of_y"][:, None] * (read + squares[0] @ w), decay * state + w.T @ left


def chunks_of(inputs: Mapping[str, Any]) -> Iterator[tuple[int, range, int]]:
    """The place of each chunk, its rows and the segment."""
    for index, (first, end) in enumerate(inputs["segment"].tolist()):
        for i, row in enumerate(range(first, end, CHUNK)):
            yield first // CHUNK + index + i, range(row, min(row + CHUNK, end)), index


def _whole(tokens: Array) -> Array:
    """Pad a chunk with zeros for missing tokens."""
    return np.pad(tokens, ((0, CHUNK - len(tokens)), (0, 0)))


def _solution(system: Array) -> Array:
    """(I - A)^-1 of blocks on the diagonal, and A below these."""
    solution = np.tril(system, -1)
    for i in range(0, CHUNK, BLOCK):
        own = np.s_[i : i + BLOCK, i : i + BLOCK]
        solution[own] = np.linalg.inv(np.eye(BLOCK) - solution[own])
    return solution
