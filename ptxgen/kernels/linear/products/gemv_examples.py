"""Examples of `Gemv`, which ``cls`` makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.exchange.gives import Gives, SumOfRanks
from urdir.ptxgen.kernels.linear.cut import CutOptions
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
from urdir.ptxgen.kernels.linear.spec import odd_cols
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.kernels.recurrent.causal_conv import CausalConv
from urdir.ptxgen.kernels.recurrent.selective_scan import SelectiveScan
from urdir.ptxgen.weights.formats import FORMATS

S = TypeVar("S")

RMS, FINE = Norm("rms", 1e-5), Norm("rms", 1e-6)
Q8, Q3_K, Q4_K, Q6_K = (FORMATS[name] for name in ("Q8_0", "Q3_K", "Q4_K", "Q6_K"))
F16, F32 = FORMATS["F16"], FORMATS["F32"]
SILU = Activation("silu")


def gemv_examples(cls: Callable[..., S]) -> dict[str, S]:
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


def _of_types(cls: Callable[..., S]) -> dict[str, S]:
    """Every type, and those that are quantised with rounded activations."""
    formats = FORMATS.values()
    each = {
        f.name: cls(f, 17, odd_cols(f), epilogue=(Bias(),) if i % 2 == 0 else ())
        for i, f in enumerate(formats)
    }
    rounded = {
        f"{f.name} i16": cls(
            f, 17, odd_cols(f), epilogue=(Bias(),) if i % 2 == 0 else (), activations="i16"
        )
        for i, f in enumerate(f for f in formats if not f.is_float)
    }
    return {"smallest": cls(Q8, 3, 64), **each, **rounded}


def _of_cuts(cls: Callable[..., S]) -> dict[str, S]:
    """Ways to cut a launch: splits, groups, passes, clusters; and several matrices."""
    return {
        "residual split": cls(
            Q4_K,
            9,
            2304,
            epilogue=(Residual(),),
            activations="i16",
            options=CutOptions(split=2, tiles_each=1, stages=2),
        ),
        "norm, groups and passes": cls(
            Q6_K,
            40,
            768,
            prologue=(Normed(RMS),),
            options=CutOptions(split=3, groups=2, tiles_each=4, per_pass=2),
        ),
        "split residual Q3_K": cls(
            Q3_K,
            33,
            1280,
            epilogue=(Residual(),),
            activations="i16",
            options=CutOptions(split=2, groups=1, tiles_each=3),
        ),
        "gated norm": cls(
            Q4_K,
            35,
            512,
            prologue=(Normed(FINE),),
            epilogue=(Gated(),),
            activations="i16",
            options=CutOptions(tiles_each=3, per_pass=1),
        ),
        "gated split": cls(
            Q8,
            21,
            1088,
            epilogue=(Gated(),),
            activations="i16",
            options=CutOptions(split=3, groups=1),
        ),
        "filled": cls(
            Q8,
            40,
            288,
            epilogue=(Residual(),),
            activations="i16",
            options=CutOptions(sms=4, fill=True),
        ),
        "three matrices": cls(
            Q4_K, 19, 768, epilogue=(Bias(),), others=((Q4_K, 5), (Q6_K, 7)), activations="i16"
        ),
        "F16 norm, other types": cls(
            F16,
            35,
            1120,
            prologue=(Normed(RMS),),
            others=((Q8, 3), (F16, 9)),
            options=CutOptions(split=2),
        ),
        "F32 gated norm": cls(F32, 18, 293, prologue=(Normed(RMS),), epilogue=(Gated(),)),
        "alone": cls(
            Q4_K,
            40,
            768,
            prologue=(Normed(RMS),),
            epilogue=(Bias(),),
            activations="i16",
            alone=True,
        ),
        "cluster of 2": cls(
            Q4_K, 40, 2304, epilogue=(Residual(),), activations="i16", options=CutOptions(cluster=2)
        ),
        "cluster of 4 norm": cls(
            Q6_K,
            50,
            4352,
            prologue=(Normed(RMS),),
            epilogue=(Bias(),),
            options=CutOptions(split=2, groups=2, tiles_each=4, cluster=4),
        ),
        "gated cluster": cls(
            Q8,
            35,
            1088,
            prologue=(Normed(FINE),),
            epilogue=(Gated(),),
            options=CutOptions(tiles_each=3, per_pass=1, cluster=2),
        ),
        "F16 cluster, other types": cls(
            F16, 19, 1120, others=((Q8, 5),), options=CutOptions(sms=12, fill=True, cluster=4)
        ),
    }


def _of_ends(cls: Callable[..., S]) -> dict[str, S]:
    """What comes before and after a product: norms, biases, activations, bounds."""
    return {
        "layer norm F32": cls(
            F32,
            19,
            301,
            prologue=(Normed(Norm("layer", 1e-5, bias=True)),),
            epilogue=(Activated(Activation("gelu")),),
        ),
        "layer norm, groups": cls(
            Q6_K,
            40,
            768,
            prologue=(Normed(Norm("layer", 1e-5)),),
            epilogue=(Bias(),),
            options=CutOptions(split=3, groups=2, tiles_each=4),
        ),
        "layer norm without weight i16": cls(
            Q8,
            21,
            2336,
            prologue=(Normed(Norm("layer", 1e-5, weight=False)),),
            epilogue=(Gated(),),
            activations="i16",
        ),
        "norm without weight": cls(
            Q4_K,
            9,
            512,
            prologue=(Normed(Norm("rms", 1e-6, weight=False)),),
            epilogue=(Scaled(0.25), Bounded(softcap=5.0)),
        ),
        "norm with bias": cls(
            Q8,
            5,
            96,
            prologue=(Normed(Norm("rms", 1e-6, bias=True)),),
            epilogue=(Bounded(clamp=1.5),),
        ),
        "gated with biases": cls(
            Q4_K,
            35,
            512,
            epilogue=(Bias(), Gated(Activation("gelu"))),
            activations="i16",
            options=CutOptions(tiles_each=3, per_pass=1),
        ),
        "gated cluster with biases": cls(
            F16,
            19,
            512,
            epilogue=(Bias(), Gated(Activation("swiglu_oai", limit=7.0))),
            options=CutOptions(cluster=2),
        ),
        "residual, bias, scale": cls(
            Q8, 40, 288, epilogue=(Bias(), Residual(0.22)), activations="i16"
        ),
        "residual and bias": cls(Q8, 19, 288, epilogue=(Bias(), Residual())),
        "residual and scale": cls(Q4_K, 19, 512, epilogue=(Residual(1.5),)),
        "relu2 with bias": cls(Q8, 18, 320, epilogue=(Bias(), Activated(Activation("relu2")))),
        "some biases": cls(
            Q4_K, 19, 768, epilogue=(Bias((False, True, False)),), others=((Q4_K, 5), (Q6_K, 7))
        ),
    }


def _of_ranks(cls: Callable[..., S]) -> dict[str, S]:
    """Products that go to other ranks, and what other ranks have given."""
    return {
        "given": cls(
            Q4_K,
            300,
            512,
            epilogue=(Send(Gives(ranks=3, rank=1, capacity=512)),),
            activations="i16",
        ),
        "given by clusters": cls(
            Q6_K,
            40,
            2304,
            epilogue=(Bias(), Scaled(0.5), Send(Gives(2, 0, 256))),
            options=CutOptions(cluster=2),
        ),
        "after ranks": cls(
            Q4_K,
            19,
            768,
            prologue=(RankAdd(SumOfRanks(2, 1, 1024)), Normed(RMS)),
            activations="i16",
        ),
        "after ranks, gated": cls(
            Q8,
            21,
            1184,
            prologue=(RankAdd(SumOfRanks(3, 1, 1280)), Normed(RMS)),
            epilogue=(Gated(),),
            activations="i16",
        ),
        "after ranks, several matrices": cls(
            Q6_K,
            5,
            512,
            prologue=(RankAdd(SumOfRanks(2, 0, 512), scaled=True),),
            others=((Q4_K, 5), (Q8, 7)),
            options=CutOptions(split=1),
        ),
    }


def _after_a_block(cls: Callable[..., S]) -> dict[str, S]:
    """The stream is made on the way."""
    return {
        "after a block": cls(
            Q4_K,
            19,
            768,
            prologue=(NormedAdd(FINE), Normed(RMS)),
            activations="i16",
            others=((Q4_K, 5), (Q8, 7)),
        ),
        "after a block, gated": cls(
            Q8,
            21,
            2336,
            prologue=(NormedAdd(RMS), Normed(FINE)),
            epilogue=(Bias(), Gated()),
            activations="i16",
        ),
        "after a block, no norm": cls(
            Q6_K,
            18,
            512,
            prologue=(NormedAdd(RMS),),
            activations="i16",
            options=CutOptions(split=1),
        ),
        "after a block, scaled": cls(
            Q4_K, 19, 768, prologue=(NormedAdd(FINE, scaled=True), Normed(RMS)), activations="i16"
        ),
        "after a block F32": cls(
            F32, 19, 301, prologue=(NormedAdd(RMS), Normed(RMS)), options=CutOptions(split=1)
        ),
        "layers after and before": cls(
            F32,
            9,
            549,
            prologue=(
                NormedAdd(Norm("layer", 1e-5, bias=True)),
                Normed(Norm("layer", 1e-5, bias=True)),
            ),
            options=CutOptions(sms=2),
        ),
        "layer after, without weight": cls(
            F16,
            5,
            288,
            prologue=(
                NormedAdd(Norm("layer", 1e-6, weight=False)),
                Normed(Norm("rms", 1e-6, weight=False)),
            ),
            alone=True,
        ),
        "after a block of many columns": cls(
            Q8,
            5,
            6112,
            prologue=(NormedAdd(RMS), Normed(RMS)),
            activations="i16",
            options=CutOptions(sms=1),
        ),
        "rms with bias after": cls(
            Q8,
            35,
            544,
            prologue=(NormedAdd(Norm("rms", 1e-5, bias=True)), Normed(FINE)),
            options=CutOptions(split=2, groups=2),
        ),
    }


def _of_gates(cls: Callable[..., S]) -> dict[str, S]:
    """Gates before the product, and gains after it."""
    return {
        "gated x": cls(F32, 9, 549, prologue=(Gate(Activation("sigmoid")), Normed(RMS))),
        "gated heads": cls(
            Q4_K,
            19,
            768,
            prologue=(Gate(SILU, 64, 1e-6),),
            epilogue=(Residual(),),
            activations="i16",
        ),
        "gated heads, cluster": cls(
            Q8,
            40,
            2336,
            prologue=(Gate(SILU, 32, 1e-6),),
            activations="i16",
            options=CutOptions(sms=4, cluster=2),
        ),
        "gained residual": cls(
            Q4_K, 19, 768, epilogue=(SigmoidScaled(), Residual(0.5)), activations="i16"
        ),
        "gained": cls(F32, 9, 37, epilogue=(SigmoidScaled(),)),
    }


def _then(cls: Callable[..., S]) -> dict[str, S]:
    """A recurrent kernel that takes the product."""
    conv = CausalConv(1, 3, 64, 0, channels=37, taps=4, bias=True, activation=SILU)
    scan = SelectiveScan(1, 3, 64, 0, channels=70, size=16)
    return {
        "then a convolution": cls(
            Q4_K,
            37,
            768,
            prologue=(Normed(RMS),),
            epilogue=(Continued(conv),),
            activations="i16",
            others=((Q4_K, 5), (Q8, 7)),
        ),
        "then a convolution, cluster": cls(
            F16,
            37,
            1120,
            epilogue=(Bias(), Continued(replace(conv, taps=3, activation=None))),
            options=CutOptions(cluster=2),
        ),
        "then a scan": cls(Q8, 70, 160, epilogue=(Bias(), Continued(scan)), activations="i16"),
        "then a scan of short states": cls(
            F32,
            70,
            37,
            epilogue=(Continued(replace(scan, size=8, sequences=2)),),
            options=CutOptions(split=1, sms=2),
        ),
    }
