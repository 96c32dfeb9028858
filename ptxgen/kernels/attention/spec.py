"""What all attention kernels have in common: fields, parameters, output."""

from __future__ import annotations

from dataclasses import dataclass

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.attention.heads_out import HeadsOut
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.scores import PLAIN, Scores
from urdir.ptxgen.spec import Access, KernelSpec, Param

#: The most values of a head, of keys and of values.
MAX_HEAD_DIM = 576


@dataclass(frozen=True)
class AttentionSpec(KernelSpec):
    """Attention of ``rows`` query tokens over the KV cache: row r is token ``position[r]`` of
    sequence ``sequence[r]`` and attends to keys up to its own, as ``scores`` says.

    out[r, h] = softmax(scores(q[r, h] . K[s, h / group])) V[s, h / group]. Keys that no row attends
    to are never read. A position from ``max_len`` on marks a padding row, whose results are zeros.
    In a ring, rows look back on at most ``capacity`` keys.
    """

    heads: int
    layout: KvLayout
    rows: int = 1
    scores: Scores = PLAIN

    def __post_init__(self) -> None:
        _check(self)

    @property
    def head_dim(self) -> int:
        """Width of query and key heads."""
        return self.layout.head_dim

    @property
    def value_dim(self) -> int:
        """Values of a head of V, and of the output."""
        return self.layout.values_per_head

    @property
    def group(self) -> int:
        """Query heads of one KV head."""
        return self.heads // self.layout.kv_heads

    @property
    def input_params(self) -> tuple[Param, ...]:
        """q, the caches, and where the rows are."""
        return (
            Param("q", "f32", ("rows", "heads", "head_dim"), Access.IN),
            *self.layout.params(Access.IN),
            Param("sequence", "u32", ("rows",), Access.IN),
            Param("position", "u32", ("rows",), Access.IN),
        )

    @property
    def params(self) -> tuple[Param, ...]:
        return (*self.input_params, *self.scores.params, self.out.param)

    @property
    def out(self) -> HeadsOut:
        """The output."""
        return HeadsOut(self.rows, self.heads, self.value_dim)


def _check(spec: AttentionSpec) -> None:
    layout, scores = spec.layout, spec.scores
    if spec.heads < 1 or spec.heads % layout.kv_heads:
        raise PtxgenError(
            f"{spec.heads} query heads are not a multiple of {layout.kv_heads} KV heads"
        )
    if not 1 <= spec.rows <= 65535:
        raise PtxgenError(f"attention of {spec.rows} rows: 1 to 65535")
    if max(layout.widths) > MAX_HEAD_DIM:
        raise PtxgenError(
            f"attention takes heads of up to {MAX_HEAD_DIM} values: "
            f"head_dim {spec.head_dim}, value_dim {spec.value_dim}"
        )
    if not scores.causal:
        raise PtxgenError("keys after a row's own are those of texts")
    if scores.texts and (layout.sequences > 1 or spec.rows > layout.max_len):
        raise PtxgenError(
            f"texts side by side are one sequence with room for all rows: {spec.rows} rows, "
            f"{layout.sequences} sequences of {layout.max_len}"
        )
    if layout.capacity and not 0 < scores.span <= layout.capacity:
        raise PtxgenError(
            f"rows look back on {scores.span or 'all'} keys, in a ring of {layout.capacity}"
        )
