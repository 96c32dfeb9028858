"""Alternating updates of several streams (AltUp, arXiv 2301.13310), as in Gemma 3n."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance, ceil_div

THREADS = 128


@dataclass(frozen=True)
class _OfStreams(KernelSpec):
    """Base: ``streams`` (rows, cols) of a layer."""

    rows: int
    cols: int
    streams: int = 4

    #: What the streams that are read are called.
    source: ClassVar[str] = "x"

    def __post_init__(self) -> None:
        if not 1 <= self.rows <= 65535 or self.cols < 1 or not 2 <= self.streams <= 8:
            raise PtxgenError(
                f"{self.name}: {self.streams} streams (2 to 8) of {self.rows} x {self.cols}"
            )

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(ceil_div(self.cols, THREADS), self.rows, 1), block=(THREADS, 1, 1))

    @property
    def tolerance(self) -> Tolerance:
        return Tolerance(rtol=2e-6, atol=1e-6)

    def of_streams(self, name: str, access: Access) -> list[Param]:
        """A parameter for each stream."""
        return [Param(f"{name}{i}", "f32", ("rows", "cols"), access) for i in range(self.streams)]

    def flops(self) -> int:
        return 2 * self.rows * self.cols * self.streams


@dataclass(frozen=True)
class PredictStreams(_OfStreams):
    """y<i> = x<i> + sum over j of coefs[i * streams + j] x<j>, with coefs of each row."""

    name = "predict_streams"
    template = ("urdir.templates", "altup/predict_streams.ptx.j2")

    @property
    def coefficients(self) -> int:
        """Coefficients of a row."""
        return self.streams**2

    @property
    def params(self) -> tuple[Param, ...]:
        coefs = Param("coefs", "f32", ("rows", "coefficients"), Access.IN)
        return (*self.of_streams("x", Access.IN), coefs, *self.of_streams("y", Access.OUT))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        x = np.stack([inputs[f"x{i}"].astype(np.float64) for i in range(self.streams)])
        coefs = inputs["coefs"].reshape(self.rows, self.streams, self.streams)
        y = x + np.einsum("rij,jrc->irc", coefs, x)
        return {f"y{i}": y[i].astype(np.float32) for i in range(self.streams)}

    @classmethod
    def examples(cls) -> Mapping[str, PredictStreams]:
        return {"a row": cls(1, 300), "rows": cls(3, 37), "two streams": cls(2, 130, 2)}


@dataclass(frozen=True)
class CorrectStreams(_OfStreams):
    """y<i> = x<i> + (coefs[i] + 1) (made - x0), with coefs of each row, and z = y0 * scale."""

    name = "correct_streams"
    template = ("urdir.templates", "altup/correct_streams.ptx.j2")

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            *self.of_streams("x", Access.IN),
            Param("made", "f32", ("rows", "cols"), Access.IN),
            Param("coefs", "f32", ("rows", "streams"), Access.IN),
            Param("scale", "f32", ("cols",), Access.IN),
            *self.of_streams("y", Access.OUT),
            Param("z", "f32", ("rows", "cols"), Access.OUT),
        )

    def reference(self, **inputs: Any) -> dict[str, Array]:
        x = [inputs[f"x{i}"].astype(np.float64) for i in range(self.streams)]
        change, found = inputs["made"] - x[0], {}
        for i in range(self.streams):
            found[f"y{i}"] = (
                x[i] + (inputs["coefs"][:, i : i + 1].astype(np.float64) + 1.0) * change
            )
        found["z"] = found["y0"] * inputs["scale"]
        return {name: values.astype(np.float32) for name, values in found.items()}

    @classmethod
    def examples(cls) -> Mapping[str, CorrectStreams]:
        return {"a row": cls(1, 300), "rows": cls(3, 37), "two streams": cls(2, 130, 2)}


@dataclass(frozen=True)
class MatchLength(KernelSpec):
    """y[r] = x[r] * |target[r]| / |x[r]|, the lengths being those of rows."""

    rows: int
    cols: int

    name = "match_length"
    template = ("urdir.templates", "altup/match_length.ptx.j2")

    def __post_init__(self) -> None:
        if not 1 <= self.rows < 2**31 or self.cols < 1:
            raise PtxgenError(f"{self.name}: {self.rows} x {self.cols}: both from 1")

    @property
    def params(self) -> tuple[Param, ...]:
        matrix = ("rows", "cols")
        return (
            Param("x", "f32", matrix, Access.IN),
            Param("target", "f32", matrix, Access.IN),
            Param("y", "f32", matrix, Access.OUT),
        )

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(self.rows, 1, 1), block=(THREADS, 1, 1))

    @property
    def tolerance(self) -> Tolerance:
        return Tolerance(rtol=5e-6)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        x, target = (inputs[name].astype(np.float64) for name in ("x", "target"))
        lengths = [np.sqrt(np.sum(of * of, axis=1, keepdims=True)) for of in (target, x)]
        return {"y": (x * lengths[0] / lengths[1]).astype(np.float32)}

    @classmethod
    def examples(cls) -> Mapping[str, MatchLength]:
        return {"a row": cls(1, 301), "rows": cls(3, 37)}

    def flops(self) -> int:
        return 5 * self.rows * self.cols


@dataclass(frozen=True)
class Sparsify(KernelSpec):
    """y = max(0, x - (mean + deviations * std)), mean and standard deviation (of cols - 1 degrees)
    being those of each row: Gaussian top-k (Gemma 3n)."""

    rows: int
    cols: int
    deviations: float

    name = "sparsify"
    template = ("urdir.templates", "altup/sparsify.ptx.j2")

    def __post_init__(self) -> None:
        if not 1 <= self.rows < 2**31 or self.cols < 2:
            raise PtxgenError(f"{self.name}: {self.rows} rows of {self.cols} values: 2 at least")

    @property
    def params(self) -> tuple[Param, ...]:
        matrix = ("rows", "cols")
        return Param("x", "f32", matrix, Access.IN), Param("y", "f32", matrix, Access.OUT)

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(self.rows, 1, 1), block=(THREADS, 1, 1))

    @property
    def tolerance(self) -> Tolerance:
        return Tolerance(rtol=1e-5, atol=2e-6)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        return {"y": sparse(inputs["x"].astype(np.float64), self.deviations).astype(np.float32)}

    @classmethod
    def examples(cls) -> Mapping[str, Sparsify]:
        return {"a row": cls(1, 1031, 1.6448533535003662), "rows": cls(3, 37, 0.5)}

    def flops(self) -> int:
        return 6 * self.rows * self.cols


def sparse(x: Array, deviations: float) -> Array:
    """The values of rows that are that far above their mean, less that bound; f64."""
    bound = x.mean(axis=1, keepdims=True) + deviations * x.std(axis=1, ddof=1, keepdims=True)
    return np.maximum(0.0, x - bound)
