"""Attention in a plan: queries and keys prepared, keys and values appended, each row attends to its
sequence.

A layer calls ``incremental_attention_into``. When the plan is built, the kernel is chosen from the
shape, the length bucket and the device (``ptxgen.kernels.attention.choice``). In a decode step that
kernel prepares and appends the rows' new tokens itself; the rows of a prompt, which attend to each
other, are appended before.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from urdir.driver.kernel import nbytes_of
from urdir.model.lower.registers import Overlaid
from urdir.model.lower.rows import Rows
from urdir.model.memory.buckets import COARSE_CHUNKS
from urdir.model.memory.partial_results import PARTIAL
from urdir.ptxgen.kernels.attention.choice import (
    decode_attention,
    latent_attention,
    prompt_attention,
)
from urdir.ptxgen.kernels.attention.flash_decode import FlashDecode
from urdir.ptxgen.kernels.attention.incremental_attention import IncrementalAttention
from urdir.ptxgen.kernels.attention.kv_layout import KvLayout
from urdir.ptxgen.kernels.attention.own_token import PLAIN_TOKEN, OwnToken
from urdir.ptxgen.kernels.attention.prefill_wgmma import PrefillWgmma
from urdir.ptxgen.kernels.attention.prepare_tokens import PrepareTokens
from urdir.ptxgen.kernels.attention.scores import PLAIN, Scores
from urdir.ptxgen.kernels.attention.short_texts import ShortTexts
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.normalise import Normalise
from urdir.ptxgen.weights.packed_few import Order

if TYPE_CHECKING:
    from urdir.driver.launch import Argument
    from urdir.driver.memory import Region
    from urdir.model.families.config import Config
    from urdir.model.lower.sheet import Launches
    from urdir.model.memory.cache_shape import CacheShape
    from urdir.ptxgen.kernels.attention.latent_decode import LatentDecode
    from urdir.ptxgen.kernels.attention.prompt import PromptAttention
    from urdir.ptxgen.spec import KernelSpec


#: A token of which attention reads the query as it is.
UNCHANGED = OwnToken(appends=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerAttention:
    """The attention of one layer in one step: what it reads and writes, and how.

    ``layout`` is that of ``caches``, the layer's own or those of the layer whose cache it shares:
    ``k_cache``, ``v_cache`` and, where they are paged, ``block_table``. ``work`` holds q (rows,
    heads, head_dim), k (rows, kv_heads, head_dim) and v (rows, kv_heads, value_dim), all f32, as
    the products leave them (without k and v where ``token`` does not append), and room for partial
    results (`partial_results.most_partial`).

    ``token`` says what happens to q, k and v before, ``scores`` what happens to q . k. What they
    ask for is in ``constants`` by the names of the kernels' parameters: ``frequencies`` (a
    ``turns_table``), ``q_norm`` and ``k_norm`` (head_dim,), or as `OwnToken` says, ``sinks``
    (heads,), all f32.

    ``sm_count`` and the native ``target`` are the device's, by which kernels are chosen.

    ``exact`` keeps activations f32, and each row's sums those of its own keys alone. With ``cross``
    all rows attend to all keys of their sources. With ``halves`` q, k and v are f16 heads, for the
    kernel of short texts alone. Packed heads of few rows are left in that ``order``.
    ``starts_next`` is that of `IncrementalAttention`.
    """

    label: str
    layout: KvLayout
    caches: Mapping[str, Region]
    heads: int
    rows: Rows
    work: Mapping[str, Region]
    sm_count: int
    target: str
    scores: Scores = PLAIN
    token: OwnToken = PLAIN_TOKEN
    constants: Mapping[str, Region] = field(default_factory=dict)
    exact: bool = False
    cross: bool = False
    halves: bool = False
    order: Order = "units"
    starts_next: bool = False

    def decode_kernel(
        self, token: OwnToken | None, packs: bool = False
    ) -> IncrementalAttention | FlashDecode:
        """The kernel of decoding, which prepares and appends where a token is given; it leaves
        packed heads where it can and ``packs`` asks for it."""
        kernel = decode_attention(
            IncrementalAttention(self.heads, self.layout, self.rows.count, self.scores, token),
            *(self.rows.keys, self.sm_count, self.target),
            packs=packs,
            run=1 if self.exact else 1 + self.rows.drafts,
        )
        if self.starts_next and isinstance(kernel, IncrementalAttention):
            kernel = replace(kernel, starts_next=True)
        return replace(kernel, order=self.order) if kernel.out.order else kernel

    def latent_kernel(self) -> LatentDecode | None:
        """The kernel of rows whose queries come in MLA's two parts and whose keys are in the cache;
        None where the device has none."""
        limits = (self.rows.keys, self.sm_count, self.rows.count)
        shape = (self.heads, self.layout, *limits, self.scores, self.token, self.target)
        return latent_attention(*shape)

    def prompt_kernel(self, packs: bool) -> PromptAttention:
        """The kernel of prompts; it leaves packed heads where it can and ``packs`` asks for it."""
        rows, scores = self.rows.count, self.scores
        return prompt_attention(
            self.heads, self.layout, rows, self.target, scores=scores, packs=packs
        )

    def short_kernel(self, packs: bool) -> ShortTexts | None:
        """The kernel of short texts, which takes heads as the products leave them, and needs no
        cache; None for other rows, and where it does not know what ``scores`` or ``token`` ask
        for. With ``packs`` its output is packed, where that is supported."""
        texts, layout, token = self.rows.texts, self.layout, self.token
        if texts is None or not texts.short or self.exact or layout.dtype != "f16":
            return None
        scores = Scores(scale=self.scores.scale)
        if replace(self.scores, window=0, chunk=0, causal=True) != scores:
            return None
        dims = {layout.head_dim, layout.values_per_head}
        if token != OwnToken(rope=token.rope) or len(dims) > 1 or not dims <= ShortTexts.DIMS:
            return None
        if token.rope is not None and not ShortTexts.rotates(token.rope, layout.head_dim):
            return None
        kernel = ShortTexts(
            self.heads,
            layout.kv_heads,
            layout.head_dim,
            self.rows.count,
            texts.segment.nbytes // 8,
            self.scores.scale,
            token.rope,
            halves=self.halves,
        )
        return replace(kernel, packs=packs and kernel.can_pack)

    def of_rows(self, start: int, rows: Rows) -> LayerAttention:
        """The attention of some of the rows, from number ``start`` on."""
        layout = self.layout
        widths = {
            "q": self.heads * layout.head_dim,
            "k": layout.kv_heads * layout.head_dim,
            "v": layout.kv_heads * layout.values_per_head,
        }
        parts = {
            name: self.work[name].slice(4 * start * width, 4 * rows.count * width)
            for name, width in widths.items()
            if name in self.work
        }
        return replace(self, rows=rows, work=Overlaid(parts, self.work))

    def of_texts(self) -> LayerAttention:
        """The attention of rows whose keys are appended: those of texts have bounds."""
        if self.rows.texts is None:
            return self
        begin, last = self.rows.texts.of(self.scores)
        constants = {**self.constants, "begin": begin}
        scores = replace(self.scores, window=0, chunk=0, causal=True, texts=True)
        return replace(
            self, rows=replace(self.rows, position=last), scores=scores, constants=constants
        )

    def of_sources(self) -> LayerAttention:
        """The attention to sources, as that of rows without prompts at the sources' last tokens.
        There is room for partial results of as many rows as choose a token."""
        assert self.rows.source_last is not None
        keys = 1 if self.rows.prompt else self.layout.max_len
        rows = replace(self.rows, prompt=0, keys=keys, position=self.rows.source_last)
        return replace(self, rows=rows, cross=False)

    @property
    def fused_token(self) -> OwnToken | None:
        """What the kernel of decoding does with the rows' new tokens; None where they are appended
        before it, or nothing happens to them."""
        return None if self.rows.attend_to_each_other or self.token == UNCHANGED else self.token

    @property
    def can_pack(self) -> bool:
        """Whether heads can be left as the packed activations of the next product."""
        if self.cross:
            return self.of_sources().can_pack
        if self.exact or (self.rows.decode and self.rows.prompt):
            return False
        if self.rows.decode:
            return self.decode_kernel(self.fused_token, packs=True).packs
        if (short := self.short_kernel(packs=True)) is not None:
            return short.packs
        kernel = self.of_texts().prompt_kernel(packs=True)
        return isinstance(kernel, PrefillWgmma) and kernel.packs

    def launch(self, plan: Launches, kernel: KernelSpec, label: str, **outputs: Region) -> None:
        """Append a launch of ``kernel``, which takes what it needs of all that is here by name."""
        arguments = {**self.caches, **self.rows.arguments, **self.constants}
        given: dict[str, Argument] = {**arguments, **outputs, "count": self.rows.count}
        for name in (param.name for param in kernel.params):
            if name not in given:
                given[name] = self.work[PARTIAL.get(name, name)]
        plan.launch(kernel, label, **{p.name: given[p.name] for p in kernel.params})


def incremental_attention_into(
    plan: Launches, at: LayerAttention, out: Region, *, packs: bool = False
) -> None:
    """Prepare ``at.work``'s q, k and v, append k and v to the cache and attend into ``out`` (rows,
    heads, value_dim) f32. q and k may be overwritten. With ``packs`` (only where `at.can_pack`) the
    output is packed for the next product.

    A row at position p attends to positions up to p of its sequence, as ``at.scores`` says. Works
    for every length, batch and cache; a paged cache is gathered through its block table. Rows of
    prompts and others are launches of their own.
    """
    if at.cross:
        at = at.of_sources()
    if at.rows.decode and at.rows.prompt:
        first, rest = at.rows.split()
        width = 4 * at.heads * at.layout.values_per_head
        start = first.count * width
        incremental_attention_into(plan, at.of_rows(0, first), out.slice(0, start))
        prompts = replace(at.of_rows(first.count, rest), label=f"{at.label}.prompts")
        incremental_attention_into(plan, prompts, out.slice(start, rest.count * width))
        return
    if (short := at.short_kernel(packs)) is not None:
        assert at.rows.texts is not None
        out = out.slice(0, nbytes_of(short, "out"))
        at.of_texts().launch(plan, short, at.label, out=out, segment=at.rows.texts.segment)
        return
    if at.rows.attend_to_each_other:
        append_tokens(plan, at)
    at = at.of_texts()
    if at.rows.prompt and not at.exact:
        flash_attention_multi_head(plan, at, out, packs=packs)
        return
    kernel = at.decode_kernel(at.fused_token, packs)
    region = out.slice(0, kernel.nbytes(kernel.out.param)) if packs else out
    at.launch(plan, kernel, at.label, out=region)


def flash_attention_multi_head(
    plan: Launches, at: LayerAttention, out: Region, *, packs: bool = False
) -> None:
    """Causal attention of segments of prompts, consecutive tokens of a sequence each, whose keys
    and values are in the cache: tiled, on tensor cores, without a matrix of scores.

    Queries are prepared already; ``out`` is (rows, heads, value_dim) f32, or packed: see
    `incremental_attention_into`.
    """
    kernel = at.prompt_kernel(packs)
    region = out.slice(0, nbytes_of(kernel, "out")) if packs else out
    at.launch(plan, kernel, at.label, out=region)


def segment_alignment(config: Config, cache: CacheShape, target: str) -> int:
    """The rows at multiples of which segments of prompts begin, so that all layers' kernels on a
    device of native ``target`` take them."""
    mixers = ((i, layer.attention) for i, layer in enumerate(config.layers))
    shapes = {
        (m.heads, cache.layout(i), m.scores)
        for i, m in mixers
        if m is not None and m.compression is None
    }
    kernels = (
        prompt_attention(heads, layout, rows, target, scores=scores)
        for heads, layout, scores in shapes
        for rows in COARSE_CHUNKS
    )
    return math.lcm(*(kernel.segment_rows for kernel in kernels))


def append_tokens(plan: Launches, at: LayerAttention) -> None:
    """Prepare ``at.work``'s q in place, where there is something to do; prepare and append k and v,
    where the layer has a cache of its own. Norms over rows change k in place, too."""
    token = at.token
    if token.qk_norm and token.norms_rows:
        _norm_rows(plan, at, token.qk_norm)
        token = replace(token, qk_norm=None, qk_norm_over="head")
    if token != UNCHANGED:
        texts = at.rows.texts is not None
        kernel = PrepareTokens(at.heads, at.layout, at.rows.count, token, texts)
        at.launch(plan, kernel, f"{at.label}.tokens")


def append_keys_alone(plan: Launches, at: LayerAttention) -> None:
    """Prepare and append ``at.work``'s k, and v where it has a cache of its own."""
    token = replace(at.token, temperature=None)
    at.launch(plan, PrepareTokens(0, at.layout, at.rows.count, token), f"{at.label}.cached")


def _norm_rows(plan: Launches, at: LayerAttention, norm: Norm) -> None:
    """All heads of q as one vector, and those of k, in place."""
    for name, heads in (("q", at.heads), ("k", at.layout.kv_heads)):
        if name == "k" and not at.token.appends:
            continue
        weight = {"weight": at.constants[f"{name}_norm"]} if norm.weight else {}
        kernel = Normalise(at.rows.count, heads * at.layout.head_dim, norm)
        x = at.work[name]
        plan.launch(kernel, f"{at.label}.{name}_norm", x=x, y=x, **weight)
