"""A transformer layer of the llama family, as launches appended to a plan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from urdir.model.attention import incremental_attention_async
from urdir.model.config import Config
from urdir.model.decode_state import DecodeState
from urdir.model.kv_cache import KvCache
from urdir.model.rows import Rows
from urdir.model.weights import Matrix, Weights
from urdir.ptxgen.kernels.add import Add
from urdir.ptxgen.kernels.matmul import Matmul
from urdir.ptxgen.kernels.matvec import MAX_BATCH, Matvec
from urdir.ptxgen.kernels.product import choose_product
from urdir.ptxgen.kernels.rms_norm import RmsNorm
from urdir.ptxgen.kernels.rope import Rope
from urdir.ptxgen.kernels.swiglu import SwiGLU

if TYPE_CHECKING:
    from urdir.driver.memory import Arena, Slice
    from urdir.driver.plan import Plan


@dataclass(frozen=True, slots=True)
class StepParts:
    """The owners of everything that a step reads and writes; ``exact`` keeps activations f32."""

    config: Config
    weights: Weights
    cache: KvCache
    state: DecodeState
    work: Arena
    exact: bool


def transformer_layer_workspace(plan: Plan, parts: StepParts, rows: Rows, index: int) -> None:
    """Append layer ``index`` on the workspace: ``work["hidden"]`` (rows, hidden) in and out.

    The first residual goes to ``work["residual"]``, because input and output share a buffer.
    """
    hidden = parts.work["hidden"]
    transformer_layer_indexed(plan, parts, rows, index, hidden, hidden)


def transformer_layer_indexed(
    plan: Plan, parts: StepParts, rows: Rows, index: int, x: Slice, y: Slice
) -> None:
    """Append layer ``index``: x (rows, hidden) f32 -> y (rows, hidden) f32; y may be x.

    norm -> Q, K, V (+ biases) -> QK-norm -> RoPE -> append to the cache -> attention -> O ->
    residual -> norm -> SwiGLU -> residual. Raises LaunchError, naming launch and parameter, for a
    buffer that is null, closed or too small.
    """
    c, w, work = parts.config, parts.weights.layers[index], parts.work
    at = f"blk.{index}."
    append_rms_norm(plan, at + "attn_norm", c, rows.count, x, w.attn_norm, work["normed"])
    for name, matrix in (("q", w.q), ("k", w.k), ("v", w.v)):
        append_product(plan, parts, f"{at}attn_{name}", matrix, rows.count, "normed", name)
    _append_qk_norm(plan, parts, rows, index)
    _append_rope(plan, parts, rows, at + "rope")
    incremental_attention_async(
        plan,
        at + "attention",
        parts.cache,
        index,
        c.n_heads,
        rows,
        work,
        sm_count=parts.weights.device.properties.sm_count,
        exact=parts.exact,
    )
    append_product(plan, parts, at + "attn_output", w.o, rows.count, "heads", "delta")
    width = rows.count * c.hidden
    add = Add(n=width)
    plan.launch(add, at + "attn_residual", a=x, b=work["delta"], y=work["residual"])
    append_rms_norm(
        plan, at + "ffn_norm", c, rows.count, work["residual"], w.ffn_norm, work["normed"]
    )
    append_product(plan, parts, at + "ffn_gate", w.gate, rows.count, "normed", "gate")
    append_product(plan, parts, at + "ffn_up", w.up, rows.count, "normed", "up")
    plan.launch(
        SwiGLU(n=rows.count * c.ffn),
        at + "swiglu",
        gate=work["gate"],
        up=work["up"],
        y=work["activated"],
    )
    append_product(plan, parts, at + "ffn_down", w.down, rows.count, "activated", "delta")
    plan.launch(add, at + "ffn_residual", a=work["residual"], b=work["delta"], y=y)


def append_rms_norm(
    plan: Plan, label: str, config: Config, rows: int, x: Slice, weight: Slice, y: Slice
) -> None:
    """y (rows, hidden) = RMSNorm(x) * weight."""
    kernel = RmsNorm(rows=rows, cols=config.hidden, eps=config.rms_eps)
    plan.launch(kernel, label, x=x, weight=weight, y=y)


def append_product(
    plan: Plan, parts: StepParts, label: str, matrix: Matrix, rows: int, x: str, y: str
) -> None:
    """work[y] (rows, out) = work[x] (rows, in) times the matrix (out, in), plus its bias."""
    layout, source, target = matrix.layout, parts.work[x], parts.work[y]
    bias = {} if matrix.bias is None else {"bias": matrix.bias}
    has_bias = matrix.bias is not None
    if choose_product(rows, parts.exact) == "matmul":
        kernel = Matmul(layout.format, layout.rows, layout.cols, rows, has_bias)
        plan.launch(kernel, label, weights=matrix.data, x=source, **bias, y=target)
        return
    for first in range(0, rows, MAX_BATCH):
        batch = min(MAX_BATCH, rows - first)
        plan.launch(
            Matvec(layout.format, layout.rows, layout.cols, has_bias, batch=batch),
            label if rows <= MAX_BATCH else f"{label} rows {first}",
            weights=matrix.data,
            x=_rows_of(source, first, batch, layout.cols),
            **bias,
            y=_rows_of(target, first, batch, layout.rows),
        )


def _rows_of(matrix: Slice, first: int, count: int, width: int) -> Slice:
    return matrix.slice(4 * first * width, 4 * count * width)


def _append_qk_norm(plan: Plan, parts: StepParts, rows: Rows, index: int) -> None:
    """RMSNorm of every head of Q and K (Qwen3), in place."""
    c, w, work = parts.config, parts.weights.layers[index], parts.work
    for name, weight, heads in (("q", w.q_norm, c.n_heads), ("k", w.k_norm, c.n_kv_heads)):
        if weight is not None:
            kernel = RmsNorm(rows=rows.count * heads, cols=c.head_dim, eps=c.rms_eps)
            label = f"blk.{index}.attn_{name}_norm"
            plan.launch(kernel, label, x=work[name], weight=weight, y=work[name])


def _append_rope(plan: Plan, parts: StepParts, rows: Rows, label: str) -> None:
    c = parts.config
    kernel = Rope(
        q_heads=c.n_heads,
        kv_heads=c.n_kv_heads,
        head_dim=c.head_dim,
        rotary_dim=c.rope.dim,
        style=c.rope.style,
        magnitude=c.rope.scaling.magnitude,
        rows=rows.count,
        max_len=parts.cache.layout.max_len,
    )
    plan.launch(
        kernel,
        label,
        q=parts.work["q"],
        k=parts.work["k"],
        frequencies=parts.weights.rope_table,
        position=rows.position,
    )
