"""Launches of products of few rows (`ptxgen.kernels.linear.choice`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from urdir.driver.kernel import nbytes_of
from urdir.model.graph.adapters import Adapt
from urdir.model.graph.op import Op
from urdir.model.graph.ops import AllReduce, Gate, Norm, Product
from urdir.model.graph.recurrent import Convolve
from urdir.model.graph.tensor import Tensor
from urdir.model.lower.adapters import adapter_arguments, own_adapters
from urdir.model.lower.arguments import without_none
from urdir.model.lower.chain import Chain, adapted
from urdir.model.lower.experts.parts import with_router
from urdir.model.lower.lowering import Lowering
from urdir.model.lower.requests import next_norm, request_of, takes_few_normed
from urdir.model.lower.states import StateStep, convolution, scan
from urdir.model.lower.vectors import Vectors, after, gate_of, rows_of, with_norm
from urdir.model.memory.exchange import RankExchange
from urdir.model.memory.norms import NormLayer
from urdir.model.memory.weights import Matrix
from urdir.ptxgen.kernels.linear.choice import LinearRequest, choose_linear
from urdir.ptxgen.kernels.linear.epilogue.norm import BeginNorm
from urdir.ptxgen.kernels.linear.epilogue.pack import PackedOutput
from urdir.ptxgen.kernels.linear.epilogue.send import Send
from urdir.ptxgen.kernels.linear.epilogue.then import Continued
from urdir.ptxgen.kernels.linear.spec import MAX_BATCH, LinearSpec
from urdir.ptxgen.weights.halves import Halves
from urdir.ptxgen.weights.packed_few import Order

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.driver.pinned import PinnedBuffer

    Arguments = dict[str, Slice | PinnedBuffer]

#: Products of the norm of the stream that take few rows packed: tensors of queries, the output, and
#: of feed-forward networks, for which that was measured (`choice.PACKED_NORMS_FROM`).
_TAKE_PACKED = ("q", "gate", "activated", "logits")


def limits_allow(
    at: Lowering, chain: Chain, matrices: Sequence[Matrix], request: LinearRequest
) -> bool:
    """Whether a launch takes what comes before and after the products."""
    if chain.sum is not None:
        alone = chain.rows == 1 and _ends_with(at, chain)
        if not alone or not with_norm(chain, after(at, chain, request)).fits_gemv:
            return False
        if isinstance(chain.sum.addend, AllReduce) and chain.sum.addend.x not in at.sent:
            return False
    if chain.gate is not None:
        ends = replace(request_of(at, chain.rows, matrices), ends_block=True)
        gate = gate_of(chain.gate)
        takes = chain.rows == 1 and gate is not None and ends.plus(gate).fits_gemv
        if not takes or not (chain.residual or request.ends_block):
            return False
    if chain.gain is not None:
        ends = replace(request_of(at, chain.rows, matrices), ends_block=True)
        # biases and adapters come after the factor in the kernel
        plain = matrices[0].bias is None and not adapted(chain.products)
        whole = plain and not matrices[0].is_partial
        return whole and chain.rows == 1 and ends.fits_gemv
    return chain.then is None or goes_on(at, chain, request)


def goes_on(at: Lowering, chain: Chain, request: LinearRequest) -> bool:
    """Whether the launch goes on with the first product: a kernel of one token."""
    if isinstance(chain.then, Convolve) and chain.then.input_gate is not None:
        return False  # which takes more than a product
    then = _step(at, chain).following(at)
    if then is None:
        return False
    return Vectors(at, chain, None).asked(request.plus(Continued(then))).continues


def _step(at: Lowering, chain: Chain) -> StateStep:
    """What goes on with the first product."""
    assert chain.then is not None
    return convolution(at, chain.then) if isinstance(chain.then, Convolve) else scan(at, chain.then)


def append_few(
    at: Lowering,
    chain: Chain,
    matrices: Sequence[Matrix],
    request: LinearRequest,
    normed: Slice | None,
) -> None:
    """Append the launches; ``normed`` are the vectors where the norm is not theirs to compute."""
    exchange = _sends(at, chain, matrices)
    if exchange is not None:
        request = request.plus(Send(exchange.gives))
        at.sent.add(chain.y)
    begins = next_norm(at, chain)
    if begins is not None and request.can_begin_norm:
        request = request.plus(BeginNorm())
        order = few_order(at, chain.rows) if request.can_pack else None
        request = request if order is None else request.plus(PackedOutput(order))
    step = None if chain.then is None else _step(at, chain)
    if step is not None and (then := step.following(at)) is not None:
        request = request.plus(Continued(then))
    source, results = Vectors(at, chain, normed), _Results(at, chain, matrices)
    firsts = range(0, chain.rows, MAX_BATCH)
    for first in firsts:
        count = min(MAX_BATCH, chain.rows - first)
        kernel = choose_linear(source.asked(replace(request, batch=count)))
        pair = chain.pair is not None
        own = own_adapters(at, chain.products, kernel, pair)
        kernel, more = own or (kernel, adapter_arguments(at, chain.products, first, count, pair))
        if (routes := with_router(at, chain, kernel)) is not None:
            kernel, more = routes[0], more | routes[1]
        launch = results.products(kernel, first) | results.epilogue(kernel, first) | more
        launch |= {} if step is None else step.launch(at)
        launch |= {} if exchange is None else exchange.arguments_of(kernel)
        launch |= {} if begins is None else results.begun(kernel, begins)
        if kernel.steps.has(PackedOutput) and not kernel.steps.has(BeginNorm):
            at.packed[chain.y] = at.place(chain.y)
        suffix = f" rows {first}" if len(firsts) > 1 else ""
        at.launch(kernel, chain.label + suffix, **launch, **source.arguments(kernel, first))


@dataclass(frozen=True, slots=True)
class _Results:
    """The arguments of a launch beside the vectors: matrices, products, and what follows."""

    at: Lowering
    chain: Chain
    matrices: Sequence[Matrix]

    def products(self, kernel: LinearSpec, first: int) -> Arguments:
        """Matrices with their biases, and where the products of the vectors from ``first`` on
        go."""
        chain, launch = self.chain, dict[str, "Slice | PinnedBuffer"]()
        for number, matrix in enumerate(self.matrices):
            tag = str(number or "")
            if chain.pair is not None and number:
                launch |= without_none(up=matrix.data, up_bias=matrix.bias)
                continue
            launch |= without_none(**{f"weights{tag}": matrix.data, f"bias{tag}": matrix.bias})
            launch[f"y{tag}"] = _result(self.at, kernel, chain.results[number], first, number)
        return launch

    def epilogue(self, kernel: LinearSpec, first: int) -> Arguments:
        """The residual, and the number that is multiplied with."""
        at, chain, launch = self.at, self.chain, dict[str, "Slice | PinnedBuffer"]()
        if chain.residual is not None:
            residual = at.place(chain.residual.a)
            launch["residual"] = rows_of(residual, first, kernel.batch, self.matrices[0].rows)
        if chain.gain is not None:
            launch["gain"] = at.place(chain.gain.gate)
        return launch

    def begun(self, kernel: LinearSpec, norm: NormLayer) -> Arguments:
        """The norm that follows, where the launch begins it."""
        if not kernel.steps.has(BeginNorm):
            return {}
        begun = self.at.begin_norm(self.chain.y, norm, kernel.steps.has(PackedOutput))
        return {**begun.arguments}


def _ends_with(at: Lowering, chain: Chain) -> bool:
    """Whether nothing but the products, and the end of the block, reads the stream that the launch
    makes: others would have to wait for all of it."""
    assert chain.sum is not None
    own: set[Op] = {*chain.products}
    if chain.norm is not None:
        own.add(chain.norm)
    return all(op in own or op.word == "add" for op in at.readers(chain.x))


def _sends(at: Lowering, chain: Chain, matrices: Sequence[Matrix]) -> RankExchange | None:
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


def few_order(at: Lowering, rows: int) -> Order | None:
    """In which order the products after the norm that follows take few rows of it packed, if it has
    begun; None: they do not."""
    norm = at.following()
    assert isinstance(norm, Norm)
    products: list[Product] = []
    # an adapter reads the stream, and computes the norm by itself
    first = 2 if isinstance(at.following(1), Adapt) else 1
    while isinstance(op := at.following(first + len(products)), Product) and op.x is norm.y:
        products.append(op)
    if not products or products[0].y.name not in _TAKE_PACKED:
        return None
    others = [op for op in at.readers(norm.x) if op is not norm and op.word != "add"]
    if others or len(at.readers(norm.y)) > len(products) + first - 1:
        return None  # which would not take them so
    pair = isinstance(op, Gate) and len(products) == 2 and op.gate is products[0].y
    matrices = [at.matrix(product.of) for product in products]
    takes = takes_few_normed(at, rows, matrices, at.norm(norm.of), pair)
    return Halves(matrices[0].format).order if takes else None


def _result(at: Lowering, kernel: LinearSpec, y: Tensor, first: int, number: int) -> Slice:
    """Where the launch for the vectors from ``first`` on leaves its product of that number."""
    place = at.place(y)
    if kernel.steps.has(PackedOutput) and not kernel.steps.has(BeginNorm):
        return place.slice(0, nbytes_of(kernel, "y"))
    return rows_of(place, first, kernel.batch, kernel.parts[number].rows)
