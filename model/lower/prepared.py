"""Attention with the norms and the rotation of query and key heads before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from urdir.model.families.attention import Attention
from urdir.model.graph.attention import Attend
from urdir.model.graph.latent import AttendLatent
from urdir.model.graph.op import Op
from urdir.model.graph.ops import Norm, Rope
from urdir.model.graph.tensor import Tensor
from urdir.model.lower.attend import LayerAttention
from urdir.model.lower.lowering import Lowering
from urdir.model.lower.rows import Rows
from urdir.ptxgen.kernels.attention.own_token import OwnToken

if TYPE_CHECKING:
    from urdir.driver.memory import Slice


@dataclass(frozen=True, slots=True)
class Prepared:
    """Attention with what comes before it: norms and rotation of queries and keys."""

    attend: Attend
    norms: tuple[Norm, ...]
    ropes: tuple[Rope, ...]
    rope_first: bool

    @classmethod
    def of(cls, ops: Sequence[Op]) -> Prepared | None:
        """The operations taken apart; None where they are not those of all heads."""
        *before, attend = ops
        assert isinstance(attend, Attend)
        norms = tuple(op for op in before if isinstance(op, Norm))
        ropes = tuple(op for op in before if isinstance(op, Rope))
        whole = 1 if attend.k is None else 2
        if len(norms) not in (0, whole) or len(ropes) not in (0, whole):
            return None
        return cls(attend, norms, ropes, bool(norms) and before[0] in ropes)

    @property
    def sources(self) -> tuple[Tensor | None, ...]:
        """Queries, keys and values as the products leave them, where nothing but a rotation comes
        between."""
        turned = [rope.x for rope in self.ropes]
        given = [self.attend.q, self.attend.k, self.attend.v]
        return (*turned, *given[len(turned) :])

    @property
    def token(self) -> OwnToken | None:
        """What attention itself does to the heads of a row's new token; None if it cannot:
        LayerNorms, norms whose heads have weights of their own, and norms after a rotation that
        changes lengths are launches of their own. A norm without weights commutes with others."""
        attend = self.attend
        token = OwnToken(
            rope=self.ropes[0].rope.rotation if self.ropes else None,
            v_norm=attend.v_norm,
            temperature=attend.temperature,
            appends=attend.k is not None,
        )
        if not self.norms:
            return token
        q, k = self.norms[0].of, self.norms[-1].of
        over_rows = self.norms[0].cols != attend.key_dim or not self.norms[0].over
        if q.norm.kind != "rms" or q.norm.bias or k.norm != q.norm:
            return None
        if self.rope_first and self.ropes[0].rope.rotation.magnitude != 1.0:
            return None
        if over_rows and q.weight is not None and self.rope_first:
            return None
        if not over_rows and q.weight is not None and q.weight.size != attend.key_dim:
            return None
        return replace(
            token,
            qk_norm=q.norm,
            qk_norm_over="row" if over_rows else "head",
            rope_first=self.rope_first and q.weight is not None,
        )

    def constants(self, at: Lowering) -> dict[str, Slice]:
        """Weights that the kernels read, by their names there."""
        found: dict[str, Slice] = {}
        if self.ropes:
            found["frequencies"] = at.parts.weights.rope_tables[self.ropes[0].rope]
        if self.attend.sinks is not None:
            found["sinks"] = at.vector(self.attend.sinks)
        if self.attend.relative is not None:
            found["relative"] = at.parts.weights.biases[self.attend.relative]
        for name, norm in zip(("q_norm", "k_norm"), self.norms, strict=False):
            if norm.of.weight is not None:
                found[name] = at.vector(norm.of.weight)
        return found


def layer_attention(
    at: Lowering, attend: Attend, token: OwnToken, constants: dict[str, Slice]
) -> LayerAttention:
    """What the launches of attention need of a layer."""
    whole = attention_of_rows(at, attend, attend, token, constants)
    return replace(whole, cross=attend.cross)


def attention_of_rows(
    at: Lowering,
    of: Attend | AttendLatent,
    heads: Attend | Attention,
    token: OwnToken,
    constants: dict[str, Slice],
    rows: Rows | None = None,
) -> LayerAttention:
    """The same of ``rows`` (default: all), whose ``heads`` may be others than the operation's."""
    parts = at.parts
    return LayerAttention(
        label=of.label,
        layout=parts.cache.layout(of.layer),
        caches=parts.cache.arguments(of.layer),
        heads=heads.heads,
        rows=rows or at.rows,
        work=at.work,
        token=token,
        scores=heads.scores,
        constants=constants,
        sm_count=at.limits.sms,
        target=at.limits.target,
        exact=at.exact,
    )
