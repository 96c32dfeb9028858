"""Runs of fma.rn.f32 in generated text, each as one call (`arithmetic.fma_run`): dot products are
chains of them, and a call of numpy on a few hundred lanes is mostly overhead."""

from __future__ import annotations

import re
from collections.abc import Sequence

_FMA = re.compile(r"    fma_32\((\w+), (\w+), (\w+), (\w+), (\(\w+, \w+, \w+\), \w+)\)")
#: Instructions of a run, at most.
MOST = 8


def join_runs(lines: Sequence[str], sources: Sequence[int]) -> tuple[list[str], list[int]]:
    """Generated lines and their PTX lines, with runs joined. A call has the first one's line.

    None of a run writes a factor of its own or of another one: `fma_run` may compute all twice.
    """
    joined: list[str] = []
    origins: list[int] = []
    run: list[re.Match[str]] = []
    for line, source in zip(lines, sources, strict=True):
        found = _FMA.fullmatch(line)
        if found is not None and run and _continues(run, found):
            run.append(found)
            joined[-1] = _call(run)
            continue
        run = [] if found is None else [found]
        joined.append(line)
        origins.append(source)
    return joined, origins


def _continues(run: Sequence[re.Match[str]], found: re.Match[str]) -> bool:
    all_of = (*run, found)
    written = {each[4] for each in all_of}
    factors = {name for each in all_of for name in (each[1], each[2])}
    return len(run) < MOST and found[5] == run[0][5] and written.isdisjoint(factors)


def _call(run: Sequence[re.Match[str]]) -> str:
    each = ", ".join(f"({', '.join(found.groups()[:4])})" for found in run)
    return f"    fma_run(({each}), {run[0][5]})"
