"""Products with other cuts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from urdir.ptxgen.kernels.linear.products.tiled import TiledSpec

S = TypeVar("S", bound=TiledSpec)


def recut(spec: S, **changes: Any) -> S:
    """The product with other options of its cut, and other fields."""
    return replace(spec, **spec.options.within(changes))
