"""Rows of experts whose last matrices have columns in orders of their own (act-order, g_idx).

A launch brings x into the order of a matrix's columns (`SHARED_ORDERS`). Values between the
matrices of an expert need none: the rows of its gate and up are put in the order of down's columns.
"""

from __future__ import annotations

import re
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


def with_rows_in_order(
    places: Mapping[str, Place], stored: Mapping[str, StoredTensor], path: Path
) -> dict[str, StoredTensor]:
    """The stored tensors, where no expert's last matrix has an order of columns. Raises
    UnsupportedError for networks whose rows cannot be put in order."""
    changed = dict(stored)
    for name, place in places.items():
        if (of := _DOWN.fullmatch(name)) is None:
            continue
        before = [f"{of[1]}ffn_{kind}_{of[2]}" for kind in ("gate", "up", "gate_up")]
        networks = {base: places[f"{base}.weight"] for base in before if f"{base}.weight" in places}
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
            changed[part] = replace(changed[part], order=None)
    return changed


def _ordered(tensor: StoredTensor, order: NDArray[np.intp]) -> StoredTensor:
    """A matrix with its rows in an order."""
    rows = tensor.shape[0]
    whole, nbytes = Whole(tensor, rows), len(tensor.data) // rows

    def make(first: int, last: int) -> Bytes:
        return whole.take(first, last).reshape(rows, nbytes)[order[first:last]]

    return replace(tensor, data=RowBytes(make, rows, nbytes, rows_at_once(tensor.shape[1])))
