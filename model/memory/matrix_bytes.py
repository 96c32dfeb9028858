"""Which matrices prompts multiply as signed bytes: chosen before loading, by some rows' error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from urdir.model.families.attention import Attention
from urdir.model.families.description import Description
from urdir.model.families.feed_forward import Dense, Mixture
from urdir.model.families.stored import Linear, StoredMatrix, stored_in
from urdir.model.memory.matrix_rows import format_in, source_rows
from urdir.ptxgen.kernels.linear.pack_bytes import PackBytes
from urdir.ptxgen.weights import eights
from urdir.ptxgen.weights.formats import Format
from urdir.ptxgen.weights.layout import Layout

if TYPE_CHECKING:
    from urdir.model.files.model_file import ModelFile
    from urdir.model.files.opened import Tensor

#: By `EngineOptions.prompt_arithmetic`, of which "auto" takes `_suited` matrices alone: the largest
#: relative error (root mean square) of rows that become bytes. Rows of 4,096 normal weights have
#: 0.9 %, of Student's t with four degrees of freedom 2.7 %.
#:
#: With these all logits of `tests/data` are within the allowance of golden files, 1.1 times the
#: error of llama.cpp. With gate, up and down alone 35 of 125 files are not, with all matrices 96:
#: most of the error is that of activations, of which few are large in down.
LARGEST_ERROR = {"int8": 0.03, "auto": 0.012}
#: Rows of a matrix that are looked at, spread over it.
ROWS = 4

D = TypeVar("D", bound=Description)


def with_bytes(config: D, file: ModelFile, arithmetic: str) -> D:
    """The description with those matrices ``as_bytes`` that may be."""
    if arithmetic == "f16":
        return config
    some: Any = config.layers if arithmetic == "int8" else tuple(_suited(config))
    matrices = [
        of
        for of in stored_in(some)
        if isinstance(of, StoredMatrix) and can_be_bytes(of, file.tensors[of.name])
    ]
    limit, errors = LARGEST_ERROR[arithmetic], row_errors(matrices, file)
    refused = {of.name for of, error in errors.items() if not error <= limit}  # NaN
    return replace(config, as_bytes=frozenset(of.name for of in matrices) - refused)


def _suited(config: Description) -> Iterator[Linear]:
    """Gate and up of dense networks, and attention output; none of a model with mixtures, whose
    routers choose other experts after small errors."""
    branches = [
        branch for layer in config.layers for block in layer.blocks for branch in block.branches
    ]
    networks = [branch.network for branch in branches]
    if any(isinstance(of, Mixture) for of in networks):
        return
    for of in networks:
        if isinstance(of, Attention):
            yield of.o
        elif isinstance(of, Dense):
            yield of.up
            if of.gate is not None:
                yield of.gate


def can_be_bytes(of: StoredMatrix, tensor: Tensor) -> bool:
    """Whether kernels multiply a matrix as bytes: not those of experts."""
    if of.transposed or len(of.shape) != 2:
        return False
    return eights.can_be_bytes(format_in(of, tensor)) and PackBytes.can_pack(of.cols)


def row_errors(matrices: Sequence[StoredMatrix], file: ModelFile) -> dict[StoredMatrix, float]:
    """The relative error of some rows of each matrix as bytes, root mean square over them."""
    alike: dict[tuple[Format, int], list[StoredMatrix]] = {}
    for of in matrices:
        alike.setdefault((format_in(of, file.tensors[of.name]), of.cols), []).append(of)
    found: dict[StoredMatrix, float] = {}
    for (fmt, cols), group in alike.items():
        # together: numpy's calls take longer than the rows of one
        nbytes = Layout(fmt, 1, cols).source_row_nbytes
        rows = [
            np.asarray(source_rows(of, file.tensors[of.name])[at : at + nbytes])
            for of in group
            for at in (nbytes * np.linspace(0, of.rows - 1, ROWS).astype(int)).tolist()
        ]
        layout = Layout(fmt, len(rows), cols)
        squares = _squared_errors(layout.unpack(layout.pack(np.concatenate(rows))))
        means = squares.reshape(len(group), ROWS).mean(axis=1)
        found |= dict(zip(group, np.sqrt(means).tolist(), strict=True))
    return found


def _squared_errors(weights: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The squared relative error of each row (rows, cols) as bytes."""
    scale = np.abs(weights).max(axis=1, keepdims=True) / np.float32(eights.MOST)
    scale[scale == 0] = 1
    squares = ((np.rint(weights / scale) * scale - weights) ** 2).sum(axis=1)
    errors: npt.NDArray[np.float32] = squares / np.maximum(
        (weights**2).sum(axis=1), np.finfo(np.float32).tiny
    )
    return errors
