"""Which matrices prompts multiply as signed bytes: chosen before loading, by some rows' error."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from urdir.model.families.description import Description
from urdir.model.families.feed_forward import Dense, Mixture
from urdir.model.families.stored import StoredMatrix, stored_in
from urdir.model.memory.matrix_rows import format_in, source_rows
from urdir.ptxgen.kernels.linear.pack_bytes import PackBytes
from urdir.ptxgen.weights import eights
from urdir.ptxgen.weights.layout import Layout

if TYPE_CHECKING:
    from urdir.model.files.gguf import Tensor
    from urdir.model.files.model_file import ModelFile

#: By `EngineOptions.prompt_arithmetic`, of which "auto" takes dense networks alone: the largest
#: relative error (root mean square) of rows that become bytes. Rows of 4,096 normal weights have
#: 0.9 %, of Student's t with four degrees of freedom 2.7 %.
LARGEST_ERROR = {"int8": 0.03, "auto": 0.012}
#: Rows that are looked at: runs of so many, spread over the matrix.
RUNS, RUN_ROWS = 4, 2

D = TypeVar("D", bound=Description)


def with_bytes(config: D, file: ModelFile, arithmetic: str) -> D:
    """The description with those matrices ``as_bytes`` that may be."""
    if arithmetic == "f16":
        return config
    limit, found = LARGEST_ERROR[arithmetic], set[str]()
    some: Any = config.layers if arithmetic == "int8" else tuple(_dense(config))
    matrices = (of for of in stored_in(some) if isinstance(of, StoredMatrix))
    for of in matrices:
        tensor = file.tensors[of.name]
        if can_be_bytes(of, tensor) and row_error(of, tensor) <= limit:
            found.add(of.name)
    return replace(config, as_bytes=frozenset(found))


def _dense(config: Description) -> Iterator[Dense]:
    """The dense networks of all layers, also those that mixtures share."""
    for layer in config.layers:
        for block in layer.blocks:
            for branch in block.branches:
                of = branch.network
                of = of.shared if isinstance(of, Mixture) else of
                if isinstance(of, Dense):
                    yield of


def can_be_bytes(of: StoredMatrix, tensor: Tensor) -> bool:
    """Whether kernels multiply a matrix as bytes: not those of experts."""
    if of.transposed or len(of.shape) != 2:
        return False
    return eights.can_be_bytes(format_in(of, tensor)) and PackBytes.can_pack(of.cols)


def row_error(of: StoredMatrix, tensor: Tensor) -> float:
    """The relative error of some rows as bytes, root mean square over them."""
    fmt, rows = format_in(of, tensor), source_rows(of, tensor)
    count = min(RUN_ROWS, of.rows)
    layout = Layout(fmt, count, of.cols)
    errors = []
    for first in np.linspace(0, of.rows - count, RUNS).astype(int).tolist():
        begin = first * layout.source_row_nbytes
        raw = rows[begin : begin + layout.source_nbytes]
        weights = layout.unpack(layout.pack(np.ascontiguousarray(raw))).astype(np.float64)
        scale = np.abs(weights).max(axis=1, keepdims=True) / eights.MOST
        scale[scale == 0] = 1
        squares = ((np.rint(weights / scale) * scale - weights) ** 2).sum(axis=1)
        errors.append(squares / np.maximum((weights**2).sum(axis=1), np.finfo(float).tiny))
    return float(np.sqrt(np.mean(errors)))
