"""What a layer is built from: owners of device memory, the step's rows, and where results go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from urdir.model.blocks.activations import Activations, RanksSum
from urdir.model.blocks.exchange import (
    append_begun_sum_of_ranks,
    append_sum_of_ranks,
    begins_norms,
)
from urdir.model.blocks.linear import LinearLayers
from urdir.model.blocks.linear_vectors import Continuation
from urdir.model.families.stored import Linear, Normalization, StoredVector
from urdir.model.lower.parts import LayerParts, device_limits
from urdir.model.lower.rows import OutputRows, Rows
from urdir.model.memory.exchange import RankExchange
from urdir.model.memory.norms import NormLayer
from urdir.model.memory.weights import Matrix
from urdir.model.memory.workspace import STREAMS
from urdir.ptxgen.kernels.gather import Gather
from urdir.ptxgen.kernels.linear.spec import MAX_BATCH
from urdir.ptxgen.kernels.rescale import Rescale

if TYPE_CHECKING:
    from urdir.driver.memory import Arena, Slice
    from urdir.driver.plan import Plan


def linear_layers(parts: LayerParts, plan: Plan, rows: Rows) -> LinearLayers:
    """What appends this step's linear layers to ``plan``."""
    limits = device_limits(parts.device)
    return LinearLayers(plan, parts.work, rows.count, exact=parts.exact, limits=limits)


@dataclass(frozen=True, slots=True)
class Destination:
    """Where the last product of a network goes: y = residual + scale * product, or the product
    alone; then the norm that follows may be begun, packed where the products after it take few rows
    so (``packs_norm``). ``y`` is no buffer that the launch reads. Where
    there is a ``gain`` (1,), the product is multiplied with sigmoid(gain), too: for products of
    which `LinearLayers.gains`."""

    y: Slice
    residual: Slice | None
    next_norm: NormLayer | None
    scale: float = 1.0
    gain: Slice | None = None
    packs_norm: bool = False


@dataclass(frozen=True, slots=True)
class LayerStep:
    """One layer in one step: what its launches are appended to and made of. ``y`` is where its
    result goes, where that is known before. With ``outputs`` these rows alone go on after
    attention.
    """

    plan: Plan
    parts: LayerParts
    rows: Rows
    index: int
    y: Slice | None = None
    outputs: OutputRows | None = None

    @property
    def linear(self) -> LinearLayers:
        """What appends linear layers."""
        return linear_layers(self.parts, self.plan, self.rows)

    @property
    def work(self) -> Arena:
        """The intermediates."""
        return self.parts.work

    def name(self, of: str) -> str:
        """The label of a launch: with the number of the layer in the model."""
        stage = self.parts.config.stage
        return f"blk.{self.index + (stage.first if stage else 0)}.{of}"

    def matrix(self, of: Linear) -> Matrix:
        """A matrix of the description, on the device."""
        return self.parts.weights.matrix(of)

    def vector(self, of: StoredVector) -> Slice:
        """A vector of the description, on the device."""
        return self.parts.weights.vector(of)

    def norm(self, of: Normalization | None) -> NormLayer | None:
        """A norm of the description, on the device."""
        return None if of is None else self.parts.weights.norm(of)

    def free(self, *used: Slice) -> Slice:
        """A buffer for the stream that is none of those, nor ``y``."""
        taken = {(s.buffer, s.offset) for s in (*used, self.y) if s is not None}
        buffers = (self.work[name] for name in STREAMS)
        return next(b for b in buffers if (b.buffer, b.offset) not in taken)

    @property
    def after_attention(self) -> LayerStep:
        """The layer for the rows that go on."""
        return self if self.outputs is None else replace(self, rows=self.outputs.rows, outputs=None)

    def gather_outputs(self, label: str, x: Slice, cols: int, y: Slice) -> None:
        """y = the rows of x (rows, cols) that go on alone."""
        assert self.outputs is not None
        kernel = Gather(cols, self.rows.count, self.outputs.rows.count)
        self.plan.launch(kernel, self.name(label), x=x, index=self.outputs.index, y=y)

    def append_products(
        self,
        label: str,
        wanted: Sequence[tuple[Linear, Slice]],
        x: Activations,
        norm: NormLayer | None,
        then: Continuation | None = None,
    ) -> bool:
        """The products of the norm of x with these matrices, each in its buffer. Returns whether
        the first went on as ``then`` says (`LinearLayers.append`).

        Floats are apart from quantised weights, beside which they would keep the activations of all
        in f32.
        """
        products = [(self.matrix(of), to) for of, to in wanted]
        quantised = [product for product in products if not product[0].format.is_float]
        floats = [product for product in products if product[0].format.is_float]
        linear = self.linear
        if quantised and floats:  # of two launches neither can make x on its way
            x = linear.complete(x)
        if quantised and floats and norm is not None and linear.takes_gemm:
            cols, normed = products[0][0].cols, self.work["normed"]
            x = linear.append_norm(self.name("attn_norm"), cols, x, norm, normed)
        went_on = False
        for suffix, group in (("", quantised), (".floats" if quantised else "", floats)):
            if group:
                following = then if group[0] is products[0] else None
                went_on |= linear.append(self.name(label + suffix), group, x, norm, then=following)
        return went_on

    def finish(
        self, label: str, matrix: Matrix, x: Activations, to: Destination, *, fill: bool = False
    ) -> Activations:
        """The last product of a network, to its destination; of a part of the network, the sum of
        all ranks' products."""
        label, linear = self.name(label), self.linear
        if x.gate is not None and not linear.takes_gate(matrix, x.gate.of):
            x = linear.complete(x)
        if matrix.is_partial:
            return self._finish_together(label, matrix, x, to, fill)
        if to.residual is None:
            product = [(matrix, to.y)]
            linear.append(
                label, product, x, scale=to.scale, ends_block=True, fill=fill, gain=to.gain
            )
            return Activations(to.y)
        return linear.append_residual(
            *(label, matrix, x, to.residual, to.y, to.next_norm),
            fill=fill,
            scale=to.scale,
            gain=to.gain,
            packs_norm=to.packs_norm,
        )

    def _finish_together(
        self, label: str, matrix: Matrix, x: Activations, to: Destination, fill: bool
    ) -> Activations:
        own, exchange, linear = self.work["delta"], self.parts.exchange, self.linear
        assert exchange is not None
        given = linear.gives(matrix, exchange)
        linear.append(
            label,
            [(matrix, own)],
            x,
            scale=to.scale,
            ends_block=True,
            fill=fill,
            exchange=exchange if given else None,
        )
        norm, residual = to.next_norm, to.residual
        if given and residual is not None:
            due = RanksSum(f"{label}.sum_of_ranks", matrix.rows, own, exchange, residual)
            return Activations(to.y, due=due)
        if norm is None or residual is None or not self._begins(exchange, norm, matrix.rows):
            self.add_ranks(label, matrix.rows, own, to.y, residual, given=given)
            return Activations(to.y)
        assert norm.weight is not None
        made = Activations(to.y, norm, self.work["scaled"], self.work["summary"])
        append_begun_sum_of_ranks(
            self.plan,
            exchange,
            f"{label}.sum_of_ranks",
            self.rows.count,
            matrix.rows,
            x=own,
            residual=residual,
            y=to.y,
            next_norm=norm.weight,
            scaled=self.work["scaled"],
            y_summary=self.work["summary"],
        )
        return made

    def _begins(self, exchange: RankExchange, norm: NormLayer, cols: int) -> bool:
        """Whether the sum of the ranks begins the norm that follows: products of several rows take
        it so, and one launch makes the sum."""
        several = 1 < self.rows.count <= MAX_BATCH and not self.parts.exact
        begins = several and norm.is_scaled_rms
        return begins and begins_norms(exchange, self.rows.count, cols)

    def add_ranks(
        self,
        label: str,
        width: int,
        x: Slice,
        y: Slice,
        residual: Slice | None = None,
        *,
        given: bool = False,
    ) -> None:
        """y (rows, width) = the sum of all ranks' x, plus the ``residual``; y may be either.
        ``given``: see `AllReduce`."""
        exchange, values = self.parts.exchange, self.rows.count * width
        assert exchange is not None
        label = f"{label}.sum_of_ranks"
        append_sum_of_ranks(self.plan, exchange, label, values, x, y, residual, given=given)

    def scale(self, label: str, x: Slice, y: Slice, scale: float) -> None:
        """y = scale * x, of the stream."""
        kernel = Rescale(self.rows.count * self.parts.config.hidden, scale=scale)
        self.plan.launch(kernel, self.name(label), x=x, y=y)

    def multiply(self, label: str, x: Slice, factor: Slice, y: Slice) -> Slice:
        """y = factor * x, of the stream; ``factor`` (1,) is a weight. Returns y."""
        kernel = Rescale(self.rows.count * self.parts.config.hidden, scaled=True)
        self.plan.launch(kernel, self.name(label), x=x, s=factor, y=y)
        return y
