"""The last matrices of the experts that a few rows chose, weighted and added to the residual."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.kernels.experts.parts import LogitParts
from urdir.ptxgen.kernels.experts.reference import ended, matrices_of, with_choice
from urdir.ptxgen.kernels.experts.selection import Selection
from urdir.ptxgen.kernels.experts.tiled import ExpertsSpec
from urdir.ptxgen.kernels.linear.epilogue.bias import Bias
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.epilogue.weighted import Weighted
from urdir.ptxgen.spec import Access, Array, Param
from urdir.ptxgen.weights.formats import FORMATS


@dataclass(frozen=True)
class ExpertsDown(ExpertsSpec):
    """y[b] = sum over slots s of D x[b, s] after `Bias` and `Weighted`, D of the expert that row b
    has there; then `Residual`.

    The experts' matrices stand side by side: one product with ``used`` times ``cols`` columns.
    ``early``: the experts were chosen before the launch before this one, which waited for that. The
    first weights are then loaded while that launch runs.
    """

    early: bool = False

    epilogues = (Bias, Weighted, Residual)
    name = "experts_down"
    template = ("urdir.templates", "experts/down.ptx.j2")

    @property
    def alone(self) -> bool:  # type: ignore[override]
        """Whether activations are loaded before weights."""
        return not self.early

    @property
    def grid_rows(self) -> int:
        return self.batch

    @property
    def blocks(self) -> int:
        return self.used * self.layout.row_tiles

    @property
    def params(self) -> tuple[Param, ...]:
        return (
            *self.weight_params,
            *self.choice_params,
            *(self.params_of(Weighted) if self.selection is None else ()),
            Param("x", "f32", ("batch", "used", "cols"), Access.IN),
            *self.params_of(Bias, Residual),
            Param("y", "f32", ("batch", "rows"), Access.OUT),
        )

    def reference(self, **inputs: Any) -> dict[str, Array]:
        inputs = with_choice(self, inputs)
        experts, (weights,) = inputs["expert"], matrices_of(self, inputs)
        y = np.einsum("bsrc,bsc->bsr", weights[experts], inputs["x"].astype(np.float64))
        flat, pairs = experts.reshape(-1), np.arange(self.pairs)
        of_slots = [step for step in self.epilogue if not isinstance(step, Residual)]
        y = ended(self, y.reshape(-1, self.rows), flat, pairs, inputs, of_slots)
        y = y.reshape(self.batch, self.used, self.rows).sum(axis=1)
        after = [step for step in self.epilogue if isinstance(step, Residual)]
        return {"y": ended(self, y, flat, pairs, inputs, after).astype(np.float32)}

    @classmethod
    def examples(cls) -> Mapping[str, ExpertsDown]:
        q8, q4_k, q6_k = (FORMATS[name] for name in ("Q8_0", "Q4_K", "Q6_K"))
        f16, f32, q5_1 = (FORMATS[name] for name in ("F16", "F32", "Q5_1"))
        weighted, adds = Weighted(), Residual()
        passes = {"sms": 1, "per_pass": 2, "groups": 2, "split": 3}
        i16: dict[str, Any] = {"activations": "i16"}
        return {
            "smallest": cls(q8, 2, 1, 16, 32),
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
            "chooses, bias": cls.of(
                *(q8, 70, 4, 48, 288, Bias(), weighted, adds),
                **{"early": True, "selection": Selection(70, 4, "softmax_selected", scale=2.5)},
                **i16,
            ),
        }
