"""Examples of `Gemv`, which ``cls`` makes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TypeVar

from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.exchange.gives import Gives, SumOfRanks
from urdir.ptxgen.kernels.linear.epilogue.activation import (
    Activated,
    Bounded,
    Gated,
    Scaled,
    SigmoidScaled,
)
from urdir.ptxgen.kernels.linear.epilogue.adapted import Adapted
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.epilogue.router import RouterParts
from urdir.ptxgen.kernels.linear.epilogue.self_adapted import SelfAdapted
from urdir.ptxgen.kernels.linear.epilogue.send import Send
from urdir.ptxgen.kernels.linear.epilogue.then import Continued
from urdir.ptxgen.kernels.linear.prologue.gate import Gate
from urdir.ptxgen.kernels.linear.prologue.norm import Normed
from urdir.ptxgen.kernels.linear.prologue.own import OwnVectors
from urdir.ptxgen.kernels.linear.prologue.sum import NormedAdd, RankAdd
from urdir.ptxgen.kernels.linear.spec import LinearSpec, odd_cols
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.recurrent.causal_conv import CausalConv
from urdir.ptxgen.kernels.recurrent.drafted_scan import DraftedScan
from urdir.ptxgen.kernels.recurrent.selective_scan import SelectiveScan
from urdir.ptxgen.weights.formats import FORMATS

S = TypeVar("S", bound=LinearSpec)

RMS, FINE, BARE = Norm("rms", 1e-5), Norm("rms", 1e-6), Norm("rms", 1e-6, weight=False)
LAYER = Norm("layer", 1e-5, bias=True)
Q8, Q3_K, Q4_K, Q6_K = (FORMATS[name] for name in ("Q8_0", "Q3_K", "Q4_K", "Q6_K"))
F16, F32 = FORMATS["F16"], FORMATS["F32"]
IQ2_XXS, IQ3_XXS = FORMATS["IQ2_XXS"], FORMATS["IQ3_XXS"]
SILU = Activation("silu")
OTHERS = ((Q4_K, 5), (Q8, 7))


def gemv_examples(cls: type[S]) -> dict[str, S]:
    """All of them, smallest first."""
    return {
        **_of_types(cls),
        **_of_cuts(cls),
        **_of_ends(cls),
        **_of_ranks(cls),
        **_after_a_block(cls),
        **_of_gates(cls),
        **_then(cls),
    }


def _of_types(cls: type[S]) -> dict[str, S]:
    """Every type, and those that are quantised with rounded activations."""
    i16 = partial(cls.of, activations="i16")
    formats = FORMATS.values()
    each = {
        f.name: cls.of(f, 17, odd_cols(f), *[Bias()] * (i % 2 == 0)) for i, f in enumerate(formats)
    }
    rounded = {
        f"{f.name} i16": i16(f, 17, odd_cols(f), *[Bias()] * (i % 2 == 0))
        for i, f in enumerate(f for f in formats if f.arithmetic == "integers")
    }
    floats = {
        f"{f.name} f16": cls.of(f, 17, odd_cols(f), *[Bias()] * (i % 2 == 0), activations="f16")
        for i, f in enumerate(f for f in formats if f.arithmetic == "e4m3")
    }
    return {"smallest": cls.of(Q8, 3, 64), **each, **rounded, **floats}


def _of_cuts(cls: type[S]) -> dict[str, S]:
    """Ways to cut a launch: splits, groups, passes, clusters; and several matrices. Many copies of
    a codebook have ``much`` room."""
    i16, much = partial(cls.of, activations="i16"), {"shared": 100_000}
    return {
        "residual split": i16(Q4_K, 9, 2304, Residual(), split=2, tiles_each=1, stages=2),
        "norm, groups and passes": cls.of(
            Q6_K, 40, 768, Normed(RMS), split=3, groups=2, tiles_each=4, per_pass=2
        ),
        "split residual Q3_K": i16(Q3_K, 33, 1280, Residual(), split=2, groups=1, tiles_each=3),
        "gated norm": i16(Q4_K, 35, 512, Normed(FINE), Gated(), tiles_each=3, per_pass=1),
        "gated split": i16(Q8, 21, 1088, Gated(), split=3, groups=1),
        "filled": i16(Q8, 40, 288, Residual(), sms=4, fill=True),
        "three matrices": i16(Q4_K, 19, 768, Bias(), others=((Q4_K, 5), (Q6_K, 7))),
        "F16 norm, other types": cls.of(
            F16, 35, 1120, Normed(RMS), split=2, others=((Q8, 3), (F16, 9))
        ),
        "gated cluster f16": cls.of(
            *(FORMATS["E4M3G128"], 35, 1408, Normed(FINE), Gated()),
            **{"activations": "f16", "tiles_each": 2, "cluster": 2},
        ),
        "codes held": i16(IQ2_XXS, 33, 1280, Residual(), **much, split=2, groups=1, tiles_each=2),
        "weights held, gated norm": i16(IQ3_XXS, 21, 512, Normed(FINE), Gated(), **much),
        "F32 gated norm": cls.of(F32, 18, 293, Normed(RMS), Gated()),
        "alone": i16(Q4_K, 40, 768, Normed(RMS), Bias(), alone=True),
        "cluster of 2": i16(Q4_K, 40, 2304, Residual(), cluster=2),
        "cluster of 4 norm": cls.of(
            Q6_K, 50, 4352, Normed(RMS), Bias(), split=2, groups=2, tiles_each=4, cluster=4
        ),
        "gated cluster": cls.of(
            Q8, 35, 1088, Normed(FINE), Gated(), tiles_each=3, per_pass=1, cluster=2
        ),
        "F16 cluster, other types": cls.of(
            F16, 19, 1120, sms=12, fill=True, cluster=4, others=((Q8, 5),)
        ),
    }


def _of_ends(cls: type[S]) -> dict[str, S]:
    """What comes before and after a product: norms, biases, activations, bounds."""
    i16 = partial(cls.of, activations="i16")
    return {
        "layer norm F32": cls.of(F32, 19, 301, Normed(LAYER), Activated(Activation("gelu"))),
        "layer norm, groups": cls.of(
            Q6_K, 40, 768, Normed(Norm("layer", 1e-5)), Bias(), split=3, groups=2, tiles_each=4
        ),
        "layer norm without weight i16": i16(
            Q8, 21, 2336, Normed(Norm("layer", 1e-5, weight=False)), Gated()
        ),
        "norm without weight": cls.of(
            Q4_K, 9, 512, Normed(BARE), Scaled(0.25), Bounded(softcap=5.0)
        ),
        "norm with bias": cls.of(
            Q8, 5, 96, Normed(Norm("rms", 1e-6, bias=True)), Bounded(clamp=1.5)
        ),
        "gated with biases": i16(
            Q4_K, 35, 512, Bias(), Gated(Activation("gelu")), tiles_each=3, per_pass=1
        ),
        "gated cluster with biases": cls.of(
            F16, 19, 512, Bias(), Gated(Activation("swiglu_oai", limit=7.0)), cluster=2
        ),
        "residual, bias, scale": i16(Q8, 40, 288, Bias(), Residual(0.22)),
        "residual and bias": cls.of(Q8, 19, 288, Bias(), Residual()),
        "residual and scale": cls.of(Q4_K, 19, 512, Residual(1.5)),
        "router parts": i16(Q8, 48, 544, Bias(), Residual(), RouterParts(33)),
        "router parts, idle CTA": i16(
            *(Q4_K, 288, 1024, Residual(), RouterParts(70)), tiles_each=2, sms=10, fill=True
        ),
        "router parts f32, unnormed": cls.of(
            Q8, 64, 288, Residual(0.22), RouterParts(5, normed=False), tiles_each=4
        ),
        "relu2 with bias": cls.of(Q8, 18, 320, Bias(), Activated(Activation("relu2"))),
        "adapted": i16(Q8, 40, 288, Bias(), Adapted(2, 8), Residual(0.22)),
        "adapted f32, gated": cls.of(
            Q4_K, 35, 512, Adapted(1, 24, "f32", (None, 0)), Gated(), tiles_each=3, per_pass=1
        ),
        "some adapted, cluster": cls.of(
            Q6_K, 19, 2304, Adapted(2, 16, places=(0, None)), others=((Q8, 7),), cluster=2
        ),
        "adapted by itself": i16(
            *(Q8, 100, 288, Bias(), SelfAdapted(2, 32, sequences=3), Residual(0.22)), tiles_each=2
        ),
        "adapted by itself, norm, gated": i16(
            *(Q4_K, 61, 512, Normed(FINE), SelfAdapted(1, 16, places=(1, 0), count=2), Gated()),
            tiles_each=1,
        ),
        "adapted by itself, f32, some": cls.of(
            *(Q6_K, 99, 768, SelfAdapted(2, 8, "f32", (None, 0))),
            others=((Q8, 77),),
            tiles_each=3,
            per_pass=2,
        ),
        "some biases": cls.of(
            Q4_K, 19, 768, Bias((False, True, False)), others=((Q4_K, 5), (Q6_K, 7))
        ),
    }


def _of_ranks(cls: type[S]) -> dict[str, S]:
    """Products that go to other ranks, and what other ranks have given."""
    i16 = partial(cls.of, activations="i16")
    return {
        "given": i16(Q4_K, 300, 512, Send(Gives(ranks=3, rank=1, capacity=512))),
        "given by clusters": cls.of(
            Q6_K, 40, 2304, Bias(), Scaled(0.5), Send(Gives(2, 0, 256)), cluster=2
        ),
        "after ranks": i16(Q4_K, 19, 768, RankAdd(SumOfRanks(2, 1, 1024)), Normed(RMS)),
        "after ranks, gated": i16(
            Q8, 21, 1184, RankAdd(SumOfRanks(3, 1, 1280)), Normed(RMS), Gated()
        ),
        "after ranks, several matrices": cls.of(
            Q6_K, 5, 512, RankAdd(SumOfRanks(2, 0, 512), scaled=True), split=1, others=OTHERS
        ),
    }


def _after_a_block(cls: type[S]) -> dict[str, S]:
    """The stream is made on the way."""
    i16 = partial(cls.of, activations="i16")
    return {
        "after a block": i16(Q4_K, 19, 768, NormedAdd(FINE), Normed(RMS), others=OTHERS),
        "after a block, gated": i16(Q8, 21, 2336, NormedAdd(RMS), Normed(FINE), Bias(), Gated()),
        "after a block, no norm": i16(Q6_K, 18, 512, NormedAdd(RMS), split=1),
        "after a block, scaled": i16(Q4_K, 19, 768, NormedAdd(FINE, scaled=True), Normed(RMS)),
        "after a block F32": cls.of(F32, 19, 301, NormedAdd(RMS), Normed(RMS), split=1),
        "layers after and before": cls.of(F32, 9, 549, NormedAdd(LAYER), Normed(LAYER), sms=2),
        "layer after, without weight": cls.of(
            F16, 5, 288, NormedAdd(Norm("layer", 1e-6, weight=False)), Normed(BARE), alone=True
        ),
        "after a block of many columns": i16(Q8, 5, 6112, NormedAdd(RMS), Normed(RMS), sms=1),
        "rms with bias after": cls.of(
            Q8, 35, 544, NormedAdd(Norm("rms", 1e-5, bias=True)), Normed(FINE), split=2, groups=2
        ),
    }


def _of_gates(cls: type[S]) -> dict[str, S]:
    """Gates before the product, and gains after it."""
    i16 = partial(cls.of, activations="i16")
    return {
        "gated x": cls.of(F32, 9, 549, Gate(Activation("sigmoid")), Normed(RMS)),
        "gated heads": i16(Q4_K, 19, 768, Gate(SILU, 64, 1e-6), Residual()),
        "gated heads, cluster": i16(Q8, 40, 2336, Gate(SILU, 32, 1e-6), sms=4, cluster=2),
        "gained residual": i16(Q4_K, 19, 768, SigmoidScaled(), Residual(0.5)),
        "gained": cls.of(F32, 9, 37, SigmoidScaled()),
        "own vectors": i16(Q4_K, 19, 768, OwnVectors(), Bias(), others=OTHERS),
        "own vectors F32": cls.of(F32, 9, 37, OwnVectors(), others=((F16, 35), (F32, 5)), sms=2),
    }


def _then(cls: type[S]) -> dict[str, S]:
    """A recurrent kernel that takes the product."""
    i16 = partial(cls.of, activations="i16")
    conv = CausalConv(1, 3, 64, 0, channels=37, taps=4, bias=True, activation=SILU)
    scan = SelectiveScan(1, 3, 64, 0, channels=70, size=16)
    return {
        "then a convolution": i16(Q4_K, 37, 768, Normed(RMS), Continued(conv), others=OTHERS),
        "then a convolution, cluster": cls.of(
            F16, 37, 1120, Bias(), Continued(replace(conv, taps=3, activation=None)), cluster=2
        ),
        "then a convolution with a ring": i16(Q8, 37, 160, Continued(replace(conv, most=3))),
        "then a scan after drafts": i16(
            Q8, 70, 160, Continued(DraftedScan(1, 3, 64, 0, channels=70, size=16, most=3))
        ),
        "then a scan": i16(Q8, 70, 160, Bias(), Continued(scan)),
        "then a scan of short states": cls.of(
            F32, 70, 37, Continued(replace(scan, size=8, sequences=2)), split=1, sms=2
        ),
    }
