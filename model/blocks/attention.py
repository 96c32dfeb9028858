"""Attention in a plan: queries and keys rotated, keys and values appended, each row attends to its
sequence.

A layer calls ``incremental_attention_into``. When the plan is built, the kernel is chosen from the
shape, the length bucket and the device (``ptxgen.kernels.attention.choice``). In a decode step that
kernel rotates and appends the rows' own tokens itself; the rows of a prompt, which attend to each
other, are appended before.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from urdir.model.blocks.rows import Rows
from urdir.model.memory.kv_cache import KvCache
from urdir.ptxgen.kernels.attention.choice import decode_attention
from urdir.ptxgen.kernels.attention.flash_decode import FlashDecodeChunk
from urdir.ptxgen.kernels.attention.kv_append import KvAppend
from urdir.ptxgen.kernels.attention.prefill_attention import PrefillAttention
from urdir.ptxgen.kernels.rope import Rope
from urdir.ptxgen.kernels.rotation import Rotation

if TYPE_CHECKING:
    from urdir.driver.memory import Region
    from urdir.driver.plan import Plan
    from urdir.ptxgen.kernels.attention.incremental_attention import IncrementalAttention


@dataclass(frozen=True, slots=True)
class LayerAttention:
    """The attention of one layer in one step: what it reads and writes, and how.

    ``work`` holds q (rows, heads, head_dim), k and v (rows, kv_heads, head_dim), all f32, not yet
    rotated by ``rotation`` with ``frequencies`` (a ``turns_table``; without a rotation nothing
    rotates), and room for partial results (`workspace.partial_sizes`). ``exact`` keeps activations
    f32. Without ``fused``, the tokens of decode rows are rotated and appended by launches of their
    own, with the same result.
    """

    label: str
    cache: KvCache
    layer: int
    heads: int
    rows: Rows
    work: Mapping[str, Region]
    rotation: Rotation | None
    frequencies: Region | None
    sm_count: int
    exact: bool = False
    fused: bool = True

    @property
    def arguments(self) -> dict[str, Region]:
        """What kernels over this layer's cache and these rows take, by parameter name."""
        return {**self.cache.arguments(self.layer), **self.rows.arguments}

    @property
    def token(self) -> dict[str, Region]:
        """The rows' own k and v, and the frequencies that k is rotated by."""
        assert self.frequencies is not None
        return {"k": self.work["k"], "v": self.work["v"], "frequencies": self.frequencies}

    def decode_kernel(self, rotation: Rotation | None) -> IncrementalAttention | FlashDecodeChunk:
        """The kernel of decoding, which rotates and appends where a rotation is given."""
        return decode_attention(
            self.heads,
            self.cache.layout(self.layer),
            self.rows.keys,
            self.sm_count,
            rows=self.rows.count,
            rope=rotation,
        )


def incremental_attention_into(plan: Plan, at: LayerAttention, out: Region) -> None:
    """Turn ``at.work``'s q and k, append k and v to the cache and attend into ``out`` (rows, heads,
    head_dim) f32.

    A row at position p attends to positions 0 ... p of its sequence. Works for every length, batch
    and cache; a paged cache is gathered through its block table.
    """
    is_fused = at.fused and at.rotation is not None and not at.rows.is_prompt
    if not is_fused:
        append_tokens(plan, at)
    if at.rows.is_prompt and not at.exact:
        flash_attention_multi_head(plan, at, out)
    else:
        _decode(plan, at, at.decode_kernel(at.rotation if is_fused else None), out)


def flash_decoding_graphed(
    plan: Plan, at: LayerAttention, kernel: FlashDecodeChunk, out: Region
) -> None:
    """Attention of decode rows, split over chunks of keys: two launches, ``kernel``'s and their
    merge. Turns and appends the rows' tokens where ``kernel`` has a rope.

    Partial results go to ``at.work["partial"]`` and ``at.work["softmax"]`` (see
    `workspace.partial_sizes`).
    """
    partial = {name: at.work[name] for name in ("partial", "softmax")}
    token = at.token if kernel.rope else {}
    plan.launch(kernel, f"{at.label}.chunks", q=at.work["q"], **token, **at.arguments, **partial)
    plan.launch(kernel.reduce, at.label, **partial, out=out)


def flash_attention_multi_head(plan: Plan, at: LayerAttention, out: Region) -> None:
    """Causal attention of consecutive tokens of one sequence (a prompt or a chunk of one), whose
    keys and values are in the cache: tiled, on tensor cores, without a matrix of scores.

    Queries are rotated already; ``out`` is (rows, heads, head_dim) f32.
    """
    kernel = PrefillAttention(at.heads, at.cache.layout(at.layer), at.rows.count)
    plan.launch(kernel, at.label, q=at.work["q"], **at.arguments, out=out)


def _decode(
    plan: Plan, at: LayerAttention, kernel: IncrementalAttention | FlashDecodeChunk, out: Region
) -> None:
    if isinstance(kernel, FlashDecodeChunk):
        flash_decoding_graphed(plan, at, kernel, out)
        return
    token = at.token if kernel.rope else {}
    plan.launch(kernel, at.label, q=at.work["q"], **token, **at.arguments, out=out)


def append_tokens(plan: Plan, at: LayerAttention) -> None:
    """Turn ``at.work``'s q and k in place, where there is a rotation; append k and v."""
    layout, rotation, rows = at.cache.layout(at.layer), at.rotation, at.rows
    q, k, v = (at.work[name] for name in "qkv")
    if rotation is not None:
        assert at.frequencies is not None
        rope = Rope(
            q_heads=at.heads,
            kv_heads=layout.kv_heads,
            head_dim=layout.head_dim,
            rotary_dim=rotation.rotary_dim,
            style=rotation.style,
            magnitude=rotation.magnitude,
            rows=rows.count,
            max_len=layout.max_len,
        )
        plan.launch(
            rope, f"{at.label}.rope", q=q, k=k, frequencies=at.frequencies, position=rows.position
        )
    append = KvAppend(layout, rows.count)
    plan.launch(append, f"{at.label}.kv_append", k=k, v=v, **at.arguments)
