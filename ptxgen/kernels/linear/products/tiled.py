"""Linear kernels whose weights, of any type, pass through rings of tiles."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.linear.cut import MIN_SLOTS, Cut, CutOptions, TilePart
from urdir.ptxgen.kernels.linear.spec import LinearSpec
from urdir.ptxgen.ptx.architecture import CLUSTERS_SINCE
from urdir.ptxgen.spec import LaunchShape
from urdir.ptxgen.target import since
from urdir.ptxgen.weights.formats import Format
from urdir.ptxgen.weights.grids import ENTRIES, aligned, with_entries


@dataclass(frozen=True)
class TiledSpec(LinearSpec):
    """A linear kernel with the ``options`` of its cut. Raises PtxgenError for an impossible cut."""

    options: CutOptions = field(default_factory=CutOptions)

    #: Tiles that a warp has yet to load when it lets the next launch start. CTAs take a while to
    #: start; if they started earlier, their loads would delay those of this launch. Measured on an
    #: H200, 8B Q4_K_M.
    tiles_left = 1

    #: CTAs that an SM has registers for, where options do not say otherwise.
    resident: ClassVar[int] = 2

    @classmethod
    def of(cls, *fields: Any, **named: Any) -> Self:
        """See `MainLoop.of`; options of the cut are keywords, too."""
        return super().of(*fields, **CutOptions(resident=cls.resident).within(named))

    def recut(self, **changes: Any) -> Self:
        """The product with other options of its cut, and other fields."""
        return replace(self, **self.options.within(changes))

    def __post_init__(self) -> None:
        for name, value in vars(self.options).items():
            if value < 0:
                raise PtxgenError(f"{self.name}: {name} is {value}: 0 chooses by shape")
        super().__post_init__()
        if self.cluster not in (1, 2, 4, 8):
            raise PtxgenError(f"{self.name}: cluster is {self.cluster}: 1, 2, 4 or 8")
        cut, split = self.cut, self.cut.columns.warps
        if not 1 <= split * self.cluster <= cut.columns.blocks:
            parts = f"{split} in each of {self.cluster} CTAs" if self.cluster > 1 else split
            raise PtxgenError(f"{self.name}: split is {parts} of {cut.columns.blocks} blocks")
        if not 1 <= cut.warps <= 32:
            raise PtxgenError(f"{self.name}: {cut.warps} warps: 1 to 32")
        if cut.ring.slots < MIN_SLOTS:
            raise PtxgenError(
                f"{self.name}: two tiles ({cut.ring.tile_nbytes} bytes) of {cut.warps} warps and "
                f"{self.cols} activations are more than the {self.options.shared} bytes of shared "
                "memory"
            )

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.options.cluster

    @property
    def passes(self) -> int:
        """Passes over a CTA's rows."""
        return self.cut.rows.passes

    @property
    def cta_rows(self) -> int:
        """Rows that a CTA finishes in a pass."""
        return self.cut.own_rows

    @property
    def cta_warps(self) -> int:
        """Warps of a CTA."""
        return self.cut.warps

    @property
    def column_warps(self) -> int:
        """Warps of a CTA that share a row, each with a sum of its own."""
        return self.cut.columns.warps

    @property
    def shared_grids(self) -> tuple[Format, ...]:
        """The types whose codebooks' entries are in shared memory."""
        return tuple(fmt for fmt in self.formats if fmt.grid)

    @property
    def grid_entries(self) -> int:
        """Entries of a codebook in shared memory, at most."""
        return ENTRIES

    @property
    def biased_grids(self) -> bool:
        """Whether values of codes are biased."""
        return False

    @property
    def grids_at(self) -> int:
        """Where these entries begin in shared memory."""
        return aligned(self.cut.memory.nbytes)

    @property
    def cut(self) -> Cut:
        """How the launch is cut."""
        raise NotImplementedError

    @property
    def parts(self) -> tuple[TilePart, ...]:
        return self.cut.rows.parts

    @property
    def targets(self) -> tuple[str, ...]:
        return since(CLUSTERS_SINCE) if self.cluster > 1 else super().targets

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(
            grid=(self.cluster * self.cut.rows.clusters, 1, 1),
            block=(32 * self.cut.warps, 1, 1),
            cluster=(self.cluster, 1, 1),
            shared_bytes=max(
                with_entries(self.cut.memory.nbytes, self.shared_grids, self.grid_entries),
                self.options.least_shared,
            ),
            resident=self.options.resident,
            prefers_shared=True,
        )
