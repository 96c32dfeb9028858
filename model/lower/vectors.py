"""Inputs of products of few rows: prologue steps of the request, and arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING

from urdir.driver.kernel import nbytes_of
from urdir.model.graph.ops import Gate, Norm
from urdir.model.graph.recurrent import GatedNorm
from urdir.model.graph.tensor import Tensor
from urdir.model.lower.arguments import without_none
from urdir.model.lower.chain import Chain
from urdir.model.lower.lowering import Begun, Lowering
from urdir.model.memory.norms import NormLayer
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.linear.choice import LinearRequest
from urdir.ptxgen.kernels.linear.prologue import gate as gates
from urdir.ptxgen.kernels.linear.prologue.norm import BegunNorm, Normed, begun
from urdir.ptxgen.kernels.linear.prologue.packed import PackedInput
from urdir.ptxgen.kernels.linear.prologue.sum import NormedAdd, RankAdd
from urdir.ptxgen.kernels.linear.spec import LinearSpec

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.driver.pinned import PinnedBuffer

    Arguments = dict[str, Slice | PinnedBuffer]

#: What a product takes its vectors through: f(gate) * x, without limits.
_GATES = frozenset(Activation(kind) for kind in ("sigmoid", "softplus", "silu"))


def gate_of(op: Gate | GatedNorm) -> gates.Gate | None:
    """The gate that a product takes its vectors through; None for one that it does not take."""
    if isinstance(op, Gate):
        return gates.Gate(op.f) if op.group == 1 and op.f in _GATES else None
    if op.sets == 1 and not op.gates_first and gates.Gate.serves(op.cols):
        return gates.Gate(op.f, op.cols, op.eps)
    return None


class Vectors:
    """Inputs of the launches of a chain: prologue steps of the request, and arguments."""

    def __init__(self, at: Lowering, chain: Chain, normed: Slice | None) -> None:
        self._at, self._chain, self._normed = at, chain, normed
        self._norm: NormLayer | None = None
        self._begun: Begun | None = None
        if chain.norm is not None and normed is None:
            if at.completed == (chain.x, chain.norm.of):
                self._normed = at.work["normed"]
            else:
                self._norm = at.norm(chain.norm.of)
                left = at.begun.get(chain.x)
                self._begun = left if left is not None and left.norm == self._norm else None

    def asked(self, request: LinearRequest) -> LinearRequest:
        """The request for plain vectors."""
        chain = self._chain
        if chain.gate is not None:
            gate = gate_of(chain.gate)
            assert gate is not None  # as `limits_allow` found
            request = request.plus(gate)
        if chain.sum is not None:
            request = after(self._at, chain, request)
        if self._norm is None:
            packed = chain.norm is None and chain.x in self._at.packed
            return request.plus(PackedInput()) if packed else request
        norm = self._norm.norm
        if self._begun is not None and request.rounds_several:
            rest = request.plus(begun(norm))
            if not self._begun.packed:
                return rest
            if rest.takes_packed:
                return rest.plus(PackedInput())
        return request.plus(Normed(norm))

    def arguments(self, kernel: LinearSpec, first: int) -> Arguments:
        """The arguments of a launch for the vectors from ``first`` on."""
        at, chain = self._at, self._chain
        if kernel.steps.has(BegunNorm) and self._begun is not None:
            return {"x": self._begun.scaled, "x_summary": self._begun.summary}
        norm = self._norm
        weights = {} if norm is None else without_none(norm=norm.weight, norm_bias=norm.bias)
        if chain.sum is not None:
            return {**_sum_arguments(at, chain), **weights}
        x = at.place(_gated(chain)) if self._normed is None else self._normed
        if kernel.steps.has(PackedInput):
            return {"x": x.slice(0, nbytes_of(kernel, "x"))}
        return {
            "x": rows_of(x, first, kernel.batch, kernel.cols),
            **_gate_arguments(at, chain),
            **weights,
        }


def with_norm(chain: Chain, request: LinearRequest) -> LinearRequest:
    """The request of a launch that computes the norm of a chain."""
    return request if chain.norm is None else request.plus(Normed(chain.norm.of.norm))


def after(at: Lowering, chain: Chain, request: LinearRequest) -> LinearRequest:
    """The request of a launch that makes the sum before its products."""
    assert chain.sum is not None
    addend, exchange, scaled = chain.sum.addend, at.parts.exchange, chain.sum.factor is not None
    if isinstance(addend, Norm):
        return request.plus(NormedAdd(addend.of.norm, scaled))
    assert exchange is not None
    return request.plus(RankAdd(exchange.takes, scaled))


def _sum_arguments(at: Lowering, chain: Chain) -> Arguments:
    of, exchange = chain.sum, at.parts.exchange
    assert of is not None
    scale = None if of.factor is None else at.vector(of.factor.factor)
    vectors = {
        "x": at.place(of.addend.x),
        "before": at.place(of.add.a),
        "stream": at.place(of.y),
    }
    if isinstance(of.addend, Norm):
        norm = at.norm(of.addend.of)
        more = without_none(post_norm=norm.weight, post_norm_bias=norm.bias)
        return {**vectors, **more, **without_none(stream_scale=scale)}
    assert exchange is not None
    words = {param.name: exchange.arguments[param.name] for param in exchange.takes.params}
    return {**vectors, **words, **without_none(stream_scale=scale)}


def _gated(chain: Chain) -> Tensor:
    """The tensor that the products read, before the gate."""
    if chain.gate is None:
        return chain.x
    return chain.gate.x


def _gate_arguments(at: Lowering, chain: Chain) -> Arguments:
    if chain.gate is None:
        return {}
    arguments: Arguments = {"x_gate": at.place(chain.gate.gate)}
    if isinstance(chain.gate, GatedNorm):
        arguments["head_norm"] = at.vector(chain.gate.weight)
    return arguments


def rows_of(matrix: Slice, first: int, count: int, width: int) -> Slice:
    """Some rows of a (rows, width) f32 buffer."""
    return matrix.slice(4 * first * width, 4 * count * width)
