"""Memory for what recurrences prepare of a prompt's chunks."""

from __future__ import annotations

from collections.abc import Iterable

from urdir.model.families.recurrent import Recurrent
from urdir.model.families.rules import rule_of
from urdir.ptxgen.kernels.recurrent.choice import prepared_nbytes
from urdir.ptxgen.kernels.recurrent.rows import SEGMENT_ROWS
from urdir.ptxgen.spec import ceil_div


def chunk_workspace(
    mixers: Iterable[Recurrent], sequences: int, max_len: int, rows: int
) -> dict[str, int]:
    """Bytes of each array, for prompts of up to ``rows`` rows in as many segments as there may be:
    the most of any mixer."""
    sizes: dict[str, int] = {}
    segments = min(sequences, ceil_div(rows, SEGMENT_ROWS))
    shape = {"rows": rows, "sequences": sequences, "max_len": max_len, "segments": segments}
    for rule in filter(None, map(rule_of, mixers)):
        for name, nbytes in prepared_nbytes(**shape, **rule).items():
            sizes[chunk_buffer(name)] = max(sizes.get(chunk_buffer(name), 0), nbytes)
    return sizes


def chunk_buffer(param: str) -> str:
    """The buffer for a parameter of what is prepared."""
    return f"chunk {param}"
