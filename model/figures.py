"""Figures in sentences."""

from __future__ import annotations


def rounded(value: float, digits: int) -> str:
    """``value`` to a number of digits, without an exponent below a million: "0.025", "1,400"."""
    return f"{float(f'{value:.{digits}g}'):,.{max(digits, 6)}g}"
