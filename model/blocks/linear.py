"""Linear layers: activations times weight matrices, with the norm before and the residual after.

For few rows one launch normalises, multiplies with all matrices and adds; for many rows
(``takes_gemm``) these are launches of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from urdir.model.families.description import Config
from urdir.model.memory.weights import Matrix
from urdir.ptxgen.kernels.activate import Activate
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.add import Add
from urdir.ptxgen.kernels.linear.choice import (
    Limits,
    LinearRequest,
    choose_linear,
    takes_gemm,
)
from urdir.ptxgen.kernels.linear.gemm import Gemm
from urdir.ptxgen.kernels.linear.spec import MAX_BATCH, LinearSpec
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.normalise import Normalise

if TYPE_CHECKING:
    from urdir.driver.memory import Arena, Slice
    from urdir.driver.plan import Plan
    from urdir.driver.properties import DeviceProperties

# One object for equal kernels, with its cached properties.
_gemm = lru_cache(maxsize=256)(Gemm)
_add = lru_cache(maxsize=64)(Add)
_activate = lru_cache(maxsize=64)(Activate)


@dataclass(frozen=True, slots=True)
class Activations:
    """Vectors ``x`` (rows, n) f32. The launch that made them may have begun the norm that follows,
    whose weights are ``norm`` (n,): x times these is in ``scaled``, and a ``summary`` of both
    (`GemmSmall`)."""

    x: Slice
    norm: Slice | None = None
    scaled: Slice | None = None
    summary: Slice | None = None

    def has_begun(self, norm: Slice | None) -> bool:
        """Whether the launch that made the vectors has begun this norm."""
        return norm is not None and norm is self.norm


@dataclass(frozen=True, slots=True)
class LinearLayers:
    """Appends linear layers of ``rows`` activation vectors to a plan, with buffers of ``work``.

    ``exact`` keeps activations f32; else few rows are rounded to 16-bit integers (where the weights
    are quantised), one row by groups of 32, several by groups of 256; many are rounded to f16.
    """

    plan: Plan
    config: Config
    work: Arena
    rows: int
    exact: bool
    limits: Limits

    def append(
        self,
        label: str,
        matrices: Sequence[tuple[Matrix, Slice]],
        x: Activations,
        norm: Slice | None = None,
    ) -> None:
        """y (rows, out) = x (rows, in) times the matrix (out, in), plus its bias, for each matrix.

        x is RMS-normalised first where there is a ``norm`` (in,); ``work["normed"]`` may be used.
        """
        biased = {matrix.bias is not None for matrix, _ in matrices}
        if self._many_rows or len(biased) > 1:
            if norm is not None and self._many_rows:
                normed = self._append_norm(f"{label}.norm", matrices[0][0].cols, x.x, norm)
                x, norm = Activations(normed), None
            for number, (matrix, y) in enumerate(matrices):
                self._append_one(f"{label}.{number}" if number else label, matrix, x, y, norm)
            return
        first, _ = matrices[0]
        for at, count, suffix in self._slices():
            launch: dict[str, Slice] = {}
            for number, (matrix, out) in enumerate(matrices):
                tag = str(number or "")
                launch[f"weights{tag}"] = matrix.data
                launch[f"y{tag}"] = _rows_of(out, at, count, matrix.rows)
                if matrix.bias is not None:
                    launch[f"bias{tag}"] = matrix.bias
            request = replace(
                self._request(count, *(matrix for matrix, _ in matrices)),
                bias=first.bias is not None,
                norm=None if norm is None else Norm("rms", self.config.rms_eps),
                summarised=x.has_begun(norm),
            )
            kernel = choose_linear(request)
            self.plan.launch(kernel, label + suffix, **launch, **_vectors(kernel, x, norm, at))

    def append_residual(
        self,
        label: str,
        matrix: Matrix,
        x: Slice,
        residual: Slice,
        y: Slice,
        next_norm: Slice | None,
        fill: bool = False,
    ) -> Activations:
        """y = residual + x times the matrix; y is another buffer. Returns it, perhaps with the norm
        begun whose weights are ``next_norm`` (out,), None where there is none.

        ``work["delta"]``, ``work["scaled"]`` and ``work["summary"]`` may be used. ``fill``: see
        `CutOptions`.
        """
        if self._many_rows or matrix.bias is not None:
            self.append(label, [(matrix, self.work["delta"])], Activations(x))
            add = _add(n=self.rows * matrix.rows)
            self.plan.launch(add, f"{label}.residual", a=residual, b=self.work["delta"], y=y)
            return Activations(y)
        made = Activations(y)
        for at, count, suffix in self._slices():
            begins = next_norm is not None
            request = self._request(count, matrix)
            kernel = choose_linear(replace(request, residual=True, fill=fill, summarises=begins))
            if kernel.summarises:
                made = Activations(y, next_norm, self.work["scaled"], self.work["summary"])
            self.plan.launch(
                kernel,
                label + suffix,
                weights=matrix.data,
                residual=_rows_of(residual, at, count, matrix.rows),
                y=_rows_of(y, at, count, matrix.rows),
                x=_rows_of(x, at, count, matrix.cols),
                **_given(next_norm=made.norm, scaled=made.scaled, y_summary=made.summary),
            )
        return made

    def append_gated(
        self, label: str, gate: Matrix, up: Matrix, x: Activations, norm: Slice, y: Slice
    ) -> None:
        """y = silu(gate x') * (up x'), x' being x RMS-normalised.

        ``work["gate"]`` and ``work["up"]`` may be used.
        """
        if self._many_rows or not _alike(gate, up):
            gated, plain = self.work["gate"], self.work["up"]
            self.append(label, [(gate, gated), (up, plain)], x, norm)
            activate = _activate(self.rows * gate.rows, Activation(), gated=True)
            self.plan.launch(activate, f"{label}.activation", gate=gated, up=plain, y=y)
            return
        for at, count, suffix in self._slices():
            request = replace(
                self._request(count, gate),
                norm=Norm("rms", self.config.rms_eps),
                gated=True,
                summarised=x.has_begun(norm),
            )
            kernel = choose_linear(request)
            self.plan.launch(
                kernel,
                label + suffix,
                weights=gate.data,
                up=up.data,
                y=_rows_of(y, at, count, gate.rows),
                **_vectors(kernel, x, norm, at),
            )

    @property
    def _many_rows(self) -> bool:
        return takes_gemm(self.rows, self.exact)

    def _request(self, batch: int, *matrices: Matrix) -> LinearRequest:
        """``batch`` vectors times all of the matrices, without norm or residual."""
        shapes = tuple((matrix.format, matrix.rows) for matrix in matrices)
        return LinearRequest(self.limits, shapes, matrices[0].cols, batch, self.exact)

    def _slices(self) -> list[tuple[int, int, str]]:
        """First row, rows and a suffix for the label of each launch."""
        firsts = range(0, self.rows, MAX_BATCH)
        return [
            (at, min(MAX_BATCH, self.rows - at), f" rows {at}" if len(firsts) > 1 else "")
            for at in firsts
        ]

    def _append_norm(self, label: str, cols: int, x: Slice, norm: Slice) -> Slice:
        kernel = Normalise(rows=self.rows, cols=cols, norm=Norm("rms", self.config.rms_eps))
        self.plan.launch(kernel, label, x=x, weight=norm, y=self.work["normed"])
        return self.work["normed"]

    def _append_one(
        self, label: str, matrix: Matrix, x: Activations, y: Slice, norm: Slice | None
    ) -> None:
        if not self._many_rows:
            self.append(label, [(matrix, y)], x, norm)
            return
        has_bias = matrix.bias is not None
        self.plan.launch(
            _gemm(matrix.format, matrix.rows, matrix.cols, self.rows, has_bias),
            label,
            weights=matrix.data,
            x=x.x,
            **_given(bias=matrix.bias),
            y=y,
        )


def device_limits(properties: DeviceProperties) -> Limits:
    """The sizes of a device that the choice of a kernel depends on."""
    return Limits(
        properties.sm_count,
        properties.shared_per_sm,
        properties.shared_per_block_optin,
        properties.max_cluster,
    )


def _alike(gate: Matrix, up: Matrix) -> bool:
    """Whether one launch can take both: same type and shape, no biases."""
    return gate.layout == up.layout and gate.bias is up.bias is None


def _given(**arguments: Slice | None) -> dict[str, Slice]:
    return {name: value for name, value in arguments.items() if value is not None}


def _vectors(
    kernel: LinearSpec, x: Activations, norm: Slice | None, first: int
) -> dict[str, Slice]:
    """The arguments of a launch for the vectors from ``first`` on."""
    if kernel.summarised:
        return _given(x=x.scaled, x_summary=x.summary)
    return _given(x=_rows_of(x.x, first, kernel.batch, kernel.cols), norm=norm)


def _rows_of(matrix: Slice, first: int, count: int, width: int) -> Slice:
    return matrix.slice(4 * first * width, 4 * count * width)
