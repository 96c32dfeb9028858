"""The demo model that ships with the package."""

from __future__ import annotations

from pathlib import Path

#: What users call it.
DEMO = "demo"


def demo_model() -> Path:
    """The demo model that ships with the package."""
    return Path(__file__).parents[1] / "data" / "demo-q4_k_m.gguf"
