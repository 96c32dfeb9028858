"""Report versions, kernels, and on stderr the statistics of an answer."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from urdir.model.commands.terminal import printable

if TYPE_CHECKING:
    from urdir.model.engine.engine import Engine
    from urdir.model.engine.generate import Statistics
    from urdir.ptxgen.spec import KernelSpec


#: Seconds; a speed measured in less time says little.
_SHORT_SECONDS = 0.05
NOT_INSTALLED = "not installed"
#: Characters of a column of roles.
_ROLES_WIDTH = 21


def installed_version(package: str) -> str:
    """The version of an installed package, or that it is not installed."""
    import importlib.metadata  # slow to import, rarely needed

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return NOT_INSTALLED


def statistics_dict(statistics: Statistics) -> dict[str, Any]:
    """The statistics as plain values, for JSON."""
    values = dataclasses.asdict(statistics)
    return values | {
        "finish": statistics.finish.value,
        "tokens_per_second": statistics.tokens_per_second,
    }


def print_statistics(statistics: Statistics) -> None:
    """Print one line on stderr: tokens, available times, seed, and the speed if enough tokens
    were made to measure it."""
    s = statistics
    first = ""
    if s.prompt_seconds:
        first = f"first answer token after {seconds_text(s.prompt_seconds)}, "
    took = f" in {seconds_text(s.generate_seconds)}" if s.generate_seconds else ""
    if s.generate_seconds >= _SHORT_SECONDS:
        took += f", {s.tokens_per_second:.1f} tokens/s"
    if s.drafted_tokens:
        took += f", {s.accepted_tokens} of {s.drafted_tokens} drafts accepted"
    print(
        f"[{s.prompt_tokens} prompt tokens ({s.cached_tokens} cached), "
        f"{first}{s.generated_tokens} generated{took}, seed {s.seed}]",
        file=sys.stderr,
    )


def size_text(nbytes: int) -> str:
    """Bytes in the largest unit that fits: 4.58 GiB, 3.13 MiB, 512 bytes."""
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if nbytes >> shift:
            return f"{nbytes / (1 << shift):.{_digits(nbytes >> shift)}f} {unit}"
    return f"{nbytes} bytes"


def _digits(whole: int) -> int:
    """Decimals that make three digits of a number."""
    return max(0, 3 - len(str(whole)))


def seconds_text(seconds: float) -> str:
    """A time with three digits: 1.58 s, 31.4 ms, 213 us."""
    factor, unit = 1e6, "us"
    for larger, name in ((1e3, "ms"), (1.0, "s")):
        if seconds * larger >= 0.9995:  # which is 1.00
            factor, unit = larger, name
    return f"{seconds * factor:.{_digits(int(seconds * factor))}f} {unit}"


def print_engine(engine: Engine) -> None:
    """Print the model, device and cache on stderr."""
    device, session, group = engine.device, engine.session, engine.group
    cache, names = session.cache, ", ".join(each.name for each in group)
    each, shares = "", ""
    if session.parts.config.stage is not None:
        each = " on the first device"
        shares = f"each device has some of {engine.config.n_layers} layers\n"
    elif len(group) > 1:
        from urdir.model.families.share import cut_networks

        cut, networks = cut_networks(session.parts.config)
        each = " on each device"
        shares = f"each device has a part of {cut} of {networks} networks, the others are whole\n"
    print(
        f"model {printable(engine.name)}, {engine.weight_nbytes:,} bytes of weights, "
        f"loaded in {engine.seconds['weights']:.2f} s\n"
        f"device {names}: {device.properties.name}, kernels for {device.target}\n"
        f"{shares}context {session.context} tokens, KV cache {cache.nbytes:,} bytes{each} "
        f"({'/'.join(dict.fromkeys(of.name for of in cache.layout(0).formats))})",
        file=sys.stderr,
    )


def print_room(engine: Engine) -> None:
    """Print on stderr the memory that the requests of a server share."""
    session = engine.session
    pools, states = session.cache.pools, session.storage.shared_states
    if pools:
        tokens = min(pool.pages * pool.page_len for pool in pools)
        print(f"the cache has room for {tokens:,} tokens", file=sys.stderr)
    if states is not None and session.parts.recurrent is not None:
        print(
            f"up to {states.places:,} states are kept for prompts with a common prefix, "
            f"{session.parts.recurrent.shape.nbytes:,} bytes each",
            file=sys.stderr,
        )


def end_note(statistics: Statistics, context: int) -> None:
    """Say on stderr when the answer ended because the KV cache was full."""
    from urdir.model.engine.requests.request import Finish

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


def roles_text(roles: Sequence[str]) -> str:
    """Roles of a kernel: as many as fit a column, and the number of the others."""
    shown = list(roles)
    while len(shown) > 1 and len(_roles(shown, roles)) > _ROLES_WIDTH:
        shown.pop()
    return _roles(shown, roles)


def _roles(shown: Sequence[str], roles: Sequence[str]) -> str:
    more = f" +{len(roles) - len(shown)}" if len(roles) > len(shown) else ""
    return ", ".join(shown) + more


def megabytes_text(nbytes: int) -> str:
    """Bytes in MB, to the kilobyte."""
    return f"{nbytes / 1e6:,.3f}" if nbytes >= 500 or not nbytes else "<0.001"


def _short(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(value)
