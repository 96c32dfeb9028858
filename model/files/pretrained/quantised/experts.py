"""Experts whose columns are in orders of their own (act-order, g_idx).

A dense matrix gets its x in the order of its columns (`SHARED_ORDERS`). Experts read one x, or one
launch makes the x of all of them, so that their columns stay where they are: the rows of gate and
up are put in the order of down's columns, and gate and up themselves become F16, which is what
other readers of these formats multiply with.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from urdir.model.errors import UnsupportedError
from urdir.model.files.pretrained.places import Place
from urdir.model.files.pretrained.quantised.parts import Bytes, Whole
from urdir.model.files.pretrained.rows import RowBytes, rows_at_once
from urdir.model.files.safetensors import StoredTensor

_DOWN = re.compile(r"(.*\.)ffn_down_(\w*exps)\.weight")


def without_orders(
    places: Mapping[str, Place], stored: Mapping[str, StoredTensor], path: Path
) -> dict[str, StoredTensor]:
    """The stored tensors, where no expert's matrix has an order of columns. Raises UnsupportedError
    for networks whose rows cannot be put in order."""
    changed = dict(stored)
    for name, place in places.items():
        if (of := _DOWN.fullmatch(name)) is None:
            continue
        before = [f"{of[1]}ffn_{kind}_{of[2]}" for kind in ("gate", "up", "gate_up")]
        networks = {base: places[f"{base}.weight"] for base in before if f"{base}.weight" in places}
        for network in networks.values():
            changed |= _in_place([changed[part] for part in network.parts], path)
        for number, part in enumerate(place.parts):
            if (order := changed[part].order) is None:
                continue
            for base, network in networks.items():
                fits = len(network.parts) == len(place.parts) and network.layout.rows is None
                if "gate_up" in base or f"{base}.bias" in places or not fits:
                    raise UnsupportedError(
                        f"{path}: tensor '{part}' has columns in an order of its own (desc_act), "
                        f"and the rows of '{network.parts[0]}' cannot be put in it"
                    )
                own = network.parts[number]
                changed[own] = _ordered(changed[own], order)
            changed[part] = replace(changed[part], order=None, in_place=None)
    _warn(stored, changed, path)
    return changed


def _in_place(parts: list[StoredTensor], path: Path) -> dict[str, StoredTensor]:
    """The matrices of experts, all as F16 if the columns of any are in another order."""
    if all(part.order is None for part in parts):
        return {}
    found = {}
    for part in parts:
        if part.in_place is None:
            raise UnsupportedError(
                f"{path}: tensor '{part.name}' is {part.dtype}, and other experts have columns in "
                "orders of their own (desc_act)"
            )
        data = part.in_place
        changed = replace(part, dtype="F16", data=data, is_decoded=True)
        found[part.name] = replace(changed, order=None, in_place=None)
    return found


def _ordered(tensor: StoredTensor, order: NDArray[np.intp]) -> StoredTensor:
    """A matrix with its rows in an order."""
    rows = tensor.shape[0]
    whole, nbytes = Whole(tensor, rows), len(tensor.data) // rows

    def make(first: int, last: int) -> Bytes:
        return whole.take(first, last).reshape(rows, nbytes)[order[first:last]]

    return replace(tensor, data=RowBytes(make, rows, nbytes, rows_at_once(tensor.shape[1])))


def _warn(
    stored: Mapping[str, StoredTensor], changed: Mapping[str, StoredTensor], path: Path
) -> None:
    names = [name for name, of in changed.items() if of.dtype != stored[name].dtype]
    if names:
        sizes = [sum(len(of[name].data) for name in names) / 1e9 for of in (changed, stored)]
        warnings.warn(
            f"{path}: {len(names)} matrices of experts have columns in orders of their own "
            f"(desc_act) and become F16: {sizes[0]:.2f} GB in place of {sizes[1]:.2f} GB "
            "(quantize= makes them smaller)",
            stacklevel=2,
        )
