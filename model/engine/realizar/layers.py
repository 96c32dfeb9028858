"""Transformer layers on the caller's buffers: x and y (rows, hidden) f32 in device memory.

norm -> Q, K, V -> RoPE, append to the cache, attention -> O -> residual -> norm -> SwiGLU ->
residual. Rows and refusals are those of the attention operations; weights are refused by the name
of their tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from urdir.driver.errors import LaunchError
from urdir.driver.memory import Region
from urdir.driver.plan import Plan
from urdir.model.blocks import layer as blocks
from urdir.model.blocks.layer import LayerParts
from urdir.model.blocks.linear import Activations
from urdir.model.engine.realizar.cached import CachedAttention, Launcher, Operation
from urdir.model.errors import ModelError
from urdir.model.families.tensors import tensor_name, tensors
from urdir.model.memory.weights import LayerWeights, Matrix, Weights
from urdir.model.memory.workspace import workspace_sizes
from urdir.ptxgen.kernels.attention.kv_layout import KvDtype

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.memory import Slice


class Layers(CachedAttention):
    """The layers of ``weights`` with a cache and a workspace of their own, made from sizes.

    Operations process up to ``tokens`` tokens of one sequence, or one token each of several.
    ``exact`` keeps activations f32 throughout. ``weights`` stay the caller's.
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
        mixer = config.layers[0].mixer
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
        sizes = workspace_sizes(config, self.layout, rows, rows, device.properties.sm_count, exact)
        del sizes["logits"], sizes["ranks"]
        counts = range(1, rows + 1) if exact else range(1, sequences + 1)
        sizes |= self.partial_sizes(self.layout, counts)
        try:
            work = self._owners.enter_context(device.arena(sizes, "workspace"))
        except BaseException:
            self.close()
            raise
        self.parts = LayerParts(
            device=device,
            config=config,
            weights=weights,
            cache=self.cache,
            work=work,
            exact=exact,
        )

    @property
    def hidden(self) -> Slice:
        """Hidden states (rows, hidden) f32 of the workspace."""
        return self.parts.work["hidden"]


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

    ``weights`` are those of the `Layers` by default; any others of the same shapes will do. With
    ``tokens`` the rows are the next ones of one sequence.
    """
    at = to.attention
    rows = at.rows(layer, sequences, tokens)
    if rows.is_prompt and (len(sequences) > 1 or tokens > at.most_tokens):
        raise ModelError(f"{tokens} tokens: up to {at.most_tokens}, of one sequence")
    parts = at.parts
    w = parts.weights.layers[layer] if weights is None else weights
    _check_weights(parts, layer, w)
    nbytes = 4 * rows.count * parts.config.hidden
    for name, buffer in (("x", x), ("y", y)):
        _check_buffer(parts, f"blk.{layer}: argument {name!r}", buffer, nbytes)
    plan = Plan("layer")
    blocks.transformer_layer_indexed(
        plan, parts, rows, layer, Activations(x.slice(0, nbytes)), y.slice(0, nbytes), w=w
    )
    return to.submit(Operation(plan, layer, tuple(sequences), tokens))


def transformer_layer_workspace(
    to: Launcher[Layers], layer: int, *, sequences: Sequence[int] = (0,), tokens: int = 1
) -> list[int]:
    """The same in place, on ``hidden`` of the `Layers`: nothing is allocated."""
    hidden = to.attention.hidden
    return transformer_layer_indexed(to, layer, hidden, hidden, sequences=sequences, tokens=tokens)


def _check_weights(parts: LayerParts, layer: int, weights: LayerWeights) -> None:
    """Raise LaunchError, naming the tensor, for one that the layer needs and that is null, closed,
    of another shape, too small or of another device."""
    for role, value, shape in _roles(parts, layer, weights):
        what = f"tensor '{tensor_name(role, layer)}'"
        if isinstance(value, Matrix):
            if (value.rows, value.cols) != shape:
                raise LaunchError(f"{what}: {(value.rows, value.cols)} given, {shape} needed")
            _check_buffer(parts, what, value.data, value.layout.nbytes)
        else:
            _check_buffer(parts, what, value, 4 * shape[0])


def _roles(
    parts: LayerParts, layer: int, weights: LayerWeights
) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
    for spec in tensors(parts.config):
        if spec.layer == layer:
            matrix = getattr(weights, spec.role.removesuffix("_bias"))
            is_bias = spec.role.endswith("_bias") and matrix is not None
            yield spec.role, matrix.bias if is_bias else matrix, spec.shape


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
