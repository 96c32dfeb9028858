"""A router for few rows in one launch: norm, logits, and the choice of experts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.experts.select import (
    SELECTIONS,
    random_positions,
    selection_params,
    without_padding,
)
from urdir.ptxgen.kernels.experts.selection import Selection
from urdir.ptxgen.kernels.linear.prologue.norm import norm_params, norm_text
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance, ceil_div
from urdir.ptxgen.weights.formats import FORMATS
from urdir.ptxgen.weights.layout import Layout

#: Vectors of four columns that a thread has registers for: weights, norm and activations.
MOST_VECTORS = 6
#: CTAs, at least, of which each makes up to four logits of one of several rows. On an H200 a step
#: of eight rows of qwen3-30b-a3b takes 2,034 us with four logits a CTA, 2,051 with one.
CTAS = 256
#: CTAs for the logits of one row among many experts, and those that are not many. A step of one row
#: of qwen3-next-80b-a3b (512 experts) takes 1,130 us with eight logits a CTA, 1,155 with four,
#: 1,198 with two.
CTAS_OF_ONE, FEW = 64, 128
#: Vectors of weights of several experts that a thread has registers for, one of up to 256 and one
#: of more.
MOST_SEVERAL = (32, 16)


@dataclass(frozen=True)
class RouteExperts(KernelSpec):
    """The experts of each row and their weights, from x and the router's weights (experts, cols).

    The weights are F32, repacked. ``norm``: x is RMS-normalised first. The products, times
    ``scale``, plus ``bias`` (experts,), are ``logits`` (rows, experts). A CTA has ``each`` experts
    of a row; the last one to arrive selects, unless products choose for themselves (``selects``).
    ``starts_next``: the next launch may start before this one waits.
    ``arrived`` (rows,) is 0 before and after. Padding rows choose none, as by `SelectExperts`.
    With a ``gate`` one more CTA of a row makes its product with ``gate_weights`` (cols,) F32,
    repacked, without scale and bias.
    """

    rows: int
    cols: int
    selection: Selection
    norm: Norm | None = None
    bias: bool = False
    scale: float = 1.0
    selects: bool = True
    each: int = 1
    starts_next: bool = False
    gate: bool = False

    name = "route_experts"

    def __post_init__(self) -> None:
        if not 1 <= self.rows <= 65535:
            raise PtxgenError(f"route_experts: {self.rows} rows: 1 to 65535")
        if not self.takes(self.cols, self.norm):
            raise PtxgenError(
                f"route_experts: {self.cols} columns, {self.norm}: a multiple of 4 and "
                f"{MOST_VECTORS * 4096} at most, and no norm but of the root mean square, unbiased"
            )
        if self.gate and self.selects:
            raise PtxgenError("route_experts: a gate is for products that choose")
        if self.each == 1:
            return
        most = self.most_each
        if self.selects or self.selection.experts % self.each or self.each > most:
            raise PtxgenError(
                f"route_experts: {self.each} of {self.selection.experts} experts a CTA: a divisor, "
                f"{most} at most of {self.cols} columns, of which products choose"
            )

    @staticmethod
    def takes(cols: int, norm: Norm | None) -> bool:
        """Whether the threads of a CTA have registers for a row, and the norm is one of those that
        may follow the product."""
        fits = cols % 4 == 0 and 4 <= cols <= MOST_VECTORS * 4096
        return fits and (norm is None or (norm.kind == "rms" and not norm.bias))

    @classmethod
    def each_of(cls, rows: int, cols: int, selection: Selection) -> int:
        """How many logits a CTA should make where products choose: enough that `CTAS` are left."""
        experts = selection.experts
        wanted = min(4, rows * experts // CTAS)
        if rows == 1:
            wanted = experts // CTAS_OF_ONE if experts > FEW else 1
        most = min(cls(1, cols, selection).most_each, max(1, wanted))
        return next(n for n in (8, 4, 2, 1) if n <= most and experts % n == 0)

    @cached_property
    def layout(self) -> Layout:
        """How the weights lie in memory."""
        return Layout(FORMATS["F32"], self.selection.experts, self.cols)

    @cached_property
    def gate_layout(self) -> Layout:
        """How those of the gate lie there."""
        return Layout(FORMATS["F32"], 1, self.cols)

    @property
    def threads(self) -> int:
        """Threads of a CTA: a multiple of a tile's 64 vectors of four columns."""
        choices = (128, 256, 512, 1024)
        return next(t for t in choices if self.cols <= 4 * MOST_VECTORS * t)

    @property
    def ctas(self) -> int:
        """CTAs of a row."""
        return self.selection.experts // self.each + self.gate

    @property
    def vectors(self) -> int:
        """Vectors of four columns of a thread."""
        return ceil_div(self.cols, 4 * self.threads)

    @property
    def most_each(self) -> int:
        """Experts of a CTA that its threads have registers for."""
        return MOST_SEVERAL[self.threads > 256] // self.vectors

    @property
    def params(self) -> tuple[Param, ...]:
        experts = self.selection.experts
        params = [
            Param("weights", "u8", (self.layout.nbytes,), Access.IN),
            Param("x", "f32", ("rows", "cols"), Access.IN),
        ]
        params += () if self.norm is None else norm_params(self.norm, "norm")
        if self.bias:
            params.append(Param("bias", "f32", (experts,), Access.IN))
        logits = Param("logits", "f32", ("rows", experts), Access.OUT)
        if self.gate:
            params.insert(1, Param("gate_weights", "u8", (self.gate_layout.nbytes,), Access.IN))
            return (*params, logits, Param("gate_logits", "f32", ("rows",), Access.OUT))
        if not self.selects:
            return (*params, logits)
        arrived = Param("arrived", "u32", ("rows",), Access.INOUT)
        return (*params, arrived, logits, *selection_params(self.selection))

    @property
    def norm_text(self) -> str:
        """What x' is, for the template's contract."""
        return norm_text(self.norm)

    @property
    def launch_shape(self) -> LaunchShape:
        grid = (self.ctas, self.rows, 1)
        return LaunchShape(grid=grid, block=(self.threads, 1, 1))

    @property
    def tolerance(self) -> Tolerance:
        """Rounding of the logits' sums, part of which reaches the weights."""
        return Tolerance(rtol=5e-6, atol=2e-6)

    def reference(self, **inputs: Any) -> dict[str, Array]:
        x = inputs["x"].astype(np.float64)
        if self.norm is not None:
            x = self.norm(x, inputs.get("norm"))
        logits = self.scale * (x @ self.layout.unpack(inputs["weights"]).astype(np.float64).T)
        if self.bias:
            logits += inputs["bias"]
        made = {"logits": logits.astype(np.float32)}
        if self.gate:
            gate = x @ self.gate_layout.unpack(inputs["gate_weights"])[0].astype(np.float64)
            made["gate_logits"] = gate.astype(np.float32)
        if not self.selects:
            return made
        arrived = np.zeros_like(inputs["arrived"])
        return {"arrived": arrived, **made, **without_padding(self.selection, inputs, logits)}

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        shape = (self.selection.experts, self.cols)
        weights = (rng.standard_normal(shape) / self.cols**0.5).astype(np.float32)
        inputs = {"weights": self.layout.pack(weights)}
        gate = (rng.standard_normal((1, self.cols)) / self.cols**0.5).astype(np.float32)
        inputs |= {"gate_weights": self.gate_layout.pack(gate)} if self.gate else {}
        extra = self.selection.random_logits(self.rows, rng)
        for p in self.params[1:]:
            if p.name in inputs:
                continue
            if p.name in extra and p.name != "logits":
                inputs[p.name] = extra[p.name]
            elif p.name == "arrived":
                inputs[p.name] = np.zeros(self.rows, np.uint32)
            elif p.name == "position":
                inputs[p.name] = random_positions(self.rows, rng)
            elif p.access is Access.IN:
                inputs[p.name] = rng.standard_normal(self.shape_of(p)).astype(np.float32)
        return inputs

    @classmethod
    def examples(cls) -> dict[str, RouteExperts]:
        softmax, groups = SELECTIONS["softmax"][1], SELECTIONS["groups of a softmax"][1]
        llama4, biased = SELECTIONS["llama 4"][1], SELECTIONS["sqrt of softplus"][1]
        return {
            "smallest": cls(1, 4, Selection(2, 1)),
            "one row": cls(1, 260, softmax, norm=Norm("rms", 1e-6)),
            "gpt-oss": cls(
                2, 2880, Selection(33, 4, "softmax_selected"), norm=Norm("rms", 1e-5), bias=True
            ),
            "groups": cls(3, 36, groups),
            "llama 4": cls(2, 3076, llama4, norm=Norm("rms", 1e-5, weight=False), scale=0.5),
            "wide": cls(1, 12292, Selection(5, 2), norm=Norm("rms", 1e-5)),
            "choice bias": cls(2, 68, biased, bias=True),
            "several": cls(
                3, 2052, Selection(12, 3), Norm("rms", 1e-6), bias=True, selects=False, each=3
            ),
            "several, no norm": cls(2, 580, Selection(8, 2), scale=0.5, selects=False, each=4),
            "several, starts next": cls(
                5, 516, Selection(16, 2), Norm("rms", 1e-6), selects=False, each=2, starts_next=True
            ),
            "gate": cls(1, 2052, Selection(6, 2), Norm("rms", 1e-6), selects=False, gate=True),
            "gate, eight": cls(
                1, 2044, Selection(16, 2), Norm("rms", 1e-6), selects=False, each=8, gate=True
            ),
            "gate, several": cls(
                3, 580, Selection(8, 2), bias=True, scale=0.5, selects=False, each=2, gate=True
            ),
            "logits": cls(2, 260, softmax, Norm("rms", 1e-6), scale=0.5, selects=False),
        }

    def bytes_moved(self) -> int:
        """Without the row powers, which are not read."""
        gate = self.gate_layout if self.gate else None
        unread = self.layout.powers_nbytes
        if gate is not None:  # the row of a tile of 16
            unread += gate.nbytes - 4 * self.cols
        return super().bytes_moved() - unread

    def flops(self) -> int:
        return 2 * self.rows * self.selection.experts * self.cols
