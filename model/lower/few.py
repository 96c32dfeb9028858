"""Launches of products of few rows (`ptxgen.kernels.linear.choice`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from urdir.model.graph.ops import AllReduce, Gate, Norm, Op, Product
from urdir.model.graph.recurrent import Convolve, GatedNorm
from urdir.model.graph.tensor import Tensor
from urdir.model.lower.arguments import given
from urdir.model.lower.chain import Chain
from urdir.model.lower.lowering import Begun, Lowering
from urdir.model.lower.requests import request_of, takes_few_normed
from urdir.model.lower.states import StateStep, convolution, scan
from urdir.model.memory.exchange import RankExchange
from urdir.model.memory.norms import NormLayer
from urdir.model.memory.weights import Matrix
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.linear import gate as gates
from urdir.ptxgen.kernels.linear.choice import LinearRequest, choose_linear
from urdir.ptxgen.kernels.linear.spec import MAX_BATCH, LinearSpec

if TYPE_CHECKING:
    from urdir.driver.memory import PinnedBuffer, Slice

    Arguments = dict[str, Slice | PinnedBuffer]

#: Products of the norm of the stream that take few rows packed: tensors of attention's queries and
#: of feed-forward networks, for which that was measured (`choice.PACKED_NORMS_FROM`).
_TAKE_PACKED = ("q", "gate", "activated")
#: What a product takes its vectors through: f(gate) * x, without limits.
_GATES = frozenset(Activation(kind) for kind in ("sigmoid", "softplus", "silu"))


def limits_allow(
    at: Lowering, chain: Chain, matrices: Sequence[Matrix], request: LinearRequest
) -> bool:
    """Whether a launch takes what comes before and after the products."""
    if chain.sum is not None:
        alone = chain.rows == 1 and _ends_with(at, chain)
        if not alone or not _with_norm(at, chain, _after(at, chain, request)).fits_gemv:
            return False
        if isinstance(chain.sum.addend, AllReduce) and chain.sum.addend.x not in at.sent:
            return False
    if chain.gate is not None:
        ends = replace(request_of(at, chain.rows, matrices), ends_block=True)
        gate = gate_of(chain.gate)
        takes = chain.rows == 1 and gate is not None and replace(ends, gate=gate).fits_gemv
        if not takes or not (chain.residual or request.ends_block):
            return False
    if chain.gain is not None:
        ends = replace(request_of(at, chain.rows, matrices), ends_block=True)
        whole = matrices[0].bias is None and not matrices[0].is_partial
        return whole and chain.rows == 1 and ends.fits_gemv
    return chain.then is None or goes_on(at, chain, request)


def goes_on(at: Lowering, chain: Chain, request: LinearRequest) -> bool:
    """Whether the launch goes on with the first product: a kernel of one token."""
    if isinstance(chain.then, Convolve) and chain.then.input_gate is not None:
        return False  # which takes more than a product
    then = _step(at, chain).following(at)
    return (
        then is not None and _Vectors(at, chain, None).asked(replace(request, then=then)).continues
    )


def _step(at: Lowering, chain: Chain) -> StateStep:
    """What goes on with the first product."""
    assert chain.then is not None
    return convolution(at, chain.then) if isinstance(chain.then, Convolve) else scan(at, chain.then)


def gate_of(op: Gate | GatedNorm) -> gates.Gate | None:
    """The gate that a product takes its vectors through; None for one that it does not take."""
    if isinstance(op, Gate):
        return gates.Gate(op.f) if op.group == 1 and op.f in _GATES else None
    if op.sets == 1 and not op.gates_first and gates.Gate.serves(op.cols):
        return gates.Gate(op.f, op.cols, op.eps)
    return None


def append_few(
    at: Lowering,
    chain: Chain,
    matrices: Sequence[Matrix],
    request: LinearRequest,
    normed: Slice | None,
) -> None:
    """Append the launches; ``normed`` are the vectors where the norm is not theirs to compute."""
    exchange = _sends(at, chain, matrices, request)
    if exchange is not None:
        request = replace(request, gives=exchange.gives)
        at.sent.add(chain.y)
    begins = _begun_norm(at, chain)
    if begins is not None:
        request = replace(request, summarises=True)
        if request.can_pack and _takes_packed(at, chain.rows):
            request = replace(request, packs="units")
    step = None if chain.then is None else _step(at, chain)
    if step is not None:
        request = replace(request, then=step.following(at))
    source = _Vectors(at, chain, normed)
    firsts = range(0, chain.rows, MAX_BATCH)
    for first in firsts:
        count = min(MAX_BATCH, chain.rows - first)
        kernel = choose_linear(source.asked(replace(request, batch=count)))
        launch: Arguments = {}
        for number, matrix in enumerate(matrices):
            tag = str(number or "")
            if chain.pair is not None and number:
                launch |= given(up=matrix.data, up_bias=matrix.bias)
                continue
            launch |= given(**{f"weights{tag}": matrix.data, f"bias{tag}": matrix.bias})
            launch[f"y{tag}"] = _result(at, kernel, chain.results[number], first, number)
        if chain.residual is not None:
            residual = at.place(chain.residual.a)
            launch["residual"] = rows_of(residual, first, count, matrices[0].rows)
        if chain.gain is not None:
            launch["gain"] = at.place(chain.gain.gate)
        if step is not None:
            launch |= step.launch(at)
        if exchange is not None:
            launch |= exchange.arguments_of(kernel)
        if begins is not None and kernel.summarises:
            begun = Begun(begins, at.work["scaled"], at.work["summary"], bool(kernel.packs))
            at.begun = {chain.y: begun}  # the buffers are those of one norm
            launch |= given(next_norm=begins.weight, scaled=begun.scaled, y_summary=begun.summary)
        elif kernel.packs:
            at.packed[chain.y] = at.place(chain.y)
        launch |= source.arguments(kernel, first)
        suffix = f" rows {first}" if len(firsts) > 1 else ""
        at.launch(kernel, chain.label + suffix, **launch)


class _Vectors:
    """What the launches of a chain multiply: fields of the request, and arguments."""

    def __init__(self, at: Lowering, chain: Chain, normed: Slice | None) -> None:
        self._at, self._chain, self._normed = at, chain, normed
        self._norm: NormLayer | None = None
        self._begun: Begun | None = None
        if chain.norm is not None and normed is None:
            if at.completed == (chain.x, chain.norm.of):
                self._normed = at.work["normed"]
            else:
                self._norm = at.norm(chain.norm.of)
                begun = at.begun.get(chain.x)
                self._begun = begun if begun is not None and begun.norm == self._norm else None

    def asked(self, request: LinearRequest) -> LinearRequest:
        """The request, with the vectors as they are."""
        chain = self._chain
        if chain.gate is not None:
            request = replace(request, gate=gate_of(chain.gate))
        if chain.sum is not None:
            request = _after(self._at, chain, request)
        if self._norm is None:
            packed = chain.norm is None and chain.x in self._at.packed
            return replace(request, packed=packed)
        if self._begun is not None:
            packed = self._begun.packed
            begun = replace(request, norm=self._norm.norm, summarised=True, packed=packed)
            if begun.takes_packed or not packed:
                return begun
        return replace(request, norm=self._norm.norm)

    def arguments(self, kernel: LinearSpec, first: int) -> Arguments:
        """The arguments of a launch for the vectors from ``first`` on."""
        at, chain = self._at, self._chain
        if kernel.summarised and self._begun is not None:
            return {"x": self._begun.scaled, "x_summary": self._begun.summary}
        norm = self._norm
        weights = {} if norm is None else given(norm=norm.weight, norm_bias=norm.bias)
        if chain.sum is not None:
            return {**_sum_arguments(at, chain), **weights}
        x = at.place(_gated(chain)) if self._normed is None else self._normed
        if kernel.packed:
            return {"x": x.slice(0, kernel.nbytes(kernel.param("x")))}
        return {
            "x": rows_of(x, first, kernel.batch, kernel.cols),
            **_gate_arguments(at, chain),
            **weights,
        }


def _with_norm(at: Lowering, chain: Chain, request: LinearRequest) -> LinearRequest:
    return request if chain.norm is None else replace(request, norm=chain.norm.of.norm)


def _after(at: Lowering, chain: Chain, request: LinearRequest) -> LinearRequest:
    """The request of a launch that makes the sum before its products."""
    assert chain.sum is not None
    addend, exchange = chain.sum.addend, at.parts.exchange
    if isinstance(addend, Norm):
        after = addend.of.norm
        return replace(request, after=after, stream_scaled=chain.sum.factor is not None)
    assert exchange is not None
    return replace(request, after=exchange.takes, stream_scaled=chain.sum.factor is not None)


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
        more = given(post_norm=norm.weight, post_norm_bias=norm.bias)
        return {**vectors, **more, **given(stream_scale=scale)}
    assert exchange is not None
    words = {param.name: exchange.arguments[param.name] for param in exchange.takes.params}
    return {**vectors, **words, **given(stream_scale=scale)}


def _ends_with(at: Lowering, chain: Chain) -> bool:
    """Whether nothing but the products, and the end of the block, reads the stream that the launch
    makes: others would have to wait for all of it."""
    assert chain.sum is not None
    own: set[Op] = {*chain.products}
    if chain.norm is not None:
        own.add(chain.norm)
    return all(op in own or op.word == "add" for op in at.readers(chain.x))


def _gated(chain: Chain) -> Tensor:
    """What the products read, before the gate."""
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


def _sends(
    at: Lowering, chain: Chain, matrices: Sequence[Matrix], request: LinearRequest
) -> RankExchange | None:
    """Where the launch gives its product to the other ranks, as words of the exchange that follows
    (`Gives`)."""
    following, exchange = at.following(), at.parts.exchange
    if not isinstance(following, AllReduce) or following.x is not chain.y or exchange is None:
        return None
    if not chain.y.is_stream:
        return None
    ends = replace(request_of(at, chain.rows, matrices), ends_block=True)
    fits = chain.rows == 1 and ends.fits_gemv
    return exchange if fits and exchange.shape.takes_one_launch(matrices[0].rows) else None


def _begun_norm(at: Lowering, chain: Chain) -> NormLayer | None:
    """The norm that follows the sum, where the launch may begin it."""
    following = at.following()
    if chain.residual is None or not isinstance(following, Norm) or following.x is not chain.y:
        return None
    norm = at.norm(following.of)
    return norm if norm.is_scaled_rms and at.begins_block(following) else None


def _takes_packed(at: Lowering, rows: int) -> bool:
    """Whether the products after the norm that follows take few rows of it packed."""
    norm = at.following()
    assert isinstance(norm, Norm)
    products: list[Product] = []
    while isinstance(op := at.following(1 + len(products)), Product) and op.x is norm.y:
        products.append(op)
    if not products or products[0].y.name not in _TAKE_PACKED:
        return False
    others = [op for op in at.readers(norm.x) if op is not norm and op.word != "add"]
    if others or len(at.readers(norm.y)) > len(products):
        return False  # which would not take them so
    pair = isinstance(op, Gate) and len(products) == 2 and op.gate is products[0].y
    matrices = [at.matrix(product.of) for product in products]
    return takes_few_normed(at, rows, matrices, at.norm(norm.of), pair)


def _result(at: Lowering, kernel: LinearSpec, y: Tensor, first: int, number: int) -> Slice:
    """Where the launch for the vectors from ``first`` on leaves its product of that number."""
    place = at.place(y)
    if kernel.packs and not kernel.summarises:
        return place.slice(0, kernel.nbytes(kernel.param("y")))
    return rows_of(place, first, kernel.batch, kernel.parts[number].rows)


def rows_of(matrix: Slice, first: int, count: int, width: int) -> Slice:
    """Some rows of a (rows, width) f32 buffer."""
    return matrix.slice(4 * first * width, 4 * count * width)
