"""Steps of a product, as values: what it does before its main loop and after it.

A product has a tuple of each. A step owns its parameters, its numpy reference, what it needs of
shared memory and registers, and its macros: `Step.stem` names their file, in
``templates/linear/prologue`` or ``epilogue``.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, ClassVar, Self, TypeVar

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.spec import Array, KernelSpec, Param
from urdir.ptxgen.weights.formats import Format
from urdir.ptxgen.weights.layout import Layout

S = TypeVar("S", bound="Step")


@dataclass(frozen=True, slots=True)
class Part:
    """One of the matrices of a launch: names of its registers, and the CTAs that work on it."""

    number: int
    layout: Layout
    first_cta: int
    ctas: int

    @property
    def rows(self) -> int:
        """Rows of the matrix."""
        return self.layout.rows

    @property
    def suffix(self) -> str:
        """What follows the names of its parameters: nothing for the first one."""
        return str(self.number or "")

    @property
    def weights(self) -> str:
        """Register with the matrix's address."""
        return f"%weights{self.suffix}"

    @property
    def bias(self) -> str:
        """Register with the address of its bias."""
        return f"%bias{self.suffix}"

    @property
    def y(self) -> str:
        """Register with the address of its product."""
        return f"%y{self.suffix}"


@dataclass(frozen=True, slots=True)
class Reference:
    """What the reference of a step receives besides its operand: the ``inputs`` of the launch, and
    the ``outputs`` that steps have written. ``part``: the matrix that is multiplied; the first one
    for a prologue.

    Of experts, row i of y is the product of the pair (row and slot) ``pairs[i]`` with the matrix of
    ``experts[i]``."""

    product: Product
    part: Part
    inputs: Mapping[str, Any]
    outputs: dict[str, Array]
    experts: Array | None = None
    pairs: Array | None = None


class Step:
    """Base of what a product does before or after its main loop: a frozen dataclass.

    ``stem``: its name in messages and settings, and that of its macro file. ``leads``: its
    parameters come right after x, before the other matrices; else after all of them.
    """

    stem: ClassVar[str]
    leads: ClassVar[bool] = False

    __slots__ = ()

    def check(self, product: Product) -> None:
        """Raise PtxgenError for a product that cannot have this step."""

    def params(self, product: Product) -> tuple[Param, ...]:
        """Its parameters, those of single matrices apart."""
        return ()

    def part_params(self, product: Product, part: Part) -> tuple[Param, ...]:
        """Its parameters of one of the matrices."""
        return ()

    def stored(self, param: Param, product: Product) -> Param:
        """A parameter of the product or of another step, in the layout that this step requires."""
        return param

    def make_inputs(self, product: Product, rng: np.random.Generator) -> dict[str, Any]:
        """Inputs that are not simply standard normal."""
        return {}

    def bytes_moved(self, product: Product) -> int:
        """Bytes of its parameters that a launch must read and write."""
        return sum(product.nbytes(p) * p.passes for p in self.params(product))

    @property
    def text(self) -> str:
        """What it does, for a template's contract; empty if the formula says it."""
        return ""


class Prologue(Step):
    """Base of what x goes through before it is multiplied. ``normalises``: x is then normalised."""

    normalises: ClassVar[bool] = False

    __slots__ = ()

    @property
    def vectors(self) -> int:
        """Vectors of its weights and operands that a thread holds in registers besides x."""
        return 0

    @property
    def held_vectors(self) -> int:
        """Vectors of these that a thread holds until x is complete."""
        return 0

    @property
    def warp_sums(self) -> int:
        """Sums (f32) of each warp in shared memory."""
        return 0

    @property
    def norm_of_x(self) -> Norm | None:
        """The norm of x that it computes."""
        return None

    def apply(self, x: Array, of: Reference) -> Array:
        """x (batch, cols) in float64 after it; what else it writes goes to ``of.outputs``."""
        raise NotImplementedError


class Epilogue(Step):
    """Base of what a product goes through."""

    __slots__ = ()

    @property
    def shared_nbytes(self) -> int:
        """Bytes of shared memory that all threads read, a multiple of 16."""
        return 0

    @property
    def nonlinearity(self) -> Activation | None:
        """The nonlinearity that it is."""
        return None

    def of_part(self, product: Product, part: Part) -> bool:
        """Whether it follows the product of this one of the matrices."""
        return True

    def apply(self, y: Array, of: Reference) -> Array:
        """The product of a matrix (batch, rows), or of a pair (2, batch, rows), after it, float64;
        what else it writes goes to ``of.outputs``."""
        raise NotImplementedError


def find(steps: Iterable[Step], kind: type[S]) -> S | None:
    """The step of a kind, None without one."""
    return next((step for step in steps if isinstance(step, kind)), None)


@dataclass(frozen=True)
class Steps:
    """The steps around a main loop, in order, and what they make of it together."""

    prologue: tuple[Prologue, ...] = ()
    epilogue: tuple[Epilogue, ...] = ()

    def __iter__(self) -> Iterator[Prologue | Epilogue]:
        return iter((*self.prologue, *self.epilogue))

    def find(self, kind: type[S]) -> S | None:
        """The step of a kind, None without one."""
        return find(self, kind)

    def has(self, kind: type[Step]) -> bool:
        """Whether there is a step of a kind."""
        return find(self, kind) is not None

    def named(self, stem: str) -> Prologue | Epilogue | None:
        """The step of a name, for templates."""
        return next((step for step in self if step.stem == stem), None)

    @cached_property
    def gated(self) -> bool:
        """Whether two matrices are multiplied together."""
        return self.named("gated") is not None

    @property
    def pair(self) -> int:
        """Matrices that are multiplied together: two if gated."""
        return 2 if self.gated else 1

    @property
    def f(self) -> Activation | None:
        """The nonlinearity that the product goes through."""
        made = (step.nonlinearity for step in self.epilogue)
        return next((f for f in made if f is not None), None)

    @property
    def norm(self) -> Norm | None:
        """The norm of x that the launch computes."""
        made = (step.norm_of_x for step in self.prologue)
        return next((norm for norm in made if norm is not None), None)

    @property
    def normed(self) -> bool:
        """Whether x is normalised, by this launch or by the one before as well."""
        return any(step.normalises for step in self.prologue)


class Product(KernelSpec):
    """y = W x of a matrix W (rows, cols) and of ``others``, (format, rows) of more matrices for the
    same x, each with its own y: a main loop between the steps of a ``prologue``, which x goes
    through, and of an ``epilogue``, which the product goes through.
    """

    format: Format
    rows: int
    cols: int
    batch: int
    prologue: tuple[Prologue, ...] = ()
    epilogue: tuple[Epilogue, ...] = ()
    others: tuple[tuple[Format, int], ...] = ()

    #: The steps that the main loop takes, in this order.
    prologues: ClassVar[tuple[type[Prologue], ...]] = ()
    epilogues: ClassVar[tuple[type[Epilogue], ...]] = ()
    #: Whether x is many vectors packed as f16 (`weights.packed`).
    packs_many: ClassVar[bool] = False

    @classmethod
    def of(cls, *fields: Any, **named: Any) -> Self:
        """A product whose steps stand, in order, among its other ``fields``."""
        for name, kind in (("prologue", Prologue), ("epilogue", Epilogue)):
            if steps := tuple(step for step in fields if isinstance(step, kind)):
                named[name] = steps
        return cls(*(field for field in fields if not isinstance(field, Step)), **named)

    @property
    def cluster(self) -> int:
        """CTAs of a cluster that share the columns."""
        return 1

    @property
    def pair_shape(self) -> tuple[str | int, ...]:
        """Shape of what each pair of a row and an expert has; empty without experts."""
        return ()

    @property
    def parts(self) -> Sequence[Part]:
        """The matrices with a product of their own."""
        raise NotImplementedError

    @property
    def formats(self) -> tuple[Format, ...]:
        """The types of the matrices."""
        return (self.format, *(fmt for fmt, _ in self.others))

    @cached_property
    def steps(self) -> Steps:
        """What surrounds the main loop."""
        return Steps(self.prologue, self.epilogue)

    @property
    def vectors(self) -> int:
        """Vectors of x."""
        return self.batch

    def epilogue_of(self, part: Part) -> tuple[Epilogue, ...]:
        """The steps after the product of one of the matrices."""
        return tuple(step for step in self.epilogue if step.of_part(self, part))

    def weights_of(self, part: Part) -> tuple[str, ...]:
        """The parameters of the matrices of a part."""
        return (f"weights{part.suffix}", "up")[: self.steps.pair]

    def bias_shape(self, part: Part) -> tuple[str | int, ...]:
        """The shape of the biases of a matrix."""
        return (part.rows,)


def in_order(kind: type[Product], *steps: Step) -> tuple[Step, ...]:
    """The steps in the order of a product's main loop; those that it does not take last."""
    order = (*kind.prologues, *kind.epilogues)
    places = {each: place for place, each in enumerate(order)}
    return tuple(sorted(steps, key=lambda step: places.get(type(step), len(order))))


def check_steps(product: Product, epilogues: tuple[type[Epilogue], ...] = ()) -> None:
    """Raise PtxgenError for a step that the product does not take, or not in this order;
    ``epilogues`` are those that it takes, if not all of its class."""
    _check_order(product.name, product.prologue, product.prologues)
    _check_order(product.name, product.epilogue, epilogues or product.epilogues)
    for step in product.steps:
        step.check(product)


def _check_order(name: str, steps: tuple[Step, ...], takes: tuple[type[Step], ...]) -> None:
    """Raise PtxgenError for steps of product ``name`` that it does not take, or not so."""
    known = ", ".join(kind.stem for kind in takes)
    for step in steps:
        if type(step) not in takes:
            raise PtxgenError(f"{name}: takes no {step.stem}: {known} in this order")
    places = [takes.index(type(step)) for step in steps]
    if any(a >= b for a, b in pairwise(places)):
        given = ", ".join(step.stem for step in steps)
        raise PtxgenError(f"{name}: {given}: each at most once, in the order {known}")


def stored(product: Product, params: Iterable[Param]) -> tuple[Param, ...]:
    """The parameters in the layouts that steps of the product require."""
    for step in product.steps:
        params = [step.stored(param, product) for param in params]
    return tuple(params)
