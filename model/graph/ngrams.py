"""Operations of a memory of n-grams."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from urdir.model.families.ngrams import NgramMemory
from urdir.model.families.stored import StoredMatrix
from urdir.model.graph.evaluation import Evaluation, Floats
from urdir.model.graph.op import Op
from urdir.model.graph.tensor import Tensor
from urdir.ptxgen.kernels.gate_streams import stream_gates
from urdir.ptxgen.kernels.ngram_rows import NgramHash
from urdir.ptxgen.kernels.streams import STREAMS


@dataclass(frozen=True, slots=True, eq=False)
class EmbedNgrams(Op):
    """y = the rows of a ``table`` that ``hash`` gives for each row's last tokens, side by side."""

    word = "embed_ngrams"
    table: StoredMatrix
    hash: NgramHash

    def __post_init__(self) -> None:
        self._check(self.y.width == self.hash.heads * self.table.cols, "the widths differ")

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        rows = [self.hash.of(at.tokens[: row + 1]) for row in range(len(at.tokens))]
        y: Floats = at.matrix(self.table)[np.array(rows)].reshape(len(rows), -1)
        return y


@dataclass(frozen=True, slots=True, eq=False)
class GateStreams(Op):
    """y (rows, 4 * width) = ``value`` in each stream, gated by the likeness of ``key`` and
    ``query`` (`kernels.gate_streams`)."""

    word = "gate_streams"
    key: Tensor
    query: Tensor
    value: Tensor

    def __post_init__(self) -> None:
        self._check_same(self.key, self.query)
        self._check(self.y.width == STREAMS * self.value.width, "not four streams")

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        key, query = (each.reshape(len(each), STREAMS, -1) for each in x[:2])
        y: Floats = (stream_gates(key, query)[:, :, None] * x[2][:, None]).reshape(x[0].shape)
        return y


@dataclass(frozen=True, slots=True, eq=False)
class ConvolveApart(Op):
    """y = silu of the convolution of a memory ``of`` n-grams along the tokens of each channel of x.
    The state of ``layer`` has the last values."""

    word = "convolve_apart"
    x: Tensor
    of: NgramMemory
    layer: int

    def __post_init__(self) -> None:
        self._check_same(self.x)
        self._check(self.x.width == self.of.channels, f"{self.of.channels} channels")

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        weight = at.vector(self.of.conv).reshape(self.of.channels, self.of.taps)
        y = np.zeros_like(x[0])
        for tap in range(self.of.taps):
            back = (self.of.taps - 1 - tap) * self.of.dilation
            y[back:] += x[0][: max(0, len(y) - back)] * weight[:, tap]
        made: Floats = y / (1.0 + np.exp(-y))
        return made
