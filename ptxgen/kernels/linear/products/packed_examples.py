"""Examples that products of packed activation vectors have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeVar

from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.linear.epilogue.activation import Activated, Bounded, Gated, Scaled
from urdir.ptxgen.kernels.linear.epilogue.adapted import Adapted
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.epilogue.heads import HeadPlaces, Heads
from urdir.ptxgen.kernels.linear.epilogue.pack import PackedVectors
from urdir.ptxgen.kernels.linear.packed_parts import PackedCut, takes_packed
from urdir.ptxgen.kernels.linear.products.packed_product import PackedProduct
from urdir.ptxgen.weights.formats import FORMATS

P = TypeVar("P", bound=PackedProduct)


def small_examples(cls: type[P], small: PackedCut) -> Iterator[tuple[str, P]]:
    """Small ones of every type, with a cut for eight vectors."""
    yield "smallest", cls(FORMATS["Q8_0"], 8, 32, 1, small)
    types = [fmt for fmt in FORMATS.values() if takes_packed((fmt,))]
    for i, fmt in enumerate(types):
        cols = 290 if fmt.is_float else max(fmt.block, 288 // fmt.block * fmt.block)
        yield fmt.name, cls.of(fmt, 70, cols, 3 + i % 6, small, *[Bias()] * (i % 2 == 0))


def end_examples(
    cls: type[P], small: PackedCut, wide: PackedCut, paired: PackedCut
) -> Iterator[tuple[str, P]]:
    """Every way to end, with cuts for eight vectors, for sixteen, and for two row groups of
    sixteen."""
    q8, q4_k, q6_k, f16 = (FORMATS[name] for name in ("Q8_0", "Q4_K", "Q6_K", "F16"))
    yield "gated", cls.of(q4_k, 96, 512, 30, paired, Gated(), PackedVectors())
    yield "packed", cls.of(q8, 96, 288, 9, wide, Bias(), PackedVectors())
    yield "three matrices", cls(q4_k, 192, 256, 12, wide, others=((q6_k, 33), (f16, 64)))
    heads = (HeadPlaces(32, 16, 48, 37), HeadPlaces(16, 0, 16, 37))
    yield "heads", cls.of(q8, 96, 288, 13, wide, Heads(heads), others=((f16, 80),))
    whole = Heads(tuple(HeadPlaces(dims, 0, dims, 29) for dims in (32, 16, 8)), whole=True)
    others = ((f16, 80), (f16, 72))
    yield "whole heads", cls.of(f16, 96, 290, 29, wide, Bias(), whole, others=others)
    gelu = Activation("gelu")
    ends = cls.of(
        q8, 64, 256, 8, small, Bias(), Activated(gelu), Scaled(0.05), Bounded(softcap=20.0)
    )
    yield "ends", ends
    some = Adapted(2, 8, places=(1, None, 0), count=3)
    others = ((q6_k, 33), (f16, 63))
    yield "adapted", cls.of(q4_k, 192, 256, 12, wide, some, others=others)
    yield (
        "adapted, gated",
        cls.of(
            q4_k,
            96,
            512,
            30,
            paired,
            Adapted(3, 16, places=(0, 1), count=2),
            Gated(),
            PackedVectors(),
        ),
    )
