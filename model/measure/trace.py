"""A step as a trace of Chrome's format, launch by launch, for Perfetto (ui.perfetto.dev)."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from urdir.driver.execute import Timing
from urdir.driver.graph import RecordedGraph
from urdir.driver.operation import Launch
from urdir.driver.plan import Plan
from urdir.model.errors import ModelError

Event = dict[str, Any]


def step_events(plan: Plan, timings: Iterable[Timing], track: int, name: str) -> Iterator[Event]:
    """The events of one step, on a track of its own: each operation begins where the one before it
    ends, as they were timed. Times are in microseconds."""
    yield {"ph": "M", "name": "thread_name", "pid": 0, "tid": track, "args": {"name": name}}
    start = 0.0
    for timing in timings:
        duration = 1e3 * timing.ms
        yield {
            "ph": "X",
            "name": timing.label,
            "cat": timing.what,
            "pid": 0,
            "tid": track,
            "ts": round(start, 3),
            "dur": round(duration, 3),
            "args": _details(plan, timing),
        }
        start += duration


def graph_tables(graphs: Iterable[RecordedGraph]) -> list[dict[str, Any]]:
    """The nodes of recorded graphs, to join rows of Nsight Systems and CUPTI with."""
    return [
        {"graph": graph.name, "device": graph.device.name, "nodes": graph.table()}
        for graph in graphs
    ]


def write_trace(
    path: Path, events: Iterable[Event], title: str, graphs: Sequence[Mapping[str, Any]] = ()
) -> None:
    """Write events as a JSON object of the Trace Event Format, with tables of ``graphs``. Raises
    ModelError if it cannot."""
    process = {"ph": "M", "name": "process_name", "pid": 0, "args": {"name": title}}
    trace = {
        "traceEvents": [process, *events],
        "displayTimeUnit": "ns",
        "graphs": [*graphs],
        "otherData": {"note": "launched one after the other; each time includes its start-up"},
    }
    try:
        path.write_text(json.dumps(trace) + "\n", encoding="utf-8")
    except OSError as exc:
        raise ModelError(f"cannot write the trace {path}: {exc.strerror}") from exc


def _details(plan: Plan, timing: Timing) -> dict[str, Any]:
    found: dict[str, Any] = {
        "operation": timing.what,
        "index": timing.index,
        "bytes": timing.bytes_moved,
        "GB/s": round(timing.gb_per_s, 1),
    }
    operation = plan[timing.index]
    if isinstance(operation, Launch):
        shape = operation.kernel.launch_shape
        found |= {
            "grid": list(shape.grid),
            "block": list(shape.block),
            "shared bytes": shape.shared_bytes,
            "operations": operation.kernel.flops(),
        }
    return found
