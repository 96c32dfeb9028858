"""Norms and sums of the stream as launches: between products, where no product takes them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from urdir.model.blocks.activations import Activations, DueGate, NormedSum, RanksSum
from urdir.model.blocks.exchange import append_sum_of_ranks
from urdir.model.lower.arguments import given
from urdir.model.memory.norms import NormLayer
from urdir.ptxgen.kernels.activate import Activate
from urdir.ptxgen.kernels.add import Add
from urdir.ptxgen.kernels.normalise import Normalise
from urdir.ptxgen.kernels.recurrent.gated_norm import GatedNorm
from urdir.ptxgen.kernels.rescale import Rescale
from urdir.ptxgen.spec import KernelSpec

if TYPE_CHECKING:
    from urdir.driver.memory import Arena, Slice
    from urdir.driver.plan import Plan

# One object for equal kernels, with its cached properties.
_activate = lru_cache(maxsize=64)(Activate)
_add = lru_cache(maxsize=64)(Add)
_gated_norm = lru_cache(maxsize=64)(GatedNorm)
_normalise = lru_cache(maxsize=64)(Normalise)
_rescale = lru_cache(maxsize=64)(Rescale)


@dataclass(frozen=True, slots=True)
class StreamNorms:
    """Appends norms and sums of ``rows`` vectors to a plan, with buffers of ``work``."""

    plan: Plan
    work: Arena
    rows: int

    def append_sum(
        self, label: str, cols: int, residual: Slice, delta: Slice, y: Slice, scale: float = 1.0
    ) -> Activations:
        """y = residual + scale * delta, all (rows, cols) f32; y may be either."""
        add = _add(self.rows * cols, scale)
        self.plan.launch(add, label, a=residual, b=delta, y=y)
        return Activations(y)

    def append_norm(
        self, label: str, cols: int, x: Activations, norm: NormLayer, y: Slice
    ) -> Activations:
        """x with the ``norm`` completed, in y (rows, cols): for layers that share it."""
        kernel = _normalise(self.rows, cols, norm.norm)
        self.plan.launch(kernel, label, x=x.x, y=y, **given(weight=norm.weight, bias=norm.bias))
        return Activations(x.x, norm, normed=y)

    def append_norm_after(
        self,
        label: str,
        cols: int,
        delta: Slice,
        norm: NormLayer | None,
        residual: Slice,
        y: Slice,
        next_norm: NormLayer | None,
        scale: float = 1.0,
    ) -> Activations:
        """y = residual + scale * norm(delta), all (rows, cols) f32; y may be ``delta`` or
        ``residual``. Returns it with the ``next_norm`` completed in ``work["normed"]``. Without a
        ``norm``, delta itself; there is a ``next_norm`` then.
        """
        of = None if norm is None else norm.norm
        then = None if next_norm is None else next_norm.norm
        kernel = _normalise(self.rows, cols, of, residual=True, scale=scale, then=then)
        assert norm is not None or next_norm is not None
        launch = {} if norm is None else given(weight=norm.weight, bias=norm.bias)
        made = Activations(y)
        if next_norm is not None:
            made = Activations(y, next_norm, normed=self.work["normed"])
            launch |= given(next_weight=next_norm.weight, next_bias=next_norm.bias, z=made.normed)
        self.plan.launch(kernel, label, x=delta, residual=residual, y=y, **launch)
        return made

    def defer_norm_after(
        self,
        label: str,
        cols: int,
        delta: Slice,
        norm: NormLayer,
        residual: Slice,
        y: Slice,
        next_norm: NormLayer | None,
        scale: float = 1.0,
    ) -> Activations:
        """The same, but left to the next product if that may take it: for one row, not scaled.
        ``y`` is a third buffer, and ``delta`` and ``residual`` stay as they are until then.
        """
        if self.rows > 1 or scale != 1.0:
            return self.append_norm_after(label, cols, delta, norm, residual, y, next_norm, scale)
        return Activations(y, next_norm, due=NormedSum(label, cols, delta, norm, residual))

    def complete(self, x: Activations) -> Activations:
        """x as vectors that any launch may read: a launch for the sum or the gate that is due."""
        if x.gate is not None:
            self._append_gate(x.gate, x.x)
            return replace(x, gate=None)
        if (due := x.due) is None:
            return x
        if isinstance(due, RanksSum):
            vectors = (due.cols, due.delta, x.x, due.before)
            append_sum_of_ranks(self.plan, due.exchange, due.label, *vectors, given=True)
            made = Activations(x.x)
        else:
            following = x.norm if due.scale is None else None
            made = self.append_norm_after(
                due.label, due.cols, due.delta, due.norm, due.before, x.x, following
            )
        if due.scale is not None:
            kernel = _rescale(self.rows * due.cols, scaled=True)
            self.plan.launch(kernel, f"{due.label}.scale", x=x.x, s=due.scale, y=x.x)
        return made

    def _append_gate(self, due: DueGate, x: Slice) -> None:
        gate, head = due.of, due.of.head
        if due.head_norm is None:
            kernel: KernelSpec = _activate(self.rows * due.cols, gate.activation, gated=True)
            self.plan.launch(kernel, due.label, gate=due.x_gate, up=x, y=x)
            return
        heads = self.rows * due.cols // head
        kernel = _gated_norm(heads, head, gate.eps, activation=gate.activation)
        self.plan.launch(kernel, due.label, x=x, gate=due.x_gate, weight=due.head_norm, y=x)
