"""LoRA adapters of random values, for measurements: of every product of a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from urdir.model.files.low_rank import Adapter, Floats, LowRank
from urdir.model.layers.adaptable import adaptable

if TYPE_CHECKING:
    from urdir.model.engine.engine import Engine

#: Values that repeat, and their size: small enough to change no logit to infinity.
_POOL, _DEVIATION = 1 << 16, 0.01


def load_made_adapters(engine: Engine, rank: int, count: int) -> None:
    """Load this many adapters of that rank into an engine with room for them."""
    adapters = engine.session.adapters
    assert adapters is not None
    pool = (_DEVIATION * np.random.default_rng(0).standard_normal(_POOL)).astype(np.float32)

    def values(*shape: int) -> Floats:
        return np.resize(pool, shape)

    takes = adaptable(engine.config)
    matrices = {
        name: LowRank(
            values(of.shape[0] if len(of.shape) == 3 else 1, rank, of.shape[-1]),
            values(of.shape[0] if len(of.shape) == 3 else 1, of.shape[-2], rank),
        )
        for name, of in takes.items()
    }
    for number in range(count):
        adapters.add(f"made-{number}", Adapter(Path("made"), engine.config.architecture, matrices))
