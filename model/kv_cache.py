"""The key/value cache of one sequence, contiguous, on the device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from urdir.model.config import Config
from urdir.model.owner import Owner
from urdir.ptxgen.kernels.kv_append import KvDtype

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.driver.memory import Slice

#: Bytes of one element of each cache type.
ELEMENT_BYTES: Mapping[KvDtype, int] = {"f16": 2, "f32": 4}


def rounded_capacity(context: int) -> int:
    """Positions to allocate for a context: the next power of two, at least 256.

    Kernels are specialised by this number, so that few values of it should exist.
    """
    return max(256, 1 << (context - 1).bit_length())


def cache_bytes(config: Config, max_len: int, dtype: KvDtype) -> int:
    """Bytes of keys and values of all layers for ``max_len`` positions."""
    row = config.n_kv_heads * config.head_dim * ELEMENT_BYTES[dtype]
    return 2 * config.n_layers * max_len * row


class KvCache(Owner):
    """Keys and values of every layer, each (n_kv_heads, max_len, head_dim), row-major.

    ``dtype`` is "f16" or "f32". Which positions are valid is the decode state's business; memory
    past them is never read.
    """

    def __init__(self, device: Device, config: Config, max_len: int, dtype: KvDtype) -> None:
        self.max_len = max_len
        self.dtype = dtype
        one = cache_bytes(config, max_len, dtype) // (2 * config.n_layers)
        names = [f"{kind}.{i}" for i in range(config.n_layers) for kind in ("keys", "values")]
        self._arena = device.arena(dict.fromkeys(names, one), "KV cache")

    def keys(self, layer: int) -> Slice:
        """Keys of a layer, (n_kv_heads, max_len, head_dim)."""
        return self._arena[f"keys.{layer}"]

    def values(self, layer: int) -> Slice:
        """Values of a layer, (n_kv_heads, max_len, head_dim)."""
        return self._arena[f"values.{layer}"]

    @property
    def nbytes(self) -> int:
        """Bytes on the device."""
        return self._arena.nbytes

    def close(self) -> None:
        """Free the cache; closing twice does nothing."""
        self._arena.close()
