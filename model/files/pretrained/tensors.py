"""Stored tensors with GGUF's names, shapes and types, as llama.cpp's converter makes them.

Conversions (`llama.cpp/conversion`): rows of queries and keys of some families are permuted, so
that neighbours rotate together; some norms get 1 added; experts are stacked. Vectors and router
matrices become F32.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from urdir.model.errors import SafetensorsError, UnsupportedError
from urdir.model.files.gguf import Tensor
from urdir.model.files.pretrained.families import Family
from urdir.model.files.pretrained.rows import GGML_TYPES, Rows, row_bytes
from urdir.model.files.quantised import quantised_type
from urdir.model.files.safetensors import StoredTensor
from urdir.model.files.tensor_types import TENSOR_TYPES

_NUMBERS = re.compile(r"(?<=\.)\d+(?=\.)")
#: GGUF names of tensors that are always F32.
_ALWAYS_F32 = re.compile(r"_norm\.weight$|\.ffn_gate_inp\.weight$|\.bias$")
#: Buffers in old checkpoints that follow from the configuration.
_BUFFERS = (".rotary_emb.inv_freq", ".attn.masked_bias", ".attn.bias")

Group = dict[int | None, StoredTensor]
"""The stored tensors of one GGUF tensor, by expert."""


def convert_tensors(
    stored: Mapping[str, StoredTensor],
    family: Family,
    *,
    heads: int,
    kv_heads: int,
    tied: bool,
    quantize: str | None,
    path: Path,
) -> dict[str, Tensor]:
    """The model's tensors by GGUF name. Matrices get the type ``quantize`` (None: as stored).

    ``tied`` omits the output matrix. Raises UnsupportedError for an unsupported tensor or dtype,
    SafetensorsError for inconsistent tensors.
    """
    wanted = None if quantize is None else quantised_type(quantize)
    kept: list[str] = []
    tensors = {}
    for name, group in _grouped(stored, family, path).items():
        if tied and name == "output.weight":
            continue
        count = {"attn_q": heads, "attn_k": kv_heads}.get(name.split(".")[-2])
        rows = Rows(
            _stack(name, group, path), _order(group, count, path) if family.permuted else None
        )
        tensors[name] = _tensor(name, rows, family, wanted, kept)
    if kept:
        warnings.warn(
            f"{path}: {len(kept)} tensors keep their type, since their rows are not a multiple of "
            f"{quantize}'s block: {', '.join(kept[:4])}{', ...' if len(kept) > 4 else ''}",
            stacklevel=2,
        )
    return tensors


def vector(name: str, values: NDArray[Any]) -> Tensor:
    """An F32 tensor of values."""
    array = np.ascontiguousarray(values, np.float32)
    data = array.reshape(-1).view(np.uint8)
    data.flags.writeable = False
    return Tensor(name, GGML_TYPES["F32"], array.shape, 0, data.nbytes, data)


def _grouped(
    stored: Mapping[str, StoredTensor], family: Family, path: Path
) -> dict[str, dict[int | None, StoredTensor]]:
    groups: dict[str, Group] = {}
    for tensor in stored.values():
        if tensor.name.endswith(_BUFFERS):
            continue
        name, expert = _gguf_name(tensor.name, family, path)
        group = groups.setdefault(name, {})
        if expert in group:
            raise SafetensorsError(
                f"{path}: tensors '{tensor.name}' and '{group[expert].name}' are the same"
            )
        group[expert] = tensor
    return groups


def _gguf_name(name: str, family: Family, path: Path) -> tuple[str, int | None]:
    """The GGUF name, and the expert's number for a tensor of an expert."""
    module, _, suffix = name.rpartition(".")
    if suffix not in ("weight", "bias"):  # parameters without a module
        module, suffix = name, "weight"
    numbers = _NUMBERS.findall(module + ".")
    pattern = family.names.get(_NUMBERS.sub("{}", module + ".")[:-1])
    if pattern is None or any(number != str(int(number[:9])) for number in numbers):
        raise UnsupportedError(
            f"{path}: tensor '{name}' is not supported in a '{family.architecture}' model"
        )
    gguf_name = f"{pattern.format(*numbers)}.{suffix}"
    return gguf_name, int(numbers[1]) if len(numbers) > 1 else None


def _stack(name: str, group: Group, path: Path) -> tuple[StoredTensor, ...]:
    """The tensors of a group in expert order, checked to be alike."""
    first = next(iter(group.values()))
    for tensor in group.values():
        if tensor.dtype not in GGML_TYPES:
            raise UnsupportedError(
                f"{path}: tensor '{tensor.name}' has dtype {tensor.dtype}; supported: "
                f"{', '.join(GGML_TYPES)}"
            )
        if len(tensor.shape) not in (1, 2):
            raise UnsupportedError(
                f"{path}: tensor '{tensor.name}' has {len(tensor.shape)} dimensions; 1 and 2 are "
                "supported"
            )
        if (tensor.shape, tensor.dtype) != (first.shape, first.dtype):
            raise SafetensorsError(
                f"{path}: tensor '{tensor.name}' is {tensor.dtype} {tensor.shape}, '{first.name}' "
                f"{first.dtype} {first.shape}"
            )
    if None in group:
        return (group[None],)
    for number in range(len(group)):
        if number not in group:
            raise SafetensorsError(f"{path}: {name}: expert {number} of {len(group)} is missing")
    return tuple(group[number] for number in range(len(group)))


def _order(group: Group, heads: int | None, path: Path) -> NDArray[np.intp] | None:
    """Row 2i of a head is its row i, row 2i + 1 its row i + half (LlamaModel.permute)."""
    if heads is None:
        return None
    tensor = next(iter(group.values()))
    rows = tensor.shape[0]
    if rows % (2 * heads):
        raise SafetensorsError(
            f"{path}: tensor '{tensor.name}' has {rows} rows, not {heads} heads of even size"
        )
    return np.arange(rows).reshape(heads, 2, -1).swapaxes(1, 2).reshape(-1)


def _tensor(name: str, rows: Rows, family: Family, wanted: int | None, kept: list[str]) -> Tensor:
    part = rows.parts[0]
    shape = part.shape if len(rows.parts) == 1 else (len(rows.parts), *part.shape)
    if len(shape) == 1:
        values = _values(rows)
        return vector(name, values + family.norm_shift if name.endswith("_norm.weight") else values)
    type_id = GGML_TYPES["F32" if _ALWAYS_F32.search(name) else rows.dtype]
    if wanted is not None and not _ALWAYS_F32.search(name):
        if rows.width % TENSOR_TYPES[wanted].block:
            kept.append(name)
        else:
            type_id = wanted
    data = row_bytes(rows, type_id)
    return Tensor(name, type_id, shape, 0, len(data), data)


def _values(rows: Rows) -> NDArray[np.float32]:
    """A vector; elements are ordered like rows."""
    values: NDArray[np.float32] = Rows(rows.parts).floats(0, 1)[0]
    return values if rows.order is None else values[rows.order]
