"""How often experts were chosen, kept between runs: caches begin with the frequent ones."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from urdir.driver.errors import DriverError
from urdir.driver.private_folder import PrivateFolder
from urdir.model.memory.prefix_files import model_digest
from urdir.model.owner import Owner

if TYPE_CHECKING:
    from urdir.model.files.model_file import ModelFile
    from urdir.model.memory.expert_cache import ExpertCache
    from urdir.model.memory.weights import Weights

#: What is left of the counts of earlier runs after one more.
_KEPT = 0.5


class ExpertCounts(Owner):
    """The counts of a model's caches, in a file of ``folder``: read now, for weights that are not
    uploaded yet, and written when it is closed. ``weights`` are those of every rank: ranks that
    have parts of the same layers choose the same experts. A file that cannot be used is ignored, as
    it only changes how fast the first answers are."""

    def __init__(self, folder: Path, file: ModelFile, weights: Sequence[Weights]) -> None:
        self._name = model_digest(file)
        self._folder: PrivateFolder | None = None
        self._caches: list[ExpertCache] = []
        numbers = []  # of each rank's caches
        for each in weights:
            if each.config.stage is not None or not self._caches:
                self._caches += each.expert_caches.values()
            end = len(self._caches)
            numbers.append(range(end - len(each.expert_caches), end))
        for cache in self._caches:
            cache.state.fill(0)  # a load that ends early leaves no counts
        ends = np.cumsum([cache.experts for cache in self._caches])
        self._before = np.zeros(int(ends[-1]), np.float32)
        with contextlib.suppress(OSError, ValueError):
            PrivateFolder(folder)
            self._folder = PrivateFolder(folder / "experts")
            found = np.frombuffer(self._folder.read(self._name), np.float32)
            if found.shape == self._before.shape and np.isfinite(found).all():
                self._before = found
        if self._before.any():
            counts = np.split(self._before, ends[:-1])
            for each, of in zip(weights, numbers, strict=True):
                each.expert_counts = dict(enumerate(counts[of.start : of.stop]))

    def close(self) -> None:
        """Write the counts, if there are new ones. Idempotent."""
        folder, self._folder = self._folder, None
        if folder is None:
            return
        with contextlib.suppress(OSError, DriverError):
            counts = np.concatenate([cache.counts() for cache in self._caches]).astype(np.float32)
            if counts.any():
                folder.write(self._name, (_KEPT * self._before + counts).tobytes())
