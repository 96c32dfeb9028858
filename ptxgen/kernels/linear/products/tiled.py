"""Linear kernels whose weights, of any type, pass through rings of tiles."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Self

from urdir.ptxgen.kernels.linear.cut import Cut, CutOptions, TilePart
from urdir.ptxgen.kernels.linear.prologue.packed import PackedInput
from urdir.ptxgen.kernels.linear.spec import LinearSpec
from urdir.ptxgen.ptx.architecture import CLUSTERS_SINCE
from urdir.ptxgen.spec import LaunchShape
from urdir.ptxgen.target import since
from urdir.ptxgen.weights.grids import SharedGrids


@dataclass(frozen=True)
class TiledSpec(LinearSpec):
    """A linear kernel with the ``options`` of its cut. Raises PtxgenError for an impossible cut."""

    options: CutOptions = field(default_factory=CutOptions)

    #: Tiles that a warp has yet to load when it lets the next launch start. CTAs take a while to
    #: start; if they started earlier, their loads would delay those of this launch. Measured on an
    #: H200, 8B Q4_K_M.
    tiles_left = 1
    #: Whether it does so before its own wait.
    starts_next = False

    #: CTAs that an SM has registers for, where options do not say otherwise.
    resident: ClassVar[int] = 2

    @classmethod
    def of(cls, *fields: Any, **named: Any) -> Self:
        """See `Product.of`; options of the cut are keywords, too."""
        return super().of(*fields, **CutOptions(resident=cls.resident).within(named))

    def __post_init__(self) -> None:
        self.options.check(self.name)
        super().__post_init__()
        self.cut.check(self.name, self.options)

    @property
    def cluster(self) -> int:
        """CTAs of a cluster."""
        return self.options.cluster

    @cached_property
    def grids(self) -> SharedGrids:
        """Codebooks in shared memory."""
        is_packed = self.steps.has(PackedInput)
        return SharedGrids.of(self.formats, self.cut.memory.nbytes, biased=is_packed)

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
            shared_bytes=max(self.grids.end, self.options.least_shared),
            resident=self.options.resident,
            prefers_shared=True,
        )
