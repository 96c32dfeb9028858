"""Operations on the stream and on vectors, products and collectives; see `Op`."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from urdir.model.families.adapters import AdapterRoom
from urdir.model.families.rope import RopeConfig
from urdir.model.families.stored import Linear, Normalization, StoredMatrix, StoredVector
from urdir.model.graph.evaluation import Evaluation, Floats
from urdir.model.graph.op import Elementwise, Op
from urdir.model.graph.tensor import Tensor
from urdir.ptxgen.kernels.activation import Activation


@dataclass(frozen=True, slots=True, eq=False)
class Embed(Op):
    """y = scale * the rows of a ``table`` (vocabulary, width) for the rows' tokens, plus those of
    ``positions`` for their positions, where a model has these; or with ``types`` the rows of a
    table (types, width) for the tokens' types. Other ``tokens`` (rows, 1) may take the place of the
    rows' own."""

    word = "embed"
    table: StoredMatrix
    scale: float = 1.0
    positions: StoredMatrix | None = None
    types: bool = False
    tokens: Tensor | None = None

    def __post_init__(self) -> None:
        self._check(self.y.width == self.table.cols, f"the table has {self.table.cols} columns")

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        rows = at.types if self.types else at.tokens
        if self.tokens is not None:
            rows = x[0][:, 0].astype(np.intp)
        y: Floats = at.matrix(self.table)[rows] * self.scale
        return y if self.positions is None else y + at.matrix(self.positions)[at.positions]


@dataclass(frozen=True, slots=True, eq=False)
class Norm(Op):
    """y = the norm of x: of each vector, or of every ``over`` values of it."""

    word = "norm"
    x: Tensor
    of: Normalization
    over: int = 0

    def __post_init__(self) -> None:
        self._check_same(self.x)
        self._check(self.x.width % self.cols == 0, f"not a multiple of {self.cols}")

    @property
    def cols(self) -> int:
        """Values that are normalised together."""
        return self.over or self.x.width

    @property
    def sets(self) -> int:
        """How many vectors of weights there are, which take turns."""
        return 1 if self.of.weight is None else self.of.weight.size // self.cols

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        weight, bias = (None if v is None else at.vector(v) for v in (self.of.weight, self.of.bias))
        if weight is not None:
            weight = np.tile(weight.reshape(self.sets, -1), (self._turns, 1))
        if bias is not None:
            bias = np.tile(bias.reshape(self.sets, -1), (self._turns, 1))
        parts = x[0].reshape(len(x[0]), -1, self.cols)
        return self.of.norm(parts, weight, bias).reshape(x[0].shape)

    @property
    def _turns(self) -> int:
        return self.x.width // self.cols // self.sets


@dataclass(frozen=True, slots=True, eq=False)
class Product(Op):
    """y = W x (+ bias) (+ B a of each row's adapter, with the a at a ``place`` of ``low``, as
    `Adapt` makes it)."""

    word = "product"
    x: Tensor
    of: Linear
    low: Tensor | None = None
    place: int = 0
    room: AdapterRoom | None = None

    def __post_init__(self) -> None:
        shape = self.of.rows, self.of.cols
        self._check((self.y.width, self.x.width) == shape, f"the matrix is {shape}")
        self._check(self.x.rows == self.y.rows, "the rows differ")
        self._check(self.of.order is None, "the matrix has an order of columns")

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        y = at.linear(self.of, x[0])
        if self.room is None:
            return y
        first = self.place * self.room.rank
        return y + at.expanded(self.of, x[1][:, first : first + self.room.rank])


@dataclass(frozen=True, slots=True, eq=False)
class Activate(Elementwise):
    """y = f(x), divided by ``divisors`` (width,) if these are given (MPT)."""

    word = "activate"
    f: Activation
    divisors: StoredVector | None = None

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        y = np.asarray(self.f(x[0]), np.float64)
        return y if self.divisors is None else y / at.vector(self.divisors)


@dataclass(frozen=True, slots=True, eq=False)
class Gate(Op):
    """y = f(gate) * x; a value of a narrower ``gate`` is for several of x side by side."""

    word = "gate"
    gate: Tensor
    x: Tensor
    f: Activation

    def __post_init__(self) -> None:
        self._check_same(self.x)
        self._check(self.gate.rows == self.x.rows, "the rows differ")
        self._check(self.x.width % self.gate.width == 0, "the gate does not divide")

    @property
    def group(self) -> int:
        """Values of x for one of the gate."""
        return self.x.width // self.gate.width

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        gate, values = x
        return self.f.gated(np.repeat(gate, self.group, axis=1), values)


@dataclass(frozen=True, slots=True, eq=False)
class Scale(Elementwise):
    """y = ``factor`` * x."""

    word = "scale"
    factor: float

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        return x[0] * self.factor


@dataclass(frozen=True, slots=True, eq=False)
class ScaleBy(Op):
    """y = ``factor`` * x, the factor (1,) being a weight."""

    word = "scale_by"
    x: Tensor
    factor: StoredVector

    def __post_init__(self) -> None:
        self._check_same(self.x)
        self._check(self.factor.size == 1, f"the factor has {self.factor.size} values")

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        return x[0] * at.vector(self.factor)


@dataclass(frozen=True, slots=True, eq=False)
class Bound(Elementwise):
    """y = ``softcap`` * tanh(x / softcap), where that is not 0, within +- ``clamp``, likewise."""

    word = "bound"
    softcap: float = 0.0
    clamp: float = 0.0

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        y = self.softcap * np.tanh(x[0] / self.softcap) if self.softcap else x[0]
        return np.clip(y, -self.clamp, self.clamp) if self.clamp else y


@dataclass(frozen=True, slots=True, eq=False)
class Add(Op):
    """y = a + b: of the stream, ``a`` is what was before."""

    word = "add"
    a: Tensor
    b: Tensor

    def __post_init__(self) -> None:
        self._check_same(self.a, self.b)

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        return x[0] + x[-1]


@dataclass(frozen=True, slots=True, eq=False)
class AddVector(Op):
    """y = x + ``vector`` (width,), a weight."""

    word = "add_vector"
    x: Tensor
    vector: StoredVector

    def __post_init__(self) -> None:
        self._check_same(self.x)
        self._check(self.vector.size == self.x.width, f"the vector has {self.vector.size} values")

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        return x[0] + at.vector(self.vector)


@dataclass(frozen=True, slots=True, eq=False)
class Copy(Op):
    """y = x, kept for later operations."""

    word = "copy"
    x: Tensor

    def __post_init__(self) -> None:
        self._check_same(self.x)

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        return x[0]


@dataclass(frozen=True, slots=True, eq=False)
class Columns(Op):
    """y = the columns of x from ``first`` on."""

    word = "columns"
    x: Tensor
    first: int

    def __post_init__(self) -> None:
        self._check(self.x.rows == self.y.rows, "the rows differ")
        self._check(0 <= self.first <= self.x.width - self.y.width, f"no columns {self.first}")

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        return x[0][:, self.first : self.first + self.y.width]


@dataclass(frozen=True, slots=True, eq=False)
class Concat(Op):
    """y = the rows of a, each followed by that of ``b``."""

    word = "concat"
    a: Tensor
    b: Tensor

    def __post_init__(self) -> None:
        self._check(self.a.rows == self.b.rows == self.y.rows, "the rows differ")
        self._check(self.a.width + self.b.width == self.y.width, "the widths differ")

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        return np.concatenate(x, axis=1)


@dataclass(frozen=True, slots=True, eq=False)
class Hide(Op):
    """y = x with the lowest f32 number in the columns from ``first`` to before ``end``."""

    word = "hide"
    x: Tensor
    first: int
    end: int

    def __post_init__(self) -> None:
        self._check_same(self.x)
        self._check(0 <= self.first < self.end <= self.x.width, f"no columns {self.first} on")

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        y = x[0].copy()
        y[:, self.first : self.end] = np.finfo(np.float32).min
        return y


@dataclass(frozen=True, slots=True, eq=False)
class Gather(Op):
    """y = the rows of x whose results the step's output needs."""

    word = "gather"
    x: Tensor

    def __post_init__(self) -> None:
        self._check(self.x.width == self.y.width, "the widths differ")

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        y: Floats = x[0][at.outputs]
        return y


@dataclass(frozen=True, slots=True, eq=False)
class Reorder(Op):
    """y = x with its columns in an ``order`` (width,)."""

    word = "reorder"
    x: Tensor
    order: StoredVector

    def __post_init__(self) -> None:
        self._check_same(self.x)
        self._check(self.order.size == self.x.width, f"the order has {self.order.size} columns")

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        y: Floats = x[0][:, at.vector(self.order).astype(np.intp)]
        return y


@dataclass(frozen=True, slots=True, eq=False)
class Recall(Op):
    """y = the sum of x and of the ``banked`` streams, weighted by the softmax of the sum of each
    one's norm ``of`` (Kimi K3's attention residuals)."""

    word = "recall"
    x: Tensor
    banked: tuple[Tensor, ...]
    of: Normalization

    def __post_init__(self) -> None:
        self._check_same(self.x, *self.banked)

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        streams = np.stack([*x[1:], x[0]], axis=-2)
        weight = None if self.of.weight is None else at.vector(self.of.weight)
        scores = self.of.norm(streams, weight).sum(axis=-1, keepdims=True)
        weights = np.exp(scores - scores.max(axis=-2, keepdims=True))
        total: Floats = (weights * streams).sum(axis=-2) / weights.sum(axis=-2)
        return total


@dataclass(frozen=True, slots=True, eq=False)
class Rope(Op):
    """y = x with each head's first values turned by the rows' positions."""

    word = "rope"
    x: Tensor
    rope: RopeConfig
    heads: int

    def __post_init__(self) -> None:
        self._check_same(self.x)
        self._check(self.x.width % self.heads == 0, f"not {self.heads} heads")

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        heads = x[0].reshape(len(x[0]), self.heads, -1)
        turned = self.rope.rotation.turn(heads, at.positions, at.turns(self.rope))
        return np.asarray(turned, np.float64).reshape(x[0].shape)


@dataclass(frozen=True, slots=True, eq=False)
class AllReduce(Op):
    """y = the sum of the x of all ranks."""

    word = "all_reduce"
    x: Tensor

    def __post_init__(self) -> None:
        self._check_same(self.x)

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        return at.sum_of_ranks(x[0])


@dataclass(frozen=True, slots=True, eq=False)
class AllGather(Op):
    """y = the x of all ranks, side by side."""

    word = "all_gather"
    x: Tensor

    def evaluate(self, at: Evaluation, *x: Floats) -> Floats:
        return at.columns_of_ranks(x[0])
