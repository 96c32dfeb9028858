"""Matrix-vector products (GEMV) of one vector, tile by tile, for decode steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.activation import Activation
from urdir.ptxgen.kernels.exchange.gives import Gives, SumOfRanks
from urdir.ptxgen.kernels.linear.cut import Cut, Footprint, cut_launch, even_tiles
from urdir.ptxgen.kernels.linear.ends import is_first, norm_text
from urdir.ptxgen.kernels.linear.gate import Gate
from urdir.ptxgen.kernels.linear.spec import odd_cols
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
from urdir.ptxgen.kernels.recurrent.causal_conv import CausalConv
from urdir.ptxgen.kernels.recurrent.selective_scan import SelectiveScan
from urdir.ptxgen.spec import Access, Array, Param, Tolerance, ceil_div
from urdir.ptxgen.weights.formats import FORMATS, Format
from urdir.ptxgen.weights.layout import TILE_COLS, TILE_ROWS, TILE_UNITS, Layout

#: With fewer warps `GemvF32` is faster: each warp has too many activations to round.
LEAST_WARPS = 4
#: Registers of a thread, at most: with more, older assemblers' code spills.
MAX_REGISTERS = 170
#: Registers of a thread beside the arrays of the stream and of norms, with a margin.
OTHER_REGISTERS = 56
#: Those that words of other ranks take beside.
WORD_REGISTERS = 16
#: Bytes of a unit's activations in shared memory: see templates/_linear_tile_x.j2.
RECORD_NBYTES = {"f32": 144, "i16": 80}

Activations = Literal["f32", "i16"]


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
    template = ("urdir.templates", "gemv.ptx.j2")

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

    @staticmethod
    def fits(
        formats: Iterable[Format],
        cols: int,
        activations: Activations,
        shared: int,
        norm: Norm | None = None,
        after: Norm | SumOfRanks | None = None,
        cluster: int = 1,
        gate: Gate | None = None,
    ) -> bool:
        """Whether ``shared`` bytes of shared memory have room for the activations and the tiles of
        enough warps, and these warps have registers for the activations; for the weights and the
        bias of a norm as well, if it must be complete before the product or is ``after`` a block,
        and for the ``gate``.
        Each CTA of a ``cluster`` has a part of the columns, which allows neither of these norms.
        """
        if cluster > 1 and (after is not None or (norm is not None and is_first(norm))):
            return False
        warps = _footprint(formats, cols, cluster, activations).most_warps(shared)
        blocks = ceil_div(ceil_div(cols, TILE_COLS), cluster * warps)
        if after is not None:
            arrays = 2 + max(_arrays(after), _arrays(norm))
            others = OTHER_REGISTERS + (WORD_REGISTERS if isinstance(after, SumOfRanks) else 0)
            has_registers = 8 * arrays * blocks + others <= _most_registers(warps)
        else:
            arrays = 1 + _arrays(norm) if norm is not None and is_first(norm) else 1
            arrays += gate is not None
            has_registers = 8 * arrays * blocks + 16 <= _most_registers(warps)
        return warps >= LEAST_WARPS and has_registers

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
        arrays = 2 + _arrays(self.after) + _arrays(self.norm)
        registers = 8 * arrays * self.lane_blocks + OTHER_REGISTERS
        return registers > _most_registers(2 * ceil_div(self.cut.warps, 2))

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
        footprint = _footprint(self.formats, self.cols, self.cluster, self.activations)
        places = self.after_place
        if self.after is not None:
            places += 2
        shared = 0 if self.then is None else shared_nbytes(self.then)
        footprint = replace(footprint, warp_squares=4 * places, shared=shared)
        tiles = even_tiles(self, self.layouts)
        return cut_launch(self, self.layouts, footprint, tiles, self.pair, even=True)

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
        rms, fine = Norm("rms", 1e-5), Norm("rms", 1e-6)
        formats = FORMATS.values()
        q8, q4_k, q6_k, q3_k = (FORMATS[n] for n in ("Q8_0", "Q4_K", "Q6_K", "Q3_K"))
        f16, f32 = FORMATS["F16"], FORMATS["F32"]
        silu = Activation("silu")
        conv = CausalConv(1, 3, 64, 0, channels=37, taps=4, bias=True, activation=silu)
        scan = SelectiveScan(1, 3, 64, 0, channels=70, size=16)
        each = {f.name: cls(f, 17, odd_cols(f), bias=i % 2 == 0) for i, f in enumerate(formats)}
        rounded = {
            f"{f.name} i16": cls(f, 17, odd_cols(f), bias=i % 2 == 0, activations="i16")
            for i, f in enumerate(f for f in formats if not f.is_float)
        }
        return {
            "smallest": cls(q8, 3, 64),
            **each,
            **rounded,
            "residual split": cls(
                q4_k, 9, 2304, split=2, tiles_each=1, stages=2, residual=True, activations="i16"
            ),
            "norm, groups and passes": cls(
                q6_k, 40, 768, split=3, groups=2, tiles_each=4, per_pass=2, norm=rms
            ),
            "split residual Q3_K": cls(
                q3_k, 33, 1280, split=2, groups=1, tiles_each=3, residual=True, activations="i16"
            ),
            "gated norm": cls(
                q4_k, 35, 512, gated=True, norm=fine, tiles_each=3, per_pass=1, activations="i16"
            ),
            "gated split": cls(q8, 21, 1088, gated=True, split=3, groups=1, activations="i16"),
            "filled": cls(q8, 40, 288, residual=True, activations="i16", sms=4, fill=True),
            "three matrices": cls(
                q4_k, 19, 768, bias=True, others=((q4_k, 5), (q6_k, 7)), activations="i16"
            ),
            "F16 norm, other types": cls(
                f16, 35, 1120, norm=rms, others=((q8, 3), (f16, 9)), split=2
            ),
            "F32 gated norm": cls(f32, 18, 293, gated=True, norm=rms),
            "alone": cls(q4_k, 40, 768, bias=True, norm=rms, activations="i16", alone=True),
            "cluster of 2": cls(q4_k, 40, 2304, residual=True, activations="i16", cluster=2),
            "cluster of 4 norm": cls(
                q6_k, 50, 4352, bias=True, norm=rms, cluster=4, split=2, groups=2, tiles_each=4
            ),
            "gated cluster": cls(
                q8, 35, 1088, gated=True, norm=fine, tiles_each=3, per_pass=1, cluster=2
            ),
            "F16 cluster, other types": cls(
                f16, 19, 1120, others=((q8, 5),), cluster=4, sms=12, fill=True
            ),
            "layer norm F32": cls(
                f32, 19, 301, norm=Norm("layer", 1e-5, bias=True), activation=Activation("gelu")
            ),
            "layer norm, groups": cls(
                q6_k, 40, 768, split=3, groups=2, tiles_each=4, bias=True, norm=Norm("layer", 1e-5)
            ),
            "layer norm without weight i16": cls(
                q8, 21, 2336, norm=Norm("layer", 1e-5, weight=False), activations="i16", gated=True
            ),
            "norm without weight": cls(
                q4_k, 9, 512, norm=Norm("rms", 1e-6, weight=False), softcap=5.0, scale=0.25
            ),
            "norm with bias": cls(q8, 5, 96, norm=Norm("rms", 1e-6, bias=True), clamp=1.5),
            "gated with biases": cls(
                q4_k,
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
                f16,
                19,
                512,
                gated=True,
                bias=True,
                cluster=2,
                activation=Activation("swiglu_oai", limit=7.0),
            ),
            "residual, bias, scale": cls(
                q8, 40, 288, bias=True, residual=True, scale=0.22, activations="i16"
            ),
            "residual and bias": cls(q8, 19, 288, bias=True, residual=True),
            "residual and scale": cls(q4_k, 19, 512, residual=True, scale=1.5),
            "relu2 with bias": cls(q8, 18, 320, bias=True, activation=Activation("relu2")),
            "some biases": cls(
                q4_k, 19, 768, bias=(False, True, False), others=((q4_k, 5), (q6_k, 7))
            ),
            "given": cls(
                q4_k, 300, 512, activations="i16", gives=Gives(ranks=3, rank=1, capacity=512)
            ),
            "given by clusters": cls(
                q6_k, 40, 2304, bias=True, scale=0.5, cluster=2, gives=Gives(2, 0, 256)
            ),
            "after ranks": cls(
                q4_k, 19, 768, activations="i16", norm=rms, after=SumOfRanks(2, 1, 1024)
            ),
            "after ranks, gated": cls(
                q8, 21, 1184, activations="i16", gated=True, norm=rms, after=SumOfRanks(3, 1, 1280)
            ),
            "after ranks, several matrices": cls(
                q6_k,
                5,
                512,
                split=1,
                after=SumOfRanks(2, 0, 512),
                stream_scaled=True,
                others=((q4_k, 5), (q8, 7)),
            ),
            "after a block": cls(
                q4_k, 19, 768, activations="i16", norm=rms, after=fine, others=((q4_k, 5), (q8, 7))
            ),
            "after a block, gated": cls(
                q8, 21, 2336, activations="i16", gated=True, norm=fine, after=rms, bias=True
            ),
            "after a block, no norm": cls(q6_k, 18, 512, activations="i16", after=rms, split=1),
            "after a block, scaled": cls(
                q4_k, 19, 768, activations="i16", norm=rms, after=fine, stream_scaled=True
            ),
            "after a block F32": cls(f32, 19, 301, norm=rms, after=rms, split=1),
            "layers after and before": cls(
                f32,
                9,
                549,
                norm=Norm("layer", 1e-5, bias=True),
                after=Norm("layer", 1e-5, bias=True),
                sms=2,
            ),
            "layer after, without weight": cls(
                f16,
                5,
                288,
                norm=Norm("rms", 1e-6, weight=False),
                after=Norm("layer", 1e-6, weight=False),
                alone=True,
            ),
            "after a block of many columns": cls(
                q8, 5, 6112, activations="i16", norm=rms, after=rms, sms=1
            ),
            "rms with bias after": cls(
                q8, 35, 544, norm=fine, after=Norm("rms", 1e-5, bias=True), groups=2, split=2
            ),
            "gated x": cls(f32, 9, 549, gate=Gate(Activation("sigmoid")), norm=rms),
            "gated heads": cls(
                q4_k, 19, 768, residual=True, activations="i16", gate=Gate(silu, 64, 1e-6)
            ),
            "gated heads, cluster": cls(
                q8, 40, 2336, activations="i16", cluster=2, gate=Gate(silu, 32, 1e-6), sms=4
            ),
            "gained residual": cls(
                q4_k, 19, 768, residual=True, activations="i16", gained=True, scale=0.5
            ),
            "gained": cls(f32, 9, 37, gained=True),
            "then a convolution": cls(
                q4_k, 37, 768, activations="i16", norm=rms, others=((q4_k, 5), (q8, 7)), then=conv
            ),
            "then a convolution, cluster": cls(
                f16, 37, 1120, bias=True, cluster=2, then=replace(conv, taps=3, activation=None)
            ),
            "then a scan": cls(q8, 70, 160, bias=True, activations="i16", then=scan),
            "then a scan of short states": cls(
                f32, 70, 37, split=1, sms=2, then=replace(scan, size=4, sequences=2)
            ),
        }


def _arrays(norm: Norm | SumOfRanks | None) -> int:
    """Vectors that a norm has beside x."""
    return 0 if norm is None else norm.weight + norm.bias


def _most_registers(warps: int) -> int:
    """Registers of a thread, at most, if an SM has room for two CTAs of so many warps."""
    return min(MAX_REGISTERS, 1024 // warps)


def _footprint(
    formats: Iterable[Format], cols: int, cluster: int, activations: Activations
) -> Footprint:
    """Each CTA has the activations of its blocks."""
    cta_blocks = ceil_div(ceil_div(cols, TILE_COLS), cluster)
    return Footprint(
        tile=max(Layout(fmt, 1, cols).tile_nbytes for fmt in formats),
        sums=4 * TILE_ROWS,
        warp_squares=4,
        activations=RECORD_NBYTES[activations] * TILE_UNITS * cta_blocks,
    )
