"""A transformer layer of the llama family, as launches appended to a plan."""

from __future__ import annotations

from typing import TYPE_CHECKING

from urdir.model.config import Config
from urdir.model.kv_cache import KvCache
from urdir.model.weights import LayerWeights, Matrix
from urdir.ptxgen.kernels.add import Add
from urdir.ptxgen.kernels.attention import Attention
from urdir.ptxgen.kernels.kv_append import KvAppend
from urdir.ptxgen.kernels.rms_norm import RmsNorm
from urdir.ptxgen.kernels.rope import Rope
from urdir.ptxgen.kernels.swiglu import SwiGLU

if TYPE_CHECKING:
    from urdir.driver.memory import Arena, Slice
    from urdir.driver.plan import Plan


def append_rms_norm(
    plan: Plan, label: str, config: Config, x: Slice, weight: Slice, y: Slice
) -> None:
    """y (hidden) = RMSNorm(x) * weight."""
    plan.launch(
        RmsNorm(rows=1, cols=config.hidden, eps=config.rms_eps), label, x=x, weight=weight, y=y
    )


def append_matvec(plan: Plan, label: str, matrix: Matrix, x: Slice, y: Slice) -> None:
    """y (rows) = matrix (rows, cols) times x (cols)."""
    plan.launch(matrix.matvec, label, weights=matrix.data, x=x, y=y)


def append_layer(
    plan: Plan,
    config: Config,
    index: int,
    weights: LayerWeights,
    cache: KvCache,
    position: Slice,
    rope_table: Slice,
    work: Arena,
) -> None:
    """Append layer ``index``: hidden -> hidden, one position, in place in ``work["hidden"]``.

    norm -> Q, K, V -> RoPE -> append to the cache -> attention -> O -> residual -> norm -> SwiGLU
    -> residual. The first residual goes to ``work["residual"]``, because the layer's input and
    output share a buffer.
    """
    c, w, at = config, weights, f"blk.{index}."
    append_rms_norm(plan, at + "attn_norm", c, work["hidden"], w.attn_norm, work["normed"])
    for name, matrix in (("q", w.q), ("k", w.k), ("v", w.v)):
        append_matvec(plan, f"{at}attn_{name}", matrix, work["normed"], work[name])
    plan.launch(
        Rope(
            q_heads=c.n_heads,
            kv_heads=c.n_kv_heads,
            head_dim=c.head_dim,
            rotary_dim=c.rope.dim,
            style=c.rope.style,
            magnitude=c.rope.scaling.magnitude,
        ),
        at + "rope",
        q=work["q"],
        k=work["k"],
        frequencies=rope_table,
        position=position,
    )
    keys, values = cache.keys(index), cache.values(index)
    plan.launch(
        KvAppend(c.n_kv_heads, c.head_dim, cache.max_len, cache.dtype),
        at + "kv_append",
        k=work["k"],
        v=work["v"],
        k_cache=keys,
        v_cache=values,
        position=position,
    )
    plan.launch(
        Attention(c.n_heads, c.n_kv_heads, c.head_dim, cache.max_len, cache.dtype),
        at + "attention",
        q=work["q"],
        k_cache=keys,
        v_cache=values,
        position=position,
        out=work["heads"],
    )
    append_matvec(plan, at + "attn_output", w.o, work["heads"], work["delta"])
    _append_add(plan, at + "attn_residual", c, work["hidden"], work["delta"], work["residual"])
    append_rms_norm(plan, at + "ffn_norm", c, work["residual"], w.ffn_norm, work["normed"])
    append_matvec(plan, at + "ffn_gate", w.gate, work["normed"], work["gate"])
    append_matvec(plan, at + "ffn_up", w.up, work["normed"], work["up"])
    plan.launch(
        SwiGLU(n=c.ffn), at + "swiglu", gate=work["gate"], up=work["up"], y=work["activated"]
    )
    append_matvec(plan, at + "ffn_down", w.down, work["activated"], work["delta"])
    _append_add(plan, at + "ffn_residual", c, work["residual"], work["delta"], work["hidden"])


def _append_add(plan: Plan, label: str, config: Config, a: Slice, b: Slice, y: Slice) -> None:
    plan.launch(Add(n=config.hidden), label, a=a, b=b, y=y)


def workspace_sizes(config: Config) -> dict[str, int]:
    """Bytes of every intermediate of a step, all f32: what ``append_layer`` and the head use."""
    c = config
    elements = {
        "hidden": c.hidden,
        "residual": c.hidden,
        "normed": c.hidden,
        "q": c.n_heads * c.head_dim,
        "k": c.n_kv_heads * c.head_dim,
        "v": c.n_kv_heads * c.head_dim,
        "heads": c.n_heads * c.head_dim,
        "delta": c.hidden,
        "gate": c.ffn,
        "up": c.ffn,
        "activated": c.ffn,
        "logits": c.vocab_size,
    }
    return {name: 4 * n for name, n in elements.items()}
