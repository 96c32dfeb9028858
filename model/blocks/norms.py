"""Norms as launches of their own: after a network, of heads, and of the stream."""

from __future__ import annotations

from typing import TYPE_CHECKING

from urdir.model.blocks.linear import Activations
from urdir.model.blocks.parts import LayerStep
from urdir.model.memory.weights import NormWeights
from urdir.ptxgen.kernels.normalise import Normalise

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.driver.plan import Plan


def append_norm(
    at: LayerStep,
    label: str,
    x: Slice,
    norm: NormWeights | None,
    residual: Slice | None,
    y: Slice,
    then: NormWeights | None = None,
) -> Activations:
    """y = residual + norm(x), or norm(x) alone, of the stream's rows (rows, hidden); the norm
    ``then`` of y is made in the same launch where it is given."""
    assert norm is not None
    normed = None if then is None else at.work["normed"]
    kernel = Normalise(
        at.rows.count,
        at.parts.config.hidden,
        norm.norm,
        residual=residual is not None,
        then=None if then is None else then.norm,
    )
    arguments = {
        "weight": norm.weight,
        "bias": norm.bias,
        "residual": residual,
        "next_weight": then and then.weight,
        "next_bias": then and then.bias,
        "z": normed,
    }
    given = {name: value for name, value in arguments.items() if value is not None}
    at.plan.launch(kernel, at.name(label), x=x, y=y, **given)
    return Activations(y, norm=then, normed=normed)


def append_stream_norm(
    plan: Plan, label: str, rows: int, cols: int, x: Slice, norm: NormWeights, y: Slice
) -> None:
    """y = norm(x), (rows, cols)."""
    given = {n: v for n, v in (("weight", norm.weight), ("bias", norm.bias)) if v is not None}
    plan.launch(Normalise(rows, cols, norm.norm), label, x=x, y=y, **given)


def append_head_norm(at: LayerStep, label: str, x: Slice, norm: NormWeights, heads: int, dim: int,
                     weight_rows: int = 1) -> None:
    """The norm of every head of x (rows, heads, dim), in place; with ``weight_rows`` the heads have
    weights of their own."""
    given = {n: v for n, v in (("weight", norm.weight), ("bias", norm.bias)) if v is not None}
    kernel = Normalise(at.rows.count * heads, dim, norm.norm, weight_rows=weight_rows)
    at.plan.launch(kernel, at.name(label), x=x, y=x, **given)
