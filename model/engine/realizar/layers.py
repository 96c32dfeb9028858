"""Transformer layers on the caller's buffers: x and y (rows, hidden) f32 in device memory.

norm -> Q, K, V -> RoPE, append to the cache, attention -> O -> residual -> norm -> SwiGLU ->
residual, or other operations of the layer's description. Rows and refusals are those of the
attention operations; weights are refused by the name of their tensor.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from urdir.driver.errors import LaunchError
from urdir.driver.memory import Region
from urdir.driver.plan import Plan
from urdir.model.engine.realizar.cached import CachedAttention, Launcher, Operation
from urdir.model.errors import ModelError
from urdir.model.families.attention import Attention
from urdir.model.families.config import Config
from urdir.model.families.layers import LayerConfig
from urdir.model.families.stored import Linear, StoredMatrix, of_any_layer, stored_in
from urdir.model.layers.builder import StepOps
from urdir.model.layers.layer import layer as layer_ops
from urdir.model.lower.paper import Needs, PaperWorkspace, needs_of
from urdir.model.lower.parts import LayerParts
from urdir.model.lower.rows import Rows
from urdir.model.lower.sheet import Sheet
from urdir.model.lower.step import lower
from urdir.model.memory.partial_results import PARTIAL
from urdir.model.memory.weights import Weights
from urdir.model.memory.workspace import Workspace, WorkspaceShape
from urdir.ptxgen.kernels.attention.kv_types import KvDtype

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.memory import Slice

#: Hidden states of the caller.
_HIDDEN = "hidden"


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """The weights of one layer: number ``layer`` of those that ``weights`` holds."""

    weights: Weights
    layer: int

    @property
    def config(self) -> LayerConfig:
        """What the layer is."""
        return self.weights.config.layers[self.layer]


class Layers(CachedAttention):
    """The layers of ``weights`` with a cache and a workspace of their own, made from sizes.

    Operations process up to ``tokens`` tokens of one sequence, or one token each of several.
    ``exact`` keeps activations f32 throughout. ``weights`` stay the caller's. Raises ModelError for
    layers that are not enough of themselves: whose attention has other sizes than the first one's,
    or that need the tokens or other layers.
    """

    def __init__(
        self,
        device: Device,
        weights: Weights,
        *,
        max_len: int,
        tokens: int = 1,
        kv_dtype: KvDtype = "f16",
        exact: bool = False,
        sequences: int = 1,
        page_len: int = 0,
        pages: int | None = None,
    ) -> None:
        config = weights.config
        mixer = _only_attention(config)
        super().__init__(
            device,
            heads=mixer.heads,
            kv_heads=mixer.kv_heads,
            head_dim=mixer.key_dim,
            max_len=max_len,
            layers=config.n_layers,
            kv_dtype=kv_dtype,
            sequences=sequences,
            page_len=page_len,
            pages=pages,
        )
        self.most_tokens = tokens
        rows = max(sequences, tokens)
        counts = range(1, rows + 1) if exact else range(1, sequences + 1)
        kept = dict(self.partial_sizes(self.layout, counts))
        zeroed = {name: kept.pop(name) for name in (PARTIAL["arrived"],) if name in kept}
        shape = WorkspaceShape(kept | {_HIDDEN: 4 * config.hidden * rows}, zeroed=zeroed)
        parts = LayerParts(
            device=device,
            config=config,
            weights=weights,
            cache=self.cache,
            work=cast("Workspace", PaperWorkspace(shape)),
            exact=exact,
        )
        try:
            shape = self._with_room(parts, shape)
            work = self._owners.enter_context(Workspace(device, shape))
        except BaseException:
            self.close()
            raise
        self.parts = replace(parts, work=work)

    def _with_room(self, parts: LayerParts, shape: WorkspaceShape) -> WorkspaceShape:
        """The workspace with room for the values of any layer: of one row of each sequence and of
        prompts, measured with a workspace of paper."""
        needs, sequences = Needs(), self.layout.sequences
        sizes = [
            *range(1, sequences + 1),
            *dict.fromkeys((min(self.most_tokens, 9), self.most_tokens)),
        ]
        for number, rows in enumerate(sizes):
            tokens = rows if number >= sequences else 1
            if number >= sequences and tokens < 2:
                continue
            at = self.rows(0, [0] if tokens > 1 else range(rows), tokens)
            for index, of in enumerate(parts.config.layers):
                sheet = Sheet(parts.work)
                _append_layer(sheet, parts, at, index, of)
                needs = needs.most(needs_of(sheet))
        return replace(shape, zeroed={**shape.zeroed, **needs.zeroed}, room=needs.room)

    @property
    def hidden(self) -> Slice:
        """Hidden states (rows, hidden) f32 of the workspace."""
        return self.parts.work[_HIDDEN]


def transformer_layer_indexed(
    to: Launcher[Layers],
    layer: int,
    x: Region,
    y: Region,
    *,
    weights: LayerWeights | None = None,
    sequences: Sequence[int] = (0,),
    tokens: int = 1,
) -> list[int]:
    """Layer ``layer`` from x to y, which may be the same buffer; the lengths after it.

    ``weights`` are those of the `Layers` by default; those of any layer that is like this one will
    do. With ``tokens`` the rows are the next ones of one sequence.
    """
    at = to.attention
    rows = at.rows(layer, sequences, tokens)
    if rows.prompt and (len(sequences) > 1 or tokens > at.most_tokens):
        raise ModelError(f"{tokens} tokens: up to {at.most_tokens}, of one sequence")
    parts = at.parts
    given = weights or LayerWeights(parts.weights, layer)
    _check_weights(parts, layer, given)
    nbytes = 4 * rows.count * parts.config.hidden
    for name, buffer in (("x", x), ("y", y)):
        _check_buffer(parts, f"blk.{layer}: argument {name!r}", buffer, nbytes)
    plan = Plan("layer")
    parts = replace(parts, weights=given.weights)
    _append_layer(plan, parts, rows, layer, given.config, (x.slice(0, nbytes), y.slice(0, nbytes)))
    return to.submit(Operation(plan, layer, tuple(sequences), tokens))


def transformer_layer_workspace(
    to: Launcher[Layers], layer: int, *, sequences: Sequence[int] = (0,), tokens: int = 1
) -> list[int]:
    """The same in place, on ``hidden`` of the `Layers`: nothing is allocated."""
    hidden = to.attention.hidden
    return transformer_layer_indexed(to, layer, hidden, hidden, sequences=sequences, tokens=tokens)


def _append_layer(
    plan: Plan | Sheet,
    parts: LayerParts,
    rows: Rows,
    layer: int,
    of: LayerConfig,
    ends: tuple[Slice, Slice] | None = None,
) -> None:
    """Append a layer, from and to the given ends of the stream."""
    step = StepOps(replace(parts.config, output_norm=None), rows.count)
    stream = step.graph.input(step.stream())
    result = layer_ops(step, layer, stream, of=of)
    fixed = {} if ends is None else dict(zip((stream, result), ends, strict=True))
    lower(plan, parts, rows, step.graph, fixed=fixed)


def _only_attention(config: Config) -> Attention:
    """The sizes of attention in every layer. Raises ModelError; see `Layers`."""
    mixers = [layer.attention for layer in config.layers]
    first = mixers[0]
    needs_more = (
        config.layer_embeddings
        or config.saved_streams
        or config.recurrents
        or config.has_streams
        or config.source is not None
        or config.switch is not None
    )
    if first is None or first.value_dim != first.key_dim or needs_more:
        raise ModelError(f"layers of {config.architecture!r} do not run alone: use a Session")
    for index, mixer in enumerate(mixers):
        if mixer is None or mixer.shares_cache_of is not None or _sizes(mixer) != _sizes(first):
            raise ModelError(f"layer {index} has another cache than layer 0: use a Session")
    return first


def _sizes(mixer: Attention) -> tuple[int, ...]:
    return mixer.heads, mixer.kv_heads, mixer.key_dim, mixer.value_dim


def _check_weights(parts: LayerParts, layer: int, given: LayerWeights) -> None:
    """Raise LaunchError, naming the tensor, for one that the layer needs and that is null, closed,
    of another shape, too small or of another device; and for a layer that is another one."""
    wanted = parts.config.layers[layer]
    references = list(stored_in(given.config))
    for of, own in zip(references, stored_in(wanted), strict=False):
        if of.shape != own.shape:
            raise LaunchError(f"tensor '{of.name}': {of.shape} given, {own.shape} needed")
    if of_any_layer(given.config) != of_any_layer(wanted):
        raise LaunchError(f"blk.{layer}: layer {given.layer} of the given weights is no such layer")
    mixer = given.config.attention
    tables = () if mixer is None else tuple(stored_in(mixer.rope))  # kept in another form
    for of in references:
        what = f"tensor '{of.name}'"
        if of in tables:
            continue
        if isinstance(of, StoredMatrix):
            matrix = given.weights.matrix(Linear(of))
            _check_buffer(parts, what, matrix.data, matrix.layout.nbytes)
        else:
            _check_buffer(parts, what, given.weights.vector(of), 4 * of.size)


def _check_buffer(parts: LayerParts, what: str, value: Any, nbytes: int) -> None:
    if not isinstance(value, Region):
        given = "null" if value is None or value == 0 else repr(value)
        raise LaunchError(f"{what}: a buffer or slice is needed, not {given}")
    if value.buffer.closed:
        raise LaunchError(f"{what}: {value.name!r} is closed")
    if value.nbytes < nbytes:
        raise LaunchError(f"{what}: {nbytes:,} bytes needed, {value.name!r} has {value.nbytes:,}")
    if value.buffer.device is not parts.device:
        raise LaunchError(
            f"{what}: {value.name!r} belongs to another device, {value.buffer.device.name}"
        )
