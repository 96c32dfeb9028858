"""From a router's logits to the experts of each row and their weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.advance import IDLE
from urdir.ptxgen.kernels.experts.selection import Selection
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance, ceil_div

#: Threads of a CTA that selects, at most.
THREADS = 256


def selection_params(selection: Selection) -> tuple[Param, ...]:
    """Parameters of a kernel that selects experts, except logits."""
    each, chosen = (selection.experts,), ("rows", selection.used)
    return Param.given(
        Param("position", "u32", ("rows",), Access.IN),
        selection.bias and Param("choice_bias", "f32", each, Access.IN),
        selection.expert_scale and Param("expert_scale", "f32", each, Access.IN),
        Param("expert", "u32", chosen, Access.OUT),
        Param("weight", "f32", chosen, Access.OUT),
    )


def without_padding(
    selection: Selection, inputs: Mapping[str, Any], logits: Array
) -> dict[str, Array]:
    """``expert`` and ``weight`` (rows, used) for the logits (rows, experts) and other ``inputs`` of
    a kernel that selects: padding rows choose none."""
    extra = inputs.get("choice_bias"), inputs.get("expert_scale")
    expert, weight = selection(logits, *extra)
    idle = inputs["position"] == IDLE
    expert[idle], weight[idle] = selection.experts, 0.0
    return {"expert": expert, "weight": weight.astype(np.float32)}


def random_positions(rows: int, rng: np.random.Generator) -> Array:
    """Those of some rows (rows,) u32; of several the second is a padding row."""
    position = rng.integers(0, 100, rows).astype(np.uint32)
    position[1:2] = IDLE
    return position


@dataclass(frozen=True)
class SelectExperts(KernelSpec):
    """The experts of each row and their weights, from the logits of a router (rows, experts), or
    from those of ``splits`` of its columns, which are added up: (splits, rows, experts).

    See `Selection`. Padding rows, whose ``position`` is `IDLE`, have none: their expert is number
    ``experts``, beyond the last one, with weights of 0. Whatever the logits are, the chosen experts
    are different ones; NaN counts as the lowest. ``cols``: logits are those of rows of this many
    columns before an RMSNorm with ``eps``, and ``squares`` (splits, rows) has the sums of the
    squares; ``factor`` (rows,) is what the norm multiplies the rows with.
    """

    rows: int
    selection: Selection
    splits: int = 1
    cols: int = 0
    eps: float = 0.0

    name = "select_experts"

    def __post_init__(self) -> None:
        if not 1 <= self.rows < 2**31 or self.splits < 1:
            raise PtxgenError(
                f"select_experts: {self.rows} rows, {self.splits} splits: at least one"
            )

    @property
    def params(self) -> tuple[Param, ...]:
        of_splits = ("splits",) if self.splits > 1 else ()
        logits = Param("logits", "f32", (*of_splits, "rows", self.selection.experts), Access.IN)
        params = (logits, *selection_params(self.selection))
        if not self.cols:
            return params
        squares = Param("squares", "f32", ("splits", "rows"), Access.IN)
        return (squares, *params, Param("factor", "f32", ("rows",), Access.OUT))

    @property
    def launch_shape(self) -> LaunchShape:
        threads = min(THREADS, 32 * ceil_div(self.selection.experts, 32))
        return LaunchShape(grid=(self.rows, 1, 1), block=(threads, 1, 1))

    @property
    def tolerance(self) -> Tolerance:
        """Of weights; two approximations of exponentials and one of a quotient. Numbers of experts
        are equal: this is less than 1 of 511."""
        return Tolerance(rtol=2e-6, atol=1e-7)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        logits = inputs["logits"].reshape(self.splits, self.rows, -1)
        logits = logits.sum(axis=0)
        if not self.cols:
            return without_padding(self.selection, inputs, logits)
        squares = inputs["squares"].astype(np.float64).sum(axis=0)
        factor = 1 / np.sqrt(squares / self.cols + self.eps)
        chosen = without_padding(self.selection, inputs, logits * factor[:, None])
        return {**chosen, "factor": factor.astype(np.float32)}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        made = self.selection.random_logits(self.rows, rng)
        made["position"] = random_positions(self.rows, rng)
        if self.cols:
            squares = rng.uniform(0.5, 2.0, (self.splits, self.rows)) * self.cols / self.splits
            made["squares"] = squares.astype(np.float32)
        if self.splits == 1:
            return made
        more = (self.selection.random_logits(self.rows, rng) for _ in range(1, self.splits))
        return made | {"logits": np.stack([made["logits"], *(each["logits"] for each in more)])}

    @classmethod
    def examples(cls) -> Mapping[str, SelectExperts]:
        found = {name: cls(rows, selection) for name, (rows, selection) in SELECTIONS.items()}
        return found | {
            "splits": cls(3, Selection(70, 6), splits=3),
            "squares": cls(3, Selection(70, 6), splits=3, cols=512, eps=1e-5),
        }

    def flops(self) -> int:
        return self.rows * self.selection.experts**2


#: Rows and selections to test, by name.
SELECTIONS: Mapping[str, tuple[int, Selection]] = {
    "one of one": (1, Selection(1, 1)),
    "softmax": (3, Selection(128, 8, normalised=True)),
    "softmax selected": (5, Selection(33, 4, "softmax_selected")),
    "llama 4": (2, Selection(17, 1, "sigmoid", by_logits=True)),
    "deepseek 3": (
        3, Selection(256, 8, "sigmoid", True, 2.5, bias=True, groups=8, groups_used=4),
    ),
    "groups of a softmax": (4, Selection(62, 6, scale=16.0, groups=2, groups_used=1)),
    "sqrt of softplus": (2, Selection(70, 6, "sqrt_softplus", True, 1.5, bias=True)),
    "512, scaled": (2, Selection(512, 32, normalised=True, expert_scale=True)),
    "qwen 3 next": (3, Selection(512, 10, normalised=True)),
    "kimi k2": (2, Selection(384, 8, "sigmoid", True, 2.827, bias=True)),
    "all of them": (2, Selection(31, 31, "sigmoid", bias=True)),
    "a sparse mixer": (3, Selection(16, 2, "sparsemixer", near=0.3)),
    "a wide sparse mixer": (2, Selection(70, 2, "sparsemixer", near=0.3)),
    "networks of four experts": (3, Selection(72, 6, normalised=True, shares=4)),
    "networks of a pair": (2, Selection(8, 2, "sigmoid", shares=2, scale=0.05)),
    "groups by their best": (3, Selection(160, 6, groups=8, groups_used=3, by_best=True)),
}  # fmt: skip
