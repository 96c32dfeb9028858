"""Examples of `GemvF32`, which ``cls`` makes."""

from __future__ import annotations

from typing import TypeVar

from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.linear.epilogue.activation import Activated, Bounded, Gated, Scaled
from urdir.ptxgen.kernels.linear.epilogue.adapted import Adapted
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.prologue.norm import Normed
from urdir.ptxgen.kernels.linear.spec import LinearSpec, odd_cols
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.weights.formats import FORMATS, UNIT

S = TypeVar("S", bound=LinearSpec)


def gemv_f32_examples(cls: type[S]) -> dict[str, S]:
    """Each type of weights, each way to cut, to begin and to end a product."""
    rms, fine = Norm("rms", 1e-5), Norm("rms", 1e-6)
    q8, q4_k, q6_k, f16 = (FORMATS[n] for n in ("Q8_0", "Q4_K", "Q6_K", "F16"))
    each = {
        f.name: cls.of(f, 17, odd_cols(f), *[Bias()] * (i % 2 == 0))
        for i, f in enumerate(FORMATS.values())
    }
    return {
        "smallest": cls.of(q8, 3, UNIT),
        **each,
        "F16 one stage": cls.of(f16, 3, 2085, warps=2, stages=1),
        "passes": cls.of(q4_k, 18, 2304, warps=1, rows_each=2, stages=3, passes=3, resident=8),
        "residual and bias": cls.of(q4_k, 6, 4864, Bias(), Residual(), rows_each=2),
        "adapted batch": cls.of(
            q8, 9, 96, Adapted(2, 8, "f32", (None, 1), 2), batch=5, others=((f16, 6),)
        ),
        "adapted, gated": cls.of(
            q8, 9, 96, Bias(), Adapted(1, 32, places=(1, 0), count=2), Gated(), batch=2
        ),
        "batch of 8": cls.of(q4_k, 5, 512, Bias(), batch=8),
        "batch of 4 norm": cls.of(q8, 9, 4864, Normed(rms), rows_each=1, batch=4, stages=1),
        "F32 batch": cls.of(FORMATS["F32"], 5, 37, Normed(rms), Bias(), batch=8),
        "F32 long norm": cls.of(FORMATS["F32"], 3, 12321, Normed(rms)),
        "gated batch": cls.of(q4_k, 7, 512, Normed(fine), Gated(), batch=2),
        "gated passes": cls.of(q6_k, 22, 2048, Gated(), warps=2, passes=2),
        "three matrices": cls.of(q4_k, 19, 768, Bias(), others=((q4_k, 5), (q6_k, 7))),
        "three matrices, mixed types": cls.of(
            f16, 6, 96, Normed(rms), others=((q8, 3), (f16, 9)), warps=2, passes=2, batch=2
        ),
        "layer norm": cls.of(q8, 9, 4864, Normed(Norm("layer", 1e-5, bias=True)), batch=3),
        "F32 layer norm without weight": cls.of(
            FORMATS["F32"],
            5,
            37,
            Normed(Norm("layer", 1e-5, weight=False)),
            Activated(Activation("gelu")),
            batch=2,
        ),
        "layer norm in panels": cls.of(
            FORMATS["F32"],
            3,
            12321,
            Normed(Norm("layer", 1e-5)),
            Scaled(0.5),
            Bounded(softcap=5.0),
        ),
        "norm without weight": cls.of(q4_k, 5, 256, Normed(Norm("rms", 1e-6, weight=False))),
        "norm with bias": cls.of(
            q8, 5, 96, Normed(Norm("rms", 1e-6, bias=True)), Bounded(clamp=1.5)
        ),
        "gated with biases": cls.of(q4_k, 7, 256, Bias(), Gated(Activation("relu2")), batch=2),
        "residual, bias, scale": cls.of(q8, 6, 64, Bias(), Residual(0.22), batch=3, rows_each=2),
        "some biases": cls.of(
            q4_k,
            19,
            256,
            Bias((True, False, True)),
            Activated(Activation("softplus")),
            others=((q4_k, 5), (q6_k, 7)),
        ),
    }
