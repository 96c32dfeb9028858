"""Rows of `urdir bench` for prompts and decoding, and launches of decode steps."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from urdir.model.commands import bench_report as report
from urdir.model.commands import options
from urdir.model.commands.bench_conditions import (
    device_conditions,
    device_rates,
    draft_settings,
    draft_source,
    model_source,
)
from urdir.model.commands.bench_printers import Printer, printer
from urdir.model.commands.opening import engine_options, open_engine
from urdir.model.progress import Progress

if TYPE_CHECKING:
    from urdir.model.engine.engine import Engine
    from urdir.model.measure.bench import BenchCase, BenchRow, FailedRow, Rates
    from urdir.model.measure.profile import ProfileRow


def run_model(args: argparse.Namespace) -> int:
    """Measure prompts and decoding; the exit code."""
    from urdir.model.measure.bench import BenchCase, BenchRow, FailedRow
    from urdir.model.measure.profile import ProfileRow, plot_roofline
    from urdir.model.measure.trace import write_trace

    case = BenchCase(
        prompts=args.n_prompt,
        generate=args.n_gen,
        depths=args.n_depth,
        repeats=args.repetitions,
        sequences=args.sequences,
        pairs=tuple(args.pg),
        drafts=draft_settings(args),
    )
    width = max((len(test.name) for test in case.tests), default=0)
    kinds = (BenchRow, FailedRow)
    rows = report.Section("rows", report.ROW_COLUMNS, kinds, {**report.ROW_ROOM, "test": width})
    profiled = report.Section("profile", report.PROFILE_COLUMNS, (ProfileRow,))
    has_profile = bool(args.profile or args.plot or args.trace)
    if not (case.tests or has_profile):
        raise options.UsageError("-p, -n: nothing to measure, all numbers of tokens are 0")
    run = _ModelRun(args, printer(args.output, [rows, profiled] if has_profile else [rows]), rows)
    try:
        for part in case.parts():
            run.measure(part, has_profile)
        if run.conditions is not None and has_profile:
            run.printing.add(run.conditions, profiled, run.profile)
    finally:
        run.printing.end()
    if run.conditions is not None and args.plot:
        title = f"decode step of {run.conditions.model} on {run.conditions.device}"
        plot_roofline(run.profile, run.conditions.read_gb_per_s * 1e9, title, args.plot)
    if run.conditions is not None and args.trace:
        title = f"{run.conditions.model} on {run.conditions.device}"
        write_trace(args.trace, run.trace, title, run.graphs)
    return 1 if run.has_failed or (args.falls and _tell_falls(run.rows)) else 0


def _tell_falls(rows: Sequence[BenchRow]) -> bool:
    """Say on stderr where more sequences give fewer tokens/s; whether they do anywhere."""
    from urdir.model.measure.falls import falls

    found = falls(rows)
    for fall in found:
        print(fall, file=sys.stderr)
    return bool(found)


@dataclass(slots=True)
class _ModelRun:
    """Results of one model so far. Each row is printed as soon as it is measured."""

    args: argparse.Namespace
    printing: Printer
    section: report.Section
    rates: Rates | None = None
    conditions: report.Conditions | None = None
    profile: list[ProfileRow] = field(default_factory=list)
    trace: list[dict[str, Any]] = field(default_factory=list)
    graphs: list[dict[str, Any]] = field(default_factory=list)
    rows: list[BenchRow] = field(default_factory=list)
    has_failed: bool = False

    def measure(self, part: BenchCase, has_profile: bool) -> None:
        """Open the model with memory for one part of the tests, and measure them.

        A test that fails becomes a failed row. If the memory is insufficient for a part, all its
        tests become failed rows. Raises ModelError and DriverError if the model cannot be opened
        at all, DriverError if the device is lost."""
        from urdir.driver.errors import DriverError
        from urdir.model.engine.requests.warm_up import collect_no_graphs
        from urdir.model.errors import ModelError
        from urdir.model.measure.bench import FailedRow, bench, time_step
        from urdir.model.measure.profile import summarise
        from urdir.model.measure.streaming import LinkUse
        from urdir.model.measure.trace import graph_tables, step_events
        from urdir.model.memory.local_choices import stated

        try:
            engine = _open_engine(self.args, part)
        except (DriverError, ModelError) as error:
            if self.conditions is None:
                raise
            self.has_failed = True
            failed = [FailedRow.of(test, error) for test in part.tests]
            self.printing.add(self.conditions, self.section, failed)
            return
        with engine, Progress("measuring", len(part.tests)) as progress:
            collect_no_graphs(engine.session.steps)
            if self.args.routing == "locality" and self.conditions is None:
                progress.note(stated(engine.config))
            rates = self.rates = self.rates or device_rates(engine.device)
            link = LinkUse.of(engine.session) if engine.weights.streamed else None
            for row in progress.over(bench(engine.session, engine.file, rates, part)):
                if isinstance(row, FailedRow):
                    self.has_failed = True
                else:
                    self.rows.append(row)
                    if link is not None:
                        progress.note(link.during(row))
                self._note_conditions(engine, rates)
                self._show(row, progress)
            for count in part.sequences if has_profile else ():
                plan, timings = time_step(engine.session, count)
                self.profile += summarise(plan, timings, rates.read, count)
                self.trace += step_events(plan, timings, count, _step_name(count))
            if self.args.trace:
                self.graphs += graph_tables(engine.session.steps.graphs)
            self._note_conditions(engine, rates)

    def _note_conditions(self, engine: Engine, rates: Rates) -> None:
        name = engine.name
        if self.args.lora is not None:
            name += " with {1} LoRA of rank {0}".format(*self.args.lora)
        self.conditions = device_conditions(engine.device, name, rates, len(engine.group))

    def _show(self, row: BenchRow | FailedRow, progress: Progress) -> None:
        """Print a row, and a short line on stderr if stdout shows nothing to a person yet."""
        assert self.conditions is not None
        with progress.cleared():
            self.printing.add(self.conditions, self.section, [row])
        if self.args.output == "json" or not sys.stdout.isatty():
            progress.note(_line(row))


def _step_name(sequences: int) -> str:
    return "a decode step" + (f" of {sequences} sequences" if sequences > 1 else "")


def _line(row: BenchRow | FailedRow) -> str:
    """Short text of a row."""
    from urdir.model.measure.bench import FailedRow

    if isinstance(row, FailedRow):
        return f"{row.test}: {row.error}"
    return f"{row.test}: {row.tokens_per_second:.1f} tokens/s"


def _open_engine(args: argparse.Namespace, part: BenchCase) -> Engine:
    wanted = replace(
        engine_options(args, model_source(args), part.context),
        kv_dtype=args.cache_type_k or "f16",
        value_dtype=args.cache_type_v or "f16",
        sequences=part.most_sequences,
        chunk=options.chunk(args),
        drafts=part.drafts,
        draft=draft_source(args),
    )
    if args.lora is None:
        return open_engine(wanted)
    from urdir.model.measure.made_adapters import load_made_adapters

    rank, count = args.lora
    engine = open_engine(replace(wanted, max_adapters=count, max_adapter_rank=rank))
    load_made_adapters(engine, rank, count)
    return engine
