"""Deferred residual adds: x is the output of a block, and the product computes and stores the
stream = before + the output of the block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.exchange.gives import SumOfRanks
from urdir.ptxgen.kernels.linear.prologue.norm import norm_params, norm_text
from urdir.ptxgen.kernels.linear.steps import Product, Prologue, Reference
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.spec import Access, Array, Param

#: Registers of a thread except the arrays of the stream and of norms, with a margin; and further
#: registers for words of other ranks.
OTHER_REGISTERS, WORD_REGISTERS = 56, 16


class DeferredAdd(Prologue):
    """Base: the stream (1, cols) f32 is stored and multiplied, ``before`` (1, cols) f32 plus what
    the block made of x; all of it times ``stream_scale`` (1,) f32 if ``scaled``. x and ``before``
    are other buffers than the stream."""

    __slots__ = ()

    scaled: bool
    registers: ClassVar[int] = OTHER_REGISTERS

    @property
    def warp_sums(self) -> int:
        return 2

    def params(self, product: Product) -> tuple[Param, ...]:
        row = ("batch", "cols")
        return Param.given(
            Param("before", "f32", row, Access.IN),
            *self.weights,
            self.scaled and Param("stream_scale", "f32", (1,), Access.IN),
            Param("stream", "f32", row, Access.OUT),
        )

    @property
    def weights(self) -> tuple[Param, ...]:
        """Parameters of what happens to x before it is added."""
        return ()

    def check(self, product: Product) -> None:
        if product.cluster > 1:
            raise PtxgenError(f"{product.name}: {self.stem} is for a cluster of 1")

    def made(self, x: Array, of: Reference) -> Array:
        """What is added, f64."""
        raise NotImplementedError

    def apply(self, x: Array, of: Reference) -> Array:
        made = self.made(x, of)
        stream: Array = (of.inputs["before"] + made) * of.inputs.get("stream_scale", 1.0)
        of.outputs["stream"] = stream.astype(np.float32)
        return stream


@dataclass(frozen=True, slots=True)
class NormedAdd(DeferredAdd):
    """The norm of x is added, with weights ``post_norm`` and ``post_norm_bias`` (cols,) f32."""

    norm: Norm
    scaled: bool = False

    stem = "normed_add"

    @property
    def vectors(self) -> int:
        return self.norm.weight + self.norm.bias

    @property
    def text(self) -> str:
        return norm_text(self.norm, "post_norm")

    @property
    def weights(self) -> tuple[Param, ...]:
        return norm_params(self.norm, "post_norm")

    def made(self, x: Array, of: Reference) -> Array:
        return self.norm(x, of.inputs.get("post_norm"), of.inputs.get("post_norm_bias"))


@dataclass(frozen=True, slots=True)
class RankAdd(DeferredAdd):
    """The sum of the ranks' x is added, in the order of the ranks (`SumOfRanks`)."""

    ranks: SumOfRanks
    scaled: bool = False

    stem = "rank_add"
    registers = OTHER_REGISTERS + WORD_REGISTERS

    @property
    def text(self) -> str:
        return "the sum of the ranks' x"

    def check(self, product: Product) -> None:
        DeferredAdd.check(self, product)
        self.ranks.check(product.name, product.cols)

    def params(self, product: Product) -> tuple[Param, ...]:
        return DeferredAdd.params(self, product) + self.ranks.params

    def make_inputs(self, product: Product, rng: np.random.Generator) -> dict[str, Any]:
        return self.ranks.make_inputs(product.cols, rng)

    def bytes_moved(self, product: Product) -> int:
        return 2 * 4 * product.cols + self.ranks.bytes_moved(product.cols)

    def made(self, x: Array, of: Reference) -> Array:
        of.outputs.update(self.ranks.left(of.product.cols, dict(of.inputs)))
        return self.ranks.total(x.reshape(-1), dict(of.inputs))
