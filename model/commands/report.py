"""What several commands report: versions, kernels, and on stderr what an answer took."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from urdir.model.engine.generate import Statistics
    from urdir.ptxgen.spec import KernelSpec


def installed_version(package: str) -> str:
    """The version of an installed package, or that it is not installed."""
    import importlib.metadata  # slow to import, seldom needed

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def statistics_dict(statistics: Statistics) -> dict[str, Any]:
    """The statistics as plain values, for JSON."""
    values = dataclasses.asdict(statistics)
    return values | {
        "finish": statistics.finish.value,
        "tokens_per_second": statistics.tokens_per_second,
    }


def print_statistics(statistics: Statistics) -> None:
    """One line on stderr: tokens, times, speed, seed."""
    s = statistics
    print(
        f"[{s.prompt_tokens} prompt tokens ({s.cached_tokens} cached), first answer token after "
        f"{s.prompt_seconds:.2f} s, {s.generated_tokens} generated in {s.generate_seconds:.2f} s, "
        f"{s.tokens_per_second:.1f} tokens/s, seed {s.seed}]",
        file=sys.stderr,
    )


def end_note(statistics: Statistics, context: int) -> None:
    """Say on stderr when the answer ended because the KV cache was full."""
    from urdir.model.engine.sequence import Finish

    if statistics.finish is Finish.FULL:
        print(
            f"the KV cache is full ({context} tokens): the answer ends here; raise -c for more",
            file=sys.stderr,
        )


def extent(size: tuple[int, ...]) -> str:
    """A grid or block as (x), (x, y) or (x, y, z): trailing ones say nothing."""
    kept = list(size)
    while len(kept) > 1 and kept[-1] == 1:
        kept.pop()
    return f"({', '.join(map(str, kept))})"


def fields_text(spec: KernelSpec) -> str:
    """The fields of a kernel that differ from their defaults, short: "format=Q4_K rows=64"."""
    from urdir.ptxgen.tools.settings import plain

    words = []
    for field in dataclasses.fields(spec):  # type: ignore[arg-type]
        value = getattr(spec, field.name)
        if value == field.default:
            continue
        shown = plain(value)
        parts = shown.items() if isinstance(shown, dict) else [("", shown)]
        words += [f"{part or field.name}={_short(v)}" for part, v in parts if v != 0 or not part]
    return " ".join(words)


def aligned(rows: Sequence[tuple[str, ...]], right: Sequence[int] = ()) -> Iterator[str]:
    """Rows of cells as lines with columns of one width, those in ``right`` flush right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (
            cell.rjust(width) if number in right else cell.ljust(width)
            for number, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
