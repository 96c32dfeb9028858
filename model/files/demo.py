"""The demo model and its draft in the package."""

from __future__ import annotations

from pathlib import Path

#: Their names on the command line.
DEMO, DEMO_DRAFT = "demo", "demo-draft"

_DATA = Path(__file__).parents[1] / "data"
#: The files of the package by these names.
BUILT_IN = {DEMO: _DATA / "demo-q4_k_m.gguf", DEMO_DRAFT: _DATA / "demo-draft.gguf"}


def demo_model() -> Path:
    """Path of the demo model in the package."""
    return BUILT_IN[DEMO]
