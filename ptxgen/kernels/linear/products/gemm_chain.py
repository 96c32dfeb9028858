"""Consecutive products of packed activation vectors, by CTAs whose rings of weights run on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.epilogue.activation import Gated
from urdir.ptxgen.kernels.linear.epilogue.norm import BeginNorm
from urdir.ptxgen.kernels.linear.epilogue.pack import PackedVectors, packed_param
from urdir.ptxgen.kernels.linear.epilogue.residual import Residual
from urdir.ptxgen.kernels.linear.packed_parts import BANDS
from urdir.ptxgen.kernels.linear.products.chain_memory import NO_RINGS, ChainMemory, ChainRings
from urdir.ptxgen.kernels.linear.products.gemm_wgmma import GemmWgmma, WgmmaCut
from urdir.ptxgen.kernels.linear.products.packed_memory import PackedMemory
from urdir.ptxgen.kernels.linear.prologue.norm import BegunNorm, begun
from urdir.ptxgen.kernels.norm import Norm
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param, Tolerance, ceil_div
from urdir.ptxgen.weights.formats import FORMATS
from urdir.ptxgen.weights.layout import random_weights

#: Warpgroups of a CTA that multiply, each with slots of weights of its own; the steps that products
#: may have; row groups that a cluster of two has of a product that `shares_last`.
WARPGROUPS = 4
STEPS = (BegunNorm, Gated, Residual, BeginNorm, PackedVectors)
SEVEN = 7


@dataclass(frozen=True)
class ChainedProduct(GemmWgmma):
    """Product number ``place`` of a chain, with the memory that all have.

    ``shares_last``: of a gated product a cluster of two CTAs has seven row groups: three each, and
    of the last one each multiplies a half of the columns and makes y of a half of the vectors. So
    448 row groups (a model of 8B) are on 128 SMs in place of 112.
    """

    rings: ChainRings = NO_RINGS
    place: int = 0
    shares_last: bool = False

    is_chained = True

    @cached_property
    def memory(self) -> PackedMemory:
        return ChainMemory(self.cut, self.parts, rings=self.rings, place=self.place)

    @property
    def ctas(self) -> int:
        """CTAs that work on it."""
        if self.shares_last:
            return self.tiling.row_ctas * WARPGROUPS // SEVEN * 2
        return self.cut.cluster * self.tiling.row_ctas


@dataclass(frozen=True)
class GemmChain(KernelSpec):
    """Consecutive ``products`` of packed activation vectors, each of what the one before leaves
    (`ChainedProduct`): CTAs stay, so that weights of the next product are copied while one ends.

    Four warpgroups multiply, as row groups or as splits of one. Each has ``stages`` slots of
    weights, which go on from product to product. CTAs count in ``counts`` (products,) u32 what they
    have stored of each product; the last one clears it: zeros before and after a launch. All CTAs
    must be on the device at once.

    Parameters are those of the products with their numbers. What a product takes of those before is
    none: its x and x_summary, and a residual that is an earlier y.

    ``shares_last``: see `ChainedProduct`; of all gated products.
    """

    products: tuple[GemmWgmma, ...]
    stages: int
    shares_last: bool = False

    name = "gemm_chain"

    def __post_init__(self) -> None:
        super().__post_init__()
        if len({(p.batch, p.cut.vectors) for p in self.products}) != 1:
            raise PtxgenError("gemm_chain: products of different vectors")
        for product in self.products:
            cut, known = product.cut, all(type(step) in STEPS for step in product.steps)
            if not known or cut.warpgroups != WARPGROUPS or product.tiling.tiles != 1:
                raise PtxgenError(f"gemm_chain: {product.steps} in {cut}")
            if product.steps.gated and (cut.row_groups, cut.cluster) != (WARPGROUPS, 1):
                raise PtxgenError(f"gemm_chain: a gated product in {cut}")
        for before, after in zip(self.products, self.products[1:], strict=False):
            if not before.packs or before.rows != after.cols:
                raise PtxgenError(f"gemm_chain: {after.cols} columns of what {before} leaves")
        for product in self.chained:
            whole = (product.layout.row_tiles, product.tiling.groups)
            shared = WARPGROUPS * product.tiling.row_ctas % SEVEN or any(n % 2 for n in whole)
            if product.shares_last and shared:
                raise PtxgenError(f"gemm_chain: {product} does not divide by seven and two")

    @property
    def targets(self) -> tuple[str, ...]:
        return ("sm_90a",)

    @cached_property
    def rings(self) -> ChainRings:
        """What lies in shared memory."""
        cuts = [product.cut for product in self.products]
        strides = [part.stride for product in self.products for part in product.parts]
        sums = [p.cut.splits * p.memory.split_nbytes for p in self.products if not p.steps.gated]
        x_nbytes = max([*(cut.splits * cut.x_stages * cut.x_nbytes for cut in cuts), *sums])
        return ChainRings(
            cuts[0].vectors,
            WARPGROUPS * self.stages,
            max(ceil_div(BANDS * stride, 128) * 128 for stride in strides),
            ceil_div(x_nbytes, 128) * 128,
            tuple(cut.splits * cut.x_stages for cut in cuts),
        )

    @cached_property
    def chained(self) -> tuple[ChainedProduct, ...]:
        """The products, with the memory that they share."""
        return tuple(
            ChainedProduct(
                **{field.name: getattr(product, field.name) for field in fields(GemmWgmma)},
                rings=self.rings,
                place=place,
                shares_last=self.shares_last and product.steps.gated,
            )
            for place, product in enumerate(self.products)
        )

    def half(self, place: int) -> ChainedProduct:
        """A product of half of the vectors."""
        product = self.chained[place]
        return replace(product, cut=replace(product.cut, vectors=product.cut.vectors // 2))

    @cached_property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return max(2 if p.shares_last else p.cut.cluster for p in self.chained)

    def source(self, place: int, name: str) -> tuple[int, str] | None:
        """Of which earlier product a product takes a parameter, and which; None: of none."""
        if place == 0:
            return None
        if name == "x":
            return place - 1, packed_param(self.products[place - 1])
        if name == "x_summary":
            return place - 1, "y_summary"
        adds = [p for p in range(place) if self.products[p].steps.has(Residual)]
        return (adds[-1], "y") if name == "residual" and adds else None

    def registers_of(self, place: int, role: str = "") -> list[tuple[str, str]]:
        """The names that a product has for its parameters, and those in the kernel: all, or what
        warps of a role take (`_taken`)."""
        pairs = []
        names = _taken(self.products[place], role) if role else ()
        for param in self.products[place].params:
            if role and param.name not in names:
                continue
            of, name = self.source(place, param.name) or (place, param.name)
            pairs.append((param.name, f"{name}_{of}"))
        return pairs

    @property
    def params(self) -> tuple[Param, ...]:
        params = [
            Param(f"{param.name}_{place}", param.dtype, product.shape_of(param), param.access)
            for place, product in enumerate(self.products)
            for param in product.params
            if self.source(place, param.name) is None
        ]
        return (*params, Param("counts", "u32", (len(self.products),), Access.INOUT))

    @property
    def launch_shape(self) -> LaunchShape:
        ctas = ceil_div(max(p.ctas for p in self.chained), self.cluster) * self.cluster
        return LaunchShape(
            grid=(ctas, 1, 1),
            block=(self.products[0].cut.threads, 1, 1),
            cluster=(self.cluster, 1, 1),
            shared_bytes=self.rings.nbytes,
            resident=1,
        )

    @property
    def tolerance(self) -> Tolerance:
        """Errors of the products add up; each rounds what it leaves once more."""
        return Tolerance(rtol=sum(2 * p.tolerance.rtol for p in self.products))

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        inputs: dict[str, Any] = {"counts": np.zeros(len(self.products), np.uint32)}
        for place, product in enumerate(self.products):
            made = product.make_inputs(rng)
            # so that values stay about as large as they were
            for part in product.parts:
                for name in product.weights_of(part):
                    made[name] = random_weights(part.layout, rng, product.cols**-0.5)
            inputs |= {f"{name}_{place}": value for name, value in made.items()}
        names = {param.name for param in self.params if param.access is not Access.OUT}
        return {name: value for name, value in inputs.items() if name in names}

    def reference(self, **inputs: Any) -> dict[str, Array]:
        made: dict[str, Array] = {"counts": inputs["counts"]}
        for place, product in enumerate(self.products):
            known = {**inputs, **made}
            names = [pair for pair in self.registers_of(place) if pair[1] in known]
            outputs = product.reference(**{name: known[of] for name, of in names})
            made |= {f"{name}_{place}": value for name, value in outputs.items()}
        return made

    def flops(self) -> int:
        return sum(product.flops() for product in self.products)

    @classmethod
    def examples(cls) -> Mapping[str, GemmChain]:
        """Small ones: all CTAs are on four SMs."""
        q4_k, q6_k, q8 = (FORMATS[n] for n in ("Q4_K", "Q6_K", "Q8_0"))
        rms, packed = begun(Norm("rms", 1e-5)), PackedVectors()
        adds = (Residual(), BeginNorm(), packed)
        wide, far = WgmmaCut(4, 16, 1, 1, 1, 3, 4), WgmmaCut(1, 16, 4, 2, 1, 3, 2)
        up = GemmWgmma.of(q4_k, 512, 512, 13, wide, Gated(), packed)
        down = GemmWgmma.of(q6_k, 128, 512, 13, far, Residual())
        of = [WgmmaCut(4, 40, 1, 1, 1, 2, 4), WgmmaCut(1, 40, 4, 1, 1, 2, 1)]
        o = GemmWgmma.of(q6_k, 256, 1280, 37, of[1], *adds)
        normed = GemmWgmma.of(q4_k, 256, 256, 37, of[0], rms, Gated(), packed)
        begins = GemmWgmma.of(q8, 256, 256, 37, of[1], *adds)
        others = ((q4_k, 40), (q6_k, 33))
        qkv = GemmWgmma.of(q4_k, 100, 256, 37, of[1], rms, others=others)
        return {
            "up, down": cls((up, down), 3),
            "a layer": cls((o, normed, begins, qkv), 2),
        }


def _taken(product: GemmWgmma, role: str) -> set[str]:
    """The parameters that warps take which copy "x" or "weights", make "factors" of norms and load
    for the "ends", or multiply and make these."""
    weights = {name for part in product.parts for name in product.weights_of(part)}
    factors = {"x_summary"} | ({"residual", "next_norm"} if product.steps.has(BeginNorm) else set())
    powers = any(part.layout.format.has_powers for part in product.parts)
    ends = {param.name for param in product.params} - {"x", "x_summary"}
    ends -= set() if powers else weights
    return {"x": {"x"}, "weights": weights, "factors": factors, "ends": ends}[role]
