"""Copies of experts into the slots of a cache."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from urdir.ptxgen.errors import PtxgenError
from urdir.ptxgen.kernels.experts.place import copies_words
from urdir.ptxgen.spec import Access, Array, KernelSpec, LaunchShape, Param

#: Threads of a CTA.
THREADS = 512


@dataclass(frozen=True)
class FetchExperts(KernelSpec):
    """Copy the experts of a list of ``copies`` (`PlaceExperts`), up to ``most``, to their slots.

    An expert has ``parts``: so many bytes of each source (experts, bytes) go to the target
    (slots, bytes). Sources may be host memory that the device has mapped. Other slots stay as they
    are. Raises PtxgenError unless parts are multiples of 16 bytes.
    """

    experts: int
    slots: int
    most: int
    parts: tuple[int, ...]
    ctas: int

    name = "fetch_experts"
    template = ("urdir.templates", "experts/fetch.ptx.j2")

    def __post_init__(self) -> None:
        if not self.parts or any(part < 16 or part % 16 for part in self.parts):
            raise PtxgenError(f"fetch_experts: parts of {self.parts} bytes: multiples of 16")
        if not 1 <= self.most <= self.slots <= self.experts or self.ctas < 1:
            raise PtxgenError(
                f"fetch_experts: {self.most} of {self.slots} slots for {self.experts} experts, "
                f"{self.ctas} CTAs: at least one, no more than slots and experts"
            )

    @property
    def params(self) -> tuple[Param, ...]:
        copies = Param("copies", "u32", (copies_words(self.most),), Access.IN)
        sources = (
            Param(f"source{i}", "u8", (self.experts, part), Access.IN)
            for i, part in enumerate(self.parts)
        )
        targets = (
            Param(f"target{i}", "u8", (self.slots, part), Access.INOUT)
            for i, part in enumerate(self.parts)
        )
        return (copies, *sources, *targets)

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(self.ctas, 1, 1), block=(THREADS, 1, 1))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        copies = inputs["copies"]
        pairs = copies[4 : 4 + 2 * copies[0]].reshape(-1, 2)
        found = {}
        for i in range(len(self.parts)):
            found[f"target{i}"] = inputs[f"target{i}"].copy()
            found[f"target{i}"][pairs[:, 1]] = inputs[f"source{i}"][pairs[:, 0]]
        return found

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        copies = np.zeros(copies_words(self.most), np.uint32)
        copies[0] = rng.integers(0, self.most, endpoint=True)
        listed = copies[4 : 4 + 2 * self.most].reshape(-1, 2)
        listed[:, 0] = rng.permutation(self.experts)[: self.most]
        listed[:, 1] = rng.permutation(self.slots)[: self.most]
        inputs: dict[str, Any] = {"copies": copies}
        for i, part in enumerate(self.parts):
            for name, count in (("source", self.experts), ("target", self.slots)):
                inputs[f"{name}{i}"] = rng.integers(0, 256, (count, part), np.uint8)
        return inputs

    @classmethod
    def examples(cls) -> Mapping[str, FetchExperts]:
        return {
            "one": cls(1, 1, 1, (16,), 1),
            "three parts": cls(7, 5, 3, (48, 4096, 20016), 2),
            "more than a round": cls(3, 2, 2, (40000,), 1),
        }

    def bytes_moved(self) -> int:
        """Those of one expert, read and written."""
        return 2 * sum(self.parts)

    def flops(self) -> int:
        return sum(self.parts) // 16
