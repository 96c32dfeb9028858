"""LoRA adapters: low-rank matrices by the tensor of the model that they change.

GGUF files as llama.cpp's convert_lora_to_gguf.py writes them: ``general.type`` "adapter",
``adapter.type`` "lora", ``adapter.lora.alpha``, and for each tensor X of the model ``X.lora_a``
(rank, in) and ``X.lora_b`` (out, rank), of experts (experts, rank, in) and (experts, out, rank).
Folders of peft: `pretrained.peft`.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from urdir.model.errors import ConfigError, ModelError, UnsupportedError
from urdir.model.files.gguf import Gguf
from urdir.model.files.low_rank import Adapter, Floats, LowRank, low_rank
from urdir.model.files.metadata import REORDERED, Metadata
from urdir.model.files.model_file import SHARED_ORDERS, ModelFile, is_part_of_folder
from urdir.model.files.opened import Tensor
from urdir.model.foreign import foreign, one_line
from urdir.ptxgen.weights.formats import format_of
from urdir.ptxgen.weights.layout import Layout

_ENDS = (".lora_a", ".lora_b")


def open_adapter(
    path: str | os.PathLike[str], base: ModelFile, *, interleaved: bool = False
) -> Adapter:
    """Read an adapter of the model ``base``, a GGUF file or a peft folder, and check its values;
    ``interleaved``: see `read_peft`.

    Raises ModelError: unreadable, of another architecture, a matrix without its pair, an
    impossible rank, values that are not finite.
    """
    source = Path(path)
    found: Adapter
    with foreign(one_line(str(source)), ModelError):
        if is_part_of_folder(source):
            raise ConfigError(f"{source}: a part of an adapter: give its folder, {source.parent}")
        if source.is_dir():
            from urdir.model.files.pretrained.peft import read_peft

            found = read_peft(source, base, interleaved=interleaved)
        else:
            found = _read_gguf(source)
        matrices = {name: _in_order(of, name, base, source) for name, of in found.matrices.items()}
        found = replace(found, matrices=matrices)
    if found.architecture != base.architecture:
        raise ConfigError(
            f"{source}: an adapter of '{found.architecture}' models, {base.path} is "
            f"'{base.architecture}'"
        )
    return found


def _in_order(of: LowRank, name: str, base: ModelFile, path: Path) -> LowRank:
    """The matrices of a tensor whose columns are in an order (`SHARED_ORDERS`), with A's columns in
    it. Raises UnsupportedError for experts with orders of their own."""
    if name.endswith("exps.weight") and REORDERED in base.metadata:
        raise UnsupportedError(
            f"{path}: adapters of '{name}' are not supported: the experts of {base.path} have "
            "columns in orders of their own (desc_act)"
        )
    layer, _, own = name.removesuffix(".weight").rpartition(".")
    orders = [f"{layer}.{group}.order" for group in (own, SHARED_ORDERS.get(own))]
    order = next((base.tensors[found] for found in orders if found in base.tensors), None)
    if order is None or order.shape != of.a.shape[-1:]:  # other sizes are refused with all others
        return of
    columns = np.asarray(order.data[:]).view(np.float32).astype(np.intp)
    return replace(of, a=np.ascontiguousarray(of.a[..., columns]))


def _read_gguf(path: Path) -> Adapter:
    with Gguf(path) as file:
        alpha = _alpha(file.metadata, path)
        pairs: dict[str, dict[str, Tensor]] = {}
        for name, tensor in file.tensors.items():
            base, end = name[:-7], name[-7:]
            if end not in _ENDS or not base:
                raise UnsupportedError(
                    f"{path}: tensor '{name}' is neither a lora_a nor a lora_b of one"
                )
            pairs.setdefault(base, {})[end] = tensor
        if not pairs:
            raise ConfigError(f"{path}: an adapter without tensors")
        matrices = {}
        for base, pair in pairs.items():
            for end in _ENDS:
                if end not in pair:
                    raise ConfigError(f"{path}: tensor '{base}{end}' is missing")
            where = f"{path}: tensor '{base}'"
            a, b = (values_of(pair[end], where) for end in _ENDS)
            matrices[base] = low_rank(where, a, b, alpha)
        return Adapter(path, file.architecture, matrices)


def _alpha(metadata: Metadata, path: Path) -> float:
    if metadata.get("general.type") != "adapter":
        kind = metadata.get("general.type")
        raise ConfigError(f"{path}: not a LoRA adapter: general.type is {kind!r}, not 'adapter'")
    if (kind := metadata.get("adapter.type")) != "lora":
        raise UnsupportedError(f"{path}: an adapter of type {kind!r}: only lora is supported")
    if metadata.get("adapter.alora.invocation_tokens") is not None:
        raise UnsupportedError(f"{path}: an activated LoRA (aLoRA) is not supported")
    return metadata.require("adapter.lora.alpha", float)


def values_of(tensor: Tensor, where: str) -> Floats:
    """The values of a tensor, f32. Raises ModelError for a type that has no blocks of rows."""
    rows, cols = math.prod(tensor.shape[:-1]), tensor.shape[-1]
    if not 2 <= len(tensor.shape) <= 3 or not rows * cols:
        raise ConfigError(f"{where}: {tensor.name} has the shape {tensor.shape}")
    layout = Layout(format_of(tensor.type_id), rows, cols)
    blocks: Any = np.ascontiguousarray(tensor.data[:])
    return layout.unpack(layout.pack(blocks)).astype(np.float32).reshape(tensor.shape)
