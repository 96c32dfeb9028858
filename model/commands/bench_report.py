"""What `urdir bench` found, as Markdown, CSV or JSON.

A section is a list of records of one kind. In csv and jsonl every record is complete by itself: it
repeats the conditions of the run.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from urdir.model.commands.table import markdown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Record = Mapping[str, Any]
Cell = Callable[[Record], str]

FORMATS = ("md", "csv", "json", "jsonl", "sql")


@dataclass(frozen=True, slots=True)
class Conditions:
    """Under which a run was measured: the device's read bandwidth, and the rate of a dense f16
    product on it; ``vram_bytes`` of its memory were in use, by anyone, when the run ended.
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
        """Two lines that say it."""
        return (
            f"{self.model} on {self.device} (driver {self.driver}), urdir {self.version}",
            f"read bandwidth B = {self.read_gb_per_s:,.1f} GB/s, dense f16 product F = "
            f"{self.product_tflop_per_s:,.1f} TFLOP/s, {self.vram_bytes / 1e6:,.0f} MB in use",
        )


@dataclass(frozen=True, slots=True)
class LoadConditions:
    """What was asked of a server, whose own version it does not say, or of a device of this
    process; ``version`` is of who asks."""

    model: str
    server: str
    arrivals: str
    input: str
    answer: str
    shared: int
    version: str

    @property
    def heading(self) -> tuple[str, str]:
        """Two lines that say it."""
        shared = f" ({self.shared} shared)" if self.shared else ""
        return (
            f"{self.model} at {self.server}, measured by urdir {self.version}",
            f"{self.arrivals}, {self.input} tokens in{shared}, {self.answer} out",
        )


@dataclass(frozen=True, slots=True)
class Section:
    """Rows (dataclass instances) of one kind under a name; ``columns`` make the Markdown table."""

    name: str
    rows: Sequence[DataclassInstance]
    columns: Mapping[str, Cell]

    @property
    def records(self) -> list[dict[str, Any]]:
        """The rows as plain values."""
        return [asdict(row) for row in self.rows]


def _number(field: str, text: str, unit: float = 1) -> Cell:
    """A cell with a field in multiples of ``unit``, formatted; "-" where it is None."""
    return lambda r: "-" if r[field] is None else format(r[field] / unit, text)


ROW_COLUMNS: Mapping[str, Cell] = {
    "test": lambda r: r["test"],
    "tokens/s": lambda r: f"{r['tokens_per_second']:,.2f} ± {r['deviation']:.2f}",
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
PROFILE_COLUMNS: Mapping[str, Cell] = {
    "launches of a decode step": lambda r: r["role"],
    "sequences": _number("sequences", ".0f"),
    "calls": _number("calls", ".0f"),
    "us": _number("microseconds", ".1f"),
    "MB": _number("bytes_moved", ".1f", 1e6),
    "GB/s": _number("gb_per_s", ",.1f"),
    "of B": _number("share", ".1%"),
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
    "set back": _number("preemptions", ",.0f"),
}


def print_report(
    conditions: Conditions | LoadConditions, sections: Sequence[Section], kind: str
) -> None:
    """Print everything to stdout in one of `FORMATS`."""
    {
        "md": _print_md,
        "csv": _print_csv,
        "json": _print_json,
        "jsonl": _print_jsonl,
        "sql": _print_sql,
    }[kind](conditions, sections)


def _complete(
    conditions: Conditions | LoadConditions, sections: Sequence[Section]
) -> list[dict[str, Any]]:
    shared = asdict(conditions)
    return [
        {"section": section.name, **record, **shared}
        for section in sections
        for record in section.records
    ]


def _print_json(conditions: Conditions | LoadConditions, sections: Sequence[Section]) -> None:
    found = {section.name: section.records for section in sections}
    print(json.dumps(asdict(conditions) | found, indent=2))


def _print_jsonl(conditions: Conditions | LoadConditions, sections: Sequence[Section]) -> None:
    for record in _complete(conditions, sections):
        print(json.dumps(record))


def _print_csv(conditions: Conditions | LoadConditions, sections: Sequence[Section]) -> None:
    """One table: columns that a kind of record lacks are empty."""
    records = _complete(conditions, sections)
    names = list(dict.fromkeys(name for record in records for name in record))
    writer = csv.DictWriter(sys.stdout, names, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(records)


def _print_sql(conditions: Conditions | LoadConditions, sections: Sequence[Section]) -> None:
    """A table a section, for sqlite and others."""
    for section in sections:
        records = [record | asdict(conditions) for record in section.records]
        for number, record in enumerate(records):
            table = f"urdir_bench_{section.name}"
            if not number:
                columns = ", ".join(f"{name} {_sql_type(v)}" for name, v in record.items())
                print(f"CREATE TABLE IF NOT EXISTS {table} ({columns});")
            print(f"INSERT INTO {table} VALUES ({', '.join(map(_sql, record.values()))});")


def _sql_type(value: Any) -> str:
    return "TEXT" if isinstance(value, str) else "REAL"


def _sql(value: Any) -> str:
    if isinstance(value, str):
        return "'" + value.replace("'", "''") + "'"
    return "NULL" if value is None else str(float(value))


def _print_md(conditions: Conditions | LoadConditions, sections: Sequence[Section]) -> None:
    print("\n".join(conditions.heading))
    for section in sections:
        print()
        rows = [[cell(row) for cell in section.columns.values()] for row in section.records]
        for line in markdown(list(section.columns), rows):
            print(line)
