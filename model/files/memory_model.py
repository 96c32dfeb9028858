"""A model that a program gives as arrays, in place of a file."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from urdir.model.errors import SettingsError
from urdir.model.files.metadata import Metadata, StringArray, Value
from urdir.model.files.opened import OpenedModel, Tensor
from urdir.model.files.tensor_types import tensor_type, type_number

#: numpy's types that a GGUF file has as they are.
_TYPES = {np.dtype(np.float32): "F32", np.dtype(np.float16): "F16"}


class MemoryModel(OpenedModel):
    """A model in host memory, for `Engine.open` in place of a path: a loader of your own.

    ``metadata`` and ``tensors`` have GGUF's names ("llama.block_count", "blk.0.attn_q.weight"),
    matrices GGUF's order (rows first, Q and K permuted where the architecture's are). A tensor is
    an array, f32 or f16, of the tensor's shape; or a `Tensor`, of any type, such as those of an
    open `Gguf`: its ``data`` are (nbytes,) u8, an array or an object with ``len`` and slices, which
    makes them while they are loaded. Values of metadata are numbers, texts, and lists of either
    (of texts: a vocabulary). ``name`` is for messages.

    Raises SettingsError for an array of another type, and for data of another size than type and
    shape have. What the architecture misses, or has in another shape, `Engine.open` refuses as in
    a file.
    """

    def __init__(
        self,
        metadata: Mapping[str, Any],
        tensors: Mapping[str, Tensor | NDArray[Any]],
        name: str = "memory",
    ) -> None:
        self.path = Path(name)
        self.metadata = Metadata({key: _value(of) for key, of in metadata.items()}, name)
        self.tensors = {key: _tensor(key, of, name) for key, of in tensors.items()}
        self.nbytes = sum(tensor.nbytes for tensor in self.tensors.values())


def _value(value: Any) -> Value:
    """A metadata value as files have it."""
    if isinstance(value, list | tuple):
        if all(isinstance(each, str) for each in value):
            return StringArray.of(value)
        return np.asarray(value)
    known: Value = value
    return known


def _tensor(key: str, value: Tensor | NDArray[Any], name: str) -> Tensor:
    if isinstance(value, Tensor):
        kind = tensor_type(value.type_id)
        nbytes = math.prod(value.shape) // kind.block * kind.nbytes
        if not nbytes == value.nbytes == len(value.data):
            raise SettingsError(
                f"{name}: tensor '{key}' {value.shape} has {len(value.data):,} bytes of data and "
                f"says {value.nbytes:,}: {kind.name} has {nbytes:,}"
            )
        return value
    array = np.ascontiguousarray(value)
    if (own := _TYPES.get(array.dtype)) is None:
        raise SettingsError(
            f"{name}: tensor '{key}' is {array.dtype}: give float32 or float16, or a Tensor with "
            "the bytes of its type"
        )
    data = array.reshape(-1).view(np.uint8)
    return Tensor(key, type_number(own), array.shape, 0, data.size, data)
