"""Examples of `GemmSmall`, which ``cls`` makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.linear.cut import one_resident
from urdir.ptxgen.kernels.linear.epilogue.activation import Activated, Bounded, Gated, Scaled
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.epilogue.norm import BeginNorm
from urdir.ptxgen.kernels.linear.epilogue.pack import PackedOutput
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.prologue.norm import Normed, begun
from urdir.ptxgen.kernels.linear.prologue.packed import PackedInput
from urdir.ptxgen.kernels.linear.spec import odd_cols
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.weights.formats import FORMATS

S = TypeVar("S")


def gemm_small_examples(cls: Callable[..., S]) -> dict[str, S]:
    """Each type, and each way to cut, to begin and to end a product."""
    rms, fine = Norm("rms", 1e-5), Norm("rms", 1e-6)
    quantised = [f for f in FORMATS.values() if not f.is_float]
    q8, q4_k, q6_k, q5_0 = (FORMATS[n] for n in ("Q8_0", "Q4_K", "Q6_K", "Q5_0"))
    each = {
        f.name: cls(
            f,
            16 + 9 * i,
            odd_cols(f),
            epilogue=(Bias(),) if i % 2 == 0 else (),
            batch=1 + i % 8,
        )
        for i, f in enumerate(quantised)
    }
    wide = {
        f"{f.name} wide": cls(
            f,
            33,
            1024,
            epilogue=(Residual(),) if i % 2 == 0 else (),
            batch=8 - i % 8,
            options=one_resident(tiles_each=1 + i % 3),
        )
        for i, f in enumerate(quantised)
    }
    packed = {
        f"{f.name} packed": cls(
            f, 25 + 9 * i, odd_cols(f), prologue=(PackedInput(),), batch=1 + (i + 3) % 8
        )
        for i, f in enumerate(quantised)
    }
    return {
        "smallest": cls(q8, 3, 32, batch=2),
        **each,
        **wide,
        **packed,
        "packed residual": cls(
            q4_k,
            85,
            2304,
            prologue=(PackedInput(),),
            epilogue=(Bias(), Residual()),
            batch=7,
            options=one_resident(split=2),
        ),
        "packed cluster": cls(
            q6_k,
            80,
            4352,
            prologue=(PackedInput(),),
            epilogue=(Residual(), BeginNorm()),
            options=one_resident(tiles_each=2, cluster=2),
        ),
        "packed in passes": cls(
            q8,
            80,
            1600,
            prologue=(PackedInput(),),
            batch=5,
            options=one_resident(split=2, groups=1, tiles_each=4, per_pass=2),
        ),
        "packed shared blocks": cls(
            q4_k,
            64,
            1536,
            prologue=(PackedInput(),),
            epilogue=(Residual(),),
            options=one_resident(split=4, groups=1, tiles_each=4),
        ),
        "packed gated norm": cls(
            q4_k,
            256,
            1024,
            prologue=(PackedInput(), begun(rms)),
            epilogue=(Gated(), PackedOutput("units")),
            batch=5,
            options=one_resident(split=2, groups=1, tiles_each=3),
        ),
        "packed norm, three matrices": cls(
            q4_k,
            40,
            1536,
            prologue=(PackedInput(), begun(rms)),
            epilogue=(Bias(),),
            others=((q6_k, 17), (q8, 5)),
            batch=7,
            options=one_resident(cluster=2),
        ),
        "packed norm in passes": cls(
            q4_k,
            80,
            1024,
            prologue=(PackedInput(), begun(fine)),
            batch=6,
            options=one_resident(split=2, groups=1, tiles_each=5, per_pass=3),
        ),
        "packs norm": cls(
            q4_k,
            256,
            768,
            prologue=(PackedInput(),),
            epilogue=(Residual(), BeginNorm(), PackedOutput("units")),
            batch=7,
            options=one_resident(cluster=2),
        ),
        "packs": cls(
            q4_k,
            256,
            512,
            prologue=(begun(rms),),
            epilogue=(Gated(), PackedOutput("lanes")),
            batch=5,
        ),
        "packs few": cls(
            q5_0, 256, 96, epilogue=(Activated(Activation("relu2")), PackedOutput("units")), batch=3
        ),
        "packs packed": cls(
            q8,
            512,
            288,
            prologue=(PackedInput(),),
            epilogue=(PackedOutput("lanes"),),
            batch=6,
            options=one_resident(cluster=1),
        ),
        "norm in passes": cls(
            q4_k,
            40,
            2304,
            prologue=(Normed(rms),),
            epilogue=(Bias(),),
            options=one_resident(split=2, tiles_each=3, per_pass=2),
        ),
        "gated norm": cls(q4_k, 40, 768, prologue=(Normed(rms),), epilogue=(Gated(),), batch=4),
        "gated split Q6_K": cls(
            q6_k,
            23,
            1536,
            epilogue=(Gated(),),
            batch=3,
            options=one_resident(split=2, groups=1, stages=2),
        ),
        "gated Q5_0": cls(
            q5_0,
            17,
            1376,
            prologue=(Normed(fine),),
            epilogue=(Gated(),),
            batch=7,
            options=one_resident(tiles_each=2, stages=3),
        ),
        "norm, three matrices": cls(
            q4_k,
            64,
            1024,
            prologue=(Normed(rms),),
            others=((q6_k, 17), (q8, 5)),
            batch=5,
            options=one_resident(tiles_each=2),
        ),
        "residual long rows": cls(
            q4_k, 9, 4864, epilogue=(Residual(),), batch=8, options=one_resident(stages=4)
        ),
        "norm Q6_K": cls(
            q6_k,
            20,
            1280,
            prologue=(Normed(fine),),
            batch=3,
            options=one_resident(split=1, groups=2),
        ),
        "split Q5_0": cls(
            q5_0, 40, 1376, batch=5, options=one_resident(split=2, groups=1, tiles_each=2)
        ),
        "cluster residual": cls(
            q4_k, 40, 2304, epilogue=(Residual(),), batch=8, options=one_resident(cluster=2)
        ),
        "cluster of 4 norm in passes": cls(
            q4_k,
            40,
            4352,
            prologue=(Normed(rms),),
            epilogue=(Bias(),),
            batch=5,
            options=one_resident(tiles_each=4, per_pass=2, cluster=4),
        ),
        "cluster gated norm": cls(
            q6_k,
            50,
            1280,
            prologue=(Normed(fine),),
            epilogue=(Gated(),),
            batch=3,
            options=one_resident(split=1, groups=2, cluster=2),
        ),
        "cluster norm, two matrices": cls(
            q4_k,
            35,
            768,
            prologue=(Normed(rms),),
            others=((q8, 17),),
            batch=2,
            options=one_resident(cluster=2),
        ),
        "gated norm in passes": cls(
            q4_k,
            70,
            1280,
            prologue=(Normed(rms),),
            epilogue=(Gated(),),
            options=one_resident(split=2, groups=1, tiles_each=5, per_pass=3),
        ),
        "residual split Q6_K": cls(
            q6_k,
            70,
            1280,
            epilogue=(Residual(),),
            batch=4,
            options=one_resident(split=2, groups=1, tiles_each=5),
        ),
        "norm in passes Q8_0": cls(
            q8,
            70,
            480,
            prologue=(Normed(rms),),
            batch=6,
            options=one_resident(tiles_each=5, per_pass=2),
        ),
        "summarises": cls(q8, 48, 288, epilogue=(Residual(), BeginNorm()), batch=5),
        "summarised gated": cls(
            q4_k, 48, 1280, prologue=(begun(rms),), epilogue=(Gated(),), batch=7
        ),
        "cluster summarises": cls(
            q6_k,
            80,
            1280,
            epilogue=(Residual(), BeginNorm()),
            batch=3,
            options=one_resident(tiles_each=2, cluster=2),
        ),
        "cluster summarised": cls(
            q4_k,
            40,
            768,
            prologue=(begun(rms),),
            others=((q8, 17),),
            batch=4,
            options=one_resident(cluster=2),
        ),
        "summarised Q5_0": cls(
            q5_0,
            48,
            1376,
            prologue=(begun(fine),),
            batch=2,
            options=one_resident(split=2, groups=1),
        ),
        "summarises in passes": cls(
            q4_k,
            80,
            2304,
            epilogue=(Residual(), BeginNorm()),
            options=one_resident(split=2, tiles_each=5, per_pass=3),
        ),
        "split in 4": cls(
            q4_k,
            50,
            1536,
            epilogue=(Residual(),),
            batch=4,
            options=one_resident(split=4, groups=1, tiles_each=4),
        ),
        "split in 4 Q6_K": cls(
            q6_k, 80, 2560, batch=7, options=one_resident(split=4, groups=2, tiles_each=4, stages=3)
        ),
        "cluster split in 4": cls(
            q8,
            80,
            2464,
            epilogue=(Bias(),),
            batch=2,
            options=one_resident(split=4, groups=1, tiles_each=4, cluster=2),
        ),
        "norm without weight": cls(
            q4_k,
            40,
            768,
            prologue=(Normed(Norm("rms", 1e-6, weight=False)),),
            epilogue=(Scaled(0.25), Bounded(softcap=160.0)),
            batch=3,
        ),
        "gated with biases": cls(
            q8, 40, 512, epilogue=(Bias(), Gated(Activation("gelu"))), batch=6
        ),
        "residual, bias, scale": cls(
            q8, 40, 288, epilogue=(Bias(), Residual(0.22)), batch=5, options=one_resident(cluster=1)
        ),
        "summarises with bias": cls(
            q8, 48, 288, epilogue=(Bias(), Residual(), BeginNorm()), batch=4
        ),
        "some biases": cls(
            q4_k,
            35,
            512,
            epilogue=(Bias((False, True)), Bounded(clamp=300.0)),
            others=((q8, 17),),
            batch=5,
        ),
        "activation": cls(q5_0, 20, 96, epilogue=(Bias(), Activated(Activation("relu2"))), batch=2),
        "balanced matrices": cls(
            q4_k,
            160,
            1024,
            prologue=(Normed(rms),),
            others=((q6_k, 32), (q8, 50)),
            batch=3,
            options=one_resident(sms=9),
        ),
    }
