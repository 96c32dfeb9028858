"""The demo model in the package."""

from __future__ import annotations

from pathlib import Path

#: Its name on the command line.
DEMO = "demo"


def demo_model() -> Path:
    """Path of the demo model in the package."""
    return Path(__file__).parents[1] / "data" / "demo-q4_k_m.gguf"
