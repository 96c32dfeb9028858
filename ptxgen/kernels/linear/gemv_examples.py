"""Examples of `Gemv`, which ``cls`` makes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.exchange.gives import Gives, SumOfRanks
from urdir.ptxgen.kernels.linear.gate import Gate
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
    each = {f.name: cls(f, 17, odd_cols(f), bias=i % 2 == 0) for i, f in enumerate(formats)}
    rounded = {
        f"{f.name} i16": cls(f, 17, odd_cols(f), bias=i % 2 == 0, activations="i16")
        for i, f in enumerate(f for f in formats if not f.is_float)
    }
    return {"smallest": cls(Q8, 3, 64), **each, **rounded}


def _of_cuts(cls: Callable[..., S]) -> dict[str, S]:
    """Ways to cut a launch: splits, groups, passes, clusters; and several matrices."""
    return {
        "residual split": cls(
            Q4_K, 9, 2304, split=2, tiles_each=1, stages=2, residual=True, activations="i16"
        ),
        "norm, groups and passes": cls(
            Q6_K, 40, 768, split=3, groups=2, tiles_each=4, per_pass=2, norm=RMS
        ),
        "split residual Q3_K": cls(
            Q3_K, 33, 1280, split=2, groups=1, tiles_each=3, residual=True, activations="i16"
        ),
        "gated norm": cls(
            Q4_K, 35, 512, gated=True, norm=FINE, tiles_each=3, per_pass=1, activations="i16"
        ),
        "gated split": cls(Q8, 21, 1088, gated=True, split=3, groups=1, activations="i16"),
        "filled": cls(Q8, 40, 288, residual=True, activations="i16", sms=4, fill=True),
        "three matrices": cls(
            Q4_K, 19, 768, bias=True, others=((Q4_K, 5), (Q6_K, 7)), activations="i16"
        ),
        "F16 norm, other types": cls(F16, 35, 1120, norm=RMS, others=((Q8, 3), (F16, 9)), split=2),
        "F32 gated norm": cls(F32, 18, 293, gated=True, norm=RMS),
        "alone": cls(Q4_K, 40, 768, bias=True, norm=RMS, activations="i16", alone=True),
        "cluster of 2": cls(Q4_K, 40, 2304, residual=True, activations="i16", cluster=2),
        "cluster of 4 norm": cls(
            Q6_K, 50, 4352, bias=True, norm=RMS, cluster=4, split=2, groups=2, tiles_each=4
        ),
        "gated cluster": cls(
            Q8, 35, 1088, gated=True, norm=FINE, tiles_each=3, per_pass=1, cluster=2
        ),
        "F16 cluster, other types": cls(
            F16, 19, 1120, others=((Q8, 5),), cluster=4, sms=12, fill=True
        ),
    }


def _of_ends(cls: Callable[..., S]) -> dict[str, S]:
    """What comes before and after a product: norms, biases, activations, bounds."""
    return {
        "layer norm F32": cls(
            F32, 19, 301, norm=Norm("layer", 1e-5, bias=True), activation=Activation("gelu")
        ),
        "layer norm, groups": cls(
            Q6_K, 40, 768, split=3, groups=2, tiles_each=4, bias=True, norm=Norm("layer", 1e-5)
        ),
        "layer norm without weight i16": cls(
            Q8, 21, 2336, norm=Norm("layer", 1e-5, weight=False), activations="i16", gated=True
        ),
        "norm without weight": cls(
            Q4_K, 9, 512, norm=Norm("rms", 1e-6, weight=False), softcap=5.0, scale=0.25
        ),
        "norm with bias": cls(Q8, 5, 96, norm=Norm("rms", 1e-6, bias=True), clamp=1.5),
        "gated with biases": cls(
            Q4_K,
            35,
            512,
            gated=True,
            bias=True,
            activations="i16",
            tiles_each=3,
            per_pass=1,
            activation=Activation("gelu"),
        ),
        "gated cluster with biases": cls(
            F16,
            19,
            512,
            gated=True,
            bias=True,
            cluster=2,
            activation=Activation("swiglu_oai", limit=7.0),
        ),
        "residual, bias, scale": cls(
            Q8, 40, 288, bias=True, residual=True, scale=0.22, activations="i16"
        ),
        "residual and bias": cls(Q8, 19, 288, bias=True, residual=True),
        "residual and scale": cls(Q4_K, 19, 512, residual=True, scale=1.5),
        "relu2 with bias": cls(Q8, 18, 320, bias=True, activation=Activation("relu2")),
        "some biases": cls(Q4_K, 19, 768, bias=(False, True, False), others=((Q4_K, 5), (Q6_K, 7))),
    }


def _of_ranks(cls: Callable[..., S]) -> dict[str, S]:
    """Products that go to other ranks, and what other ranks have given."""
    return {
        "given": cls(Q4_K, 300, 512, activations="i16", gives=Gives(ranks=3, rank=1, capacity=512)),
        "given by clusters": cls(
            Q6_K, 40, 2304, bias=True, scale=0.5, cluster=2, gives=Gives(2, 0, 256)
        ),
        "after ranks": cls(
            Q4_K, 19, 768, activations="i16", norm=RMS, after=SumOfRanks(2, 1, 1024)
        ),
        "after ranks, gated": cls(
            Q8, 21, 1184, activations="i16", gated=True, norm=RMS, after=SumOfRanks(3, 1, 1280)
        ),
        "after ranks, several matrices": cls(
            Q6_K,
            5,
            512,
            split=1,
            after=SumOfRanks(2, 0, 512),
            stream_scaled=True,
            others=((Q4_K, 5), (Q8, 7)),
        ),
    }


def _after_a_block(cls: Callable[..., S]) -> dict[str, S]:
    """The stream is made on the way."""
    return {
        "after a block": cls(
            Q4_K, 19, 768, activations="i16", norm=RMS, after=FINE, others=((Q4_K, 5), (Q8, 7))
        ),
        "after a block, gated": cls(
            Q8, 21, 2336, activations="i16", gated=True, norm=FINE, after=RMS, bias=True
        ),
        "after a block, no norm": cls(Q6_K, 18, 512, activations="i16", after=RMS, split=1),
        "after a block, scaled": cls(
            Q4_K, 19, 768, activations="i16", norm=RMS, after=FINE, stream_scaled=True
        ),
        "after a block F32": cls(F32, 19, 301, norm=RMS, after=RMS, split=1),
        "layers after and before": cls(
            F32,
            9,
            549,
            norm=Norm("layer", 1e-5, bias=True),
            after=Norm("layer", 1e-5, bias=True),
            sms=2,
        ),
        "layer after, without weight": cls(
            F16,
            5,
            288,
            norm=Norm("rms", 1e-6, weight=False),
            after=Norm("layer", 1e-6, weight=False),
            alone=True,
        ),
        "after a block of many columns": cls(
            Q8, 5, 6112, activations="i16", norm=RMS, after=RMS, sms=1
        ),
        "rms with bias after": cls(
            Q8, 35, 544, norm=FINE, after=Norm("rms", 1e-5, bias=True), groups=2, split=2
        ),
    }


def _of_gates(cls: Callable[..., S]) -> dict[str, S]:
    """Gates before the product, and gains after it."""
    return {
        "gated x": cls(F32, 9, 549, gate=Gate(Activation("sigmoid")), norm=RMS),
        "gated heads": cls(
            Q4_K, 19, 768, residual=True, activations="i16", gate=Gate(SILU, 64, 1e-6)
        ),
        "gated heads, cluster": cls(
            Q8, 40, 2336, activations="i16", cluster=2, gate=Gate(SILU, 32, 1e-6), sms=4
        ),
        "gained residual": cls(
            Q4_K, 19, 768, residual=True, activations="i16", gained=True, scale=0.5
        ),
        "gained": cls(F32, 9, 37, gained=True),
    }


def _then(cls: Callable[..., S]) -> dict[str, S]:
    """A recurrent kernel that takes the product."""
    conv = CausalConv(1, 3, 64, 0, channels=37, taps=4, bias=True, activation=SILU)
    scan = SelectiveScan(1, 3, 64, 0, channels=70, size=16)
    return {
        "then a convolution": cls(
            Q4_K, 37, 768, activations="i16", norm=RMS, others=((Q4_K, 5), (Q8, 7)), then=conv
        ),
        "then a convolution, cluster": cls(
            F16, 37, 1120, bias=True, cluster=2, then=replace(conv, taps=3, activation=None)
        ),
        "then a scan": cls(Q8, 70, 160, bias=True, activations="i16", then=scan),
        "then a scan of short states": cls(
            F32, 70, 37, split=1, sms=2, then=replace(scan, size=8, sequences=2)
        ),
    }
