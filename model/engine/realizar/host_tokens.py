"""Keys and values of a cache as arrays of the host."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from urdir.model.memory.kv_cache import KvCache

if TYPE_CHECKING:
    from urdir.driver.memory import Slice

Floats = npt.NDArray[np.float32]


def write_tokens(cache: KvCache, layer: int, sequence: int, keys: Floats, values: Floats) -> None:
    """Make keys and values (tokens, kv_heads, head_dim) f32 the first ones that a layer has of a
    sequence, for which there is room. Raises CudaError."""
    layout, table = cache.layout(layer), _table(cache, layer)
    for memory, array in zip(_memory(cache, layer), (keys, values), strict=True):
        stored = memory.download(layout.numpy_dtype, layout.shape)
        layout.write(stored, sequence, range(len(array)), array.swapaxes(0, 1), table)
        memory.upload(stored)


def read_tokens(cache: KvCache, layer: int, sequence: int, count: int) -> tuple[Floats, Floats]:
    """The first ``count`` keys and values (tokens, kv_heads, head_dim) f32 that a layer has of a
    sequence. Raises CudaError."""
    layout, table = cache.layout(layer), _table(cache, layer)
    keys, values = (
        layout.read(
            memory.download(layout.numpy_dtype, layout.shape), sequence, range(count), table
        ).swapaxes(0, 1)
        for memory in _memory(cache, layer)
    )
    return keys, values


def _memory(cache: KvCache, layer: int) -> tuple[Slice, Slice]:
    arguments = cache.arguments(layer)
    return arguments["k_cache"], arguments["v_cache"]


def _table(cache: KvCache, layer: int) -> npt.NDArray[np.uint32] | None:
    layout = cache.layout(layer)
    if not layout.is_paged:
        return None
    shape = (layout.sequences, layout.blocks)
    table: npt.NDArray[Any] = cache.arguments(layer)["block_table"].download(np.uint32, shape)
    return table
