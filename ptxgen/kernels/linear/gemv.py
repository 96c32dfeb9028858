"""Matrix-vector products (GEMV) of one vector, tile by tile, for decode steps."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.exchange.gives import Gives, SumOfRanks
from urdir.ptxgen.kernels.linear.cut import Cut, cut_launch, even_tiles
from urdir.ptxgen.kernels.linear.ends import norm_text
from urdir.ptxgen.kernels.linear.gate import Gate
from urdir.ptxgen.kernels.linear.gemv_examples import gemv_examples
from urdir.ptxgen.kernels.linear.gemv_room import (
    OTHER_REGISTERS,
    RECORD_NBYTES,
    Activations,
    footprint,
    most_registers,
    norm_vectors,
)
from urdir.ptxgen.kernels.linear.then import (
    Then,
    check_then,
    follow,
    make_then_inputs,
    shared_nbytes,
    then_params,
)
from urdir.ptxgen.kernels.linear.tiled import TiledSpec
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.spec import Access, Array, Param, Tolerance, ceil_div
from urdir.ptxgen.weights.layout import TILE_COLS


@dataclass(frozen=True)
class Gemv(TiledSpec):
    """One activation vector times weights of any type.

    ``activations``: "f32", or "i16" for quantised weights: rounded to multiples of the largest in
    each 32 columns / 32639, relative error 2e-5, and multiplied with the quants exactly on tensor
    cores. Sums are f32. ``alone``: the launch overlaps no earlier one, and loads activations before
    weights. ``after``: x is what a block made, and the stream in its place, stream = before +
    after(x), with ``post_norm`` and ``post_norm_bias``, or before + the sum of the ranks' x. It is
    stored as well; x and ``before`` are other buffers. ``stream_scaled``: times ``stream_scale``
    (1,). ``gate``: x goes through it first. ``gained``: the product without a bias is multiplied
    with sigmoid(gain (1,)) as well as with the scale. ``then``: a recurrent kernel, of one token,
    that takes the first product; y is what it makes, and its other parameters have ``then_`` before
    their names. ``gives``: y is one of several ranks' addends, and is sent to the others.

    Raises PtxgenError for "i16" with unquantised types, and for a scale without ``after``, and
    for what ``then`` does not take.
    """

    activations: Activations = "f32"
    alone: bool = False
    after: Norm | SumOfRanks | None = None
    stream_scaled: bool = False
    gate: Gate | None = None
    gained: bool = False
    then: Then | None = None
    gives: Gives | None = None

    name = "gemv"
    template = ("urdir.templates", "linear/gemv.ptx.j2")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.activations == "i16" and any(fmt.is_float for fmt in self.formats):
            raise PtxgenError("gemv: 16-bit activations are for quantised weights only")
        if self.norm_first and self.cluster > 1:
            raise PtxgenError(f"gemv: {self.norm} is for one CTA's columns: cluster is 1")
        if self.stream_scaled and self.after is None:
            raise PtxgenError("gemv: no stream to scale: after is None")
        if self.after and self.cluster > 1:
            raise PtxgenError(f"gemv: after a block {self.after} is for a cluster of 1")
        if self.gate is not None and (self.after or self.cols % max(1, self.gate.head)):
            raise PtxgenError(f"gemv: a gate of {self.cols} columns in heads of {self.gate.head}")
        if self.gained and (self.gated or self.activation or any(self.biases)):
            raise PtxgenError("gemv: a gain of a product without gate, activation and bias only")
        if self.then is not None:
            check_then(self.then, self.rows)
            if self.gated or self.residual or self.cut.rows.passes > 1:
                raise PtxgenError(
                    f"gemv: {self.then.name} after a product with gate or residual, or in passes"
                )
        if isinstance(self.after, SumOfRanks):
            self.after.check(self.name, self.cols)
            if self.gives is not None:
                raise PtxgenError("gemv: a product takes from other ranks, or gives to them")
        if self.gives is not None:
            if self.others:
                raise PtxgenError("gemv: one matrix gives its product to other ranks, not several")
            self.gives.check(self.name, self.rows)

    @property
    def record_nbytes(self) -> int:
        """Bytes of a unit's activations."""
        return RECORD_NBYTES[self.activations]

    @property
    def after_place(self) -> int:
        """Sums of each warp before those of ``after``: of squares, and others beside them."""
        return 2 if self.norm_first else 1

    @property
    def asks_late(self) -> bool:
        """Whether the norm's weights are loaded only when those of ``after`` have been used: a
        thread has no registers for both."""
        if self.after is None:
            return False
        arrays = 2 + norm_vectors(self.after) + norm_vectors(self.norm)
        registers = 8 * arrays * self.lane_blocks + OTHER_REGISTERS
        return registers > most_registers(2 * ceil_div(self.cut.warps, 2))

    @property
    def after_text(self) -> str:
        """What is added to the stream, for a template's contract."""
        if isinstance(self.after, SumOfRanks):
            return "the sum of the ranks' x"
        return norm_text(self.after, "post_norm")

    @property
    def sums_ranks(self) -> bool:
        """Whether the stream takes a sum of ranks."""
        return isinstance(self.after, SumOfRanks)

    @property
    def params(self) -> tuple[Param, ...]:
        """Beside those of every linear kernel, what is known of the stream and of other ranks."""
        plain, after, row = super().params, self.after, ("batch", "cols")
        if self.gate is not None:
            plain += self.gate.params
        if self.gained:
            plain += (Param("gain", "f32", (1,), Access.IN),)
        if self.then is not None:
            plain += then_params(self.then)
        if self.gives is not None:
            plain += self.gives.params
        if after is None:
            return plain
        given = (
            (True, Param("before", "f32", row, Access.IN)),
            (after.weight, Param("post_norm", "f32", ("cols",), Access.IN)),
            (after.bias, Param("post_norm_bias", "f32", ("cols",), Access.IN)),
            (self.stream_scaled, Param("stream_scale", "f32", (1,), Access.IN)),
            (True, Param("stream", "f32", row, Access.OUT)),
        )
        of_ranks = after.params if isinstance(after, SumOfRanks) else ()
        return plain + tuple(param for present, param in given if present) + of_ranks

    def reference(self, **inputs: Any) -> dict[str, Array]:
        outputs = self._products(**inputs)
        if self.then is not None:
            outputs |= follow(self.then, outputs["y"], inputs)
        if self.gives is not None:
            outputs |= self.gives.reference(outputs["y"].reshape(-1), inputs)
        return outputs

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        inputs = super().make_inputs(rng)
        if self.then is not None:
            inputs |= make_then_inputs(self.then, rng)
        if self.gives is not None:
            inputs |= self.gives.make_inputs(rng)
        if isinstance(self.after, SumOfRanks):
            inputs |= self.after.make_inputs(self.cols, rng)
        return inputs

    def bytes_moved(self) -> int:
        if self.gives is not None:
            return replace(self, gives=None).bytes_moved() + self.gives.bytes_moved(self.rows)
        if isinstance(self.after, SumOfRanks):
            stream = 2 * 4 * self.cols  # before, and itself
            alone = replace(self, after=None, stream_scaled=False).bytes_moved()
            return alone + stream + self.after.bytes_moved(self.cols)
        return super().bytes_moved()

    def multiplied(self, **inputs: Any) -> Array:
        if self.gate is not None:
            gated = self.gate(inputs["x"], inputs["x_gate"], inputs.get("head_norm"))
            inputs = {**inputs, "x": gated}
        return super().multiplied(**inputs)

    def factor(self, inputs: Mapping[str, Any]) -> float:
        return 1.0 / (1.0 + math.exp(-inputs["gain"][0])) if self.gained else 1.0

    def _products(self, **inputs: Any) -> dict[str, Array]:
        """y, and the stream where that is made."""
        if self.after is None:
            return super().reference(**inputs)
        left = {}
        if isinstance(self.after, SumOfRanks):
            made = self.after.total(inputs["x"].reshape(-1), inputs)
            left = self.after.left(self.cols, inputs)
        else:
            made = self.after(inputs["x"], inputs.get("post_norm"), inputs.get("post_norm_bias"))
        stream = (inputs["before"] + made) * inputs.get("stream_scale", 1.0)
        outputs = super().reference(**{**inputs, "x": stream})
        return outputs | {"stream": stream.astype(np.float32)} | left

    @property
    def lane_blocks(self) -> int:
        """Blocks whose activations a warp prepares, eight of each block in a lane."""
        return ceil_div(self.cut.columns.cta_blocks, self.cut.warps)

    @property
    def has_partial_blocks(self) -> bool:
        """Whether the warps' last blocks, or units of the last block, are beyond the row."""
        blocks = self.cut.columns.cta_blocks
        return bool(blocks % self.cut.warps or self.cols % (TILE_COLS * self.cluster))

    @cached_property
    def cut(self) -> Cut:
        room = footprint(self.formats, self.cols, self.cluster, self.activations)
        places = self.after_place
        if self.after is not None:
            places += 2
        shared = 0 if self.then is None else shared_nbytes(self.then)
        room = replace(room, warp_squares=4 * places, shared=shared)
        tiles = even_tiles(self, self.layouts)
        return cut_launch(self, self.layouts, room, tiles, self.pair, even=True)

    @property
    def tolerance(self) -> Tolerance:
        """f32: rounding of the sums, see `GemvF32`. i16: standard normal activations are off by
        2e-5 of their size, a product by as much of its own, several times that where few rows
        cancel."""
        if self.activations == "i16":
            return Tolerance(rtol=3e-4 if self.activation or self.then else 1.5e-4, atol=5e-4)
        return Tolerance(rtol=5e-6 if self.f or self.then or self.is_bounded else 2e-6, atol=2e-6)

    @classmethod
    def examples(cls) -> Mapping[str, Gemv]:
        return gemv_examples(cls)
