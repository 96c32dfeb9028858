"""Random inputs of attention: rows, their new tokens, and caches that hold what they attend to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.attention.decode import DecodeAttention
from urdir.ptxgen.kernels.attention.own_token import OwnToken
from urdir.ptxgen.kernels.attention.spec import AttentionSpec
from urdir.ptxgen.kernels.rotation import frequencies, turns_table
from urdir.ptxgen.spec import Access, Array, ceil_div

#: Factor on the queries of one head of random inputs: its scores are spread so widely that the
#: running maximum must be updated and sums rescaled.
STEEP = 4
#: Fill bytes of caches in inputs if nothing may be read: 2 or 3 in every float type.
UNREAD_BYTE = 0x40


def attention_inputs(
    spec: AttentionSpec,
    rng: np.random.Generator,
    positions: list[int],
    sequences: list[int],
    block_table: Array | None = None,
) -> dict[str, Any]:
    """Inputs for given rows, with their new tokens where the kernel has these; results of other
    launches are zeros.

    A paged layout gets a random table where none is given.
    """
    if isinstance(spec, DecodeAttention) and spec.token is not None:
        inputs = _token_inputs(spec, spec.token, rng, positions, sequences, block_table)
    else:
        inputs = _cached_inputs(spec, rng, positions, sequences, block_table)
    for param in spec.params:
        if param.name == "count":
            inputs["count"] = np.uint32(spec.rows)
        elif param.access is Access.INOUT:
            zeros = np.zeros(spec.shape_of(param), param.numpy_dtype)
            inputs.setdefault(param.name, zeros)
    return inputs | spec.out.before(rng)


def rows_of_decode(spec: DecodeAttention, rng: np.random.Generator) -> dict[str, Any]:
    """Rows at random places of the sequences, of several one idle; one head is steep. Or texts."""
    if spec.scores.texts:
        return rows_of_texts(spec, rng)
    max_len = spec.layout.max_len
    positions = [int(p) for p in rng.integers(0, max_len, spec.rows)]
    positions[0] = min(max_len - 1, positions[0] + max_len // 2)
    if spec.rows > 1:
        positions[-1] = max_len + int(rng.integers(0, 2)) * 1000
    sequences = [r % spec.layout.sequences for r in range(spec.rows)]
    inputs = attention_inputs(spec, rng, positions, sequences)
    for name in ("q_rotated", "q_absorbed") if spec.is_latent else ("q",):
        inputs[name][:, -1] *= STEEP
    return inputs


def rows_of_prompt(spec: AttentionSpec, rng: np.random.Generator) -> dict[str, Any]:
    """A chunk at a random place of a random sequence, often with trailing padding rows; or
    texts."""
    if spec.scores.texts:
        return rows_of_texts(spec, rng)
    max_len = spec.layout.max_len
    live = min(int(rng.integers(ceil_div(spec.rows, 2), spec.rows + 1)), max_len)
    start = int(rng.integers(0, max_len - live + 1))
    positions = [start + r if r < live else max_len + 1000 * r for r in range(spec.rows)]
    sequence = int(rng.integers(0, spec.layout.sequences))
    return attention_inputs(spec, rng, positions, [sequence] * spec.rows)


def _cached_inputs(
    spec: AttentionSpec,
    rng: np.random.Generator,
    positions: list[int],
    sequences: list[int],
    block_table: Array | None,
) -> dict[str, Any]:
    """Each cache holds what the rows attend to, and NaN beyond; queries of padding rows are NaN."""
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


def rows_of_texts(spec: AttentionSpec, rng: np.random.Generator) -> dict[str, Any]:
    """The rows of random texts side by side, often with padding rows."""
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
    inputs = attention_inputs(spec, rng, positions, [0] * spec.rows)
    return inputs | {"begin": np.concatenate([begin, idle])}


def rows_of_drafts(spec: DecodeAttention, rng: np.random.Generator) -> dict[str, Any]:
    """Of each sequence a token and drafts of the next ones, of which some are idle."""
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
    return attention_inputs(spec, rng, positions[: spec.rows], sequences[: spec.rows])


def _token_inputs(
    spec: DecodeAttention,
    token: OwnToken,
    rng: np.random.Generator,
    positions: list[int],
    sequences: list[int],
    block_table: Array | None,
) -> dict[str, Any]:
    """`_cached_inputs` of rows with a token. With one that is appended, the caches hold what is
    older than the rows, and a table made here shares no page.

    Keys and values are chosen so that the cache holds them exactly once they are prepared: the
    error of a sine then does not decide how they are rounded.
    """
    layout = spec.layout
    if layout.is_paged and block_table is None:
        pages = rng.permutation(layout.pages)[: layout.sequences * layout.blocks]
        block_table = pages.astype(np.uint32).reshape(layout.sequences, layout.blocks)
    inputs = _cached_inputs(spec, rng, positions, sequences, block_table)
    if spec.rope:
        inputs["frequencies"] = turns_table(frequencies(spec.rope.rotary_dim, 10000.0)[0])
    for name in token.weights:
        shape = spec.shape_of(spec.param(name))
        inputs[name] = rng.uniform(0.5, 1.5, shape).astype(np.float32)
    if spec.appends:
        inputs = _with_new_tokens(spec, token, rng, inputs)
    return _in_parts(spec, inputs) if spec.is_latent else inputs


def _with_new_tokens(
    spec: DecodeAttention, token: OwnToken, rng: np.random.Generator, inputs: dict[str, Any]
) -> dict[str, Any]:
    """The inputs with the rows' keys and values, and caches of what is older."""
    layout, lengths = spec.layout, [0] * spec.layout.sequences
    positions, sequences = inputs["position"].tolist(), inputs["sequence"].tolist()
    for sequence, position in zip(sequences, positions, strict=True):
        if position < layout.max_len:
            lengths[sequence] = position
    for name, cache in layout.caches.items():
        inputs[name] = cache.random_cache(rng, lengths, inputs.get("block_table"), UNREAD_BYTE)
    for param, cache in zip(layout.token_params, layout.caches.values(), strict=True):
        own = rng.standard_normal((spec.rows, cache.kv_heads, cache.head_dim))
        for row, position in enumerate(positions):
            stored = cache.rounded(own[row])
            own[row] = np.nan
            if position < layout.max_len:
                own[row] = token.origin_of(param.name, stored, position, inputs)
        inputs[param.name] = own.astype(np.float32)
    return inputs


def _in_parts(spec: DecodeAttention, inputs: dict[str, Any]) -> dict[str, Any]:
    """The same with the parts of q and k."""
    at, q = spec.layout.value_start, inputs.pop("q")
    parts = {"q_rotated": q[..., :at], "q_absorbed": q[..., at:]}
    if spec.appends:
        k = inputs.pop("k")
        parts |= {"k_rotated": k[:, 0, :at], "latent": k[:, 0, at:]}
    return inputs | {name: np.ascontiguousarray(part) for name, part in parts.items()}
