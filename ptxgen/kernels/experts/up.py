"""The first matrices of the experts that a few rows chose, and the activation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.experts.parts import LogitParts
from urdir.ptxgen.kernels.experts.selection import Selection
from urdir.ptxgen.kernels.experts.tiled import ExpertsSpec
from urdir.ptxgen.kernels.linear.epilogue.activation import Activated, Gated
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.epilogue.weighted import Weighted
from urdir.ptxgen.kernels.linear.prologue.norm import Normed
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.spec import Access, Array, Param
from urdir.ptxgen.weights.formats import FORMATS


@dataclass(frozen=True)
class ExpertsUp(ExpertsSpec):
    """y[b, s] = W x[b], then the steps, with the matrix W of the expert that row b has in slot s;
    `Gated` is f(W x) * (U x).

    With a ``selection`` x is that of its router, too: it is read before the wait, unless logits
    come in parts, from the launch that makes x.

    ``in_turn``: there is no ``expert``, row b has number b % experts: heads with matrices of their
    own.
    """

    in_turn: bool = False

    prologues = (Normed,)
    epilogues = (Weighted, Bias, Gated, Activated)
    name = "experts_up"
    template = ("urdir.templates", "experts/up.ptx.j2")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.in_turn and (self.used > 1 or self.weighted):
            raise PtxgenError("experts_up: experts in turn are one a row, without weights")
        if self.selection is not None and (self.in_turn or self.weighted):
            raise PtxgenError(
                "experts_up: experts in turn, and weighted input, are not chosen here"
            )

    @property
    def tiles_left(self) -> int:
        """All of them where one row chooses by logits: the next launch, which chooses as well, does
        so meanwhile. A step of qwen3-30b-a3b on an H200 takes 949 us so, else 966 (2026-11-29)."""
        chooses = self.batch == 1 and self.selection is not None and self.logit_parts is None
        rows = self.cut.rows
        every = self.cut.columns.warp_blocks * rows.tiles * rows.passes * self.pair
        return every if chooses else super().tiles_left

    @property
    def grid_rows(self) -> int:
        return self.batch * self.used

    @property
    def blocks(self) -> int:
        return self.layout.row_tiles

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            *self.weight_params,
            *(() if self.in_turn else self.choice_params),
            *self.params_of(Weighted),
            Param("x", "f32", ("batch", "cols"), Access.IN),
            *self.params_of(Normed, Bias),
            Param("y", "f32", ("batch", "used", "rows"), Access.OUT),
        )

    def reference(self, **inputs: Any) -> dict[str, Array]:
        x = self.multiplied(inputs, {})
        chosen = np.arange(self.batch)[:, None] % self.experts
        if not self.in_turn:
            chosen = self.chosen(inputs)["expert"]
        products = [np.einsum("bsrc,bc->bsr", m[chosen], x) for m in self.matrices_of(inputs)]
        y = np.stack([product.reshape(-1, self.rows) for product in products])
        y = y if self.gated else y[0]
        y = self.ended(y, chosen.reshape(-1), np.arange(self.pairs), inputs, self.epilogue)
        return {"y": y.astype(np.float32).reshape(self.batch, self.used, self.rows)}

    @classmethod
    def examples(cls) -> Mapping[str, ExpertsUp]:
        q8, q4_k, q6_k = (FORMATS[name] for name in ("Q8_0", "Q4_K", "Q6_K"))
        f16, f32, q5_1 = (FORMATS[name] for name in ("F16", "F32", "Q5_1"))
        oai, rms = Activation("swiglu_oai", limit=7.0), Normed(Norm("rms", 1e-5))
        layer = Normed(Norm("layer", 1e-5, bias=True))
        return {
            "smallest": cls(q8, 2, 1, 16, 32),
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
            "in turn": cls(q8, 3, 1, 32, 64, batch=7, in_turn=True),
            "in turn i16": cls(q8, 2, 1, 128, 512, batch=4, in_turn=True, activations="i16"),
            "E4M3": cls.of(FORMATS["E4M3G128"], 3, 2, 32, 384, rms, Gated(), batch=2),
            "integers": cls.of(FORMATS["W4G128"], 3, 2, 32, 384, rms, Gated(), activations="i16"),
            "codebook": cls.of(FORMATS["IQ2_S"], 3, 2, 32, 512, rms, Gated(), activations="i16"),
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
            "chooses, all of them": cls.of(q8, 3, 3, 16, 64, selection=Selection(3, 3)),
        }
