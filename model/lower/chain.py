"""Chains: products and the operations around them that one launch may compute."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from urdir.model.graph.op import Elementwise, Op
from urdir.model.graph.ops import Add, AllReduce, Gate, Norm, Product, ScaleBy
from urdir.model.graph.recurrent import Convolve, GatedNorm, Scan
from urdir.model.graph.tensor import Tensor
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.linear.epilogue.activation import OPERATIONS, Gated, Scaled, SigmoidScaled
from urdir.ptxgen.kernels.linear.epilogue.adapted import Adapted
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.steps import Epilogue, find


@dataclass(frozen=True, slots=True)
class Sum:
    """The stream before a product: ``add`` of what was before and what ``addend`` makes of a
    network's result, times the ``factor``."""

    addend: Norm | AllReduce
    add: Add
    factor: ScaleBy | None = None

    @property
    def y(self) -> Tensor:
        """The stream."""
        return self.add.y if self.factor is None else self.factor.y


@dataclass(slots=True)
class Chain:
    """[sum | gate] [norm] products [ends] [pair | gain | then] [residual].

    ``x`` is what the products read before the norm. ``ends`` follow each product, as steps.
    ``pair``: f(first) * second is the one result.
    ``gain``: it is multiplied with sigmoid of a number a row. ``then`` goes on with the first one.
    ``residual`` adds it to the stream, and ``next_norm`` is the norm of the sum. ``results`` are
    what is left of each product; ``suffix`` ends the label.
    """

    x: Tensor
    sum: Sum | None = None
    gate: Gate | GatedNorm | None = None
    norm: Norm | None = None
    products: list[Product] = field(default_factory=list)
    ends: tuple[Epilogue, ...] = ()
    pair: Gate | None = None
    then: Convolve | Scan | None = None
    gain: Gate | None = None
    residual: Add | None = None
    next_norm: Norm | None = None
    results: list[Tensor] = field(default_factory=list)
    suffix: str = ""

    @property
    def rows(self) -> int:
        """Number of vectors that are multiplied."""
        return self.products[0].x.rows

    @property
    def label(self) -> str:
        """Label of the launch."""
        return self.products[0].label + self.suffix

    @property
    def y(self) -> Tensor:
        """The first result."""
        return self.results[0]

    @property
    def factor(self) -> float:
        """The number that the products are multiplied with."""
        scaled = find(self.ends, Scaled)
        return 1.0 if scaled is None else scaled.factor

    @property
    def epilogue(self) -> tuple[Epilogue, ...]:
        """Epilogue steps of the launch, without biases; the factor of a residual belongs to its
        step."""
        ends = [step for step in self.ends if not (self.residual and isinstance(step, Scaled))]
        return (
            *adapted(self.products),
            *ends,
            *([Gated(self.pair.f)] if self.pair else []),
            *([SigmoidScaled()] if self.gain else []),
            *([Residual(self.factor)] if self.residual else []),
        )


class _Reader:
    """Operations that are taken from the front while they are connected."""

    def __init__(self, ops: Sequence[Op]) -> None:
        self._ops = list(ops)

    def next(self) -> Op | None:
        return self._ops[0] if self._ops else None

    def take(self) -> Op:
        return self._ops.pop(0)

    def give_back(self, op: Op) -> None:
        self._ops.insert(0, op)


def adapted(products: Sequence[Product]) -> tuple[Adapted, ...]:
    """The step that adds B a of the rows' LoRA adapters to several products; empty without them."""
    with_low = [of for of in products if of.low is not None]
    if not with_low:
        return ()
    room, low = with_low[0].room, with_low[0].low
    assert room is not None
    assert low is not None
    places = tuple(None if of.low is None else of.place for of in products)
    return (Adapted(room.slots, room.rank, room.element, places, low.width // room.rank),)


def read_chain(ops: Sequence[Op]) -> Chain | None:
    """Parse operations as a chain; None if one does not read the results of those before it."""
    at = _Reader(ops)
    chain = _prologue(at)
    if chain is None or not _products(at, chain) or not _epilogue(at, chain):
        return None
    return None if at.next() is not None else chain


def _prologue(at: _Reader) -> Chain | None:
    first = at.take()
    match first, at.next():
        case (Norm() | AllReduce() as addend, Add() as add):
            at.take()
            if add.b is not addend.y:
                return None
            factor = at.next()
            if isinstance(factor, ScaleBy):
                at.take()
                if factor.x is not add.y:
                    return None
            else:
                factor = None
            made = Sum(addend, add, factor)
            chain = Chain(made.y, sum=made)
            if isinstance(norm := at.next(), Norm):
                at.take()
                chain.norm = norm
                return chain if norm.x is chain.x else None
            return chain
        case Norm(), _:
            return Chain(first.x, norm=first)
        case Product(), _:
            at.give_back(first)
            return Chain(first.x)
    assert isinstance(first, Gate | GatedNorm)
    return Chain(first.y, gate=first)


def _products(at: _Reader, chain: Chain) -> bool:
    """Parse products of one vector, each followed by the same steps."""
    vector = chain.x if chain.norm is None else chain.norm.y
    while isinstance(product := at.next(), Product):
        at.take()
        if product.x is not vector:
            return False
        y, ends = product.y, tuple[Epilogue, ...]()
        while isinstance(end := at.next(), Elementwise) and end.word in OPERATIONS and end.x is y:
            if (steps := OPERATIONS[end.word](**end.values)) is None:
                return False
            at.take()
            ends += steps
            y = end.y
        if chain.products and ends != chain.ends:
            return False
        chain.ends = ends
        chain.products.append(product)
        chain.results.append(y)
    return bool(chain.products)


def _is_gain(gate: Gate) -> bool:
    """Whether the sigmoid of a number a row multiplies the row."""
    return gate.gate.width == 1 and gate.f == Activation("sigmoid")


def _epilogue(at: _Reader, chain: Chain) -> bool:
    if isinstance(then := at.next(), Convolve | Scan):
        at.take()
        first = chain.products[0].y
        chain.then, chain.results = then, [then.y, *chain.results[1:]]
        return (then.x if isinstance(then, Convolve) else then.step) is first
    if isinstance(gate := at.next(), Gate):
        at.take()
        if len(chain.products) == 2 and [gate.gate, gate.x] == chain.results:
            chain.pair, chain.results = gate, [gate.y]
        elif len(chain.products) == 1 and gate.x is chain.y and _is_gain(gate):
            chain.gain, chain.results = gate, [gate.y]
        else:
            return False
    if isinstance(add := at.next(), Add):
        at.take()
        if add.b is not chain.y or len(chain.results) > 1:
            return False
        chain.residual, chain.results = add, [add.y]
    if isinstance(norm := at.next(), Norm):
        at.take()
        if norm.x is not chain.y:
            return False
        chain.next_norm = norm
    return True
