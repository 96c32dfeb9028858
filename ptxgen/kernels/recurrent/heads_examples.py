"""Examples of recurrences with heads: ``cls`` makes the kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from urdir.ptxgen.kernels.recurrent.heads import HeadsRule

S = TypeVar("S")

#: Formulas of examples, of heads to come.
_DELTA = partial(HeadsRule, delta=True, eps=1e-6)
_BY_CHANNEL = partial(_DELTA, order="apart", channels=True)
_SCAN = partial(HeadsRule, delta=False, order="vkq")
_STEADY = partial(_SCAN, order="apart", steady=True)


def recurrence_examples(cls: Callable[..., S]) -> dict[str, S]:
    """Single rows and segments of every formula."""
    of = partial(cls, max_len=64)
    return {
        "one row": of(**_rows(1, 2), rule=_DELTA(2, 1, 8, 6)),
        "a row of long keys": of(**_rows(1, 1), rule=_DELTA(4, 2, 128, 128)),
        "rows": of(**_rows(5, 4), rule=_DELTA(4, 2, 64, 20, tiled=True)),
        "odd lanes": of(**_rows(3, 3), rule=_DELTA(2, 2, 12, 34)),
        "scan, one row": of(**_rows(1, 1), rule=_SCAN(4, 1, 128, 64)),
        "scan, rows": of(**_rows(6, 5), rule=_SCAN(6, 3, 16, 10)),
        "a prompt": of(**_prompt(21, 2), rule=_DELTA(4, 2, 64, 40, tiled=True)),
        "a prompt of 8": of(**_prompt(8, 1), rule=_DELTA(2, 2, 128, 128)),
        "a prompt of one": of(**_prompt(1, 1), rule=_DELTA(2, 2, 32, 8)),
        "keys of 256": of(**_prompt(18, 1), rule=_DELTA(1, 1, 256, 20)),
        "scan of a prompt": of(**_prompt(35, 3), rule=_SCAN(6, 2, 16, 24)),
        "scan, long keys": of(**_prompt(17, 1), rule=_SCAN(2, 1, 128, 64)),
        "scan of arrays": of(**_rows(3, 2), rule=_SCAN(4, 1, 16, 12, order="apart")),
        "scan of arrays, a prompt": of(**_prompt(19, 2), rule=_SCAN(2, 1, 64, 40, order="apart")),
        "steady, one row": of(**_rows(1, 1), rule=_STEADY(2, 2, 8, 8)),
        "steady, rows": of(**_rows(4, 3), rule=_STEADY(3, 3, 20, 24)),
        "steady, a prompt": of(**_prompt(35, 2), rule=_STEADY(2, 2, 64, 40)),
        "channels, one row": of(**_rows(1, 2), rule=_BY_CHANNEL(2, 1, 8, 6)),
        "channels, rows": of(
            **_rows(5, 4), rule=_BY_CHANNEL(3, 3, 12, 20, floor=-5.0, negated=True)
        ),
        "channels of a prompt": of(**_prompt(21, 2), rule=_BY_CHANNEL(2, 2, 128, 40)),
        "channels with a floor": of(
            **_prompt(19, 1), rule=_BY_CHANNEL(4, 2, 20, 12, tiled=True, floor=-5.0)
        ),
        "segments": of(**_prompt(60, 5, segments=4), rule=_DELTA(4, 2, 32, 20)),
        "scan of segments": of(**_prompt(40, 3, segments=5), rule=_SCAN(2, 1, 16, 40)),
    }


def chunk_examples(cls: Callable[..., S]) -> dict[str, S]:
    """Segments of every formula that has a chunked form."""
    of = partial(cls, max_len=256)
    return {
        "scan": of(**_prompt(35, 2), rule=_SCAN(2, 1, 16, 24)),
        "scan, long keys": of(**_prompt(33, 1), rule=_SCAN(1, 1, 128, 24)),
        "scan of arrays": of(**_prompt(40, 2), rule=_SCAN(4, 2, 32, 12, order="apart")),
        "scan of segments": of(**_prompt(100, 5, 4), rule=_SCAN(2, 2, 16, 72, tiled=True)),
        "keys of 256": of(**_prompt(33, 1), rule=_SCAN(1, 1, 256, 40)),
        "steady": of(**_prompt(65, 2), rule=_STEADY(2, 2, 64, 40)),
        "delta": of(**_prompt(33, 2), rule=_DELTA(2, 1, 16, 20)),
        "delta, long keys": of(**_prompt(33, 1), rule=_DELTA(1, 1, 128, 24)),
        "delta of segments": of(**_prompt(100, 5, 4), rule=_DELTA(4, 2, 16, 40, tiled=True)),
        "delta with a floor": of(**_prompt(1, 1), rule=_DELTA(2, 1, 48, 8, floor=-5.0)),
        "channels": of(**_prompt(35, 2), rule=_BY_CHANNEL(2, 2, 32, 24)),
        "channels, long keys": of(**_prompt(33, 1), rule=_BY_CHANNEL(1, 1, 128, 16)),
        "channels of segments": of(
            **_prompt(60, 4, 3),
            rule=_BY_CHANNEL(2, 1, 32, 16, tiled=True, floor=-5.0, negated=True),
        ),
    }


def drafted_examples(cls: Callable[..., S]) -> dict[str, S]:
    """Rows with and without drafts."""
    of, single = partial(cls, max_len=64), partial(_drafts, drafted=False)
    return {
        "one row": of(**single(1, 2, 1), rule=_DELTA(2, 1, 8, 6)),
        "rows": of(**single(5, 4, 3), rule=_DELTA(4, 2, 64, 20, tiled=True)),
        "one draft": of(**_drafts(5, 3, 1), rule=_DELTA(2, 1, 12, 34)),
        "drafts": of(**_drafts(23, 7, 3), rule=_DELTA(4, 2, 32, 20, tiled=True)),
        "many drafts": of(**_drafts(40, 3, 17), rule=_DELTA(2, 2, 128, 24)),
        "scan": of(**_drafts(14, 4, 5), rule=_SCAN(6, 3, 16, 10)),
        "scan of arrays": of(**_drafts(9, 2, 7), rule=_SCAN(4, 1, 16, 12, order="apart")),
        "steady": of(**_drafts(8, 3, 3), rule=_STEADY(3, 3, 20, 24)),
        "channels": of(**_drafts(12, 3, 4), rule=_BY_CHANNEL(3, 3, 12, 20)),
        "channels with a floor": of(
            **_drafts(16, 4, 7), rule=_BY_CHANNEL(2, 2, 36, 20, floor=-5.0, negated=True)
        ),
    }


def _rows(count: int, sequences: int) -> dict[str, Any]:
    return _prompt(count, sequences, 0)


def _prompt(count: int, sequences: int, segments: int = 1) -> dict[str, Any]:
    return {"rows": count, "sequences": sequences, "segments": segments}


def _drafts(count: int, sequences: int, most: int, *, drafted: bool = True) -> dict[str, Any]:
    return {**_rows(count, sequences), "most": most, "drafted": drafted}
