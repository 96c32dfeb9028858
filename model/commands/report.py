"""What several commands report: versions, and on stderr what an answer took."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from urdir.model.generate import Statistics


def installed_version(package: str) -> str:
    """The version of an installed package, or that it is not installed."""
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
    from urdir.model.generate import Finish

    if statistics.finish is Finish.FULL:
        print(
            f"the KV cache is full ({context} tokens): the answer ends here; raise -c for more",
            file=sys.stderr,
        )
