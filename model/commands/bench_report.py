"""Results of `urdir bench`: conditions of a run, and records in sections."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Record = Mapping[str, Any]
Cell = Callable[[Record], str]


@dataclass(frozen=True, slots=True)
class Conditions:
    """Conditions of a run: the device's read bandwidth and dense f16 rate, and ``vram_bytes``,
    the device memory in use by all processes when the record was made.
    """

    model: str
    device: str
    emulated: bool
    driver: str
    version: str
    read_gb_per_s: float
    product_tflop_per_s: float
    vram_bytes: int

    @property
    def heading(self) -> tuple[str, str]:
        """Two lines that describe the conditions."""
        return (
            f"{self.model} on {self.device} (driver {self.driver}), urdir {self.version}",
            f"read bandwidth B = {self.read_gb_per_s:,.1f} GB/s, dense f16 product F = "
            f"{self.product_tflop_per_s:,.1f} TFLOP/s, {self.vram_bytes / 1e6:,.0f} MB in use",
        )


@dataclass(frozen=True, slots=True)
class LoadConditions:
    """Conditions of a load test of a server, or of a device of this process. ``version`` is that
    of the client: a server does not report its own."""

    model: str
    server: str
    arrivals: str
    input: str
    answer: str
    shared: int
    version: str

    @property
    def heading(self) -> tuple[str, str]:
        """Two lines that describe the conditions."""
        shared = f" ({self.shared} shared)" if self.shared else ""
        return (
            f"{self.model} at {self.server}, measured by urdir {self.version}",
            f"{self.arrivals}, {self.input} tokens in{shared}, {self.answer} out",
        )


@dataclass(frozen=True, slots=True)
class Section:
    """Records under one name: dataclass instances of some ``kinds``.

    A record has the fields of all kinds, None for those that its own kind lacks. ``columns`` make
    the Markdown table; ``room`` is the minimum width of columns, for rows that come later."""

    name: str
    columns: Mapping[str, Cell]
    kinds: tuple[type[DataclassInstance], ...]
    room: Mapping[str, int] = field(default_factory=dict)

    @property
    def types(self) -> dict[str, Any]:
        """Fields of a record, with their annotations."""
        return {each.name: each.type for kind in self.kinds for each in fields(kind)}

    def record(self, row: DataclassInstance) -> dict[str, Any]:
        """A row as plain values."""
        return dict.fromkeys(self.types) | asdict(row)


def _number(field: str, text: str, unit: float = 1) -> Cell:
    """A cell with a field in multiples of ``unit``, formatted; "-" where it is None."""
    return lambda r: "-" if r[field] is None else format(r[field] / unit, text)


ROW_COLUMNS: Mapping[str, Cell] = {
    "test": lambda r: r["test"],
    "tokens/s": lambda r: r["error"] or f"{r['tokens_per_second']:,.2f} ± {r['deviation']:.2f}",
    "ms/token": _number("ms_per_token", ".3f"),
    "ms/step": _number("ms_per_step", ".3f"),
    "MB/token": _number("bytes_per_token", ",.1f", 1e6),
    "MB moved": _number("moved_per_token", ",.1f", 1e6),
    "GB/s": _number("gb_per_s", ",.1f"),
    "of B": _number("share", ".1%"),
    "TFLOP/s": _number("tflop_per_s", ",.1f"),
    "of F": _number("product_share", ".1%"),
    "host us": _number("host_us_per_token", ".1f"),
}
ROW_ROOM: Mapping[str, int] = {
    "tokens/s": 18,
    "MB/token": 9,
    "MB moved": 9,
    "GB/s": 7,
    "of B": 6,
    "of F": 6,
}
PROFILE_COLUMNS: Mapping[str, Cell] = {
    "launches of a decode step": lambda r: r["role"],
    "sequences": _number("sequences", ".0f"),
    "calls": _number("calls", ".0f"),
    "us": _number("microseconds", ".1f"),
    "MB": _number("bytes_moved", ".1f", 1e6),
    "GB/s": _number("gb_per_s", ",.1f"),
    "of B": _number("share", ".1%"),
}
MIXED_COLUMNS: Mapping[str, Cell] = {
    "sequences": _number("sequences", ".0f"),
    "prompt rows": _number("rows", ".0f"),
    "decode ms": _number("decode_ms", ".3f"),
    "prompt ms": _number("prompt_ms", ".3f"),
    "mixed ms": _number("mixed_ms", ".3f"),
    "excess": _number("excess", ".1%"),
}
EMBED_COLUMNS: Mapping[str, Cell] = {
    "texts": _number("texts", ",.0f"),
    "tokens each": _number("tokens", ",.0f"),
    "ms": _number("ms", ".3f"),
    "best ms": _number("best_ms", ".3f"),
    "tokens/s": _number("tokens_per_second", ",.0f"),
}
TURN_COLUMNS: Mapping[str, Cell] = {
    "turn": _number("turn", ".0f"),
    "from": lambda r: r["source"],
    "prompt tokens": _number("tokens", ",.0f"),
    "cached": _number("cached", ",.0f"),
    "first token ms": _number("first_token_ms", ".2f"),
    "of turn 1": _number("share", ".1%"),
}
GEMV_COLUMNS: Mapping[str, Cell] = {
    "gemv": lambda r: f"{r['type']} {r['rows']} x {r['cols']}",
    "MB": _number("weight_bytes", ".1f", 1e6),
    "us": _number("best_us", ".2f"),
    "median us": _number("median_us", ".2f"),
    "GB/s": _number("gb_per_s", ",.0f"),
    "read us": _number("read_us", ".2f"),
    "of reading": _number("share", ".1%"),
}
STARTUP_COLUMNS: Mapping[str, Cell] = {
    "phase": lambda r: r["phase"],
    "": lambda r: f"{r['value']:,.2f} {r['unit']}",
    "of": lambda r: r["note"],
}
LOAD_COLUMNS: Mapping[str, Cell] = {
    "requests": _number("requests", ",.0f"),
    "failed": _number("failed", ",.0f"),
    "s": _number("seconds", ",.2f"),
    "requests/s": _number("requests_per_second", ",.2f"),
    "input tokens/s": _number("input_tokens_per_second", ",.0f"),
    "output tokens/s": _number("output_tokens_per_second", ",.0f"),
    "cached": _number("cached_share", ".1%"),
}
LATENCY_COLUMNS: Mapping[str, Cell] = {
    "ms": lambda r: r["name"],
    "mean": _number("mean", ",.2f"),
    "p50": _number("p50", ",.2f"),
    "p90": _number("p90", ",.2f"),
    "p99": _number("p99", ",.2f"),
    "most": _number("most", ",.2f"),
}
DEVICE_COLUMNS: Mapping[str, Cell] = {
    "steps": _number("steps", ",.0f"),
    "busy s": _number("busy_seconds", ",.2f"),
    "idle between steps, s": _number("idle_seconds", ",.3f"),
    "idle": _number("idle_share", ".1%"),
    "preempted": _number("preemptions", ",.0f"),
}
