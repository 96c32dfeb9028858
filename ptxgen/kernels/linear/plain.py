"""The steps after a product that need no other launch, made from flags and numbers."""

from __future__ import annotations

from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.linear.epilogue.activation import Activated, Bounded, Gated, Scaled
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.steps import Epilogue

#: The keywords of `plain_epilogue`.
PLAIN = {"bias", "gated", "activation", "scale", "residual", "softcap", "clamp"}


def plain_epilogue(
    bias: bool | tuple[bool, ...] = False,
    gated: bool = False,
    activation: Activation | None = None,
    scale: float = 1.0,
    residual: bool = False,
    softcap: float = 0.0,
    clamp: float = 0.0,
) -> tuple[Epilogue, ...]:
    """Bias, nonlinearity (of a gate by default silu), scale, residual and bounds, as they are
    given."""
    biases = bias if isinstance(bias, tuple) else ()
    bounds = Bounded(softcap, clamp)
    return (
        *([Bias(biases)] if bias is True or any(biases) else []),
        *([Gated(activation or Activation())] if gated else []),
        *([Activated(activation)] if activation and not gated else []),
        *([Scaled(scale)] if scale != 1 and not residual else []),
        *([Residual(scale)] if residual else []),
        *([bounds] if bounds != Bounded() else []),
    )
