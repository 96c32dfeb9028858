"""Examples of `Gemv`, which ``cls`` makes."""

from __future__ import annotations

from dataclasses import replace
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
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.epilogue.send import Send
from urdir.ptxgen.kernels.linear.epilogue.then import Continued
from urdir.ptxgen.kernels.linear.prologue.gate import Gate
from urdir.ptxgen.kernels.linear.prologue.norm import Normed
from urdir.ptxgen.kernels.linear.prologue.sum import NormedAdd, RankAdd
from urdir.ptxgen.kernels.linear.spec import LinearSpec, odd_cols
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.recurrent.causal_conv import CausalConv
from urdir.ptxgen.kernels.recurrent.selective_scan import SelectiveScan
from urdir.ptxgen.weights.formats import FORMATS

S = TypeVar("S", bound=LinearSpec)

RMS, FINE = Norm("rms", 1e-5), Norm("rms", 1e-6)
Q8, Q3_K, Q4_K, Q6_K = (FORMATS[name] for name in ("Q8_0", "Q3_K", "Q4_K", "Q6_K"))
F16, F32 = FORMATS["F16"], FORMATS["F32"]
SILU = Activation("silu")


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
    formats = FORMATS.values()
    each = {
        f.name: cls.of(f, 17, odd_cols(f), *[Bias()] * (i % 2 == 0)) for i, f in enumerate(formats)
    }
    rounded = {
        f"{f.name} i16": cls.of(f, 17, odd_cols(f), *[Bias()] * (i % 2 == 0), activations="i16")
        for i, f in enumerate(f for f in formats if not f.is_float)
    }
    return {"smallest": cls.of(Q8, 3, 64), **each, **rounded}


def _of_cuts(cls: type[S]) -> dict[str, S]:
    """Ways to cut a launch: splits, groups, passes, clusters; and several matrices."""
    return {
        "residual split": cls.of(
            Q4_K, 9, 2304, Residual(), split=2, tiles_each=1, stages=2, activations="i16"
        ),
        "norm, groups and passes": cls.of(
            Q6_K, 40, 768, Normed(RMS), split=3, groups=2, tiles_each=4, per_pass=2
        ),
        "split residual Q3_K": cls.of(
            Q3_K, 33, 1280, Residual(), split=2, groups=1, tiles_each=3, activations="i16"
        ),
        "gated norm": cls.of(
            Q4_K, 35, 512, Normed(FINE), Gated(), tiles_each=3, per_pass=1, activations="i16"
        ),
        "gated split": cls.of(Q8, 21, 1088, Gated(), split=3, groups=1, activations="i16"),
        "filled": cls.of(Q8, 40, 288, Residual(), sms=4, fill=True, activations="i16"),
        "three matrices": cls.of(
            Q4_K, 19, 768, Bias(), others=((Q4_K, 5), (Q6_K, 7)), activations="i16"
        ),
        "F16 norm, other types": cls.of(
            F16, 35, 1120, Normed(RMS), split=2, others=((Q8, 3), (F16, 9))
        ),
        "F32 gated norm": cls.of(F32, 18, 293, Normed(RMS), Gated()),
        "alone": cls.of(Q4_K, 40, 768, Normed(RMS), Bias(), activations="i16", alone=True),
        "cluster of 2": cls.of(Q4_K, 40, 2304, Residual(), cluster=2, activations="i16"),
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
    return {
        "layer norm F32": cls.of(
            F32, 19, 301, Normed(Norm("layer", 1e-5, bias=True)), Activated(Activation("gelu"))
        ),
        "layer norm, groups": cls.of(
            Q6_K, 40, 768, Normed(Norm("layer", 1e-5)), Bias(), split=3, groups=2, tiles_each=4
        ),
        "layer norm without weight i16": cls.of(
            Q8, 21, 2336, Normed(Norm("layer", 1e-5, weight=False)), Gated(), activations="i16"
        ),
        "norm without weight": cls.of(
            Q4_K,
            9,
            512,
            Normed(Norm("rms", 1e-6, weight=False)),
            Scaled(0.25),
            Bounded(softcap=5.0),
        ),
        "norm with bias": cls.of(
            Q8, 5, 96, Normed(Norm("rms", 1e-6, bias=True)), Bounded(clamp=1.5)
        ),
        "gated with biases": cls.of(
            Q4_K,
            35,
            512,
            Bias(),
            Gated(Activation("gelu")),
            tiles_each=3,
            per_pass=1,
            activations="i16",
        ),
        "gated cluster with biases": cls.of(
            F16, 19, 512, Bias(), Gated(Activation("swiglu_oai", limit=7.0)), cluster=2
        ),
        "residual, bias, scale": cls.of(Q8, 40, 288, Bias(), Residual(0.22), activations="i16"),
        "residual and bias": cls.of(Q8, 19, 288, Bias(), Residual()),
        "residual and scale": cls.of(Q4_K, 19, 512, Residual(1.5)),
        "relu2 with bias": cls.of(Q8, 18, 320, Bias(), Activated(Activation("relu2"))),
        "some biases": cls.of(
            Q4_K, 19, 768, Bias((False, True, False)), others=((Q4_K, 5), (Q6_K, 7))
        ),
    }


def _of_ranks(cls: type[S]) -> dict[str, S]:
    """Products that go to other ranks, and what other ranks have given."""
    return {
        "given": cls.of(
            Q4_K, 300, 512, Send(Gives(ranks=3, rank=1, capacity=512)), activations="i16"
        ),
        "given by clusters": cls.of(
            Q6_K, 40, 2304, Bias(), Scaled(0.5), Send(Gives(2, 0, 256)), cluster=2
        ),
        "after ranks": cls.of(
            Q4_K, 19, 768, RankAdd(SumOfRanks(2, 1, 1024)), Normed(RMS), activations="i16"
        ),
        "after ranks, gated": cls.of(
            Q8, 21, 1184, RankAdd(SumOfRanks(3, 1, 1280)), Normed(RMS), Gated(), activations="i16"
        ),
        "after ranks, several matrices": cls.of(
            Q6_K,
            5,
            512,
            RankAdd(SumOfRanks(2, 0, 512), scaled=True),
            split=1,
            others=((Q4_K, 5), (Q8, 7)),
        ),
    }


def _after_a_block(cls: type[S]) -> dict[str, S]:
    """The stream is made on the way."""
    return {
        "after a block": cls.of(
            Q4_K,
            19,
            768,
            NormedAdd(FINE),
            Normed(RMS),
            activations="i16",
            others=((Q4_K, 5), (Q8, 7)),
        ),
        "after a block, gated": cls.of(
            Q8, 21, 2336, NormedAdd(RMS), Normed(FINE), Bias(), Gated(), activations="i16"
        ),
        "after a block, no norm": cls.of(Q6_K, 18, 512, NormedAdd(RMS), split=1, activations="i16"),
        "after a block, scaled": cls.of(
            Q4_K, 19, 768, NormedAdd(FINE, scaled=True), Normed(RMS), activations="i16"
        ),
        "after a block F32": cls.of(F32, 19, 301, NormedAdd(RMS), Normed(RMS), split=1),
        "layers after and before": cls.of(
            F32,
            9,
            549,
            NormedAdd(Norm("layer", 1e-5, bias=True)),
            Normed(Norm("layer", 1e-5, bias=True)),
            sms=2,
        ),
        "layer after, without weight": cls.of(
            F16,
            5,
            288,
            NormedAdd(Norm("layer", 1e-6, weight=False)),
            Normed(Norm("rms", 1e-6, weight=False)),
            alone=True,
        ),
        "after a block of many columns": cls.of(
            Q8, 5, 6112, NormedAdd(RMS), Normed(RMS), sms=1, activations="i16"
        ),
        "rms with bias after": cls.of(
            Q8, 35, 544, NormedAdd(Norm("rms", 1e-5, bias=True)), Normed(FINE), split=2, groups=2
        ),
    }


def _of_gates(cls: type[S]) -> dict[str, S]:
    """Gates before the product, and gains after it."""
    return {
        "gated x": cls.of(F32, 9, 549, Gate(Activation("sigmoid")), Normed(RMS)),
        "gated heads": cls.of(Q4_K, 19, 768, Gate(SILU, 64, 1e-6), Residual(), activations="i16"),
        "gated heads, cluster": cls.of(
            Q8, 40, 2336, Gate(SILU, 32, 1e-6), sms=4, cluster=2, activations="i16"
        ),
        "gained residual": cls.of(Q4_K, 19, 768, SigmoidScaled(), Residual(0.5), activations="i16"),
        "gained": cls.of(F32, 9, 37, SigmoidScaled()),
    }


def _then(cls: type[S]) -> dict[str, S]:
    """A recurrent kernel that takes the product."""
    conv = CausalConv(1, 3, 64, 0, channels=37, taps=4, bias=True, activation=SILU)
    scan = SelectiveScan(1, 3, 64, 0, channels=70, size=16)
    return {
        "then a convolution": cls.of(
            Q4_K,
            37,
            768,
            Normed(RMS),
            Continued(conv),
            activations="i16",
            others=((Q4_K, 5), (Q8, 7)),
        ),
        "then a convolution, cluster": cls.of(
            F16, 37, 1120, Bias(), Continued(replace(conv, taps=3, activation=None)), cluster=2
        ),
        "then a convolution with a ring": cls.of(
            Q8, 37, 160, Continued(replace(conv, most=3)), activations="i16"
        ),
        "then a scan": cls.of(Q8, 70, 160, Bias(), Continued(scan), activations="i16"),
        "then a scan of short states": cls.of(
            F32, 70, 37, Continued(replace(scan, size=8, sequences=2)), split=1, sms=2
        ),
    }
