"""References to the tensors of a model file, from which descriptions are made.

A description names, for each of its weights, the tensor and which of its rows. So a fused tensor
needs no code of its own, and a model's tensors are those that its description names.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any, TypeVar, cast

import numpy as np
import numpy.typing as npt

from urdir.ptxgen.kernels.norm import Norm

Shape = tuple[int, ...]
#: A range of items: the first number, and the one after the last.
Run = tuple[int, int]
_T = TypeVar("_T")
_Number = TypeVar("_Number", bound=np.generic)
_LAYER = re.compile(r"^((?:enc|dec)\.)?blk\.\d+\.")


def length(runs: tuple[Run, ...]) -> int:
    """The total length of some ranges."""
    return sum(stop - start for start, stop in runs)


@dataclass(frozen=True, slots=True)
class StoredMatrix:
    """A matrix (rows, cols): rows of the tensor ``name``, whose ``shape`` has rows first.

    The tensor counts as (all rows, cols), whatever its rank. From every ``period`` rows, ``each``
    are taken, starting at ``first``; (0, all, all) is the whole tensor. ``runs`` then select rows
    of these and ``columns`` select columns, range after range; None is all. ``transposed``
    exchanges rows and columns within each period, in f32, or rounded to f16 with ``half``.
    """

    name: str
    shape: Shape
    first: int
    each: int
    period: int
    transposed: bool = False
    half: bool = False
    runs: tuple[Run, ...] | None = None
    columns: tuple[Run, ...] | None = None

    @classmethod
    def whole(cls, name: str, *shape: int) -> StoredMatrix:
        """All rows of a tensor."""
        rows = math.prod(shape[:-1])
        return cls(name, shape, 0, rows, rows)

    def part(self, first: int, each: int, period: int | None = None) -> StoredMatrix:
        """Some rows of a whole tensor."""
        return StoredMatrix(self.name, self.shape, first, each, period or self.period)

    def pick(self, *runs: Run) -> StoredMatrix:
        """Select rows of a matrix without runs, before transposition."""
        if len(runs) == 1 and self.period == math.prod(self.shape[:-1]):
            (start, stop) = runs[0]
            return replace(self, first=self.first + start, each=stop - start)
        return replace(self, runs=runs)

    def pick_columns(self, *runs: Run) -> StoredMatrix:
        """Select columns of a matrix with all columns."""
        return replace(self, columns=runs)

    @property
    def cols(self) -> int:
        """Input width."""
        if self.transposed:
            return self.each
        return self.shape[-1] if self.columns is None else length(self.columns)

    @property
    def taken(self) -> int:
        """Number of tensor rows that are read; equals ``rows`` unless transposed."""
        periods = math.prod(self.shape[:-1]) // self.period
        return periods * self.each if self.runs is None else length(self.runs)

    @property
    def rows(self) -> int:
        """Output width."""
        return self.taken // self.each * self.shape[-1] if self.transposed else self.taken

    @property
    def is_whole(self) -> bool:
        """Whether the reference is the whole tensor, unchanged."""
        some = self.runs is not None or self.columns is not None
        return self.each == self.period and not self.transposed and not some


@dataclass(frozen=True, slots=True)
class StoredVector:
    """Values of the tensor ``name`` of that ``shape``: ``size`` from ``first`` on, each ``repeat``
    times. With a ``period``, ``each`` values of every period; ``runs`` then select ranges, as in
    `StoredMatrix`."""

    name: str
    shape: Shape
    first: int
    size: int
    repeat: int = 1
    each: int = 0
    period: int = 0
    runs: tuple[Run, ...] | None = None

    @classmethod
    def whole(cls, name: str, *shape: int) -> StoredVector:
        """All values of a tensor."""
        return cls(name, shape, 0, math.prod(shape))

    def part(self, first: int, size: int, period: int | None = None) -> StoredVector:
        """Select a range of values, or with a ``period`` one range in every period of a whole
        tensor. Repetition is kept."""
        if period is None:
            start = self.first + first // self.repeat
            return StoredVector(self.name, self.shape, start, size, self.repeat)
        total = self.size // period * size
        return StoredVector(self.name, self.shape, first, total, each=size, period=period)

    def pick(self, *runs: Run) -> StoredVector:
        """Select values of a vector without runs."""
        if len(runs) == 1 and not self.period and runs[0][0] % self.repeat == 0:
            return self.part(runs[0][0], length(runs))
        return replace(self, size=length(runs), runs=runs)

    def of(self, values: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
        """The values (size,) of this reference, given all values of the tensor."""
        if self.period:
            taken = values.reshape(-1, self.period)[:, self.first : self.first + self.each].ravel()
        else:
            taken = values.ravel()[self.first :]
        repeated = np.repeat(taken, self.repeat)
        runs = self.runs or ((0, self.size),)
        return np.concatenate([repeated[start:stop] for start, stop in runs])

    def repeated(self, times: int) -> StoredVector:
        """The vector with every value repeated ``times`` times."""
        return StoredVector(self.name, self.shape, self.first, self.size * times, times)


@dataclass(frozen=True, slots=True)
class LowRankTerm:
    """What is added to a matrix: ``b`` (rows, rank) times ``a`` (rank, cols)."""

    a: StoredMatrix
    b: StoredMatrix


@dataclass(frozen=True, slots=True)
class Linear:
    """y = W x (+ bias). The columns of W are those of x in an ``order`` (cols,), if given, those of
    experts in one each, (experts, cols); a ``factor`` (1,) multiplies y (BitNet); ``low`` is added
    to W (Zamba 2)."""

    matrix: StoredMatrix
    bias: StoredVector | None = None
    order: StoredVector | None = None
    factor: StoredVector | None = None
    low: LowRankTerm | None = None

    def part(self, first: int, each: int, period: int | None = None) -> Linear:
        """Select rows (of every ``period`` rows) of a whole tensor."""
        assert self.low is None
        bias = self.bias and self.bias.part(first, each, period)
        return Linear(self.matrix.part(first, each, period), bias, self.order, self.factor)

    def pick(self, *runs: Run) -> Linear:
        """Select rows; see `StoredMatrix.pick`."""
        assert self.low is None
        return replace(
            self, matrix=self.matrix.pick(*runs), bias=self.bias and self.bias.pick(*runs)
        )

    def transposed(self, *, half: bool = False) -> Linear:
        """The matrix with rows and columns exchanged in each period, in f32 or f16; no bias."""
        assert self.bias is None
        return Linear(replace(self.matrix, transposed=True, half=half))

    @property
    def rows(self) -> int:
        """Output width."""
        return self.matrix.rows

    @property
    def cols(self) -> int:
        """Input width."""
        return self.matrix.cols


@dataclass(frozen=True, slots=True)
class Normalization:
    """A norm with its weights."""

    norm: Norm
    weight: StoredVector | None = None
    bias: StoredVector | None = None


@dataclass(frozen=True, slots=True)
class Slopes:
    """Decay slopes of lightning attention in one of ``layers``: a token keeps exp(-slope).

    They are not stored. The slope of head h is s 2^(-8 (h + 1) / heads), as in ALiBi; s falls from
    1 in the first layer to 1e-5 in the last one.
    """

    layer: int
    layers: int
    heads: int

    def rates(self) -> npt.NDArray[np.float32]:
        """The negated slopes, (heads,) f32."""
        scale = 1.0 - self.layer / max(1, self.layers - 1) + 1e-5
        slopes = 2.0 ** (-8.0 * np.arange(1, self.heads + 1) / self.heads)
        return np.asarray(-scale * slopes, np.float32)


#: Keys further away than this have the bias of this distance (T5; llama.cpp has no key for it).
MOST_DISTANCE = 128


@dataclass(frozen=True, slots=True)
class RelativeBias:
    """A bias of attention's scores by the distance of a key, ``weight`` (buckets, heads): those of
    earlier keys in the first half of the buckets, of later ones in the second; where it is
    ``causal``, all buckets are of earlier ones. Near distances have a bucket each, others share
    some, more of them the further they are (T5; Raffel et al. 2019, arXiv 1910.10683)."""

    weight: StoredVector
    buckets: int
    heads: int
    causal: bool = False

    def table(self, values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
        """The bias of each head for distances from -MOST_DISTANCE to MOST_DISTANCE, (heads, 2 *
        MOST_DISTANCE + 1) f32, of the values of ``weight``."""
        distance = np.arange(-MOST_DISTANCE, MOST_DISTANCE + 1)
        side, away = self.buckets if self.causal else self.buckets // 2, np.abs(distance)
        exact = side // 2
        far = np.log(np.maximum(away, 1) / exact) / math.log(MOST_DISTANCE / exact)
        bucket = np.minimum(exact + np.floor(far * (side - exact)).astype(np.int64), side - 1)
        bucket = np.where(away < exact, away, bucket)
        if not self.causal:
            bucket += side * (distance > 0)
        return np.ascontiguousarray(values.reshape(self.buckets, self.heads)[bucket].T)


Stored = StoredMatrix | StoredVector


def stored_in(description: Any) -> Iterator[Stored]:
    """Every reference within a description, once, in field order."""
    return iter(dict.fromkeys(_walk(description)))


def of_any_layer(description: _T) -> _T:
    """The value with layer numbers removed from tensor names: equal layers become equal."""
    return cast(_T, _renamed(description))


def _renamed(value: Any) -> Any:
    if isinstance(value, Stored):
        return replace(value, name=_LAYER.sub(r"\1", value.name))
    if isinstance(value, Slopes):
        return replace(value, layer=0)
    if isinstance(value, tuple):
        return tuple(map(_renamed, value))
    if is_dataclass(value) and not isinstance(value, type):
        own = {field.name: getattr(value, field.name) for field in fields(value)}
        renamed = {name: _renamed(old) for name, old in own.items()}
        changed = {name: new for name, new in renamed.items() if new != own[name]}
        return replace(value, **changed) if changed else value
    return value


def _walk(value: Any) -> Iterator[Stored]:
    if isinstance(value, Stored):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _walk(item)
    else:
        kind: Any = type(value)
        for name in _names(kind):
            yield from _walk(getattr(value, name))


@cache
def _names(kind: Any) -> tuple[str, ...]:
    """The fields of a dataclass, and of another type none."""
    return tuple(field.name for field in fields(kind)) if is_dataclass(kind) else ()
