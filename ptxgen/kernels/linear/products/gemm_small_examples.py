"""Examples of `GemmSmall`, which ``cls`` makes."""

from __future__ import annotations

from typing import TypeVar

from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.linear.epilogue.activation import Activated, Bounded, Gated, Scaled
from urdir.ptxgen.kernels.linear.epilogue.adapted import Adapted
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.epilogue.norm import BeginNorm
from urdir.ptxgen.kernels.linear.epilogue.pack import PackedOutput
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.prologue.norm import Normed, begun
from urdir.ptxgen.kernels.linear.prologue.packed import PackedInput
from urdir.ptxgen.kernels.linear.spec import LinearSpec, odd_cols
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.weights.formats import FORMATS

S = TypeVar("S", bound=LinearSpec)


def gemm_small_examples(cls: type[S]) -> dict[str, S]:
    """Each type, and each way to cut, to begin and to end a product."""
    rms, fine = Norm("rms", 1e-5), Norm("rms", 1e-6)
    quantised = [f for f in FORMATS.values() if f.arithmetic == "integers"]
    eights = [f for f in FORMATS.values() if f.arithmetic == "e4m3"]
    q8, q4_k, q6_k, q5_0 = (FORMATS[n] for n in ("Q8_0", "Q4_K", "Q6_K", "Q5_0"))
    each = {
        f.name: cls.of(f, 16 + 9 * i, odd_cols(f), *[Bias()] * (i % 2 == 0), batch=1 + i % 8)
        for i, f in enumerate(quantised)
    }
    wide = {
        f"{f.name} wide": cls.of(
            f, 33, 1024, *[Residual()] * (i % 2 == 0), tiles_each=1 + i % 3, batch=8 - i % 8
        )
        for i, f in enumerate(quantised)
    }
    packed = {
        f"{f.name} packed": cls.of(f, 25 + 9 * i, odd_cols(f), PackedInput(), batch=1 + (i + 3) % 8)
        for i, f in enumerate(quantised + eights)
    }
    return {
        "smallest": cls.of(q8, 3, 32, batch=2),
        **each,
        **wide,
        **packed,
        **_floats(cls),
        "packed residual": cls.of(
            q4_k, 85, 2304, PackedInput(), Bias(), Residual(), split=2, batch=7
        ),
        "adapted": cls.of(
            q4_k, 80, 1024, Bias(), Adapted(3, 8), Residual(), BeginNorm(), tiles_each=2, batch=7
        ),
        "adapted, gated": cls.of(
            q8, 53, 320, Adapted(2, 32, "f32", (0, 1), 2), Gated(), tiles_each=2, batch=3
        ),
        "some adapted": cls.of(
            q6_k, 19, 768, Adapted(1, 16, places=(None, 0)), others=((q4_k, 39),), batch=2
        ),
        "packed cluster": cls.of(
            q6_k, 80, 4352, PackedInput(), Residual(), BeginNorm(), tiles_each=2, cluster=2
        ),
        "packed in passes": cls.of(
            q8, 80, 1600, PackedInput(), split=2, groups=1, tiles_each=4, per_pass=2, batch=5
        ),
        "packed shared blocks": cls.of(
            q4_k, 64, 1536, PackedInput(), Residual(), split=4, groups=1, tiles_each=4
        ),
        "packed gated norm": cls.of(
            q4_k,
            256,
            1024,
            PackedInput(),
            begun(rms),
            Gated(),
            PackedOutput("units"),
            split=2,
            groups=1,
            tiles_each=3,
            batch=5,
        ),
        "packed gated halves": cls.of(
            *(FORMATS["E2M1G256"], 53, 768, PackedInput(), begun(fine), Gated()),
            tiles_each=2,
            batch=7,
        ),
        "packed gated integers": cls.of(
            *(FORMATS["W4G128"], 53, 1280, PackedInput(), begun(fine), Gated()),
            tiles_each=2,
            batch=7,
        ),
        "packed gated eights": cls.of(
            *(FORMATS["E4M3G128"], 53, 1280, PackedInput(), begun(fine), Gated()),
            split=2,
            groups=1,
            tiles_each=2,
            batch=7,
        ),
        "packed eights, cluster": cls.of(
            *(FORMATS["E4M3R256"], 48, 2304, PackedInput(), Residual(), BeginNorm()),
            cluster=2,
            split=2,
            batch=5,
        ),
        "packed norm, three matrices": cls.of(
            q4_k,
            40,
            1536,
            PackedInput(),
            begun(rms),
            Bias(),
            cluster=2,
            others=((q6_k, 17), (q8, 5)),
            batch=7,
        ),
        "starts next": cls.of(
            *(q4_k, 40, 768, PackedInput(), begun(rms)),
            others=((q6_k, 17), (q8, 5)),
            batch=6,
            starts_next=True,
        ),
        "starts next, cluster": cls.of(
            *(q4_k, 80, 2304, PackedInput(), Residual(), BeginNorm()),
            cluster=2,
            batch=5,
            starts_next=True,
        ),
        "packed norm in passes": cls.of(
            q4_k,
            80,
            1024,
            PackedInput(),
            begun(fine),
            split=2,
            groups=1,
            tiles_each=5,
            per_pass=3,
            batch=6,
        ),
        "packs norm": cls.of(
            q4_k,
            256,
            768,
            PackedInput(),
            Residual(),
            BeginNorm(),
            PackedOutput("units"),
            cluster=2,
            batch=7,
        ),
        "packs": cls.of(q4_k, 256, 512, begun(rms), Gated(), PackedOutput("lanes"), batch=5),
        "packs few": cls.of(
            q5_0, 256, 96, Activated(Activation("relu2")), PackedOutput("units"), batch=3
        ),
        "packs packed": cls.of(
            q8, 512, 288, PackedInput(), PackedOutput("lanes"), cluster=1, batch=6
        ),
        "norm in passes": cls.of(
            q4_k, 40, 2304, Normed(rms), Bias(), split=2, tiles_each=3, per_pass=2
        ),
        "gated norm": cls.of(q4_k, 40, 768, Normed(rms), Gated(), batch=4),
        "gated split Q6_K": cls.of(q6_k, 23, 1536, Gated(), split=2, groups=1, stages=2, batch=3),
        "gated Q5_0": cls.of(
            q5_0, 17, 1376, Normed(fine), Gated(), tiles_each=2, stages=3, batch=7
        ),
        "norm, three matrices": cls.of(
            q4_k, 64, 1024, Normed(rms), tiles_each=2, others=((q6_k, 17), (q8, 5)), batch=5
        ),
        "residual long rows": cls.of(q4_k, 9, 4864, Residual(), stages=4, batch=8),
        "norm Q6_K": cls.of(q6_k, 20, 1280, Normed(fine), split=1, groups=2, batch=3),
        "split Q5_0": cls.of(q5_0, 40, 1376, split=2, groups=1, tiles_each=2, batch=5),
        "cluster residual": cls.of(q4_k, 40, 2304, Residual(), cluster=2, batch=8),
        "cluster of 4 norm in passes": cls.of(
            q4_k, 40, 4352, Normed(rms), Bias(), tiles_each=4, per_pass=2, cluster=4, batch=5
        ),
        "cluster gated norm": cls.of(
            q6_k, 50, 1280, Normed(fine), Gated(), split=1, groups=2, cluster=2, batch=3
        ),
        "cluster norm, two matrices": cls.of(
            q4_k, 35, 768, Normed(rms), cluster=2, others=((q8, 17),), batch=2
        ),
        "gated norm in passes": cls.of(
            q4_k, 70, 1280, Normed(rms), Gated(), split=2, groups=1, tiles_each=5, per_pass=3
        ),
        "residual split Q6_K": cls.of(
            q6_k, 70, 1280, Residual(), split=2, groups=1, tiles_each=5, batch=4
        ),
        "norm in passes Q8_0": cls.of(q8, 70, 480, Normed(rms), tiles_each=5, per_pass=2, batch=6),
        "summarises": cls.of(q8, 48, 288, Residual(), BeginNorm(), batch=5),
        "summarised gated": cls.of(q4_k, 48, 1280, begun(rms), Gated(), batch=7),
        "cluster summarises": cls.of(
            q6_k, 80, 1280, Residual(), BeginNorm(), tiles_each=2, cluster=2, batch=3
        ),
        "cluster summarised": cls.of(
            q4_k, 40, 768, begun(rms), cluster=2, others=((q8, 17),), batch=4
        ),
        "summarised Q5_0": cls.of(q5_0, 48, 1376, begun(fine), split=2, groups=1, batch=2),
        "summarises in passes": cls.of(
            q4_k, 80, 2304, Residual(), BeginNorm(), split=2, tiles_each=5, per_pass=3
        ),
        "split in 4": cls.of(q4_k, 50, 1536, Residual(), split=4, groups=1, tiles_each=4, batch=4),
        "split in 4 Q6_K": cls.of(
            q6_k, 80, 2560, split=4, groups=2, tiles_each=4, stages=3, batch=7
        ),
        "cluster split in 4": cls.of(
            q8, 80, 2464, Bias(), split=4, groups=1, tiles_each=4, cluster=2, batch=2
        ),
        "norm without weight": cls.of(
            q4_k,
            40,
            768,
            Normed(Norm("rms", 1e-6, weight=False)),
            Scaled(0.25),
            Bounded(softcap=160.0),
            batch=3,
        ),
        "gated with biases": cls.of(q8, 40, 512, Bias(), Gated(Activation("gelu")), batch=6),
        "residual, bias, scale": cls.of(q8, 40, 288, Bias(), Residual(0.22), cluster=1, batch=5),
        "summarises with bias": cls.of(q8, 48, 288, Bias(), Residual(), BeginNorm(), batch=4),
        "some biases": cls.of(
            q4_k, 35, 512, Bias((False, True)), Bounded(clamp=300.0), others=((q8, 17),), batch=5
        ),
        "activation": cls.of(q5_0, 20, 96, Bias(), Activated(Activation("relu2")), batch=2),
        "balanced matrices": cls.of(
            q4_k, 160, 1024, Normed(rms), sms=9, others=((q6_k, 32), (q8, 50)), batch=3
        ),
    }


def _floats(cls: type[S]) -> dict[str, S]:
    """Those of float weights and quants: each type, norms, what follows, and cuts."""
    bf16, f16, rms = FORMATS["BF16"], FORMATS["F16"], Norm("rms", 1e-5)
    blocks, units = FORMATS["E4M3G128"], FORMATS["E4M3G32"]
    return {
        "E4M3": cls.of(blocks, 25, 384, Bias(), batch=3),
        "E4M3 units": cls.of(units, 50, 1568, Residual(), tiles_each=2),
        "E4M3 norm, two matrices": cls.of(
            blocks, 33, 1024, Normed(rms), others=((units, 20),), batch=7
        ),
        "E4M3 gated norm": cls.of(
            blocks, 256, 768, Normed(rms), Gated(), PackedOutput("units"), batch=5
        ),
        "BF16": cls.of(bf16, 25, 352, Bias(), batch=3),
        "F16": cls.of(f16, 19, 96, Activated(Activation("relu2")), batch=2),
        "BF16 wide": cls.of(bf16, 50, 1568, Residual(), tiles_each=2),
        "F16 norm, two matrices": cls.of(
            f16, 33, 1024, Normed(rms), Bias(), others=((bf16, 20),), batch=7
        ),
        "BF16 gated norm": cls.of(
            bf16, 256, 768, Normed(rms), Gated(), PackedOutput("units"), batch=5
        ),
        "BF16 begins norm": cls.of(bf16, 80, 2304, Residual(), BeginNorm(), cluster=2, batch=6),
        "F16 norm begun, in passes": cls.of(
            f16, 80, 1312, begun(rms), split=2, groups=1, tiles_each=5, per_pass=3
        ),
    }
