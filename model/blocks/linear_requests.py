"""What the launches of linear layers are asked for, and what they can do beside a product."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from urdir.model.blocks.linear_vectors import Ends
from urdir.model.blocks.stream_norms import StreamNorms
from urdir.model.memory.norms import NormLayer
from urdir.model.memory.weights import Matrix
from urdir.ptxgen.kernels.linear.choice import Limits, LinearRequest, takes_gemm
from urdir.ptxgen.kernels.linear.packed_choice import packs
from urdir.ptxgen.kernels.linear.prologue.gate import Gate
from urdir.ptxgen.kernels.linear.spec import MAX_BATCH
from urdir.ptxgen.weights.halves import Halves
from urdir.ptxgen.weights.packed_few import Order

if TYPE_CHECKING:
    from urdir.driver.device import Device
    from urdir.model.memory.exchange import RankExchange


@dataclass(frozen=True, slots=True)
class LinearRequests(StreamNorms):
    """Base: what `LinearLayers` ask for of ``rows`` activation vectors, on a device of ``limits``.

    ``exact`` keeps activations f32; else few rows are rounded to 16-bit integers (where the weights
    are quantised), one row by groups of 32, several by groups of 256; many are rounded to f16, and
    so is what four and more leave for the next product.
    """

    exact: bool
    limits: Limits

    def request(self, *matrices: Matrix, ends: Ends) -> LinearRequest:
        """The vectors of a launch times all of the matrices, without norm or residual."""
        shapes = tuple((matrix.format, matrix.rows) for matrix in matrices)
        biased = tuple(matrix.bias is not None for matrix in matrices)
        return LinearRequest(
            self.limits,
            shapes,
            matrices[0].cols,
            min(self.rows, MAX_BATCH),
            self.exact,
            bias=biased[0] if len(set(biased)) == 1 else biased,
            activation=ends.activation,
            scale=ends.scale,
            softcap=ends.softcap,
            clamp=ends.clamp,
        )

    def gains(self, matrix: Matrix) -> bool:
        """Whether the launch that ends a block with this product can multiply it with a gain."""
        request = replace(self.request(matrix, ends=Ends()), ends_block=True)
        whole = matrix.bias is None and not matrix.is_partial
        return whole and self.rows == 1 and request.fits_gemv

    def takes_gate(self, matrix: Matrix, gate: Gate) -> bool:
        """Whether the launch that ends a block with this product takes x through a gate first."""
        request = replace(self.request(matrix, ends=Ends()), ends_block=True, gate=gate)
        return self.rows == 1 and request.fits_gemv

    def gives(self, matrix: Matrix, exchange: RankExchange) -> bool:
        """Whether the launch that ends a block with this product gives it to the other ranks, as
        words of the next exchange (`Gives`)."""
        request = replace(self.request(matrix, ends=Ends()), ends_block=True)
        fits = self.rows == 1 and request.fits_gemv
        return fits and exchange.shape.takes_one_launch(matrix.rows)

    @property
    def takes_gemm(self) -> bool:
        """Whether these are many rows: see ``choice.takes_gemm``."""
        return takes_gemm(self.rows, self.exact)

    def packs(self, *matrices: Matrix) -> bool:
        """Whether the product with such matrices takes packed activations (`PackedLinear`)."""
        formats = tuple(matrix.format for matrix in matrices)
        return self.takes_gemm and packs(self.limits, formats)

    def packs_few(self, matrices: Sequence[Matrix], following: Matrix) -> Order | None:
        """In which order few rows' product with a matrix, or a gated pair, is left packed for the
        product with the next one; None: it is not."""
        made = self.request(matrices[0], ends=Ends())
        whole = alike(matrices[0], matrices[-1]) and made.can_pack
        fits = whole and self.takes_few_packed(following)
        return Halves(following.format).order if fits else None

    def takes_few_packed(self, matrix: Matrix) -> bool:
        """Whether the product of few rows with the matrix takes packed activations."""
        return not self.takes_gemm and self.request(matrix, ends=Ends()).takes_packed

    def takes_few_normed(self, matrices: Sequence[Matrix], norm: NormLayer, pair: bool) -> bool:
        """Whether the product of few rows, after the norm, takes them packed if that has begun.
        ``pair``: of two matrices, as one gated product."""
        if not norm.is_scaled_rms or (pair and not alike(*matrices)) or self.takes_gemm:
            return False
        request = self.request(*matrices[: 1 if pair else None], ends=Ends())
        return replace(request, norm=norm.norm, gated=pair).takes_packed


def device_limits(device: Device) -> Limits:
    """What the choice of a kernel depends on."""
    properties = device.properties
    return Limits(
        properties.sm_count,
        properties.shared_per_sm,
        properties.shared_per_block_optin,
        properties.max_cluster,
        target=device.native_target,
    )


def alike(gate: Matrix, up: Matrix) -> bool:
    """Whether one launch can take both: same type and shape, both with a bias or none."""
    return gate.layout == up.layout and (gate.bias is None) == (up.bias is None)
