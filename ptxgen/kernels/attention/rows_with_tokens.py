"""Attention of rows with optional new tokens: their fields and parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.own_token import OwnToken
from urdir.ptxgen.kernels.attention.random_inputs import cached_inputs, texts_side_by_side
from urdir.ptxgen.kernels.attention.spec import AttentionSpec
from urdir.ptxgen.kernels.rotation import MAX_POSITIONS, Rotation, frequencies, turns_table
from urdir.ptxgen.spec import Access, Array, Param

#: Factor on the queries of one head of random inputs: its scores are spread so widely that the
#: running maximum must be updated and sums rescaled.
STEEP = 4
#: Fill bytes of caches in inputs if nothing may be read: 2 or 3 in every float type.
UNREAD_BYTE = 0x40


@dataclass(frozen=True)
class RowsWithTokens(AttentionSpec):
    """Attention of rows that may belong to different sequences; see AttentionSpec.

    With a ``token``, q comes directly from the products: the kernel prepares it as PrepareTokens
    does. If the token appends, k (rows, kv_heads, head_dim) and v (rows, kv_heads, value_dim) of
    the rows' new tokens are inputs too, without v if it is the end of k, which then is not changed;
    with ``latent_norm`` their parts are. They are prepared and written to the caches as by
    PrepareTokens; neither q nor k is written back. The output is the same bit for bit. Rows must
    then belong to different sequences without shared pages that a row writes to. Older tokens, the
    block table, sequence, position, frequencies and weights are read before
    ``griddepcontrol.wait``: earlier launches of the same graph may write them only if a plain edge
    in between ensures their completion.
    """

    token: OwnToken | None = None
    #: Whether queries may come in MLA's two parts without a key that is appended.
    takes_queries_in_parts: ClassVar = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scores.texts and self.token is not None:
            raise PtxgenError("rows of texts are appended before they attend")
        if self.is_latent and not (self.appends or self.takes_queries_in_parts):
            raise PtxgenError(f"{self.name}: heads of a latent vector are appended")
        if self.rope and self.rope.rotary_dim > self.head_dim:
            raise PtxgenError(f"rotary_dim {self.rope.rotary_dim} of a head_dim of {self.head_dim}")
        if self.appends and self.layout.values_in_keys and not self._values_stay:
            raise PtxgenError("values that are the end of keys are neither normed nor rotated")
        if self.is_latent and not (self.layout.values_in_keys and self.layout.kv_heads == 1):
            raise PtxgenError("a latent vector is the value in the key of a single KV head")
        if (self.rope or self.scores.max_bias) and self.layout.max_len > MAX_POSITIONS:
            raise PtxgenError(f"RoPE positions are exact below 2^24: max_len {self.layout.max_len}")

    @property
    def rope(self) -> Rotation | None:
        """The rotation of queries (and of the rows' new keys)."""
        return self.token.rope if self.token else None

    @property
    def appends(self) -> bool:
        """Whether the rows' new tokens are appended."""
        return self.token is not None and self.token.appends

    @property
    def is_latent(self) -> bool:
        """Whether the rows' new heads come in MLA's two parts."""
        return self.token is not None and self.token.latent_norm is not None

    @property
    def rotated_dim(self) -> int:
        """Values of a key before those that are the value: the first part of two."""
        return self.layout.value_start

    @property
    def _values_stay(self) -> bool:
        """Whether the end of keys that are values is unchanged."""
        token, turned = self.token, self.rope.rotary_dim if self.rope else 0
        is_normed = token is not None and (token.qk_norm or token.v_norm)
        return not is_normed and turned <= self.layout.value_start

    @property
    def keys(self) -> int:
        """Rows attend if their position is below this; from ``max_len`` on they are padding
        rows."""
        return self.layout.max_len

    @property
    def input_params(self) -> tuple[Param, ...]:
        """q, the caches, the rows' positions; with a token also its parameters."""
        if self.token is None:
            return super().input_params
        return (
            *self.token.head_params(self.layout.token_params),
            *self.token.constant_params(self.heads, self.layout.kv_heads),
            # A token of a cache is written, others are preserved: INOUT, not OUT.
            *self.layout.params(Access.INOUT if self.appends else Access.IN),
            Param("sequence", "u32", ("rows",), Access.IN),
            Param("position", "u32", ("rows",), Access.IN),
        )

    def inputs_at(
        self,
        rng: np.random.Generator,
        positions: list[int],
        sequences: list[int],
        block_table: Array | None = None,
    ) -> dict[str, Any]:
        """See AttentionSpec, and `_token_inputs`."""
        if self.token is None:
            return super().inputs_at(rng, positions, sequences, block_table)
        return _token_inputs(self, rng, positions, sequences, block_table)

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Rows at random places of the sequences, of several one idle; one head is steep. Or
        texts."""
        if self.scores.texts:
            positions, begin = texts_side_by_side(self, rng)
            return self.inputs_at(rng, positions, [0] * self.rows) | {"begin": begin}
        max_len = self.layout.max_len
        positions = [int(p) for p in rng.integers(0, max_len, self.rows)]
        positions[0] = min(max_len - 1, positions[0] + max_len // 2)
        if self.rows > 1:
            positions[-1] = max_len + int(rng.integers(0, 2)) * 1000
        sequences = [r % self.layout.sequences for r in range(self.rows)]
        inputs = self.inputs_at(rng, positions, sequences)
        for name in ("q_rotated", "q_absorbed") if self.is_latent else ("q",):
            inputs[name][:, -1] *= STEEP
        return inputs


def _token_inputs(
    spec: RowsWithTokens,
    rng: np.random.Generator,
    positions: list[int],
    sequences: list[int],
    block_table: Array | None,
) -> dict[str, Any]:
    """`cached_inputs` of rows with a token. With one that is appended, the caches hold what is
    older than the rows, and a table made here shares no page.

    Keys and values are chosen so that the cache holds them exactly once they are prepared: the
    error of a sine then does not decide how they are rounded.
    """
    layout, token = spec.layout, spec.token
    assert token is not None
    if layout.is_paged and block_table is None:
        pages = rng.permutation(layout.pages)[: layout.sequences * layout.blocks]
        block_table = pages.astype(np.uint32).reshape(layout.sequences, layout.blocks)
    inputs = cached_inputs(spec, rng, positions, sequences, block_table)
    if spec.rope:
        inputs["frequencies"] = turns_table(frequencies(spec.rope.rotary_dim, 10000.0)[0])
    for name in token.weights:
        shape = spec.shape_of(spec.param(name))
        inputs[name] = rng.uniform(0.5, 1.5, shape).astype(np.float32)
    if spec.appends:
        inputs = _with_new_tokens(spec, token, rng, inputs)
    return _in_parts(spec, inputs) if spec.is_latent else inputs


def _with_new_tokens(
    spec: RowsWithTokens, token: OwnToken, rng: np.random.Generator, inputs: dict[str, Any]
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


def _in_parts(spec: RowsWithTokens, inputs: dict[str, Any]) -> dict[str, Any]:
    """The same with the parts of q and k."""
    at, q = spec.rotated_dim, inputs.pop("q")
    parts = {"q_rotated": q[..., :at], "q_absorbed": q[..., at:]}
    if spec.appends:
        k = inputs.pop("k")
        parts |= {"k_rotated": k[:, 0, :at], "latent": k[:, 0, at:]}
    return inputs | {name: np.ascontiguousarray(part) for name, part in parts.items()}
