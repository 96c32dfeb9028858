"""Drawing with matplotlib, which the extra ``plot`` brings."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from urdir.model.errors import ModelError

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def check_can_plot() -> None:
    """Raise ModelError where matplotlib is not installed."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as exc:
        raise ModelError(f"drawing needs matplotlib ({exc}): pip install 'urdir[plot]'") from exc


def save(figure: Figure, path: Path) -> None:
    """Write a drawing in the format of the suffix of ``path``; ModelError where that fails."""
    try:
        figure.savefig(path)
    except (OSError, ValueError) as exc:
        raise ModelError(f"{path}: cannot be written: {exc}") from exc
