"""Products from keywords: the usual steps, and the options of the cut, by name."""

from __future__ import annotations

import dataclasses
from typing import Any, TypeVar

from urdir.ptxgen.kernels.linear.cut import CutOptions, one_resident
from urdir.ptxgen.kernels.linear.plain import plain_epilogue
from urdir.ptxgen.kernels.linear.products.gemm_small import GemmSmall
from urdir.ptxgen.kernels.linear.products.tiled import TiledSpec
from urdir.ptxgen.kernels.linear.prologue.norm import Normed
from urdir.ptxgen.kernels.linear.spec import LinearSpec
from urdir.ptxgen.weights.formats import Format

S = TypeVar("S", bound=LinearSpec)
T = TypeVar("T", bound=TiledSpec)

_OPTIONS = {field.name for field in dataclasses.fields(CutOptions)}
_STEPS = {"bias", "gated", "activation", "scale", "residual", "softcap", "clamp"}


def product(kind: type[S], fmt: Format, rows: int, cols: int, **words: Any) -> S:
    """A product with a ``norm`` before it, a `plain_epilogue`, and `CutOptions`; other keywords are
    its own fields."""
    options = {name: words.pop(name) for name in _OPTIONS & words.keys()}
    plain = {name: words.pop(name) for name in _STEPS & words.keys()}
    if (norm := words.pop("norm", None)) is not None:
        words["prologue"] = (Normed(norm),)
    if plain:
        words["epilogue"] = plain_epilogue(**plain)
    if options:
        words["options"] = (one_resident if kind is GemmSmall else CutOptions)(**options)
    return kind(fmt, rows, cols, **words)


def recut(spec: T, **changes: Any) -> T:
    """The product with other options of its cut, and other fields."""
    options = {name: changes.pop(name) for name in _OPTIONS & changes.keys()}
    return dataclasses.replace(
        spec, options=dataclasses.replace(spec.options, **options), **changes
    )
