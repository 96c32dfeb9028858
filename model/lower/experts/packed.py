"""Products of many rows with their experts on Hopper's tensor cores: vectors packed as f16, in the
order of `GroupExperts`' list, so that those of one expert follow each other."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from urdir.driver.kernel import nbytes_of
from urdir.model.lower.arguments import without_none
from urdir.model.lower.experts.layer import MixtureLayer
from urdir.model.lower.experts.products import Product, mixture_products
from urdir.model.memory.norms import NormLayer
from urdir.ptxgen.kernels.experts.gemm import tile_height
from urdir.ptxgen.kernels.experts.group import GroupExperts
from urdir.ptxgen.kernels.linear.epilogue.pack import PackedVectors
from urdir.ptxgen.kernels.linear.pack import Pack
from urdir.ptxgen.kernels.linear.packed_parts import Mixture
from urdir.ptxgen.kernels.linear.products.gemm_wgmma import GemmWgmma
from urdir.ptxgen.kernels.linear.steps import Epilogue
from urdir.ptxgen.kernels.linear.wgmma_choice import any_cut, choose_wgmma
from urdir.ptxgen.spec import KernelSpec
from urdir.ptxgen.weights.packed import GROUP

if TYPE_CHECKING:
    from urdir.driver.memory import Slice
    from urdir.model.lower.registers import Registers
    from urdir.model.lower.sheet import Sheet

#: Pairs of a tile, at least, from as many pairs as experts on: rows of a step choose alike, and
#: products of tiles with few pairs take few vectors. On an H200 a step of qwen3-30b-a3b takes 3.75
#: ms with them and 4.14 without for 64 rows, 3.08 and 3.19 for 32, 2.67 and 2.79 for 24, and as
#: long with either for 16.
_LEAST_HEIGHT = 32
# One object for equal kernels, with its cached properties.
_group = lru_cache(maxsize=64)(GroupExperts)
_pack = lru_cache(maxsize=64)(Pack)


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """Appends products of ``rows`` vectors with their experts to a plan, for a device with ``sms``
    SMs; the registers "expert" and "expert weight" are filled.
    """

    plan: Sheet
    work: Registers
    rows: int
    sms: int

    def append(
        self, label: str, mixture: MixtureLayer, x: Slice, norm: NormLayer | None = None
    ) -> None:
        """``work["expert out"]`` (rows, used, hidden) f32 = the experts' weighted results for x
        (rows, hidden) f32, after a ``norm`` whose factors are in the register "router factor"."""
        tiles = self._tiles(mixture)
        vectors = self._append_lists(label, mixture, tiles, x, norm)
        inner = self._append_up(label, mixture, tiles, vectors)
        down = mixture_products(mixture)[-1]
        kernel = self._product(down, mixture.hidden, tiles)
        self.plan.launch(
            kernel,
            f"{label}_down",
            x=inner,
            tile_of=self.work["expert tiles"],
            pair=self.work["expert pair"],
            # the vectors before all products lie there, too, and are not needed any more
            y=_part(self.work["expert out"], kernel, "y"),
            **without_none(weight=self.work["expert weight"] if down.weighted else None),
            **down.arguments,
        )

    def _tiles(self, mixture: MixtureLayer) -> Mixture:
        experts, used = mixture.selection.experts, mixture.selection.used
        height = tile_height(self.rows, experts, used)
        if self.rows * used >= experts:
            height = max(height, _LEAST_HEIGHT)
        return Mixture(experts, used, height)

    def _append_lists(
        self, label: str, mixture: MixtureLayer, tiles: Mixture, x: Slice, norm: NormLayer | None
    ) -> Slice:
        """Lists of pairs and tiles, and the packed vectors of the pairs."""
        work, weighted = self.work, mixture.weigh_input
        group = _group(self.rows, tiles.experts, tiles.used, tiles.height, GROUP)
        pair, tile_of = work["expert pair"], work["expert tiles"]
        self.plan.launch(
            group,
            f"{label}.group",
            expert=work[mixture.number],
            pair=_part(pair, group, "pair"),
            tile_of=_part(tile_of, group, "tile_of"),
        )
        pack = _pack(
            self.rows,
            mixture.up.cols,
            used=tiles.used,
            places=group.places,
            weighted=weighted,
            factors=norm is not None,
            orders=0 if mixture.up.order is None else tiles.experts,
        )
        vectors = _part(work["expert out"], pack, "y")
        weight = without_none(weight=work["expert weight"] if weighted else None)
        if norm is not None:
            weight |= without_none(next_norm=norm.weight, factor=work["router factor"])
        if (order := mixture.up.order) is not None:
            weight |= {"order": order, "expert": work["expert"]}
        self.plan.launch(pack, f"{label}.pack", x=x, pair=pair, y=vectors, **weight)
        return vectors

    def _append_up(
        self, label: str, mixture: MixtureLayer, tiles: Mixture, vectors: Slice
    ) -> Slice:
        """The activated products, packed in the same order."""
        # the packed vectors are weighted, if the input is
        first = replace(mixture_products(mixture)[0], weighted=False)
        kernel = self._product(first, mixture.width, tiles, PackedVectors())
        inner = _part(self.work["expert gate"], kernel, "y")
        self.plan.launch(
            kernel,
            f"{label}_{first.name}",
            x=vectors,
            tile_of=self.work["expert tiles"],
            y=inner,
            **first.arguments,
        )
        return inner

    def _product(self, product: Product, rows: int, tiles: Mixture, *steps: Epilogue) -> GemmWgmma:
        """With the matrix (rows, in) of each pair's expert, then the steps."""
        fmt, cols, cut = product.matrix.format, product.matrix.cols, any_cut(tiles.height)
        steps = (*product.epilogue, *steps)
        kernel = GemmWgmma.of(fmt, rows, cols, self.rows, cut, *steps, mixture=tiles)
        return choose_wgmma(kernel, self.sms)


def _part(buffer: Slice, kernel: KernelSpec, name: str) -> Slice:
    """What a kernel takes of a buffer."""
    return buffer.slice(0, nbytes_of(kernel, name))
