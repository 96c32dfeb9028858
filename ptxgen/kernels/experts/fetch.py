"""Copies of experts into the slots of a cache, and to one place for all."""

from __future__ import annotations

from collections.abc import Iterator
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

    An expert has ``parts``: this many bytes of each source (experts, bytes) go to the target
    (slots, bytes). Sources may be host memory that the device has mapped. Other slots stay as they
    are.

    With ``tails`` the list is one that `gathers`, and the first parts, one for each tail, are
    gathered: those of all listed experts are copied to ``whole`` (experts, bytes) too, from
    their slots if they had one, and ``tail`` (bytes) behind all experts. Others there stay as they
    are.

    Raises PtxgenError unless parts and tails are multiples of 16 bytes.
    """

    experts: int
    slots: int
    most: int
    parts: tuple[int, ...]
    ctas: int
    tails: tuple[int, ...] = ()

    name = "fetch_experts"

    def __post_init__(self) -> None:
        if not self.parts or any(part < 16 or part % 16 for part in self.parts):
            raise PtxgenError(f"fetch_experts: parts of {self.parts} bytes: multiples of 16")
        if len(self.tails) > len(self.parts) or any(tail < 0 or tail % 16 for tail in self.tails):
            raise PtxgenError(
                f"fetch_experts: {self.tails} bytes behind {len(self.parts)} parts: multiples of "
                "16, no more than parts"
            )
        most_slots = self.experts if self.tails else self.slots
        if not 1 <= self.slots <= self.experts or not 1 <= self.most <= most_slots:
            raise PtxgenError(
                f"fetch_experts: {self.most} of {self.slots} slots for {self.experts} experts: "
                "at least one, no more than slots and experts"
            )
        if self.ctas < 1:
            raise PtxgenError(f"fetch_experts: {self.ctas} CTAs: at least one")

    @property
    def gathers(self) -> bool:
        """Whether experts are copied to one place, too."""
        return bool(self.tails)

    @property
    def second_list(self) -> int:
        """Where the list of experts that had a slot begins, in bytes."""
        return 4 * copies_words(self.most)

    @property
    def params(self) -> tuple[Param, ...]:
        words = copies_words(self.most, self.gathers)
        return (Param("copies", "u32", (words,), Access.IN), *self._parts())

    def _parts(self) -> Iterator[Param]:
        for i, part in enumerate(self.parts):
            yield Param(f"source{i}", "u8", (self.experts, part), Access.IN)
        for i, part in enumerate(self.parts):
            yield Param(f"target{i}", "u8", (self.slots, part), Access.INOUT)
        for i, tail in enumerate(self.tails):
            nbytes = self.experts * self.parts[i] + tail
            yield Param(f"whole{i}", "u8", (nbytes,), Access.INOUT)
            if tail:
                yield Param(f"tail{i}", "u8", (tail,), Access.IN)

    @property
    def launch_shape(self) -> LaunchShape:
        return LaunchShape(grid=(self.ctas, 2 if self.gathers else 1, 1), block=(THREADS, 1, 1))

    def reference(self, **inputs: Any) -> dict[str, Array]:
        copies = inputs["copies"]
        pairs = copies[4 : 4 + 2 * copies[0]].reshape(-1, 2)
        placed = pairs[pairs[:, 1] < self.slots]
        found = {}
        for i, part in enumerate(self.parts):
            experts = inputs[f"source{i}"]
            target = found[f"target{i}"] = inputs[f"target{i}"].copy()
            target[placed[:, 1]] = experts[placed[:, 0]]
            if i < len(self.tails):
                whole = found[f"whole{i}"] = inputs[f"whole{i}"].copy()
                gathered = whole[: self.experts * part].reshape(self.experts, part)
                gathered[pairs[:, 0]] = experts[pairs[:, 0]]
                had = copies[self.second_list // 4 :][: 2 * copies[1]].reshape(-1, 2)
                gathered[had[:, 0]] = target[had[:, 1]]
                if self.tails[i]:
                    whole[self.experts * part :] = inputs[f"tail{i}"]
        return found

    def make_inputs(self, rng: np.random.Generator) -> dict[str, Any]:
        """Bytes of slots are others than those of sources, to show where they come from."""
        copies = np.zeros(copies_words(self.most, self.gathers), np.uint32)
        copies[0] = rng.integers(0, self.most, endpoint=True)
        first = copies[4 : 4 + 2 * self.most].reshape(-1, 2)
        first[:, 0] = rng.permutation(self.experts)[: self.most]
        first[: self.slots, 1] = rng.permutation(self.slots)[: self.most]
        first[self.slots :, 1] = self.slots
        if self.gathers:  # some of the slots go to experts of the first list, the rest had one
            free, others = rng.integers(0, self.slots, endpoint=True), first[copies[0] :, 0]
            had = np.setdiff1d(np.arange(self.slots), first[:free, 1])[: len(others)]
            first[free:, 1] = self.slots
            copies[1] = len(had)
            second = copies[self.second_list // 4 :][: 2 * len(had)].reshape(-1, 2)
            second[:] = np.stack([others[: len(had)], had], axis=1)
        inputs: dict[str, Any] = {"copies": copies}
        for param in self._parts():
            shape = [of if isinstance(of, int) else getattr(self, of) for of in param.shape]
            inputs[param.name] = rng.integers(0, 256, shape, np.uint8)
        return inputs

    @classmethod
    def examples(cls) -> dict[str, FetchExperts]:
        return {
            "one": cls(1, 1, 1, (16,), 1),
            "three parts": cls(7, 5, 3, (48, 4096, 20016), 2),
            "more than a round": cls(3, 2, 2, (40000,), 1),
            "gathered": cls(23, 5, 19, (48, 20016, 4096), 2, (32, 0)),
            "gathered in rounds": cls(5, 2, 4, (40000,), 1, (40064,)),
        }

    def bytes_moved(self) -> int:
        """Those of one expert, read and written."""
        return 2 * sum(self.parts)

    def flops(self) -> int:
        return sum(self.parts) // 16
