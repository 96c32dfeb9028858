"""Kernel specs: frozen dataclasses whose fields are the specialisation."""

from __future__ import annotations

import dataclasses
import inspect
import math
from collections.abc import Mapping
from typing import Any, ClassVar, Self, TypeVar, cast

import numpy as np
import numpy.typing as npt

from urdir.ptxgen.errors import PtxgenError, SettingError
from urdir.ptxgen.limits import Limits, check_limits, limited
from urdir.ptxgen.ptx.launch import NUMPY_DTYPES, Access, LaunchShape, Param
from urdir.ptxgen.render.text import key_of, text_of
from urdir.ptxgen.target import Target, since

__all__ = ["UNIT_ROUNDOFF", "Access", "Array", "KernelSpec", "LaunchShape", "Param", "Tolerance"]

Array = npt.NDArray[Any]
S = TypeVar("S", bound="KernelSpec")

#: Float type -> the largest relative error of one rounding to nearest, 2^-p for p bits.
UNIT_ROUNDOFF: Mapping[str, float] = {
    "f16": 2.0**-11,
    "bf16": 2.0**-8,
    "f32": 2.0**-24,
    "f64": 2.0**-53,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Tolerance:
    """Allowed deviation from the reference: ``|x - ref| <= atol + rtol * max|ref|``.

    0, 0 means bit for bit. The scale is the largest magnitude of the reference array, because a
    sum's rounding error follows its terms and not its (perhaps cancelled) result.
    """

    rtol: float = 0.0
    atol: float = 0.0

    @staticmethod
    def of_sum(dtype: str, terms: int = 1, accumulator: str = "f32") -> Tolerance:
        """For outputs of type ``dtype`` that are sums of ``terms`` terms, added in ``accumulator``.

        One rounding to ``dtype``, and one of every partial sum. Errors of either sign grow as the
        root of the number of terms; four times that covers any element of a large array (Higham
        and Mary 2019). Integers must be equal. It does not cover inputs that cancel throughout, or
        functions that are only approximated. Raises PtxgenError for a type without a rounding.
        """
        if dtype[0] in "us":
            return Tolerance()
        sums = 4 * _roundoff(accumulator) * terms**0.5
        return Tolerance(rtol=_roundoff(dtype) + sums)

    def rounded_to(self, dtype: str) -> Tolerance:
        """The same for outputs that are rounded to ``dtype`` in the end, as is the reference: where
        the two lie on either side of a tie, they are two roundings apart. Raises PtxgenError for a
        type without a rounding."""
        return dataclasses.replace(self, rtol=self.rtol + 2 * _roundoff(dtype))


def _roundoff(dtype: str) -> float:
    if dtype not in UNIT_ROUNDOFF:
        raise PtxgenError(f"no tolerance for {dtype!r}: {', '.join(UNIT_ROUNDOFF)}")
    return UNIT_ROUNDOFF[dtype]


class KernelSpec:
    """Base of all kernel specs. Subclasses are ``@dataclass(frozen=True)``; their fields are the
    specialisation.

    A subclass sets ``name`` (PTX entry name), ``template`` and implements ``params``,
    ``launch_shape``, ``reference`` and ``examples``. Everything that a launch needs is a function
    of the fields, so a spec is a key. Raises PtxgenError for fields beyond their ``limits``.
    """

    name: str
    #: (package, file). A kernel in ``urdir.ptxgen.kernels`` has the template in ``urdir.templates``
    #: with its module's folder and stem, unless it names another.
    template: ClassVar[tuple[str, str]]
    #: The values that fields may have, each by itself (`limited`).
    limits: ClassVar[Limits] = limited()
    #: The kernel executes ``griddepcontrol.wait`` (on sm_90 and newer) before it writes memory, and
    #: before it reads memory that an earlier kernel writes. Then a programmatic graph edge may lead
    #: to it. Rendering puts the instruction before the body, unless the template has its own
    #: further down (after loads of constant memory such as weights).
    waits_for_dependencies: bool = True

    def __post_init__(self) -> None:
        """Raise PtxgenError for fields beyond their limits; subclasses check several together."""
        check_limits(self)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" in vars(cls) and "template" not in vars(cls):
            _find_template(cls)

    @property
    def launch_fields(self) -> frozenset[str]:
        """Fields that only launches depend on, not the text: scalars, and numbers of CTAs."""
        return frozenset()

    @property
    def targets(self) -> tuple[str, ...]:
        """The targets that the kernel is written for; the tests expect all of them to work.

        ``since(90)`` are the portable targets from sm_90 on, ("sm_90a",) is a kernel for Hopper
        only. It is not a field: a key has only the one target of its text.
        """
        return since(75)

    @property
    def params(self) -> tuple[Param, ...]:
        """The parameter list, in PTX order."""
        raise NotImplementedError(f"kernel {self.name}: params")

    @property
    def launch_shape(self) -> LaunchShape:
        """Grid, block, cluster and shared memory of every launch of this spec."""
        raise NotImplementedError(f"kernel {self.name}: launch_shape")

    def resident_on(self, target: Target) -> int:
        """`LaunchShape.resident` on ``target``, one of the kernel's own."""
        return self.launch_shape.resident

    @property
    def tolerance(self) -> Tolerance:
        """Allowed deviation of the outputs from ``reference``."""
        return Tolerance()

    def reference(self, **inputs: Any) -> dict[str, Array]:
        """The kernel in numpy, accumulating in float64.

        Takes every IN and INOUT array (shaped as the parameter) and every scalar by name; returns
        every OUT and INOUT array, of its parameter's shape and type. Never writes into its inputs.
        """
        raise NotImplementedError(f"kernel {self.name}: reference")

    @classmethod
    def examples(cls) -> Mapping[str, Self]:
        """Specs worth testing by name, smallest first: odd sizes, every branch of the template."""
        raise NotImplementedError(f"kernel {cls.name}: examples")

    def flops(self) -> int:
        """Operations of a launch, a fused multiply-add as two; none if it only moves data."""
        return 0

    def bytes_moved(self) -> int:
        """Minimum number of bytes that a launch reads and writes: every argument once.

        Kernels that touch a part of an argument (a gathered row, a cache) override this.
        """
        return sum(self.nbytes(p) * p.passes for p in self.params)

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Random values for every IN and INOUT array and every scalar.

        Floats are standard normal, integers 0 to 99; specs whose inputs have a meaning (a position,
        a token id, packed weights) override this.
        """
        return {
            p.name: random_array(p.dtype, self.shape_of(p), rng)
            for p in self.params
            if p.access is not Access.OUT
        }

    def param(self, name: str) -> Param:
        """The parameter called ``name``; PtxgenError if there is none."""
        for p in self.params:
            if p.name == name:
                return p
        raise PtxgenError(f"kernel {self.name} has no parameter {name!r}")

    def shape_of(self, param: Param) -> tuple[int, ...]:
        """The concrete shape of a parameter, its symbols replaced by this spec's attributes."""
        return _shape(self, param)

    def nbytes(self, param: Param) -> int:
        """Size in bytes of the array that a pointer parameter points to."""
        return math.prod(self.shape_of(param)) * param.numpy_dtype.itemsize

    def target_on(self, device: str) -> str | None:
        """The one of ``targets`` that a device runs; None if the kernel does not exist for it.

        ``device`` is the device's native target. "sm_90a" runs kernels for sm_90a, else those for
        sm_90. Raises PtxgenError for an unknown one.
        """
        target = Target.parse(device)
        return next((t for t in (target.name, target.portable) if t in self.targets), None)

    def key(self, device: str) -> str:
        """The spec key on a device (`target_on`), without rendering: see `render.text.key_of`.
        Raises PtxgenError if the kernel does not exist."""
        return key_of(self, _target_of(self, device))

    def ptx(self, device: str) -> str:
        """PTX text of this spec for a device ("sm_90"): see `target_on`.
        Raises PtxgenError if the kernel does not exist."""
        return text_of(self, Target.parse(_target_of(self, device)))


def _shape(spec: KernelSpec, param: Param) -> tuple[int, ...]:
    """See `KernelSpec.shape_of`; PtxgenError for a symbol that is not an attribute of the spec."""
    try:
        return tuple(s if isinstance(s, int) else int(getattr(spec, s)) for s in param.shape)
    except AttributeError as exc:
        unknown = next(s for s in param.shape if isinstance(s, str) and not hasattr(spec, s))
        raise PtxgenError(
            f"kernel {spec.name}, parameter {param.name}: the shape names {unknown!r}, an "
            "attribute that the spec lacks"
        ) from exc


def _find_template(kind: type[KernelSpec]) -> None:
    """Give a kernel of urdir its template: see `KernelSpec.template`."""
    package, _, module = kind.__module__.partition(".kernels.")
    if package == __package__:
        kind.template = ("urdir.templates", f"{module.replace('.', '/')}.ptx.j2")


def _target_of(spec: KernelSpec, device: str) -> str:
    """See `KernelSpec.target_on`; SettingError if the kernel does not exist there."""
    target = spec.target_on(device)
    if target is None:
        raise SettingError(f"kernel {spec.name} is for {', '.join(spec.targets)}, not {device}")
    return target


def purpose_of(kind: type[KernelSpec]) -> str:
    """The first sentence of a spec's docstring, in one line."""
    paragraph = " ".join((inspect.getdoc(kind) or "").split("\n\n")[0].split())
    return paragraph.split(". ")[0].rstrip(".")


#: The examples of a kernel, once made.
_EXAMPLES: dict[type[KernelSpec], Mapping[str, KernelSpec]] = {}


def examples_of(kind: type[S]) -> Mapping[str, S]:
    """The `KernelSpec.examples` of a kernel, made once."""
    if kind not in _EXAMPLES:
        _EXAMPLES[kind] = kind.examples()
    return cast("Mapping[str, S]", _EXAMPLES[kind])


def smallest_example(kind: type[S]) -> S:
    """The first of the examples of a kernel."""
    return next(iter(examples_of(kind).values()))


def random_array(dtype: str, shape: tuple[int, ...], rng: np.random.Generator) -> Array:
    """Standard normal floats, or integers below 100, of a PTX type; () for a scalar."""
    numpy_dtype = NUMPY_DTYPES[dtype]
    if dtype in ("f16", "f32", "f64"):
        return np.asarray(rng.standard_normal(shape)).astype(numpy_dtype)
    if dtype == "bf16":
        bits = np.asarray(rng.standard_normal(shape)).astype(np.float32).view(np.uint32) >> 16
        return bits.astype(np.uint16)
    return np.asarray(rng.integers(0, 100, shape)).astype(numpy_dtype)


def ceil_div(a: int, b: int) -> int:
    """The smallest integer not below a / b."""
    return -(-a // b)
