"""The values of vectors, from the tensors of a file."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from urdir.model.families.stored import StoredVector

if TYPE_CHECKING:
    import numpy.typing as npt

    from urdir.model.files.opened import Tensor


def vector_values(of: StoredVector, tensor: Tensor) -> npt.NDArray[np.float32]:
    """The values of a vector, (size,), from a tensor of type F32, F16, BF16, Q8_0 or I32."""
    data = np.ascontiguousarray(tensor.data[:])
    if tensor.type_name == "Q8_0":
        blocks = data.reshape(-1).view(np.dtype([("scale", "<f2"), ("values", "i1", 32)]))
        return of.of(blocks["scale"].astype(np.float32)[:, None] * blocks["values"])
    if tensor.type_name == "I32":
        return of.of(data.view(np.int32).astype(np.float32))
    if tensor.type_name == "BF16":
        values = (data.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    else:
        values = data.view(np.float16 if tensor.type_name == "F16" else np.float32)
    return of.of(values.astype(np.float32))
