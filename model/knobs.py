"""Environment variables: the one place that reads them, and the table of what they mean."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

#: Variable -> meaning; `urdir env` prints it. A variable only sets a default, an argument wins.
VARIABLES = {
    "URDIR_DEVICE": "default of --device (auto, cuda[:i], emulator[:sm_NN])",
    "URDIR_CACHE_DIR": "folder of the cubin cache; empty: no cache on disk",
    "CORRECTNESS_MODE": "1: download logits and choose tokens on the host",
    "DECODE_TIMING": "1: time by phase of every step on stderr",
    "GPU_DEBUG": "1: summaries of the tensors of every layer on stderr",
}


@dataclass(frozen=True, slots=True)
class Knobs:
    """What the environment asks for."""

    device: str
    cache_dir: Path | None
    correctness_mode: bool
    decode_timing: bool
    gpu_debug: bool


def read_knobs() -> Knobs:
    """The knobs as the environment sets them now."""
    import platformdirs

    folder = os.environ.get("URDIR_CACHE_DIR")
    if folder is None:
        folder = platformdirs.user_cache_dir("urdir", appauthor=False)
    return Knobs(
        device=os.environ.get("URDIR_DEVICE", "auto"),
        cache_dir=Path(folder) if folder else None,
        correctness_mode=_is_on("CORRECTNESS_MODE"),
        decode_timing=_is_on("DECODE_TIMING"),
        gpu_debug=_is_on("GPU_DEBUG"),
    )


def _is_on(variable: str) -> bool:
    return os.environ.get(variable, "") not in ("", "0")
