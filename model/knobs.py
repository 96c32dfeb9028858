"""Environment variables: the one place that reads them, and the table of what they mean."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

#: Variable -> meaning; `urdir env` prints it. A variable only sets a default, an argument wins.
VARIABLES = {
    "URDIR_DEVICE": "default of --device (auto, cuda[:i], emulator[:sm_NN])",
    "URDIR_CACHE_DIR": "folder of the cubin cache; empty: no cache on disk",
}


@dataclass(frozen=True, slots=True)
class Knobs:
    """What the environment asks for."""

    device: str
    cache_dir: Path | None


def read_knobs() -> Knobs:
    """The knobs as the environment sets them now."""
    import platformdirs

    folder = os.environ.get("URDIR_CACHE_DIR")
    if folder is None:
        folder = platformdirs.user_cache_dir("urdir", appauthor=False)
    return Knobs(
        device=os.environ.get("URDIR_DEVICE", "auto"),
        cache_dir=Path(folder) if folder else None,
    )
