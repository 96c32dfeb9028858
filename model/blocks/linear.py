"""Linear layers: activations times weight matrices, with the norm before and the residual after.

For few rows one launch normalises, multiplies with all matrices, applies the nonlinearity and adds;
for many rows (``takes_gemm``) most of these are launches of their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from urdir.model.blocks.activations import Activations
from urdir.model.blocks.arguments import given
from urdir.model.blocks.linear_requests import LinearRequests, alike
from urdir.model.blocks.linear_vectors import (
    Continuation,
    Ends,
    gated,
    normalising,
    result,
    rows_of,
    vectors,
)
from urdir.model.blocks.packed_linear import PackedLinear
from urdir.model.memory.norms import NormLayer
from urdir.model.memory.weights import Matrix
from urdir.ptxgen.kernels.activate import Activate
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.linear.choice import LinearRequest, choose_linear
from urdir.ptxgen.kernels.linear.packed_parts import HeadPlaces
from urdir.ptxgen.kernels.linear.products.gemm import Gemm
from urdir.ptxgen.kernels.linear.spec import MAX_BATCH
from urdir.ptxgen.weights.packed_few import Order

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.model.memory.exchange import RankExchange

# One object for equal kernels, with its cached properties.
_gemm = lru_cache(maxsize=256)(Gemm)
_activate = lru_cache(maxsize=64)(Activate)
SILU = Activation("silu")


@dataclass(frozen=True, slots=True)
class LinearLayers(LinearRequests):
    """Appends linear layers of ``rows`` activation vectors to a plan, with buffers of ``work``."""

    def append(
        self,
        label: str,
        matrices: Sequence[tuple[Matrix, Slice]],
        x: Activations,
        norm: NormLayer | None = None,
        activation: Activation | None = None,
        *,
        scale: float = 1.0,
        softcap: float = 0.0,
        clamp: float = 0.0,
        ends_block: bool = False,
        fill: bool = False,
        gain: Slice | None = None,
        then: Continuation | None = None,
        exchange: RankExchange | None = None,
        packs: Order | None = None,
    ) -> bool:
        """y (rows, out) = f(x (rows, in) times the matrix (out, in), plus its bias), for each.

        x is normalised first where there is a ``norm``; ``work["normed"]`` may be used. Of the
        ``activation`` f, y is multiplied with ``scale`` and bounded as `LinearSpec` says.
        ``ends_block``, ``fill`` and, of one matrix, ``packs``: see `LinearRequest`; ``gain``: see
        `Destination`.

        With an ``exchange`` the product of one matrix, of which `gives`, goes to the other ranks as
        well. With ``then`` the launch may go on with the first product, and stores what comes of it
        alone: returns whether it does.
        """
        ends = Ends(activation, scale, softcap, clamp)
        if self.packs(*(matrix for matrix, _ in matrices)):
            self._packed.append(label, matrices, x, norm, **ends._asdict())
            return False
        request = self.request(*(matrix for matrix, _ in matrices), ends=ends)
        gained = gain is not None
        request = replace(request, ends_block=ends_block, fill=fill, gained=gained, packs=packs)
        x, norm = self._normed(label, request, x, norm)
        request = gated(request, x)
        if self.takes_gemm:
            for number, (matrix, y) in enumerate(matrices):
                self._append_gemm(f"{label}.{number}" if number else label, matrix, x.x, y, ends)
            return False
        if exchange is not None:
            request = replace(request, gives=exchange.gives)
        beside, goes_on = given(gain=gain), False
        if then is not None:
            continued = replace(request, then=then.kernel)
            if goes_on := normalising(continued, x, norm).continues:
                request, beside = continued, beside | then.launch
        for at, count, suffix in self._slices():
            kernel = choose_linear(normalising(replace(request, batch=count), x, norm))
            launch: dict[str, Slice] = {}
            for number, (matrix, out) in enumerate(matrices):
                tag = str(number or "")
                launch[f"weights{tag}"] = matrix.data
                launch[f"y{tag}"] = result(kernel, out, at, number)
                if matrix.bias is not None:
                    launch[f"bias{tag}"] = matrix.bias
            words = {} if exchange is None else exchange.arguments_of(kernel)
            launch |= beside
            self.plan.launch(
                kernel, label + suffix, **launch, **vectors(kernel, x, norm, at), **words
            )
        return goes_on

    def append_residual(
        self,
        label: str,
        matrix: Matrix,
        x: Activations,
        residual: Slice,
        y: Slice,
        next_norm: NormLayer | None,
        fill: bool = False,
        scale: float = 1.0,
        gain: Slice | None = None,
        packs_norm: bool = False,
    ) -> Activations:
        """y = residual + scale * (x times the matrix, plus its bias); y is another buffer. Returns
        it, perhaps with the ``next_norm`` begun, None where there is none.

        ``work["delta"]``, ``work["normed"]``, ``work["scaled"]`` and ``work["summary"]`` may be
        used. ``fill``: see `CutOptions`; ``gain`` and ``packs_norm``: see `Destination`.
        """
        if self.packs(matrix):
            self._packed.append(label, [(matrix, y)], x, None, residual=residual, scale=scale)
            return Activations(y)
        if self.takes_gemm:
            delta = self.work["delta"]
            self._append_gemm(label, matrix, x.x, delta, Ends())
            label = f"{label}.residual"
            if next_norm is None:
                return self.append_sum(label, matrix.rows, residual, delta, y, scale)
            return self.append_norm_after(
                label, matrix.rows, delta, None, residual, y, next_norm, scale
            )
        made = Activations(y)
        begins = next_norm is not None and next_norm.is_scaled_rms
        request = replace(
            gated(self.request(matrix, ends=Ends(scale=scale)), x),
            residual=True,
            fill=fill,
            summarises=begins,
            gained=gain is not None,
        )
        if packs_norm and begins and request.can_pack:
            request = replace(request, packs="units")
        for at, count, suffix in self._slices():
            kernel = choose_linear(normalising(replace(request, batch=count), x, None))
            begun = {}
            if kernel.summarises and next_norm is not None:
                buffers = self.work["scaled"], self.work["summary"]
                made = Activations(y, next_norm, *buffers, scaled_is_packed=bool(kernel.packs))
                begun = given(
                    next_norm=next_norm.weight, scaled=made.scaled, y_summary=made.summary
                )
            self.plan.launch(
                kernel,
                label + suffix,
                weights=matrix.data,
                residual=rows_of(residual, at, count, matrix.rows),
                y=rows_of(y, at, count, matrix.rows),
                **vectors(kernel, x, None, at),
                **given(bias=matrix.bias, gain=gain),
                **begun,
            )
        return made

    def append_inner(
        self,
        label: str,
        gate: Matrix | None,
        up: Matrix,
        x: Activations,
        norm: NormLayer | None,
        y: Slice,
        activation: Activation = SILU,
        following: Matrix | None = None,
    ) -> Activations:
        """y = f(gate x') * (up x'), or f(up x') without a gate, x' being x after the ``norm``, each
        product plus its bias; as the product with the ``following`` matrix takes it, f32 without.

        ``work["gate"]``, ``work["up"]`` and ``work["normed"]`` may be used.
        """
        # silu is what a gated product has anyway
        ends = Ends(None if gate is not None and activation == SILU else activation)
        matrices = [matrix for matrix in (gate, up) if matrix is not None]
        if self.packs(*matrices) and (gate is None or alike(gate, up)):
            packs = following is not None and self.packs(following)
            pair = up if gate is not None else None
            product = [(matrices[0], y)]
            self._packed.append(label, product, x, norm, up=pair, packs=packs, **ends._asdict())
            return Activations(y, packed=y if packs else None)
        order = None if following is None else self.packs_few(matrices, following)
        if gate is None:
            self.append(label, [(up, y)], x, norm, activation, packs=order)
        else:
            self._append_gated(label, gate, up, x, norm, y, activation, order)
        return Activations(y, packed=y if order else None)

    def _append_gated(
        self,
        label: str,
        gate: Matrix,
        up: Matrix,
        x: Activations,
        norm: NormLayer | None,
        y: Slice,
        activation: Activation,
        packs: Order | None,
    ) -> None:
        if self.takes_gemm or not alike(gate, up):
            gated, plain = self.work["gate"], self.work["up"]
            self.append(label, [(gate, gated), (up, plain)], x, norm)
            activate = _activate(self.rows * gate.rows, activation, gated=True)
            self.plan.launch(activate, f"{label}.activation", gate=gated, up=plain, y=y)
            return
        # silu is what a gated product has anyway
        ends = Ends(None if activation == SILU else activation)
        request = replace(self.request(gate, ends=ends), gated=True, packs=packs)
        x, norm = self._normed(label, request, x, norm)
        for at, count, suffix in self._slices():
            kernel = choose_linear(normalising(replace(request, batch=count), x, norm))
            self.plan.launch(
                kernel,
                label + suffix,
                weights=gate.data,
                up=up.data,
                y=result(kernel, y, at),
                **given(bias=gate.bias, up_bias=up.bias),
                **vectors(kernel, x, norm, at),
            )

    def append_heads(
        self,
        label: str,
        matrices: Sequence[tuple[Matrix, Slice]],
        x: Activations,
        places: tuple[HeadPlaces, ...],
    ) -> None:
        """x times each matrix, as heads in a cache (`HeadPlaces`): for matrices that `packs`."""
        self._packed.append(label, matrices, x, None, heads=places)

    @property
    def _packed(self) -> PackedLinear:
        return PackedLinear(self.plan, self.work, self.rows, self.limits)

    def _slices(self) -> list[tuple[int, int, str]]:
        """First row, rows and a suffix for the label of each launch."""
        firsts = range(0, self.rows, MAX_BATCH)
        return [
            (at, min(MAX_BATCH, self.rows - at), f" rows {at}" if len(firsts) > 1 else "")
            for at in firsts
        ]

    def _normed(
        self, label: str, request: LinearRequest, x: Activations, norm: NormLayer | None
    ) -> tuple[Activations, NormLayer | None]:
        """The vectors of a product, and the norm that its launch has yet to compute."""
        if x.due is not None and not normalising(request, x, norm).fits_gemv:
            x = self.complete(x)
        if norm is None:
            return x, None
        if x.has_completed(norm):
            assert x.normed is not None
            return Activations(x.normed), None
        if not self.takes_gemm and replace(request, norm=norm.norm).fuses_norm:
            return x, norm
        made = self.append_norm(f"{label}.norm", request.cols, x, norm, self.work["normed"])
        assert made.normed is not None
        return Activations(made.normed), None

    def _append_gemm(self, label: str, matrix: Matrix, x: Slice, y: Slice, ends: Ends) -> None:
        kernel = _gemm(
            matrix.format,
            matrix.rows,
            matrix.cols,
            self.rows,
            matrix.bias is not None,
            activation=ends.activation,
            scale=ends.scale,
            softcap=ends.softcap,
            clamp=ends.clamp,
        )
        self.plan.launch(kernel, label, weights=matrix.data, x=x, **given(bias=matrix.bias), y=y)
