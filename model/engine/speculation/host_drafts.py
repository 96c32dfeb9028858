"""Drafts from earlier text, found on the host: for answers whose constraint masks follow them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

#: Bytes of a token in the text that is searched.
_WIDTH = 4


def ngram_drafts(tokens: Sequence[int], wanted: int, longest: int, shortest: int) -> list[int]:
    """Up to ``wanted`` drafts after ``tokens``, as `NgramDrafts` finds them: what followed the
    latest earlier occurrence of the last ``longest`` tokens, or of fewer, down to ``shortest``."""
    text = np.asarray(tokens, np.uint32).tobytes()
    for n in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        at = _last(text[:-_WIDTH], text[-_WIDTH * n :])
        if at >= 0:
            after = tokens[at // _WIDTH + n :]
            return [after[i % len(after)] for i in range(wanted)]
    return []


def _last(text: bytes, part: bytes) -> int:
    """Where ``part`` last begins in ``text`` at the beginning of a token; -1 if nowhere."""
    at = text.rfind(part)
    while at >= 0 and at % _WIDTH:
        at = text.rfind(part, 0, at + len(part) - 1)
    return at
