"""What the kernels of decode attention have in common: rows with new tokens, packed output."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.head_tiles import MAX_TILE, HeadTiles
from urdir.ptxgen.kernels.attention.heads_out import HeadsOut
from urdir.ptxgen.kernels.attention.own_token import OwnToken
from urdir.ptxgen.kernels.attention.spec import AttentionSpec
from urdir.ptxgen.kernels.rotation import MAX_POSITIONS, Rotation
from urdir.ptxgen.spec import Access, Param, Tolerance
from urdir.ptxgen.target import Target
from urdir.ptxgen.weights.layout import TILE_COLS
from urdir.ptxgen.weights.packed import GROUP
from urdir.ptxgen.weights.packed_few import Order


@dataclass(frozen=True)
class DecodeAttention(AttentionSpec):
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

    A CTA takes some of the query heads that share a KV head, at most ``most_heads`` (a power of two
    up to `MAX_TILE`): fewer make more CTAs, each of which reads K and V. A head's result does not
    depend on other heads in its CTA; but a single head of a single row is multiplied differently.

    From sm_80 on tensor cores multiply where they can (`decode_tiles`), with queries and weights as
    the sum of two 16-bit floats. With quants as keys, queries are, per 32 dims, the sum of two
    8-bit integers times scales; with quants as values, weights times scales of values are a 16-bit
    float. Weights times scales are finite for values up to 16,000. Scaled queries of f16 operands
    become infinite from 65,536 on, and an infinity in a key makes NaN. Otherwise a lane group takes
    a key, a lane eight of its dims (two or three times eight above 256 dims); values contained in
    keys are read once.

    With ``packs`` the output has the form that the next product takes: rows of heads * value_dim
    values as packed f16 (`weights.packed`), or up to eight rows as few packed vectors in that
    ``order`` (`weights.packed_few`), of which those beyond the rows stay as they were; see
    `can_pack`.
    """

    token: OwnToken | None = None
    most_heads: int = MAX_TILE
    packs: bool = False
    order: Order = "units"

    #: Possible maximum numbers of heads per CTA.
    heads_of_cta: ClassVar[tuple[int, ...]] = (1, 2, MAX_TILE)
    #: Whether a CTA takes a chunk of a row's keys, possibly without the row's new token.
    splits_keys: ClassVar[bool] = False
    #: Whether queries may come in MLA's two parts without a key that is appended.
    takes_queries_in_parts: ClassVar[bool] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        _check_token(self)
        if self.most_heads not in self.heads_of_cta:
            raise PtxgenError(f"most_heads {self.most_heads}: one of {self.heads_of_cta}")
        if self.packs and not self.can_pack:
            raise PtxgenError(
                f"attention packs up to {GROUP} rows, or groups of as many, of multiples of "
                f"{TILE_COLS} values, not {self.rows} with {self.heads} heads of {self.value_dim}"
            )

    @property
    def head_tiles(self) -> HeadTiles:
        """How heads are divided among CTAs."""
        raise NotImplementedError

    # ---- the rows' new tokens ----

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
    def waits_for_dependencies(self) -> bool:  # type: ignore[override]
        """Not where the launch just before has chosen the keys and the table is read before the
        wait, as by kernels that append tokens."""
        return not (self.layout.is_chosen and self.appends)

    # ---- parameters ----

    @property
    def input_params(self) -> tuple[Param, ...]:
        """q, the caches, the rows' positions; with a token also its parameters."""
        if self.token is None:
            return super().input_params
        return (
            *self.token.head_params(self.layout),
            *self.token.constant_params(self.heads, self.layout.kv_heads),
            # A token of a cache is written, others are preserved: INOUT, not OUT.
            *self.layout.params(Access.INOUT if self.appends else Access.IN),
            *super().input_params[-2:],
        )

    @property
    def can_pack(self) -> bool:
        """Whether ``packs`` is supported: unused places would not be cleared."""
        whole = self.rows <= GROUP or self.rows % GROUP == 0
        return whole and self.heads * self.value_dim % TILE_COLS == 0

    @property
    def out(self) -> HeadsOut:
        order = self.order if self.packs and self.rows <= GROUP else None
        return HeadsOut(self.rows, self.heads, self.value_dim, self.packs, order)

    # ---- what it costs ----

    def resident_on(self, target: Target) -> int:
        """Resident CTAs per SM: two for wide heads or quants on tensor cores, where the assembler
        would otherwise use more registers. Not if some would not fit: before sm_90, with the sums
        of more than 256 values, with scales of more than 128."""
        is_quants = any(of.is_scaled for of in self.layout.formats)
        takes_more = is_quants or max(self.layout.widths) > 128
        fits = target.sm >= 90 and self.value_dim <= (128 if is_quants else 256)
        tiles = self.head_tiles
        return 2 if takes_more and fits and tiles.rows == 1 and tiles.tensor_cores else 0

    @property
    def tolerance(self) -> Tolerance:
        return _tolerance(self).rounded_to("f16") if self.packs else _tolerance(self)

    @property
    def longest(self) -> int:
        """Maximum number of keys that a row attends to."""
        return min(self.scores.span or self.layout.max_len, self.layout.max_len)

    def flops(self) -> int:
        """At full length: two products and about eight operations of softmax per key."""
        return self.rows * self.heads * self.longest * (2 * sum(self.layout.widths) + 8)


def _check_token(spec: DecodeAttention) -> None:
    token, layout, rope = spec.token, spec.layout, spec.rope
    if (rope or spec.scores.max_bias) and layout.max_len > MAX_POSITIONS:
        raise PtxgenError(f"RoPE positions are exact below 2^24: max_len {layout.max_len}")
    if token is None:
        return
    if spec.scores.texts:
        raise PtxgenError("rows of texts are appended before they attend")
    if spec.is_latent and not (spec.appends or spec.takes_queries_in_parts):
        raise PtxgenError(f"{spec.name}: heads of a latent vector are appended")
    if rope and rope.rotary_dim > spec.head_dim:
        raise PtxgenError(f"rotary_dim {rope.rotary_dim} of a head_dim of {spec.head_dim}")
    if spec.appends and layout.values_in_keys:
        turned = rope.rotary_dim if rope else 0
        if token.qk_norm or token.v_norm or turned > layout.value_start:
            raise PtxgenError("values that are the end of keys are neither normed nor rotated")
    if spec.is_latent and not (layout.values_in_keys and layout.kv_heads == 1):
        raise PtxgenError("a latent vector is the value in the key of a single KV head")


def _tolerance(spec: DecodeAttention) -> Tolerance:
    """Allowed deviation of f32 outputs, relative to the largest.

    The inputs are the cache's own values: the rest is f32 arithmetic and ex2.approx (2^-22
    relative). On tensor cores queries and weights are the sum of two f16 (2^-22) or two bf16
    (2^-16); weights times scales of quants are rounded to f16, queries of quants to 2^-16 of the
    largest of 32 dims. Of weights times scales of heads low parts may be subnormal: an error of
    2^-25, of weights from 2^4 on times scales. A soft-cap adds the error of tanh (4e-7) times the
    cap. A rope adds the error of sines (2^-20.5) in every term of a score; a norm or a temperature
    that of its factor (2^-22), ALiBi that of its slope, times the distance of keys that still
    matter.
    """
    scores, token, rope = spec.scores, spec.token, spec.rope
    turned = 3e-5 * max(1.0, rope.magnitude) ** 2 if rope else 0.0
    factor = 1e-5 if token and (token.qk_norm or token.temperature) else 0.0
    slope = 1e-5 if scores.max_bias else 0.0
    errors = {"bf16": 4 * 2.0**-16, "s8": 2.0**-11}
    parts = max(errors.get(of.operand, 0.0) for of in spec.layout.formats)
    products = parts if spec.head_tiles.tensor_cores else 0.0
    return Tolerance(rtol=5e-6 + 4e-7 * scores.softcap + turned + factor + slope + products)
