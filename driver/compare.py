"""Comparison of a kernel's outputs with its reference, within its tolerance."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from urdir.driver.errors import MismatchError
from urdir.driver.guarded import poison
from urdir.driver.kernel import Kernel, access_of
from urdir.ptxgen.ptx.launch import Param

Array = npt.NDArray[Any]

#: Spacing of neighbouring values of a 16-bit type, relative to the value.
STEPS: Mapping[str, float] = {"f16": 2.0**-10, "bf16": 2.0**-7}


@dataclass(frozen=True, slots=True)
class Deviation:
    """The element of one output that is farthest from its reference.

    ``error`` is its distance (infinite for NaN, or where only one of the two is finite), ``bound``
    the distance that the kernel's tolerance allows anywhere in the array, ``wrong`` how many of
    ``size`` elements exceed it, and how many of these still are `poison`: ``unwritten``.
    """

    param: str
    index: tuple[int, ...]
    value: float
    expected: float
    error: float
    bound: float
    wrong: int
    size: int
    unwritten: int = 0

    @property
    def ok(self) -> bool:
        """Whether every element is within the bound."""
        return self.wrong == 0

    @property
    def ratio(self) -> float:
        """Error over bound: at most 1 if ok; 0 if equal bit for bit."""
        if self.error == 0:
            return 0.0
        return self.error / self.bound if self.bound else float("inf")

    @property
    def may_be_rounding(self) -> bool:
        """Whether the kernel allows none, and the error is small beside the value."""
        return not self.bound and 0 < self.error <= 1e-3 * abs(self.expected)

    def __str__(self) -> str:
        at = ", ".join(map(str, self.index))
        unwritten = f", {self.unwritten:,} of them never written" if self.unwritten else ""
        return (
            f"{self.param}[{at}] is {_shown(self.value)}, the reference {_shown(self.expected)}: "
            f"off by {self.error:.3g}, allowed {self.bound:.3g} ({self.wrong:,} of {self.size:,} "
            f"wrong{unwritten})"
        )


def _shown(value: float) -> str:
    """A value, of integers all digits."""
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else f"{value:.9g}"


def written_params(kernel: Kernel) -> list[Param]:
    """The parameters whose memory a kernel writes, in PTX order."""
    return [p for p in kernel.params if access_of(p) in ("out", "inout")]


def deviations(
    kernel: Kernel,
    outputs: Mapping[str, Array],
    expected: Mapping[str, Array],
    *,
    ties: bool = False,
) -> tuple[Deviation, ...]:
    """The worst element of every output. ``ties`` allows for inputs halfway between two values of
    an output's type, see `deviation`. Raises MismatchError for a missing output or a wrong shape.
    """
    names = [p.name for p in written_params(kernel)]
    for source, arrays in (("the reference", expected), ("the kernel", outputs)):
        if not isinstance(arrays, Mapping):
            raise MismatchError(
                f"kernel {kernel.name}: {source} gave {type(arrays).__name__}, not the arrays "
                "by name"
            )
        if sorted(arrays) != sorted(names):
            raise MismatchError(
                f"kernel {kernel.name} writes {', '.join(names)}; {source} gave "
                f"{', '.join(arrays) or 'nothing'}"
            )
    return tuple(
        deviation(kernel, p, outputs[p.name], expected[p.name], ties=ties)
        for p in written_params(kernel)
    )


def deviation(
    kernel: Kernel, param: Param, output: Array, expected: Array, *, ties: bool = False
) -> Deviation:
    """The worst element of one output: ``|output - expected| <= atol + rtol * max|expected|``.

    With ``ties``, an inexact kernel may round ties either way: `STEPS` is added to ``rtol``.
    """
    shape = kernel.shape_of(param)
    for source, array in (("reference", expected), ("output", output)):
        if not isinstance(array, np.ndarray):
            raise MismatchError(
                f"kernel {kernel.name}: the {source} of {param.name} is a {type(array).__name__}, "
                f"not an array {param.numpy_dtype} {shape}"
            )
        if array.shape != shape or array.dtype != param.numpy_dtype:
            raise MismatchError(
                f"kernel {kernel.name}: the {source} of {param.name} is {array.dtype} "
                f"{array.shape}, the parameter {param.numpy_dtype} {shape}"
            )
    got, wanted = _numbers(param, output), _numbers(param, expected)
    error = _distance(got, wanted, output == expected)
    finite = np.abs(wanted[np.isfinite(wanted)])
    tolerance = kernel.tolerance
    step = STEPS.get(param.dtype, 0.0) if ties and (tolerance.rtol or tolerance.atol) else 0.0
    bound = tolerance.atol + (tolerance.rtol + step) * float(finite.max(initial=0.0))
    worst = np.unravel_index(int(np.argmax(error)), error.shape)
    wrong = error > bound
    return Deviation(
        param=param.name,
        index=tuple(int(i) for i in worst),
        value=float(got[worst]),
        expected=float(wanted[worst]),
        error=float(error[worst]),
        bound=bound,
        wrong=int(np.count_nonzero(wrong)),
        size=error.size,
        unwritten=int(np.count_nonzero(_is_poison(param, output[wrong]))),
    )


def _is_poison(param: Param, values: Array) -> Array:
    """Which of the values (n,) have the bits of `poison`."""
    blank = poison(values.shape, values.dtype, floats=param.dtype[0] in "fb")
    same = values.view(np.uint8) == blank.view(np.uint8)
    is_poison: Array = same.reshape(values.size, values.itemsize).all(axis=1)
    return is_poison


def compare(
    kernel: Kernel, outputs: Mapping[str, Array], expected: Mapping[str, Array]
) -> tuple[Deviation, ...]:
    """The worst element of every output; raises MismatchError when one exceeds the tolerance.

    ``outputs`` and ``expected`` hold an array, shaped and typed as the parameter, for every OUT and
    INOUT parameter. A NaN never passes, wherever it is.
    """
    found = deviations(kernel, outputs, expected)
    if wrong := [d for d in found if not d.ok]:
        hint = "".join({_ROUNDED for each in wrong if each.may_be_rounding})
        raise MismatchError(f"kernel {kernel.name}: {'; '.join(map(str, wrong))}{hint}")
    return found


#: What is said where a kernel may only round otherwise than its reference.
_ROUNDED = "; a kernel that rounds states a tolerance, such as Tolerance.of_sum('f32', terms=n)"


def _numbers(param: Param, array: Array) -> Array:
    """The values as float64; bf16, which numpy lacks, stays as bits."""
    if param.dtype == "bf16":
        array = (array.astype(np.uint32) << 16).view(np.float32)
    return array.astype(np.float64)


def _distance(got: Array, wanted: Array, identical: Array) -> Array:
    with np.errstate(invalid="ignore"):
        error: Array = np.abs(got - wanted)
    error[~np.isfinite(error)] = np.inf
    # Equal infinities do not deviate; unequal 64-bit integers may round to the same float64.
    error[identical & ~np.isnan(got)] = 0.0
    error[~identical & (error == 0) & (got != 0)] = 1.0
    return error
