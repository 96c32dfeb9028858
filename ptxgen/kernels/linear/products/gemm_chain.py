"""Consecutive products of packed activation vectors by one kernel whose rings of weights run on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.epilogue.activation import Gated
from urdir.ptxgen.kernels.linear.epilogue.norm import BeginNorm
from urdir.ptxgen.kernels.linear.epilogue.pack import PackedVectors, packed_param
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.packed_parts import BANDS
from urdir.ptxgen.kernels.linear.products.gemm_wgmma import GemmWgmma, WgmmaCut
from urdir.ptxgen.kernels.linear.products.packed_memory import PackedMemory
from urdir.ptxgen.kernels.linear.prologue.norm import BegunNorm, begun
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance, ceil_div
from urdir.ptxgen.weights.formats import FORMATS
from urdir.ptxgen.weights.layout import random_weights

#: Warpgroups of a CTA that multiply: each has slots of weights of its own.
WARPGROUPS = 4
#: Looks at a counter before a launch fails: seconds.
POLLS = 1 << 22


@dataclass(frozen=True, slots=True)
class ChainRings:
    """Shared memory that the products of a chain have in common: sums of another CTA's warpgroup,
    slots of weights, activations, barriers, factors of norms. Each product has activations in the
    same place, and then its sums, with barriers of its own: ``x_slots`` of them each, of
    ``x_nbytes`` together."""

    others_nbytes: int
    slots: int
    slot_nbytes: int
    x_nbytes: int
    x_slots: tuple[int, ...]

    @property
    def x_at(self) -> int:
        """Where activations begin."""
        return self.others_nbytes + self.slots * self.slot_nbytes

    @property
    def barriers_at(self) -> int:
        """Where full barriers begin."""
        return self.x_at + self.x_nbytes

    @property
    def barriers(self) -> int:
        """Full ones; as many empty ones follow."""
        return self.slots + sum(self.x_slots)

    @property
    def own_at(self) -> int:
        """Where two barriers of each product begin: of its factors, and of the cluster's sums."""
        return self.barriers_at + 16 * self.barriers

    @property
    def factors_at(self) -> int:
        """Where factors lie."""
        return self.own_at + 16 * len(self.x_slots)


@dataclass(frozen=True, slots=True)
class ChainMemory(PackedMemory):
    """The same for one of the products, number ``place``."""

    rings: ChainRings = ChainRings(0, 0, 0, 0, ())
    place: int = 0

    @property
    def weight_nbytes(self) -> int:
        return self.rings.slot_nbytes

    @property
    def weight_slots(self) -> int:
        return self.rings.slots

    @property
    def weights_at(self) -> int:
        return self.rings.others_nbytes

    @property
    def sums_at(self) -> int:
        return self.rings.x_at

    @property
    def first_x(self) -> int:
        return self.rings.slots + sum(self.rings.x_slots[: self.place])

    @property
    def slots(self) -> int:
        return self.rings.barriers

    @property
    def x_at(self) -> int:
        return self.rings.x_at

    @property
    def barriers_at(self) -> int:
        return self.rings.barriers_at

    @property
    def pairs_at(self) -> int:
        return self.rings.own_at + 16 * self.place

    @property
    def summed_at(self) -> int:
        """Where the barrier of the cluster's sums lies."""
        return self.pairs_at + 8

    @property
    def factors_at(self) -> int:
        return self.rings.factors_at

    @property
    def nbytes(self) -> int:
        return self.rings.factors_at + 4 * self.cut.vectors + 16


@dataclass(frozen=True)
class ChainedProduct(GemmWgmma):
    """One of the products of a chain, with the memory that all have."""

    rings: ChainRings = ChainRings(0, 0, 0, 0, ())
    place: int = 0
    sevens: bool = False

    is_chained = True

    @cached_property
    def memory(self) -> PackedMemory:
        return ChainMemory(self.cut, self.parts, rings=self.rings, place=self.place)

    @property
    def ctas(self) -> int:
        """CTAs that work on it."""
        if self.sevens:
            return self.tiling.row_ctas * self.cut.row_groups // 7 * 2
        return self.cut.cluster * self.tiling.row_ctas

    @property
    def narrow(self) -> ChainedProduct:
        """The same of half of the vectors."""
        cut = dataclasses.replace(self.cut, vectors=self.cut.vectors // 2)
        return dataclasses.replace(self, cut=cut)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sevens and (self.layout.row_tiles % 2 or self.tiling.row_ctas * 4 % 7 or self.tiling.groups % 2):
            raise PtxgenError(f"gemm_chain: {self.cols} columns in {self.cut}")


@dataclass(frozen=True)
class GemmChain(KernelSpec):
    """Consecutive ``products`` of packed activation vectors, each of what the one before leaves:
    their CTAs stay, so that weights of the next are copied while a product ends.

    Every product has four warpgroups that multiply, as row groups or splits; all of them have the
    same vectors in one tile. Each has ``stages`` slots of weights of its own, which go on from
    product to product. CTAs count in ``counts`` (products,) u32 what they have stored; these are
    zeros before and after a launch. All CTAs must be on the device at once.

    Parameters are those of the products, each with its number: what a product takes of those before
    (x, x_summary, residual) is none.
    """

    products: tuple[GemmWgmma, ...]
    stages: int
    sevens: bool = False
    stamps: bool = False
    warms: bool = True

    name = "gemm_chain"

    def __post_init__(self) -> None:
        super().__post_init__()
        if len({product.batch for product in self.products}) != 1:
            raise PtxgenError("gemm_chain: products of different vectors")
        for product in self.products:
            if product.cut.warpgroups != WARPGROUPS or product.tiling.tiles != 1:
                raise PtxgenError(f"gemm_chain: {product.cut}")
        _ = self.chained

    @property
    def targets(self) -> tuple[str, ...]:
        return ("sm_90a",)

    @cached_property
    def rings(self) -> ChainRings:
        """What lies in shared memory."""
        cuts = [product.cut for product in self.products]
        strides = [part.stride for product in self.products for part in product.parts]
        sums = [p.cut.splits * p.memory.split_nbytes for p in self.products if not p.steps.gated]
        return ChainRings(
            128 * cuts[0].vectors,
            WARPGROUPS * self.stages,
            max(ceil_div(BANDS * stride, 128) * 128 for stride in strides),
            max([*(cut.splits * cut.x_stages * cut.x_nbytes for cut in cuts), *sums]) + 127 & -128,
            tuple(cut.splits * cut.x_stages for cut in cuts),
        )

    @cached_property
    def chained(self) -> tuple[ChainedProduct, ...]:
        """The products, with the memory that they share."""
        return tuple(
            ChainedProduct(
                **_fields(product),
                rings=self.rings,
                place=place,
                sevens=self.sevens and product.steps.gated,
            )
            for place, product in enumerate(self.products)
        )

    @cached_property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return max(product.cut.cluster for product in self.products)

    @cached_property
    def first(self) -> ChainedProduct:
        """The first product."""
        return self.chained[0]

    def source(self, place: int, name: str) -> tuple[int, str] | None:
        """Of which earlier product a product takes a parameter, and which; None: of none."""
        if place == 0:
            return None
        before = self.products[place - 1]
        if name == "x":
            return place - 1, packed_param(before)
        if name == "x_summary":
            return place - 1, "y_summary"
        adds = [p for p in range(place) if self.products[p].steps.has(Residual)]
        return (adds[-1], "y") if name == "residual" and adds else None

    def registers_of(self, place: int) -> list[tuple[str, str]]:
        """The names that a product has for its parameters, and those in the kernel."""
        pairs = []
        for param in self.products[place].params:
            of, name = self.source(place, param.name) or (place, param.name)
            pairs.append((param.name, f"{name}_{of}"))
        return pairs

    @property
    def params(self) -> tuple[Param, ...]:
        params = []
        for place, product in enumerate(self.products):
            for param in product.params:
                if self.source(place, param.name) is None:
                    shape = product.shape_of(param)
                    params.append(Param(f"{param.name}_{place}", param.dtype, shape, param.access))
        params.append(Param("counts", "u32", (len(self.products),), Access.INOUT))
        if self.stamps:
            size = self.launch_shape.grid[0], len(self.products), 8
            params.append(Param("stamps", "u64", size, Access.OUT))
        return tuple(params)

    @property
    def launch_shape(self) -> LaunchShape:
        ctas = ceil_div(max(p.ctas for p in self.chained), self.cluster) * self.cluster
        return LaunchShape(
            grid=(ctas, 1, 1),
            block=(self.products[0].cut.threads, 1, 1),
            cluster=(self.cluster, 1, 1),
            shared_bytes=max(p.grids.end for p in self.chained),
            resident=1,
        )

    @property
    def tolerance(self) -> Tolerance:
        return Tolerance(rtol=sum(2 * p.tolerance.rtol for p in self.products))

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        inputs: dict[str, Any] = {"counts": np.zeros(len(self.products), np.uint32)}
        for place, product in enumerate(self.products):
            made = product.make_inputs(rng)
            for part in product.parts:
                for name in product.weights_of(part):
                    made[name] = random_weights(part.layout, rng, product.cols**-0.5)
            for name, value in made.items():
                if self.source(place, name) is None:
                    inputs[f"{name}_{place}"] = value
        names = {p.name for p in self.params if p.access is not Access.OUT}
        return {name: value for name, value in inputs.items() if name in names}

    def reference(self, **inputs: Any) -> dict[str, Array]:
        made: dict[str, Array] = {"counts": inputs["counts"]}
        for place, product in enumerate(self.products):
            given = {}
            for name, of in self.registers_of(place):
                if of in made or of in inputs:
                    given[name] = made[of] if of in made else inputs[of]
            for name, value in product.reference(**given).items():
                made[f"{name}_{place}"] = value
        return made

    def flops(self) -> int:
        return sum(product.flops() for product in self.products)

    @classmethod
    def examples(cls) -> Mapping[str, GemmChain]:
        q4_k, q6_k = FORMATS["Q4_K"], FORMATS["Q6_K"]
        rms, packed = begun(Norm("rms", 1e-5)), PackedVectors()
        adds = (Residual(), BeginNorm(), packed)
        wide = WgmmaCut(4, 16, 1, 1, 1, 6, 4)
        far = WgmmaCut(1, 16, 4, 2, 1, 3, 2)
        near = WgmmaCut(1, 16, 4, 1, 1, 3, 2)
        up = GemmWgmma.of(q4_k, 2048, 1024, 13, wide, Gated(), packed)
        o = GemmWgmma.of(q4_k, 1024, 2048, 13, far, *adds)
        normed = GemmWgmma.of(q4_k, 2048, 1024, 13, wide, rms, Gated(), packed)
        down = GemmWgmma.of(q6_k, 1024, 2048, 13, far, Residual())
        begins = GemmWgmma.of(q6_k, 1024, 2048, 13, far, *adds)
        others = ((q4_k, 300), (q6_k, 300))
        qkv = GemmWgmma.of(q4_k, 1000, 1024, 13, near, rms, others=others)
        seven = GemmWgmma.of(q4_k, 1792, 1024, 13, wide, Gated(), packed)
        after = GemmWgmma.of(q6_k, 1024, 1792, 13, dataclasses.replace(near, x_slices=4, x_stages=1), Residual())
        return {
            "up, down": cls((up, down), 2),
            "layer": cls((o, normed, begins, qkv), 3),
            "seven": cls((seven, dataclasses.replace(after, cut=WgmmaCut(2, 16, 2, 2, 1, 3, 2))), 3, True),
        }


def _fields(product: GemmWgmma) -> dict[str, Any]:
    return {f.name: getattr(product, f.name) for f in dataclasses.fields(GemmWgmma)}
