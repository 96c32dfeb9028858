"""Rotation by positions of several axes (M-RoPE, arXiv 2409.12191), as far as text goes.

All axes of a token of text have the same position, so that heads turn as ever. Only the fourth axis
of llama.cpp is always at 0.
"""

from __future__ import annotations

from urdir.model.errors import ConfigError, UnsupportedError
from urdir.model.families.reader import Reader

_KEY = "rope.dimension_sections"


def check_sections(file: Reader, dim: int, *, interleaved: bool = False) -> None:
    """Read rope.dimension_sections: how many of the pairs of ``dim`` values turn by each axis.

    Raises ConfigError where there are none in ``interleaved`` families, in which axes take turns;
    UnsupportedError where pairs would turn by the fourth axis.
    """
    sections = file.integers(_KEY)
    if len(sections) > 4 or any(size < 0 for size in sections) or (interleaved and not sections):
        raise ConfigError(f"metadata key '{file.key(_KEY)}' is {sections}, expected up to 4 sizes")
    is_used = len(sections) == 4 and sections[0] > 0 and sections[1] > 0
    if not interleaved and is_used and sections[3] and sum(sections[:3]) < dim // 2:
        raise UnsupportedError(f"{file.key(_KEY)} is {sections}: a fourth axis")
