"""Low-rank matrices of adapters, checked and scaled."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from urdir.model.errors import ConfigError

Floats = npt.NDArray[np.float32]
#: A rank above this is refused: no adapter has one, and room is made for it.
MOST_RANK = 1024


@dataclass(frozen=True, slots=True)
class LowRank:
    """``a`` (experts, rank, in) and ``b`` (experts, out, rank) f32, one expert where there are
    none; b is scaled by alpha / rank."""

    a: Floats
    b: Floats

    @property
    def rank(self) -> int:
        """Rows of A."""
        return int(self.a.shape[1])


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter of a model of some ``architecture``, its matrices by the names of tensors."""

    path: Path
    architecture: str
    matrices: Mapping[str, LowRank]

    @property
    def name(self) -> str:
        """The file's name without its ending."""
        return self.path.name.removesuffix(".gguf")

    @property
    def rank(self) -> int:
        """The largest rank."""
        return max(of.rank for of in self.matrices.values())


def rank_together(adapters: Iterable[Adapter]) -> int:
    """The rank of adapters whose sum is applied: their ranks together, of the tensor that has most;
    0 of none."""
    ranks = Counter[str]()
    for adapter in adapters:
        ranks.update({name: of.rank for name, of in adapter.matrices.items()})
    return max(ranks.values(), default=0)


def low_rank(where: str, a: Floats, b: Floats, alpha: float, *, root: bool = False) -> LowRank:
    """The matrices of one tensor, checked; scaled by alpha / rank, or alpha / sqrt(rank) with
    ``root`` (rsLoRA). An alpha of 0 scales nothing, as in llama.cpp."""
    if a.ndim == b.ndim == 2:
        a, b = a[None], b[None]
    if a.ndim != 3 or b.ndim != 3 or len(a) != len(b) or a.shape[1] != b.shape[2]:
        raise ConfigError(
            f"{where}: lora_a {a.shape} and lora_b {b.shape}: expected (rank, in) and (out, rank)"
        )
    rank = a.shape[1]
    if not 1 <= rank <= MOST_RANK:
        raise ConfigError(f"{where}: rank {rank}: expected 1 to {MOST_RANK}")
    if not math.isfinite(alpha):
        raise ConfigError(f"{where}: alpha is {alpha}: expected a finite number")
    scale = alpha / (rank**0.5 if root else rank) if alpha else 1.0
    with np.errstate(over="ignore", invalid="ignore"):
        b = b * np.float64(scale).astype(np.float32)
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise ConfigError(f"{where}: an adapter with NaN or infinite values")
    return LowRank(np.ascontiguousarray(a), np.ascontiguousarray(b))
