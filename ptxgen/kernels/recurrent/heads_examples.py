"""Examples of recurrences with heads: ``cls`` makes the kernel."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

S = TypeVar("S")


def recurrence_examples(cls: Callable[..., S]) -> dict[str, S]:
    """Single rows and segments of every formula."""
    delta = partial(cls, max_len=64, delta=True, eps=1e-6)
    scan = partial(cls, max_len=64, delta=False, order="vkq")
    steady = partial(scan, order="apart", steady=True)
    by_channel = partial(delta, order="apart", channels=True)

    return {
        "one row": delta(**_rows(1, 2), **_heads(2, 1, 8, 6)),
        "a row of long keys": delta(**_rows(1, 1), **_heads(4, 2, 128, 128)),
        "rows": delta(**_rows(5, 4), **_heads(4, 2, 64, 20), tiled=True),
        "odd lanes": delta(**_rows(3, 3), **_heads(2, 2, 12, 34)),
        "scan, one row": scan(**_rows(1, 1), **_heads(4, 1, 128, 64)),
        "scan, rows": scan(**_rows(6, 5), **_heads(6, 3, 16, 10)),
        "a prompt": delta(**_prompt(21, 2), **_heads(4, 2, 64, 40), tiled=True),
        "a prompt of 8": delta(**_prompt(8, 1), **_heads(2, 2, 128, 128)),
        "a prompt of one": delta(**_prompt(1, 1), **_heads(2, 2, 32, 8)),
        "keys of 256": delta(**_prompt(18, 1), **_heads(1, 1, 256, 20)),
        "scan of a prompt": scan(**_prompt(35, 3), **_heads(6, 2, 16, 24)),
        "scan, long keys": scan(**_prompt(17, 1), **_heads(2, 1, 128, 64)),
        "scan of arrays": scan(**_rows(3, 2), **_heads(4, 1, 16, 12), order="apart"),
        "scan of arrays, a prompt": scan(**_prompt(19, 2), **_heads(2, 1, 64, 40), order="apart"),
        "steady, one row": steady(**_rows(1, 1), **_heads(2, 2, 8, 8)),
        "steady, rows": steady(**_rows(4, 3), **_heads(3, 3, 20, 24)),
        "steady, a prompt": steady(**_prompt(35, 2), **_heads(2, 2, 64, 40)),
        "channels, one row": by_channel(**_rows(1, 2), **_heads(2, 1, 8, 6)),
        "channels, rows": by_channel(
            **_rows(5, 4), **_heads(3, 3, 12, 20), floor=-5.0, negated=True
        ),
        "channels of a prompt": by_channel(**_prompt(21, 2), **_heads(2, 2, 128, 40)),
        "channels with a floor": by_channel(
            **_prompt(19, 1), **_heads(4, 2, 20, 12), tiled=True, floor=-5.0
        ),
        "segments": delta(**_prompt(60, 5, segments=4), **_heads(4, 2, 32, 20)),
        "scan of segments": scan(**_prompt(40, 3, segments=5), **_heads(2, 1, 16, 40)),
    }


def chunk_examples(cls: Callable[..., S]) -> dict[str, S]:
    """Segments of every formula that has a chunked form."""
    scan = partial(cls, max_len=256, delta=False, order="vkq")
    steady = partial(scan, order="apart", steady=True)
    delta = partial(cls, max_len=256, delta=True, eps=1e-6)
    by_channel = partial(delta, order="apart", channels=True)

    return {
        "scan": scan(**_prompt(35, 2), **_heads(2, 1, 16, 24)),
        "scan, long keys": scan(**_prompt(33, 1), **_heads(1, 1, 128, 24)),
        "scan of arrays": scan(**_prompt(40, 2), **_heads(4, 2, 32, 12), order="apart"),
        "scan of segments": scan(**_prompt(100, 5, 4), **_heads(2, 2, 16, 72), tiled=True),
        "keys of 256": scan(**_prompt(33, 1), **_heads(1, 1, 256, 40)),
        "steady": steady(**_prompt(65, 2), **_heads(2, 2, 64, 40)),
        "delta": delta(**_prompt(33, 2), **_heads(2, 1, 16, 20)),
        "delta, long keys": delta(**_prompt(33, 1), **_heads(1, 1, 128, 24)),
        "delta of segments": delta(**_prompt(100, 5, 4), **_heads(4, 2, 16, 40), tiled=True),
        "delta with a floor": delta(**_prompt(1, 1), **_heads(2, 1, 48, 8), floor=-5.0),
        "channels": by_channel(**_prompt(35, 2), **_heads(2, 2, 32, 24)),
        "channels, long keys": by_channel(**_prompt(33, 1), **_heads(1, 1, 128, 16)),
        "channels of segments": by_channel(
            **_prompt(60, 4, 3), **_heads(2, 1, 32, 16), tiled=True, floor=-5.0, negated=True
        ),
    }


def drafted_examples(cls: Callable[..., S]) -> dict[str, S]:
    """Rows with and without drafts."""
    delta, scan = partial(cls, delta=True, eps=1e-6), partial(cls, delta=False)
    by_channel = partial(delta, order="apart", channels=True)
    single = partial(_drafts, drafted=False)
    return {
        "one row": delta(**single(1, 2, 1), **_heads(2, 1, 8, 6)),
        "rows": delta(**single(5, 4, 3), **_heads(4, 2, 64, 20), tiled=True),
        "one draft": delta(**_drafts(5, 3, 1), **_heads(2, 1, 12, 34)),
        "drafts": delta(**_drafts(23, 7, 3), **_heads(4, 2, 32, 20), tiled=True),
        "many drafts": delta(**_drafts(40, 3, 17), **_heads(2, 2, 128, 24)),
        "scan": scan(**_drafts(14, 4, 5), **_heads(6, 3, 16, 10), order="vkq"),
        "scan of arrays": scan(**_drafts(9, 2, 7), **_heads(4, 1, 16, 12), order="apart"),
        "steady": scan(**_drafts(8, 3, 3), **_heads(3, 3, 20, 24), order="apart", steady=True),
        "channels": by_channel(**_drafts(12, 3, 4), **_heads(3, 3, 12, 20)),
        "channels with a floor": by_channel(
            **_drafts(16, 4, 7), **_heads(2, 2, 36, 20), floor=-5.0, negated=True
        ),
    }


def _heads(count: int, shared: int, key_dim: int, value_dim: int) -> dict[str, Any]:
    return {"heads": count, "key_heads": shared, "key_dim": key_dim, "value_dim": value_dim}


def _rows(count: int, sequences: int) -> dict[str, Any]:
    return {"rows": count, "sequences": sequences, "segments": 0}


def _prompt(count: int, sequences: int, segments: int = 1) -> dict[str, Any]:
    return {"rows": count, "sequences": sequences, "segments": segments}


def _drafts(count: int, sequences: int, most: int, *, drafted: bool = True) -> dict[str, Any]:
    return {**_rows(count, sequences), "max_len": 64, "most": most, "drafted": drafted}
