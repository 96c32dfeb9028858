"""Where compiled kernels are kept for a user who names no other place."""

from __future__ import annotations

from pathlib import Path


def user_cache_folder() -> Path:
    """The user's own cache folder as the system has it; no variable of ours is looked at."""
    import platformdirs  # rarely needed

    return Path(platformdirs.user_cache_dir("urdir", appauthor=False))
