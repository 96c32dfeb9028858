"""Examples of products with experts, which ``cls`` makes."""

from __future__ import annotations

from typing import Any, TypeVar

from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.experts.held import Held
from urdir.ptxgen.kernels.experts.parts import LogitParts
from urdir.ptxgen.kernels.experts.selection import Selection
from urdir.ptxgen.kernels.experts.spec import ExpertsProduct
from urdir.ptxgen.kernels.linear.epilogue.activation import Activated, Gated
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.epilogue.weighted import Weighted
from urdir.ptxgen.kernels.linear.products.gemm_tile import CtaTile
from urdir.ptxgen.kernels.linear.prologue.norm import Normed
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.weights.formats import FORMATS

S = TypeVar("S", bound=ExpertsProduct)


def up_examples(cls: type[S]) -> dict[str, S]:
    """Each kind of weights, of norm, of choice."""
    q8, q4_k, q6_k = (FORMATS[name] for name in ("Q8_0", "Q4_K", "Q6_K"))
    f16, f32, q5_1 = (FORMATS[name] for name in ("F16", "F32", "Q5_1"))
    oai, rms = Activation("swiglu_oai", limit=7.0), Normed(Norm("rms", 1e-5))
    layer = Normed(Norm("layer", 1e-5, bias=True))
    return {
        "smallest": cls.of(q8, 2, 1, 16, 32),
        "gated norm i16": cls.of(
            q4_k, 5, 3, 48, 512, Normed(Norm("rms", 1e-6)), Gated(), activations="i16"
        ),
        "biases": cls.of(q8, 4, 2, 32, 288, Bias(), Gated(oai), activations="i16"),
        "weighted": cls.of(q6_k, 3, 1, 32, 256, rms, Weighted(), Bias(), Gated()),
        "rows": cls.of(
            *(q4_k, 6, 2, 16, 768, Normed(Norm("rms", 1e-5, False)), Gated()),
            batch=3,
            activations="i16",
        ),
        "layer norm": cls.of(q8, 3, 2, 16, 544, layer, Gated()),
        "in turn": cls.of(q8, 3, 1, 32, 64, batch=7, in_turn=True),
        "in turn i16": cls.of(q8, 2, 1, 128, 512, batch=4, in_turn=True, activations="i16"),
        "E4M3": cls.of(FORMATS["E4M3G128"], 3, 2, 32, 384, rms, Gated(), batch=2),
        "integers": cls.of(FORMATS["W4G128"], 3, 2, 32, 384, rms, Gated(), activations="i16"),
        "codebook": cls.of(FORMATS["IQ2_S"], 3, 2, 32, 512, rms, Gated(), activations="i16"),
        "NF4": cls.of(FORMATS["NF4G64"], 3, 2, 32, 320, rms, Gated(), activations="i16"),
        "ungated relu2": cls.of(f16, 3, 2, 32, 70, Activated(Activation("relu2")), batch=2),
        "F32 gelu": cls.of(f32, 3, 2, 16, 37, Weighted(), Gated(Activation("gelu"))),
        "clamped passes": cls.of(
            *(q5_1, 3, 2, 80, 608, Gated(Activation("silu", limit=2.5, clamp="activated"))),
            **{"sms": 2, "per_pass": 2, "groups": 2, "split": 2, "activations": "i16"},
        ),
        "clamped inputs": cls.of(
            q8, 3, 2, 48, 1088, rms, Gated(Activation("relu", limit=1.5)), sms=4, per_pass=1
        ),
        "chooses": cls.of(
            *(q4_k, 128, 8, 16, 512, rms, Gated()),
            **{"batch": 2, "activations": "i16", "selection": Selection(128, 8)},
        ),
        "chooses, layer norm": cls.of(
            *(q8, 33, 4, 16, 544, layer, Bias(), Gated(oai)),
            selection=Selection(33, 4, "softmax_selected"),
        ),
        "chooses by parts": cls.of(
            *(q4_k, 128, 8, 16, 1280, rms, Gated()),
            **{"activations": "i16", "selection": Selection(128, 8)},
            logit_parts=LogitParts(45, 1280, 1e-6),
        ),
        "chooses by parts, bias": cls.of(
            *(q8, 32, 4, 48, 1088, layer, Bias(), Gated(oai)),
            selection=Selection(32, 4, "softmax_selected"),
            logit_parts=LogitParts(90, 2880, 1e-5, bias=True, scale=0.5),
        ),
        "chooses among many": cls.of(
            *(q4_k, 300, 7, 16, 512, rms, Gated()),
            **{"batch": 2, "activations": "i16", "selection": Selection(300, 7)},
        ),
        "a shared expert": cls.of(
            *(q8, 20, 4, 48, 544, rms, Gated()),
            selection=Selection(20, 3),
            has_shared=True,
        ),
        "a shared expert, many": cls.of(
            *(q4_k, 512, 11, 16, 768, rms, Gated()),
            **{"activations": "i16", "selection": Selection(512, 10), "has_shared": True},
        ),
        "chooses, all of them": cls.of(q8, 3, 3, 16, 64, selection=Selection(3, 3)),
        "slots": cls.of(
            *(q4_k, 128, 8, 48, 512, rms, Gated()),
            **{"activations": "i16", "selection": Selection(128, 8), "sms": 20},
            **{"held": Held(128, 8, 40, tells=True), "resident": 1},
        ),
        "slots by parts": cls.of(
            *(q6_k, 32, 4, 48, 1280, rms, Bias(), Gated(oai)),
            selection=Selection(32, 4, "softmax_selected"),
            logit_parts=LogitParts(90, 2880, 1e-5, scale=0.5),
            held=Held(32, 4, 4, tells=True),
        ),
        "slots of the chosen": cls.of(
            *(q5_1, 61, 5, 80, 608, Activated(Activation("relu2"))),
            **{"sms": 10, "split": 2, "groups": 1, "held": Held(61, 5, 17)},
        ),
        "slots for all": cls.of(q8, 3, 3, 16, 64, Weighted(), held=Held(3, 3, 3, tells=True)),
    }


def down_examples(cls: type[S]) -> dict[str, S]:
    """Each kind of weights and of choice, of several rows."""
    q8, q4_k, q6_k = (FORMATS[name] for name in ("Q8_0", "Q4_K", "Q6_K"))
    f16, f32, q5_1 = (FORMATS[name] for name in ("F16", "F32", "Q5_1"))
    weighted, adds = Weighted(), Residual()
    passes = {"sms": 1, "per_pass": 2, "groups": 2, "split": 3}
    i16: dict[str, Any] = {"activations": "i16"}
    return {
        "smallest": cls.of(q8, 2, 1, 16, 32),
        "residual i16": cls.of(q4_k, 5, 3, 48, 512, weighted, adds, **i16),
        "bias": cls.of(q8, 4, 2, 32, 288, Bias(), weighted, adds, **i16),
        "early": cls.of(q8, 5, 2, 48, 544, weighted, adds, batch=2, early=True, **i16),
        "codebook": cls.of(FORMATS["IQ1_M"], 3, 2, 48, 512, weighted, adds, **i16),
        "F32": cls.of(f32, 3, 2, 16, 37, Bias(), weighted, batch=3),
        "F16": cls.of(f16, 3, 3, 32, 96, adds),
        "rows": cls.of(q6_k, 4, 2, 32, 768, Bias(), weighted, batch=2, **i16),
        "passes": cls.of(q5_1, 3, 2, 80, 608, weighted, adds, **passes),
        "chooses late, unweighted": cls.of(
            *(q8, 17, 3, 48, 544, Bias(), adds), batch=2, selection=Selection(17, 3)
        ),
        "chooses": cls.of(
            *(q4_k, 128, 8, 16, 256, weighted, adds),
            **{"batch": 3, "early": True, "selection": Selection(128, 8, normalised=True)},
            **i16,
        ),
        "chooses by parts": cls.of(
            *(q4_k, 64, 6, 16, 512, weighted, adds),
            **{"early": True, "selection": Selection(64, 6, normalised=True)},
            logit_parts=LogitParts(131, 300, 1e-6),
            **i16,
        ),
        "chooses by parts, bias": cls.of(
            *(q8, 32, 4, 48, 544, Bias(), weighted, adds),
            **{"early": True, "selection": Selection(32, 4, "softmax_selected")},
            logit_parts=LogitParts(5, 300, bias=True, scale=0.5),
            **i16,
        ),
        "chooses among many": cls.of(
            *(q4_k, 300, 7, 16, 256, weighted, adds),
            **{"batch": 3, "early": True, "selection": Selection(300, 7, scale=2.5)},
            **i16,
        ),
        "a shared expert": cls.of(
            *(q6_k, 20, 4, 48, 768, weighted, adds),
            **{"early": True, "selection": Selection(20, 3), "has_shared": True},
        ),
        "a shared expert, many": cls.of(
            *(q4_k, 512, 11, 32, 256, weighted, adds),
            **{"early": True, "selection": Selection(512, 10, normalised=True)},
            **{"has_shared": True, "starts_next": True, "sms": 1},
            **i16,
        ),
        "chooses, bias": cls.of(
            *(q8, 70, 4, 48, 288, Bias(), weighted, adds),
            **{"early": True, "selection": Selection(70, 4, "softmax_selected", scale=2.5)},
            starts_next=True,
            **i16,
        ),
        "slots": cls.of(
            *(q6_k, 128, 8, 48, 256, weighted, adds),
            **{"early": True, "selection": Selection(128, 8, normalised=True)},
            **{"held": Held(128, 8, 40), "sms": 2},
            **i16,
        ),
        "slots by parts": cls.of(
            *(q4_k, 64, 6, 32, 512, Bias(), weighted, adds),
            **{"early": True, "selection": Selection(64, 6, normalised=True)},
            held=Held(64, 6, 6),
            logit_parts=LogitParts(131, 300, 1e-6),
            **i16,
        ),
        "slots of the chosen": cls.of(
            *(q5_1, 61, 5, 80, 608, Bias(), weighted),
            **{"early": True, "sms": 2, "split": 2, "groups": 1, "held": Held(61, 5, 17)},
        ),
        "slots for all": cls.of(f16, 3, 3, 32, 96, adds, held=Held(3, 3, 3)),
    }


def gemm_examples(cls: type[S]) -> dict[str, S]:
    """Each tile, with and without gates."""
    q8, q4_k, q6_k = (FORMATS[name] for name in ("Q8_0", "Q4_K", "Q6_K"))
    f16, f32 = FORMATS["F16"], FORMATS["F32"]
    bias, weighted, f = Bias(), Weighted(), Activation
    limited = Gated(f("swiglu_oai", limit=1.5))
    return {
        "smallest": cls.of(q8, 2, 1, 16, 32, 1, 16),
        "up": cls.of(q4_k, 5, 2, 48, 256, 23, 16, bias),
        "down": cls.of(q6_k, 5, 2, 80, 256, 23, 16, bias, weighted, down=True),
        "weighted up": cls.of(q8, 3, 1, 32, 96, 40, 32, weighted, bias),
        "F16": cls.of(f16, 4, 3, 32, 70, 30, 32),
        "F32 down": cls.of(f32, 3, 2, 16, 37, 20, 16, down=True),
        "tiles of 64": cls.of(q8, 3, 2, 144, 64, 70, 64),
        "tiles of 128": cls.of(q4_k, 2, 2, 144, 256, 131, 128, weighted, down=True),
        "gated": cls.of(q4_k, 5, 2, 48, 512, 23, 16, bias, Gated()),
        "gated, clamped": cls.of(q8, 4, 2, 80, 288, 70, 64, weighted, bias, limited),
        "gated 32": cls.of(f16, 3, 1, 48, 70, 40, 32, Gated(f("gelu"))),
        "gated 128": cls.of(q4_k, 2, 2, 144, 256, 131, 128, Gated()),
        "relu2": cls.of(q6_k, 3, 2, 48, 256, 21, 16, Activated(f("relu2"))),
        "narrow": cls.of(q8, 9, 2, 48, 288, 12, 16, tile=CtaTile(16, 32, 4, 1, depth=4)),
    }


def gemm_small_examples(cls: type[S]) -> dict[str, S]:
    """Each kind of weights and of choice, whole and in splits."""
    q8, q4_k, q6_k = (FORMATS[name] for name in ("Q8_0", "Q4_K", "Q6_K"))
    mxfp4, q5_0, q5_1 = (FORMATS[name] for name in ("MXFP4", "Q5_0", "Q5_1"))
    oai, rms = Gated(Activation("swiglu_oai", limit=7.0)), Normed(Norm("rms", 1e-5))
    plain, bias, weighted = Normed(Norm("rms", 1e-6, False)), Bias(), Weighted()
    gelu, relu2 = Activation("gelu", limit=2.5, clamp="activated"), Activation("relu2")
    parts = {"down": True, "early": True, "splits": 2, "sms": 4, "stages": 2}
    return {
        "smallest": cls.of(q8, 2, 1, 16, 32, 2, sms=2),
        "one row": cls.of(q4_k, 5, 3, 48, 512, 1, rms, Gated(), sms=3, stages=4),
        "one expert": cls.of(q4_k, 1, 1, 48, 768, 8, plain, sms=5),
        "gpt-oss": cls.of(mxfp4, 9, 2, 32, 288, 5, rms, bias, oai, sms=7),
        "weighted up": cls.of(q5_0, 3, 1, 32, 512, 7, weighted, bias, Gated(gelu), sms=2, warps=2),
        "relu2": cls.of(q5_1, 40, 4, 16, 96, 8, Activated(relu2), sms=4, stages=3),
        "down": cls.of(q8, 6, 4, 48, 544, 6, bias, weighted, down=True, sms=3),
        "down early": cls.of(q4_k, 4, 2, 80, 1024, 3, down=True, early=True, sms=4, warps=3),
        "parts": cls.of(q6_k, 3, 2, 48, 1024, 8, bias, weighted, **parts),
        "integers": cls.of(FORMATS["W4G128"], 5, 2, 48, 384, 3, rms, Gated(), sms=3),
        "codebook": cls.of(FORMATS["IQ3_S"], 4, 2, 48, 512, 3, rms, Gated(), sms=3, warps=12),
        "NVFP4": cls.of(FORMATS["NVFP4"], 4, 2, 48, 320, 3, rms, Gated(), sms=3, warps=8),
        "NF4": cls.of(FORMATS["NF4G64"], 4, 2, 48, 320, 3, rms, Gated(), sms=3, warps=8),
        "chooses": cls.of(
            *(q4_k, 33, 4, 32, 512, 7, rms, Gated()),
            **{"sms": 3, "selection": Selection(33, 4, "softmax_selected")},
        ),
        "chooses, weighted": cls.of(
            *(q8, 70, 8, 32, 288, 8, bias, weighted),
            **{"down": True, "early": True, "sms": 4, "warps": 3},
            selection=Selection(70, 8, normalised=True, scale=2.5),
        ),
        "chooses, selected": cls.of(
            *(q6_k, 128, 4, 16, 512, 5, weighted),
            **{"down": True, "early": True, "splits": 2, "sms": 5},
            selection=Selection(128, 4, "softmax_selected"),
        ),
        "chooses, one row": cls.of(
            *(q4_k, 5, 3, 48, 512, 1, weighted),
            **{"down": True, "sms": 3, "selection": Selection(5, 3)},
        ),
        "a part a block": cls.of(mxfp4, 5, 2, 16, 736, 4, bias, down=True, splits=3, sms=9),
    }
