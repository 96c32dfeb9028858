"""The beginning of a step: the stream of its rows' tokens, as launches appended to a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from urdir.model.blocks.activations import Activations
from urdir.model.blocks.parts import linear_layers
from urdir.model.families.description import LayerEmbeddings
from urdir.model.lower.parts import StepParts
from urdir.model.memory.weights import Matrix
from urdir.model.memory.workspace import saved
from urdir.ptxgen.kernels.add import Add
from urdir.ptxgen.kernels.embedding import Embedding
from urdir.ptxgen.kernels.normalise import Normalise
from urdir.ptxgen.kernels.rescale import Rescale

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.driver.plan import Plan
    from urdir.model.lower.rows import Rows


def append_embedding(plan: Plan, parts: StepParts, rows: Rows) -> Activations:
    """Append what the stream begins as (`Config`); the result is in the workspace."""
    config, weights, work = parts.config, parts.weights, parts.work
    table, x = weights.matrix(config.embedding), work["hidden"]
    _append_rows_of(plan, parts, rows, "token_embd", table, x, config.embedding_scale)
    if config.embedding_norm is not None:
        norm = weights.norm(config.embedding_norm)
        made = linear_layers(parts, plan, rows).append_norm(
            "token_embd_norm", config.hidden, Activations(x), norm, work["residual"]
        )
        assert made.normed is not None
        x = made.normed
    if config.layer_embeddings is not None:
        _append_layer_embeddings(plan, parts, rows, config.layer_embeddings, x)
    if config.saves is not None:
        values = rows.count * config.hidden
        plan.launch(Rescale(values), f"saves.{config.saves}", x=x, y=work[saved(config.saves)])
    if config.adds is not None:
        kernel = Add(rows.count * config.hidden, width=config.hidden)
        plan.launch(kernel, "adds", a=x, b=weights.vector(config.adds), y=work["sum"])
        x = work["sum"]
    return Activations(x)


def _append_rows_of(
    plan: Plan, parts: StepParts, rows: Rows, label: str, table: Matrix, y: Slice, scale: float
) -> None:
    """y (rows, cols) = scale * the rows' tokens' rows of a table, plus those of their positions in
    the table of learned positions, for the stream."""
    state, positions = parts.state, parts.weights.positions
    is_stream = table.cols == parts.config.hidden and positions is not None
    kernel = Embedding(
        table.format,
        table.rows,
        table.cols,
        state.max_len,
        rows=rows.count,
        sequences=state.sequences,
        scale=scale,
        positions=positions.nbytes // (4 * table.cols) if is_stream and positions else 0,
    )
    learned = {"position_table": positions} if is_stream and positions else {}
    plan.launch(
        kernel, label, weights=table.data, tokens=state["tokens"], y=y, **rows.arguments, **learned
    )


def _append_layer_embeddings(
    plan: Plan, parts: StepParts, rows: Rows, of: LayerEmbeddings, x: Slice
) -> None:
    """work["layer embeddings"] (rows, layers, width): see `LayerEmbeddings`."""
    weights, work = parts.weights, parts.work
    own, projected = work["layer embeddings"], work["layer projections"]
    table, scale = weights.matrix(of.table), of.scale * of.input_scale
    _append_rows_of(plan, parts, rows, "per_layer_token_embd", table, own, scale)
    linear = linear_layers(parts, plan, rows)
    proj = weights.matrix(of.proj)
    linear.append("per_layer_model_proj", [(proj, projected)], Activations(x), scale=of.proj_scale)
    norm = weights.norm(of.norm)
    kernel = Normalise(
        rows.count * proj.rows // of.width,
        of.width,
        norm.norm,
        residual=True,
        scale=of.input_scale,
    )
    given = {n: v for n, v in (("weight", norm.weight), ("bias", norm.bias)) if v is not None}
    plan.launch(kernel, "per_layer_proj_norm", x=projected, residual=own, y=own, **given)
