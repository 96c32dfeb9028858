"""What stands before and after a product: checks, and words for templates' contracts."""

from __future__ import annotations

from typing import Any

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.norm import Norm


def check_ends(spec: Any) -> None:
    """Raise PtxgenError for bounds below 0 and for an activation that needs a gate."""
    if not (spec.softcap >= 0 and spec.clamp >= 0):
        raise PtxgenError(f"{spec.name}: softcap {spec.softcap}, clamp {spec.clamp}: 0 is none")
    f, gated = spec.activation, getattr(spec, "gated", False)
    if f is not None and not gated and (f.limit or f.kind == "swiglu_oai"):
        raise PtxgenError(f"{spec.name}: {f.kind} with limit {f.limit} is for gated products")


def is_first(norm: Norm) -> bool:
    """Whether a norm must be complete before the product. Without a mean and a bias it is a factor
    of each vector, and may follow."""
    return norm.kind == "layer" or norm.bias


def norm_text(norm: Norm | None, weights: str = "norm") -> str:
    """A norm as a template's contract has it; ``weights`` is the name of its parameter."""
    if norm is None:
        return "x"
    centred = "x" if norm.kind == "rms" else "(x - mean(x))"
    measure = "mean(x^2)" if norm.kind == "rms" else "var(x)"
    weight = f" * {weights}, {weights} (cols) f32" if norm.weight else ""
    bias = f" + {weights}_bias" if norm.bias else ""
    return f"{centred} / sqrt({measure} + eps){weight}{bias}"


def end_text(spec: Any) -> str:
    """What follows a product, as a template's contract has it."""
    f = spec.activation.kind if spec.activation else "silu" if spec.f else ""
    steps = [
        *([f"f: {f}"] if f else []),
        *([f"* {spec.scale}"] if spec.scale != 1 else []),
        *([f"soft cap {spec.softcap}"] if spec.softcap else []),
        *([f"within {spec.clamp}"] if spec.clamp else []),
    ]
    return f"; end: {', '.join(steps)}" if steps else "; end(s) = s"
