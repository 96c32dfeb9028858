"""Examples of the first products of low-rank adapters: ``cls`` makes the kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from urdir.ptxgen.kernels.norm import Norm

S = TypeVar("S")


def shrink_examples(cls: Callable[..., S]) -> dict[str, S]:
    """In f32: ranks a CTA, norms, experts, requests of B."""
    rms = Norm("rms", 1e-5)
    return {
        "one row": cls(1, 64, 1, 1, 8, 1),
        "odd columns": cls(2, 37, 2, 3, 8, 3, norm=rms),
        "odd f32": cls(3, 53, 1, 2, 16, 4, "f32", each=8),
        "norm": cls(1, 4096, 3, 2, 16, 2, norm=rms),
        "no weight": cls(2, 300, 2, 2, 8, 2, "f32", norm=Norm("rms", 1e-6, weight=False)),
        "many rows": cls(70, 1028, 2, 4, 32, 9, norm=rms, each=16),
        "with B": cls(5, 64, 2, 2, 8, 3, outs=(70, 33)),
        "with A and B": cls(9, 1100, 2, 3, 16, 4, outs=(70, 33), each=8),
        "experts": cls(3, 96, 2, 2, 8, 3, experts=5, used=2),
        "pairs of experts": cls(2, 40, 1, 2, 8, 2, "f32", experts=4, used=3, by_pair=True),
        "ordered": cls(3, 40, 1, 2, 8, 2, experts=4, used=2, by_pair=True, ordered=True, norm=None),
        "long f32": cls(4, 8200, 1, 2, 24, 4, "f32", each=8),
    }


def packed_shrink_examples(cls: Callable[..., S]) -> dict[str, S]:
    """On tensor cores, with and without clusters."""
    return {
        "one row": cls(1, 64, 1, 1, 8, 1),
        "odd columns": cls(11, 204, 2, 3, 24, 5),
        "many rows": cls(70, 1028, 2, 2, 16, 9),
        "with B": cls(29, 516, 2, 3, 16, 7, outs=(70, 33)),
        "cluster": cls(13, 1152, 3, 2, 16, 4, outs=(70, 33, 5), cluster=2),
        "large cluster": cls(37, 4352, 1, 1, 40, 3, cluster=8),
    }


def row_shrink_examples(cls: Callable[..., S]) -> dict[str, S]:
    """Many rows: a CTA has several."""
    rms = Norm("rms", 1e-5)
    return {
        "few rows": cls(8, 64, 1, 1, 8, 1),
        "odd columns": cls(11, 37, 2, 3, 8, 5, norm=rms),
        "f32": cls(17, 1028, 1, 2, 16, 4, "f32", each=4),
        "norm": cls(70, 2080, 3, 4, 16, 9, norm=rms),
        "no weight": cls(9, 300, 2, 2, 8, 2, norm=Norm("rms", 1e-6, weight=False)),
    }
