"""Vector clocks of warps: whether one of two accesses is known to precede the other.

Every warp counts epochs and begins a new one whenever others may learn of its accesses. A warp
knows, for each other warp, the last epoch that is ordered before its own next access. Within a CTA
that is a table, between CTAs a sparse one: few warps ever meet another CTA's.

What fence.proxy.async made visible to asynchronous copies and wgmma is counted in the same way, and
is passed on by the same releases and acquires.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

#: Known epochs of the warps of some CTAs: CTA -> (warps,) int32; under ~CTA those visible to
#: asynchronous accesses.
Knowledge = dict[int, Array]


def join(into: Knowledge, other: Knowledge) -> None:
    """Merge the knowledge of ``other``."""
    for cta, epochs in other.items():
        into[cta] = np.maximum(into[cta], epochs) if cta in into else epochs.copy()


class Clocks:
    """Epochs and knowledge of all warps of a launch, numbered CTA by CTA."""

    def __init__(self, ctas: int, warps: int) -> None:
        self.warps = warps
        #: The current epoch of each warp.
        self.now: Array = np.ones(ctas * warps, np.int32)
        self._near: Array = np.zeros((ctas, warps, warps), np.int32)
        self._near_fenced: Array = np.zeros((ctas, warps, warps), np.int32)
        self._far: dict[int, Knowledge] = {}

    def known(self, warp: Array, other: Array) -> Array:
        """The last epoch of each ``other`` warp that precedes each ``warp``."""
        return self._epochs(self._near, warp, other, is_fenced=False)

    def fenced(self, warp: Array, other: Array) -> Array:
        """The last epoch of each ``other`` warp visible to asynchronous accesses of each
        ``warp``."""
        return self._epochs(self._near_fenced, warp, other, is_fenced=True)

    def _epochs(self, near: Array, warp: Array, other: Array, is_fenced: bool) -> Array:
        cta, at = np.divmod(other, self.warps)
        own, place = np.divmod(warp, self.warps)
        epochs: Array = near[own, place, at]
        foreign = own != cta
        epochs[foreign] = 0
        for one in np.unique(warp[foreign]).tolist() if self._far else ():
            for home, far in self._far.get(one, {}).items():
                some = foreign & (warp == one) & (cta == (~home if is_fenced else home))
                epochs[some] = far[at[some]]
        return epochs

    def converged(self, warp: int) -> int:
        """The epoch of a warp's last convergence."""
        cta, at = divmod(warp, self.warps)
        return int(self._near[cta, at, at])

    def fence(self, warp: int, is_whole: bool) -> None:
        """fence.proxy.async: asynchronous accesses see what the warp knows, and its own accesses if
        all lanes that wrote take part."""
        cta, at = divmod(warp, self.warps)
        seen = self._near[cta, at].copy()
        if is_whole:
            seen[at] = self.now[warp]
            self.now[warp] += 1
        np.maximum(self._near_fenced[cta, at], seen, out=self._near_fenced[cta, at])
        far = self._far.get(warp, {})
        join(far, {~home: epochs for home, epochs in far.items() if home >= 0})

    def converge(self, warps: Array) -> None:
        """The lanes of each of these warps are ordered (bar.warp.sync)."""
        cta, at = np.divmod(warps, self.warps)
        self._near[cta, at, at] = self.now[warps]
        self.now[warps] += 1

    def meet(self, ctas: Array) -> None:
        """All warps of these CTAs meet at a barrier."""
        warps = (ctas[:, None] * self.warps + np.arange(self.warps)).reshape(-1)
        self.converge(warps)
        for near in (self._near, self._near_fenced):
            near[ctas] = near[ctas].max(axis=1, keepdims=True)
        for cta in ctas.tolist() if self._far else ():
            members = range(cta * self.warps, (cta + 1) * self.warps)
            together: Knowledge = {}
            for warp in members:
                join(together, self._far.get(warp, {}))
            for warp in members if together else ():
                self._far[warp] = dict(together)

    def release(self, warp: int) -> Knowledge:
        """All that a warp did and knows; it begins a new epoch."""
        cta, at = divmod(warp, self.warps)
        knowledge = dict(self._far.get(warp, {}))
        epochs = self._near[cta, at].copy()
        epochs[at] = self.now[warp]
        knowledge[cta] = epochs
        knowledge[~cta] = self._near_fenced[cta, at].copy()
        self.now[warp] += 1
        return knowledge

    def has_met(self, warp: int, cta: int) -> bool:
        """Whether a warp knows of any access by another CTA."""
        return cta in self._far.get(warp, {})

    def acquire(self, warp: int, knowledge: Knowledge) -> None:
        """A warp learns what others released."""
        cta, at = divmod(warp, self.warps)
        far = {other: epochs for other, epochs in knowledge.items() if other not in (cta, ~cta)}
        for key, near in ((cta, self._near), (~cta, self._near_fenced)):
            if key in knowledge:
                np.maximum(near[cta, at], knowledge[key], out=near[cta, at])
        if far:
            join(self._far.setdefault(warp, {}), far)
